"""What is public: `tl_coupling.__all__`, and the `__all__` of every room that
`tl_coupling` hands out.
"""

import inspect
from typing import Any

import tl_coupling as tlc

ROOMS = {
    name: room for name in dir(tlc) if inspect.ismodule(room := getattr(tlc, name))
}


def public_names() -> dict[str, Any]:
    """Every public function and class, by the shortest name under which users reach
    it.
    """
    found = {f"tl_coupling.{name}": getattr(tlc, name) for name in tlc.__all__}
    for room in ROOMS.values():
        of_room = {name: getattr(room, name) for name in room.__all__}
        found |= {
            f"{room.__name__}.{name}": of_room[name]
            for name in of_room
            if name not in tlc.__all__
        }
    return found
