"""What blocks do together: products by depth, and eigenvalues of each block."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.dynamics import Eigenvalues, ProductMap, Products
from tl_coupling.plots import labels

# More planes side by side would be too small to tell the block from the grey dots.
_MOST_PLANES = 4


@checked
def plot_products(
    results: Products | Mapping[str, Products], *, fig: Figure | None = None
) -> Figure:
    """Draw how much the blocks up to each depth amplify, beside unrelated blocks.

    The picture shows whether the blocks amplify the same directions: the line of log σ₁
    then leaves the band of its colour, in which 95 % of products of conjugated blocks
    lie at all depths, and the participation ratio lies below the dashed line, their mean.

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
    fig = fig or labels.new_figure(8.4, 4.6)
    largest, ratio = fig.subplots(1, 2)
    for name, result, color in labels.assign_colors(results_by_name):
        low, high = result.null_band.unbind(-1)
        # `[draw layer]`.
        null_ratio = result.null_participation_ratio.mean(0)
        largest.plot(result.layers, result.log_largest, color=color, label=name)
        largest.fill_between(
            result.layers,
            low,
            high,
            color=color,
            alpha=0.25,
            linewidth=0,
            label=f"{name}, blocks turned at random",
        )
        ratio.plot(result.layers, result.participation_ratio, color=color, label=name)
        ratio.plot(
            result.layers,
            null_ratio,
            color=color,
            linestyle="--",
            label=f"{name}, blocks turned at random",
        )
    ratio.set_yscale("log")
    largest.set_ylabel("log σ₁ of the product")
    ratio.set_ylabel("participation ratio of the product")
    for ax in (largest, ratio):
        ax.set_xlabel("product up to layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, names = largest.get_legend_handles_labels()
    labels.plain_legend(
        fig, handles, names, loc="outside lower center", ncols=2, fontsize="small"
    )
    labels.entitle(fig, _heading("Products of blocks", results_by_name))
    return fig


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
    fig = fig or labels.new_figure(8.4, 3.8)
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
        fig.colorbar(image, ax=ax, label=f"{words} (nats)")
        labels.name_ticks(ax.xaxis, result.layers, labels.MAX_LAYER_TICKS)
        labels.name_ticks(ax.yaxis, result.layers, labels.MAX_LAYER_TICKS)
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
    grey lies is not a matter of the singular values.

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
    fig = fig or labels.new_figure(2.3 * n_planes + 3.4, 3.2)
    *planes, departures = fig.subplots(
        1, n_planes + 1, width_ratios=[1] * n_planes + [1.4]
    )
    for ax, layer in zip(planes, plane_layers, strict=True):
        _draw_plane(ax, first, layer)
    planes[0].set_ylabel("imaginary part")
    labels.plain_legend(planes[0], **labels.ABOVE | {"bbox_to_anchor": (0, 1.08)})
    for name, result, color in labels.assign_colors(results_by_name):
        departures.plot(result.layers, result.henrici, color=color, label=name)
        departures.plot(
            result.layers,
            result.null_henrici.mean(0),
            color=color,
            linestyle="--",
            label=f"{name}, same singular values",
        )
    departures.set(xlabel="layer", ylabel="departure from normality", ylim=(0, 1))
    departures.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels.plain_legend(departures, loc="lower right", fontsize="small")
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
        (result.null_values[row], "0.7", "same singular values"),
        (result.values[row], "C0", "block"),
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
