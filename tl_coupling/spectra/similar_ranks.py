"""Singular values of many matrices that have about the same, low rank."""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra.decompositions import singular_values

# A singular value below this share of the largest is rounding, in float32.
_ROUNDING = 1e-6
# What may lie outside of a sketch, as a share of the Frobenius norm. The products of
# SmolLM2's Jacobians round by up to 1.5e-6 of it.
_LARGEST_REMAINDER = 3e-6
# Columns of the sketch beyond the expected rank, and columns that check it.
_SURPLUS = 16
_N_PROBES = 8
# A sketch pays up to this share of the width.
_LARGEST_SKETCH = 0.5


class SimilarRanks:
    """Return all singular values of one matrix after the other, largest first.

    What a token does to another one goes through the attention of the block, of which
    grouped queries leave few directions: a Jacobian of SmolLM2, 576 wide, has rank 201.
    The first matrix is decomposed in full. Of the next ones, Q is an orthonormal basis
    of `J Ω`, for a random Ω with a few more columns than the rank of the last matrix
    that was decomposed in full. The singular values are those of `QᵀJ`, from its Gram
    matrix in float64, and zeros. Eight more random columns say how much of J lies
    outside of Q (Halko, Martinsson and Tropp 2011). Where that exceeds the rounding of
    float32, J is decomposed in full.

    Only square matrices in float32 are sketched; of other kinds each is decomposed.

    Example:
        >>> from tl_coupling.spectra import SimilarRanks
        >>> values = SimilarRanks()
        >>> values(torch.diag(torch.tensor([3.0, 4.0]))[None])
        tensor([[4., 3.]])
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    def __call__(self, J: Float[Tensor, "n d d"]) -> Float[Tensor, "n d"]:
        """Return the singular values of some matrices."""
        return torch.stack([self._values(matrix) for matrix in J])

    def _values(self, J: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
        S = self._sketched(J)
        if S is not None:
            return S
        S = singular_values(J)
        self._rank = int((S / S[0] > _ROUNDING).sum())
        return S

    def _sketched(self, J: Float[Tensor, "d d"]) -> Float[Tensor, " d"] | None:
        """Return the singular values by a sketch; None where it does not hold J."""
        d = J.shape[-1]
        if self._rank is None or J.dtype != torch.float32:
            return None
        width = self._rank + _SURPLUS
        if width > _LARGEST_SKETCH * d or not J.isfinite().all():
            return None
        # A fixed seed: the same matrices have the same values in every run.
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(d, width + _N_PROBES, generator=generator)
        products = J @ directions.to(J.device)
        Q = torch.linalg.qr(products[:, :width]).Q
        probes = products[:, width:]
        remainder = probes - Q @ (Q.mT @ probes)
        if remainder.norm() > _LARGEST_REMAINDER * probes.norm():
            return None
        compressed = (Q.mT @ J).double()
        squares = torch.linalg.eigvalsh(compressed @ compressed.mT).clamp_min(0)
        S = squares.sqrt().flip(-1).to(J.dtype)
        # Beyond the sketch they are 0 to the rounding of float32.
        return torch.nn.functional.pad(S, (0, d - width))
