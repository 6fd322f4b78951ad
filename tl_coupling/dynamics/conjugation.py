"""Products of blocks whose relation to each other is destroyed, and nothing else.

Conjugated by its own random rotation, `Q (I + J) Qᵀ`, a block keeps its singular values,
eigenvalues and departure from normality. In the product of several only `Q_{l+1}ᵀ Q_l`
stands between two blocks, again a Haar-random rotation R; so the singular values of the
product are those of `Σ_m R_m … Σ_2 R_2 Σ_1`, with Σ those of `I + J`.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# Of Lanczos' iteration.
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


def divided(P: Float[Tensor, "d n"]) -> tuple[Float[Tensor, "d n"], float]:
    """Return a matrix divided by its size, and the natural logarithm of that.

    The size is its norm, or its largest entry where squares overflow or vanish; zeros
    stay zeros, of size −∞.
    """
    size = P.norm()
    if not 0 < size < torch.inf:
        size = P.abs().max()
    if size == 0:
        return P, -math.inf
    return P / size, math.log(float(size))


def largest_eigenvalue(G: Float[Tensor, "d d"], tolerance: float = 1e-4) -> float:
    """Return the largest eigenvalue of a symmetric matrix that has no negative one.

    By Lanczos with full reorthogonalisation, until the residual is below the tolerance
    times the eigenvalue; the error is about the square of that, divided by the gap to
    the next. The start is fixed: the value is the same each time.
    """
    n_steps = min(len(G), _MOST_STEPS)
    start = torch.Generator().manual_seed(0)
    q = torch.randn(len(G), generator=start, dtype=G.dtype).to(G.device)
    q = q / q.norm()
    basis = q.new_zeros(len(G), n_steps)
    tridiagonal = torch.zeros(n_steps, n_steps, dtype=torch.float64)
    largest = 0.0
    for step in range(n_steps):
        basis[:, step] = q
        known = basis[:, : step + 1]
        image = G @ q
        tridiagonal[step, step] = float(q @ image)
        # One pass leaves a share of the basis that rounding brings back: two do not.
        for _ in range(2):
            image = image - known @ (known.mT @ image)
        length = float(image.norm())
        values, vectors = torch.linalg.eigh(tridiagonal[: step + 1, : step + 1])
        largest = max(0.0, float(values[-1]))
        # The residual of the largest Ritz pair.
        if length * abs(float(vectors[-1, -1])) <= tolerance * largest:
            break
        if step + 1 < n_steps:
            tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = length
        q = image / length
    return largest


def log_largest_singular_value(gram: Float[Tensor, "d d"]) -> float:
    """Return log σ₁ of P from `PᵀP`; −∞ of zeros."""
    largest = largest_eigenvalue(gram)
    return 0.5 * math.log(largest) if largest > 0 else -math.inf
