"""The picture of the house: a floor for each level, an arrow for each import between rooms that no other implies."""

from html import escape

import networkx

from test_house import LEVELS, imports_between_rooms

WIDTH, ROOM, FLOOR, TOP = 420, 30, 58, 8


def imports() -> networkx.DiGraph:
    """Which room imports which, less what follows from other imports."""
    graph = networkx.DiGraph((room, other) for room, other, _ in imports_between_rooms() if other)
    return networkx.transitive_reduction(graph)


def places() -> dict[str, tuple[float, float, float]]:
    """Centre, top and width of each room, the highest level first."""
    found = {}
    for floor, rooms in enumerate(reversed(LEVELS)):
        names = rooms.split()
        for i, name in enumerate(names):
            width = 22 + 8.2 * len(name)
            found[name] = ((i + 0.5) * WIDTH / len(names), TOP + floor * FLOOR, width)
    return found


def drawing() -> str:
    """SVG that takes its colours from the page."""
    place, parts = places(), []
    for room, other in sorted(imports().edges):
        (x, y, _), (to_x, to_y, _) = place[room], place[other]
        start, end = y + ROOM, to_y - 2
        if to_y == y:
            side = 1 if to_x > x else -1
            start, end = y + ROOM / 2, y + ROOM / 2
            x, to_x = x + side * place[room][2] / 2, to_x - side * (place[other][2] / 2 + 2)
        bend = (end - start) / 2
        parts.append(
            f'<path class="import" d="M{x:.0f} {start:.0f} C{x:.0f} {start + bend:.0f} {to_x:.0f} {end - bend:.0f} '
            f'{to_x:.0f} {end:.0f}"><title>{escape(room)} imports {escape(other)}</title></path>'
        )
    for name, (x, y, width) in place.items():
        parts.append(
            f'<g class="room" id="room-{name}"><rect x="{x - width / 2:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{ROOM}" rx="6"/><text x="{x:.0f}" y="{y + 20}">{escape(name)}</text></g>'
        )
    height = TOP + FLOOR * (len(LEVELS) - 1) + ROOM + TOP
    head = (
        f'<svg class="house" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The rooms of tl_coupling, from the '
        'command line at the top to what needs no other room at the bottom; arrows are imports and point down">'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return head + "".join(parts) + "</svg>\n"
