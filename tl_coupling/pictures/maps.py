"""Draw heat maps: couplings, their spread, the matrices behind them, influence."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from tl_coupling.arguments import Finite, Positive, checked
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.influence import Influence, InfluenceMeasure
from tl_coupling.measures import AnyMeasure, Sides, measure_named
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.trajectories import ResidualAlignment

_Influences = Influence | Mapping[str, Influence]
# The most places of a map that are drawn as matrices.
_MOST_PLACES = 5
# The share of entries that the colour scale holds, and its least end.
_MOST_ENTRIES = 0.995
_LEAST_SCALE = 0.12
# The most rows of a matrix that are drawn unless the caller asks for more.
_LARGEST_PANEL = 20
# Two maps side by side have half of the page each.
_MOST_TOKENS_OF_TWO = 9
_LONGEST_SIDE_OF_TWO = 16
# Beside two maps a colour bar would take the width that they need.
_FLAT_BAR: dict[str, Any] = {"orientation": "horizontal", "shrink": 0.6, "aspect": 40}
# Inches that a name on its side takes.
_ROOM_FOR_A_TICK = 0.2
_INFLUENCE = {
    "frobenius_norm": "Frobenius norm of J",
    "largest_singular_value": "largest singular value σ₁ of J",
    "participation_ratio": "participation ratio of J",
    "effective_rank": "effective rank of J",
}


@checked
def plot_coupling(
    result: CouplingMap,
    *,
    untrained: CouplingMap | None = None,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    ax: Axes | None = None,
    vmin: Finite | None = None,
    vmax: Finite | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool = True,
    **options: Any,
) -> Axes:
    """Draw a measure of every pair of connections as a heat map.

    Read off which J_1 (row) is diagonalised by whose singular vectors (column): bright
    cells are coupled pairs, and a bright band along the diagonal of a depth map is
    locality. The mark on the colour bar is what random subspaces would give. Grey are
    the pairs of a connection with itself, which say nothing, and undefined values
    (NaN).

    Args:
        result: any map, or a mean of them; ticks are layers for kind "depth", tokens
            for "self" and "context".
        untrained: the same connections of the untrained twin, drawn beside it on the
            same scale, in a figure of their own.
        k: how many top singular vectors; as many as the map holds by default.
        measure: as in `CouplingMap.values`, with its `options`.
        vmin, vmax: ends of the colour scale; those of `color_scale([result], …)` by
            default.
        cmap: a colour map; matplotlib's default unless given.
        colorbar: whether the colour bar is drawn; without it, several maps of one
            figure can share a bar, with one `vmin` and `vmax`.

    Returns the Axes; the heat map is its only image. Raises ValueError for a k or
    measure that the map does not have, and for `ax` beside `untrained`.

    Example:
        >>> ax = tlc.plot_coupling(tlc.depth_coupling(trace, k=8), k=4)
        >>> ax.figure.savefig("coupling.png")
    """
    shown = {"trained": result}
    if untrained is not None:
        if ax is not None:
            raise ValueError("two maps have a figure of their own: leave `ax` out")
        shown["untrained"] = untrained
    axes = draw_maps(shown, k, measure, ax, vmin, vmax, cmap, colorbar, **options)
    return axes[0]


def draw_maps(
    maps: Mapping[str, CouplingMap],
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    ax: Axes | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool = True,
    **options: Any,
) -> list[Axes]:
    """Draw maps of the same connections side by side on one scale, each with its name.

    One map has no name, and is drawn in `ax` where that is given.
    """
    results = list(maps.values())
    first = results[0]
    low, high = color_scale(results, k, measure, **options)
    if vmin is not None:
        low = vmin
    if vmax is not None:
        high = vmax
    # After the defaults: an end that was given may lie beyond the other's default.
    if low >= high:
        raise ValueError(f"`vmin` must lie below `vmax`, got {low} and {high}")
    colors = labels.color_map(cmap).with_extremes(bad=labels.UNDEFINED)
    k = first.k if k is None else k
    null = first.null(k, measure, **options)
    axes = [ax] if ax is not None else _side_by_side(len(maps), first.kind)
    for drawn, (name, result) in zip(axes, maps.items(), strict=True):
        values = _mask_own_pairs(result, k, measure, options)
        image = drawn.imshow(values, vmin=low, vmax=high, cmap=colors)
        _name_sides(drawn, result, n_maps=len(maps))
        title = labels.map_heading([result], k)
        # A map of own pairs alone has no mean.
        if not bool(result.own_pairs().all()):
            mean = float(result.mean(k, measure, **options))
            if len(maps) > 1:
                title = f"{name}\nmean {mean:.3f}"
            else:
                means = f"mean {mean:.3f}, {RANDOM_SUBSPACES} {null:.3f}"
                title = labels.with_numbers(title, means)
        labels.entitle(drawn, title)
    figure: Any = axes[0].figure
    # Rows are named once, on the left.
    for drawn in axes[1:]:
        drawn.set_ylabel("")
        drawn.tick_params(labelleft=False)
    if len(maps) > 1:
        title = labels.map_heading([first], k)
        title = labels.with_numbers(title, f"{RANDOM_SUBSPACES} {null:.3f}")
        labels.entitle(figure, title)
    if not colorbar:
        return axes
    label = labels.short_measure(measure)
    if options:
        label = labels.measure_label(measure, k, **options)
    is_upright = len(maps) == 1
    look = {} if is_upright else _FLAT_BAR
    bar = figure.colorbar(image, ax=axes, label=label, **look).ax
    # A null off the scale has no mark: at the edge it would look like a value.
    if low <= null <= high:
        labels.mark_and_name_null(bar, null, is_upright=is_upright)
    return axes


def _side_by_side(n: int, kind: str) -> list[Axes]:
    """Return one to four Axes beside each other, in a new figure."""
    # More than two would be too small where two can be read on a telephone.
    width = labels.PHONE_WIDTH if n <= 2 else labels.PAGE_WIDTH
    height = 4.4
    if n > 1:
        # Tokens have longer names than layers.
        height = 4.4 if kind == "depth" else 4.8
    figure = labels.new_figure(width, height, "compressed")
    return list(figure.subplots(1, n, squeeze=False)[0])


@checked
def plot_spread(
    result: MeanCouplingMap,
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    ax: Axes | None = None,
) -> Axes:
    """Draw a measure's standard deviation over prompts, or over tokens, as a heat map of
    all pairs.

    Read off, beside `plot_coupling` of the same map, which pairs are coupled to the
    same degree whatever the prompt. The map is a mean, of `mean_depth_coupling` on many
    traces, or of `depth_coupling` at several positions; k, measure and what is returned
    are as in `plot_coupling`. Raises ValueError for a k or measure that the map does
    not have, and for a single prompt and token, which has no spread.

    Example:
        >>> mean = tlc.mean_depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=4)
        >>> ax = tlc.plots.plot_spread(mean)
    """
    spread = result.spread(k, measure)
    if not bool(spread.isfinite().any()):
        raise ValueError(
            "the spread takes at least two prompts, or two tokens of one: this map has "
            "one of them"
        )
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.4, "compressed").subplots()
    k = result.k if k is None else k
    name = labels.measure_label(measure, k)
    label = f"standard deviation over {labels.n_averaged(result)} of\n{name}"
    _draw_pairs(
        ax, result, spread.detach().cpu().numpy(), k, label, vmin=0, cmap="cividis"
    )
    return ax


def color_scale(
    results: Sequence[CouplingMap],
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    **options: Any,
) -> tuple[float, float]:
    """Return the ends of one colour scale for all these maps and their nulls.

    Pairs that are drawn in grey do not count.

    It begins at 0, or below it for negative values of one's own measure. That of the
    normalised mis-coupling, near 1 for most pairs, ends at 1 instead. That of coupling
    reaches at least four times the null, or the noise of an untrained model would look
    like structure.
    """
    values = [
        _mask_own_pairs(result, k, measure, options).ravel() for result in results
    ]
    nulls = [result.null(k, measure, **options) for result in results]
    null_tends_to = measure_named(measure).null_tends_to
    # A measure whose null tends to 0 is one of coupling; one that tends to 1 is the
    # normalised mis-coupling, of which low values are the finding.
    least = [min(1.0, 4 * max(nulls))] if null_tends_to == 0 else []
    scale_values = np.concatenate([*values, nulls, least])
    finite = scale_values[np.isfinite(scale_values)]
    if null_tends_to == 1:
        return float(finite.min(initial=1.0)), 1.0
    # All values may be 0, and a scale of no width cannot be drawn.
    return float(finite.min(initial=0.0)), float(finite.max(initial=0.0)) or 1.0


@checked
def plot_coupling_matrices(
    result: CouplingMap,
    *,
    k: int | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    untrained: CouplingMap | None = None,
    vmax: Positive | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw the coupling matrices themselves, a panel A for every pair.

    Pairs are of layers, or of tokens.

    Read off whether A is diagonal: coupled connections show a diagonal line, uncoupled
    ones an even speckle. Divided by the largest singular value σ_1 of its J_1, `|A|` is
    at most 1: all panels share one colour scale, linear, red above 0 and blue below. It
    ends at `vmax`, where most entries of different connections lie: these are small
    beside those of a connection with itself (its singular values, for
    `orientation="ujv"`).

    Args:
        result: any map.
        k: size of the panels; 20, or as many singular vectors as the map holds, by
            default.
        layers: for a map of layers, which ones, in this order; by default the five in
            the middle of the model, which nobody chose by what they show.
        positions: for a map of tokens, which ones, in this order; its last five by
            default.
        untrained: the same connections of the untrained twin, drawn beside it.
        vmax: share of σ_1 where the colours end; by default what 99.5 % of the entries
            of different connections do not exceed, and 0.12 at least: noise stays pale.

    Returns the Figure; an Axes with one image for each grid, then the colour bar.
    Raises ValueError for k out of range, layers or positions that a map does not have
    or does not compare, and two maps of different kinds.

    Example:
        >>> fig = tlc.plot_coupling_matrices(tlc.depth_coupling(trace, k=8), k=4)
        >>> fig.savefig("matrices.png")
    """
    grids = {"result": result} | ({} if untrained is None else {"untrained": untrained})
    if untrained is not None and untrained.kind != result.kind:
        raise ValueError(
            f"`untrained` must be a map of kind {result.kind!r} as well, got {untrained.kind!r}"
        )
    places = _places_drawn(result, layers, positions)
    largest_k = labels.common_k(list(grids.values()), k)
    k = min(_LARGEST_PANEL, largest_k) if k is None else k
    panels = [_panels(grid, places, k, name) for name, grid in grids.items()]
    vmax = vmax or _most_entries(panels)
    # Tokens have longer names than layers.
    height = 3.8 if untrained is not None and result.kind == "depth" else 4.4
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, height, "compressed")
    axes = fig.subplots(1, len(grids), squeeze=False)[0]
    for ax, (name, grid), panel in zip(axes, grids.items(), panels, strict=True):
        # Centred on 0: A has both signs.
        image, centres = _draw_mosaic(ax, panel, Normalize(-vmax, vmax), "RdBu_r")
        _name_sides(ax, grid, places, centres, n_maps=len(grids))
        title = labels.map_heading([grid], k)
        if untrained is not None:
            title = "trained" if name == "result" else name
        labels.entitle(ax, title)
    if untrained is not None:
        axes[1].set_ylabel("")
        axes[1].tick_params(labelleft=False)
        labels.entitle(fig, labels.map_heading([result], k))
    # Divided by σ_1, no entry of A is above 1.
    extend = "both" if vmax < 1 else "neither"
    look = {"aspect": 40} if untrained is None else _FLAT_BAR
    fig.colorbar(
        image, ax=list(axes), label="A / σ₁ of the Jacobian", extend=extend, **look
    )
    return fig


