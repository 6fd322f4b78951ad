"""Coupling of Jacobians that are there already, whatever was done to them."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    provenance: Mapping[str, Any] | None = None,
) -> CouplingMap:
    """Coupling of every two of the Jacobians given, as `depth_coupling` measures it of
    every two layers.

    For Jacobians without something, such as `coupling.without_top` or
    `coupling.without_shared` gives, or of another model's making.

    Args:
        J: a stack of Jacobians, as `block_jacobians` gives.
        k, orientation: as in `depth_coupling`.
        layers, position: what the rows and columns are called; layers from 0 on, the
            last token.
        provenance: what the result should say of where they are from, such as
            `trace.provenance`.

    Returns a `CouplingMap` of kind "depth". ValueError for k outside `[1, d_model]` and
    for more or fewer layers than matrices; warnings as in `depth_coupling`. Cost: an
    SVD of each, then `2 n_layers² k d_model²` flops.

    Example:
        >>> J = tlc.block_jacobians(trace)
        >>> rest = tlc.comparisons.jacobian_coupling(tlc.measures.without_top(J, 1), k=4, provenance=trace.provenance)
        >>> rest.matrices.shape
        torch.Size([2, 2, 4, 4])
    """
    n, d = J.shape[:2]
    k = fitting_k(k, d)
    names = range(n) if layers is None else layers
    if not n:
        raise ValueError("`J` is empty: wanted at least one matrix")
    connections = [Connection(layer, position, position, position) for layer in names]
    decomposed = Decomposed.of(J, connections, k)
    check_cut(decomposed.spectra.S, k, [f"layer {layer}" for layer in names])
    coupled = couple(decomposed, decomposed, (orientation,))
    said = dict(provenance or {}) | {"svd": decomposed.spectra.method}
    return maps_of(coupled, decomposed, decomposed, "depth", said)[orientation]
