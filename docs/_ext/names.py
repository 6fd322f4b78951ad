"""The page that each public name stands on. Needs no Sphinx."""

import functools
import inspect
import re
from pathlib import Path

import tl_coupling
from public_api import ROOMS, public_names

HOMES: dict[str, str] = tl_coupling._HOMES


def at_the_top(room: str) -> list[str]:
    """Names of a room that `tl_coupling` itself hands out, each with a page of its
    own.
    """
    return [name for name, home in HOMES.items() if home == f"tl_coupling.{room}"]


def in_the_room(room: str) -> list[str]:
    """Return the other public names of a room, which stand on its page."""
    start = f"tl_coupling.{room}."
    names = [
        name.removeprefix(start) for name in public_names() if name.startswith(start)
    ]
    return sorted(names, key=lambda name: (name.lower(), name))


@functools.cache
def plot_groups() -> dict[str, list[str]]:
    """Return the `plot_*` by their headings in the gallery, as it lists them."""
    groups: dict[str, list[str]] = {}
    text = Path(__file__).parents[1].joinpath("gallery.md").read_text()
    for section in text.split("\n## ")[1:]:
        if names := re.findall(r"^(plot_\w+)(?: \[.+?\])?: ", section, re.MULTILINE):
            groups[section.partition("\n")[0]] = names
    return groups


def page_of_group(heading: str) -> str:
    """Return the page of a group of plots, without its ending."""
    words = re.findall(r"[a-z]+", heading.lower())
    return f"api/plots/{'-'.join(words)}"


def page_of(name: str) -> str:
    """Return the page that documents `tl_coupling.name` or `tl_coupling.room.name`,
    without its ending. Plots that have no page of their own stand by group.

    >>> page_of("tl_coupling.depth_coupling"), page_of("tl_coupling.Trace"), page_of("tl_coupling.spectra.asymmetry")
    ('api/comparisons/depth_coupling', 'api/blocks/class-Trace', 'api/spectra/index')
    """
    first, *rest = name.removeprefix("tl_coupling.").split(".")
    if first == "plots" and rest:
        for heading, names in plot_groups().items():
            if rest[0] in names:
                return page_of_group(heading)
    if rest or first in ROOMS:
        return f"api/{first}/index"
    # Not every file system tells `trace` from `Trace`.
    kind = "class-" if inspect.isclass(getattr(tl_coupling, first)) else ""
    return f"api/{HOMES[first].rpartition('.')[2]}/{kind}{first}"


def documented() -> dict[str, str]:
    """Every public name and its page."""
    return {name: page_of(name) for name in public_names()}
