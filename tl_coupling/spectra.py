"""Singular value decompositions, and what is read off them alone."""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# How far, relative to σ_1, a triplet from the Gram matrix may miss Jᵀ u = σ v before the full SVD is taken instead.
_RESIDUAL_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular triplets of one matrix or a batch: `J ≈ U diag(S) Vh`, largest first, as torch names and shapes them."""

    U: Float[Tensor, "*batch d_out k"]
    S: Float[Tensor, "*batch k"]
    Vh: Float[Tensor, "*batch k d_in"]

    @property
    def k(self) -> int:
        """How many triplets there are."""
        return self.S.shape[-1]

    def top(self, k: int) -> "Spectrum":
        """The k largest triplets: a slice, nothing is computed."""
        check_k(k, self.k)
        return Spectrum(self.U[..., :k], self.S[..., :k], self.Vh[..., :k, :])


def svd(J: Float[Tensor, "*batch d_out d_in"], k: int | None = None) -> Spectrum:
    """Singular value decomposition `J = U diag(S) Vh`, batched.

    Args:
        J: one matrix or a batch.
        k: how many triplets, the largest first; all of them by default.

    Returns:
        `Spectrum(U, S, Vh)`; columns of U and rows of Vh are orthonormal, signs are arbitrary (in pairs).

    Raises:
        ValueError: k out of range, or entries that are not finite.

    Cost: with `k=None` a full SVD (`torch.linalg.svd`). With k, eigenvectors of `JᵀJ`, accumulated in float64: cheaper,
    and as accurate as the full SVD for singular values above about 1e-6 σ_1. The triplets' residuals are checked, and
    a matrix whose top k reach below that gets the full SVD. (`torch.svd_lowrank` with its default iterations errs by
    several per cent on the flat spectra met here, so it is not used.)
    """
    if not bool(torch.isfinite(J).all()):
        raise ValueError("`J` has NaN or infinite entries: no singular value decomposition")
    rank = min(J.shape[-2:])
    if k is None:
        return Spectrum(*torch.linalg.svd(J, full_matrices=False))
    check_k(k, rank)
    if J.ndim == 2:
        return _top_of_one(J, k)
    if J.numel() == 0:
        return Spectrum(*torch.linalg.svd(J, full_matrices=False)).top(k)
    batch = [_top_of_one(matrix, k) for matrix in J.reshape(-1, *J.shape[-2:])]
    U, S, Vh = (torch.stack(parts) for parts in zip(*((s.U, s.S, s.Vh) for s in batch), strict=True))
    return Spectrum(*(part.reshape(*J.shape[:-2], *part.shape[1:]) for part in (U, S, Vh)))


def _top_of_one(J: Float[Tensor, "d_out d_in"], k: int) -> Spectrum:
    wide = J.double()
    V = _top_eigenvectors(wide.mT @ wide, k)
    images = wide @ V
    S, order = images.norm(dim=0).sort(descending=True)
    V, images = V[:, order], images[:, order]
    U = images / S.clamp_min(torch.finfo(torch.float64).tiny)
    residual = (wide.mT @ U - V * S).norm(dim=0).amax()
    overlap = (U.mT @ U - torch.eye(k, dtype=U.dtype, device=U.device)).abs().amax()
    if not bool((residual <= _RESIDUAL_TOLERANCE * S[0]) & (overlap <= _RESIDUAL_TOLERANCE)):
        return Spectrum(*torch.linalg.svd(J, full_matrices=False)).top(k)
    return Spectrum(U.to(J), S.to(J), V.mT.to(J))


def _top_eigenvectors(G: Float[Tensor, "d d"], k: int) -> Float[Tensor, "d k"]:
    """Eigenvectors of the k largest eigenvalues of a symmetric matrix; on the CPU only those are computed."""
    if G.device.type != "cpu":
        return torch.linalg.eigh(G).eigenvectors[:, -k:]
    import scipy.linalg

    d = len(G)
    return torch.from_numpy(scipy.linalg.eigh(G.numpy(), subset_by_index=(d - k, d - 1), driver="evr")[1])


def check_k(k: int, largest: int) -> None:
    """Raise ValueError unless `1 <= k <= largest`."""
    if not 1 <= k <= largest:
        raise ValueError(f"`k` must lie in [1, {largest}] (the number of singular vectors), got {k}")


def check_cut(S: Float[Tensor, "n n_singular"], k: int, names: list[str]) -> None:
    """Warn where a cut after k triplets falls inside a near-repeated singular value: the subspace is then arbitrary.

    Rounding in J turns the vectors on both sides of the cut by about `ε σ_1 / (σ_k − σ_{k+1})`; the warning is given
    where that exceeds one tenth.
    """
    if k >= S.shape[-1]:
        return
    gap = S[:, k - 1] - S[:, k]
    close = gap <= 10 * torch.finfo(S.dtype).eps * S[:, 0]
    if bool(close.any()):
        where = ", ".join(name for name, hit in zip(names, close.tolist(), strict=True) if hit)
        warnings.warn(
            f"σ_{k} and σ_{k + 1} are equal to rounding in {where}: the top-{k} subspace there is arbitrary, and so is "
            "the coupling cut at this k; try another k",
            stacklevel=3,
        )
