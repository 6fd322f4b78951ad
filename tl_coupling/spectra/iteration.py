"""The top singular triplets of a matrix from its products with blocks of vectors."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """What the iteration found of one matrix, in float64.

    Residuals are shares of σ_1, steps are products with `JᵀJ`.
    """

    U: Float[Tensor, "d_out k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d_in k"]
    residuals: Float[Tensor, " k"]
    steps: int


class _Spaces(NamedTuple):
    """Of some matrices, by their places: steps, and spaces that hold the triplets."""

    places: list[int]
    steps: list[int]
    bases: Float[Tensor, "some d_in width"]


# It yields spaces, and is told which matrices need no others.
_Search = Generator[_Spaces, list[int], None]


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
    J: Float[Tensor, "n d_out d_in"],
    k: int,
    square: Float[Tensor, "n d_in d_in"] | None = None,
) -> list[Triplets | None]:
    """Return the k largest singular triplets of each of some matrices.

    None where they are not reached for less than a full SVD. A space that holds them is
    found in J's own precision: by filtered subspace iteration where `JᵀJ` is at hand,
    else as a block Krylov space. The Rayleigh–Ritz step within it is in float64: it
    parts close singular values, and its residuals decide; where they are too large the
    search goes on, once.

    Matrices take their steps together, each with its own filters, and are read
    together.

    Args:
        J: at least as high as wide, with entries of order 1 at most.
        k: how many triplets.
        square: `JᵀJ`, where products with it cost less.
    """
    tolerance = TOLERANCE[J.dtype]
    if square is None:
        width = krylov_width(k)
        largest = J.shape[-1] // 2
        search = _krylov_spaces(
            J, k, width, block_width(k), largest, tolerance / 2, len(J)
        )
    else:
        search = _filtered_spaces(J, square, k)
    return _triplets_in(search, J, len(J), k, tolerance)


def _triplets_in(
    search: _Search, J: "Matrices", n: int, k: int, tolerance: float
) -> list[Triplets | None]:
    """Return the triplets of n matrices in the spaces that a search yields of each: the
    first, or else the second.
    """
    results: list[Triplets | None] = [None] * n
    n_tried = [0] * n
    try:
        spaces = next(search)
        while True:
            finished = []
            V = torch.linalg.qr(spaces.bases.double()).Q
            matrices = _subset(J, spaces.places, n)
            if isinstance(matrices, Tensor):
                matrices = matrices.double()
            triplets = _rayleigh_ritz(matrices, V, k, spaces.steps, tolerance)
            for place, (of_one, is_right) in zip(spaces.places, triplets, strict=True):
                n_tried[place] += 1
                if is_right:
                    results[place] = of_one
                if is_right or of_one is None or n_tried[place] == 2:
                    finished.append(place)
            spaces = search.send(finished)
    except StopIteration:
        return results


def triplets_of_square(J: Float[Tensor, "d_out d_in"], k: int) -> Triplets | None:
    """Return the k largest singular triplets of J from all eigenvectors of `JᵀJ`, in
    float64; None where their residuals are not those that `svd` promises.

    On a GPU that takes less than a full SVD.
    """
    exact = J.double()
    _, vectors = eigh(exact.mT @ exact)
    V = vectors.flip(-1)[:, : block_width(k)]
    ritz = _rayleigh_ritz(exact[None], V[None], k, [0], TOLERANCE[J.dtype])
    ((triplets, is_right),) = ritz
    return triplets if is_right else None


def products_of_triplets(k: int) -> int:
    """Return how many products with J or Jᵀ k triplets of products typically take.

    Those of the steps, and of the Rayleigh–Ritz step at the end.
    """
    width = width_of_products(k)
    return 2 * _TYPICAL_STEPS * width + width + k


def _random_block(J: "Matrices", width: int) -> Float[Tensor, "n d_in width"]:
    """Return `Jᵀ` of random vectors: a share of every direction.

    The vectors are the same for all matrices of a shape, whatever was drawn.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(J.shape[-2], width, generator=generator, dtype=J.dtype)
    return J.mT @ random.to(J.device)[None]


