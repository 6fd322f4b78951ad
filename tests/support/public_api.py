"""What is public: `tl_coupling.__all__`, and the `__all__` of every room that
`tl_coupling` hands out.
"""

import inspect
from typing import Any

import tl_coupling as tlc

ROOMS = {
    name: room for name in dir(tlc) if inspect.ismodule(room := getattr(tlc, name))
}


def homes_of(value: Any) -> list[str]:
    """Return the rooms that hand a function or class out. One of `statistics` may stand in
    others too, and its home is there.
    """
    rooms = [
        room_name
        for room_name, room in ROOMS.items()
        if any(getattr(room, name) is value for name in room.__all__)
    ]
    return ["statistics"] if "statistics" in rooms else rooms


def public_names() -> dict[str, Any]:
    """Return every public function and class, by the shortest name under which users
    reach it; one that a room takes from `statistics` stands there alone.
    """
    names = {f"tl_coupling.{name}": getattr(tlc, name) for name in tlc.__all__}
    for room_name, room in ROOMS.items():
        for name in room.__all__:
            value = getattr(room, name)
            if name not in tlc.__all__ and homes_of(value) == [room_name]:
                names[f"tl_coupling.{room_name}.{name}"] = value
    return names
