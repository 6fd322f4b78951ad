"""Coupling across depth: one token, every pair of layers."""

from collections.abc import Sequence

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.pairs import compare
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import Connection, Progress


@checked
def depth_coupling(
    trace: Trace,
    k: int = 50,
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
        trace: a traced prompt.
        k: how many top singular vectors, at most; every smaller k is read off the same result.
        position: the token; the last by default, as in the paper.
        orientation: `"ujv"` (the paper's) or `"vju"`.
        layers: a selection of layers, in this order; all by default.
        chunk_size: as in `block_jacobian`.
        progress: wraps the loop over Jacobians, `progress=tqdm.tqdm` for one.

    Returns:
        a `CouplingMap` with rows = layers of J_1, columns = layers that gave the singular vectors.

    Raises:
        ValueError: k outside `[1, d_model]`, a layer or position out of range.

    Warns: where σ_k and σ_{k+1} are equal to rounding (the cut is then arbitrary).

    Cost: a Jacobian and an SVD for each layer, then `2 L² k d²` flops for the L² matrices A.

    Example:
        >>> result = tlc.depth_coupling(trace, k=8)
        >>> result.coupling(4).shape
        torch.Size([2, 2])
        >>> round(result.null(4), 3)
        0.134
    """
    both = depth_couplings(trace, k, position, (orientation,), layers=layers, chunk_size=chunk_size, progress=progress)
    return both[orientation]


@checked
def depth_couplings(
    trace: Trace,
    k: int = 50,
    position: int = -1,
    orientations: Sequence[Orientation] = ("ujv", "vju"),
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> dict[Orientation, CouplingMap]:
    """`depth_coupling` in several orientations, from the same Jacobians and SVDs. Arguments as there."""
    if not orientations:
        raise ValueError("`orientations` is empty: wanted at least one")
    chosen = [trace.layer_index(layer) for layer in (range(trace.n_layers) if layers is None else layers)]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer")
    t = trace.position_index(position)
    connections = [Connection(layer, t, t, t) for layer in chosen]
    return compare(
        trace,
        connections,
        connections,
        kind="depth",
        k=k,
        orientations=orientations,
        chunk_size=chunk_size,
        progress=progress,
        provenance={"position": t},
    )
