"""What must hold of Jacobians whose blocks are multiplied, or decomposed."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra import check_matrices

# Products of two matrices of this size stay finite in float32, and in float64.
_LARGEST_IN_FLOAT32 = 1e30
_LARGEST = 1e300
# Sums of squares neither overflow nor vanish between a size and its inverse.
_LARGE = 1e100


def usable_jacobians(
    J: Float[Tensor, "n_layers d d"],
) -> Float[Tensor, "n_layers d d"]:
    """Return Jacobians in float32, or in float64 where they came so or are very large.

    Raises:
        ValueError: none, without entries, with some that are not finite, or too large to be
            multiplied in float64.
    """
    J = J.detach()
    if J.element_size() < torch.float32.itemsize:
        J = J.float()
    check_matrices(J)
    # Without a copy of all of them.
    lowest, highest = torch.aminmax(J)
    largest = max(-float(lowest), float(highest))
    if largest > _LARGEST:
        raise ValueError(
            f"`J` must have entries up to {_LARGEST:g}, which can be multiplied in "
            f"float64, got {largest:g}"
        )
    return J.double() if largest > _LARGEST_IN_FLOAT32 else J


def divisor(M: Tensor) -> float:
    """Return 1, or the largest entry of a matrix whose squares overflow or vanish."""
    largest = float(M.abs().max())
    is_in_range = 1 / _LARGE < largest < _LARGE
    return 1.0 if is_in_range or largest == 0 else largest


def check_steps(J: Float[Tensor, "n_layers d d"], layers: Sequence[int]) -> None:
    """Raise ValueError where `I + J` is zero: nothing passes such a block.

    Its products are zero, and so are those with rotations in between: neither has a
    logarithm, nor do they differ.
    """
    erasing = -torch.eye(J.shape[-1]).to(J)
    for layer, jacobian in zip(layers, J, strict=True):
        if torch.equal(jacobian, erasing):
            raise ValueError(
                f"layer {layer}: J is −I, so that nothing of the stream passes the "
                "block, and every product with it is zero: leave it out with `layers`"
            )
