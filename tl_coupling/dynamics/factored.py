"""Products of many matrices, accurate down to their smallest singular value.

Multiplied out in float64, a product forgets all singular values below 1e-16 of the
largest; after 15 blocks of a language model that is part of them. A factored product
keeps sizes apart from directions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, Device, checked
from tl_coupling.blocks import Trace
from tl_coupling.dynamics.usable_jacobians import divisor
from tl_coupling.jacobians import block_jacobians
from tl_coupling.progress import Progress


@checked
@dataclass(frozen=True, eq=False)
class FactoredProduct:
    """A product of d×d matrices as `Q diag(exp(log_scale)) T`, in float64.

    Q is orthogonal, the scale has the sizes, from large to small, and T is well
    conditioned: each factor keeps its relative accuracy, whatever the sizes.

    Raises:
        ValueError: factors that do not fit each other, or are not finite; a size may be
            −∞, that of zero.

    Source: the stable products of quantum Monte Carlo, with columns sorted before each
    QR decomposition (Bai, Lee, Li and Xu 2011).

    Example:
        >>> product = tlc.dynamics.FactoredProduct.identity(2)
        >>> half = torch.tensor([[0.5, 0.0], [0.0, 1.0]])
        >>> for _ in range(900):
        ...     product = product.then(half)
        >>> [round(log, 1) for log in product.log_singular_values().tolist()]
        [0.0, -623.8]
    """

    Q: Float[Tensor, "d d"]
    log_scale: Float[Tensor, " d"]
    T: Float[Tensor, "d d"]

    def __post_init__(self) -> None:
        """Take the factors in float64."""
        for name in ("Q", "log_scale", "T"):
            factor = getattr(self, name).double()
            # The logarithm of zero is −∞.
            known = factor[factor != -torch.inf] if name == "log_scale" else factor
            if not bool(known.isfinite().all()):
                raise ValueError(
                    f"`{name}` must be finite, got NaN or infinite entries"
                )
            object.__setattr__(self, name, factor)

    @classmethod
    @checked
    def identity(cls, d: Count, device: Device | None = None) -> "FactoredProduct":
        """Return the product of no matrices, of size d."""
        identity = torch.eye(d, dtype=torch.float64, device=device)
        return cls(identity, identity.new_zeros(d), identity)

    @checked
    def then(self, M: Float[Tensor, "d d"]) -> "FactoredProduct":
        """Return M times this product. Cost: two products and a QR decomposition.

        Raises:
            ValueError: M has another size than the product, or is not finite.
        """
        d = len(self.Q)
        if len(M) != d:
            raise ValueError(
                f"`M` must have shape [{d} {d}], as the product has, got "
                f"[{len(M)} {len(M)}]"
            )
        if not bool(M.isfinite().all()):
            raise ValueError("`M` must be finite, got NaN or infinite entries")
        size = divisor(M)
        columns = (M.double() / size) @ self.Q
        # Sorted from large to small, QR leaves a well conditioned T (see the source).
        sizes = columns.norm(dim=0).log() + self.log_scale
        order = sizes.argsort(descending=True)
        Q, R = torch.linalg.qr(columns[:, order])
        # Sizes of columns commute with the decomposition: they never enter it.
        log_entries = R.abs().log() + self.log_scale[order]
        log_scale = log_entries.amax(1)
        # A row of zeros stays one.
        finite_scale = log_scale.masked_fill(log_scale == -torch.inf, 0.0)
        # Each row relative to its largest entry.
        rows = R.sign() * (log_entries - finite_scale[:, None]).exp()
        return FactoredProduct(Q, log_scale + math.log(size), rows @ self.T[order])

    def log_singular_values(self) -> Float[Tensor, " d"]:
        """Return the natural logarithms of the singular values, from large to small.

        Of singular values below 1e-300 of the largest, and of zeros, −∞. Cost: a QR
        decomposition and one without vectors of singular values.
        """
        order = self.log_scale.argsort(descending=True)
        largest = self.log_scale.max()
        # The product is zero.
        if largest == -torch.inf:
            return self.log_scale
        _, R = torch.linalg.qr(self.T[order].mT, mode="r")
        # Relative to the largest size, which is added again as a logarithm.
        graded = R * (self.log_scale[order] - largest).exp()
        return torch.linalg.svdvals(graded).log() + largest

    def dense(self) -> Float[Tensor, "d d"]:
        """Return the product as one matrix, with what rounding leaves of it.

        Raises:
            ValueError: its entries are too large for float64.
        """
        product = self.Q * self.log_scale.exp() @ self.T
        if not bool(product.isfinite().all()):
            raise ValueError(
                f"the product has entries of about e^{float(self.log_scale.max()):.0f}, "
                "too large for float64: read `log_singular_values()`"
            )
        return product


def step_matrix(J: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return `I + J` in float64: what a block does to the stream."""
    # A copy: in float64 `double` gives the tensor itself.
    step = J.to(torch.float64, copy=True)
    step.diagonal().add_(1)
    return step


@checked
def block_product(
    trace: Trace,
    layers: Sequence[int] | None = None,
    *,
    position: int = -1,
    progress: Progress | None = None,
) -> FactoredProduct:
    r"""Return the product of blocks at one token, `(I + J^m) … (I + J^l)`.

    It is the derivative of `X^{m+1}` with respect to `X^l` along the token's own stream:
    without what reaches it by way of other tokens.

    Args:
        trace: a traced prompt.
        layers: the blocks, the first to run first; all by default.
        position: the token; the last by default.
        progress: as in `depth_coupling`.

    Raises:
        ValueError: a layer or position out of range, or no layers.

    Cost: as `block_jacobians`; then two products and a QR decomposition a block.

    Example:
        >>> product = tlc.dynamics.block_product(trace)
        >>> J = tlc.block_jacobians(trace).double()
        >>> P = (torch.eye(32) + J[1]) @ (torch.eye(32) + J[0])
        >>> torch.allclose(product.dense(), P)
        True
    """
    J = block_jacobians(trace, layers, position=position, progress=progress)
    product = FactoredProduct.identity(trace.d_model, J.device)
    for matrix in J:
        product = product.then(step_matrix(matrix))
    return product
