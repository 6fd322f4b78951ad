"""What blocks do together: products by depth, and eigenvalues of each block."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.dynamics import Eigenvalues, ProductMap, Products
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_MATRIX, TURNED_BLOCKS

# More planes side by side would be too small to tell the block from the grey dots.
_MOST_PLANES = 4


@checked
def plot_products(
    results: Products | Mapping[str, Products], *, fig: Figure | None = None
) -> Figure:
    """Draw how much the blocks up to each depth amplify, beside unrelated blocks.

    The picture shows whether the blocks amplify the same directions: the line of log σ₁
    then leaves the band of its colour, in which 95 % of products of conjugated blocks
    lie at all depths, and the participation ratio lies below its band, the middle 95 %
    of them at each depth. Dashed lines are means of conjugated blocks.

    Args:
        results: one result, or several by name, such as a model and its untrained twin.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are log σ₁ and the participation ratio.

    Raises:
        ValueError: no result.

    Example:
        >>> fig = tlc.plots.plot_products(tlc.dynamics.products(trace))
    """
    results_by_name = labels.named(results, Products)
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 4.4)
    largest, ratio = fig.subplots(1, 2)
    for name, result, color in labels.assign_colors(results_by_name):
        look = labels.marked(color, len(result.layers))
        largest.plot(result.layers, result.log_largest, label=name, **look)
        ratio.plot(result.layers, result.participation_ratio, label=name, **look)
        # `[draw layer]`.
        null_ratio = result.null_participation_ratio.numpy()
        ends = np.quantile(null_ratio, (0.025, 0.975), axis=0)
        _draw_null(largest, name, result.layers, result.null_log_largest.mean(0), color)
        _draw_null(ratio, name, result.layers, null_ratio.mean(0), color)
        band = labels.NULL_BAND | {"color": color, "label": f"{name}, {TURNED_BLOCKS}"}
        largest.fill_between(result.layers, *result.null_band.unbind(-1), **band)
        ratio.fill_between(result.layers, *ends, **band)
    # A grey entry of the legend stands for the dashed lines of all results.
    largest.plot([], [], label="their mean", **labels.NULL_LINE)
    ratio.set_yscale("log")
    largest.set_ylabel("log σ₁ of the product")
    ratio.set_ylabel("its participation ratio")
    for ax in (largest, ratio):
        ax.set_xlabel("product up to layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels.legend_below(fig, largest, ncols=1)
    labels.entitle(fig, _heading(_gains(results_by_name), results_by_name))
    return fig


def _draw_null(
    ax: Axes, name: str, layers: Sequence[int], mean: Any, color: str
) -> None:
    """Draw the mean of products of blocks turned at random."""
    look = labels.NULL_LINE | {"color": color, "label": f"_{name}, mean of random"}
    ax.plot(layers, mean, **look)


def _gains(results_by_name: Mapping[str, Products]) -> str:
    """Say by how much log σ₁ of all blocks exceeds its null."""
    gains = [
        f"{name} {labels.signed(float(result.alignment_gain[-1]), '+.2f')}"
        for name, result in results_by_name.items()
    ]
    return f"Gain in log σ₁: {', '.join(gains)} · over {TURNED_BLOCKS}"


@checked
def plot_product_map(result: ProductMap, *, fig: Figure | None = None) -> Figure:
    """Draw log σ₁ of every run of blocks, and its alignment gain.

    Args:
        result: of `product_map`.
        fig: the figure to draw in; a new one by default.

    Returns the Figure: Axes of log σ₁ and of the gain, then two colour bars. Rows are
    the last block of a run, columns the first.

    Example:
        >>> fig = tlc.plots.plot_product_map(tlc.dynamics.product_map(trace))
    """
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 3.0)
    panels = fig.subplots(1, 2)
    gain = result.alignment_gain.numpy()
    # Centred on 0: white is what blocks turned at random would amplify. Runs that do
    # not exist (NaN) do not count.
    largest_gain = float(np.nanmax(np.abs(gain)))
    images: list[tuple[np.ndarray, str, dict[str, Any]]] = [
        (result.log_largest.numpy(), "log σ₁", {"cmap": "viridis"}),
        (
            gain,
            "alignment gain",
            {"cmap": "RdBu_r", "vmin": -largest_gain, "vmax": largest_gain},
        ),
    ]
    for ax, (values, words, colors) in zip(panels, images, strict=True):
        image = ax.imshow(values, origin="lower", **colors)
        fig.colorbar(image, ax=ax, label=f"{words} (nats)", location="bottom")
        labels.name_ticks(ax.xaxis, result.layers, labels.MAX_TICKS_BELOW)
        labels.name_ticks(ax.yaxis, result.layers, labels.MAX_TICKS_BESIDE)
        ax.set(xlabel="first block", ylabel="last block")
    labels.entitle(
        fig,
        labels.heading("Runs of blocks", [result.provenance], [result.position]),
    )
    return fig


@checked
def plot_eigenvalues(
    results: Eigenvalues | Mapping[str, Eigenvalues],
    *,
    layers: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw eigenvalues of blocks in the complex plane, and their Henrici numbers.

    Grey dots are a random matrix with the block's singular values: what lies where no
    grey lies is not a matter of the singular values. Dashed lines are means over such
    matrices, bands their middle 95 %.

    Args:
        results: one result, or several by name; the planes are of the first.
        layers: whose planes are drawn, at most 4: the first, two between and the last
            by default.
        fig: the figure to draw in; a new one by default.

    Returns the Figure: Axes of the planes, then of Henrici's departure from normality
    by layer.

    Raises:
        ValueError: no result, a layer that it does not hold, more than 4 layers.

    Example:
        >>> fig = tlc.plots.plot_eigenvalues(tlc.dynamics.eigenvalues(trace))
    """
    results_by_name = labels.named(results, Eigenvalues)
    first = next(iter(results_by_name.values()))
    plane_layers = _planes(first, layers)
    n_planes = len(plane_layers)
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 5.6)
    grid = fig.add_gridspec(2, n_planes, height_ratios=[1, 1.2])
    planes = [fig.add_subplot(grid[0, place]) for place in range(n_planes)]
    departures = fig.add_subplot(grid[1, :])
    for ax, layer in zip(planes, plane_layers, strict=True):
        _draw_plane(ax, first, layer)
    planes[0].set_ylabel("imaginary part")
    for name, result, color in labels.assign_colors(results_by_name):
        look = labels.marked(color, len(result.layers))
        departures.plot(result.layers, result.henrici, label=name, **look)
        null = result.null_henrici.numpy()
        dashed = labels.NULL_LINE | {
            "color": color,
            "label": f"{name}, {RANDOM_MATRIX}",
        }
        departures.plot(result.layers, null.mean(0), **dashed)
        ends = np.quantile(null, (0.025, 0.975), axis=0)
        departures.fill_between(
            result.layers, *ends, **labels.NULL_BAND | {"color": color}
        )
    departures.set(xlabel="layer", ylabel="departure from normality", ylim=(0, 1))
    departures.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Of the dots and of the lines.
    labels.legend_below(fig, planes[0], departures, ncols=1)
    labels.entitle(fig, _heading("Eigenvalues of blocks", results_by_name))
    return fig


