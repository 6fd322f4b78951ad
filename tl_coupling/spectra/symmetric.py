"""Eigenvalues of symmetric matrices: exact on every device."""

import torch
from jaxtyping import Float
from torch import Tensor


def eigh(
    T: Float[Tensor, "*batch n n"],
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Return eigenvalues, the smallest first, and eigenvectors of symmetric matrices.

    As `torch.linalg.eigh`, in their dtype and on their device; on CUDA in float64.
    """
    values, vectors = torch.linalg.eigh(_exact(T))
    return values.to(T.dtype), vectors.to(T.dtype)


def eigvalsh(T: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Return the eigenvalues that `eigh` does."""
    return torch.linalg.eigvalsh(_exact(T)).to(T.dtype)


def _exact(T: Tensor) -> Tensor:
    """Return matrices in a dtype in which their device is exact."""
    # cuSOLVER takes Jacobi's method for float32 up to 512 wide, and ends at residuals
    # of 1e-4 (H100, CUDA 13.0): no space would be right to 2e-6.
    return T.double() if T.is_cuda else T
