"""Eigenvalues of symmetric matrices: exact on every device."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra.parallel import parallel_map

# Up to this width one core of a CPU takes less for a matrix than cuSOLVER, which computes
# the matrices of a batch one after the other.
_SMALL = 100


def eigh(
    T: Float[Tensor, "*batch n n"],
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Return eigenvalues, the smallest first, and eigenvectors of symmetric matrices.

    As `torch.linalg.eigh`, in their dtype and on their device; of those on CUDA in
    float64, and of small ones by the CPU.
    """
    values, vectors = _exact(torch.linalg.eigh, T)
    return values.to(T), vectors.to(T)


def eigvalsh(T: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Return the eigenvalues that `eigh` does."""
    values: Tensor = _exact(torch.linalg.eigvalsh, T)
    return values.to(T)


def _exact(function: Callable[[Tensor], Any], T: Tensor) -> Any:
    """Call a function on matrices in a dtype, and where, it is exact and fast."""
    if not T.is_cuda:
        return function(T)
    # cuSOLVER takes Jacobi's method for float32 up to 512 wide, and ends at residuals
    # of 1e-4 (H100, CUDA 13.0): no space would be right to 2e-6.
    if T.ndim > 2 and T.shape[-1] <= _SMALL:
        return _by_cores(function, T.double().cpu())
    return function(T.double())


def _by_cores(function: Callable[[Tensor], Any], T: Float[Tensor, "*batch n n"]) -> Any:
    """Call a function on matrices of the CPU, some by each core."""
    matrices = T.reshape(-1, *T.shape[-2:])
    n_of_core = -(-len(matrices) // torch.get_num_threads())
    results = parallel_map(function, matrices.split(n_of_core), T.device)
    if isinstance(results[0], Tensor):
        return torch.cat(results).reshape(T.shape[:-1])
    values, vectors = map(torch.cat, zip(*results, strict=True))
    return values.reshape(T.shape[:-1]), vectors.reshape(T.shape)
