"""Draw the difference of two sets of coupling maps."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tl_coupling.arguments import checked
from tl_coupling.comparisons import Comparison
from tl_coupling.pictures import labels

# The look of the pairs of a layer with itself.
_HATCHED = {"facecolor": "0.95", "hatch": "/////", "edgecolor": "0.6"}


@checked
def plot_comparison(comparison: Comparison, *, fig: Figure | None = None) -> Figure:
    """Draw two maps on one scale, and their difference.

    Read off where the second is coupled more than the first (red) or less (blue). A dot
    marks pairs that differ after the correction for all pairs
    (`Comparison.differing`). Hatched are the pairs of a layer with itself. The mark on
    the first colour bar is what random subspaces give.

    Returns the Figure: a panel for each map, one for the difference, and two colour
    bars.

    Example:
        >>> maps = [tlc.depth_coupling(tlc.trace(model, prompt), k=4) for prompt in prompts]
        >>> fig = tlc.plot_comparison(tlc.compare(maps[:2], maps[2:]))
    """
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 3.4)
    axes = fig.subplots(1, 3, sharex=True, sharey=True)
    is_own = comparison.own_pairs.numpy()
    values = [np.where(is_own, np.nan, side) for side in comparison.values.numpy()]
    difference = np.where(is_own, np.nan, comparison.differences.numpy())
    nulls = comparison.nulls.tolist()
    label = labels.short_measure(comparison.measure)
    bar_options: dict[str, Any] = {"orientation": "horizontal", "pad": 0.02}
    # Both maps and their nulls share one scale; `initial` keeps it open where all is
    # undefined.
    top = np.nanmax([*values[0].ravel(), *values[1].ravel(), *nulls], initial=1e-9)
    for ax, side, name in zip(axes, values, comparison.names, strict=False):
        image = ax.imshow(side, vmin=0, vmax=top)
        # A third of the width has no room for it in one line.
        labels.entitle(ax, labels.short_path(name).replace(" (", "\n("))
    bar = fig.colorbar(
        image, ax=list(axes[:2]), label=label, aspect=40, **bar_options
    ).ax
    # Two maps with different nulls have no mark: it would be true of one of them only.
    null = labels.one_null(nulls)
    if null is not None:
        labels.mark_and_name_null(bar, null, is_upright=False)
    largest = np.nanmax(np.abs(difference), initial=1e-9)
    image = axes[2].imshow(difference, cmap="RdBu_r", vmin=-largest, vmax=largest)
    rows, columns = np.nonzero(comparison.differing().numpy())
    # `nonzero` gives rows first; in the picture these are y.
    axes[2].scatter(columns, rows, s=4, color="black", linewidths=0)
    labels.entitle(axes[2], "second − first")
    difference_bar = fig.colorbar(
        image, ax=axes[2], label="difference", aspect=18, **bar_options
    )
    # A third of the width has room for three numbers.
    marked = [-largest, 0.0, largest]
    difference_bar.set_ticks(
        marked, labels=[labels.signed(value, ".2g") for value in marked]
    )
    for ax in axes:
        _name_layers(ax, comparison)
    axes[0].set_ylabel("whose Jacobian (layer)")
    n_pairs = int((~is_own).sum())
    dots = f"dots: {len(rows)} of {n_pairs} pairs differ (Holm, 5 %)"
    own = "hatched: a layer with itself"
    title = f"{_format_difference(comparison)} · k = {comparison.k}\n{dots} · {own}"
    labels.entitle(fig, title)
    return fig


def _format_difference(comparison: Comparison) -> str:
    """Return the difference in the mean, with its interval."""
    low, high = comparison.interval
    text = f"Mean difference {labels.signed(comparison.mean_difference, '+.3f')}"
    if np.isnan(low):
        return f"{text}, one prompt"
    ends = f"{labels.signed(low, '+.3f')}, {labels.signed(high, '+.3f')}"
    return f"{text}, 95 % [{ends}]"


def _name_layers(ax: Axes, comparison: Comparison) -> None:
    ax.patch.set(**_HATCHED)
    ax.set_xlabel("whose singular\nvectors (layer)")
    labels.name_ticks(ax.xaxis, comparison.col_layers, labels.MAX_TICKS_BELOW)
    labels.name_ticks(ax.yaxis, comparison.row_layers, labels.MAX_TICKS_BESIDE)
