"""The coupling matrices A of every pair of Jacobians, from their decompositions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_coupling.jacobians.decomposed import Decomposed, Rows
from tl_coupling.measures import Orientation
from tl_coupling.spectra import Matrix, Spectrum


@dataclass(frozen=True, eq=False)
class Coupled:
    """The coupling matrices of every pair, and what the rows' Jacobians have alone.

    Attributes:
        matrices: A of every row and column, for each orientation.
        singular_values: the k largest of each row's Jacobian.
        frobenius_norms: of each row's Jacobian.
        row_paths: the way to each row's Jacobian, by connection.
    """

    matrices: dict[Orientation, Float[Tensor, "n_rows n_columns k k"]]
    singular_values: Float[Tensor, "n_rows k"]
    frobenius_norms: Float[Tensor, " n_rows"]
    row_paths: dict[str, str]


def couple(
    rows: Iterable[Rows],
    n_rows: int,
    columns: Decomposed,
    orientations: Sequence[Orientation] = ("ujv",),
) -> Coupled:
    r"""Return the coupling matrices of every row with every column.

    .. math:: A_{rc} = U_{c,k}^\top J_r V_{c,k} \quad \text{or} \quad V_{c,k}^\top J_r U_{c,k}

    Args:
        rows: the Jacobians `J_r`, read once, in order.
        n_rows: how many there are.
        columns: what gives the singular vectors, and k.
        orientations: "ujv" for the first, "vju" for the second, or both.

    Cost: `2 k d² + 2 k² d` flops for each pair; memory for the matrices, and for some
    of the rows' Jacobians at a time.
    """
    k = columns.k
    leading = columns.leading
    # Laid out once as `fill_pairs` needs them.
    leading = Spectrum(leading.U.mT.contiguous().mT, leading.S, leading.Vh.contiguous())
    matrices = {
        orientation: leading.S.new_empty(n_rows, len(columns), k, k)
        for orientation in orientations
    }
    singular_values: list[Tensor] = []
    frobenius_norms: list[Tensor] = []
    row_paths: dict[str, str] = {}
    start = 0
    for J, S, norms, paths in rows:
        end = start + len(J)
        for orientation, A in matrices.items():
            fill_pairs(A[start:end], J, leading, orientation)
        singular_values.append(S[:, :k])
        frobenius_norms.append(norms)
        row_paths |= paths
        start = end
        # Not kept while the next are computed.
        del J
    return Coupled(
        matrices, torch.cat(singular_values), torch.cat(frobenius_norms), row_paths
    )


def fill_pairs(
    A: Float[Tensor, "n_rows n_columns k k"],
    J: Float[Tensor, "n_rows d d"] | Sequence[Matrix],
    spectra: Spectrum,
    orientation: Orientation,
) -> None:
    """Write the coupling matrix of every pair into A.

    All columns' right vectors go through a row's Jacobian in one product, of which
    nothing else is known; no layout is copied.
    """
    left = spectra.U.mT.contiguous()
    right = spectra.Vh.contiguous()
    # Vᵀ J U in place of Uᵀ J V.
    if orientation == "vju":
        left, right = right, left
    right_vectors = rearrange(right, "column k d -> (column k) d")
    if isinstance(J, Tensor) and len(J) > 1:
        images = right_vectors @ J.mT
        A[:] = left @ images.unflatten(1, right.shape[:2]).mT
        return
    for row_matrices, J_1 in zip(A, J, strict=True):
        # J_1 v of every column's v: one product for all pairs of the row.
        images = rearrange(
            right_vectors @ J_1.mT, "(column k) d -> column k d", column=len(right)
        )
        row_matrices[:] = left @ images.mT