def _krylov_spaces(
    J: "Matrices",
    k: int,
    width: int,
    n_ritz_vectors: int,
    largest: int,
    tolerance: float,
    n: int,
) -> _Search:
    """Yield steps and Ritz vectors of block Krylov spaces of `JᵀJ`.

    Once k of them have converged, and again after that. The right half of Golub and
    Kahan's bidiagonalisation with blocks (Golub, Luk and Overton 1981), which is
    Lanczos' method for `JᵀJ`; every block is orthogonalised twice against all before.

    Args:
        J: the matrices.
        k: how many triplets must converge.
        width: vectors of a block.
        n_ritz_vectors: how many Ritz vectors are yielded.
        largest: dimensions at which a space ends.
        tolerance: below which residuals must fall.
        n: how many matrices there are.
    """
    places = list(range(n))
    block = torch.linalg.qr(_random_block(J, width)).Q
    basis = block[..., :0]
    # `JᵀJ` in this basis; block tridiagonal but for rounding.
    T = block[:, :0, :0]
    steps = 0
    next_checks = [2] * n
    while places and (steps + 1) * width <= largest:
        basis = torch.cat([basis, block], -1)
        steps += 1
        images = J.mT @ (J @ block)
        column = basis.mT @ images
        T = torch.cat([torch.cat([T, column[:, :-width]], -1), column.mT], -2)
        block, R = torch.linalg.qr(images - basis @ column)
        block = torch.linalg.qr(block - basis @ (basis.mT @ block)).Q
        # Eigenvectors cost more than a step.
        due = [i for i, next_check in enumerate(next_checks) if steps >= next_check]
        if not due:
            continue
        squares, ritz_vectors = _descending_eigh(_subset(T, due, len(places)))
        of_last = ritz_vectors[:, -width:, :k]
        residuals = torch.linalg.vector_norm(
            _subset(R, due, len(places)) @ of_last, dim=-2
        )
        errors = residuals / squares[:, :k].sqrt() / squares[:, :1].sqrt()
        # One reading for all that is decided.
        numbers = torch.stack([squares[:, k - 1], errors.amax(-1)], -1).tolist()
        converged = []
        dropped = []
        for place_in_due, (least_square, error) in enumerate(numbers):
            i = due[place_in_due]
            # A zero J, or an overflow.
            if not least_square > 0:
                dropped.append(i)
            elif error <= tolerance:
                converged.append(place_in_due)
                next_checks[i] = steps + 1
            else:
                fall = int(math.log(error / tolerance) / _FASTEST)
                next_checks[i] = steps + max(1, fall)
        if converged:
            of_converged = [due[place_in_due] for place_in_due in converged]
            spaces = _subset(basis, of_converged, len(places)) @ _subset(
                ritz_vectors[..., :n_ritz_vectors], converged, len(due)
            )
            finished = yield _Spaces(
                [places[i] for i in of_converged], [steps] * len(converged), spaces
            )
            dropped += [i for i in of_converged if places[i] in finished]
        if dropped:
            kept = [i for i in range(len(places)) if i not in dropped]
            J, block, basis, T = (
                _subset(part, kept, len(places)) for part in (J, block, basis, T)
            )
            places = [places[i] for i in kept]
            next_checks = [next_checks[i] for i in kept]


