"""The top singular triplets of a matrix from its products with blocks of vectors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# The largest residuals that are accepted, as shares of σ_1: those of a LAPACK SVD in
# the same precision, or less.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
# Krylov spaces: vectors of a block beyond k, and the largest fall of the residuals in
# one step, as a logarithm.
_SURPLUS, _FASTEST = 8, math.log(20)
# Filters: how far they may raise errors in the directions of large singular values
# beside the k-th triplet; by how much more than the estimate they lower them; their
# highest degree; residuals, as multiples of the tolerance, that may be rounding;
# products with as many columns in all, as a multiple of J's, cost as much as a full
# SVD.
_ROOM, _SAFETY, _HIGHEST, _NOISE, _MOST_COLUMNS = 100.0, 6, 20, 8, 8


@dataclass(frozen=True)
class Products:
    """A matrix J, at least as high as wide, that is known by its products with blocks
    of columns, `J V` and `Jᵀ U`.

    Blocks are in J's precision, and in float64 where the triplets are formed. Entries
    are of order 1 at most. `square` is `JᵀJ` where products with it cost less.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    times: Callable[[Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]
    square: Float[Tensor, "d_in d_in"] | None = None


@dataclass(frozen=True)
class Triplets:
    """What the iteration found, in float64: residuals are shares of σ_1, steps are
    products with `JᵀJ`.
    """

    U: Float[Tensor, "d_out k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d_in k"]
    residuals: Float[Tensor, " k"]
    steps: int


def block_width(k: int) -> int:
    """How many vectors the last Rayleigh–Ritz step has for k triplets: the more, the
    fewer steps before it.
    """
    return k + max(16, k // 2)


def krylov_width(k: int) -> int:
    """How many vectors each block of a Krylov space has for k triplets."""
    return k + _SURPLUS


def top_triplets(J: Products, k: int) -> Triplets | None:
    """The k largest singular triplets of J; None where they are not reached for less
    than a full SVD.

    A space that holds them is found in J's own precision: by filtered subspace
    iteration where `JᵀJ` is at hand, else as a block Krylov space. The Rayleigh–Ritz
    step within it is in float64: it parts close singular values, and its residuals
    decide; where they are too large the search goes on, once.
    """
    spaces = (
        _krylov_spaces(J, k) if J.square is None else _filtered_spaces(J, J.square, k)
    )
    for _, (steps, space) in zip(range(2), spaces, strict=False):
        found, allowed = _rayleigh_ritz(J, _orthonormal(space.double()), k, steps)
        if found is None or float(found.residuals.max()) <= allowed:
            return found
    return None


def _random_block(J: Products, width: int) -> Tensor:
    """`Jᵀ` of random vectors: a share of every direction. The same for all matrices of
    a shape, whatever was drawn.
    """
    generator = torch.Generator().manual_seed(0)
    return J.transposed(
        torch.randn(J.shape[0], width, generator=generator, dtype=J.dtype).to(J.device)
    )


def _krylov_spaces(J: Products, k: int) -> Iterator[tuple[int, Tensor]]:
    """Steps, and the Ritz vectors of a block Krylov space of `JᵀJ` once k of them have
    converged; again after that.

    The right half of Golub and Kahan's bidiagonalisation with blocks (Golub, Luk and
    Overton 1981), which is Lanczos' method for `JᵀJ`; every block is orthogonalised
    twice against all before. Ends at half of the dimensions.
    """
    width, tolerance = krylov_width(k), TOLERANCE[J.dtype] / 2
    block = _orthonormal(_random_block(J, width))
    basis, T = block[:, :0], block[:0, :0]
    steps, next_check = 0, 2
    while (steps + 1) * width <= J.shape[1] // 2:
        basis, steps = torch.cat([basis, block], 1), steps + 1
        images = J.transposed(J.times(block))
        column = basis.mT @ images
        T = torch.cat([torch.cat([T, column[:-width]], 1), column.mT])
        block, R = torch.linalg.qr(images - basis @ column)
        block = _orthonormal(block - basis @ (basis.mT @ block))
        if steps < next_check:
            continue
        squares, within = _descending(T)
        # A zero J, or an overflow.
        if not squares[k - 1] > 0:
            return
        residuals = torch.linalg.vector_norm(R @ within[-width:, :k], dim=0)
        error = float((residuals / squares[:k].sqrt()).max() / squares[0].sqrt())
        if error <= tolerance:
            yield steps, basis @ within[:, : block_width(k)]
            next_check = steps + 1
        else:
            next_check = steps + max(1, int(math.log(error / tolerance) / _FASTEST))


def _filtered_spaces(
    J: Products, square: Tensor, k: int
) -> Iterator[tuple[int, Tensor]]:
    """Steps, and a block that holds the k triplets by the estimates of
    Chebyshev-filtered subspace iteration.

    The block goes through polynomials of `JᵀJ` that are small below the wanted singular
    values and large above, then through a Rayleigh–Ritz step, which says where the next
    filter ends and how high its degree must be (Zhou, Saad, Tiago and Chelikowsky
    2006). Ends where steps get too many or the residuals no longer fall.
    """
    width, tolerance = block_width(k), TOLERANCE[J.dtype]
    block, steps, error = square @ _random_block(J, width), 1, math.inf
    # Early Ritz values are too small: one from the middle of the surplus is nearer to
    # the end of the block's spectrum.
    edge = (k + width) // 2
    while True:
        V = _orthonormal(block)
        images = square @ V
        squares, within = _descending(V.mT @ images)
        # A zero J, or an overflow.
        if not squares[0] > 0:
            return
        V, images = V @ within, images @ within
        residuals = torch.linalg.vector_norm(images - V * squares, dim=0)
        before, (error, cut, degree, is_last) = (
            error,
            _next_filter(squares, residuals[:k], edge, tolerance),
        )
        steps += degree
        if steps * width > _MOST_COLUMNS * J.shape[1] or error > max(
            before / 2, _NOISE * tolerance
        ):
            return
        block = _filtered(square, V, images, cut, degree)
        if is_last and edge == width - 1:
            yield steps, block
        edge = width - 1


def _next_filter(
    squares: Tensor, residuals: Tensor, edge: int, tolerance: float
) -> tuple[float, float, int, bool]:
    """The error so far, where the next filter ends, its degree, and whether it should
    be the last.

    Squares are Ritz values of `JᵀJ`, residuals those of the wanted ones. The degree is
    as high as is still needed, but not so high that errors in the directions of σ_1
    drown those of σ_k.
    """
    eps, k = torch.finfo(squares.dtype).eps, len(residuals)
    squares, residuals = squares.double().cpu(), residuals.double().cpu()
    squares = squares.clamp_min(
        max(eps * float(squares[0]), torch.finfo(torch.float64).tiny)
    )
    error = float((residuals / squares[:k].sqrt()).max() / squares[0].sqrt())
    growth = torch.acosh((2 * squares[:k] / squares[edge] - 1).clamp_min(1))
    needed = math.log(max(1, _SAFETY * error / tolerance)) / max(
        float(growth[-1]), 1e-9
    )
    if error <= _NOISE * tolerance:
        needed = min(needed, 3)
    room = (_ROOM / (residuals / squares[:k]).clamp(eps, 1)).log() / (
        growth - growth[-1]
    ).clamp_min(1e-9)
    degree = max(2, math.ceil(min(needed, float(room.min()), _HIGHEST)))
    return error, float(squares[edge]), degree, degree >= needed


def _filtered(
    square: Tensor, V: Tensor, images: Tensor, cut: float, degree: int
) -> Tensor:
    """The Chebyshev polynomial of `JᵀJ` that is at most 1 on [0, cut], times V;
    `images` are `JᵀJ V`.
    """
    before, block = V, torch.add(-V, images, alpha=2 / cut)
    for _ in range(degree - 1):
        after = torch.addmm(before, square, block, beta=-1, alpha=4 / cut).sub_(
            block, alpha=2
        )
        before, block = block, after
    return block


def _rayleigh_ritz(
    J: Products, V: Tensor, k: int, steps: int
) -> tuple[Triplets | None, float]:
    """The k largest triplets of J restricted to the columns of V, and the largest
    residual that they may have.

    `J v = σ u` holds by construction; residuals are those of `Jᵀu = σ v`. They must be
    small beside the gap between σ_k and the end of the block too: with as many close
    singular values as the block is wide, a wrong triplet has a small residual.
    """
    tolerance = TOLERANCE[J.dtype]
    images = J.times(V)
    squares, within = _descending(images.mT @ images)
    # Below that, left vectors from squares are not orthonormal to a tenth of the
    # tolerance.
    if not squares[k - 1] > torch.finfo(V.dtype).eps / (0.1 * tolerance) * squares[0]:
        return None, 0.0
    S = squares.clamp_min(0).sqrt()
    gap, S, V = (S[k - 1] - S[-1]) / S[0], S[:k], V @ within[:, :k]
    U = images @ within[:, :k] / S
    residuals = torch.linalg.vector_norm(J.transposed(U) - V * S, dim=0) / S[0]
    return Triplets(U, S, V, residuals, steps), min(
        tolerance, max(tolerance / 4, float(gap) / 10)
    )


def _orthonormal(block: Tensor) -> Tensor:
    return torch.linalg.qr(block).Q


def _descending(T: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric T, the largest first; of zeros where
    it is not finite.
    """
    squares, vectors = torch.linalg.eigh(
        T if T.isfinite().all() else torch.zeros_like(T)
    )
    return squares.flip(-1), vectors.flip(-1)
