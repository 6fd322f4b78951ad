"""Draw what carries coupling: each head of each layer, and attention and MLP by depth."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.comparisons import Carriers, HeadCoupling
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_AXES

# One colour for each branch, in all pictures.
_COLORS = {
    "attn_out": labels.BLUE,
    "mlp_out": labels.VERMILION,
    "mlp∘attn": labels.ORANGE,
    "skip": labels.BLACK,
}
_NAMES = {
    "attn_out": "attention",
    "mlp_out": "MLP",
    "mlp∘attn": "MLP acting on attention",
    "skip": "skip connection",
}
# More names of heads, pairs or layers than these would touch each other.
_MOST_HEADS = 16
_MOST_NAMED = 5
_MOST_LAYER_TICKS = 8


@checked
def plot_carriers(
    result: Carriers, *, untrained: Carriers | None = None, ax: Axes | None = None
) -> Axes:
    """Draw each head's excess by layer: how much more of coupling it carries than of J.

    Rows are layers of J_1, columns heads; a value is the mean over the singular vectors
    of all other layers. Red heads carry more of the diagonal of A than their share of
    the Jacobian, blue ones less. Attention without heads is one column; MLPs are in
    `plot_carriers_by_depth`.

    Args:
        result: what `carriers` returned.
        untrained: the same of the untrained twin, drawn beside it on the same scale, in
            a figure of their own.
        ax: where to draw; a new figure by default.

    Returns the Axes; the heat map is its only image. Raises ValueError for a result
    without attention, or of one layer, and for `ax` beside `untrained`.

    Example:
        >>> ax = tlc.plots.plot_carriers(tlc.carriers(trace, k=4))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('head', 'layer')
    """
    shown = {"trained": result}
    if untrained is not None:
        if ax is not None:
            raise ValueError("two results have a figure of their own: leave `ax` out")
        shown["untrained"] = untrained
    excess = {role: _excess_by_head(role_result) for role, role_result in shown.items()}
    finite = torch.cat([values[values.isfinite()] for values in excess.values()])
    # A scale of no width cannot be drawn: excesses may all be 0, or undefined.
    largest = 1e-12
    if len(finite):
        largest = max(largest, float(finite.abs().max()))
    axes: list[Any] = [ax]
    if ax is None:
        figure = labels.new_figure(labels.PHONE_WIDTH, 4.6)
        axes = figure.subplots(1, len(shown), squeeze=False)[0].tolist()
    # Symmetric about 0, so that white means neither more nor less than the share of J.
    colors = labels.color_map("RdBu_r").with_extremes(bad=labels.UNDEFINED)
    for drawn, (role, role_result) in zip(axes, shown.items(), strict=True):
        image = drawn.imshow(
            excess[role].cpu().numpy(),
            vmin=-largest,
            vmax=largest,
            cmap=colors,
            aspect="auto",
        )
        names = [label.removeprefix("H") for label in _head_labels(role_result)]
        labels.name_ticks(drawn.xaxis, names, _MOST_HEADS)
        labels.name_ticks(drawn.yaxis, role_result.row_layers, labels.MAX_LAYER_TICKS)
        drawn.set(xlabel="head", ylabel="layer")
        labels.entitle(drawn, _heading(role_result) if untrained is None else role)
    figure = axes[0].figure
    if untrained is not None:
        labels.entitle(figure, _heading(result))
    figure.colorbar(image, ax=axes, label="share of diag A − share of J")
    return axes[0]


@checked
def plot_carriers_by_depth(result: Carriers, *, ax: Axes | None = None) -> Axes:
    """Draw the shares of attention and MLP by layer: of the diagonal of A, and of J.

    Solid lines are shares of the diagonal of A, means over the singular vectors of all
    other layers; dashed ones shares of the Jacobian, which random singular vectors
    would give, in the band that holds 95 % of such means. Where the solid line lies
    above the band of its colour, the branch carries more of coupling than its size
    explains. All heads are one branch.

    Args:
        result: what `carriers` returned.
        ax: where to draw; a new figure by default.

    Returns the Axes; its lines are, for each branch, the share of the diagonal and then
    that of J. Raises ValueError for a result of one layer.

    Example:
        >>> ax = tlc.plots.plot_carriers_by_depth(tlc.carriers(trace, k=4))
        >>> [line.get_label() for line in ax.lines][:2]
        ['attention', '_attention, of J']
    """
    merged = result.by_branch()
    diagonal_shares = merged.by_layer("diagonal_share").cpu().numpy()
    jacobian_shares = merged.by_layer("jacobian_share").cpu().numpy()
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.2).subplots()
    for place, label in enumerate(merged.labels):
        name = _NAMES[label]
        look = labels.marked(_COLORS[label], len(result.row_layers))
        ax.plot(result.row_layers, diagonal_shares[:, place], label=name, **look)
        low, high = merged.null_interval_by_layer(label).unbind(-1)
        band = labels.NULL_BAND | {"color": _COLORS[label]}
        ax.fill_between(result.row_layers, low, high, **band)
        dashed = labels.NULL_LINE | {"color": _COLORS[label]}
        ax.plot(
            result.row_layers,
            jacobian_shares[:, place],
            label=f"_{name}, of J",
            **dashed,
        )
    # Grey entries of the legend stand for the dashed lines and bands of all branches.
    # The lines' own names begin with an underscore and stay out of it.
    ax.plot([], [], label="share of J", **labels.NULL_LINE)
    labels.draw_null_band(ax, [], [], [])
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="layer", ylabel="share of the diagonal of A, or of J")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels.finish_lines(
        ax,
        _heading(result),
        **labels.BELOW | {"bbox_to_anchor": (0.5, -0.18), "ncols": 2},
    )
    return ax


@checked
def plot_head_coupling(
    results: HeadCoupling | Mapping[str, HeadCoupling], *, fig: Figure | None = None
) -> Figure:
    """Draw which layers have heads that share axes, and how many pairs of heads do.

    Above, a panel for each result on one scale: the largest coupling of a head of one
    layer with a head of another. The mark on the colour bar is what the largest of as
    many random pairs is in the mean. Below the share of all pairs of heads of different
    layers that lie above each value of coupling: where a line lies to the right of the
    grey one, pairs share more than random axes; the most coupled pairs of the first
    result are named.

    Args:
        results: what `comparisons.head_coupling` returned, or several by name.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are the maps, the shares, then the colour bar. Raises
    ValueError for no result, or one of one layer.

    Example:
        >>> fig = tlc.plots.plot_head_coupling(tlc.comparisons.head_coupling(trace, k=4))
    """
    results_by_name = labels.named(results, HeadCoupling)
    if any(len(set(result.layers)) < 2 for result in results_by_name.values()):
        raise ValueError("pairs of heads of different layers need two layers")
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 6.6)
    n_maps = len(results_by_name)
    # Two maps side by side at most; more would be too small for their layers.
    grid = fig.add_gridspec(2, n_maps, height_ratios=[1.25, 1])
    maps = [fig.add_subplot(grid[0, place]) for place in range(n_maps)]
    shares = fig.add_subplot(grid[1, :])
    largest = {
        name: result.by_layer().numpy() for name, result in results_by_name.items()
    }
    largest_coupling = max(float(np.nanmax(values)) for values in largest.values())
    colors = labels.color_map(None).with_extremes(bad=labels.UNDEFINED)
    for ax, (name, result) in zip(maps, results_by_name.items(), strict=True):
        image = ax.imshow(largest[name], vmin=0, vmax=largest_coupling, cmap=colors)
        # `layers` names the layer of every head: each once here, in their order.
        layers = list(dict.fromkeys(result.layers))
        labels.name_ticks(ax.xaxis, layers, _MOST_LAYER_TICKS)
        labels.name_ticks(ax.yaxis, layers, _MOST_LAYER_TICKS)
        ax.set_xlabel("whose singular\nvectors (layer)")
        labels.entitle(ax, name)
    maps[0].set_ylabel("whose Jacobian\n(layer)")
    # Rows are named once, on the left.
    for ax in maps[1:]:
        ax.tick_params(labelleft=False)
    for name, result, color in labels.assign_colors(results_by_name):
        _draw_shares(shares, result.of_different_layers, color=color, label=name)
    first = next(iter(results_by_name.values()))
    random = first.null_coupling.flatten()
    _draw_shares(shares, random, label=RANDOM_AXES, **labels.NULL_LINE)
    named = "\n".join(
        f"{pair.coupling:.2f}  {pair.jacobian_of} in {pair.vectors_of}"
        for pair in first.strongest(_MOST_NAMED)
    )
    shares.text(
        0.97,
        0.97,
        f"most coupled:\n{named}",
        transform=shares.transAxes,
        ha="right",
        va="top",
        fontsize="small",
    )
    # Few pairs couple strongly: on a linear axis their share would not be seen.
    shares.set_yscale("log")
    shares.set(
        xlabel="coupling of two heads of different layers",
        ylabel="share of pairs above",
        xlim=(0, None),
    )
    labels.legend_below(fig, shares, ncols=3)
    bar = fig.colorbar(
        image,
        ax=list(maps),
        label="largest of two layers' heads",
        orientation="horizontal",
        shrink=0.6,
        aspect=40,
    ).ax
    labels.mark_and_name_null(bar, _null_of_largest(first), is_upright=False)
    provenances = [result.provenance for result in results_by_name.values()]
    positions = [result.position for result in results_by_name.values()]
    title = (
        f"{first.share_above_null:.2%} of pairs of heads exceed all {random.numel()} "
        f"random ones · k = {first.k}"
    )
    labels.entitle(fig, labels.heading(title, provenances, positions))
    return fig


def _null_of_largest(result: HeadCoupling) -> float:
    """Return the mean of the largest coupling of two layers' heads in random axes.

    A cell of the map is a largest value of many, and so is its null.
    """
    random = result.null_coupling.nan_to_num(0).numpy()
    n_heads = max(result.layers.count(layer) for layer in set(result.layers))
    # The largest value of each layer's heads over as many draws as another layer has
    # heads.
    columns = range(0, random.shape[1], n_heads)
    layers = np.asarray(result.layers)
    largest = [
        random[layers == layer][:, start : start + n_heads].max()
        for layer in set(result.layers)
        for start in columns
    ]
    return float(np.mean(largest))


def _draw_shares(ax: Axes, values: torch.Tensor, **look: Any) -> None:
    """Draw the share of the values that lie above each of them."""
    ascending = np.sort(values[values.isfinite()].numpy())
    # The empirical survival function: all values lie at or above the least.
    above = 1 - np.arange(len(ascending)) / len(ascending)
    ax.plot(ascending, above, **look)


def _head_labels(result: Carriers) -> list[str]:
    names = [label for label in result.labels if label[0] == "H" or label == "attn_out"]
    if not names:
        raise ValueError("`result` has no attention: there are no heads to draw")
    return names


def _excess_by_head(result: Carriers) -> torch.Tensor:
    places = [result.labels.index(label) for label in _head_labels(result)]
    return result.by_layer()[:, places]


def _heading(result: Carriers) -> str:
    subject = f"What carries coupling · k = {result.k}"
    return labels.heading(subject, [result.provenance], [result.position])
