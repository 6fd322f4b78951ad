"""Coupling of every pair of connections: of all layers at one token, or of all tokens
at two layers.

Every comparison is a list of connections that give J_1 (rows) and a list that gives
singular vectors (columns).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.comparisons.choices import (
    at_both_layers,
    chosen_layers,
    chosen_positions,
    free_end,
)
from tl_coupling.comparisons.maps import CouplingMap, MeanCouplingMap
from tl_coupling.jacobians import Connection, jacobians_of
from tl_coupling.jacobians.memory import (
    MemoryLimit,
    Needs,
    Shelf,
    n_bytes,
    sharing_a_sweep,
)
from tl_coupling.measures import Orientation
from tl_coupling.progress import Progress, with_progress
from tl_coupling.spectra import Spectrum, check_cut, singular_values, svd
from tl_coupling.spectra.readings import fitting_k
from tl_coupling.traces import Trace


@checked
def depth_coupling(
    trace: Trace | Iterable[Any],
    k: int | None = None,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
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
        trace: a traced prompt; or many, from a list or a generator, for the mean over
            prompts and its spread.
        k: how many top singular vectors: 50, or all of a narrower model, by default.
            Every smaller k is read off the same result.
        position: the token; the last by default, as in the paper.
        orientation: `"ujv"` (the paper's) or `"vju"`.
        layers: a selection of layers, in this order; all by default.
        chunk_size: as in `block_jacobian`.
        max_memory: bytes, or a text such as "3GiB", that this may take beside the model
            and the trace. Chunks become smaller, and Jacobians that do not fit are kept
            in a temporary file; by default where they would take more than half of what
            is free, or, of a model that is read from disk, more than a block.
        progress: wraps the loop over Jacobians, or over prompts if there are many:
            `progress=tqdm.tqdm`. By default a bar in a terminal or notebook; `False`
            for none.

    Returns:
        a `CouplingMap` with rows = layers of J_1, columns = layers that gave the
        singular vectors; over many prompts a `MeanCouplingMap`, which has `spread` and
        `spread_of_mean` as well.

    Raises:
        ValueError: k outside `[1, d_model]`, a layer or position out of range, less
            `max_memory` than is needed, a block that normalises the stream by something
            else than a module.

    Warns: where σ_k and σ_{k+1} are equal to rounding (the cut is then arbitrary);
    where the model is narrower than the default k = 50.

    Cost: for each prompt a Jacobian and an SVD for each layer, then `2 L² k d²` flops
    for the L² matrices A; memory for the Jacobians, `L d²` numbers, and A, `L² k²`.
    From a generator of traces one prompt at a time is held in memory; of a model that
    is read from disk as many as have Jacobians no larger than its weights, so that one
    reading serves all.

    Example:
        >>> result = tlc.depth_coupling(trace, k=8)
        >>> result.coupling(4).shape, round(result.null(4), 3)
        (torch.Size([2, 2]), 0.134)
        >>> prompts = ["w3 w14 w15", "w9 w2 w6 w5"]
        >>> mean = tlc.depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=8)
        >>> mean.coupling(4).shape, mean.spread(4).shape, mean.n_prompts
        (torch.Size([2, 2]), torch.Size([2, 2]), 2)
    """
    given: dict[str, Any] = {
        "layers": layers,
        "chunk_size": chunk_size,
        "max_memory": max_memory,
    }
    if isinstance(trace, Trace):
        return depth_couplings(
            trace, k, position, (orientation,), progress=progress, **given
        )[orientation]
    traces = with_progress(map(_traced, trace), progress, "prompts")
    maps = each_depth_coupling(
        traces, k, position, (orientation,), progress=False, **given
    )
    return MeanCouplingMap.over(one[orientation] for one in maps)


