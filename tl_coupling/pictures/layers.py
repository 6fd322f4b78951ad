"""Draw layers: their coupling as arcs and by distance, and their singular values."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, to_rgb

from tl_coupling.arguments import Count, Finite, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.measures import AnyMeasure, random_subspace_null
from tl_coupling.pictures import labels
from tl_coupling.pictures.maps import color_scale

_Maps = CouplingMap | Mapping[str, CouplingMap]
# In points.
_MAX_ARC_WIDTH = 4.0
# More arcs than these hide each other.
_MOST_ARCS = 20
# A mean over so small a share of the pairs that neighbours are varies most.
_FEW_PAIRS = 0.1
# The palest shades of the map are lost on white.
_ARC_COLORS = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))


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
    """Draw the strongest couplings as arcs over a line of layers.

    Read off which groups of layers are coupled, and how far couplings reach: an arc
    joins two layers and is the higher the further apart they are. It is as wide and as
    dark as they are coupled. Its weight is the mean of the map's two values for a pair
    of layers, (l, l′) and (l′, l). Colours are on the scale of `plot_coupling`: those
    of an untrained model stay pale. The mark on the colour bar is what random subspaces
    would give.

    Args:
        result: a map of kind "depth".
        k, measure: as in `plot_coupling`.
        strongest: draw this many arcs, those of the largest weights; by default one for
            each layer, at most 20.
        threshold: draw all arcs of at least this weight instead, or at most `strongest`
            of them if both are given.

    Returns the Axes; its only collection are the arcs, from the weakest. Raises
    ValueError for a k or measure that the map does not have, a map of tokens, and rows
    and columns of different layers.

    Example:
        >>> ax = tlc.plot_adjacency(tlc.depth_coupling(trace, k=8), k=4)
    """
    # Refuses maps of tokens.
    layers = labels.named({"result": result}, CouplingMap)["result"].row_layers
    if layers != result.col_layers or len(set(layers)) != len(layers):
        raise ValueError(
            "arcs between layers want a map with the same layers, each once, as rows "
            f"and columns; got rows {list(layers)} and columns {list(result.col_layers)}"
        )
    values = result.values(k, measure).detach().cpu().double().numpy()
    pairs = weighted_pairs(values, layers)
    drawn_pairs = pairs
    if threshold is not None:
        drawn_pairs = [pair for pair in pairs if pair[0] >= threshold]
    n_allowed = len(drawn_pairs)
    if strongest is not None or threshold is None:
        # Pairs come from the lightest: the strongest are the last.
        drawn_pairs = drawn_pairs[-(strongest or most_arcs(layers)) :]
    # The scale of the heat map, not that of the drawn arcs: pale arcs are weak ones.
    full = color_scale([result], k, measure)[1]
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 3.2).subplots()
    arcs = draw_arcs(ax, layers, drawn_pairs, full)
    k = result.k if k is None else k
    drawn = f"{len(drawn_pairs)} of {len(pairs)} pairs"
    if threshold is not None:
        drawn += f" at {threshold:g} or more"
    if len(drawn_pairs) < n_allowed:
        drawn += ", the strongest"
    ax.set_xlabel(f"layer ({drawn})")
    name = labels.short_measure(measure)
    bar = ax.figure.colorbar(arcs, ax=ax, label=f"{name}, mean of both orders").ax
    null = result.null(k, measure)
    # A null off the scale has no mark: at the edge it would look like a value.
    if 0 <= null <= full:
        labels.mark_and_name_null(bar, null)
    labels.entitle(ax, labels.map_heading([result], k))
    return ax


def most_arcs(layers: Sequence[int]) -> int:
    """Return how many arcs are drawn over these layers by default."""
    return min(len(layers), _MOST_ARCS)


def weighted_pairs(
    values: np.ndarray, layers: Sequence[int]
) -> list[tuple[float, int, int]]:
    """Return weight, layer and other layer of every pair, from the lightest.

    Strong couplings are drawn on top of weak ones.
    """
    # A map is not symmetric: J of one layer in the axes of another, and the reverse.
    weights = (values + values.T) / 2
    # Each pair once, without the diagonal.
    below = np.argwhere(np.tri(len(layers), k=-1)).tolist()
    return sorted(
        (float(weights[i, j]), layers[j], layers[i])
        for i, j in below
        if not np.isnan(weights[i, j])
    )


def draw_arcs(
    ax: Axes,
    layers: Sequence[int],
    pairs: Sequence[tuple[float, int, int]],
    full: float,
    most_ticks: int = labels.MAX_LAYER_TICKS,
) -> LineCollection:
    """Draw layers on a line, and an arc over it for each pair.

    Arcs of weight `full` and more have full width.
    """
    weights = np.array([weight for weight, *_ in pairs])
    # 60 points make half a circle look round.
    angles = np.linspace(np.pi, 0, 60)
    segments = []
    for _, layer, other_layer in pairs:
        middle = (layer + other_layer) / 2
        radius = abs(layer - other_layer) / 2
        x = middle + radius * np.cos(angles)
        segments.append(np.column_stack([x, radius * np.sin(angles)]))
    arcs = LineCollection(
        segments,
        array=weights,
        cmap=_ARC_COLORS,
        linewidths=_MAX_ARC_WIDTH * np.clip(weights / full, 0, 1),
        capstyle="round",
    )
    arcs.set_clim(0, full)
    ax.add_collection(arcs)
    ax.plot(
        layers,
        np.zeros(len(layers)),
        "o",
        color="0.35",
        markersize=3,
        label="_layers",
        clip_on=False,
        zorder=3,
    )
    furthest = max((abs(first - second) for _, first, second in pairs), default=1)
    room = 0.02 * max(1, max(layers) - min(layers))
    ax.set_xlim(min(layers) - room, max(layers) + room)
    # An arc is half as high as its ends are apart; the rest is room for its line.
    ax.set_ylim(0, 0.53 * furthest)
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    order = sorted(layers)
    labels.name_ticks(ax.xaxis, order, most_ticks, np.array(order), fontsize="small")
    return arcs


@checked
def plot_locality(
    results: _Maps, *, k: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw mean coupling of layers by their distance `|l − l′|`, from 1 on.

    There is one line for each result.

    Shows how fast coupling fades with distance. The dashed line is what random
    subspaces would give, and in the grey band lie 95 % of their means. The band is wider
    at larger distances, where a point is a mean over fewer pairs: where these are a
    tenth of the pairs of neighbours, or fewer, it is faded.
    `results` are maps of kind "depth" by name, or one; k is by default what all of them
    hold.

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
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    for name, result, color in labels.assign_colors(maps):
        profile = result.locality_profile(k).detach().cpu().numpy()
        # A selection of layers may have no pair at some distance: the line goes on to
        # the next.
        distance = 1 + np.flatnonzero(~np.isnan(profile[1:]))
        look = labels.marked(color)
        is_faded = _pairs_at(result, distance) <= _FEW_PAIRS * _pairs_at(result, 1)
        if is_faded.any():
            ax.plot(distance, profile[distance], label="_faded", alpha=0.3, **look)
        kept = distance[~is_faded]
        ax.plot(kept, profile[kept], label=name, **look)
    # The null of this measure depends on k alone: one line for all maps. How far means
    # spread depends on their spectra: the band holds that of every map.
    labels.draw_null(ax.axhline, random_subspace_null(k))
    distance, low, high = _null_band(list(maps.values()), k)
    labels.draw_null_band(ax, distance, low, high)
    ax.set(
        ylim=(0, None),
        xlabel="distance |l − l′| in layers",
        ylabel=f"mean {labels.measure_label('coupling', k)}",
    )
    below = labels.BELOW | {"bbox_to_anchor": (0.5, -0.14), "ncols": 2}
    labels.finish_lines(ax, labels.map_heading(list(maps.values()), k), **below)
    return ax


def _null_band(
    maps: Sequence[CouplingMap], k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances, and the ends of a band that holds the intervals of all maps."""
    intervals = [result.null_interval_by_distance(k).numpy() for result in maps]
    ends = np.full((len(maps), max(map(len, intervals)), 2), np.nan)
    for place, interval in enumerate(intervals):
        ends[place, : len(interval)] = interval
    # Distance 0, and those that no map has, are NaN in all.
    distance = np.flatnonzero(np.isfinite(ends[..., 0]).any(0))
    low, high = np.nanmin(ends[:, distance, 0], 0), np.nanmax(ends[:, distance, 1], 0)
    return distance, low, high


def _pairs_at(result: CouplingMap, distance: np.ndarray | int) -> np.ndarray:
    """Count the pairs of layers that are that far apart."""
    distances = np.abs(np.subtract.outer(result.row_layers, result.col_layers))
    return (distances[..., None] == distance).sum((0, 1))


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
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    for name, result, color in labels.assign_colors(maps):
        # Layers may have been asked for in any order; a line goes from left to right.
        order = np.argsort(result.row_layers)
        depth = np.asarray(result.row_layers)[order]
        sigma = result.singular_values.detach().cpu().numpy()[order, :n]
        # Faded towards white, σ_1 being the full colour and on top.
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
    heading = labels.map_heading(list(maps.values()))
    # The heading of maps begins with what they are of.
    _, _, provenance = heading.partition("\n")
    labels.finish_lines(ax, f"Singular values of the Jacobians\n{provenance}")
    return ax
