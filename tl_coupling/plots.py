"""Pictures of coupling maps, with matplotlib and networkx.

Every function draws what a result holds and labels itself from it, takes `ax=` (or `fig=`) and returns what it drew on.
Nothing is shown and pyplot is left alone: without `ax=` the picture has a Figure of its own, `ax.figure`.

>>> from tl_coupling.plots import plot_coupling
>>> ax = plot_coupling(tlc.depth_coupling(trace, k=4))
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import networkx as nx
import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, PowerNorm, to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tl_coupling.comparisons import CouplingMap
from tl_coupling.coupling import Measure, random_subspace_null
from tl_coupling.spectra import check_k

_MEASURES = {
    "coupling": r"coupling $1 - \tilde{m}$",
    "normalized_miscoupling": r"normalised mis-coupling $\tilde{m}$",
    "miscoupling": "mis-coupling $m$",
    "spectral_miscoupling": "spectral mis-coupling $m_K$",
    "captured_energy": "captured energy",
}
_BOUNDED_BY_1 = ("coupling", "normalized_miscoupling", "captured_energy")
_PAPER_LAYERS = range(8, 16)
_MAX_LAYER_TICKS, _MAX_TOKEN_TICKS = 16, 40
_MAX_EDGE_WIDTH = 8.0


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
        ax = _own_axes(side, 0.9 * side, "compressed")
    vmin = 0 if vmin is None else vmin
    vmax = 1 if vmax is None and measure in _BOUNDED_BY_1 else vmax
    cmap = colormaps.get_cmap(cmap or rcParams["image.cmap"]).with_extremes(bad="0.8")
    image = ax.imshow(values, vmin=vmin, vmax=vmax, cmap=cmap)
    _label_pairs(ax, result)
    ax.set_title(_title([result], k), fontsize="medium", parse_math=False)
    ax.figure.colorbar(image, ax=ax, label=_measure_label(measure, k, **options))
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
        _check_depth(grid, name)
    chosen = _chosen_layers(result, layers)
    k = _common_k(list(grids.values()), k)
    panels = [_panels(grid, chosen, k, name) for name, grid in grids.items()]
    if fig is None:
        side = max(4.0, 0.85 * len(chosen))
        fig = Figure(figsize=(side + 1.2, (side + 0.8) * len(grids)), layout="constrained")
    parts = fig.subfigures(len(grids), 1, squeeze=False).flat
    for part, grid, panel in zip(parts, grids.values(), panels, strict=True):
        _draw_panels(part, panel, chosen, vmax)
        part.suptitle(_title([grid], k), fontsize="medium", parse_math=False)
    return fig


def plot_adjacency(
    result: CouplingMap,
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    threshold: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Layers as a graph: nodes on a circle, each edge as wide and as opaque as its two layers are coupled.

    Read off which groups of layers are coupled. An edge weighs the mean of the map's two values for a pair of layers,
    (l, l′) and (l′, l). Width follows the weight and opacity its square root; both are full at 1 for the measures
    bounded by 1, so that two pictures compare (trained and untrained, checkpoints), else at the largest weight.

    Args:
        result: a map of kind "depth".
        k: how many top singular vectors; as many as the map holds by default.
        measure: as in `CouplingMap.values`.
        threshold: draw edges of at least this weight only; all by default.
        ax: where to draw; a Figure of its own by default.

    Returns:
        the Axes; its legend gives the scale of the edges.

    Raises:
        ValueError: k or measure not among those of the map, a map of tokens, rows and columns of different layers.
    """
    _check_depth(result, "result")
    layers = result.row_layers
    if layers != result.col_layers or len(set(layers)) != len(layers):
        raise ValueError(
            "a graph of layers wants a map with the same layers, each once, as rows and columns; "
            f"got rows {list(layers)} and columns {list(result.col_layers)}"
        )
    values = result.values(k, measure).detach().cpu().double().numpy()
    weights = (values + values.T) / 2
    # Sorted by weight: strong edges are drawn last, on top of weak ones.
    below = [(i, j) for i in range(len(layers)) for j in range(i) if not math.isnan(weights[i, j])]
    pairs = sorted((weights[i, j], layers[j], layers[i]) for i, j in below)
    edges = [pair for pair in pairs if threshold is None or pair[0] >= threshold]
    full = 1.0 if measure in _BOUNDED_BY_1 or not edges else edges[-1][0] or 1.0

    ax = _own_axes(6.4, 7.0) if ax is None else ax
    graph = nx.Graph()
    graph.add_nodes_from(layers)
    places = nx.circular_layout(graph)
    widths, colors = _edge_style(np.array([weight for weight, *_ in edges]) / full)
    nx.draw_networkx_edges(graph, places, [ends for _, *ends in edges], ax=ax, width=widths, edge_color=colors)
    nx.draw_networkx_nodes(graph, places, ax=ax, node_color="white", edgecolors="0.3", node_size=260)
    nx.draw_networkx_labels(graph, places, ax=ax, font_size=8)
    ax.set_aspect("equal")
    ax.axis("off")
    k = result.k if k is None else k
    drawn = f"{len(edges)} of {len(pairs)} edges" + ("" if threshold is None else f", at least {threshold:g}")
    shares = np.array([0.1, 0.25, 0.5, 1])
    legend = ax.legend(
        [Line2D([], [], linewidth=width, color=color) for width, color in zip(*_edge_style(shares), strict=True)],
        [f"{full * share:.2g}" for share in shares],
        title=f"{_measure_label(measure, k)}, mean of (l, l′) and (l′, l)\n{drawn}",
        loc="upper center",
        ncols=len(shares),
        frameon=False,
    )
    legend.set_bbox_to_anchor((0.5, 0))
    ax.set_title(_title([result], k), fontsize="medium", parse_math=False)
    return ax


