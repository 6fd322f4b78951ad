"""The first page of the API reference: the names that most analyses need, and then all
others by task. Needs no Sphinx.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import tl_coupling
from names import ROOMS, at_the_top, in_the_room

# What `tlc.` shows on tab.
FRONT: tuple[str, ...] = tl_coupling._FRONT
# Rooms by what they are for, in the order of an analysis.
TASKS: dict[str, tuple[str, ...]] = {
    "Load models and prompts": ("models", "prompts"),
    "Trace and differentiate": (
        "traces",
        "jacobians",
        "spectra",
        "blocks",
        "gradients",
    ),
    "Measure coupling": ("comparisons", "measures", "influence"),
    "Follow the residual stream": ("trajectories", "dynamics"),
    "Read, steer and remove directions": ("directions",),
    "Watch training": ("training",),
    "Draw and report": ("plots", "interactive", "portraits", "report"),
    "Compare many models": ("surveys", "statistics", "generalization", "redundancy"),
}


def heading(title: str, line: str = "=") -> str:
    """Return a title with a line below it."""
    return f"{title}\n{line * len(title)}\n\n"


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(thing.__doc__).split("\n\n")[0].split())


def table(names: Sequence[str], module: Any, kind: str = "names") -> str:
    """Return names with the first paragraphs of their docstrings.

    `kind` is the class of the table, which says how it looks.
    """
    rows = [
        f"   * - `~{module.__name__}.{name}`\n     - {first_paragraph(getattr(module, name))}\n"
        for name in names
    ]
    return (
        f".. list-table::\n   :widths: 34 66\n   :class: {kind}\n\n"
        + "".join(rows)
        + "\n"
    )


def front_page() -> str:
    """Return the source of the page: each public name stands on it once."""
    text = heading("API reference")
    text += (
        "Most analyses need these names, in this order of use. They are what `tlc.` shows "
        "on tab, beside the rooms.\n\n"
    )
    text += table(FRONT, tl_coupling, "names front")
    text += (
        "All others are below, by task. Names of a table can be written "
        "``tlc.name``, those of a list ``tlc.room.name``. At the end stands what all "
        "examples share.\n\n"
    )
    for task, rooms in TASKS.items():
        text += heading(task, "-")
        for room in rooms:
            text += _room(room)
    text += heading("What examples share", "-")
    text += ".. automodule:: tl_coupling\n\n"
    listed_rooms = [room for rooms in TASKS.values() for room in rooms]
    entries = "".join(f"   {room}/index\n" for room in listed_rooms)
    return f"{text}.. toctree::\n   :hidden:\n\n{entries}"


def _room(room: str) -> str:
    """Return what a room is, and those of its names that are not in the first table."""
    text = heading(room, "~")
    # Where a room's names come from is on its own page.
    purpose = first_paragraph(ROOMS[room]).partition(": public names of")[0].rstrip(".")
    text += f"{purpose}: `tl_coupling.{room}`\n\n"
    if top := [name for name in at_the_top(room) if name not in FRONT]:
        text += table(top, tl_coupling)
    if own := in_the_room(room):
        links = ", ".join(f"`~tl_coupling.{room}.{name}`" for name in own)
        text += f"In `tl_coupling.{room}`: {links}\n\n"
    return text
