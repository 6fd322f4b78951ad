"""The top singular triplets of a matrix from its products with blocks of vectors."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra.symmetric import eigh

# The largest residuals that are accepted, as shares of σ_1: those of a LAPACK SVD in
# the same precision, or less.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
# Krylov spaces: vectors of a block beyond k, and the largest fall of the residuals in
# one step, as a logarithm.
_SURPLUS = 8
_FASTEST = math.log(20)
# Steps that top triplets of trained blocks take by products with them: 5 to 14.
_TYPICAL_STEPS = 9
# Filters: how far they may raise errors in the directions of large singular values
# beside the k-th triplet;
_ROOM = 100.0
# by how much more than the estimate they lower them;
_SAFETY = 20
# their highest degree;
_HIGHEST_DEGREE = 20
# residuals, as multiples of the tolerance, that may be rounding;
_NOISE = 8
# products with as many columns in all, as a multiple of J's, cost as much as a full
# SVD.
_MOST_COLUMNS = 8


@dataclass(frozen=True)
class Triplets:
    """What the iteration found, in float64.

    Residuals are shares of σ_1, steps are products with `JᵀJ`.
    """

    U: Float[Tensor, "d_out k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d_in k"]
    residuals: Float[Tensor, " k"]
    steps: int


def block_width(k: int) -> int:
    """Return how many vectors the last Rayleigh–Ritz step has for k triplets.

    The more, the fewer steps before it.
    """
    return k + max(16, k // 2)


def krylov_width(k: int) -> int:
    """Return how many vectors each block of a Krylov space has for k triplets."""
    return k + _SURPLUS


def width_of_products(k: int) -> int:
    """Return the same where each vector costs a pass through a block.

    For few triplets it is less than twice as many: that takes more steps and fewer
    vectors in all.
    """
    return k + min(_SURPLUS, k + 1)


def top_triplets(
    J: Float[Tensor, "d_out d_in"],
    k: int,
    square: Float[Tensor, "d_in d_in"] | None = None,
) -> Triplets | None:
    """Return the k largest singular triplets of J.

    None where they are not reached for less than a full SVD. A space that holds them is
    found in J's own precision: by filtered subspace iteration where `JᵀJ` is at hand,
    else as a block Krylov space. The Rayleigh–Ritz step within it is in float64: it
    parts close singular values, and its residuals decide; where they are too large the
    search goes on, once.

    Args:
        J: at least as high as wide, with entries of order 1 at most.
        k: how many triplets.
        square: `JᵀJ`, where products with it cost less.
    """
    if square is None:
        spaces = _krylov_spaces(
            J,
            k,
            krylov_width(k),
            block_width(k),
            J.shape[1] // 2,
            TOLERANCE[J.dtype] / 2,
        )
    else:
        spaces = _filtered_spaces(J, square, k)
    exact = J.double()
    for steps, space in itertools.islice(spaces, 2):
        V = torch.linalg.qr(space.double()).Q
        triplets, found_residual, largest_residual = _rayleigh_ritz(
            exact, V, k, steps, TOLERANCE[J.dtype]
        )
        if triplets is None or found_residual <= largest_residual:
            return triplets
    return None


def products_of_triplets(k: int) -> int:
    """Return how many products with J or Jᵀ k triplets of products typically take.

    Those of the steps, and of the Rayleigh–Ritz step at the end.
    """
    width = width_of_products(k)
    return 2 * _TYPICAL_STEPS * width + width + k


def _random_block(J: "Matrix", width: int) -> Float[Tensor, "d_in width"]:
    """Return `Jᵀ` of random vectors: a share of every direction.

    The vectors are the same for all matrices of a shape, whatever was drawn.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(J.shape[0], width, generator=generator, dtype=J.dtype)
    return J.mT @ random.to(J.device)


