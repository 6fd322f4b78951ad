"""Coupling matrices with random singular vectors, drawn one by one."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.measures.matrices import require_finite
from tl_coupling.measures.moments import remaining_value
from tl_coupling.spectra import check_k

# Of larger seeds torch takes the last 32 bits, on a CPU; those of 64 bits overflow.
_N_SEEDS = 2**32


def seeded(seed: int) -> torch.Generator:
    """Return a generator of random numbers; a seed of any size has its own.

    Those of 32 bits or fewer are torch's, longer ones are hashed by numpy.
    """
    if seed >= _N_SEEDS:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return torch.Generator().manual_seed(seed)


def random_rotations(
    *shape: int, columns: int | None = None, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Draw independent Haar-random orthogonal matrices, or their first columns.

    From the QR decomposition of Gaussians, in float64 (Mezzadri 2007). The last of
    `shape` is their size d; the others are a batch.

    Args:
        shape: that of the result, without `columns`: `2, 5` for two 5×5 matrices.
        columns: how many columns of each, all by default.
        generator: of the random numbers.

    Example:
        >>> Q = tlc.measures.random_rotations(2, 5, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(Q.mT @ Q, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))
        True
    """
    *batch, d = shape
    gaussian = torch.randn(
        *batch, d, columns or d, generator=generator, dtype=torch.float64
    )
    Q, R = torch.linalg.qr(gaussian)
    # LAPACK's signs are a convention; those of R's diagonal make Q uniform.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


@checked
def draws_of_random_subspaces(
    k: Count,
    n: Count,
    *,
    d_model: Count,
    S_1: Float[Tensor, "*batch n_values"],
    frobenius_norm: Float[Tensor, "*batch"],
    generator: torch.Generator,
) -> Float[Tensor, "n *batch k k"]:
    """Draw n coupling matrices of random `U_2, V_2`: the null "space", one by one.

    For what its closed forms do not say. `A = Uᵀ S V`, where the singular values that
    are not given are equal, as in `random_subspace_null`. All J_1 of a batch meet the
    same frames of their own singular vectors. Cost: two QR decompositions of `[d_model,
    k]` a draw.

    Args:
        k: size of A.
        n: how many.
        d_model, S_1, frobenius_norm: of J_1; S_1 are the largest singular values or all.
        generator: of the random numbers.

    Raises ValueError for a k above `d_model`, and for NaN or infinite singular values.

    Example:
        >>> S_1, generator = torch.ones(40), torch.Generator().manual_seed(0)
        >>> J_1 = {"d_model": 40, "S_1": S_1, "frobenius_norm": S_1.norm()}
        >>> A = tlc.measures.draws_of_random_subspaces(2, 4000, **J_1, generator=generator)
        >>> m = tlc.normalized_miscoupling(A)
        >>> round(float(m.square().mean().sqrt()), 2), round(float(m.mean()), 2)
        (0.71, 0.67)
    """
    check_k(k, d_model)
    s = require_finite(S_1, "S_1").double()
    n_known = s.shape[-1]
    equal_value = remaining_value(S_1.double(), frobenius_norm.double(), d_model)
    # S is `equal_value · 1` and, for the singular values that are known, the excess.
    excess = (s - equal_value[..., None])[..., None, :]
    draws = s.new_empty(n, *s.shape[:-1], k, k)
    for A in draws:
        U, V = random_rotations(2, d_model, columns=k, generator=generator).to(s.device)
        # [k n_known] times the excess of each column, times [n_known k]
        known_part = U[:n_known].mT * excess @ V[:n_known]
        A[:] = known_part + equal_value[..., None, None] * (U.mT @ V)
    return draws
