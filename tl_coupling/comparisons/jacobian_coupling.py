"""Coupling of given Jacobians, whatever was done to them."""

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.pairs import maps_of
from tl_coupling.jacobians import Connection, Decomposed, couple
from tl_coupling.measures import Orientation
from tl_coupling.spectra import check_cut, fitting_k


@checked
def jacobian_coupling(
    J: Float[Tensor, "n_layers d_model d_model"],
    k: int | None = None,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    provenance: Mapping[str, object] | None = None,
) -> CouplingMap:
    """Return the coupling of every two Jacobians, as `depth_coupling` of two layers.

    For Jacobians without something, such as `measures.without_top` or
    `measures.without_shared` gives, or of another model's making.

    Args:
        J: a stack of Jacobians, as `block_jacobians` gives.
        k: as in `depth_coupling`.
        orientation: as in `depth_coupling`.
        layers: what the rows and columns are called; from 0 on by default.
        position: the token that they are of; the last by default.
        provenance: what the result should say of where they are from, such as
            `trace.provenance`.

    Returns:
        a `CouplingMap` of kind "depth".

    Raises:
        ValueError: k outside `[1, d_model]`, more or fewer layers than matrices, entries
            that are not finite.

    Warnings as in `depth_coupling`. Cost: an SVD of each, then `2 n_layers² k d_model²`
    flops.

    Example:
        >>> rest = tlc.measures.without_top(tlc.block_jacobians(trace), 1)
        >>> tlc.comparisons.jacobian_coupling(rest, k=4).matrices.shape
        torch.Size([2, 2, 4, 4])
    """
    # A map is of numbers, without the graph that `training.jacobians` gives.
    J = J.detach()
    n, d = J.shape[:2]
    k = fitting_k(k, d)
    names = range(n) if layers is None else layers
    if not n:
        raise ValueError("`J` is empty: wanted at least one matrix")
    connections = [Connection(layer, position, position, position) for layer in names]
    decomposed = Decomposed.from_jacobians(J, connections, k)
    # Without a trace nothing else says which matrix a warning is about.
    check_cut(decomposed.spectra.S, k, [f"layer {layer}" for layer in names])
    coupled = couple(decomposed.rows(), len(decomposed), decomposed, (orientation,))
    # `pairs` reads the provenance off a trace, which these Jacobians do not have.
    full_provenance = {**(provenance or {}), "svd": decomposed.spectra.method}
    maps = maps_of(coupled, connections, decomposed, "depth", full_provenance)
    return maps[orientation]
