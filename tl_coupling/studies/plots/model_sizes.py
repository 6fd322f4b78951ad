"""Colours for the widths of models and markers for their depths."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.lines import Line2D

from tl_coupling.pictures import labels

if TYPE_CHECKING:
    import pandas

# As many depths, and widths, as are told apart at a glance.
_MARKERS = "os^Dv"
# The palest shades of the map are lost on white.
_SHADES = (0.0, 0.85)


class ModelSizes(NamedTuple):
    """Widths and depths of a few models, from the smallest."""

    widths: list[int]
    depths: list[int]

    def look(self, width: int, depth: int) -> dict[str, Any]:
        """Return matplotlib's options for the mark of a model of this size."""
        # Where all models have one width, depth alone is marked.
        shade: Any = labels.BLUE
        if len(self.widths) > 1:
            shades = np.linspace(*_SHADES, len(self.widths))
            shade = colormaps["viridis"](shades[self.widths.index(width)])
        return {"color": shade, "marker": _MARKERS[self.depths.index(depth)]}

    def handles(self) -> list[Line2D]:
        """Return what a legend shows: the widths and depths, where these differ."""
        marks: list[Line2D] = []
        if len(self.widths) > 1:
            for width in self.widths:
                color = self.look(width, self.depths[0])["color"]
                marks.append(_mark(f"width {width}", color=color, marker="o"))
        if len(self.depths) > 1:
            for depth in self.depths:
                marker = self.look(self.widths[0], depth)["marker"]
                marks.append(_mark(f"{depth} layers", color="0.3", marker=marker))
        return marks


def _mark(label: str, **look: Any) -> Line2D:
    return Line2D([], [], linestyle="", markersize=5, label=label, **look)


def sizes_of(table: "pandas.DataFrame") -> ModelSizes | None:
    """Return the sizes of a table's models.

    None where a size is not known, where there are more widths or depths than are told
    apart, and where all models are of one size.
    """
    if not {"d_model", "n_layers"} <= set(table):
        return None
    sizes = table[["d_model", "n_layers"]]
    if bool(sizes.isna().any(axis=None)):
        return None
    widths = sorted(sizes["d_model"].astype(int).unique().tolist())
    depths = sorted(sizes["n_layers"].astype(int).unique().tolist())
    n_markers = len(_MARKERS)
    if (
        len(widths) > n_markers
        or len(depths) > n_markers
        or len(widths) * len(depths) == 1
    ):
        return None
    return ModelSizes(widths, depths)
