"""Names beside the points of a scatter plot, where they cover least."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox, BboxBase

from tl_coupling.pictures import labels

_POINTS_PER_INCH = 72
# Where a name may stand, seen from its point: beside it first, further away where
# something is in the way.
_DISTANCES = (5.0, 12.0, 20.0, 28.0, 38.0)
_DIRECTIONS = np.array(
    [(x, y) for x, y in product((1, -1, 0), (0, 1, -1)) if (x, y) != (0, 0)]
)
# A thin line leads from a name to its point where they stand apart.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "color": "0.6",
    "linewidth": 0.7,
    "shrinkA": 0,
    "shrinkB": 5,
}


def name_points(
    ax: Axes,
    x: Float[np.ndarray, " n_points"],
    y: Float[np.ndarray, " n_points"],
    models: Sequence[str],
) -> None:
    """Write a model's name at each point.

    A name stands where it covers least of the other names, the points and the curves.
    """
    figure = ax.figure.canvas.figure
    # Only after layout is it known how large a name is on the axes.
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / _POINTS_PER_INCH
    points = ax.transData.transform(np.column_stack([x, y]))
    axes_box = ax.get_window_extent()
    # Six points across: the size of a mark.
    taken = [_box_around(point, 3 * pixels_per_point) for point in points]
    taken += _boxes_of_lines(ax, 3 * pixels_per_point, pixels_per_point)
    for xy, point, name in zip(
        zip(x, y, strict=True), points, labels.short_names(models), strict=True
    ):
        label = ax.annotate(
            name,
            xy,
            (0, 0),
            arrowprops=_LEADER,
            textcoords="offset points",
            fontsize="small",
            va="bottom",
            parse_math=False,
        )
        # The size is that of the text alone: an annotation's would include its line.
        size = np.array(Text.get_window_extent(label).size)
        corners = [
            # Lower left corner: `direction - 1` moves the name by its whole size for
            # −1, by half of it for 0, and not at all for 1.
            point + distance * pixels_per_point * direction + (direction - 1) / 2 * size
            for distance, direction in product(_DISTANCES, _DIRECTIONS)
        ]
        boxes = [Bbox.from_bounds(*corner, *size) for corner in corners]
        best = _least_covering(boxes, taken, axes_box)
        taken.append(boxes[best])
        label.set_position(tuple((corners[best] - point) / pixels_per_point))


def _box_around(point: Float[np.ndarray, "2"], half_width: float) -> Bbox:
    return Bbox([point - half_width, point + half_width])


def _boxes_of_lines(ax: Axes, of_points: float, of_curves: float) -> list[Bbox]:
    """Return boxes of these half widths around every drawn point, and small ones along
    every curve; dashed lines may be covered.
    """
    boxes = []
    for line in ax.lines:
        style = line.get_linestyle()
        path = ax.transData.transform_path(line.get_path())
        if style == "None":
            points = np.asarray(path.vertices)
            boxes += [_box_around(point, of_points) for point in points]
        elif style != "--":
            vertices = np.asarray(path.interpolated(3).vertices)
            boxes += [_box_around(point, of_curves) for point in vertices]
    return boxes


def _least_covering(
    boxes: Sequence[Bbox], taken: Sequence[Bbox], axes_box: BboxBase
) -> int:
    """Return the nearest of the boxes that cover least, if possible inside the axes."""

    def cost(i: int) -> tuple[bool, int]:
        n_corners_inside = axes_box.count_contains(boxes[i].corners())
        return bool(n_corners_inside < 4), int(boxes[i].count_overlaps(taken))

    # `min` returns the first of equals, and boxes come from the nearest.
    return min(range(len(boxes)), key=cost)
