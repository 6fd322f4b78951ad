"""The picture of the house: a floor for each level, an arrow for each import between
rooms that no other implies.
"""

import networkx

from rooms import LEVELS, imports_between_rooms

WIDTH = 640
HEIGHT = 30
FLOOR = 60
MARGIN = 4
# Where the middle of each room is, from left to right, so that no arrow runs through a
# room.
MIDDLES = {
    "cli": 458,
    "studies.plots": 268,
    "studies.redundancy": 360,
    "studies.generalization": 151,
    "studies.surveys": 359,
    "pictures": 249,
    "interactive": 147,
    "report": 40,
    "portraits": 446,
    "directions": 108,
    "training": 529,
    "comparisons": 374,
    "influence": 495,
    "trajectories": 136,
    "dynamics": 257,
    "jacobians": 405,
    "blocks": 194,
    "spectra": 426,
    "measures": 525,
    "statistics": 259,
    "models": 202,
    "prompts": 108,
    "arguments": 238,
    "progress": 130,
    "files": 433,
    "results": 344,
    "interrupts": 373,
}


def imports() -> networkx.DiGraph:
    """Which room imports which, less what follows from other imports."""
    graph = networkx.DiGraph(
        (room, other) for room, other, _ in imports_between_rooms() if other
    )
    return networkx.transitive_reduction(graph)


def places() -> dict[str, tuple[float, float, float]]:
    """Middle, top and width of each room, the highest level first."""
    floors = [rooms.split() for rooms in reversed(LEVELS)]
    return {
        name: (MIDDLES[name], MARGIN + floor * FLOOR, 22 + 8.2 * len(name))
        for floor, names in enumerate(floors)
        for name in names
    }


def arrows() -> dict[tuple[str, str], tuple[float, float, float, float]]:
    """From where to where each goes: from floor to ceiling, or from wall to wall on one
    floor.
    """
    place, found = places(), {}
    for room, other in sorted(imports().edges):
        (x, y, width), (to_x, to_y, to_width) = place[room], place[other]
        if y == to_y:
            side = 1 if to_x > x else -1
            x, to_x, y, to_y = (
                x + side * width / 2,
                to_x - side * to_width / 2,
                y + HEIGHT / 2,
                y + HEIGHT / 2,
            )
        else:
            y += HEIGHT
        found[room, other] = x, y, to_x, to_y
    return found


def drawing() -> str:
    """SVG that takes its colours from the page."""
    place = places()
    parts = [
        (
            f'<path class="import" d="M{x:.0f} {y:.0f}L{to_x:.0f} '
            f'{to_y:.0f}"><title>{room} imports {other}</title></path>'
        )
        for (room, other), (x, y, to_x, to_y) in arrows().items()
    ]
    for name, (x, y, width) in place.items():
        parts.append(
            f'<g class="room" id="room-{name}"><rect '
            f'x="{x - width / 2:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{HEIGHT}" rx="6"/><text x="{x:.0f}" y="{y + 20}">{name}</text></g>'
        )
    height = MARGIN + FLOOR * len(LEVELS)
    said = "Arrows are imports; those that others imply are left out."
    parts.append(
        f'<text class="said" x="{WIDTH / 2:.0f}" y="{height - 8}">{said}</text>'
    )
    head = (
        f'<div class="house"><svg class="house" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="The rooms of tl_coupling, from the '
        "command line at the top to what needs no other room at the "
        'bottom; arrows are imports and point down">'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return head + "".join(parts) + "</svg></div>\n"
