"""What Axes hold: lines, labels, panels and colour bars."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D


def tick_labels(axis: Axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def named_lines(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if not str(line.get_label()).startswith("_")]


def colour_bar(ax: Axes) -> Axes:
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    return bar


def panels(ax: Axes, n: int) -> list[np.ndarray]:
    """Return the `n²` panels of a grid, without the empty lines between them."""
    values = ax.images[0].get_array()
    assert isinstance(values, np.ma.MaskedArray)
    mosaic = values.filled(np.nan)
    is_drawn = ~np.isnan(mosaic).all(axis=0)
    assert np.array_equal(is_drawn, ~np.isnan(mosaic).all(axis=1))
    rows = np.split(mosaic[is_drawn][:, is_drawn], n)
    return [panel for row in rows for panel in np.split(row, n, axis=1)]
