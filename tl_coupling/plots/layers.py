"""Draw layers: their coupling as a graph and by distance, and their singular values."""

from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D

from tl_coupling.arguments import Count, Finite, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.measures import AnyMeasure, measure_named, random_subspace_null
from tl_coupling.plots import labels

_Maps = CouplingMap | Mapping[str, CouplingMap]
_MAX_EDGE_WIDTH = 8.0


@checked
def plot_adjacency(
    result: CouplingMap,
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    strongest: Count | None = None,
    threshold: Finite | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw layers as a graph, clockwise on a circle.

    Each edge is as wide and as opaque as its two layers are coupled.

    Shows which groups of layers are coupled. The weight of an edge is the mean of the
    map's two values for a pair of layers, (l, l′) and (l′, l). Width is proportional to
    the weight and opacity to its square root; both are full at 1 for the measures
    bounded by 1, so that two pictures compare (trained and untrained), else at the
    largest weight.

    Args:
        result: a map of kind "depth".
        k, measure: as in `plot_coupling`.
        strongest: draw this many edges, those of the largest weights; two for each
            layer by default.
        threshold: draw all edges of at least this weight instead, or at most
            `strongest` of them if both are given.

    Returns the Axes; its legend gives the scale of the edges. Raises ValueError for a k
    or measure that the map does not have, a map of tokens, and rows and columns of
    different layers.

    Example:
        >>> ax = tlc.plot_adjacency(tlc.depth_coupling(trace, k=8), k=4)
    """
    # Refuses maps of tokens.
    layers = labels.named({"result": result}, CouplingMap)["result"].row_layers
    if layers != result.col_layers or len(set(layers)) != len(layers):
        raise ValueError(
            "a graph of layers wants a map with the same layers, each once, as rows and "
            f"columns; got rows {list(layers)} and columns {list(result.col_layers)}"
        )
    pairs = weighted_edges(
        result.values(k, measure).detach().cpu().double().numpy(), layers
    )
    edges = pairs
    if threshold is not None:
        edges = [pair for pair in pairs if pair[0] >= threshold]
    n_allowed = len(edges)
    if strongest is not None or threshold is None:
        edges = edges[-(strongest or 2 * len(layers)) :]
    full = 1.0
    if edges and not measure_named(measure).bounded:
        full = edges[-1][0] or 1.0
    ax = ax or labels.new_figure(6.4, 7.0).subplots()
    draw_graph(ax, layers, edges, full)
    k = result.k if k is None else k
    drawn = f"{len(edges)} of {len(pairs)} edges"
    if threshold is not None:
        drawn += f", at least {threshold:g}"
    if len(edges) < n_allowed:
        drawn += ", the strongest"
    measure_name = labels.measure_label(measure, k)
    scale = edge_scale(full)
    labels.plain_legend(
        ax,
        handles=scale,
        title=f"{measure_name}, mean of (l, l′) and (l′, l)\n{drawn}",
        ncols=len(scale),
        **labels.BELOW | {"fontsize": "medium"},
    )
    labels.entitle(ax, labels.map_heading([result], k))
    return ax


def weighted_edges(
    values: np.ndarray, layers: Sequence[int]
) -> list[tuple[float, int, int]]:
    """Return weight, layer and other layer of every pair, from the lightest.

    Strong edges are drawn on top of weak ones.
    """
    weights = (values + values.T) / 2
    below = np.argwhere(np.tri(len(layers), k=-1)).tolist()
    return sorted(
        (weights[i, j], layers[j], layers[i])
        for i, j in below
        if not np.isnan(weights[i, j])
    )


def draw_graph(
    ax: Axes,
    layers: Sequence[int],
    edges: Sequence[tuple[float, int, int]],
    full: float,
    node_size: int = 260,
) -> None:
    """Draw layers clockwise on a circle from the top.

    Edges of weight `full` and more have full width.
    """
    graph = nx.Graph()
    graph.add_nodes_from(layers)
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(layers)) / len(layers)
    places = {
        layer: (np.cos(angle), np.sin(angle))
        for layer, angle in zip(layers, angles, strict=True)
    }
    style = _edge_style(np.array([weight for weight, *_ in edges]) / full)
    nx.draw_networkx_edges(graph, places, [ends for _, *ends in edges], ax=ax, **style)
    nx.draw_networkx_nodes(
        graph, places, ax=ax, node_color="white", edgecolors="0.3", node_size=node_size
    )
    nx.draw_networkx_labels(graph, places, ax=ax, font_size=8 if node_size > 200 else 6)
    ax.set_aspect("equal")
    ax.axis("off")


def edge_scale(full: float) -> list[Line2D]:
    """Return what a legend shows of the edges."""
    shares = np.array([0.1, 0.25, 0.5, 1])
    looks = zip(shares, *_edge_style(shares).values(), strict=True)
    return [
        Line2D([], [], label=f"{full * share:.2g}", linewidth=w, color=color)
        for share, w, color in looks
    ]


@checked
def plot_locality(
    results: _Maps, *, k: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw mean coupling of layers by their distance `|l − l′|`, from 1 on.

    There is one line for each result.

    Shows how fast coupling fades with distance; the dashed line is what random
    subspaces would give. `results` are maps of kind "depth" by name, or one; k is by
    default what all of them hold.

    Returns the Axes; its lines are the results in their order, then the null. Raises
    ValueError for no map, a map of tokens, and a k that is out of range, or not given
    where the maps hold different numbers.

    Example:
        >>> maps = {
        ...     text: tlc.depth_coupling(tlc.trace(model, text), k=4)
        ...     for text in ("w1 w2 w3", "w9 w8")
        ... }
        >>> ax = tlc.plots.plot_locality(maps)
    """
    maps = labels.named(results, CouplingMap)
    k = labels.common_k(list(maps.values()), k)
    ax = ax or labels.new_figure(6.4, 4.6).subplots()
    for name, result, color in labels.in_colors(maps):
        profile = result.locality_profile(k).detach().cpu().numpy()
        # A selection of layers may have no pair at some distance: the line goes on to
        # the next.
        distance = 1 + np.flatnonzero(~np.isnan(profile[1:]))
        ax.plot(
            distance,
            profile[distance],
            color=color,
            marker="o",
            markersize=3,
            label=name,
        )
    # The null of this measure depends on k alone: one line for all maps.
    labels.draw_null(ax.axhline, random_subspace_null(k))
    ax.set(
        ylim=(0, None),
        xlabel="distance |l − l′| in layers",
        ylabel=f"mean {labels.measure_label('coupling', k)}",
    )
    labels.finish_lines(ax, labels.map_heading(list(maps.values()), k))
    return ax


@checked
def plot_singular_values(
    results: _Maps, *, n: Count = 10, ax: Axes | None = None
) -> Axes:
    """Draw the largest singular values of the Jacobians by depth.

    Shows how strongly each block amplifies its top directions, and how flat its
    spectrum is: lines close together are singular values close together. One colour for
    each result (as in `plot_locality`), σ_1 darkest; n of them, or fewer where a map
    holds fewer.

    Returns the Axes; its lines are σ_1, σ_2, … of the first result, then of the next.
    Raises ValueError for no map, a map of tokens, and n below 1.

    Example:
        >>> ax = tlc.plots.plot_singular_values(tlc.depth_coupling(trace, k=8), n=5)
    """
    maps = labels.named(results, CouplingMap)
    ax = ax or labels.new_figure(6.4, 4.6).subplots()
    for name, result, color in labels.in_colors(maps):
        order = np.argsort(result.row_layers)
        depth = np.asarray(result.row_layers)[order]
        sigma = result.singular_values.detach().cpu().numpy()[order, :n]
        base = np.asarray(to_rgb(color))
        for i, fade in enumerate(np.linspace(0, 0.75, sigma.shape[1])):
            # A leading underscore keeps a line out of the legend.
            label = f"_σ_{i + 1}" if i else f"{name}, top {sigma.shape[1]}"
            look = {
                "color": tuple(base + fade * (1 - base)),
                "linewidth": 1.2,
                "zorder": 3 - fade,
            }
            ax.plot(depth, sigma[:, i], label=label, **look)
    ax.set_yscale("log", nonpositive="mask")
    ax.set(xlabel="layer", ylabel="singular value of J")
    labels.finish_lines(ax, labels.map_heading(list(maps.values())))
    return ax


def _edge_style(shares: np.ndarray) -> dict[str, list]:
    shares = np.clip(shares, 0, 1)
    return {
        "width": list(_MAX_EDGE_WIDTH * shares),
        "edge_color": [(*to_rgb("C0"), a) for a in np.sqrt(shares)],
    }
