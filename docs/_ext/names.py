"""The public names, by room, and the page that each stands on. Needs no Sphinx."""

import importlib
import inspect
from types import ModuleType
from typing import Any

import tl_coupling

HOMES: dict[str, str] = tl_coupling._HOMES
ROOMS = [name for name, home in HOMES.items() if home == "tl_coupling"]


def is_documented_alone(thing: Any) -> bool:
    """Functions and classes are; aliases of types and constants stand in a table."""
    return inspect.isroutine(thing) or inspect.isclass(thing)


def public_names(room: str) -> list[str]:
    """What a room hands out: its `__all__`, or else what is its own and has no underscore."""
    module = importlib.import_module(f"tl_coupling.{room}")
    return sorted(getattr(module, "__all__", None) or _own(module), key=lambda name: (name.lower(), name))


def _own(module: ModuleType) -> list[str]:
    public = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    return [
        name
        for name, thing in public.items()
        if is_documented_alone(thing) and f"{thing.__module__}.".startswith(f"{module.__name__}.")
    ]


def at_the_top(room: str) -> list[str]:
    """Names of a room that are handed out by `tl_coupling` itself, each with a page of its own."""
    return [name for name, home in HOMES.items() if home == f"tl_coupling.{room}"]


def page_of(name: str) -> str:
    """The page that documents `tl_coupling.name` or `tl_coupling.room.name`, without its ending.

    >>> page_of("tl_coupling.depth_coupling"), page_of("tl_coupling.Trace"), page_of("tl_coupling.spectra.asymmetry")
    ('api/comparisons/depth_coupling', 'api/blocks/class-Trace', 'api/spectra/index')
    """
    room, *rest = name.removeprefix("tl_coupling.").split(".")
    if rest or room in ROOMS:
        return f"api/{room}/index"
    # Not every file system tells `trace` from `Trace`.
    kind = "class-" if inspect.isclass(getattr(tl_coupling, room)) else ""
    return f"api/{HOMES[room].rpartition('.')[2]}/{kind}{room}"


def documented() -> dict[str, str]:
    """Every public function and class by the name it is documented under, and its page."""
    found = [f"tl_coupling.{name}" for room in ROOMS for name in at_the_top(room)]
    for room in ROOMS:
        module, top = importlib.import_module(f"tl_coupling.{room}"), set(at_the_top(room))
        names = [name for name in public_names(room) if name not in top]
        found += [f"{module.__name__}.{name}" for name in names if is_documented_alone(getattr(module, name))]
    return {name: page_of(name) for name in found}
