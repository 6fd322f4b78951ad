"""Coupling across tokens: one layer pair, every pair of tokens."""

from collections.abc import Sequence
from typing import Any, Literal

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.pairs import compare
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import Connection
from tl_coupling.progress import Progress

Fixed = Literal["input", "output"]


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
        k, orientation, chunk_size, progress: as in `depth_coupling`.

    Returns:
        a `CouplingMap` of kind "self": rows and columns are tokens, `row_positions` and `col_positions` name them.

    Raises:
        ValueError: fewer than two tokens, a layer or position out of range, k outside `[1, d_model]`.

    Warns: as `depth_coupling`.

    Cost: n Jacobians of one token for each of the two layers, n SVDs, `2 n² k d²` flops for the n² matrices A; memory
    for `2 n k d + n² k²` numbers and a batch of Jacobians (n of them if the layers are the same).

    Example:
        >>> result = tlc.self_coupling(trace, layer=0, other_layer=1, k=4)
        >>> result.coupling().shape, result.row_positions[:3]
        (torch.Size([8, 8]), (0, 1, 2))
    """
    chosen = _positions(trace, positions, range(trace.n_pos), "a self-coupling map")
    ends = [(t, t, t) for t in chosen]
    return _compared(trace, layer, other_layer, ends, "self", {}, k, orientation, chunk_size, progress)


@checked
def context_coupling(
    trace: Trace,
    layer: int,
    other_layer: int | None = None,
    *,
    fixed: Fixed = "output",
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
    tokens that causality allows, the fixed one among them.

    Args:
        trace: a traced prompt of at least two tokens.
        layer: l, of the Jacobians J_1; the rows.
        other_layer: l', of the singular vectors; the columns. The same layer by default.
        fixed: which end of the connections is fixed: `"input"` or `"output"`.
        position: the fixed token; by default the first for a fixed input and the last for a fixed output.
        positions: a selection of tokens for the other end, in this order; all that causality allows by default.
        k, orientation, chunk_size, progress: as in `depth_coupling`.

    Returns:
        a `CouplingMap` of kind "context"; `row_positions` and `col_positions` name the tokens of the free end, the
        provenance holds `fixed` and `position`.

    Raises:
        ValueError: `fixed` is neither "input" nor "output"; fewer than two tokens that causality allows, or a chosen
        one that it forbids; a
            layer or position out of range, k outside `[1, d_model]`.

    Warns: as `depth_coupling`.

    The rank of a Jacobian between two tokens is limited by the attention heads; beyond it singular vectors are
    arbitrary, and k should stay below.

    Cost: a fixed output costs little more than one token's Jacobian for each layer, a fixed input one Jacobian for each
    token; SVDs, products and memory as in `self_coupling`.

    Example:
        >>> result = tlc.context_coupling(trace, layer=0, other_layer=1, fixed="output", position=3, k=4)
        >>> result.coupling().shape, result.row_positions
        (torch.Size([4, 4]), (0, 1, 2, 3))
    """
    held = trace.position_index((0 if fixed == "input" else -1) if position is None else position)
    allowed = range(held, trace.n_pos) if fixed == "input" else range(held + 1)
    chosen = _positions(trace, positions, allowed, f"a context-coupling map with the {fixed} fixed at {held}")
    ends = [(held, t, t) if fixed == "input" else (t, held, t) for t in chosen]
    held_end = {"fixed": fixed, "position": held}
    return _compared(trace, layer, other_layer, ends, "context", held_end, k, orientation, chunk_size, progress)


@checked
def neighbours(trace: Trace, layer: int | None = None, other_layer: int | None = None) -> tuple[int, int]:
    """Two layers to compare tokens at: those given, or neighbours of the one given, or the two in the middle.

    Example:
        >>> neighbours(trace), neighbours(trace, layer=1), neighbours(trace, other_layer=1)
        ((0, 1), (1, 1), (0, 1))
    """
    other = None if other_layer is None else trace.layer_index(other_layer, "other_layer")
    if layer is not None:
        first = trace.layer_index(layer)
    else:
        first = max(0, (trace.n_layers // 2 if other is None else other) - 1)
    return first, min(first + 1, trace.n_layers - 1) if other is None else other


def _compared(
    trace: Trace,
    layer: int,
    other_layer: int | None,
    ends: list[tuple[int, int, int]],
    kind: str,
    provenance: dict[str, Any],
    k: int | None,
    orientation: Orientation,
    chunk_size: int | None,
    progress: Progress | None,
) -> CouplingMap:
    """The same tokens' connections at both layers; `ends` are input, output, and the one that names the connection."""
    layers = trace.layer_index(layer), trace.layer_index(layer if other_layer is None else other_layer, "other_layer")
    rows, cols = ([Connection(one, *tokens) for tokens in ends] for one in layers)
    return compare(trace, rows, cols, kind, k, (orientation,), chunk_size, progress, provenance)[orientation]


def _positions(trace: Trace, positions: Sequence[int] | None, allowed: range, what: str) -> list[int]:
    """The chosen tokens, counted from 0, or all that are allowed.

    Raises:
        ValueError: one is chosen twice or is not allowed, or fewer than two are left.
    """
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
