"""Coupling of every pair of connections: of all layers at one token, or of all tokens at two layers.

Every comparison is a list of connections that give J_1 (rows) and a list that gives singular vectors (columns).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked, warn_caller
from tl_coupling.comparisons.maps import CouplingMap, MeanCouplingMap
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import BATCH_BUDGET, Connection, jacobians_of
from tl_coupling.progress import Progress, with_progress
from tl_coupling.spectra import Spectrum, check_cut, check_k, singular_values, svd

DEFAULT_K = 50


@checked
def depth_coupling(
    trace: Trace | Iterable[Any],
    k: int | None = None,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> CouplingMap:
    """Coupling across depth: one token's `J^l_{tt}` against `J^{l'}_{tt}` for every pair of layers.

    Depth-wise coupling of Aubry et al. 2025, section 3.1.

    Args:
        trace: a traced prompt; or many, from a list or a generator, for the mean over prompts and its spread.
        k: how many top singular vectors: 50, or all of a narrower model, by default. Every smaller k is read off the
            same result.
        position: the token; the last by default, as in the paper.
        orientation: `"ujv"` (the paper's) or `"vju"`.
        layers: a selection of layers, in this order; all by default.
        chunk_size: as in `block_jacobian`.
        progress: wraps the loop over Jacobians, or over prompts if there are many: `progress=tqdm.tqdm`. By default a
            bar in a terminal or notebook; `False` for none.

    Returns:
        a `CouplingMap` with rows = layers of J_1, columns = layers that gave the singular vectors; over many prompts a
        `MeanCouplingMap`, which has `spread` and `spread_of_mean` as well.

    Raises:
        ValueError: k outside `[1, d_model]`, a layer or position out of range.

    Warns: where σ_k and σ_{k+1} are equal to rounding (the cut is then arbitrary); where the model is narrower than
    the default k = 50.

    Cost: for each prompt a Jacobian and an SVD for each layer, then `2 L² k d²` flops for the L² matrices A. From a
    generator of traces one prompt at a time is held in memory.

    Example:
        >>> result = tlc.depth_coupling(trace, k=8)
        >>> result.coupling(4).shape, round(result.null(4), 3)
        (torch.Size([2, 2]), 0.134)
        >>> prompts = ["w3 w14 w15", "w9 w2 w6 w5"]
        >>> mean = tlc.depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=8)
        >>> mean.coupling(4).shape, mean.spread(4).shape, mean.n_prompts
        (torch.Size([2, 2]), torch.Size([2, 2]), 2)
    """
    given: dict[str, Any] = {"layers": layers, "chunk_size": chunk_size}
    if isinstance(trace, Trace):
        return depth_couplings(trace, k, position, (orientation,), progress=progress, **given)[orientation]
    traces = with_progress(map(_traced, trace), progress, "prompts")
    given |= {"k": k, "position": position, "orientation": orientation, "progress": False}
    return MeanCouplingMap.over(depth_coupling(one, **given) for one in traces)


@checked
def depth_couplings(
    trace: Trace,
    k: int | None = None,
    position: int = -1,
    orientations: Sequence[Orientation] = ("ujv", "vju"),
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> dict[Orientation, CouplingMap]:
    """`depth_coupling` of one prompt in several orientations, from the same Jacobians and SVDs. Arguments as there."""
    if not orientations:
        raise ValueError("`orientations` is empty: wanted at least one")
    t = trace.position_index(position)
    connections = [Connection(layer, t, t, t) for layer in chosen_layers(trace, layers)]
    return _compare(trace, connections, connections, "depth", k, orientations, chunk_size, progress, position=t)


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
    progress: Progress | None = None,
) -> CouplingMap:
    """Self-coupling: `J^l_{tt}` against `J^{l'}_{t't'}` for every pair of tokens t, t'; layers l, l' fixed.

    Self-coupling of Aubry et al. 2025, section 3.1: does a block treat one token in the directions in which another
    block (or itself) treats another token?

    Args:
        trace: a traced prompt of at least two tokens.
        layer: l, of the Jacobians J_1; the rows.
        other_layer: l', of the singular vectors; the columns. The same layer by default.
        positions: a selection of tokens, in this order; all by default.
        k, orientation, chunk_size, progress: as in `depth_coupling`, with the same errors and warnings.

    Returns:
        a `CouplingMap` of kind "self": rows and columns are tokens, `row_positions` and `col_positions` name them.

    Raises:
        ValueError: fewer than two tokens.

    Cost: n Jacobians of one token for each of the two layers, n SVDs, `2 n² k d²` flops for the n² matrices A; memory
    for `2 n k d + n² k²` numbers and a batch of Jacobians (n of them if the layers are the same).

    Example:
        >>> result = tlc.self_coupling(trace, layer=0, other_layer=1, k=4)
        >>> result.coupling().shape, result.row_positions[:3]
        (torch.Size([8, 8]), (0, 1, 2))
    """
    chosen = _positions(trace, positions, range(trace.n_pos), "a self-coupling map")
    rows, cols = _at_both_layers(trace, layer, other_layer, [(t, t, t) for t in chosen])
    return _compare(trace, rows, cols, "self", k, (orientation,), chunk_size, progress)[orientation]


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
    progress: Progress | None = None,
) -> CouplingMap:
    """Context coupling: how one token acts on others, or others act on it, at two layers.

    With `fixed="input"`, `J^l_{t1 t2}` against `J^{l'}_{t1 t2'}` over all `t2, t2' ≥ t1`; with `fixed="output"`,
    `J^l_{t1 t2}` against `J^{l'}_{t1' t2}` over all `t1, t1' ≤ t2`. Aubry et al. 2025, section 3.1. The map covers the
    tokens that causality allows, the fixed one among them: all tokens, where attention reads both ways (ViT, BERT).

    The rank of a Jacobian between two tokens is limited by the attention heads; beyond it singular vectors are
    arbitrary, and k should stay below.

    Args:
        fixed: which end of the connections is fixed: `"input"` or `"output"`.
        position: the fixed token; by default the first for a fixed input and the last for a fixed output.
        positions: a selection of tokens for the other end, in this order; all that causality allows by default.
        trace, layer, other_layer, k, orientation, chunk_size, progress: as in `self_coupling`.

    Returns:
        a `CouplingMap` of kind "context"; `row_positions` and `col_positions` name the tokens of the free end, the
        provenance holds `fixed` and `position`.

    Raises:
        ValueError: fewer than two tokens that causality allows, or a chosen one that it forbids.

    Cost: a fixed output costs little more than one token's Jacobian for each layer, a fixed input one Jacobian for each
    token; SVDs, products and memory as in `self_coupling`.

    Example:
        >>> result = tlc.context_coupling(trace, layer=0, other_layer=1, fixed="output", position=3, k=4)
        >>> result.coupling().shape, result.row_positions
        (torch.Size([4, 4]), (0, 1, 2, 3))
    """
    held = trace.position_index((0 if fixed == "input" else -1) if position is None else position)
    allowed = free_end(trace, fixed, held)
    chosen = _positions(trace, positions, allowed, f"a context-coupling map with the {fixed} fixed at {held}")
    ends = [(held, t, t) if fixed == "input" else (t, held, t) for t in chosen]
    rows, cols = _at_both_layers(trace, layer, other_layer, ends)
    one = _compare(trace, rows, cols, "context", k, (orientation,), chunk_size, progress, fixed=fixed, position=held)
    return one[orientation]


def free_end(trace: Trace, fixed: Literal["input", "output"], position: int) -> range:
    """The tokens on which a fixed input acts, or which act on a fixed output."""
    if not trace.is_causal:
        return range(trace.n_pos)
    return range(position, trace.n_pos) if fixed == "input" else range(position + 1)


@checked
def neighbours(trace: Trace, layer: int | None = None, other_layer: int | None = None) -> tuple[int, int]:
    """Two layers to compare tokens at: those given, or neighbours of the one given, or the two in the middle.

    Example:
        >>> neighbours(trace), neighbours(trace, layer=1), neighbours(trace, other_layer=1)
        ((0, 1), (1, 1), (0, 1))
    """
    other = None if other_layer is None else trace.layer_index(other_layer, "other_layer")
    second = trace.n_layers // 2 if other is None else other
    first = max(0, second - 1) if layer is None else trace.layer_index(layer)
    return first, min(first + 1, trace.n_layers - 1) if other is None else other


def fitting_k(k: int | None, d_model: int) -> int:
    """`k`; without one 50, or all that a narrower model has, with a warning."""
    if k is not None:
        check_k(k, d_model)
        return k
    if d_model < DEFAULT_K:
        warn_caller(f"the model has width {d_model}: k = {d_model} is used in place of the default, {DEFAULT_K}")
    return min(DEFAULT_K, d_model)


def chosen_layers(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    """The chosen layers, counted from 0, or all."""
    chosen = [trace.layer_index(layer) for layer in (range(trace.n_layers) if layers is None else layers)]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer")
    return chosen


def fill_pairs(
    A: Float[Tensor, "n_rows n_cols k k"], J: Float[Tensor, "n_rows d d"], spectra: Spectrum, orientation: Orientation
) -> None:
    """Write `A` of every pair. All columns' right vectors go through J_1 in one product; no layout is copied."""
    left, right = spectra.U.mT.contiguous(), spectra.Vh.contiguous()
    if orientation == "vju":
        left, right = right, left
    for of_row, J_1 in zip(A, J, strict=True):
        images = (right.flatten(0, 1) @ J_1.mT).reshape(right.shape)
        of_row[:] = left @ images.mT


def _compare(
    trace: Trace,
    rows: list[Connection],
    cols: list[Connection],
    kind: str,
    k: int | None,
    orientations: Sequence[Orientation],
    chunk_size: int | None,
    progress: Progress | None,
    **provenance: Any,
) -> dict[Orientation, CouplingMap]:
    """Every row's J_1 against every column's singular vectors, for each orientation.

    Memory: `2 k d_model` numbers for each column, `k²` for each pair, and a batch of Jacobians; where rows and columns
    are the same connections all their Jacobians, because each is needed in both roles.
    """
    d, same = trace.d_model, rows == cols
    k = fitting_k(k, d)
    paths: dict[str, str] = {}
    computed = jacobians_of(trace, cols if same else [*cols, *rows], chunk_size, progress, paths)
    batch = len(cols) if same else max(1, BATCH_BUDGET // d**2)

    def batches(n: int) -> Iterator[Tensor]:
        for start in range(0, n, batch):
            J = trace.blocks[0].X.new_empty(min(batch, n - start), d, d)
            for J_1 in J:
                J_1.copy_(next(computed))
            yield J

    of_cols = list(batches(len(cols))) if same else batches(len(cols))
    # One more singular value than asked for: it tells whether the cut falls inside a near-repeated one.
    spectra = [svd(J, min(k + 1, d)) for J in of_cols]
    spectrum = Spectrum(*(torch.cat([getattr(s, part) for s in spectra]) for part in ("U", "S", "Vh")))
    check_cut(spectrum.S, k, [str(connection) for connection in cols])
    spectrum = spectrum.top(k)

    matrices = {one: trace.blocks[0].X.new_empty(len(rows), len(cols), k, k) for one in orientations}
    S_1, frobenius_norms, start = [], [], 0
    for J in of_cols if same else batches(len(rows)):
        frobenius_norms.append(torch.linalg.matrix_norm(J))
        S_1.append(spectrum.S if same else singular_values(J)[:, :k])
        for orientation, A in matrices.items():
            fill_pairs(A[start : start + len(J)], J, spectrum, orientation)
        start += len(J)
    # A progress bar ends where its iterator does.
    next(computed, None)
    return {
        orientation: CouplingMap(
            matrices=A,
            singular_values=torch.cat(S_1),
            frobenius_norms=torch.cat(frobenius_norms),
            d_model=d,
            row_layers=tuple(row.layer for row in rows),
            col_layers=tuple(col.layer for col in cols),
            row_positions=tuple(row.position for row in rows),
            col_positions=tuple(col.position for col in cols),
            kind=kind,
            orientation=orientation,
            provenance=trace.provenance | provenance | {"paths": paths},
        )
        for orientation, A in matrices.items()
    }


def _traced(one: Any) -> Trace:
    if not isinstance(one, Trace):
        raise TypeError(
            f"`trace` must be a Trace or an iterable of traces, got {type(one).__name__}: trace the prompts first, "
            "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
        )
    return one


def _at_both_layers(
    trace: Trace, layer: int, other_layer: int | None, ends: list[tuple[int, int, int]]
) -> list[list[Connection]]:
    """The same tokens' connections at both layers; `ends` are input, output, and the one that names the connection."""
    layers = trace.layer_index(layer), trace.layer_index(layer if other_layer is None else other_layer, "other_layer")
    return [[Connection(one, *tokens) for tokens in ends] for one in layers]


def _positions(trace: Trace, positions: Sequence[int] | None, allowed: range, what: str) -> list[int]:
    """The chosen tokens, counted from 0, or all; each once, at least two, and none that is not allowed."""
    chosen = list(allowed) if positions is None else [trace.position_index(t, "positions") for t in positions]
    if forbidden := [t for t in chosen if t not in allowed]:
        raise ValueError(
            f"`positions` of {what} must lie in [{allowed[0]}, {allowed[-1]}], where causality lets tokens act on each "
            f"other; got {forbidden}"
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"`positions` must name each token once, got {chosen}")
    if len(chosen) < 2:
        raise ValueError(
            f"{what} compares at least two tokens, here there is {len(chosen)}: use a longer prompt"
            if positions is None
            else f"`positions` of {what} must name at least two tokens, got {chosen}"
        )
    return chosen
