"""The top singular triplets of a matrix of which only products are needed, by filtered subspace iteration."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# The largest residuals that are accepted, as shares of σ_1: those of a LAPACK SVD in the same precision, or less.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
# How far a filter may raise errors in the directions of large singular values beside the k-th triplet; by how much more
# than the estimate it lowers them; its highest degree; residuals as multiples of the tolerance that may be rounding.
_ROOM, _SAFETY, _HIGHEST, _NOISE = 100.0, 6, 20, 8


@dataclass(frozen=True)
class Products:
    """A matrix J, at least as high as wide, that is known by its products with blocks of columns, `J V` and `Jᵀ U`.

    Blocks are in J's precision, and in float64 where the triplets are formed. Entries are of order 1 at most. `square`
    is `JᵀJ` where products with it cost less.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    times: Callable[[Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]
    square: Float[Tensor, "d_in d_in"] | None = None

    def squared(self, V: Tensor) -> Tensor:
        """`JᵀJ V`."""
        return self.transposed(self.times(V)) if self.square is None else self.square @ V


@dataclass(frozen=True)
class Triplets:
    """What the iteration found, in float64: residuals are shares of σ_1, steps are products with `JᵀJ`."""

    U: Float[Tensor, "d_out k"]
    S: Float[Tensor, " k"]
    V: Float[Tensor, "d_in k"]
    residuals: Float[Tensor, " k"]
    steps: int


def block_width(k: int) -> int:
    """How many vectors are iterated for k triplets: the more, the fewer steps."""
    return k + max(16, k // 2)


def top_triplets(J: Products, k: int, most_steps: int) -> Triplets | None:
    """The k largest singular triplets by Chebyshev-filtered subspace iteration; None where they are not reached.

    A random block goes through polynomials of `JᵀJ` that are small below the wanted singular values and large above,
    then through a Rayleigh–Ritz step, until the residuals are reached. The last Rayleigh–Ritz step is in float64: it
    parts close singular values, and its residuals decide.
    """
    width, tolerance = block_width(k), TOLERANCE[J.dtype]
    # A generator of its own: a matrix has the same triplets whatever was drawn before and whichever batch it is in.
    noise = torch.randn(J.shape[0], width, generator=torch.Generator().manual_seed(0), dtype=J.dtype).to(J.device)
    block, steps = J.squared(J.transposed(noise)), 1
    # Early Ritz values are too small: one from the middle of the surplus is nearer to the end of the block's spectrum.
    edge, error, has_failed = (k + width) // 2, math.inf, False
    while True:
        V = _orthonormal(block)
        images = J.squared(V)
        squares, within = (part.flip(-1) for part in torch.linalg.eigh(V.mT @ images))
        # A zero J, or an overflow.
        if not squares[0] > 0:
            return None
        V, images = V @ within, images @ within
        residuals = torch.linalg.vector_norm(images - V * squares, dim=0)
        before, (error, cut, degree, is_last) = error, _next_filter(squares, residuals[:k], edge, tolerance)
        steps += degree
        if steps > most_steps or error > max(before / 2, _NOISE * tolerance):
            return None
        block = _filtered(J, V, images, cut, degree)
        if is_last and edge == width - 1:
            V = _orthonormal(block.double())
            found, allowed = _rayleigh_ritz(J, V, k, steps)
            if found and float(found.residuals.max()) <= allowed:
                return found
            if found is None or has_failed:
                return None
            block, has_failed = V.to(J.dtype), True
        edge = width - 1


def _next_filter(squares: Tensor, residuals: Tensor, edge: int, tolerance: float) -> tuple[float, float, int, bool]:
    """The error so far, where the next filter ends, its degree, and whether it should be the last.

    Squares are Ritz values of `JᵀJ`, residuals those of the wanted ones. The degree is as high as is still needed, but
    not so high that errors in the directions of σ_1 drown those of σ_k.
    """
    eps, k = torch.finfo(squares.dtype).eps, len(residuals)
    squares, residuals = squares.double().cpu(), residuals.double().cpu()
    squares = squares.clamp_min(max(eps * float(squares[0]), torch.finfo(torch.float64).tiny))
    error = float((residuals / squares[:k].sqrt()).max() / squares[0].sqrt())
    growth = torch.acosh((2 * squares[:k] / squares[edge] - 1).clamp_min(1))
    needed = math.log(max(1, _SAFETY * error / tolerance)) / max(float(growth[-1]), 1e-9)
    if error <= _NOISE * tolerance:
        needed = min(needed, 3)
    room = (_ROOM / (residuals / squares[:k]).clamp(eps, 1)).log() / (growth - growth[-1]).clamp_min(1e-9)
    degree = max(2, math.ceil(min(needed, float(room.min()), _HIGHEST)))
    return error, float(squares[edge]), degree, degree >= needed


def _filtered(J: Products, V: Tensor, images: Tensor, cut: float, degree: int) -> Tensor:
    """The Chebyshev polynomial of `JᵀJ` that is at most 1 on [0, cut], times V; `images` are `JᵀJ V`."""
    before, block = V, torch.add(-V, images, alpha=2 / cut)
    for _ in range(degree - 1):
        before, block = block, torch.add(-2 * block - before, J.squared(block), alpha=4 / cut)
    return block


def _rayleigh_ritz(J: Products, V: Tensor, k: int, steps: int) -> tuple[Triplets | None, float]:
    """The k largest triplets of J restricted to the columns of V, and the largest residual that they may have.

    `J v = σ u` holds by construction; residuals are those of `Jᵀu = σ v`. They must be small beside the gap between σ_k
    and the end of the block too: with as many close singular values as the block is wide, a wrong triplet has a small
    residual.
    """
    tolerance = TOLERANCE[J.dtype]
    images = J.times(V)
    squares, within = (part.flip(-1) for part in torch.linalg.eigh(images.mT @ images))
    # Below that, left vectors from squares are not orthonormal to a tenth of the tolerance.
    if not squares[k - 1] > torch.finfo(V.dtype).eps / (0.1 * tolerance) * squares[0]:
        return None, 0
    S = squares.clamp_min(0).sqrt()
    gap, S, V = (S[k - 1] - S[-1]) / S[0], S[:k], V @ within[:, :k]
    U = images @ within[:, :k] / S
    residuals = torch.linalg.vector_norm(J.transposed(U) - V * S, dim=0) / S[0]
    return Triplets(U, S, V, residuals, steps), min(tolerance, max(tolerance / 2, float(gap) / 10))


def _orthonormal(block: Tensor) -> Tensor:
    return torch.linalg.qr(block).Q
