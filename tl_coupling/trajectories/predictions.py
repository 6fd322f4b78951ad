"""How well the linearised blocks predict a token's trajectory (Aubry et al. 2025, section 6.1 and eq. 19–24)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import checked, warn_caller
from tl_coupling.jacobians import block_jacobian, block_jvp
from tl_coupling.spectra import check_k, singular_values, svd
from tl_coupling.trajectories.shapes import direction_cosine

Prediction = Literal["one_step", "product", "closed_form", "previous", "input"]


@dataclass(frozen=True, eq=False)
class Linearisation:
    """A token's trajectory and what three linear models make of it; entry `l` of each predicts `trajectory[l + 1]`.

    Attributes:
        trajectory: `x^0, …, x^L`.
        one_step: `(I + J^l) x^{l−1}` (eq. 19, 23): each step starts from the truth.
        product: `(I + J^l) ⋯ (I + J^1) x^0` (eq. 20): only the first one does.
        closed_form: `x^0 + U (Π_{j≤l} (I + S_j) − I) Uᵀ x^0` (eq. 24), what the product would be if the blocks were
            coupled exactly; `None` if it was left out. S_j are the k largest singular values of J^j, U the k left
            singular vectors of the reference layer. With all of them this is the paper's `U Π (I + S_j) Uᵀ x^0`.
        reference_layer: the layer that gave U; `None` without the closed form.
        k: how many singular vectors the closed form has; `None` without it.
        position: which token.
        provenance: how it was made; JSON-able.

    In float64, in units of the residual stream: the products outgrow it by many orders of magnitude.
    """

    trajectory: Float[Tensor, "n_layers_plus_1 d_model"]
    one_step: Float[Tensor, "n_layers d_model"]
    product: Float[Tensor, "n_layers d_model"]
    closed_form: Float[Tensor, "n_layers d_model"] | None
    reference_layer: int | None
    k: int | None
    position: int
    provenance: dict[str, Any] = field(repr=False)

    @checked
    def predicted(self, prediction: Prediction) -> Float[Tensor, "n_layers d_model"]:
        """A prediction by name. Two are of no block at all: "previous" says `x^{l−1}`, "input" says `x^0`.

        Those are what a linearisation has to beat: "previous" for one step, "input" for the products.
        """
        if prediction == "previous":
            return self.trajectory[:-1]
        if prediction == "input":
            return self.trajectory[:1].expand_as(self.one_step)
        values = getattr(self, prediction)
        if values is None:
            raise ValueError("the closed form was left out: measure with `closed_form=True`")
        return values

    @checked
    def relative_error(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """`‖x̂^l − x^l‖ / ‖x^l‖` of a prediction `x̂`, without dimension; 0 is perfect, 1 is as good as saying 0.

        NaN with a warning where `x^l` is zero.
        """
        truth = self.trajectory[1:]
        error = (self.predicted(prediction) - truth).norm(dim=-1) / truth.norm(dim=-1)
        undefined = truth.norm(dim=-1) == 0
        if bool(undefined.any()):
            at = ", ".join(str(layer) for layer in undefined.nonzero().flatten().tolist())
            warn_caller(f"relative error is undefined (NaN) where x is 0, after layer {at}")
        return error.masked_fill(undefined, torch.nan)

    @checked
    def cosine_similarity(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """Cosine of the angle between a prediction and `x^l`; NaN with a warning where either is zero."""
        return direction_cosine(self.predicted(prediction), self.trajectory[1:])


@checked
def linearisation(
    trace: Trace,
    position: int = -1,
    *,
    closed_form: bool = True,
    reference_layer: int | None = None,
    k: int | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
) -> Linearisation:
    """Predict one token's trajectory by its linearised blocks: step by step, compounded, and under exact coupling.

    A block is not linear and `J x ≠ f(x)`: the first-order expansion at `x` is `f(x) + J (y − x)`, and the linear model
    of the paper leaves its constant `f(x) − J x` out. How much of a step that is, is what is measured here. J is
    `J^l_{tt}`: the other tokens are held fixed.

    Expect little: a block that normalises first hardly sees how long its token is. Where attention and MLP run in
    parallel (GPT-NeoX, GPT-J), `f(c x) = f(x)` but for the norm's ε, so that `J x = 0` (Euler's theorem) and the linear
    model says that nothing happens. Where the MLP comes second, `J x = −D a`, with `a` what attention adds and D the
    derivative of the MLP after it. Compare with the predictions "previous" and "input", which know of no block.

    Args:
        trace: a traced prompt.
        position: the token; the last by default, as in the paper.
        closed_form: also predict by eq. 24; it needs every J and its singular values, the others one product each.
        reference_layer: whose left singular vectors are the paper's common U. The paper does not say (under exact
            coupling all are the same); the middle layer by default, since coupling fades with distance in depth.
        k: how many singular vectors U has, all by default. The rest of the stream is then left as it is.
        progress: wraps the loop over layers, `progress=tqdm.tqdm` for one.

    Raises:
        ValueError: a layer or position out of range, k outside `[1, d_model]`, or a reference layer or k without the
            closed form.

    Cost: two Jacobian–vector products a layer; with the closed form instead a Jacobian and its singular values a
    layer, of which one is kept at a time.

    Example:
        >>> result = linearisation(trace)
        >>> result.relative_error("one_step").shape
        torch.Size([2])
        >>> bool(result.relative_error("one_step")[0] == result.relative_error("product")[0])
        True
    """
    t = trace.position_index(position)
    if not closed_form and (reference_layer is not None or k is not None):
        raise ValueError("`reference_layer` and `k` belong to the closed form: leave them out or set closed_form=True")
    reference = trace.layer_index(trace.n_layers // 2 if reference_layer is None else reference_layer)
    k = trace.d_model if k is None else k
    check_k(k, trace.d_model)

    x = trace.residual[:, t].double()
    one_step, product = torch.empty_like(x[1:]), torch.empty_like(x)
    product[0] = x[0]
    gains, basis = x.new_empty(trace.n_layers, k), x.new_empty(trace.d_model, k)
    layers: Iterable[int] = range(trace.n_layers)
    for layer in progress(layers) if progress else layers:
        if closed_form:
            J = block_jacobian(trace, layer, position=t)
            gains[layer] = singular_values(J)[:k]
            if layer == reference:
                basis[:] = svd(J, k).U
            images = J.double() @ x[layer], J.double() @ product[layer]
        else:
            images = _image(trace, layer, t, x[layer]), _image(trace, layer, t, product[layer])
        one_step[layer] = x[layer] + images[0]
        product[layer + 1] = product[layer] + images[1]
    return Linearisation(
        trajectory=x,
        one_step=one_step,
        product=product[1:],
        closed_form=_closed_form(x[0], gains, basis) if closed_form else None,
        reference_layer=reference if closed_form else None,
        k=k if closed_form else None,
        position=t,
        provenance=trace.provenance | {"position": t},
    )


def _image(trace: Trace, layer: int, position: int, vector: Tensor) -> Tensor:
    """`J v` in float64; of v's direction, since a compounded v may lie beyond float32's range."""
    size = vector.norm()
    if size == 0:
        return torch.zeros_like(vector)
    return size * block_jvp(trace, layer, vector / size, position=position).double()


def _closed_form(
    x: Float[Tensor, " d_model"], gains: Float[Tensor, "n_layers k"], basis: Float[Tensor, "d_model k"]
) -> Float[Tensor, "n_layers d_model"]:
    compounded = (1 + gains).cumprod(0)
    return x + ((compounded - 1) * (x @ basis)) @ basis.mT
