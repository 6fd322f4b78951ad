"""The gradient at a token's embedding, and what coupled blocks would make of it.

Source: Aubry et al. 2025, section 6.2.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import Connection, JacobianOptions, jacobians_in_turns
from tl_coupling.progress import Progress
from tl_coupling.results import tidy_table
from tl_coupling.spectra import check_k, singular_values, svd
from tl_coupling.trajectories.predictions import middle_layer
from tl_coupling.trajectories.shapes import direction_cosine

if TYPE_CHECKING:
    import pandas


@checked
def coupled_gradient(
    U: Float[Tensor, "d_model k"],
    S: Float[Tensor, "n_layers k"],
    error: Float[Tensor, " d_model"],
) -> Float[Tensor, "n_layers_plus_1 d_model"]:
    r"""Return how fully coupled blocks carry an error back to every depth.

    .. math:: -\frac{\partial \mathcal{L}}{\partial x^l}
        = e + U \Big(\prod_{j > l} (I + S_j) - I\Big) U^\top e

    This is minus the gradient of `ℒ = ½ ‖x^L − y‖²` with `e = y − x^L`, where every
    block is `J_j = U S_j Uᵀ` with one U. The paper prints the first entry, `Σ_j u_j
    (1 + s_j)^L u_jᵀ (y − x^L)`, as `∂ℒ/∂x^0`; it is the negative gradient, the
    direction of descent. Here S may differ between layers, and U may have k < d_model
    columns: the rest of e then passes unchanged.

    Args:
        U: singular vectors that all blocks have in common, in columns.
        S: their singular values in each block.
        error: e, the error after the last block.

    Returns:
        one row for each depth, in units of e; the last is e itself.

    Raises:
        ValueError: entries that are not finite.

    Example:
        >>> S = torch.tensor([[1.0, 0.5], [1.0, 0.5]])
        >>> tlc.trajectories.coupled_gradient(torch.eye(2), S, error=torch.ones(2))
        tensor([[4.0000, 2.2500],
                [2.0000, 1.5000],
                [1.0000, 1.0000]])

    Source: Aubry et al. 2025, section 6.2.
    """
    _check_finite(U, "U")
    _check_finite(S, "S")
    _check_finite(error, "error")
    # Π_{j>l} (I + S_j) at every depth l, from the last block down; after it, nothing.
    products = (1 + S).flip(0).cumprod(0).flip(0)
    gains = torch.cat([products, torch.ones_like(S[:1])])
    return error + ((gains - 1) * (error @ U)) @ U.mT


@dataclass(frozen=True, eq=False)
class GradientPrediction:
    """Hold minus the gradient at a token's depths 0 to L, and its prediction.

    `gradient_prediction` makes it. Both are in float64, in units of the error.

    Attributes:
        exact: by the chain rule along the token's own path, `Π_{j>l} (I + J^j_{tt})ᵀ
            e`; for the last token of a causal model, this is the whole gradient.
        coupled: as `coupled_gradient` predicts it.
        reference_layer: the layer that gave U.
        position: the token.
        provenance: how the trace was made, and the token; JSON-able.

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

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each depth.

        Example:
            >>> error = torch.ones(trace.d_model)
            >>> table = tlc.trajectories.gradient_prediction(trace, error, k=8).to_dataframe()
            >>> list(table)[:4], len(table)
            (['depth', 'exact_norm', 'coupled_norm', 'cosine_similarity'], 3)
        """
        columns = {
            "exact_norm": ("depth", self.exact.norm(dim=-1)),
            "coupled_norm": ("depth", self.coupled.norm(dim=-1)),
            "cosine_similarity": ("depth", self.cosine_similarity),
        }
        return tidy_table(columns, {}, self.provenance)

    def __repr__(self) -> str:
        # Rows go from depth 0 to L, the gradient the other way.
        growth = float(self.exact[0].norm() / self.exact[-1].norm())
        coupled_growth = float(self.coupled[0].norm() / self.coupled[-1].norm())
        return (
            f"GradientPrediction(model={self.provenance.get('model')!r}, "
            f"position={self.position}: "
            f"grows {growth:.3g}-fold from the last depth to the first, "
            f"{coupled_growth:.3g}-fold if the blocks were coupled, "
            f"cosine {float(self.cosine_similarity[0]):.3f})"
        )


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
    """Compare the gradient at one token with what coupled blocks would make of it.

    Args:
        trace: a traced prompt.
        error: `y − x^L`, or minus the gradient of any loss at the token after the last
            block.
        position: the token; the last by default.
        reference_layer: whose left singular vectors are the common U; the middle layer
            by default, as in `linearisation`.
        k: how many singular vectors U has, all by default.
        progress: wraps the loop over layers; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises:
        ValueError: a layer, position or k out of range, an error of another width, or
            one with entries that are not finite.

    Cost: a Jacobian and its singular values per layer.

    Example:
        >>> error = -trace.residual[-1, -1]
        >>> prediction = tlc.trajectories.gradient_prediction(trace, error)
        >>> prediction.exact.shape, bool(prediction.cosine_similarity[-1] > 0.999)
        (torch.Size([3, 32]), True)
    """
    t = trace.position_index(position)
    reference = middle_layer(trace, reference_layer)
    k = trace.d_model if k is None else k
    check_k(k, trace.d_model)
    if len(error) != trace.d_model:
        raise ValueError(
            f"`error` must have shape [{trace.d_model}], the width of the stream, "
            f"got [{len(error)}]"
        )
    # In the trace's precision first: what overflows there is refused below.
    last = error.to(trace.residual).double()
    _check_finite(last, "error")
    exact = [last]
    S = last.new_empty(trace.n_layers, k)
    U = last.new_empty(trace.d_model, k)
    # From the last block down, as the chain rule goes.
    connections = [
        Connection(layer, t, t, t) for layer in reversed(range(trace.n_layers))
    ]
    options = JacobianOptions(progress=progress)
    jacobians = jacobians_in_turns([(trace, connections)], options, "block")
    for connection, J, _ in jacobians:
        J = J.double()
        S[connection.layer] = singular_values(J[None])[0, :k]
        if connection.layer == reference:
            U[:] = svd(J, k).U
        # `(I + J)ᵀ` of this block, applied to what comes back from all later ones.
        exact.append(exact[-1] + J.mT @ exact[-1])
        # Not kept while the next is computed.
        del J
    return GradientPrediction(
        # Results begin at depth 0, the chain rule at depth L.
        exact=torch.stack(exact[::-1]),
        coupled=coupled_gradient(U, S, last),
        reference_layer=reference,
        position=t,
        provenance=trace.provenance | {"position": t},
    )


def _check_finite(values: Tensor, name: str) -> None:
    """Raise ValueError unless every entry is finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"`{name}` must be finite in {values.dtype}, got NaN or infinite entries"
        )
