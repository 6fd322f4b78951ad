"""What must hold of k, of matrices and of singular values; the k that is taken."""

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import warn_caller

# How many singular vectors are compared unless a k is given.
DEFAULT_K = 50


def check_k(k: int, largest: int, d_model: int | None = None) -> None:
    """Raise unless `1 <= k <= largest`.

    Of a result that holds `largest` of `d_model` singular vectors, the error says how to
    have more.
    """
    if not 1 <= k <= largest:
        remedy = ""
        if d_model is not None and largest < k <= d_model:
            remedy = f": the result holds no more, compute it with `k={k}`"
        raise ValueError(
            f"`k` must lie in [1, {largest}] (the number of singular vectors), got "
            f"{k}{remedy}"
        )


def fitting_k(k: int | None, d_model: int) -> int:
    """Return `k`; without one 50, or all that a narrower model has, with a warning."""
    if k is not None:
        check_k(k, d_model)
        return k
    if d_model < DEFAULT_K:
        warn_caller(
            f"the model has width {d_model}: "
            f"k = {d_model} is used in place of the default, {DEFAULT_K}"
        )
    return min(DEFAULT_K, d_model)


def check_cut(S: Float[Tensor, "n n_singular"], k: int, names: list[str]) -> None:
    """Warn where k is above a rank, or `σ_k ≈ σ_{k+1}`: rounding decides the top k.

    Rounding turns the top-k subspace by about `ε σ_1 / (σ_k − σ_{k+1})`; the warning is
    where that is above 1/10. Where all singular values are taken, nothing is cut, but
    the vectors of two that are 0 may be turned into each other.

    Args:
        S: singular values of n matrices, largest first.
        k: where they are cut.
        names: of the matrices, for the warning.
    """
    n_singular = S.shape[-1]
    # Below it, singular values and their differences say nothing.
    rounding = 10 * torch.finfo(S.dtype).eps * S[:, 0]
    ranks = (S - rounding[:, None] > 0).sum(-1)
    # The vectors of a single one that is 0 are known but for their signs.
    n_known = ranks if k < n_singular else ranks + 1
    is_beyond_rank = n_known < k
    if is_beyond_rank.any():
        beyond = ", ".join(itertools.compress(names, is_beyond_rank.tolist()))
        rank = int(ranks.min())
        warn_caller(
            f"k = {k} is above the rank of {beyond} "
            f"(at least {rank}): singular vectors beyond it are arbitrary, "
            f"and so is the coupling at this k; ask for at most {max(1, rank)}"
        )
    if k >= n_singular:
        return
    is_equal = (S[:, k - 1] - S[:, k] <= rounding) & ~is_beyond_rank
    if is_equal.any():
        equal = ", ".join(itertools.compress(names, is_equal.tolist()))
        warn_caller(
            f"σ_{k} and σ_{k + 1} are equal to rounding in {equal}: "
            f"the top-{k} subspace there is arbitrary, and so is the coupling cut at "
            "this k; try another k"
        )


def check_matrices(J: Tensor) -> None:
    """Raise unless J is finite, of 32 or 64 bits, and its matrices have entries."""
    check_kind(J)
    # A sum of finite numbers may overflow; one with others is never finite.
    if not J.sum().isfinite() and not J.isfinite().all():
        raise ValueError("`J` has NaN or infinite entries")


def check_kind(J: Tensor) -> None:
    """Raise unless J is of 32 or 64 bits, and its matrices have entries."""
    _check_dtype(J, "J")
    check_entries(J, "J")


def check_entries(matrices: Tensor, name: str) -> None:
    """Raise where matrices have no rows or no columns. A batch may be empty."""
    if 0 in matrices.shape[-2:]:
        raise ValueError(
            f"`{name}` must have at least one row and one column, "
            f"got shape {list(matrices.shape)}"
        )


def check_singular_values(S: Tensor) -> None:
    """Raise unless S is of 32 or 64 bits, finite, at least 0, and holds a value."""
    _check_dtype(S, "S")
    if S.shape[-1] == 0:
        raise ValueError(
            f"`S` must hold at least one singular value, got shape {list(S.shape)}"
        )
    if not (S.isfinite() & (S >= 0)).all():
        raise ValueError(
            "`S` must hold singular values, finite and at least 0, got others"
        )


def _check_dtype(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"`{name}` must be float32 or float64, got {x.dtype}: "
            "use `.float()` or `.double()`"
        )
