"""Heat maps of couplings, and grids of the coupling matrices behind them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, PowerNorm
from matplotlib.figure import Figure

from tl_coupling.border import Finite, Positive, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.coupling import Measure
from tl_coupling.plots.labels import (
    UNDEFINED,
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

    Read off which J_1 (row) is diagonalised by whose singular vectors (column): bright cells are coupled pairs, and a
    bright band along the diagonal of a depth map is locality. The mark on the colour bar is what random subspaces would
    give. Grey are the pairs of a connection with itself, which say nothing, and undefined values (NaN).

    Args:
        result: any `CouplingMap`, or a mean of them; ticks are layers for kind "depth", tokens for "self" and
            "context".
        k: how many top singular vectors; as many as the map holds by default.
        measure: as in `CouplingMap.values`.
        ax: where to draw; a new figure by default.
        vmin, vmax: ends of the colour scale; those of `color_scale([result], …)` by default.
        cmap: a colour map; matplotlib's default unless given.
        options: `p` and `absolute`, for `spectral_miscoupling`.

    Returns:
        the Axes; the heat map is its only image.

    Raises:
        ValueError: k or measure not among those of the map.
    """
    values = _without_own(result, k, measure, options)
    low, high = color_scale([result], k, measure, **options)
    low, high = low if vmin is None else vmin, high if vmax is None else vmax
    if low >= high:
        raise ValueError(f"`vmin` must lie below `vmax`, got {low} and {high}")
    if isinstance(cmap, str) and cmap not in colormaps:
        raise ValueError(f"`cmap` must be a colour map that matplotlib knows, got {cmap!r}")
    if ax is None:
        side = 6.4 if result.kind == "depth" else min(12.0, max(6.4, 2.5 + 0.2 * max(values.shape)))
        ax = own_axes(side, 0.9 * side, "compressed")
    cmap = colormaps.get_cmap(cmap or rcParams["image.cmap"]).with_extremes(bad=UNDEFINED)
    image = ax.imshow(values, vmin=low, vmax=high, cmap=cmap)
    label_pairs(ax, result)
    shown_k = result.k if k is None else k
    ax.set_title(title([result], shown_k), fontsize="medium", parse_math=False)
    bar = ax.figure.colorbar(
        image, ax=ax, label=measure_label(measure, shown_k, **options) + "; null: random subspaces"
    )
    null = result.null(k, measure, **options)
    if low <= null <= high:
        for color, linewidth in (("white", 3), ("black", 1)):
            bar.ax.axhline(null, color=color, linewidth=linewidth)
        beside: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": "small"}
        bar.ax.text(-0.2, null, "null ▸", transform=bar.ax.get_yaxis_transform(), **beside)
    return ax


