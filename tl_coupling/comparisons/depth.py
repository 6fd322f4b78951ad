"""Coupling across depth: one token, every pair of layers."""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.coupling import Orientation, check_orientation
from tl_coupling.jacobians import jacobian_and_path
from tl_coupling.spectra import Spectrum, check_cut, check_k, svd

Progress = Callable[[Iterable[int]], Iterable[int]]


def depth_coupling(
    trace: Trace,
    k: int = 50,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    chunk_size: int | None = None,
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
        progress: wraps the loop over layers, `progress=tqdm.tqdm` for one.

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


def depth_couplings(
    trace: Trace,
    k: int = 50,
    position: int = -1,
    orientations: Sequence[Orientation] = ("ujv", "vju"),
    *,
    layers: Sequence[int] | None = None,
    chunk_size: int | None = None,
    progress: Progress | None = None,
) -> dict[Orientation, CouplingMap]:
    """`depth_coupling` in several orientations, from the same Jacobians and SVDs. Arguments as there."""
    if isinstance(orientations, str) or not orientations:
        raise ValueError(f'`orientations` must be a sequence like ("ujv", "vju"), got {orientations!r}')
    for orientation in orientations:
        check_orientation(orientation)
    check_k(k, trace.d_model)
    chosen = [trace.layer_index(layer) for layer in (range(trace.n_layers) if layers is None else layers)]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer")
    t = trace.position_index(position)

    paths = {}
    J = trace.residual.new_empty(len(chosen), trace.d_model, trace.d_model)
    for row, layer in enumerate(progress(chosen) if progress else chosen):
        J[row], paths[str(layer)] = jacobian_and_path(trace.blocks[layer], t, t, chunk_size)
    # One singular value more than is asked for: it tells whether the cut falls inside a near-repeated one.
    spectrum = svd(J, min(k + 1, trace.d_model))
    check_cut(spectrum.S, k, [f"layer {layer}" for layer in chosen])
    spectrum = spectrum.top(k)
    return {
        orientation: CouplingMap(
            matrices=_all_pairs(J, spectrum, orientation),
            singular_values=spectrum.S,
            frobenius_norms=torch.linalg.matrix_norm(J),
            d_model=trace.d_model,
            row_layers=tuple(chosen),
            col_layers=tuple(chosen),
            row_positions=(t,) * len(chosen),
            col_positions=(t,) * len(chosen),
            kind="depth",
            orientation=orientation,
            provenance=trace.provenance | {"position": t, "paths": paths},
        )
        for orientation in orientations
    }


def _all_pairs(
    J: Float[Tensor, "n_rows d d"], spectra: Spectrum, orientation: Orientation
) -> Float[Tensor, "n_rows n_cols k k"]:
    """`A` of every pair. All columns' right vectors go through J_1 in one product; no layout is copied."""
    left, right = spectra.U.mT.contiguous(), spectra.Vh.contiguous()
    if orientation == "vju":
        left, right = right, left
    n_cols, k, d = right.shape
    A = J.new_empty(len(J), n_cols, k, k)
    for row, J_1 in enumerate(J):
        images = (right.reshape(n_cols * k, d) @ J_1.mT).reshape(n_cols, k, d)
        A[row] = left @ images.mT
    return A
