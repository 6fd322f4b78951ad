"""Products of blocks whose relation to each other is destroyed, and nothing else.

Conjugated by its own random rotation, `Q (I + J) Qᵀ`, a block keeps its singular values,
eigenvalues and departure from normality. In the product of several only `Q_{l+1}ᵀ Q_l`
stands between two blocks, again a Haar-random rotation R; so the singular values of the
product are those of `Σ_m R_m … Σ_2 R_2 Σ_1`, with Σ those of `I + J`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra import eigh

# The most steps that Lanczos' iteration takes.
_MOST_STEPS = 160


def generator_of(seed: int, draw: int) -> torch.Generator:
    """Return the random numbers of one draw: the same whichever process draws it."""
    (state,) = np.random.SeedSequence([seed, draw]).generate_state(1, np.uint64)
    # Seeds of 64 bits overflow in torch.
    return torch.Generator().manual_seed(int(state) >> 1)


def rotated(
    X: Float[Tensor, "d n"], generator: torch.Generator
) -> Float[Tensor, "d n"]:
    """Return X times a Haar-random rotation, which is never built.

    The rotation is a product of d reflections along Gaussian vectors of lengths d, d −
    1, …, with random signs (Stewart 1980), in X's precision: no decomposition is needed.
    """
    d = len(X)
    gaussian = torch.randn(d, d, generator=generator, dtype=X.dtype)
    vectors = gaussian.tril().to(X.device)
    leading = vectors.diagonal().clone()
    signs = torch.where(leading < 0, -1.0, 1.0).to(X)
    # Both terms have the same sign, so that nothing cancels.
    pivots = leading + signs * vectors.norm(dim=0)
    vectors = (vectors / pivots).tril(-1)
    # LAPACK's form of a reflection: `I − τ v vᵀ`, where v begins with 1.
    tau = 2 / (1 + vectors.square().sum(0))
    # A reflection along one number is a sign, which `signs` has already.
    tau[-1] = 0
    return torch.ormqr(vectors, tau, signs[:, None] * X)


def conjugated_grams(
    step_values: Float[Tensor, "n_layers d"], generator: torch.Generator
) -> Iterator[tuple[Float[Tensor, "d d"], float]]:
    """Draw one conjugated product; yield `PᵀP` after each block.

    Args:
        step_values: the singular values of each `I + J`.
        generator: of the random numbers.

    Yields:
        for each layer `PᵀP` of a product that is divided by a number, so that it neither
        overflows nor vanishes, and the natural logarithm of that number.
    """
    P = torch.diag(step_values[0])
    log_divisor = 0.0
    for layer, values in enumerate(step_values):
        if layer:
            P = values[:, None] * rotated(P, generator)
        P, log_size = divided(P)
        log_divisor += log_size
        yield P.mT @ P, log_divisor


def divided(P: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], float]:
    """Return a matrix or vector divided by its size, and the natural logarithm of that.

    The size is its norm, or its largest entry where squares overflow or vanish; zeros
    stay zeros, of size −∞.
    """
    size = P.norm()
    if not 0 < size < torch.inf:
        size = P.abs().max()
    if size == 0:
        return P, -math.inf
    return P / size, math.log(float(size))


def largest_eigenvalue(
    G: Float[Tensor, "d d"] | Callable[[Tensor], Tensor],
    like: Float[Tensor, " d"] | None = None,
    tolerance: float = 1e-4,
) -> float:
    """Return the largest eigenvalue of a symmetric matrix that has no negative one.

    By Lanczos with full reorthogonalisation, until the residual is below the tolerance
    times the eigenvalue; the error is about the square of that, divided by the gap to
    the next. The start is fixed: the value is the same each time.

    Args:
        G: the matrix, or a function that multiplies a vector by it.
        like: for a function, a vector of the size, dtype and device that it takes.
        tolerance: of the residual, relative to the eigenvalue.
    """
    if isinstance(G, Tensor):
        return largest_eigenvalue(G.matmul, G[0], tolerance)
    assert like is not None
    d = len(like)
    n_steps = min(d, _MOST_STEPS)
    q = fixed_start(like)
    basis = q.new_zeros(d, n_steps)
    tridiagonal = torch.zeros(n_steps, n_steps, dtype=torch.float64)
    largest = 0.0
    for step in range(n_steps):
        basis[:, step] = q
        known = basis[:, : step + 1]
        image = G(q)
        tridiagonal[step, step] = float(q @ image)
        # One pass leaves a share of the basis that rounding brings back: two do not.
        for _ in range(2):
            image = image - known @ (known.mT @ image)
        length = float(image.norm())
        values, vectors = eigh(tridiagonal[: step + 1, : step + 1])
        largest = max(0.0, float(values[-1]))
        # The residual of the largest Ritz pair.
        if length * abs(float(vectors[-1, -1])) <= tolerance * largest:
            break
        if step + 1 < n_steps:
            tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = length
        q = image / length
    return largest


def fixed_start(like: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Return a unit vector like this one in kind: random, and the same each time."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(like), generator=generator, dtype=like.dtype).to(like.device)
    return q / q.norm()


def log_largest_singular_value(gram: Float[Tensor, "d d"]) -> float:
    """Return log σ₁ of P from `PᵀP`; −∞ of zeros."""
    return _half_log(largest_eigenvalue(gram))


def log_largest_of_product(J: Sequence[Float[Tensor, "d d"]]) -> float:
    """Return log σ₁ of the product of all `I + J`, the first to act first.

    The product is never multiplied out: Lanczos multiplies some vectors by it, about
    twenty where it amplifies some directions more than others. −∞ of zero.
    """
    x = fixed_start(J[0][0])
    log_sizes = []
    for matrix in J:
        x, log_size = divided(torch.addmv(x, matrix, x))
        # The start lies in no direction: what maps it to zero is zero.
        if log_size == -math.inf:
            return log_size
        log_sizes.append(log_size)
    # Products neither overflow nor vanish when each matrix is divided by the factor by
    # which it lengthens one vector.
    factors = [math.exp(-log_size) for log_size in log_sizes]

    def gram_times(x: Tensor) -> Tensor:
        for matrix, factor in zip(J, factors, strict=True):
            x = torch.addmv(x, matrix, x) * factor
        for matrix, factor in zip(reversed(J), reversed(factors), strict=True):
            x = torch.addmv(x, matrix.mT, x) * factor
        return x

    return _half_log(largest_eigenvalue(gram_times, x)) + sum(log_sizes)


def _half_log(square: float) -> float:
    return 0.5 * math.log(square) if square > 0 else -math.inf