def _krylov_spaces(
    J: "Matrix",
    k: int,
    width: int,
    n_ritz_vectors: int,
    largest: int,
    tolerance: float,
) -> Iterator[tuple[int, Tensor]]:
    """Yield steps and Ritz vectors of a block Krylov space of `JᵀJ`.

    Once k of them have converged, and again after that. The right half of Golub and
    Kahan's bidiagonalisation with blocks (Golub, Luk and Overton 1981), which is
    Lanczos' method for `JᵀJ`; every block is orthogonalised twice against all before.

    Args:
        J: the matrix.
        k: how many triplets must converge.
        width: vectors of a block.
        n_ritz_vectors: how many Ritz vectors are yielded.
        largest: dimensions at which the space ends.
        tolerance: below which residuals must fall.
    """
    block = torch.linalg.qr(_random_block(J, width)).Q
    basis = block[:, :0]
    # `JᵀJ` in this basis; block tridiagonal but for rounding.
    T = block[:0, :0]
    steps = 0
    next_check = 2
    while (steps + 1) * width <= largest:
        basis = torch.cat([basis, block], 1)
        steps += 1
        images = J.mT @ (J @ block)
        column = basis.mT @ images
        T = torch.cat([torch.cat([T, column[:-width]], 1), column.mT])
        block, R = torch.linalg.qr(images - basis @ column)
        block = torch.linalg.qr(block - basis @ (basis.mT @ block)).Q
        if steps < next_check:
            continue
        squares, ritz_vectors = _descending_eigh(T)
        residuals = torch.linalg.vector_norm(R @ ritz_vectors[-width:, :k], dim=0)
        errors = residuals / squares[:k].sqrt() / squares[0].sqrt()
        least_square, error = _read(squares[k - 1], errors.max())
        # A zero J, or an overflow.
        if not least_square > 0:
            return
        if error <= tolerance:
            yield steps, basis @ ritz_vectors[:, :n_ritz_vectors]
            next_check = steps + 1
        else:
            next_check = steps + max(1, int(math.log(error / tolerance) / _FASTEST))