def _planes(result: Eigenvalues, layers: Sequence[int] | None) -> list[int]:
    """Return the layers whose planes are drawn."""
    if layers is None:
        places = (
            np.linspace(0, len(result.layers) - 1, _MOST_PLANES).round().astype(int)
        )
        # In a model of few layers, evenly spaced places coincide.
        return [result.layers[place] for place in dict.fromkeys(places.tolist())]
    missing = [layer for layer in layers if layer not in result.layers]
    if missing or not 1 <= len(layers) <= _MOST_PLANES:
        raise ValueError(
            f"`layers` must be 1 to {_MOST_PLANES} of the result's "
            f"{result.layers[0]} … {result.layers[-1]}, got {list(layers)}"
        )
    return list(layers)


def _draw_plane(ax: Axes, result: Eigenvalues, layer: int) -> None:
    row = result.layers.index(layer)
    dots: dict[str, Any] = {"s": 5, "linewidth": 0}
    # The random matrix first, so that the block's eigenvalues lie on top.
    for values, color, name in (
        (result.null_values[row], "0.7", RANDOM_MATRIX),
        (result.values[row], labels.BLUE, "block"),
    ):
        ax.scatter(values.real, values.imag, color=color, label=name, **dots)
    ax.set_title(f"layer {layer}", fontsize="medium")
    ax.set_xlabel("real part")
    # A circle of eigenvalues must look like one.
    ax.set_aspect("equal", adjustable="datalim")


def _heading(
    subject: str, results_by_name: Mapping[str, Products | Eigenvalues]
) -> str:
    """Return the title of a picture of several results."""
    provenances = [result.provenance for result in results_by_name.values()]
    positions = [result.position for result in results_by_name.values()]
    return labels.heading(subject, provenances, positions)