def plot_locality(
    results: CouplingMap | Mapping[str, CouplingMap], *, k: int | None = None, ax: Axes | None = None
) -> Axes:
    """Mean coupling of layers that lie `|l − l′|` apart, one line for each result.

    Read off how fast coupling fades with distance, and against the dashed line what random subspaces would give.
    Distance 0 is a layer with its own vectors: 1 for `orientation="ujv"`.

    Args:
        results: maps of kind "depth", by name; or one.
        k: how many top singular vectors; as many as the maps hold by default.
        ax: where to draw; a Figure of its own by default.

    Returns:
        the Axes; its lines are the results in their order, then the null.

    Raises:
        ValueError: no map, a map of tokens, k out of range or not given where the maps hold different numbers.
    """
    maps = _by_name(results)
    k = _common_k(list(maps.values()), k)
    ax = _own_axes(6.4, 4.6) if ax is None else ax
    for name, result in maps.items():
        profile = result.locality_profile(k).detach().cpu().numpy()
        # No pair of a selection of layers may be some distance apart: the line goes on to the next.
        distance = np.flatnonzero(~np.isnan(profile))
        ax.plot(distance, profile[distance], marker="o", markersize=3, label=name)
    # The null of this measure depends on k alone: one line for all maps.
    null = float(random_subspace_null(k))
    ax.axhline(null, color="0.4", linestyle="--", linewidth=1, label=f"random subspaces, {null:.3f}")
    ax.set(ylim=(0, 1.03), xlabel="distance |l − l′| in layers", ylabel=f"mean {_measure_label('coupling', k)}")
    _finish_lines(ax, _title(list(maps.values()), k))
    return ax


def plot_singular_values(
    results: CouplingMap | Mapping[str, CouplingMap], *, n: int = 10, ax: Axes | None = None
) -> Axes:
    """Largest singular values of the Jacobians against depth, on a logarithmic axis.

    Read off how strongly each block amplifies its top directions, and how flat its spectrum is: lines close together
    are singular values close together. One colour for each result, σ_1 darkest.

    Args:
        results: maps of kind "depth", by name; or one.
        n: how many singular values; fewer where a map holds fewer.
        ax: where to draw; a Figure of its own by default.

    Returns:
        the Axes; its lines are σ_1, σ_2, … of the first result, then of the next.

    Raises:
        ValueError: no map, a map of tokens, n below 1.
    """
    maps = _by_name(results)
    if n < 1:
        raise ValueError(f"`n` must be at least 1 (singular values to draw), got {n}")
    ax = _own_axes(6.4, 4.6) if ax is None else ax
    for number, (name, result) in enumerate(maps.items()):
        order = np.argsort(result.row_layers)
        depth = np.asarray(result.row_layers)[order]
        sigma = result.singular_values.detach().cpu().numpy()[order, :n]
        base = np.asarray(to_rgb(f"C{number}"))
        for i, fade in enumerate(np.linspace(0, 0.75, sigma.shape[1])):
            color = tuple(base + fade * (1 - base))
            # A leading underscore keeps a line out of the legend.
            label = f"_σ_{i + 1}" if i else f"{name}, top {sigma.shape[1]}"
            ax.plot(depth, sigma[:, i], color=color, linewidth=1.2, label=label, zorder=3 - fade)
    ax.set_yscale("log", nonpositive="mask")
    ax.set(xlabel="layer", ylabel="singular value of J")
    _finish_lines(ax, _title(list(maps.values())))
    return ax