def _filtered_spaces(
    J: Float[Tensor, "d_out d_in"], square: Float[Tensor, "d_in d_in"], k: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield steps and a block that holds the k triplets by its own estimates.

    By Chebyshev-filtered subspace iteration: the block goes through polynomials of
    `JᵀJ` that are small below the wanted singular values and large above, then through
    a Rayleigh–Ritz step, which says where the next filter ends and how high its degree
    must be (Zhou, Saad, Tiago and Chelikowsky 2006). Ends where steps get too many or
    the residuals no longer fall.
    """
    width = block_width(k)
    tolerance = TOLERANCE[J.dtype]
    block = square @ _random_block(J, width)
    steps = 1
    previous_error = math.inf
    # Early Ritz values are too small: one from the middle of the surplus is nearer to
    # the end of the block's spectrum.
    edge = (k + width) // 2
    while True:
        V = torch.linalg.qr(block).Q
        images = square @ V
        squares, ritz_vectors = _descending_eigh(V.mT @ images)
        V = V @ ritz_vectors
        images = images @ ritz_vectors
        residuals = torch.linalg.vector_norm(
            torch.addcmul(images, V, squares, value=-1), dim=0
        )
        # One reading for all that is decided of the next filter.
        numbers = torch.cat([squares, residuals[:k]]).cpu().double().numpy()
        # A zero J, or an overflow.
        if not numbers[0] > 0:
            return
        eps = torch.finfo(squares.dtype).eps
        following = _next_filter(numbers[:width], numbers[width:], edge, tolerance, eps)
        steps += following.degree
        is_too_long = steps * width > _MOST_COLUMNS * J.shape[1]
        falls_no_more = following.error > max(previous_error / 2, _NOISE * tolerance)
        if is_too_long or falls_no_more:
            return
        block = _apply_filter(square, V, images, following.cut, following.degree)
        if following.is_last and edge == width - 1:
            yield steps, block
        edge = width - 1
        previous_error = following.error


class _Filter(NamedTuple):
    """The error before a filter, its cut and degree, and whether it is the last."""

    error: float
    cut: float
    degree: int
    is_last: bool


def _next_filter(
    squares: Float[np.ndarray, " width"],
    residuals: Float[np.ndarray, " k"],
    edge: int,
    tolerance: float,
    eps: float,
) -> _Filter:
    """Return the filter that a block needs.

    The degree is as high as is still needed, but not so high that errors in the
    directions of σ_1 drown those of σ_k.

    Args:
        squares: Ritz values of `JᵀJ`.
        residuals: those of the wanted ones.
        edge: at which Ritz value the filter ends.
        tolerance: of the residuals.
        eps: the rounding in which `JᵀJ` is held.
    """
    k = len(residuals)
    squares = np.maximum(squares, max(eps * squares[0], np.finfo(np.float64).tiny))
    error = float((residuals / np.sqrt(squares[:k])).max() / np.sqrt(squares[0]))
    # By which power of e one degree more raises a direction over those below the edge.
    growth = np.arccosh(np.maximum(2 * squares[:k] / squares[edge] - 1, 1))
    lowering = math.log(max(1, _SAFETY * error / tolerance))
    needed = lowering / max(float(growth[-1]), 1e-9)
    if error <= _NOISE * tolerance:
        needed = min(needed, 3)
    relative_error = np.clip(residuals / squares[:k], eps, 1)
    ahead_of_last = np.maximum(growth - growth[-1], 1e-9)
    room = np.log(_ROOM / relative_error) / ahead_of_last
    degree = max(2, math.ceil(min(needed, float(room.min()), _HIGHEST_DEGREE)))
    return _Filter(error, float(squares[edge]), degree, degree >= needed)


def _apply_filter(
    square: Float[Tensor, "d_in d_in"],
    V: Float[Tensor, "d_in width"],
    images: Float[Tensor, "d_in width"],
    cut: float,
    degree: int,
) -> Float[Tensor, "d_in width"]:
    """Return the Chebyshev polynomial of `JᵀJ` that is at most 1 on [0, cut], times V.

    `images` are `JᵀJ V`.
    """
    previous = V
    block = torch.add(-V, images, alpha=2 / cut)
    # Twice `JᵀJ` with [0, cut] mapped to [−1, 1]: a step is one product.
    twice_mapped = square * (4 / cut)
    twice_mapped.diagonal().sub_(2)
    for _ in range(degree - 1):
        following = torch.addmm(previous, twice_mapped, block, beta=-1)
        previous = block
        block = following
    return block


def _rayleigh_ritz(
    J: "Matrix",
    V: Float[Tensor, "d_in width"],
    k: int,
    steps: int,
    tolerance: float,
) -> tuple[Triplets | None, float, float]:
    """Return the k largest triplets of J restricted to the columns of V.

    And the largest residual that they have, and that they may have. `J v = σ u` holds
    by construction; residuals are those of `Jᵀu = σ v`. They must be small beside the
    gap between σ_k and the end of the block too: with as many close singular values as
    the block is wide, a wrong triplet has a small residual.
    """
    images = J @ V
    squares, ritz_vectors = _descending_eigh(images.mT @ images)
    values = squares.clamp_min(0).sqrt()
    S = values[:k]
    V = V @ ritz_vectors[:, :k]
    U = images @ ritz_vectors[:, :k] / S
    residuals = torch.linalg.vector_norm(J.mT @ U - V * S, dim=0) / S[0]
    # One reading for all that is decided.
    numbers = torch.cat([values, residuals]).cpu().numpy()
    largest = numbers[0]
    # Below that, left vectors from squares are not orthonormal to a tenth of the
    # tolerance.
    least_share = torch.finfo(V.dtype).eps / (0.1 * tolerance)
    if not numbers[k - 1] ** 2 > least_share * largest**2:
        return None, math.inf, 0.0
    gap = float(numbers[k - 1] - numbers[len(values) - 1]) / largest
    found = float(numbers[len(values) :].max())
    largest_residual = min(tolerance, max(tolerance / 4, gap / 10))
    return Triplets(U, S, V, residuals, steps), found, largest_residual


@dataclass(frozen=True)
class Products:
    """A matrix that is known by its products with vectors alone.

    Attributes:
        multiply: `V ↦ J V`, of as many columns as there are.
        multiply_transposed: `U ↦ Jᵀ U`.
        shape, dtype, device: of J; products are computed in `dtype`.
    """

    multiply: Callable[[Tensor], Tensor]
    multiply_transposed: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, V: Tensor) -> Tensor:
        return self.multiply(V.to(self.dtype)).to(V.dtype)

    def __rmatmul__(self, X: Tensor) -> Tensor:
        return (self.mT @ X.mT).mT

    @property
    def mT(self) -> "Products":
        """Its transpose."""
        return Products(
            self.multiply_transposed,
            self.multiply,
            (self.shape[1], self.shape[0]),
            self.dtype,
            self.device,
        )


Matrix = Tensor | Products


def triplets_of_products(J: Products, k: int, tolerance: float) -> Triplets | None:
    """Return the k largest singular triplets of J from products with blocks of vectors.

    By a block Krylov space, as `top_triplets`; the Rayleigh–Ritz step is in float64, of
    products that have J's own rounding. The space may grow to all dimensions: J itself
    would take as many products. None where residuals do not fall to the tolerance.
    """
    width = width_of_products(k)
    spaces = _krylov_spaces(J, k, width, width, J.shape[1], tolerance / 2)
    for steps, space in itertools.islice(spaces, 2):
        V = torch.linalg.qr(space.double()).Q
        triplets, found, largest = _rayleigh_ritz(J, V, k, steps, tolerance)
        if triplets is None or found <= largest:
            return triplets
    return None


def _read(*numbers: Tensor) -> list[float]:
    """Return what several tensors hold: one reading, for which a device waits once."""
    read: list[float] = torch.stack(numbers).tolist()
    return read


def _descending_eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric T, the largest first.

    Of zeros where it is not finite.
    """
    # Decided where T lies: nothing waits for it.
    finite = torch.where(T.norm() < torch.inf, T, 0)
    squares, vectors = eigh(finite)
    return squares.flip(-1), vectors.flip(-1)
