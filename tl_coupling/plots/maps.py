"""Heat maps of couplings, and grids of the coupling matrices behind them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, PowerNorm
from matplotlib.figure import Figure, FigureBase

from tl_coupling.comparisons import CouplingMap
from tl_coupling.coupling import Measure
from tl_coupling.plots.labels import BOUNDED_BY_1, check_depth, common_k, label_pairs, measure_label, own_axes, title

_PAPER_LAYERS = range(8, 16)


def plot_coupling(
    result: CouplingMap,
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    ax: Axes | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
    cmap: str | Colormap | None = None,
    **options: Any,
) -> Axes:
    """Heat map of a measure for every pair of connections.

    Read off which J_1 (row) is diagonalised by whose singular vectors (column). On the diagonal of a depth map J meets
    its own vectors; bright cells away from it are coupled layers, and a bright band along it is locality.

    Args:
        result: any `CouplingMap`; ticks are layers for kind "depth", tokens for "self" and "context".
        k: how many top singular vectors; as many as the map holds by default.
        measure: as in `CouplingMap.values`.
        ax: where to draw; a Figure of its own by default.
        vmin, vmax: ends of the colour scale. 0 and 1 for the measures bounded by 1, else 0 and the largest value.
        cmap: a colour map; matplotlib's default one unless given. Undefined values (NaN) are grey.
        options: `p` and `absolute`, for `spectral_miscoupling`.

    Returns:
        the Axes; the heat map is its only image.

    Raises:
        ValueError: k or measure not among those of the map.
    """
    values = result.values(k, measure, **options).detach().cpu().numpy()
    k = result.k if k is None else k
    if ax is None:
        side = 6.4 if result.kind == "depth" else min(12.0, max(6.4, 2.5 + 0.2 * max(values.shape)))
        ax = own_axes(side, 0.9 * side, "compressed")
    vmin = 0 if vmin is None else vmin
    vmax = 1 if vmax is None and measure in BOUNDED_BY_1 else vmax
    cmap = colormaps.get_cmap(cmap or rcParams["image.cmap"]).with_extremes(bad="0.8")
    image = ax.imshow(values, vmin=vmin, vmax=vmax, cmap=cmap)
    label_pairs(ax, result)
    ax.set_title(title([result], k), fontsize="medium", parse_math=False)
    ax.figure.colorbar(image, ax=ax, label=measure_label(measure, k, **options))
    return ax


def plot_coupling_matrices(
    result: CouplingMap,
    *,
    k: int | None = None,
    layers: Sequence[int] | None = None,
    untrained: CouplingMap | None = None,
    vmax: float = 0.25,
    fig: Figure | None = None,
) -> Figure:
    """Grid of the coupling matrices themselves, one panel `|A|` for every pair of layers.

    Read off whether A is diagonal: coupled layers show a bright diagonal, uncoupled ones an even speckle.

    Every panel is divided by the largest singular value σ_1 of its J_1. That bounds `|A|` by 1, so that all panels of
    both grids share one colour scale whatever the size of the Jacobians. Colours follow the square root and end at
    `vmax`, well below 1, because the diagonals of different layers are faint beside those of a layer with itself (its
    singular values, for `orientation="ujv"`). An Axes for each panel: two grids of 8 × 8 take seconds to render.

    Args:
        result: a map of kind "depth".
        k: size of the panels; as many singular vectors as the map holds by default.
        layers: which layers, in this order. By default 8 … 15 (the paper's blocks 9 … 16), or those of them that the
            map has; where it has none, its last eight.
        untrained: the same layers of the untrained twin, drawn as a second grid below.
        vmax: share of σ_1 where the colours end.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; a subfigure for each grid.

    Raises:
        ValueError: k out of range, layers that a map does not have, a map of tokens.
    """
    grids = {"result": result} | ({} if untrained is None else {"untrained": untrained})
    for name, grid in grids.items():
        check_depth(grid, name)
    chosen = _chosen_layers(result, layers)
    k = common_k(list(grids.values()), k)
    panels = [_panels(grid, chosen, k, name) for name, grid in grids.items()]
    if fig is None:
        side = max(4.0, 0.85 * len(chosen))
        fig = Figure(figsize=(side + 1.2, (side + 0.8) * len(grids)), layout="constrained")
    parts = fig.subfigures(len(grids), 1, squeeze=False).flat
    for part, grid, panel in zip(parts, grids.values(), panels, strict=True):
        _draw_panels(part, panel, chosen, vmax)
        part.suptitle(title([grid], k), fontsize="medium", parse_math=False)
    return fig


def _chosen_layers(result: CouplingMap, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        there = [layer for layer in result.row_layers if layer in result.col_layers]
        chosen = [layer for layer in there if layer in _PAPER_LAYERS] or there[-len(_PAPER_LAYERS) :]
    else:
        n_layers = result.provenance.get("n_layers", 0)
        chosen = [layer + n_layers if -n_layers <= layer < 0 else layer for layer in layers]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer of the map")
    return chosen


def _panels(result: CouplingMap, layers: list[int], k: int, name: str) -> np.ndarray:
    """`|A| / σ_1(J_1)`, `[n n k k]`, for pairs of the chosen layers."""
    for held in (result.row_layers, result.col_layers):
        if missing := [layer for layer in layers if layer not in held]:
            raise ValueError(f"`layers` must be among those of {name!r}, {list(held)}, got {missing}")
    rows = [result.row_layers.index(layer) for layer in layers]
    cols = [result.col_layers.index(layer) for layer in layers]
    largest = result.singular_values[rows, 0].clamp_min(torch.finfo(result.singular_values.dtype).tiny)
    return (result.at(k)[rows][:, cols].abs() / largest[:, None, None, None]).detach().cpu().numpy()


def _draw_panels(part: FigureBase, panels: np.ndarray, layers: list[int], vmax: float) -> None:
    axes = part.subplots(len(layers), len(layers), squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    norm = PowerNorm(0.5, vmin=0, vmax=vmax)
    for row, layer in enumerate(layers):
        for col, ax in enumerate(axes[row]):
            image = ax.imshow(panels[row, col], norm=norm, cmap="magma")
            ax.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(layer, rotation=0, ha="right", va="center")
        axes[-1, row].set_xlabel(layer)
    part.supylabel("layer of J₁", fontsize="medium")
    part.supxlabel("layer of the singular vectors", fontsize="medium")
    extend = "max" if vmax < 1 else "neither"
    part.colorbar(image, ax=axes, label="|A| / σ₁ of J₁ (square-root colours)", extend=extend, shrink=0.9, aspect=40)