@checked
def depth_couplings(
    trace: Trace,
    k: int | None = None,
    position: int = -1,
    orientations: Sequence[Orientation] = ("ujv", "vju"),
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> dict[Orientation, CouplingMap]:
    """`depth_coupling` of one prompt in several orientations, from the same Jacobians
    and SVDs. Arguments as there.

    Example:
        >>> {orientation: result.k for orientation, result in tlc.comparisons.depth_couplings(trace, k=4).items()}
        {'ujv': 4, 'vju': 4}
    """
    if not orientations:
        raise ValueError("`orientations` is empty: wanted at least one")
    given: dict[str, Any] = {
        "layers": layers,
        "chunk_size": chunk_size,
        "max_memory": max_memory,
    }
    return next(
        each_depth_coupling(
            [trace], k, position, orientations, progress=progress, **given
        )
    )


def each_depth_coupling(
    traces: Iterable[Trace],
    k: int | None,
    position: int,
    orientations: Sequence[Orientation],
    *,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[dict[Orientation, CouplingMap]]:
    """`depth_couplings` of each of several prompts; those of a model that is read from
    disk share its readings.
    """
    for group in sharing_a_sweep(traces):
        tasks = []
        for one in group:
            t = one.position_index(position)
            connections = [
                Connection(layer, t, t, t) for layer in chosen_layers(one, layers)
            ]
            tasks.append(_Task(one, connections, connections, {"position": t}))
        yield from _compare(tasks, "depth", k, orientations, **options)


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

    .. math:: A_{t t'} = U_{t',k}^\top J^l_{tt} V_{t',k} \quad \text{with } U, V \text{ of } J^{l'}_{t't'}

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
    chosen = chosen_positions(
        trace, positions, range(trace.n_pos), "a self-coupling map"
    )
    rows, cols = at_both_layers(trace, layer, other_layer, [(t, t, t) for t in chosen])
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "max_memory": max_memory,
        "progress": progress,
    }
    return next(
        _compare([_Task(trace, rows, cols, {})], "self", k, (orientation,), **options)
    )[orientation]


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
        >>> result = tlc.context_coupling(trace, layer=0, other_layer=1, fixed="output", position=3, k=4)
        >>> result.coupling().shape, result.row_positions
        (torch.Size([4, 4]), (0, 1, 2, 3))
    """
    held = trace.position_index(
        (0 if fixed == "input" else -1) if position is None else position
    )
    allowed = free_end(trace, fixed, held)
    chosen = chosen_positions(
        trace,
        positions,
        allowed,
        f"a context-coupling map with the {fixed} fixed at {held}",
    )
    ends = [(held, t, t) if fixed == "input" else (t, held, t) for t in chosen]
    rows, cols = at_both_layers(trace, layer, other_layer, ends)
    task = _Task(trace, rows, cols, {"fixed": fixed, "position": held})
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "max_memory": max_memory,
        "progress": progress,
    }
    return next(_compare([task], "context", k, (orientation,), **options))[orientation]


def fill_pairs(
    A: Float[Tensor, "n_rows n_cols k k"],
    J: Float[Tensor, "n_rows d d"],
    spectra: Spectrum,
    orientation: Orientation,
) -> None:
    """Write `A` of every pair. All columns' right vectors go through J_1 in one
    product; no layout is copied.
    """
    left, right = spectra.U.mT.contiguous(), spectra.Vh.contiguous()
    if orientation == "vju":
        left, right = right, left
    for of_row, J_1 in zip(A, J, strict=True):
        images = (right.flatten(0, 1) @ J_1.mT).reshape(right.shape)
        of_row[:] = left @ images.mT


class _Task(NamedTuple):
    """One prompt's comparison: the connections that give J_1 and the singular vectors,
    and what its provenance adds.
    """

    trace: Trace
    rows: list[Connection]
    cols: list[Connection]
    provenance: dict[str, Any]


def _compare(
    tasks: Sequence[_Task],
    kind: str,
    k: int | None,
    orientations: Sequence[Orientation],
    *,
    chunk_size: int | None,
    max_memory: int | str | None,
    progress: Progress | None,
) -> Iterator[dict[Orientation, CouplingMap]]:
    """For each prompt, every row's J_1 against every column's singular vectors, for
    each orientation.

    Where rows and columns are the same connections, all their Jacobians are kept,
    because each is needed in both roles. Prompts take turns at each connection.
    """
    trace, rows, cols, _ = tasks[0]
    d, same, m = trace.d_model, rows == cols, len(tasks)
    k = fitting_k(k, d)
    # Each prompt has singular vectors and Jacobians of its own; the maps are made one
    # after the other.
    of_all = m * len(rows), m * len(cols)
    first = trace.blocks[0]
    needs = Needs.of(
        first.call.module,
        d,
        first.X.element_size(),
        *of_all,
        k,
        len(orientations),
        same,
    )
    needs = replace(needs, result=needs.result // m**2)
    limit = None if max_memory is None else n_bytes(max_memory)
    how: dict[str, Any] = {"chunk_size": chunk_size}
    if limit is not None:
        needs = needs.within(limit)
        how = {"chunk_size": chunk_size or needs.chunk_size, "at_once": needs.at_once}
    paths: list[dict[str, str]] = [{} for _ in tasks]
    computed = [
        jacobians_of(
            one.trace,
            one.cols if same else one.cols + one.rows,
            progress=progress,
            paths=found,
            **how,
        )
        for one, found in zip(tasks, paths, strict=True)
    ]
    in_turn = (
        next(one)
        for _ in range(len(rows) if same else len(rows) + len(cols))
        for one in computed
    )

    def batches(n: int) -> Iterator[Tensor]:
        for start in range(0, n, needs.at_once):
            # Blocks of a model that is split over several devices give theirs where
            # they live.
            some = (
                next(in_turn).to(first.X.device)
                for _ in range(min(n - start, needs.at_once))
            )
            yield torch.stack(list(some))

    parts, shelf, start = [], None, 0
    for J in batches(m * len(cols)):
        if same:
            shelf = shelf or Shelf(
                m * len(rows), J[0], needs.kept_in_memory(limit, first.call.module)
            )
            shelf.put(start, J)
        start += len(J)
        # One more singular value than asked for: it tells whether the cut falls inside
        # a near-repeated one.
        parts += _in_halves(lambda some: svd(some, min(k + 1, d)), J)
        # Not to be kept while the next are computed.
        del J
    spectra = Spectrum.cat(parts)
    del parts
    for i, task in enumerate(tasks):
        spectrum = spectra[i::m]
        check_cut(spectrum.S, k, [str(connection) for connection in task.cols])
        of_rows = (
            batches(len(rows))
            if shelf is None
            else (shelf.take(m * row + i)[None] for row in range(len(rows)))
        )
        found = _maps(
            task, kind, spectrum.top(k), of_rows, orientations, same, paths[i]
        )
        if i + 1 == m:
            for one in computed:
                # A progress bar ends where its iterator does.
                next(one, None)
        yield found


def _maps(
    task: _Task,
    kind: str,
    spectrum: Spectrum,
    of_rows: Iterable[Float[Tensor, "n d d"]],
    orientations: Sequence[Orientation],
    same: bool,
    paths: dict[str, str],
) -> dict[Orientation, CouplingMap]:
    """One prompt's maps, from the columns' singular vectors and the rows' Jacobians,
    some at a time.
    """
    trace, rows, cols, provenance = task
    k, made = spectrum.k, {"paths": paths, "svd": spectrum.method}
    # Laid out once as `fill_pairs` needs them.
    spectrum = Spectrum(
        spectrum.U.mT.contiguous().mT, spectrum.S, spectrum.Vh.contiguous()
    )
    matrices = {
        one: spectrum.S.new_empty(len(rows), len(cols), k, k) for one in orientations
    }
    S_1, frobenius_norms, start = [], [], 0
    for J in of_rows:
        frobenius_norms.append(torch.linalg.matrix_norm(J))
        S_1.append(
            spectrum.S[start : start + len(J)]
            if same
            else torch.cat(_in_halves(singular_values, J))[:, :k]
        )
        for orientation, A in matrices.items():
            fill_pairs(A[start : start + len(J)], J, spectrum, orientation)
        start += len(J)
        del J
    return {
        orientation: CouplingMap(
            matrices=A,
            singular_values=torch.cat(S_1),
            frobenius_norms=torch.cat(frobenius_norms),
            d_model=trace.d_model,
            row_layers=tuple(row.layer for row in rows),
            col_layers=tuple(col.layer for col in cols),
            row_positions=tuple(row.position for row in rows),
            col_positions=tuple(col.position for col in cols),
            kind=kind,
            orientation=orientation,
            provenance=trace.provenance | provenance | made,
        )
        for orientation, A in matrices.items()
    }


def _in_halves(
    decompose: Callable[[Tensor], Any], J: Float[Tensor, "n d d"]
) -> list[Any]:
    """What `decompose` gives for a batch; in parts where memory runs out, so that fewer
    threads decompose at once.
    """
    try:
        return [decompose(J)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or len(J) == 1:
            raise
    # Not in the handler: what the error's frames hold is free by now.
    return [part for half in J.tensor_split(2) for part in _in_halves(decompose, half)]


def _traced(one: Any) -> Trace:
    if not isinstance(one, Trace):
        raise TypeError(
            f"`trace` must be a Trace or an iterable of traces, got {type(one).__name__}: trace the prompts first, "
            "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
        )
    return one
