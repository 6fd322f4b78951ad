"""Random directions and frames of the controls."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor


def unit_vectors(n: int, d: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Return random unit vectors, uniform on the sphere."""
    gaussian = torch.randn(n, d, generator=generator)
    return gaussian / gaussian.norm(dim=-1, keepdim=True)


def span_vectors(
    n: int, span: Float[Tensor, "d m"], generator: torch.Generator
) -> Float[Tensor, "n d"]:
    """Return random unit vectors in the span of orthonormal columns."""
    return unit_vectors(n, span.shape[1], generator).to(span) @ span.mT


def frames(
    n: int, span: Float[Tensor, "d m"], rank: int, generator: torch.Generator
) -> Iterator[Float[Tensor, "d rank"]]:
    """Yield random orthonormal frames in the span of orthonormal columns."""
    for _ in range(n):
        # QR of a Gaussian is Haar-random but for signs, which a subspace does not have.
        gaussian = torch.randn(span.shape[1], rank, generator=generator)
        yield span @ torch.linalg.qr(gaussian).Q.to(span)
