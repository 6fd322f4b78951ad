"""Singular value decompositions, and what is read off them alone."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor


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
        TypeError: J is not real floating point of 32 or 64 bits.
        ValueError: k out of range, fewer than two axes, or entries that are not finite.

    Cost: a full SVD of every matrix (LAPACK's gesdd), k or not: the spectra met here are too flat for truncated methods
    (`torch.svd_lowrank` with its default iterations errs by several per cent). On the CPU the matrices of a batch are
    decomposed side by side, one core each, which is faster than all cores on one small matrix; with k, only the top
    triplets are kept.

    Example:
        >>> J = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> tlc.svd(J, k=1).S
        tensor([4.])
    """
    if J.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`J` must be float32 or float64, got {J.dtype}: convert it with `.float()` or `.double()`")
    if J.ndim < 2:
        raise ValueError(f"`J` must be a matrix or a batch of matrices, got shape {list(J.shape)}")
    if not bool(torch.isfinite(J).all()):
        raise ValueError("`J` has NaN or infinite entries: no singular value decomposition")
    rank = min(J.shape[-2:])
    if k is not None:
        check_k(k, rank)
    kept = rank if k is None else k
    matrices = J.detach().reshape(-1, *J.shape[-2:])
    U = J.new_empty(len(matrices), J.shape[-2], kept)
    S = J.new_empty(len(matrices), kept)
    Vh = J.new_empty(len(matrices), kept, J.shape[-1])

    def decompose(i: int) -> None:
        u, s, vh = torch.linalg.svd(matrices[i], full_matrices=False)
        U[i], S[i], Vh[i] = u[:, :kept], s[:kept], vh[:kept]

    n_threads = min(torch.get_num_threads(), len(matrices)) if J.device.type == "cpu" else 1
    if n_threads > 1:
        with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(decompose, range(len(matrices))))
    else:
        for i in range(len(matrices)):
            decompose(i)
    batch = J.shape[:-2]
    return Spectrum(*(part.reshape(*batch, *part.shape[1:]) for part in (U, S, Vh)))


def check_k(k: int, largest: int) -> None:
    """Raise unless k is a whole number with `1 <= k <= largest`."""
    if isinstance(k, bool) or not isinstance(k, Integral):
        raise TypeError(f"`k` must be a whole number, got {k!r}")
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
