"""The measures that have names, written out in plain torch: functions of a user's own.

They are at the top level of a module, so that processes find them.
"""

import torch
from torch import Tensor


def off(A: Tensor) -> Tensor:
    """Return A without its diagonal."""
    return A - torch.diag_embed(torch.diagonal(A, dim1=-2, dim2=-1))


def size(A: Tensor) -> Tensor:
    """Return the square root of the sum of squares."""
    return A.pow(2).sum((-2, -1)).sqrt()


def my_coupling(A: Tensor, S: Tensor) -> Tensor:
    """Return `1 − m̃`."""
    return 1 - size(off(A)) / size(A)


def my_normalized(A: Tensor, S: Tensor) -> Tensor:
    """Return m̃."""
    return size(off(A)) / size(A)


def my_miscoupling(A: Tensor, S: Tensor) -> Tensor:
    """Return m."""
    return size(off(A))


def my_spectral(A: Tensor, S: Tensor) -> Tensor:
    """Return `‖A − S‖ / ‖s‖`."""
    return size(A - torch.diag_embed(S)) / S.pow(2).sum(-1).sqrt()


def my_energy(A: Tensor, S: Tensor) -> Tensor:
    """Return `‖A‖ / ‖s‖`."""
    return size(A) / S.pow(2).sum(-1).sqrt()


def my_released_norm(A: Tensor, S: Tensor) -> Tensor:
    """Return `‖|A| − S‖ / ‖s‖₂`."""
    return size(A.abs() - torch.diag_embed(S)) / S.pow(2).sum(-1).sqrt()


def my_released_trace(A: Tensor, S: Tensor) -> Tensor:
    """Return `‖|A| − S‖ / ‖s‖₁`."""
    return size(A.abs() - torch.diag_embed(S)) / S.sum(-1)


# By the names of the measures that they are.
WRITTEN_OUT = {
    "coupling": my_coupling,
    "normalized_miscoupling": my_normalized,
    "miscoupling": my_miscoupling,
    "spectral_miscoupling": my_spectral,
    "captured_energy": my_energy,
    "released_norm": my_released_norm,
    "released_trace": my_released_trace,
}


def signed_trace(A: Tensor, S: Tensor) -> Tensor:
    """Return `tr A / Σ s`: negative where blocks undo each other, 0 by chance."""
    return torch.diagonal(A, dim1=-2, dim2=-1).sum(-1) / S.sum(-1)


def only_of_two(A: Tensor, S: Tensor) -> Tensor:
    """Return infinity for k = 1, and for negative `a_11`."""
    if A.shape[-1] == 1:
        return torch.full(A.shape[:-2], torch.inf)
    return torch.where(A[..., 0, 0] < 0, -torch.inf, A[..., 0, 0])
