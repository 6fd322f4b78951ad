"""What Axes hold: lines, labels, panels and colour bars."""

import numpy as np


def tick_labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def named_lines(ax):
    return [line for line in ax.lines if not str(line.get_label()).startswith("_")]


def colour_bar(ax):
    (bar,) = [other for other in ax.figure.axes if other is not ax]
    return bar


def panels(ax, n: int) -> list[np.ndarray]:
    """Return the `n²` panels of a grid, without the empty lines between them."""
    mosaic = ax.images[0].get_array().filled(np.nan)
    kept = ~np.isnan(mosaic).all(axis=0)
    assert np.array_equal(kept, ~np.isnan(mosaic).all(axis=1))
    rows = np.split(mosaic[kept][:, kept], n)
    return [panel for row in rows for panel in np.split(row, n, axis=1)]