@checked
def plot_alignment_matrices(
    result: ResidualAlignment,
    *,
    sides: Sides = "uv",
    layers: Sequence[int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the alignment matrices, a panel of `|cosines|` for every pair of layers.

    Cosines are between singular vectors.

    Read off whether the top singular vectors align (Li and Papyan's RA2): then all
    panels have a bright diagonal. The panels on the diagonal of "uv" compare the left
    and right vectors of one block; those of "uu" and "vv" say nothing. The mark on the
    colour bar is the root mean square cosine of random vectors.

    Args:
        sides: "uv", the left vectors of the row's layer with the right ones of the
            column's; "uu" or "vv".
        layers: which ones, in this order; all by default.

    Returns the Axes, with one image. Raises ValueError for a layer that the result does
    not have, or none.

    Example:
        >>> result = tlc.trajectories.residual_alignment(trace, n_classes=4)
        >>> ax = tlc.plots.plot_alignment_matrices(result, sides="uu")
    """
    n_layers = len(result.singular_values)
    drawn_layers = list(range(n_layers))
    if layers is not None:
        drawn_layers = [i + n_layers if -n_layers <= i < 0 else i for i in layers]
    if not drawn_layers or not set(drawn_layers) <= set(range(n_layers)):
        raise ValueError(
            f"`layers` must be some of the {n_layers} layers, 0 to {n_layers - 1}, "
            f"got {drawn_layers}"
        )
    matrices = getattr(result, sides)[drawn_layers][:, drawn_layers]
    panels = matrices.abs().cpu().numpy()
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.4, "compressed").subplots()
    # Square-root colours: cosines of random vectors, about 1/√d_model, are still seen.
    image, centres = _draw_mosaic(ax, panels, PowerNorm(0.5, 0, 1), "magma")
    for axis, side in zip((ax.yaxis, ax.xaxis), sides, strict=True):
        labels.name_ticks(axis, drawn_layers, labels.MAX_LAYER_TICKS, centres)
        hand = "left" if side == "u" else "right"
        axis.set_label_text(f"layer of the {hand} singular vectors {side.upper()}")
    row_side = sides[0].upper()
    column_side = sides[1].upper()
    title = f"Residual alignment · {row_side}ᵀ{column_side} · k = {result.k}"
    labels.entitle(ax, labels.heading(title, [result.provenance], [result.position]))
    bar = ax.figure.colorbar(
        image, ax=ax, label="|cosine| (square-root colours); null: random vectors"
    ).ax
    # `null` is of squared cosines, the colours of cosines.
    labels.mark_null(bar, result.null() ** 0.5)
    return ax


@checked
def plot_influence(
    results: _Influences,
    *,
    measure: InfluenceMeasure = "frobenius_norm",
    fig: Figure | None = None,
) -> Figure:
    """Draw what every source token does to one output token, layer by layer.

    Read off which tokens a layer listens to (the two norms, on a logarithmic scale),
    and through how many directions (the two ranks). The last column is the output
    token's own Jacobian, its skip connection left out. Several results by name (trained
    and untrained) share one colour scale; undefined values (NaN) and zeros are grey.
    The measures are fields of `Influence`.

    Returns the Figure; a panel for each result, then the colour bar. Raises ValueError
    for an unknown measure, and for no result.

    Example:
        >>> fig = tlc.plots.plot_influence(tlc.cross_token_influence(trace))
    """
    panels = labels.named(results, Influence)
    values = {
        name: getattr(result, measure).detach().cpu().double().numpy()
        for name, result in panels.items()
    }
    n_sources = max(len(result.source_positions) for result in panels.values())
    widest = (labels.PHONE_WIDTH - 0.8) / len(panels)
    width = min(widest, max(3.0, 1.2 + 0.22 * n_sources))
    fig = fig or labels.new_figure(width * len(panels) + 0.8, 5.0)
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    positive = np.concatenate(
        [value[np.isfinite(value) & (value > 0)] for value in values.values()]
    )
    # Ranks are on a linear scale from 0; norms span decades.
    norm = Normalize(0, positive.max(initial=0) or 1)
    if len(positive) and measure in ("frobenius_norm", "largest_singular_value"):
        norm = LogNorm(positive.min(), positive.max())
    for ax, (name, result) in zip(axes, panels.items(), strict=True):
        image = ax.imshow(
            np.where(values[name] > 0, values[name], np.nan), norm=norm, aspect="auto"
        )
        ax.set_facecolor(labels.UNDEFINED)
        names = [
            labels.token_name(result.provenance, t) for t in result.source_positions
        ]
        labels.name_ticks(ax.xaxis, names, int(width / _ROOM_FOR_A_TICK), rotation=90)
        labels.name_ticks(ax.yaxis, result.layers, labels.MAX_LAYER_TICKS)
        ax.set_xlabel("source token")
        if len(panels) > 1:
            labels.entitle(ax, name)
    axes[0].set_ylabel("layer")
    fig.colorbar(image, ax=axes, label=_INFLUENCE[measure])
    tokens = {
        labels.token_name(result.provenance, result.output_position)
        for result in panels.values()
    }
    title = "Influence on one token"
    if len(tokens) == 1:
        title = f"Influence on token {tokens.pop()}"
    provenances = [result.provenance for result in panels.values()]
    labels.entitle(fig, labels.heading(title, provenances))
    return fig


def _most_entries(panels: Sequence[Float[np.ndarray, "n n k k"]]) -> float:
    """Return what few entries exceed, of the panels of different connections.

    It is `_LEAST_SCALE` at least.

    Places are the same in rows and columns: panels on the diagonal compare a connection
    with itself, and say how large singular values are.
    """
    n = len(panels[0])
    is_different = ~np.eye(n, dtype=bool)
    if n == 1:
        is_different = np.ones((1, 1), dtype=bool)
    sizes = np.abs([panel[is_different] for panel in panels])
    return max(_LEAST_SCALE, float(np.nanquantile(sizes, _MOST_ENTRIES)))


def _draw_mosaic(
    ax: Axes, panels: np.ndarray, norm: Normalize, cmap: str
) -> tuple[AxesImage, np.ndarray]:
    """Draw panels `[n n k k]` as one image with white lines; return their centres too.

    An Axes for each panel would take seconds to draw.
    """
    n, k = panels.shape[1:3]
    # Pads each panel to the right and below; `[:-gap]` cuts the last gap off.
    gap = max(1, k // 12)
    spaced = np.pad(
        panels, [(0, 0), (0, 0), (0, gap), (0, gap)], constant_values=np.nan
    )
    mosaic = spaced.transpose(0, 2, 1, 3).reshape(2 * (n * (k + gap),))[:-gap, :-gap]
    # A gap that is seen beside white, the middle of a scale.
    gaps = "0.6" if cmap == "RdBu_r" else "white"
    image = ax.imshow(mosaic, norm=norm, cmap=colormaps[cmap].with_extremes(bad=gaps))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image, np.arange(n) * (k + gap) + (k - 1) / 2


def _draw_pairs(
    ax: Axes, result: CouplingMap, values: np.ndarray, k: int, label: str, **colors: Any
) -> Axes:
    """Draw a heat map, and return its colour bar."""
    image = ax.imshow(values, **colors)
    _name_sides(ax, result)
    labels.entitle(ax, labels.map_heading([result], k))
    return ax.figure.colorbar(image, ax=ax, label=label).ax


def _name_sides(
    ax: Axes,
    result: CouplingMap,
    drawn_places: Sequence[int] | None = None,
    centres: np.ndarray | None = None,
    n_maps: int = 1,
) -> None:
    """Say what rows and columns are, with a tick for each place that is drawn.

    Where all are drawn there are as many ticks as have room.
    """
    is_depth = result.kind == "depth"
    if is_depth:
        connection = "layer"
        row_layer = column_layer = ""
    else:
        fixed = result.provenance.get("fixed", "")
        free_ends = {"output": "input token", "input": "output token"}
        connection = free_ends.get(fixed, "token")
        row_layer = f", layer {result.row_layers[0]}"
        column_layer = f", layer {result.col_layers[0]}"
    row_name = f"whose Jacobian ({connection}{row_layer})"
    column_name = f"whose singular vectors ({connection}{column_layer})"
    if n_maps > 1:
        # Half of the width has no room for them in one line.
        row_name = fill(row_name, _LONGEST_SIDE_OF_TWO)
        column_name = fill(column_name, _LONGEST_SIDE_OF_TWO)
    ax.set(ylabel=row_name, xlabel=column_name)
    for axis, all_places in zip((ax.yaxis, ax.xaxis), _places(result), strict=True):
        places = drawn_places or all_places
        if is_depth:
            names: list[Any] = list(places)
            max_ticks = (
                labels.MAX_LAYER_TICKS if n_maps == 1 else labels.MAX_TICKS_BESIDE
            )
        else:
            names = [labels.token_name(result.provenance, place) for place in places]
            max_ticks = labels.MAX_TOKEN_TICKS if n_maps == 1 else _MOST_TOKENS_OF_TWO
        if drawn_places:
            max_ticks = len(names)
        options: dict[str, Any] = {}
        # Words side by side would overlap; numbers of layers do not.
        if not is_depth and axis is ax.xaxis:
            options["rotation"] = 90
        if not is_depth:
            options["fontsize"] = "small"
        labels.name_ticks(axis, names, max_ticks, centres, **options)


def _mask_own_pairs(
    result: CouplingMap, k: int | None, measure: AnyMeasure, options: dict[str, Any]
) -> np.ndarray:
    """Return the values, NaN where a connection meets itself.

    All are returned where there are no other pairs.
    """
    values = result.values(k, measure, **options).detach().cpu().double().numpy()
    rows = np.array([result.row_layers, result.row_positions])
    cols = np.array([result.col_layers, result.col_positions])
    # `[n_rows n_cols]`: a connection is itself where layer and position are the same.
    own = (rows[:, :, None] == cols[:, None, :]).all(0)
    return values if own.all() else np.where(own, np.nan, values)


def _places_drawn(
    result: CouplingMap, layers: Sequence[int] | None, positions: Sequence[int] | None
) -> list[int]:
    """Return the layers or positions to draw, counted from 0.

    Raises:
        ValueError: none, or layers of a map of tokens, or positions of one of layers.
    """
    is_depth = result.kind == "depth"
    if is_depth:
        name = "layers"
        selection, unfit = layers, positions
    else:
        name = "positions"
        selection, unfit = positions, layers
    if unfit is not None:
        raise ValueError(
            f"a map of kind {result.kind!r} is drawn for chosen `{name}` only"
        )
    if selection is None:
        row_places, column_places = _places(result)
        common_places = [place for place in row_places if place in column_places]
        # The last five tokens, or the layers in the middle.
        first = len(common_places) - _MOST_PLACES
        if is_depth:
            first = first // 2
        places = common_places[max(0, first) :][:_MOST_PLACES]
    else:
        n_places = len(result.provenance.get("str_tokens", ()))
        if is_depth:
            n_places = result.provenance.get("n_layers", 0)
        places = [i + n_places if -n_places <= i < 0 else i for i in selection]
    if not places:
        raise ValueError(f"`{name}` is empty: wanted at least one of the map's")
    return places


def _panels(
    result: CouplingMap, places: Sequence[int], k: int, name: str
) -> Float[np.ndarray, "n n k k"]:
    """Return `A / σ_1(J_1)` for pairs of the connections at these places."""
    row_places, column_places = _places(result)
    for side_places in (row_places, column_places):
        if missing := [place for place in places if place not in side_places]:
            side = "layers" if result.kind == "depth" else "positions"
            raise ValueError(
                f"`{side}` must be among those of {name!r}, {list(side_places)}, "
                f"got {missing}"
            )
    rows = [row_places.index(place) for place in places]
    columns = [column_places.index(place) for place in places]
    # A Jacobian may be 0: its panel is then 0 too, and not NaN.
    smallest = torch.finfo(result.singular_values.dtype).tiny
    largest = result.singular_values[rows, 0].clamp_min(smallest)
    panels = result.at(k)[rows][:, columns] / largest[:, None, None, None]
    return panels.detach().cpu().numpy()


def _places(result: CouplingMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what tells rows and columns apart: layers, or token positions."""
    if result.kind == "depth":
        return result.row_layers, result.col_layers
    return result.row_positions, result.col_positions
