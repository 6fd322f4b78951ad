"""What each block is worth: the loss without it, against depth and coupling."""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.statistics import crossed_mean
from tl_coupling.studies.redundancy import (
    CHANGES,
    change_and_predictors,
    check_redundancy,
)

if TYPE_CHECKING:
    import xarray


# The colours of changed blocks, none of which is that of trained or untrained models.
_COLORS = {
    "dropped": labels.GREEN,
    "swapped": labels.PINK,
    "merged": labels.ORANGE,
    "projected": labels.SKY,
    "exited": labels.BLACK,
}
# In inches.
_PANEL_HEIGHT = 1.9
# Some blocks cost a hundred times what others do: where one costs this many times the
# median, the axis is logarithmic beyond it.
_FAR_ABOVE = 10.0
# A rank correlation of fewer blocks says nothing.
_FEWEST_RANKED = 5
_TITLE = "Change in loss without a block, or with blocks changed"
_RANKS = "ρ: Spearman's, of all blocks and without first and last (hollow)"


class _Change(NamedTuple):
    """What one change of the blocks does to the loss."""

    depth: Float[np.ndarray, " n_changes"]
    mean: Float[np.ndarray, " n_changes"]
    half_width: Float[np.ndarray, " n_changes"]
    color: str

    @property
    def end_of_linear(self) -> float | None:
        """Where a logarithmic axis begins, a power of ten; None if none is needed."""
        sizes = np.abs(self.mean[np.isfinite(self.mean)])
        middle = float(np.median(sizes))
        if not sizes.max() > _FAR_ABOVE * middle > 0:
            return None
        return float(10 ** np.floor(np.log10(middle)))


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
    block influence would have predicted it. A row is a change: blocks dropped,
    neighbours swapped, neighbours merged. Means over prompts; bars are 95 % t intervals
    of the mean. A pair is drawn between its two layers. A drop stands at its layer's
    mean coupling with all others, a swap or merge at the coupling and the mean
    influence of its pair; first and last are hollow, the dashed line is what random
    subspaces would give. Below, of blocks that write into the k shared directions alone
    and of models that are left after a block, by depth.
    Every row has its own axis. Where one block costs many times more than the others,
    it is linear near 0 and logarithmic from there.

    Args:
        data: of `layer_redundancy`.
        correlations: Spearman's ρ of these data, of `redundancy_correlations`.
        k: the number of singular vectors; the largest of the data by default.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are, for dropped, swapped and (where a pair could be
    merged) merged, the change by depth, against coupling and against influence; then by
    depth projected and exited, where they were measured. The first line of each are the
    means.

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
    data_at_k = data.sel(k=k)
    changes = _changes(data_at_k)
    predicted = [change for change in changes if change in CHANGES]
    unpredicted = [change for change in changes if change not in CHANGES]
    n_rows = len(predicted) + bool(unpredicted)
    height = 1.3 + _PANEL_HEIGHT * n_rows
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, height)
    grid = fig.add_gridspec(n_rows, 3)
    null = float(data["null_coupling"].sel(k=k))
    # The first block's is many times that of the others.
    is_log = float(data["block_influence"].mean("prompt").min()) > 0
    columns: list[list[Axes]] = [[], [], []]
    for row, name in enumerate(predicted):
        # Shared before anything is drawn, so that all rows count for the limits.
        panels = [
            fig.add_subplot(grid[row, place], sharex=column[0] if column else None)
            for place, column in enumerate(columns)
        ]
        _, coupling, influence = change_and_predictors(data, name)
        change = changes[name]
        _draw_by_depth(panels[0], change, _name(name, k))
        predictors = {
            "coupling": coupling[measured.index(k)],
            "block_influence": influence,
        }
        ranked = correlations.sel(k=k, change=name)
        for ax, (predictor, values) in zip(panels[1:], predictors.items(), strict=True):
            _draw_by_predictor(ax, values.mean(0), change)
            ax.set_title(_rho(ranked, predictor, len(change.mean)), fontsize="small")
        panels[1].axvline(
            null, label=f"{RANDOM_SUBSPACES}, {null:.3f}", **labels.NULL_LINE
        )
        if is_log:
            _make_logarithmic(panels[2])
        for column, ax in zip(columns, panels, strict=True):
            column.append(ax)
    for place, name in enumerate(unpredicted):
        ax = fig.add_subplot(grid[-1, place])
        _draw_by_depth(ax, changes[name], _name(name, k))
        ax.set_xlabel("layer", fontsize="small")
    measure = labels.measure_label("coupling", k).replace(" (", "\n(")
    x_labels = (
        "layer, or\nbetween two",
        f"{measure}, with all\nothers, or of the pair",
        "block influence\n$1 - \\cos$, or mean\nof the pair",
    )
    for column, label in zip(columns, x_labels, strict=True):
        column[-1].set_xlabel(label, fontsize="small")
    lowest, highest = columns[2][0].get_xlim()
    # Over less than a decade a logarithmic axis would number more ticks than have room.
    few_ticks = (
        columns[1] if is_log and highest > 10 * lowest else columns[1] + columns[2]
    )
    for ax in few_ticks:
        ax.xaxis.set_major_locator(MaxNLocator(2))
    for ax in fig.axes:
        ax.tick_params(labelsize="small")
    labels.legend_below(fig, columns[1][0])
    title = labels.heading(_TITLE, [json.loads(data.attrs["provenance"])])
    n_prompts = data.sizes["prompt"]
    if n_prompts > 1:
        title += f"\nmeans over {n_prompts} prompts, bars: 95 % t interval"
    title += f"\n{_RANKS}"
    labels.entitle(fig, title)
    return fig


