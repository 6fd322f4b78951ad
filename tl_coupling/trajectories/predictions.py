"""One token's trajectory as the linearised blocks predict it, and with noise in its
embedding (Aubry et al. 2025).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.jacobians import block_jacobian, block_jvp
from tl_coupling.progress import Progress, with_progress
from tl_coupling.spectra import check_k, singular_values, svd
from tl_coupling.traces import Trace
from tl_coupling.trajectories.shapes import direction_cosine

Prediction = Literal["one_step", "product", "closed_form", "previous", "input"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)


@made_by("trajectories.linearisation(trace)")
@dataclass(frozen=True, eq=False)
class Linearisation:
    """A token's trajectory and three linear predictions of it; entry `l` of each
    predicts `trajectory[l + 1]`.

    Attributes:
        trajectory: `x^0, …, x^L` of the token at `position`.
        one_step: `(I + J^l) x^{l−1}` (eq. 19, 23): each step starts from the true
            stream.
        product: `(I + J^l) ⋯ (I + J^1) x^0` (eq. 20): only the first step does.
        closed_form: `x^0 + U (Π_{j≤l} (I + S_j) − I) Uᵀ x^0` (eq. 24), what the product
            would be if the blocks were coupled exactly. S_j are the k largest singular
            values of J^j, U the first k left singular vectors of the reference layer.
            With k = d_model this is the paper's `U Π (I + S_j) Uᵀ x^0`.
        singular_values: `S_j`, largest first. Like `reference_layer`, `None` without
            the closed form.

    In float64, in units of the residual stream, which products outgrow by many orders
    of magnitude.

    Example:
        >>> linear = tlc.trajectories.linearisation(trace, k=8)
        >>> linear.k, linear.relative_error("one_step").shape, linear.cosine_similarity("previous").shape
        (8, torch.Size([2]), torch.Size([2]))
    """

    trajectory: Float[Tensor, "n_layers_plus_1 d_model"]
    one_step: Float[Tensor, "n_layers d_model"]
    product: Float[Tensor, "n_layers d_model"]
    closed_form: Float[Tensor, "n_layers d_model"] | None
    singular_values: Float[Tensor, "n_layers k"] | None
    reference_layer: int | None
    position: int
    provenance: dict[str, Any]

    @property
    def k(self) -> int | None:
        """How many singular vectors the closed form has; `None` without it."""
        return None if self.singular_values is None else self.singular_values.shape[1]

    @checked
    def predicted(self, prediction: Prediction) -> Float[Tensor, "n_layers d_model"]:
        """A prediction by name; of the two baselines, "previous" (for one step) is
        `x^{l−1}`, and "input" is `x^0`.
        """
        baselines = {
            "previous": self.trajectory[:-1],
            "input": self.trajectory[:1].expand_as(self.one_step),
        }
        values = baselines.get(prediction, getattr(self, prediction, None))
        if values is None:
            raise ValueError(
                "the closed form was left out: measure with `closed_form=True`"
            )
        return values

    @checked
    def relative_error(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """`‖x̂^l − x^l‖ / ‖x^l‖`, 1 for a prediction of 0; NaN with a warning where
        `x^l` is zero.
        """
        truth = self.trajectory[1:]
        size = truth.norm(dim=-1)
        if (size == 0).any():
            layers = ", ".join(map(str, (size == 0).nonzero().flatten().tolist()))
            warn_caller(
                f"relative error is undefined (NaN) where x is 0, after layer {layers}"
            )
        return ((self.predicted(prediction) - truth).norm(dim=-1) / size).masked_fill(
            size == 0, torch.nan
        )

    @checked
    def cosine_similarity(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """Cosine of the angle between a prediction and `x^l`; NaN with a warning where
        either is zero.
        """
        return direction_cosine(self.predicted(prediction), self.trajectory[1:])

    def __repr__(self) -> str:
        closed = (
            f"closed form of k={self.k} with U of layer {self.reference_layer}"
            if self.k
            else "no closed form"
        )
        what = f"position={self.position}, {len(self.one_step)} layers"
        return (
            f"Linearisation(model={self.provenance.get('model')!r}, {what}, {closed})"
        )


@checked
def linearisation(
    trace: Trace,
    position: int = -1,
    *,
    closed_form: bool = True,
    reference_layer: int | None = None,
    k: int | None = None,
    progress: Progress | None = None,
) -> Linearisation:
    r"""Predict one token's trajectory by its linearised blocks: step by step,
    compounded, and fully coupled.

    .. math:: \hat x^l = (I + J^l)\, x^{l-1}, \qquad \hat x^l = (I + J^l) \cdots (I + J^1)\, x^0

    and the closed form of `Linearisation`. Source: Aubry et al. 2025, section 6.1. A
    block is not linear: its first-order expansion at `x` is `f(x) + J (y − x)`. The
    linear model of the paper drops the constant `f(x) − J x`; this measures how much
    that matters. J is `J^l_{tt}`: other tokens are held fixed.

    Expect little: a block that normalises first hardly depends on the length of its
    token. Where attention and MLP run in parallel (GPT-NeoX, GPT-J), `f(c x) = f(x)`
    except for the norm's ε, so `J x = 0` (Euler's theorem) and the linear model
    predicts no step at all. Where the MLP comes second, `J x = −D a`, with `a` what
    attention adds and D the derivative of the MLP after it. Compare with the baselines
    "previous" and "input".

    Args:
        position: the token; the last by default, as in the paper.
        closed_form: also predict by eq. 24, which needs every J and its singular
            values.
        reference_layer: whose left singular vectors are the common U. The paper does
            not say (under exact coupling all are the same); the middle layer by
            default, since coupling fades with distance in depth.
        k: how many singular vectors U has, all by default. The rest of the stream is
            left as it is.
        progress: wraps the loop over layers; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises ValueError for a layer, position or k out of range, or a reference layer or k
    without the closed form. Cost: per layer a Jacobian and its singular values; without
    the closed form two Jacobian–vector products.

    Example:
        >>> result = tlc.trajectories.linearisation(trace)
        >>> bool(result.relative_error("one_step")[0] == result.relative_error("product")[0])
        True
    """
    t = trace.position_index(position)
    if not closed_form and (reference_layer is not None or k is not None):
        raise ValueError(
            "`reference_layer` and `k` belong to the closed form: leave them out or set closed_form=True"
        )
    reference = trace.layer_index(
        trace.n_layers // 2 if reference_layer is None else reference_layer
    )
    k = trace.d_model if k is None else k
    check_k(k, trace.d_model)
    x = trace.residual[:, t].double()
    one_step, product = torch.empty_like(x[1:]), x.clone()
    S, U = x.new_empty(trace.n_layers, k), x.new_empty(trace.d_model, k)
    for layer in with_progress(range(trace.n_layers), progress, "linearisation"):
        if closed_form:
            J = block_jacobian(trace, layer, position=t)
            S[layer] = singular_values(J)[:k]
            if layer == reference:
                U[:] = svd(J, k).U
            images = J.double() @ x[layer], J.double() @ product[layer]
        else:
            images = (
                _image(trace, layer, t, x[layer]),
                _image(trace, layer, t, product[layer]),
            )
        one_step[layer] = x[layer] + images[0]
        product[layer + 1] = product[layer] + images[1]
    provenance = trace.provenance | {"position": t}
    if not closed_form:
        return Linearisation(x, one_step, product[1:], None, None, None, t, provenance)
    coupled = x[0] + (((1 + S).cumprod(0) - 1) * (x[0] @ U)) @ U.mT
    return Linearisation(x, one_step, product[1:], coupled, S, reference, t, provenance)


def _image(trace: Trace, layer: int, position: int, vector: Tensor) -> Tensor:
    """`J v` in float64; of v's direction, since a compounded v may lie beyond float32's
    range.
    """
    size = vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
    return size * block_jvp(trace, layer, vector / size, position=position).double()


@made_by("trajectories.perturbation(trace)")
@dataclass(frozen=True, eq=False)
class Perturbation:
    """`cosine_similarity`, `cos(x^l, x̃^l)` of a token's clean and noisy trajectory, at
    depths 0 to L.

    `scales` are lengths of the noise divided by that of the clean embedding, or if not
    `relative` the standard deviation of its entries; `position` is the token.

    Example:
        >>> noisy = tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2)
        >>> noisy.mean.shape, noisy.scales
        (torch.Size([2, 3]), (0.1, 1.0))
    """

    cosine_similarity: Float[Tensor, "n_scales n_samples n_layers_plus_1"]
    scales: tuple[float, ...]
    position: int
    seed: int
    provenance: dict[str, Any]
    relative: bool = True

    @property
    def mean(self) -> Float[Tensor, "n_scales n_layers_plus_1"]:
        """Mean similarity over the samples."""
        return self.cosine_similarity.mean(1)

    def __repr__(self) -> str:
        n_scales, n_samples, n_depths = self.cosine_similarity.shape
        first, *_, last = self.mean.mean(0).tolist()
        sizes = f"{n_scales} {'' if self.relative else 'absolute '}scales × {n_samples} samples × {n_depths} depths"
        cosines = (
            f"mean cosine {first:.3f} before the first layer, {last:.3f} after the last"
        )
        return f"Perturbation(model={self.provenance.get('model')!r}, position={self.position}, {sizes}, {cosines})"


@checked
def perturbation(
    trace: Trace,
    scales: Sequence[int | float] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    *,
    position: int = -1,
    relative: bool = True,
    n_samples: Count = 8,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Perturbation:
    """Add Gaussian noise to one token's embedding and follow how its direction changes
    through the blocks.

    The noisy embedding is `x^0_t + scale · ‖x^0_t‖ / √d_model · ε` with standard normal
    `ε`: noise of scale 1 is about as long as the embedding, so that models can be
    compared. With `relative=False` it is `x^0_t + scale · ε`, the paper's levels: the
    same noise is then more to a model with a shorter embedding. Before the first layer
    the expected similarity is close to `1 / √(1 + r²)`, with r the length of the noise
    over that of the embedding; deeper it says whether the blocks damp the noise or
    amplify it. The samples of ε, float64 from a CPU generator with the seed, are the
    same for every scale.

    With `final_norm=True` the trace's last depth is compared after the final norm.
    Raises ValueError for no scales, a negative or infinite one, a position out of
    range, or an embedding that is zero and has no relative noise. Cost: `n_scales ·
    n_samples` forward passes of the prompt.

    Example:
        >>> tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2).cosine_similarity.shape
        torch.Size([2, 2, 3])
    """
    t = trace.position_index(position)
    if not len(scales) or not all(
        math.isfinite(scale) and scale >= 0 for scale in scales
    ):
        raise ValueError(
            f"`scales` must be finite numbers of at least 0, one or more, got {list(scales)}"
        )
    clean = trace.residual[:, t]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(
        n_samples, trace.d_model, dtype=torch.float64, generator=generator
    ).to(clean)
    if relative:
        if (size := clean[0].norm()) == 0:
            wanted = "choose another token, or relative=False"
            raise ValueError(
                f"the embedding of token {t} is zero, and noise is relative to it: {wanted}"
            )
        noise = size / math.sqrt(trace.d_model) * noise
    cosines = clean.new_empty(len(scales), n_samples, len(clean))
    for run in with_progress(range(len(scales) * n_samples), progress, "perturbation"):
        X = trace.residual[0].clone()
        level, sample = divmod(run, n_samples)
        X[t] += scales[level] * noise[sample]
        noisy = [X[t]]
        for block in trace.blocks:
            X = X + block(X)
            noisy.append(X[t])
        cosines[level, sample] = direction_cosine(clean, torch.stack(noisy))
    return Perturbation(
        cosines,
        tuple(map(float, scales)),
        t,
        seed,
        trace.provenance | {"position": t},
        relative,
    )
