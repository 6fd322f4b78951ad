"""What each block is worth: the loss without it, against depth and coupling."""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.plots import labels
from tl_coupling.redundancy import CHANGES, change_and_predictors, check_redundancy
from tl_coupling.statistics import crossed_mean

if TYPE_CHECKING:
    import xarray


class _Look(NamedTuple):
    color: str
    marker: str


# Of changed blocks; not the colours of trained and untrained models. Without a mark: by
# depth alone.
_LOOKS = {
    "dropped": _Look("C2", "o"),
    "swapped": _Look("C4", "s"),
    "merged": _Look("C5", "^"),
    "projected": _Look("C8", ""),
    "exited": _Look("C7", ""),
}
# Larger changes in loss are drawn on a logarithmic axis: first and last blocks cost a
# hundred times what others do.
_LINEAR_UP_TO = 0.1
_TITLE = (
    "Loss without a block, with neighbours swapped or merged, projected, and left early"
)


@checked
def plot_redundancy(
    data: "xarray.Dataset",
    correlations: "xarray.Dataset",
    *,
    k: int | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw the loss without each block by depth, by coupling and by block influence.

    The picture shows whether the model can do without a block, and whether coupling or
    block influence would have predicted it. Means over prompts; bands are 95 % t
    intervals of the mean. A pair is drawn between its two layers. Lines without marks
    are of blocks that write into the k shared directions alone, and of models that are
    left after a block. Below, a drop is drawn at its layer's mean coupling with all
    others, a swap or merge at the coupling and the mean influence of its pair; first
    and last are hollow, the dashed line is what random subspaces would give. The axis
    of the change in loss is linear up to 0.1 nats, logarithmic beyond.

    Args:
        data: of `layer_redundancy`.
        correlations: Spearman's ρ of these data, of `redundancy_correlations`.
        k: the number of singular vectors; the largest of the data by default.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are change by depth, against coupling, against
    influence. In each, lines are dropped, swapped, and (where a pair could be merged)
    merged; by depth also projected and exited.

    Raises:
        ValueError: other data, or a k that is not in them.

    Example:
        >>> prompts = ["w1 w2 w3", "w4 w5 w6"]
        >>> data = tlc.redundancy.layer_redundancy(model, prompts, k=(4,))
        >>> correlations = tlc.redundancy.redundancy_correlations(data)
        >>> fig = tlc.plots.plot_redundancy(data, correlations)
    """
    check_redundancy(data)
    measured = [int(k) for k in data["k"].values]
    k = max(measured) if k is None else k
    if k not in measured:
        raise ValueError(f"`k` must be among {measured}, got {k}")
    fig = fig or labels.new_figure(8.4, 7.4)
    panels = fig.subplot_mosaic([["depth", "depth"], ["coupling", "block_influence"]])
    for ax in panels.values():
        ax.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
        ax.set_ylabel("change in loss (nats per token)")
        ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    at_k = data.sel(k=k)
    for change, look in _LOOKS.items():
        # Data of earlier versions have no projections and no exits.
        losses = at_k.get(f"loss_{change}")
        if losses is None or bool(losses.isnull().all()):
            continue
        loss_change = (losses - at_k["loss"]).transpose("prompt", ...).values
        # A pair stands between its two layers.
        first_depth = 0.5 if "pair" in losses.dims else 0.0
        depth = np.arange(loss_change.shape[1]) + first_depth
        _draw_by_depth(panels["depth"], depth, loss_change, look, _name(change, k))
        if change in CHANGES:
            _, coupling, influence = change_and_predictors(data, change)
            predictors = {
                "coupling": coupling[measured.index(k)],
                "block_influence": influence,
            }
            ranked = correlations.sel(k=k, change=change)
            for predictor, values in predictors.items():
                label = f"{change}: {_rho(ranked, predictor)}"
                mean = loss_change.mean(0)
                _draw_by_predictor(panels[predictor], values, mean, look, label)
    _label_depth(panels["depth"])
    null = float(data["null_coupling"].sel(k=k))
    _label_coupling(panels["coupling"], k, null)
    # The first block's is many times that of the others.
    is_positive = float(data["block_influence"].mean("prompt").min()) > 0
    _label_influence(panels["block_influence"], is_log=is_positive)
    title = labels.heading(_TITLE, [json.loads(data.attrs["provenance"])])
    n_prompts = data.sizes["prompt"]
    if n_prompts > 1:
        title += f"\nmean over {n_prompts} prompts"
    labels.entitle(fig, title)
    return fig


def _name(change: str, k: int) -> str:
    """Return what the legend calls a change."""
    if change == "projected":
        return f"projected onto {k} shared directions"
    return "left after it" if change == "exited" else change


def _draw_by_depth(
    ax: Axes,
    depth: Float[np.ndarray, " n_changes"],
    loss_change: Float[np.ndarray, "n_prompts n_changes"],
    look: _Look,
    label: str,
) -> None:
    """Draw the mean change in loss by depth, with its interval over prompts."""
    mean = loss_change.mean(0)
    _, half_width = crossed_mean(loss_change[:, None])
    ax.plot(
        depth, mean, color=look.color, marker=look.marker, markersize=4, label=label
    )
    if len(loss_change) > 1:
        low = mean - half_width
        high = mean + half_width
        ax.fill_between(depth, low, high, color=look.color, alpha=0.2, linewidth=0)


def _draw_by_predictor(
    ax: Axes,
    predictor: Float[np.ndarray, "n_prompts n_changes"],
    mean_change: Float[np.ndarray, " n_changes"],
    look: _Look,
    label: str,
) -> None:
    """Draw the mean change in loss by coupling or influence; both ends are hollow."""
    x = predictor.mean(0)
    marks: dict[str, Any] = {
        "color": look.color,
        "marker": look.marker,
        "linestyle": "",
        "markersize": 5,
    }
    ends = [0, -1]
    ax.plot(x, mean_change, label=label, **marks)
    ax.plot(x[ends], mean_change[ends], markerfacecolor="white", label="_ends", **marks)


def _label_depth(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("layer, or between the two layers of a pair")
    labels.plain_legend(ax, ncols=3, **labels.ABOVE)


def _label_coupling(ax: Axes, k: int, null: float) -> None:
    measure = labels.measure_label("coupling", k)
    ax.set_xlabel(f"{measure}\nwith all others, or of the pair")
    ax.axvline(null, label="_null", **labels.NULL_LINE)
    _add_legend_of_ranks(ax)


def _label_influence(ax: Axes, is_log: bool) -> None:
    ax.set_xlabel("block influence $1 - \\cos$\nof the block, or mean of the pair")
    if is_log:
        ax.set_xscale("log")
        # Over a decade or two, names of all minor ticks would overlap.
        ax.xaxis.set(
            major_locator=LogLocator(subs=(1.0, 3.0)),
            major_formatter="{x:g}",
            minor_formatter="",
        )
    _add_legend_of_ranks(ax)


def _add_legend_of_ranks(ax: Axes) -> None:
    labels.plain_legend(
        ax,
        title="Spearman's ρ [95 % over prompts];\ninner: without first and last",
        title_fontsize="small",
        alignment="left",
        **labels.ABOVE,
    )


def _rho(correlations: "xarray.Dataset", predictor: str) -> str:
    """Write ρ with its interval, of all blocks and of the inner ones."""
    texts = []
    for blocks in ("all", "inner"):
        of_blocks = correlations.sel(blocks=blocks)
        if np.isnan(of_blocks[predictor]):
            texts.append("undefined")
            continue
        text = f"{float(of_blocks[predictor]):+.2f}"
        low, high = of_blocks[f"{predictor}_interval"].values
        if not np.isnan(low + high):
            text += f" [{low:+.2f}, {high:+.2f}]"
        texts.append(text)
    return ";\ninner ".join(texts)
