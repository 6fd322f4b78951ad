"""Heat maps of couplings, and grids of the coupling matrices behind them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, PowerNorm
from matplotlib.figure import Figure, FigureBase

from tl_coupling.border import Finite, Positive, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.coupling import BOUNDED_BY_1, Measure
from tl_coupling.plots.labels import (
    common_k,
    label_pairs,
    measure_label,
    new_figure,
    own_axes,
    side_labels,
    title,
    token_name,
)

_PAPER_LAYERS = range(8, 16)


@checked
def plot_coupling(
    result: CouplingMap,
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    ax: Axes | None = None,
    vmin: Finite | None = None,
    vmax: Finite | None = None,
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
    if vmax is not None and vmin >= vmax:
        raise ValueError(f"`vmin` must lie below `vmax`, got {vmin} and {vmax}")
    if isinstance(cmap, str) and cmap not in colormaps:
        raise ValueError(f"`cmap` must be a colour map that matplotlib knows, got {cmap!r}")
    cmap = colormaps.get_cmap(cmap or rcParams["image.cmap"]).with_extremes(bad="0.8")
    image = ax.imshow(values, vmin=vmin, vmax=vmax, cmap=cmap)
    label_pairs(ax, result)
    ax.set_title(title([result], k), fontsize="medium", parse_math=False)
    ax.figure.colorbar(image, ax=ax, label=measure_label(measure, k, **options))
    return ax


@checked
def plot_coupling_matrices(
    result: CouplingMap,
    *,
    k: int | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    untrained: CouplingMap | None = None,
    vmax: Positive = 0.25,
    fig: Figure | None = None,
) -> Figure:
    """Grid of the coupling matrices themselves, one panel `|A|` for every pair of layers, or of tokens.

    Read off whether A is diagonal: coupled connections show a bright diagonal, uncoupled ones an even speckle.

    Every panel is divided by the largest singular value σ_1 of its J_1. That bounds `|A|` by 1, so that all panels of
    both grids share one colour scale whatever the size of the Jacobians. Colours follow the square root and end at
    `vmax`, well below 1, because the diagonals of different connections are faint beside those of one with itself (its
    singular values, for `orientation="ujv"`). An Axes for each panel: two grids of 8 × 8 take seconds to render.

    Args:
        result: any map.
        k: size of the panels; as many singular vectors as the map holds by default.
        layers: for a map of layers, which ones, in this order. By default 8 … 15 (the paper's blocks 9 … 16), or those
            of them that the map has; where it has none, its last eight.
        positions: for a map of tokens, which ones, in this order; its last eight by default.
        untrained: the same connections of the untrained twin, drawn as a second grid below.
        vmax: share of σ_1 where the colours end.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; a subfigure for each grid.

    Raises:
        ValueError: k out of range; layers or positions that a map does not have, or that it does not compare; two maps
            of different kinds.
    """
    grids = {"result": result} | ({} if untrained is None else {"untrained": untrained})
    if untrained is not None and untrained.kind != result.kind:
        raise ValueError(f"`untrained` must be a map of kind {result.kind!r} as well, got {untrained.kind!r}")
    chosen = _chosen(result, layers, positions)
    k = common_k(list(grids.values()), k)
    panels = [_panels(grid, chosen, k, name) for name, grid in grids.items()]
    if fig is None:
        side = max(4.0, 0.85 * len(chosen))
        fig = new_figure(side + 1.2, (side + 0.8) * len(grids))
    parts = fig.subfigures(len(grids), 1, squeeze=False).flat
    for part, grid, panel in zip(parts, grids.values(), panels, strict=True):
        _draw_panels(part, panel, grid, chosen, vmax)
        part.suptitle(title([grid], k), fontsize="medium", parse_math=False)
    return fig


def _sides(result: CouplingMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What rows and columns are told apart by: layers, or token positions."""
    if result.kind == "depth":
        return result.row_layers, result.col_layers
    return result.row_positions, result.col_positions


def _chosen(result: CouplingMap, layers: Sequence[int] | None, positions: Sequence[int] | None) -> list[int]:
    depth = result.kind == "depth"
    wanted, name, others = (layers, "layers", positions) if depth else (positions, "positions", layers)
    if others is not None:
        raise ValueError(f"a map of kind {result.kind!r} is drawn for chosen `{name}` only")
    rows, cols = _sides(result)
    if wanted is None:
        there = [i for i in rows if i in cols]
        chosen = [i for i in there if depth and i in _PAPER_LAYERS] or there[-len(_PAPER_LAYERS) :]
    else:
        n = result.provenance.get("n_layers", 0) if depth else len(result.provenance.get("tokens", ()))
        chosen = [i + n if -n <= i < 0 else i for i in wanted]
    if not chosen:
        raise ValueError(f"`{name}` is empty: wanted at least one of the map's")
    return chosen


def _panels(result: CouplingMap, chosen: list[int], k: int, name: str) -> np.ndarray:
    """`|A| / σ_1(J_1)`, `[n n k k]`, for pairs of the chosen connections."""
    rows, cols = _sides(result)
    for held in (rows, cols):
        if missing := [i for i in chosen if i not in held]:
            what = "layers" if result.kind == "depth" else "positions"
            raise ValueError(f"`{what}` must be among those of {name!r}, {list(held)}, got {missing}")
    at_rows, at_cols = [rows.index(i) for i in chosen], [cols.index(i) for i in chosen]
    largest = result.singular_values[at_rows, 0].clamp_min(torch.finfo(result.singular_values.dtype).tiny)
    return (result.at(k)[at_rows][:, at_cols].abs() / largest[:, None, None, None]).detach().cpu().numpy()


def _draw_panels(part: FigureBase, panels: np.ndarray, result: CouplingMap, chosen: list[int], vmax: float) -> None:
    axes = part.subplots(len(chosen), len(chosen), squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    norm = PowerNorm(0.5, vmin=0, vmax=vmax)
    depth = result.kind == "depth"
    for row, i in enumerate(chosen):
        for col, ax in enumerate(axes[row]):
            image = ax.imshow(panels[row, col], norm=norm, cmap="magma")
            ax.set(xticks=[], yticks=[])
        label = str(i) if depth else token_name(result.provenance, i)
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", parse_math=False)
        axes[-1, row].set_xlabel(label, rotation=0 if depth else 90, parse_math=False)
    of_rows, of_cols = side_labels(result)
    part.supylabel(of_rows, fontsize="medium")
    part.supxlabel(of_cols, fontsize="medium")
    extend = "max" if vmax < 1 else "neither"
    part.colorbar(image, ax=axes, label="|A| / σ₁ of J₁ (square-root colours)", extend=extend, shrink=0.9, aspect=40)