def _filtered_spaces(
    J: Float[Tensor, "n d_out d_in"], square: Float[Tensor, "n d_in d_in"], k: int
) -> _Search:
    """Yield steps and blocks that hold the k triplets by their own estimates.

    By Chebyshev-filtered subspace iteration: a block goes through polynomials of `JᵀJ`
    that are small below the wanted singular values and large above, then through a
    Rayleigh–Ritz step, which says where the next filter ends and how high its degree
    must be (Zhou, Saad, Tiago and Chelikowsky 2006). A matrix is left where steps get
    too many or the residuals no longer fall.
    """
    width = block_width(k)
    tolerance = TOLERANCE[J.dtype]
    block = square @ _random_block(J, width)
    # Early Ritz values are too small: one from the middle of the surplus is nearer to
    # the end of the block's spectrum.
    states = [_FilterState(place, (k + width) // 2) for place in range(len(J))]
    while states:
        V = torch.linalg.qr(block).Q
        images = square @ V
        squares, ritz_vectors = _descending_eigh(V.mT @ images)
        V = V @ ritz_vectors
        images = images @ ritz_vectors
        residuals = torch.linalg.vector_norm(
            torch.addcmul(images, V, squares[:, None], value=-1), dim=-2
        )
        # One reading for all that is decided of the next filters.
        numbers = torch.cat([squares, residuals[:, :k]], -1).cpu().double().numpy()
        eps = torch.finfo(squares.dtype).eps
        filters = {}
        for i, state in enumerate(states):
            # Others are of a zero J, or of an overflow.
            if numbers[i, 0] > 0:
                following = _next_filter(
                    numbers[i, :width], numbers[i, width:], state.edge, tolerance, eps
                )
                state.steps += following.degree
                is_too_long = state.steps * width > _MOST_COLUMNS * J.shape[-1]
                largest_error = max(state.error / 2, _NOISE * tolerance)
                if not is_too_long and following.error <= largest_error:
                    filters[i] = following
        states = [states[i] for i in filters]
        if not states:
            return
        square, V, images = (
            _subset(part, list(filters), len(numbers)) for part in (square, V, images)
        )
        block = _apply_filters(square, V, images, list(filters.values()))
        last = []
        for i, (state, following) in enumerate(
            zip(states, filters.values(), strict=True)
        ):
            if following.is_last and state.edge == width - 1:
                last.append(i)
            state.edge = width - 1
            state.error = following.error
        if last:
            finished = yield _Spaces(
                [states[i].place for i in last],
                [states[i].steps for i in last],
                _subset(block, last, len(states)),
            )
            kept = [i for i, state in enumerate(states) if state.place not in finished]
            square, block = (
                _subset(part, kept, len(states)) for part in (square, block)
            )
            states = [states[i] for i in kept]


@dataclass
class _FilterState:
    """How far the filters of one matrix are: at which Ritz value the next one ends,
    steps, and the last error.
    """

    place: int
    edge: int
    steps: int = 1
    error: float = math.inf


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


def _apply_filters(
    square: Float[Tensor, "n d_in d_in"],
    V: Float[Tensor, "n d_in width"],
    images: Float[Tensor, "n d_in width"],
    filters: Sequence[_Filter],
) -> Float[Tensor, "n d_in width"]:
    """Return Chebyshev polynomials of `JᵀJ` that are at most 1 on [0, cut], times V.

    `images` are `JᵀJ V`.
    """
    cuts = torch.tensor([[[chebyshev.cut]] for chebyshev in filters], dtype=V.dtype).to(
        V.device
    )
    degrees = [chebyshev.degree for chebyshev in filters]
    previous = V
    block = torch.addcmul(-V, images, 2 / cuts)
    result = block
    # Twice `JᵀJ` with [0, cut] mapped to [−1, 1]: a step is one product.
    twice_mapped = square * (4 / cuts)
    twice_mapped.diagonal(dim1=-2, dim2=-1).sub_(2)
    reached = torch.tensor(degrees, device=V.device)[:, None, None]
    for degree in range(2, max(degrees) + 1):
        following = torch.baddbmm(previous, twice_mapped, block, beta=-1)
        previous = block
        block = following
        is_for_all = degree <= min(degrees)
        result = block if is_for_all else torch.where(reached < degree, result, block)
    return result


def _rayleigh_ritz(
    J: "Matrices",
    V: Float[Tensor, "n d_in width"],
    k: int,
    steps: Sequence[int],
    tolerance: float,
) -> list[tuple[Triplets | None, bool]]:
    """Return the k largest triplets of each J restricted to the columns of V, and
    whether its residuals are small enough.

    `J v = σ u` holds by construction; residuals are those of `Jᵀu = σ v`. They must be
    small beside the gap between σ_k and the end of the block too: with as many close
    singular values as the block is wide, a wrong triplet has a small residual.
    """
    images = J @ V
    squares, ritz_vectors = _descending_eigh(images.mT @ images)
    values = squares.clamp_min(0).sqrt()
    S = values[:, :k]
    V = V @ ritz_vectors[..., :k]
    U = images @ ritz_vectors[..., :k] / S[:, None]
    residuals = torch.linalg.vector_norm(J.mT @ U - V * S[:, None], dim=-2) / S[:, :1]
    # One reading for all that is decided.
    numbers = torch.cat([values, residuals], -1).cpu().numpy()
    # Below that, left vectors from squares are not orthonormal to a tenth of the
    # tolerance.
    least_share = torch.finfo(V.dtype).eps / (0.1 * tolerance)
    n_values = values.shape[-1]
    results: list[tuple[Triplets | None, bool]] = []
    for i, of_one in enumerate(numbers):
        largest = of_one[0]
        if not of_one[k - 1] ** 2 > least_share * largest**2:
            results.append((None, False))
            continue
        gap = float(of_one[k - 1] - of_one[n_values - 1]) / largest
        largest_residual = min(tolerance, max(tolerance / 4, gap / 10))
        is_right = bool(float(of_one[n_values:].max()) <= largest_residual)
        triplets = Triplets(U[i], S[i], V[i], residuals[i], steps[i])
        results.append((triplets, is_right))
    return results


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
        if V.ndim == 3:
            # A stack of one matrix is multiplied as that matrix.
            return (self @ V[0])[None]
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
# A stack of matrices, or one that is known by its products.
Matrices = Tensor | Products


def triplets_of_products(J: Products, k: int, tolerance: float) -> Triplets | None:
    """Return the k largest singular triplets of J from products with blocks of vectors.

    By a block Krylov space, as `top_triplets`; the Rayleigh–Ritz step is in float64, of
    products that have J's own rounding. The space may grow to all dimensions: J itself
    would take as many products. None where residuals do not fall to the tolerance.
    """
    width = width_of_products(k)
    search = _krylov_spaces(J, k, width, width, J.shape[1], tolerance / 2, 1)
    (triplets,) = _triplets_in(search, J, 1, k, tolerance)
    return triplets


def _subset(part: Any, places: Sequence[int], n: int) -> Any:
    """Return some of n matrices; all as they are."""
    if isinstance(part, Products) or len(places) == n:
        return part
    return part[list(places)]


def _descending_eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric T, the largest first.

    Of zeros where it is not finite.
    """
    # Decided where T lies: nothing waits for it.
    norm = torch.linalg.matrix_norm(T, keepdim=True)
    finite = torch.where(norm < torch.inf, T, 0)
    squares, vectors = eigh(finite)
    return squares.flip(-1), vectors.flip(-1)
