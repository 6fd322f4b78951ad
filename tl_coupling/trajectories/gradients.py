"""The gradient that reaches a token's embedding, and what it would be if the blocks
were coupled (section 6.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.jacobians import block_jacobian
from tl_coupling.progress import Progress, with_progress
from tl_coupling.spectra import check_k, singular_values, svd
from tl_coupling.traces import Trace
from tl_coupling.trajectories.shapes import direction_cosine


@checked
def coupled_gradient(
    U: Float[Tensor, "d_model k"],
    S: Float[Tensor, "n_layers k"],
    error: Float[Tensor, " d_model"],
) -> Float[Tensor, "n_layers_plus_1 d_model"]:
    r"""How an error after the last block is carried back to every depth if the blocks
    are fully coupled.

    .. math:: -\frac{\partial \mathcal{L}}{\partial x^l} = e + U \Big(\prod_{j > l} (I + S_j) - I\Big) U^\top e

    Of `ℒ = ½ ‖x^L − y‖²` with `e = y − x^L`, where every block is `J_j = U S_j Uᵀ` with
    one U. Entry `l` belongs to depth l: the last is e, the first is the paper's `Σ_j
    u_j (1 + s_j)^L u_jᵀ (y − x^L)`, which it prints as `∂ℒ/∂x^0`: it is the negative
    gradient, the direction of descent. Ours lets S differ between layers, and U have k
    < d_model columns; the rest of e then passes unchanged. Same units as e. Raises
    ValueError for entries that are not finite.

    Example:
        >>> S = torch.tensor([[1.0, 0.5], [1.0, 0.5]])
        >>> tlc.trajectories.coupled_gradient(torch.eye(2), S, error=torch.ones(2))
        tensor([[4.0000, 2.2500],
                [2.0000, 1.5000],
                [1.0000, 1.0000]])

    Source: Aubry et al. 2025, section 6.2.
    """
    for name, given in (("U", U), ("S", S), ("error", error)):
        _check_finite(given, name)
    gains = torch.cat([(1 + S).flip(0).cumprod(0).flip(0), torch.ones_like(S[:1])]) - 1
    return error + (gains * (error @ U)) @ U.mT


@dataclass(frozen=True, eq=False)
class GradientPrediction:
    """Minus the gradient at a token's depths 0 to L: by the chain rule, and as
    `coupled_gradient` has it.

    `exact` is that along the token's own path, `Π_{j>l} (I + J^j_{tt})ᵀ e`: of the last
    token of a causal model all there is. In float64, in units of the error.

    Example:
        >>> prediction = tlc.trajectories.gradient_prediction(trace, torch.ones(trace.d_model), k=8)
        >>> prediction.exact.shape, prediction.cosine_similarity.shape
        (torch.Size([3, 32]), torch.Size([3]))
    """

    exact: Float[Tensor, "n_layers_plus_1 d_model"]
    coupled: Float[Tensor, "n_layers_plus_1 d_model"]
    reference_layer: int
    position: int
    provenance: dict[str, Any]

    @property
    def cosine_similarity(self) -> Float[Tensor, " n_layers_plus_1"]:
        """Cosine of the angle between the two, at each depth."""
        return direction_cosine(self.exact, self.coupled)

    def __repr__(self) -> str:
        gains = (
            float(one[0].norm() / one[-1].norm()) for one in (self.exact, self.coupled)
        )
        said = "grows {:.3g}-fold from the last depth to the first, {:.3g}-fold if the blocks were coupled".format(
            *gains
        )
        cosine = f"cosine {float(self.cosine_similarity[0]):.3f}"
        return f"GradientPrediction(model={self.provenance.get('model')!r}, position={self.position}: {said}, {cosine})"


@checked
def gradient_prediction(
    trace: Trace,
    error: Float[Tensor, " d_model"],
    position: int = -1,
    *,
    reference_layer: int | None = None,
    k: int | None = None,
    progress: Progress | None = None,
) -> GradientPrediction:
    """How close the gradient at one token is to what full coupling would make of it.

    Args:
        error: `y − x^L`, or minus the gradient of any loss at the token after the last
            block.
        position: the token; the last by default.
        reference_layer: whose left singular vectors are the common U; the middle layer
            by default, as in `linearisation`.
        k: how many singular vectors U has, all by default.
        progress: wraps the loop over layers; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises ValueError for a layer, position or k out of range, an error of another width
    or with entries that are not finite. Cost: a Jacobian and its singular values per
    layer.

    Example:
        >>> prediction = tlc.trajectories.gradient_prediction(trace, -trace.residual[-1, -1])
        >>> prediction.exact.shape, bool(prediction.cosine_similarity[-1] > 0.999)
        (torch.Size([3, 32]), True)
    """
    t = trace.position_index(position)
    reference = trace.layer_index(
        trace.n_layers // 2 if reference_layer is None else reference_layer
    )
    k = trace.d_model if k is None else k
    check_k(k, trace.d_model)
    if len(error) != trace.d_model:
        raise ValueError(
            f"`error` must have shape [{trace.d_model}], the width of the stream, got [{len(error)}]"
        )
    exact = [error.to(trace.residual).double()]
    _check_finite(exact[0], "error")
    S, U = exact[0].new_empty(trace.n_layers, k), exact[0].new_empty(trace.d_model, k)
    for layer in with_progress(range(trace.n_layers - 1, -1, -1), progress, "gradient"):
        J = block_jacobian(trace, layer, position=t).double()
        S[layer] = singular_values(J)[:k]
        if layer == reference:
            U[:] = svd(J, k).U
        exact.append(exact[-1] + J.mT @ exact[-1])
    coupled = coupled_gradient(U, S, exact[0])
    return GradientPrediction(
        torch.stack(exact[::-1]),
        coupled,
        reference,
        t,
        trace.provenance | {"position": t},
    )


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"`{name}` must be finite in {values.dtype}, got NaN or infinite entries"
        )