def _own_axes(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Axes:
    return Figure(figsize=(width, height), layout=layout).subplots()


def _common_k(maps: Sequence[CouplingMap], k: int | None) -> int:
    held = [result.k for result in maps]
    if k is None and len(set(held)) > 1:
        raise ValueError(f"`k` must be given where the maps hold different numbers of singular vectors, here {held}")
    k = held[0] if k is None else k
    check_k(k, min(held))
    return k


def _by_name(results: Any) -> dict[str, CouplingMap]:
    if isinstance(results, CouplingMap):
        results = {results.provenance.get("model") or "coupling": results}
    if not isinstance(results, Mapping) or not all(isinstance(result, CouplingMap) for result in results.values()):
        raise TypeError(f"wanted a CouplingMap or a mapping from names to them, got {type(results).__name__}")
    if not results:
        raise ValueError("`results` is empty: wanted at least one CouplingMap")
    for name, result in results.items():
        _check_depth(result, name)
    return dict(results)


def _check_depth(result: CouplingMap, name: str) -> None:
    if result.kind != "depth":
        raise ValueError(
            f"this picture wants maps of layers, kind 'depth' (`depth_coupling`), {name!r} is of kind {result.kind!r}"
        )


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


def _edge_style(shares: np.ndarray) -> tuple[list[float], list[tuple[float, float, float, float]]]:
    shares = np.clip(shares, 0, 1)
    return list(_MAX_EDGE_WIDTH * shares), [(*to_rgb("C0"), share) for share in np.sqrt(shares)]


def _label_pairs(ax: Axes, result: CouplingMap) -> None:
    depth = result.kind == "depth"
    sides = (
        (ax.xaxis, result.col_layers, result.col_positions, "the singular vectors"),
        (ax.yaxis, result.row_layers, result.row_positions, "J₁"),
    )
    for axis, layers, positions, whose in sides:
        labels = [str(layer) for layer in layers] if depth else [_token(result, position) for position in positions]
        axis.set_label_text(f"layer of {whose}" if depth else f"token of {whose}, layer {layers[0]}")
        shown = range(0, len(labels), math.ceil(len(labels) / (_MAX_LAYER_TICKS if depth else _MAX_TOKEN_TICKS)))
        rotation = 0 if depth or axis is ax.yaxis else 90
        # parse_math: a token may hold a dollar sign.
        axis.set_ticks(list(shown), [labels[i] for i in shown], rotation=rotation, parse_math=False)


def _token(result: CouplingMap, position: int) -> str:
    tokens = result.provenance.get("str_tokens")
    return f"{position}" if tokens is None else f"{position} {repr(tokens[position])[1:-1].strip() or '␣'}"


def _measure_label(measure: str, k: int, p: int | float = 2, absolute: bool = False) -> str:
    variant = f", p = {p:g}{', |A|' if absolute else ''}" if measure == "spectral_miscoupling" else ""
    return f"{_MEASURES[measure]} (k = {k}{variant})"


def _title(maps: Sequence[CouplingMap], k: int | None = None) -> str:
    """What was measured; on which model; for which prompt and token. Only what all maps have in common."""
    first = maps[0]
    known = {key: value for key, value in first.provenance.items() if all(m.provenance.get(key) == value for m in maps)}
    what = [f"{first.kind.capitalize()} coupling"]
    what += [first.orientation] if len({result.orientation for result in maps}) == 1 else []
    what += [] if k is None else [f"k = {k}"]
    model = str(known.get("model") or "")
    model += "" if known.get("checkpoint") is None else f" at checkpoint {known['checkpoint']}"
    model += " (untrained)" if known.get("untrained") else ""
    prompt = " ".join((known.get("prompt") or "").split())
    where = [f"“{prompt if len(prompt) <= 48 else prompt[:47].rstrip() + '…'}”"] if prompt else []
    tokens = {_token(result, result.row_positions[0]) for result in maps}
    where += [f"token {tokens.pop()}"] if first.kind == "depth" and len(tokens) == 1 else []
    return "\n".join(filter(None, (" · ".join(what), model, " · ".join(where))))


def _finish_lines(ax: Axes, title: str) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title, fontsize="medium", parse_math=False)
    for text in ax.legend(frameon=False).get_texts():
        text.set_parse_math(False)
