"""Coupling of every pair of connections: of all layers at one token, or of all tokens
at two layers.

Every comparison is a list of connections that give J_1 (rows) and a list that gives
singular vectors (columns).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, TypeAlias

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks import Trace
from tl_coupling.comparisons.choices import (
    chosen_positions,
    free_end,
    layer_connections,
)
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.means import MeanCouplingMap
from tl_coupling.jacobians import (
    DEFAULT_OPTIONS,
    AnyMethod,
    Connection,
    Coupled,
    Decomposed,
    JacobianOptions,
    MemoryLimit,
    Rows,
    chosen_layers,
    couple,
    decompose_each,
    decompose_sides,
)
from tl_coupling.measures import AnyMeasure, Change, Metric, Orientation, Without
from tl_coupling.progress import Progress, with_progress

Positions: TypeAlias = int | Sequence[int] | Literal["all"]
_ONE_TRACE = (
    "`tl_coupling.trace(model, prompt)` makes one, and `mean_depth_coupling(traces)` "
    "takes several"
)
_SEVERAL_TRACES = "`depth_coupling(trace)` takes one"
SeveralTraces = Annotated[
    Iterable[object], "a list of traced prompts: `trace(model, prompt)` makes one"
]


@checked
def depth_coupling(
    trace: Annotated[Trace, _ONE_TRACE],
    k: int | None = None,
    position: Positions = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    cols: Sequence[int] | None = None,
    measures: Sequence[AnyMeasure] = (),
    without: Without | None = None,
    metric: Metric | None = None,
    method: AnyMethod = "jacobians",
    chunk_size: Count | None = None,
    batch: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> CouplingMap:
    r"""Coupling across depth: one token's Jacobians of every two layers.

    .. math:: A_{l l'} = U_{l',k}^\top J^l_{tt} V_{l',k}

    Depth-wise coupling of Aubry et al. 2025, section 3.1. The measures of each A are
    methods of the result. J of a block that normalises the stream itself (post-norm:
    BERT) is that of its residual branches before their norms, because `block(X) − X`
    holds `−I`: `block_jacobian` with `function="branches"`.

    Args:
        trace: a traced prompt. `mean_depth_coupling` takes many.
        k: how many top singular vectors: 50, or all of a narrower model, by default.
            Every smaller k is read off the same result.
        position: the token; the last by default, as in the paper. Of several, or
            `"all"`, the result is the mean over their maps, with its spread; the first
            token sees no other and may be left out, `range(1, trace.n_pos)`.
        orientation: `"ujv"` (the paper's) or `"vju"`.
        layers: a selection of layers, in this order; all by default.
        rows, cols: layers of J_1 alone, and of the singular vectors alone; all by
            default. `rows=[5]` is one row of the map.
        measures: functions of one's own that a mean over tokens is to hold, see
            `CouplingMap.values`; it holds all that have names. The map of one token
            gives any of them without.
        without: `"identity"` for the Jacobians without their best multiples of the
            identity, `measures.without_identity`.
        metric: M, `[d_model d_model]`: what length means in the residual stream.
            Jacobians are compared as `M^{1/2} J M^{-1/2}`, so that singular vectors are
            those of that metric; `measures.stream_metric(traces)` is one. By default
            all coordinates count alike, M = I.
        method: `"jacobians"` forms each J; `"products"` takes triplets and A from
            products with vectors, `block_spectrum`, and never forms one: for wide
            models with a small k, and blocks whose only way is the full sequence.
            `"auto"` takes the one that `plan` says is cheaper.
            `frobenius_norms` are then estimates, to about a per cent; of coupling only
            `null_interval` depends on them, of other measures the nulls.
        chunk_size: as in `block_jacobian`.
        batch: how many Jacobians are computed by one call, of blocks and, in
            `mean_depth_coupling`, of prompts of one length. By default as many as fit
            into half of a GPU's free memory, which holds a copy of their weights; one
            on a CPU, which gains nothing by it. Blocks of one kind go together, each
            checked as alone; what does not go together goes singly.
        max_memory: bytes, or a text such as "3GiB", that this may take beside the model
            and the trace. Chunks become smaller, and Jacobians that do not fit are kept
            in a temporary file; by default where they would take more than half of what
            is free, or, of a model that is read from disk, more than a block.
        progress: wraps the loop over Jacobians: `progress=tqdm.tqdm`. By default a bar
            in a terminal or notebook; `False` for none.

    Returns:
        a `CouplingMap` with rows = layers of J_1, columns = layers that gave the
        singular vectors; of several tokens a `MeanCouplingMap`, whose `by_map` is the
        mean coupling at each.

    Raises:
        ValueError: k outside `[1, d_model]`, a layer or position out of range, `layers`
            beside `rows` or `cols`, these beside several positions, no position or one
            twice, a `max_memory` that is too small, a block that normalises the stream
            by something else than a module, `method="products"` beside `without` or
            `metric`, which need J.
        TypeError: several traces.

    Warns: where k is above a rank, or σ_k and σ_{k+1} are equal to rounding (the cut is
    then arbitrary); where the model is narrower than the default k = 50.

    Cost: a Jacobian and an SVD for each layer, then `2 L² k d²` flops for the L²
    matrices A; memory for the Jacobians, `L d²` numbers, and A, `L² k²`. Of n tokens
    all this n times, but one trace, and the memory of one token. By products: some `20 (k
    + min(9, k + 3)) + L k + 64` products for each layer, and memory for `2 L d k` numbers
    and A, and for each J whose triplets they do not reach.

    Example:
        >>> result = tlc.depth_coupling(trace, k=8)
        >>> result.coupling(4).shape, round(result.null(4), 3)
        (torch.Size([2, 2]), 0.134)
        >>> tokens = tlc.depth_coupling(trace, k=8, position=[3, 5, -1])
        >>> tokens.spread(4).shape, tokens.by_map(4).shape
        (torch.Size([2, 2]), torch.Size([3]))
    """
    change = Change(without, metric)
    if not isinstance(position, int):
        if rows is not None or cols is not None:
            raise ValueError(
                "give `layers`: `rows` and `cols` are for a single `position`"
            )
        # The bar counts tokens, and Jacobians of one have none.
        options = JacobianOptions(chunk_size, max_memory, False, change, method, batch)
        positions = with_progress(_positions(trace, position), progress, "tokens")
        wanted = ((trace, _layers_at(trace, t, layers)) for t in positions)
        maps = map(
            partial(_depth_map, orientation, change),
            decompose_each(wanted, k, options),
        )
        asked = position if position == "all" else list(position)
        return MeanCouplingMap.over_tokens(maps, asked, measures)
    options = JacobianOptions(chunk_size, max_memory, progress, change, method, batch)
    # Rows and columns are the same layers: each is computed and decomposed once.
    if rows is None and cols is None:
        (decomposed,) = decomposed_layers([trace], k, position, layers, options)
        return _depth_map(orientation, change, decomposed)
    if layers is not None:
        raise ValueError("give `layers`, for rows and columns, or `rows` and `cols`")
    row_connections, column_connections = [
        _layers_at(trace, position, chosen, name)
        for name, chosen in (("rows", rows), ("cols", cols))
    ]
    # No Jacobian is kept where rows and columns are different layers: they are read in
    # turn.
    sides = decompose_sides(trace, row_connections, column_connections, k, options)
    position_fact = {"position": row_connections[0].position}
    provenance = position_fact | change.provenance
    return _maps(row_connections, *sides, "depth", (orientation,), provenance)[
        orientation
    ]


@checked
def mean_depth_coupling(
    traces: Annotated[Iterable[object], _SEVERAL_TRACES],
    k: int | None = None,
    position: Positions = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    measures: Sequence[AnyMeasure] = (),
    without: Without | None = None,
    metric: Metric | None = None,
    method: AnyMethod = "jacobians",
    within_ks: Sequence[int] = (),
    chunk_size: Count | None = None,
    batch: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> MeanCouplingMap:
    """Coupling across depth of many prompts: the mean over them, and its spread.

    Args:
        traces: traced prompts, from a list or a generator.
        k, position, orientation, layers, without, metric, method: as in
            `depth_coupling`, with the same errors and warnings, for each prompt. Of
            several positions each prompt counts with its mean over tokens.
        measures: functions of one's own that the mean is to hold, see
            `CouplingMap.values`; it holds all that have names. Cost: k evaluations a
            prompt, and 400 draws of random subspaces at the end.
        within_ks: the k at which the mean has the nulls `within="spans"` and `"pairs"`
            too, with their intervals, as in `mean_of_maps`; of a single position.
        chunk_size, batch, max_memory: as in `depth_coupling`. Prompts of one length
            that follow each other are computed together.
        progress: wraps the loop over prompts: `progress=tqdm.tqdm`. By default a bar in
            a terminal or notebook; `False` for none.

    Returns:
        a `MeanCouplingMap`: as a `CouplingMap`, with `spread` and `spread_of_mean`.

    Raises:
        ValueError: no traces, a prompt twice, or traces whose maps have no mean: of
            different models, layers or positions.
        TypeError: something that is not a trace.

    Cost: that of `depth_coupling` for each prompt. From a generator of traces one
    prompt at a time is held in memory; of a model that is read from disk as many as
    have Jacobians no larger than its weights, so that one reading serves all.

    Example:
        >>> texts = ["w3 w14 w15", "w9 w2 w6 w5"]
        >>> mean = tlc.mean_depth_coupling((tlc.trace(model, text) for text in texts), k=8)
        >>> mean.coupling(4).shape, mean.spread(4).shape, mean.n_prompts
        (torch.Size([2, 2]), torch.Size([2, 2]), 2)
    """
    # The bar counts prompts, and Jacobians of one have none.
    change = Change(without, metric)
    options = JacobianOptions(chunk_size, max_memory, False, change, method, batch)
    traced = iter(with_progress(map(as_trace, traces), progress, "prompts"))
    if not isinstance(position, int):
        maps_of_tokens = (
            depth_coupling(
                trace,
                k,
                position,
                orientation,
                layers=layers,
                measures=measures,
                without=without,
                metric=metric,
                method=method,
                chunk_size=chunk_size,
                batch=batch,
                max_memory=max_memory,
                progress=False,
            )
            for trace in traced
        )
        return MeanCouplingMap.over(maps_of_tokens, measures, within_ks=within_ks)
    maps_of_group = partial(
        _depth_maps_of_each,
        k=k,
        position=position,
        orientation=orientation,
        layers=layers,
        change=change,
        options=options,
    )
    return MeanCouplingMap.over(maps_of_group(traced), measures, within_ks=within_ks)


def _depth_maps_of_each(
    traces: Iterable[Trace],
    k: int | None,
    position: int,
    orientation: Orientation,
    layers: Sequence[int] | None,
    change: Change,
    options: JacobianOptions,
) -> Iterator[CouplingMap]:
    """Yield the map across depth of each prompt.

    No prompt's Jacobians are held while the next prompt's are computed.
    """
    prompts = decomposed_layers(traces, k, position, layers, options)
    return map(partial(_depth_map, orientation, change), prompts)


@checked
def depth_coupling_by_orientation(
    trace: Trace,
    k: int | None = None,
    position: int = -1,
    orientations: Sequence[Orientation] = ("ujv", "vju"),
    *,
    layers: Sequence[int] | None = None,
    without: Without | None = None,
    metric: Metric | None = None,
    method: AnyMethod = "jacobians",
    chunk_size: Count | None = None,
    batch: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> dict[Orientation, CouplingMap]:
    """Coupling across depth in several orientations, from the same Jacobians and SVDs.

    Arguments as in `depth_coupling`.

    Example:
        >>> both = tlc.comparisons.depth_coupling_by_orientation(trace, k=4)
        >>> {orientation: result.k for orientation, result in both.items()}
        {'ujv': 4, 'vju': 4}
    """
    if not orientations:
        raise ValueError("`orientations` is empty: wanted at least one")
    change = Change(without, metric)
    options = JacobianOptions(chunk_size, max_memory, progress, change, method, batch)
    # `max_memory` holds for the maps of all orientations together.
    (decomposed,) = decomposed_layers(
        [trace], k, position, layers, options, len(orientations)
    )
    return depth_maps(decomposed, orientations, change)


def decomposed_layers(
    traces: Iterable[Trace],
    k: int | None = None,
    position: int = -1,
    layers: Sequence[int] | None = None,
    options: JacobianOptions = DEFAULT_OPTIONS,
    n_maps: int = 1,
) -> Iterator[Decomposed]:
    """Decompose the layers' Jacobians at one token, for each of several prompts.

    `depth_maps` makes maps of them. Prompts of a model that is read from disk share its
    readings. Arguments as in `depth_coupling`; `n_maps` are made of each prompt.
    """
    # A generator: a trace is asked for when its turn comes.
    wanted = ((trace, _layers_at(trace, position, layers)) for trace in traces)
    return decompose_each(wanted, k, options, n_maps)


def depth_maps(
    decomposed: Decomposed,
    orientations: Sequence[Orientation],
    change: Change | None = None,
) -> dict[Orientation, CouplingMap]:
    """Return the maps across depth of layers that were decomposed at one token.

    `change` is what was done to their Jacobians.
    """
    provenance: dict[str, object] = {"position": decomposed.connections[0].position}
    if change is not None:
        provenance |= change.provenance
    rows = decomposed.rows()
    return _maps(
        decomposed.connections, rows, decomposed, "depth", orientations, provenance
    )


def _depth_map(
    orientation: Orientation, change: Change, decomposed: Decomposed
) -> CouplingMap:
    return depth_maps(decomposed, (orientation,), change)[orientation]


def _positions(trace: Trace, position: Sequence[int] | Literal["all"]) -> list[int]:
    """Return tokens counted from 0; ValueError for none, or one twice."""
    if position == "all":
        return list(range(trace.n_pos))
    positions = [trace.position_index(t) for t in position]
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(
            f"`position` must name at least one token, each once, got {list(position)}"
        )
    return positions


def _layers_at(
    trace: Trace, position: int, layers: Sequence[int] | None, name: str = "layers"
) -> list[Connection]:
    """Return the connections of layers from a token to itself."""
    t = trace.position_index(position)
    chosen = chosen_layers(trace, layers, name)
    # Input, output and the token that names the connection are one token.
    return [Connection(layer, t, t, t) for layer in chosen]


@checked
def self_coupling(
    trace: Trace,
    layer: int,
    other_layer: int | None = None,
    *,
    positions: Sequence[int] | None = None,
    k: int | None = None,
    orientation: Orientation = "ujv",
    chunk_size: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> CouplingMap:
    r"""Self-coupling: every two tokens' own Jacobians, at two layers.

    .. math::

        A_{t t'} = U_{t',k}^\top J^l_{tt} V_{t',k}
        \quad \text{with } U, V \text{ of } J^{l'}_{t't'}

    Self-coupling of Aubry et al. 2025, section 3.1: does a block treat one token in the
    directions in which another block (or itself) treats another token?

    Args:
        trace: a traced prompt of at least two tokens.
        layer: l, of the Jacobians J_1; the rows.
        other_layer: l', of the singular vectors; the columns. The same layer by
            default.
        positions: a selection of tokens, in this order; all by default.
        k, orientation, chunk_size, max_memory, progress: as in `depth_coupling`, with
            the same errors and warnings.

    Returns:
        a `CouplingMap` of kind "self": rows and columns are tokens, `row_positions` and
        `col_positions` name them.

    Raises:
        ValueError: fewer than two tokens.

    Cost: n Jacobians of one token for each of the two layers, n SVDs, `2 n² k d²` flops
    for the n² matrices A; memory for `2 n k d + n² k²` numbers and a batch of Jacobians
    (n of them if the layers are the same).

    Example:
        >>> result = tlc.self_coupling(trace, layer=0, other_layer=1, k=4)
        >>> result.coupling().shape, result.row_positions[:3]
        (torch.Size([8, 8]), (0, 1, 2))
    """
    selected = chosen_positions(
        trace, positions, range(trace.n_pos), "a self-coupling map"
    )
    ends = [(t, t, t) for t in selected]
    rows, columns = layer_connections(trace, layer, other_layer, ends)
    options = JacobianOptions(chunk_size, max_memory, progress)
    sides = decompose_sides(trace, rows, columns, k, options)
    return _maps(rows, *sides, "self", (orientation,), {})[orientation]


@checked
def context_coupling(
    trace: Trace,
    layer: int,
    other_layer: int | None = None,
    *,
    fixed: Literal["input", "output"] = "output",
    position: int | None = None,
    positions: Sequence[int] | None = None,
    k: int | None = None,
    orientation: Orientation = "ujv",
    chunk_size: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> CouplingMap:
    """Context coupling: how one token acts on others, or others act on it, at two
    layers.

    With `fixed="input"`, `J^l_{t1 t2}` against `J^{l'}_{t1 t2'}` over all `t2, t2' ≥
    t1`; with `fixed="output"`, `J^l_{t1 t2}` against `J^{l'}_{t1' t2}` over all `t1,
    t1' ≤ t2`. Aubry et al. 2025, section 3.1. The map covers the tokens that causality
    allows, the fixed one among them: all tokens, where attention reads both ways (ViT,
    BERT).

    The rank of a Jacobian between two tokens is limited by the attention heads; beyond
    it singular vectors are arbitrary, and k should stay below.

    Args:
        fixed: which end of the connections is fixed: `"input"` or `"output"`.
        position: the fixed token; by default the first for a fixed input and the last
            for a fixed output.
        positions: a selection of tokens for the other end, in this order; all that
            causality allows by default.
        trace, layer, other_layer, k, orientation, chunk_size, max_memory, progress: as
            in `self_coupling`.

    Returns:
        a `CouplingMap` of kind "context"; `row_positions` and `col_positions` name the
        tokens of the free end, the provenance holds `fixed` and `position`.

    Raises:
        ValueError: fewer than two tokens that causality allows, or a chosen one that it
            forbids.

    Cost: a fixed output costs little more than one token's Jacobian for each layer, a
    fixed input one Jacobian for each token; SVDs, products and memory as in
    `self_coupling`.

    Example:
        >>> result = tlc.context_coupling(trace, 0, 1, fixed="output", position=3, k=4)
        >>> result.coupling().shape, result.row_positions
        (torch.Size([4, 4]), (0, 1, 2, 3))
    """
    # Causality lets the first token act on all, and all act on the last.
    default_position = 0 if fixed == "input" else -1
    fixed_position = trace.position_index(
        default_position if position is None else position
    )
    selected = chosen_positions(
        trace,
        positions,
        free_end(trace, fixed, fixed_position),
        f"a context-coupling map with the {fixed} fixed at {fixed_position}",
    )
    ends = _fixed_end_tokens(fixed, fixed_position, selected)
    rows, columns = layer_connections(trace, layer, other_layer, ends)
    options = JacobianOptions(chunk_size, max_memory, progress)
    sides = decompose_sides(trace, rows, columns, k, options)
    provenance = {"fixed": fixed, "position": fixed_position}
    return _maps(rows, *sides, "context", (orientation,), provenance)[orientation]


def _fixed_end_tokens(
    fixed: Literal["input", "output"], position: int, free: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return input, output and name of each connection from or to one token."""
    if fixed == "input":
        return [(position, t, t) for t in free]
    return [(t, position, t) for t in free]


def _maps(
    row_connections: Sequence[Connection],
    rows: Iterable[Rows],
    columns: Decomposed,
    kind: str,
    orientations: Sequence[Orientation],
    provenance: Mapping[str, object],
) -> dict[Orientation, CouplingMap]:
    """Return the maps of one prompt, one for each orientation."""
    # Only columns give singular vectors, which a cut may leave arbitrary.
    columns.check_cut()
    coupled = couple(rows, len(row_connections), columns, orientations)
    # Means over prompts drop what `svd` says of each.
    method = {} if columns.products is None else {"method": "products"}
    # Only Jacobians of a caller's making have none (`jacobian_coupling`).
    assert columns.trace is not None
    all_provenance = {
        **columns.trace.provenance,
        **provenance,
        **method,
        "paths": columns.paths | coupled.row_paths,
        "svd": columns.leading.method,
    }
    return maps_of(coupled, row_connections, columns, kind, all_provenance)


def maps_of(
    coupled: Coupled,
    row_connections: Sequence[Connection],
    columns: Decomposed,
    kind: str,
    provenance: Mapping[str, object],
) -> dict[Orientation, CouplingMap]:
    """Return coupling matrices as maps that say what their rows and columns are.

    Args:
        coupled: the matrices, of one or both orientations.
        row_connections: whose Jacobians are the J_1.
        columns: what gave the singular vectors.
        kind: what is compared: "depth", "self" or "context".
        provenance: how all this was made.
    """
    return {
        orientation: CouplingMap(
            matrices=A,
            singular_values=coupled.singular_values,
            frobenius_norms=coupled.frobenius_norms,
            d_model=columns.spectra.U.shape[-2],
            row_layers=tuple(row.layer for row in row_connections),
            col_layers=tuple(column.layer for column in columns.connections),
            row_positions=tuple(row.position for row in row_connections),
            col_positions=tuple(column.position for column in columns.connections),
            kind=kind,
            orientation=orientation,
            provenance=dict(provenance),
        )
        for orientation, A in coupled.matrices.items()
    }


def as_trace(item: object, name: str = "traces") -> Trace:
    """Return a trace; raise TypeError for anything else."""
    if not isinstance(item, Trace):
        raise TypeError(
            f"`{name}` must be an iterable of traces, got "
            f"{type(item).__name__}: trace the prompts first, "
            "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
        )
    return item
