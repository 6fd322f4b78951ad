"""What changing a block costs, against depth, against its coupling and against its influence."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from tl_coupling.border import checked
from tl_coupling.plots.labels import NULL_LINE, heading, measure_label, new_figure, plain_legend
from tl_coupling.redundancy import CHANGES, change_and_predictors, check_redundancy, redundancy_correlations
from tl_coupling.statistics import crossed_mean

if TYPE_CHECKING:
    import xarray

# Not the colours of trained and untrained models.
_LOOKS = {"dropped": ("C2", "o"), "swapped": ("C4", "s"), "merged": ("C5", "^")}
# Larger changes in loss are drawn on a logarithmic axis: first and last blocks cost a hundred times what others do.
_LINEAR_UP_TO = 0.1


@checked
def plot_redundancy(data: "xarray.Dataset", *, k: int | None = None, fig: Figure | None = None) -> Figure:
    """Change in loss by depth; and against coupling and block influence, with Spearman's ρ.

    Shows which blocks the model can do without, and whether coupling or block influence would have predicted it. Means
    over prompts; bands are 95 % t intervals of the mean. A pair is drawn between its two layers. Below, a drop is drawn
    at its layer's mean coupling with all others, a swap or merge at the coupling and the mean influence of its pair;
    first and last are hollow, the dashed line is what random subspaces would give. The axis of the change in loss is
    linear up to 0.1 nats, logarithmic beyond.

    Args:
        data: what `layer_redundancy` returned.
        k: how many top singular vectors; the largest number in the data by default.
        fig: where to draw; a new Figure by default.

    Returns the Figure; its Axes are change by depth, against coupling, against influence. In each, lines are dropped,
    swapped, and (where a pair could be merged) merged. Raises ValueError for other data, and a k that is not in them.

    Example:
        >>> fig = plot_redundancy(tlc.redundancy.layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,)))
    """
    check_redundancy(data)
    held = [int(one) for one in data["k"].values]
    k = max(held) if k is None else k
    if k not in held:
        raise ValueError(f"`k` must be among {held}, got {k}")
    fig = new_figure(8.4, 7.4) if fig is None else fig
    panels = fig.subplot_mosaic([["depth", "depth"], ["coupling", "block_influence"]])
    for ax in panels.values():
        ax.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
        ax.set_ylabel("change in loss (nats per token)")
        ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    correlations = redundancy_correlations(data).sel(k=k)
    for change in CHANGES:
        loss_change, coupling, influence = change_and_predictors(data, change)
        if np.isnan(loss_change).all():
            continue
        color, marker = _LOOKS[change]
        depths = np.arange(loss_change.shape[1]) + (0 if change == "dropped" else 0.5)
        mean, half = loss_change.mean(0), crossed_mean(loss_change[:, None])[1]
        panels["depth"].plot(depths, mean, color=color, marker=marker, markersize=4, label=change)
        if len(loss_change) > 1:
            panels["depth"].fill_between(depths, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "", "markersize": 5}
        for predictor, values in (("coupling", coupling[held.index(k)]), ("block_influence", influence)):
            ax, x = panels[predictor], values.mean(0)
            ax.plot(x, mean, label=f"{change}: {_rho(correlations.sel(change=change), predictor)}", **look)
            ax.plot(x[[0, -1]], mean[[0, -1]], markerfacecolor="white", label="_ends", **look)
    panels["depth"].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels["depth"].set_xlabel("layer, or between the two layers of a pair")
    panels["coupling"].set_xlabel(f"{measure_label('coupling', k)}\nwith all others, or of the pair")
    panels["coupling"].axvline(float(data["null_coupling"].sel(k=k)), label="_null", **NULL_LINE)
    panels["block_influence"].set_xlabel("block influence $1 - \\cos$\nof the block, or mean of the pair")
    # The first block's is many times that of the others.
    if float(data["block_influence"].mean("prompt").min()) > 0:
        panels["block_influence"].set_xscale("log")
        # Over a decade or two, names of all minor ticks would overlap.
        axis = panels["block_influence"].xaxis
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    # Above the axes: no corner of a scatter is always free.
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "fontsize": "small"}
    plain_legend(panels["depth"], ncols=3, **place)
    ranked = "Spearman's ρ [95 % over prompts];\ninner: without first and last"
    for predictor in ("coupling", "block_influence"):
        plain_legend(panels[predictor], title=ranked, title_fontsize="small", alignment="left", **place)
    n_prompts = data.sizes["prompt"]
    over = f"\nmean over {n_prompts} prompts" if n_prompts > 1 else ""
    what = "Loss without a block, and with neighbours swapped or merged"
    fig.suptitle(heading(what, [json.loads(data.attrs["provenance"])]) + over, fontsize="medium", parse_math=False)
    return fig


def _rho(correlations: "xarray.Dataset", predictor: str) -> str:
    """ρ and its interval, of all blocks and of the inner ones."""
    said = []
    for blocks in ("all", "inner"):
        one = correlations.sel(blocks=blocks)
        low, high = one[f"{predictor}_interval"].values
        interval = "" if np.isnan(low + high) else f" [{low:+.2f}, {high:+.2f}]"
        said.append("undefined" if np.isnan(one[predictor]) else f"{float(one[predictor]):+.2f}{interval}")
    return ";\ninner ".join(said)