def color_scale(
    results: Sequence[CouplingMap], k: int | None = None, measure: Measure = "coupling", **options: Any
) -> tuple[float, float]:
    """Ends of a colour scale for all these maps and their nulls, without the pairs that are drawn in grey.

    It begins at 0; that of the normalised mis-coupling, near 1 for most pairs, ends at 1 instead. That of coupling
    reaches at least four times the null, or the noise of an untrained model would look like structure.
    """
    values = [_without_own(result, k, measure, options).ravel() for result in results]
    nulls = [result.null(k, measure, **options) for result in results]
    least = [min(1.0, 4 * max(nulls))] if measure == "coupling" else []
    known = np.concatenate([*values, nulls, least])
    known = known[np.isfinite(known)]
    if measure == "normalized_miscoupling":
        return float(known.min(initial=1.0)), 1.0
    return 0.0, float(known.max(initial=0.0)) or 1.0


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
    `vmax`, well below 1, because the diagonals of different connections are faint beside those of a connection with
    itself (its singular values, for `orientation="ujv"`).

    Args:
        result: any map.
        k: size of the panels; as many singular vectors as the map holds by default.
        layers: for a map of layers, which ones, in this order. By default 8 … 15 (the paper's blocks 9 … 16), or those
            of them that the map has; where it has none, its last eight.
        positions: for a map of tokens, which ones, in this order; its last eight by default.
        untrained: the same connections of the untrained twin, drawn as a second grid below.
        vmax: share of σ_1 where the colours end.
        fig: where to draw; a new figure by default.

    Returns:
        the Figure; an Axes with one image for each grid, then the colour bar.

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
        side = min(6.4, max(4.0, 0.8 * len(chosen)))
        fig = new_figure(side + 1.0, (side + 0.4) * len(grids), "compressed")
    axes = fig.subplots(len(grids), 1, squeeze=False)[:, 0]
    depth, gap = result.kind == "depth", max(1, k // 12)
    names = [str(i) if depth else token_name(result.provenance, i) for i in chosen]
    centres = np.arange(len(chosen)) * (k + gap) + (k - 1) / 2
    for ax, grid, panel in zip(axes, grids.values(), panels, strict=True):
        # Panels and the white lines between them are one image: an Axes for each panel would take seconds to draw.
        spaced = np.pad(panel, [(0, 0), (0, 0), (0, gap), (0, gap)], constant_values=np.nan)
        mosaic = spaced.transpose(0, 2, 1, 3).reshape(2 * (len(chosen) * (k + gap),))[:-gap, :-gap]
        cmap = colormaps["magma"].with_extremes(bad="white")
        image = ax.imshow(mosaic, norm=PowerNorm(0.5, vmin=0, vmax=vmax), cmap=cmap)
        ax.set_xticks(centres, names, rotation=0 if depth else 90, parse_math=False)
        ax.set_yticks(centres, names, parse_math=False)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_ylabel(side_labels(grid)[0])
        ax.set_xlabel(side_labels(grid)[1])
        ax.set_title(title([grid], k), fontsize="medium", parse_math=False)
    extend = "max" if vmax < 1 else "neither"
    fig.colorbar(image, ax=list(axes), label="|A| / σ₁ of J₁ (square-root colours)", extend=extend, aspect=40)
    return fig


def _without_own(result: CouplingMap, k: int | None, measure: Measure, options: dict[str, Any]) -> np.ndarray:
    """The values, NaN where a connection meets itself; all of them where there are no other pairs."""
    values = result.values(k, measure, **options).detach().cpu().double().numpy()
    rows = list(zip(result.row_layers, result.row_positions, strict=True))
    own = np.array([[row == col for col in zip(result.col_layers, result.col_positions, strict=True)] for row in rows])
    return values if own.all() else np.where(own, np.nan, values)


def _chosen(result: CouplingMap, layers: Sequence[int] | None, positions: Sequence[int] | None) -> list[int]:
    depth = result.kind == "depth"
    wanted, name, others = (layers, "layers", positions) if depth else (positions, "positions", layers)
    if others is not None:
        raise ValueError(f"a map of kind {result.kind!r} is drawn for chosen `{name}` only")
    if wanted is None:
        there = [i for i in _places(result)[0] if i in _places(result)[1]]
        chosen = [i for i in there if depth and i in _PAPER_LAYERS] or there[-len(_PAPER_LAYERS) :]
    else:
        n = result.provenance.get("n_layers", 0) if depth else len(result.provenance.get("tokens", ()))
        chosen = [i + n if -n <= i < 0 else i for i in wanted]
    if not chosen:
        raise ValueError(f"`{name}` is empty: wanted at least one of the map's")
    return chosen


def _panels(result: CouplingMap, chosen: list[int], k: int, name: str) -> np.ndarray:
    """`|A| / σ_1(J_1)`, `[n n k k]`, for pairs of the chosen connections."""
    for held in _places(result):
        if missing := [i for i in chosen if i not in held]:
            what = "layers" if result.kind == "depth" else "positions"
            raise ValueError(f"`{what}` must be among those of {name!r}, {list(held)}, got {missing}")
    at_rows, at_cols = ([held.index(i) for i in chosen] for held in _places(result))
    largest = result.singular_values[at_rows, 0].clamp_min(torch.finfo(result.singular_values.dtype).tiny)
    return (result.at(k)[at_rows][:, at_cols].abs() / largest[:, None, None, None]).detach().cpu().numpy()


def _places(result: CouplingMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tells rows and columns apart: layers, or token positions."""
    depth = result.kind == "depth"
    return (result.row_layers, result.col_layers) if depth else (result.row_positions, result.col_positions)
