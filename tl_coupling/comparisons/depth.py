"""Coupling across depth: one token, every pair of layers; of one prompt or the mean over many."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.means import MeanCouplingMap
from tl_coupling.comparisons.pairs import chosen_layers, compare
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import Connection
from tl_coupling.progress import Progress, with_progress


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
        >>> result.coupling(4).shape
        torch.Size([2, 2])
        >>> round(result.null(4), 3)
        0.134
        >>> prompts = ["w3 w14 w15", "w9 w2 w6 w5"]
        >>> mean = tlc.depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=8)
        >>> mean.coupling(4).shape, mean.spread(4).shape, mean.n_prompts
        (torch.Size([2, 2]), torch.Size([2, 2]), 2)
    """
    if isinstance(trace, Trace):
        given = {"layers": layers, "chunk_size": chunk_size, "progress": progress}
        return depth_couplings(trace, k, position, (orientation,), **given)[orientation]  # type: ignore[arg-type]
    return MeanCouplingMap.over(
        depth_coupling(one, k, position, orientation, layers=layers, chunk_size=chunk_size, progress=False)
        for one in with_progress(_each(trace), progress, "prompts")
    )


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
    return compare(trace, connections, connections, "depth", k, orientations, chunk_size, progress, {"position": t})


def _each(traces: Iterable[Any]) -> Iterator[Trace]:
    for one in traces:
        if not isinstance(one, Trace):
            raise TypeError(
                f"`trace` must be a Trace or an iterable of traces, got {type(one).__name__}: trace the prompts first, "
                "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
            )
        yield one
