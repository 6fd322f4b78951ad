"""Singular value decompositions: all of a matrix, or the top of it."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.spectra.checks import check_k, check_kind, check_matrices
from tl_coupling.spectra.iteration import (
    Triplets,
    block_width,
    krylov_width,
    top_triplets,
    triplets_of_square,
)
from tl_coupling.spectra.parallel import parallel_map
from tl_coupling.spectra.spectrum import Spectrum
from tl_coupling.spectra.symmetric import eigvalsh

# U, S, Vh, residuals and steps of one matrix.
Parts = tuple[Tensor, ...]
_KRYLOV = "block Krylov space"
_FILTER = "filtered subspace iteration"

# Iteration is tried where its block has at most this share of J's columns.
_LARGEST_BLOCK = 1 / 5
# `JᵀJ` is formed where it has at most so many times the columns of the block: about as
# many steps are taken, and then it pays for itself. For larger J a Krylov space is the
# better iteration: filters of `Jᵀ(J v)` take 1.1 to 1.5 times as long at k = 20 in 2048
# dimensions, and rounding ends them on spectra as flat as a Gaussian matrix's.
_FORM_SQUARE = 30
# Products of `JᵀJ` with a block that the spectra of SmolLM2's Jacobians take, on
# average.
_TYPICAL_KRYLOV_STEPS = 12
_TYPICAL_FILTER_STEPS = 16

# A singular value below this share of the largest is rounding, in float32.
_ROUNDING = 1e-6
# The largest part of a matrix that may lie outside a sketch, as a share of the
# Frobenius norm. The products of SmolLM2's Jacobians round by up to 1.5e-6 of it.
_LARGEST_REMAINDER = 3e-6
# Columns of the sketch beyond the expected rank, and columns that check it.
_SKETCH_SURPLUS = 16
_N_PROBES = 8
# A sketch pays up to this share of the width.
_LARGEST_SKETCH = 0.5


@checked
def svd(J: Float[Tensor, "*batch d_out d_in"], k: int | None = None) -> Spectrum:
    r"""Return the singular value decomposition of a matrix or a batch.

    .. math:: J = U \operatorname{diag}(S)\, V^\top = \sum_i \sigma_i u_i v_i^\top

    `k` triplets, the largest first; all by default. Columns of U and rows of Vh are
    orthonormal, signs are arbitrary (in pairs). Raises TypeError unless J is real
    floating point of 32 or 64 bits; ValueError for k out of range, fewer than two axes,
    no rows or columns, or entries that are not finite.

    For all triplets, or a k that is not much smaller than J, a full SVD (LAPACK's
    gesdd). Else the top of the spectrum, from products with a block of vectors, until
    both residuals, `‖J v − σ u‖` and `‖Jᵀu − σ v‖`, of all k triplets are at most
    `2·10⁻⁶ σ_1` (`10⁻¹² σ_1` in float64):

    * as a block Krylov space of `JᵀJ` with full reorthogonalisation, the right half of
      block Golub–Kahan bidiagonalisation (Golub and Kahan 1965; Golub, Luk and Overton
      1981; from a random block, Musco and Musco 2015);
    * where it costs less to form `JᵀJ`, by subspace iteration with Chebyshev
      polynomials of it (Zhou, Saad, Tiago and Chelikowsky 2006): on flat spectra a
      Krylov space grows to most of a small J before it holds the k triplets.

    Both end with a Rayleigh–Ritz step in float64, so that neither the squares nor
    float32 cost accuracy; where the residuals are not reached, the result is a full
    SVD. Residuals say that triplets are right, not that none is missed. That none is,
    is certain only where `Spectrum.uncaptured` says so. Elsewhere it rests on the
    block, which is random and wider than k: it has a share of every direction, also
    within a repeated singular value, and a very small one with a probability that falls
    exponentially with the surplus (Halko, Martinsson and Tropp 2011). A spectrum that
    is flat from σ_k to the end of the block, so that residuals tell nothing apart, gets
    a full SVD.

    Cost: on the spectra of SmolLM2's Jacobians, 9 to 14 products of `JᵀJ` with `k + 8`
    vectors (Krylov), or 12 to 50 with `3k/2` (`python -m benchmarks.truncated_svd`
    prints them). `torch.svd_lowrank`, with its fixed number of steps, is far off on
    flat spectra. On the CPU the matrices of a batch take one core each, which is faster
    than all cores on one small matrix.

    Example:
        >>> J = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> tlc.svd(J, k=1).S
        tensor([4.])
    """
    check_kind(J)
    d_out, d_in = J.shape[-2:]
    rank = min(d_out, d_in)
    n = rank if k is None else k
    check_k(n, rank)
    shapes = [(d_out, n), (n,), (n, d_in), (n,), ()]
    parts = _map_matrices(partial(_decompose, k=n), J, shapes)
    U, S, Vh, residuals, steps = parts
    # One after the other: a copy of all in float64 may not fit.
    norms = [_norm(matrix) for matrix in J.detach().reshape(-1, d_out, d_in)]
    norm = torch.stack(norms) if norms else J.new_empty(0, dtype=torch.float64)
    way = ""
    if _pays((d_out, d_in), n):
        way = _FILTER if _forms_square(rank, n) else _KRYLOV
    return Spectrum(
        U, S, Vh, residuals, steps.int(), norm.reshape(J.shape[:-2]), way=way
    )


@checked
def singular_values(
    J: Float[Tensor, "*batch d_out d_in"],
) -> Float[Tensor, "*batch n_singular"]:
    """Return singular values alone, largest first. Errors as in `svd`; cheaper.

    Example:
        >>> tlc.spectra.singular_values(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor([4., 3.])
    """
    check_matrices(J)
    shapes = [(min(J.shape[-2:]),)]
    (values,) = _map_matrices(lambda some: (torch.linalg.svdvals(some),), J, shapes)
    return values


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
        values = []
        for matrix in J:
            S = self._sketched(matrix)
            if S is None:
                S = singular_values(matrix)
                self._rank = int((S / S[0] > _ROUNDING).sum())
            values.append(S)
        return torch.stack(values)

    def _sketched(self, J: Float[Tensor, "d d"]) -> Float[Tensor, " d"] | None:
        """Return the singular values by a sketch; None where it does not hold J."""
        d = J.shape[-1]
        if self._rank is None or J.dtype != torch.float32:
            return None
        width = self._rank + _SKETCH_SURPLUS
        if width > _LARGEST_SKETCH * d or not J.isfinite().all():
            return None
        # A fixed seed: the same matrices have the same values in every run.
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(d, width + _N_PROBES, generator=generator)
        products = J @ directions.to(J.device)
        Q = torch.linalg.qr(products[:, :width]).Q
        probes = products[:, width:]
        remainder = probes - Q @ (Q.mT @ probes)
        # Written so that NaN, of products that overflow, is no small remainder.
        if not remainder.norm() <= _LARGEST_REMAINDER * probes.norm():
            return None
        compressed = (Q.mT @ J).double()
        squares = eigvalsh(compressed @ compressed.mT).clamp_min(0)
        S = squares.sqrt().flip(-1).to(J.dtype)
        # Beyond the sketch they are 0 to the rounding of float32.
        return torch.nn.functional.pad(S, (0, d - width))


def flops_of_svd(d: int, k: int) -> float:
    """Return what `svd` of k triplets of a square J of width d typically takes.

    `22 d³` for a full one, the classic count.
    """
    if not _pays((d, d), k):
        return 22.0 * d**3
    # The last step's three products are with J.
    last = 2.0 * d**2 * (2 * block_width(k) + k)
    if _forms_square(d, k):
        product = 2.0 * d**2 * block_width(k)
        return 2.0 * d**3 + _TYPICAL_FILTER_STEPS * product + last
    return _TYPICAL_KRYLOV_STEPS * 4.0 * d**2 * krylov_width(k) + last


def _map_matrices(
    decompose: Callable[[Tensor], Parts], J: Tensor, shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Return the parts that `decompose` gives for matrices, batched as J is.

    On the CPU each matrix takes one core; elsewhere all go together.

    Args:
        decompose: gives the parts of some matrices.
        J: the matrices.
        shapes: of each part of one matrix.
    """
    matrices = J.detach().reshape(-1, *J.shape[-2:])
    n = len(matrices)
    parts = [J.new_empty(n, *shape) for shape in shapes]

    def fill(start: int, end: int) -> None:
        of_some = decompose(matrices[start:end])
        for part, part_of_some in zip(parts, of_some, strict=True):
            part[start:end] = part_of_some

    def fill_one(i: int) -> None:
        fill(i, i + 1)

    if n > 1 and J.device.type == "cpu":
        parallel_map(fill_one, range(n), J.device, min(n, torch.get_num_threads()))
    elif n:
        # One alone has all cores.
        fill(0, n)
    return [part.reshape(J.shape[:-2] + part.shape[1:]) for part in parts]


def _decompose(J: Float[Tensor, "n d_out d_in"], k: int) -> Parts:
    """Return the top k triplets of some matrices, by iteration where that pays."""
    parts: list[Parts | None] = [None] * len(J)
    if _pays(J.shape[1:], k):
        parts = _iterate(J, k)
    of_each = [
        _decompose_fully(matrix, k) if part is None else part
        for matrix, part in zip(J, parts, strict=True)
    ]
    return tuple(torch.stack(part) for part in zip(*of_each, strict=True))


def _decompose_fully(J: Float[Tensor, "d_out d_in"], k: int) -> Parts:
    # An iteration ends without triplets where entries are not finite.
    check_matrices(J)
    if J.is_cuda and J.shape[0] >= J.shape[1] > 2 * k:
        triplets = triplets_of_square(J, k)
        if triplets is not None:
            return _parts(triplets, J.new_ones(()))
    U, S, Vh = torch.linalg.svd(J, full_matrices=False)
    U = U[:, :k]
    S = S[:k]
    Vh = Vh[:k]
    return U, S, Vh, _residuals(J, U, S, Vh), S.new_zeros(())


def _iterate(J: Float[Tensor, "n d_out d_in"], k: int) -> list[Parts | None]:
    """Return the top k triplets of matrices by iteration, on their shorter side.

    None where a full SVD should be taken.
    """
    d_out, d_in = J.shape[1:]
    if d_out < d_in:
        transposed = _iterate(J.mT, k)
        return [
            None if one is None else (one[2].mT, one[1], one[0].mT, *one[3:])
            for one in transposed
        ]
    scale = J.abs().amax((-2, -1)).clamp_min(torch.finfo(J.dtype).tiny)
    J = J / scale[:, None, None]
    square = J.mT @ J if _forms_square(d_in, k) else None
    return [
        None if one is None else _parts(one, of_one)
        for one, of_one in zip(top_triplets(J, k, square), scale, strict=True)
    ]


def _parts(triplets: Triplets, scale: Float[Tensor, ""]) -> Parts:
    """Return triplets of a matrix that was divided by a scale, in the dtype of that."""
    parts = (
        triplets.U,
        triplets.S * scale,
        triplets.V.mT,
        triplets.residuals,
        scale.new_tensor(triplets.steps),
    )
    return tuple(part.to(scale.dtype) for part in parts)


def _pays(shape: Sequence[int], k: int) -> bool:
    """Say whether the top k triplets are tried by iteration."""
    return block_width(k) <= _LARGEST_BLOCK * min(shape)


def _forms_square(width: int, k: int) -> bool:
    """Say whether an iteration of J forms `JᵀJ`, of this width."""
    return width <= _FORM_SQUARE * block_width(k)


def _norm(J: Float[Tensor, "d_out d_in"]) -> Float[Tensor, ""]:
    """Return the Frobenius norm, summed in float64.

    As a product: torch's own norm in another dtype takes three times as long.
    """
    entries = J.double().flatten()
    return entries.dot(entries).sqrt()


def _residuals(
    J: Float[Tensor, "d_out d_in"],
    U: Float[Tensor, "d_out k"],
    S: Float[Tensor, " k"],
    Vh: Float[Tensor, "k d_in"],
) -> Float[Tensor, " k"]:
    """Return the larger of `‖J v − σ u‖` and `‖Jᵀu − σ v‖`, as shares of σ_1."""
    right_errors = J @ Vh.mT - U * S
    left_errors = J.mT @ U - Vh.mT * S
    both = torch.stack(
        [
            torch.linalg.vector_norm(difference, dim=0, dtype=torch.float64)
            for difference in (right_errors, left_errors)
        ]
    )
    return both.amax(0) / S[0].double().where(S[0] > 0, 1)