def _changes(data_at_k: "xarray.Dataset") -> dict[str, _Change]:
    """Return what every change that was measured does to the loss."""
    changes = {}
    for name, color in _COLORS.items():
        # Data of earlier versions have no projections and no exits.
        losses = data_at_k.get(f"loss_{name}")
        if losses is None or bool(losses.isnull().all()):
            continue
        loss_change = (losses - data_at_k["loss"]).transpose("prompt", ...).values
        # A pair stands between its two layers.
        first_depth = 0.5 if "pair" in losses.dims else 0.0
        depth = np.arange(loss_change.shape[1]) + first_depth
        # One prompt has no interval.
        half_width = np.full(len(depth), np.nan)
        if len(loss_change) > 1:
            _, half_width = crossed_mean(loss_change[:, None])
        changes[name] = _Change(depth, loss_change.mean(0), half_width, color)
    return changes


def _name(change: str, k: int) -> str:
    """Return what the title of a panel calls a change."""
    names = {
        "dropped": "block dropped",
        "swapped": "neighbours swapped",
        "merged": "neighbours merged",
        "projected": f"projected onto {k}\nshared directions",
        "exited": "early exit\nafter the block",
    }
    return names[change]


def _draw_by_depth(ax: Axes, change: _Change, title: str) -> None:
    """Draw the mean change in loss by depth, with its interval over prompts."""
    _draw_means(ax, change.depth, change, joined=True)
    if not np.isnan(change.half_width).all():
        low = change.mean - change.half_width
        high = change.mean + change.half_width
        ax.vlines(change.depth, low, high, color=change.color, alpha=0.5, linewidth=1)
    ax.set_title(title, fontsize="small")
    ax.set_ylabel("nats per token", fontsize="small")
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def _draw_by_predictor(
    ax: Axes, x: Float[np.ndarray, " n_changes"], change: _Change
) -> None:
    """Draw the mean change in loss by coupling or influence; both ends are hollow."""
    _draw_means(ax, x, change, joined=False)
    ends = [0, -1]
    look: dict[str, Any] = {"color": change.color, "markerfacecolor": "white"}
    ax.plot(x[ends], change.mean[ends], "o", markersize=4, label="_ends", **look)


def _draw_means(
    ax: Axes, x: Float[np.ndarray, " n_changes"], change: _Change, joined: bool
) -> None:
    """Draw the means, on an axis on which those of all blocks are seen."""
    line_style = "-" if joined else ""
    look: dict[str, Any] = labels.marked(change.color) | {"linewidth": 1}
    ax.plot(x, change.mean, linestyle=line_style, label="_means", **look)
    ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    end = change.end_of_linear
    if end is not None:
        ax.set_yscale("symlog", linthresh=end)
        largest = float(np.nanmax(np.abs(change.mean)))
        decades = np.arange(int(np.log10(largest / end)) + 1)
        ticks = [0.0, *(end * 10.0**decades)]
        ax.set_yticks(ticks, [labels.signed(tick) for tick in ticks])
        ax.minorticks_off()


def _make_logarithmic(ax: Axes) -> None:
    ax.set_xscale("log")
    # Names of other ticks than powers of ten would overlap.
    ax.xaxis.set(
        major_locator=LogLocator(), major_formatter="{x:g}", minor_formatter=""
    )


def _rho(correlations: "xarray.Dataset", predictor: str, n_changes: int) -> str:
    """Write ρ of all blocks and of the inner ones, where they are not too few."""
    texts = []
    for blocks, name, n_points in (
        ("all", "ρ", n_changes),
        ("inner", "inner", n_changes - 2),
    ):
        if n_points < _FEWEST_RANKED:
            continue
        rho = float(correlations.sel(blocks=blocks)[predictor])
        value = "undefined" if np.isnan(rho) else labels.signed(rho, "+.2f")
        texts.append(f"{name} {value}")
    return "\n".join(texts)
