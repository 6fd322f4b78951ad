"""Jacobians in other coordinates of the residual stream.

Singular vectors depend on what length means. Under a linear change of coordinates `x ↦
T x` a Jacobian becomes `T J T⁻¹`: its eigenvalues, trace and rank stay, and so does
whether two Jacobians commute; its singular vectors and values, and so coupling, do not,
unless T is orthogonal. A metric M says what length means: `|x|² = xᵀ M x`.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import cached_property, checked
from tl_coupling.measures.matrices import require_finite
from tl_coupling.measures.removals import without_identity
from tl_coupling.results import DifferentPrompts
from tl_coupling.spectra import eigh, eigvalsh

Without = Literal["identity"]
Metric = Float[Tensor, "d_model d_model"]
_SEVERAL_TRACES = "a list of traced prompts: `trace(model, prompt)` makes one"


@checked
def stream_metric(
    traces: Annotated[Iterable[object], _SEVERAL_TRACES], shrinkage: float = 0.01
) -> Metric:
    r"""Return the metric in which the residual stream has the same size in every direction.

    .. math::

        M = \Sigma^{-1}, \qquad
        \Sigma = (1 - s)\, C + s\, \frac{\operatorname{tr} C}{d} I, \qquad
        C = \frac{1}{N} \sum_{t, l} x^l_t {x^l_t}^\top

    C is the second moment of the streams that enter and leave the blocks, over all
    depths, tokens and prompts. In trained models a few directions hold most of it: a
    block that reads or writes along them is alike in every layer for that reason alone.
    `depth_coupling(trace, metric=M)` compares blocks in coordinates in which they do not
    stand out.

    Args:
        traces: traced prompts of one model, from a list or a generator; they are read
            one at a time.
        shrinkage: s, in [0, 1]. Without it directions in which the stream hardly moves
            on these prompts count the most. 0 is for more tokens and depths than
            `d_model`, many times over; 1 gives a multiple of the identity.

    Returns:
        M in float64, positive definite, with `tr M⁻¹ = d`.

    Raises:
        ValueError: no traces, a prompt twice, of different models, a shrinkage out of range, or a
            stream without extent in some direction and no shrinkage.
        TypeError: something that is not a trace.

    Cost: a product of the stream with itself for each trace, and an inverse.

    Example:
        >>> M = tlc.measures.stream_metric([trace])
        >>> whitened = tlc.depth_coupling(trace, k=4, metric=M)
        >>> whitened.mean() != tlc.depth_coupling(trace, k=4).mean()
        True
    """
    if not 0 <= shrinkage <= 1:
        raise ValueError(f"`shrinkage` must lie in [0, 1], got {shrinkage}")
    total: Tensor | None = None
    different = DifferentPrompts("traces")
    for item in traces:
        stream = getattr(item, "residual", None)
        if not isinstance(stream, Tensor):
            raise TypeError(
                f"`traces` must be traced prompts, got {type(item).__name__}: "
                "`tl_coupling.trace(model, prompt)` makes one"
            )
        different.add_traced(item)
        rows = require_finite(stream.detach().double().flatten(0, -2), "the stream")
        if total is not None and total.shape[-1] != rows.shape[-1]:
            raise ValueError(
                f"`traces` must be of one model, got widths {total.shape[-1]} and "
                f"{rows.shape[-1]}"
            )
        product = rows.mT @ rows
        total = product if total is None else total + product
    if total is None:
        raise ValueError("`traces` is empty: wanted at least one")
    size = float(total.trace())
    if not 0 < size < math.inf:
        raise ValueError(
            "`traces` must have a stream whose squares have a sum, above 0 and within the "
            f"range of float64, got {size:g}"
        )
    d_model = total.shape[-1]
    # With a mean eigenvalue of 1 the shrinkage is a share of it.
    moment = total * (d_model / size)
    identity = torch.eye(d_model, dtype=moment.dtype, device=moment.device)
    eigenvalues, Q = eigh((1 - shrinkage) * moment + shrinkage * identity)
    rounding = d_model * torch.finfo(moment.dtype).eps * eigenvalues[-1]
    # Written so that NaN is no extent either, as below.
    if not eigenvalues[0] > rounding:
        raise ValueError(
            "the stream has no extent in some direction on these prompts: give more of "
            f"them, or a `shrinkage` above {shrinkage:g}"
        )
    return Q / eigenvalues @ Q.mT


@checked
def in_metric(
    J: Float[Tensor, "*batch d_model d_model"], metric: Metric
) -> Float[Tensor, "*batch d_model d_model"]:
    r"""Return Jacobians in coordinates in which a metric is the identity.

    .. math:: J' = M^{1/2} J M^{-1/2}

    Args:
        J: one Jacobian, or many.
        metric: M, symmetric and positive definite; its scale does not matter.

    Raises:
        ValueError: an M of another size, or that is not symmetric and positive definite
            to the rounding of its dtype.

    Cost: two symmetric eigenvalue problems, and two products for each.

    Example:
        >>> M = torch.diag(torch.tensor([4.0, 1.0]))
        >>> tlc.measures.in_metric(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), M)
        tensor([[0.0000, 2.0000],
                [0.5000, 0.0000]])
    """
    return _moved(J, _roots(metric))


@dataclass(frozen=True, eq=False)
class Change:
    """What is done to every Jacobian before it is decomposed.

    Attributes:
        without: what is taken away.
        metric: whose coordinates it is moved to.
    """

    without: Without | None = None
    metric: Metric | None = None

    def __call__(self, J: Tensor) -> Tensor:
        """Return the Jacobian as it is compared."""
        # Both commute, as `M^{1/2} I M^{-1/2} = I`.
        if self.without is not None:
            J = without_identity(J)
        if self.metric is not None:
            J = _moved(J, self._roots)
        return J

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        assert self.metric is not None
        return _roots(self.metric.detach())

    @property
    def provenance(self) -> dict[str, str]:
        """What results say of it: the metric by a digest of its numbers."""
        facts: dict[str, str] = {}
        if self.without is not None:
            facts["without"] = self.without
        if self.metric is not None:
            numbers = self.metric.detach().cpu().double().numpy()
            facts["metric"] = hashlib.sha256(numbers.tobytes()).hexdigest()[:16]
        return facts


def _moved(J: Tensor, roots: tuple[Tensor, Tensor]) -> Tensor:
    d_model = J.shape[-1]
    if len(roots[0]) != d_model:
        raise ValueError(
            f"`metric` must be as wide as the model, [{d_model} {d_model}], got "
            f"{list(roots[0].shape)}"
        )
    root, inverse_root = (side.to(J.device) for side in roots)
    # A metric that is far from the identity would lose digits in float32.
    return (root @ J.double() @ inverse_root).to(J.dtype)


def _roots(metric: Metric) -> tuple[Tensor, Tensor]:
    """Return `M^{1/2}` and `M^{-1/2}`, in float64."""
    M = require_finite(metric, "metric").double()
    if not torch.allclose(M, M.mT, rtol=1e-5, atol=1e-8 * float(M.abs().max())):
        raise ValueError("`metric` must be symmetric, got one that is not")
    M = (M + M.mT) / 2
    eigenvalues, Q = eigh(M)
    if not eigenvalues[0] > 0 or _is_singular(M, metric.dtype):
        raise ValueError(
            "`metric` must be positive definite, beyond the rounding of its "
            f"{metric.dtype}, got a smallest eigenvalue of {float(eigenvalues[0]):.3g}"
        )
    lengths = eigenvalues.sqrt()
    return Q * lengths @ Q.mT, Q / lengths @ Q.mT


def _is_singular(M: Metric, dtype: torch.dtype) -> bool:
    """Say whether a metric is singular to the rounding of the dtype that held it.

    In units in which its diagonal is 1: entries round by a share of themselves, so that
    axes of very different lengths are no reason to refuse one.
    """
    lengths = M.diagonal().clamp_min(torch.finfo(M.dtype).tiny).sqrt()
    eigenvalues = eigvalsh(M / lengths[:, None] / lengths)
    return not bool(eigenvalues[0] > torch.finfo(dtype).eps * eigenvalues[-1])
