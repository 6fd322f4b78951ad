"""One token's trajectory, predicted by linearised blocks and disturbed by noise.

Source: Aubry et al. 2025.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import (
    Connection,
    JacobianOptions,
    block_jvp,
    jacobians_in_turns,
)
from tl_coupling.measures import seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import check_k, singular_values, svd
from tl_coupling.trajectories.shapes import direction_cosine

if TYPE_CHECKING:
    import pandas

Prediction = Literal["one_step", "product", "closed_form", "previous", "input"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)


@made_by("trajectories.linearisation(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Linearisation(Saved):
    """Hold a token's trajectory and three linear predictions of it.

    `linearisation` makes it. Entry `l` of each prediction is that of
    `trajectory[l + 1]`. All are in float64, in units of the residual stream, which
    products outgrow by many orders of magnitude.

    Attributes:
        trajectory: `x^0, …, x^L` of the token at `position`.
        one_step: `(I + J^l) x^{l−1}` (eq. 19, 23): each step starts from the true
            stream.
        product: `(I + J^l) ⋯ (I + J^1) x^0` (eq. 20): only the first step does.
        closed_form: `x^0 + U (Π_{j≤l} (I + S_j) − I) Uᵀ x^0` (eq. 24), what the product
            would be if the blocks were coupled exactly. S_j are the k largest singular
            values of J^j, U the first k left singular vectors of the reference layer.
            With k = d_model this is the paper's `U Π (I + S_j) Uᵀ x^0`. `None` if it
            was left out.
        singular_values: `S_j`, largest first; `None` without the closed form.
        reference_layer: the layer that gave U; `None` without the closed form.
        position: the token.
        provenance: how the trace was made, and the token; JSON-able.

    Example:
        >>> linear = tlc.trajectories.linearisation(trace, k=8)
        >>> linear.k, linear.relative_error("one_step").shape
        (8, torch.Size([2]))
    """

    trajectory: Float[Tensor, "n_layers_plus_1 d_model"]
    one_step: Float[Tensor, "n_layers d_model"]
    product: Float[Tensor, "n_layers d_model"]
    closed_form: Float[Tensor, "n_layers d_model"] | None
    singular_values: Float[Tensor, "n_layers k"] | None
    reference_layer: int | None
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "trajectory": "depth d_model",
        **dict.fromkeys(("one_step", "product", "closed_form"), "layer d_model"),
        "singular_values": "layer i",
    }

    @property
    def k(self) -> int | None:
        """How many singular vectors the closed form has; `None` without it."""
        return None if self.singular_values is None else self.singular_values.shape[1]

    @checked
    def predicted(self, prediction: Prediction) -> Float[Tensor, "n_layers d_model"]:
        """Return a prediction by name.

        Two are baselines without any block: "previous" is `x^{l−1}`, to compare with
        one step, and "input" is `x^0`, to compare with products.

        Raises:
            ValueError: the closed form was left out.
        """
        if prediction == "previous":
            return self.trajectory[:-1]
        if prediction == "input":
            return self.trajectory[:1].expand_as(self.one_step)
        values = getattr(self, prediction)
        if values is None:
            raise ValueError(
                "the closed form was left out: measure with `closed_form=True`"
            )
        return values

    @checked
    def relative_error(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """Return `‖x̂^l − x^l‖ / ‖x^l‖`, which is 1 for a prediction of 0.

        It is NaN, with a warning, where `x^l` is zero.
        """
        truth = self.trajectory[1:]
        length = truth.norm(dim=-1)
        is_zero = length == 0
        if is_zero.any():
            layers = ", ".join(
                str(layer) for layer in is_zero.nonzero().flatten().tolist()
            )
            warn_caller(
                f"relative error is undefined (NaN) where x is 0, after layer {layers}"
            )
        # The first layer is the first prediction: entry l is of depth l + 1.
        error = (self.predicted(prediction) - truth).norm(dim=-1)
        return (error / length).masked_fill(is_zero, torch.nan)

    @checked
    def cosine_similarity(self, prediction: Prediction) -> Float[Tensor, " n_layers"]:
        """Return the cosine of the angle between a prediction and `x^l`.

        It is NaN, with a warning, where either is zero.
        """
        return direction_cosine(self.predicted(prediction), self.trajectory[1:])

    @property
    def predictions(self) -> list[Prediction]:
        """Names of the predictions that were made, and of the baselines."""
        return [
            name
            for name in PREDICTIONS
            if name != "closed_form" or self.closed_form is not None
        ]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each prediction and layer.

        Example:
            >>> linear = tlc.trajectories.linearisation(trace, closed_form=False)
            >>> table = linear.to_dataframe()
            >>> list(table)[:4], len(table)
            (['prediction', 'layer', 'relative_error', 'cosine_similarity'], 8)
        """
        names = self.predictions
        errors = torch.stack([self.relative_error(name) for name in names])
        cosines = torch.stack([self.cosine_similarity(name) for name in names])
        columns = {
            "relative_error": ("prediction layer", errors),
            "cosine_similarity": ("prediction layer", cosines),
        }
        return tidy_table(columns, {"prediction": names}, self.provenance)

    def _summary(self) -> str:
        # The closed form is the one part that may be missing.
        closed_form = "no closed form"
        if self.k is not None:
            closed_form = (
                f"closed form of k={self.k} with U of layer {self.reference_layer}"
            )
        return f"position={self.position}, {len(self.one_step)} layers, {closed_form}"


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
    r"""Predict one token's trajectory by linearised blocks.

    The predictions are step by step, compounded, and as if the blocks were coupled:

    .. math:: \hat x^l = (I + J^l)\, x^{l-1}, \qquad
        \hat x^l = (I + J^l) \cdots (I + J^1)\, x^0

    and the closed form of `Linearisation`. A block is not linear: its first-order
    expansion at `x` is `f(x) + J (y − x)`. The linear model of the paper drops the
    constant `f(x) − J x`, and this function measures how much that matters. J is
    `J^l_{tt}`: other tokens are held fixed.

    Expect little: a block that normalises first hardly depends on the length of its
    token. Where attention and MLP run in parallel (GPT-NeoX, GPT-J), `f(c x) = f(x)`
    except for the norm's ε, so `J x = 0` (Euler's theorem) and the linear model
    predicts no step at all. Where the MLP comes second, `J x = −D a`, with `a` what
    attention adds and D the derivative of the MLP after it. Compare with the baselines
    "previous" and "input".

    Args:
        trace: a traced prompt.
        position: the token; the last by default, as in the paper.
        closed_form: whether to predict by eq. 24 too, which needs every J and its
            singular values.
        reference_layer: whose left singular vectors are the common U. The paper does
            not say (under exact coupling all are the same); the middle layer by
            default, since coupling fades with distance in depth.
        k: how many singular vectors U has, all by default. The rest of the stream is
            left as it is.
        progress: wraps the loop over layers; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises:
        ValueError: a layer, position or k out of range, or a reference layer or k
            without the closed form.

    Cost: per layer a Jacobian and its singular values; without the closed form two
    Jacobian–vector products.

    Source: Aubry et al. 2025, section 6.1.

    Example:
        >>> result = tlc.trajectories.linearisation(trace)
        >>> error = result.relative_error("one_step")
        >>> bool(error[0] == result.relative_error("product")[0])
        True
    """
    t = trace.position_index(position)
    if not closed_form and (reference_layer is not None or k is not None):
        raise ValueError(
            "`reference_layer` and `k` belong to the closed form: "
            "leave them out or set closed_form=True"
        )
    # Checked whether the closed form is asked for or not.
    reference = middle_layer(trace, reference_layer)
    k = trace.d_model if k is None else k
    check_k(k, trace.d_model)
    if not closed_form:
        return _product_linearisation(trace, t, progress)
    return _jacobian_linearisation(trace, t, reference, k, progress)


def middle_layer(trace: Trace, layer: int | None) -> int:
    """Return the layer that gives U: the one given, or the one in the middle."""
    if layer is None:
        return trace.layer_index(trace.n_layers // 2)
    return trace.layer_index(layer)


def _product_linearisation(
    trace: Trace, position: int, progress: Progress | None
) -> Linearisation:
    """Return the linearisation without its closed form, which needs no Jacobian."""
    x = trace.residual[:, position].double()
    one_step = torch.empty_like(x[1:])
    product = x.clone()
    for layer in with_progress(range(trace.n_layers), progress, "linearisation"):
        # J is that of the true stream, whatever it is applied to.
        one_step[layer] = x[layer] + _image(trace, layer, position, x[layer])
        image = _image(trace, layer, position, product[layer])
        product[layer + 1] = product[layer] + image
    return Linearisation(
        trajectory=x,
        one_step=one_step,
        product=product[1:],
        closed_form=None,
        singular_values=None,
        reference_layer=None,
        position=position,
        provenance=trace.provenance | {"position": position},
    )


def _image(trace: Trace, layer: int, position: int, vector: Tensor) -> Tensor:
    """Return `J v` in float64.

    The direction of v goes through the block, not v: after many layers a product may
    lie beyond the range of float32.
    """
    # A vector of zeros has no direction, and its image is zeros.
    length = vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
    image = block_jvp(trace, layer, vector / length, position=position)
    return length * image.double()


def _jacobian_linearisation(
    trace: Trace, position: int, reference: int, k: int, progress: Progress | None
) -> Linearisation:
    """Return the whole linearisation, with U of a reference layer."""
    x = trace.residual[:, position].double()
    one_step = torch.empty_like(x[1:])
    product = x.clone()
    S = x.new_empty(trace.n_layers, k)
    U = x.new_empty(trace.d_model, k)
    connections = [
        Connection(layer, position, position, position)
        for layer in range(trace.n_layers)
    ]
    # The Jacobians are those of the whole block with its norms: what it adds to the
    # stream is predicted.
    options = JacobianOptions(progress=progress)
    jacobians = jacobians_in_turns([(trace, connections)], options, "block")
    for connection, J, _ in jacobians:
        layer = connection.layer
        S[layer] = singular_values(J[None])[0, :k]
        if layer == reference:
            U[:] = svd(J, k).U
        one_step[layer] = x[layer] + J.double() @ x[layer]
        product[layer + 1] = product[layer] + J.double() @ product[layer]
        # Not kept while the next is computed.
        del J
    # Π_{j≤l} (I + S_j) − I, for each l and each singular vector: [n_layers k]
    # The 1 is taken off, as it is x⁰ itself, with what U does not span.
    growth = (1 + S).cumprod(0) - 1
    return Linearisation(
        trajectory=x,
        one_step=one_step,
        product=product[1:],
        closed_form=x[0] + (growth * (x[0] @ U)) @ U.mT,
        singular_values=S,
        reference_layer=reference,
        position=position,
        provenance=trace.provenance | {"position": position},
    )


@made_by("trajectories.perturbation(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Perturbation(Saved):
    """Hold how similar a token's clean and noisy trajectories are, at depths 0 to L.

    `perturbation` makes it.

    Attributes:
        cosine_similarity: `cos(x^l, x̃^l)` of the clean and the noisy trajectory.
        scales: lengths of the noise divided by that of the clean embedding; if not
            `relative`, the standard deviation of its entries.
        position: the token.
        seed: of the noise.
        provenance: how the trace was made, and the token; JSON-able.
        relative: whether the noise is relative to the length of the embedding.

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
    DIMS: ClassVar = {"cosine_similarity": "scale sample depth", "scales": "scale"}

    @property
    def mean(self) -> Float[Tensor, "n_scales n_layers_plus_1"]:
        """Mean similarity over the samples."""
        return self.cosine_similarity.mean(1)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each scale, sample of the noise and depth.

        Example:
            >>> noisy = tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2)
            >>> table = noisy.to_dataframe()
            >>> list(table)[:4], len(table)
            (['scale', 'sample', 'depth', 'cosine_similarity'], 12)
        """
        columns = {"cosine_similarity": ("scale sample depth", self.cosine_similarity)}
        return tidy_table(columns, {"scale": self.scales}, self.provenance)

    def _summary(self) -> str:
        n_scales, n_samples, n_depths = self.cosine_similarity.shape
        first, *_, last = self.mean.mean(0).tolist()
        scales = "scales" if self.relative else "absolute scales"
        return (
            f"position={self.position}, "
            f"{n_scales} {scales} × {n_samples} samples × {n_depths} depths, "
            f"mean cosine {first:.3f} before the first layer, {last:.3f} after the last"
        )


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
    """Add noise to one token's embedding and follow its direction through the blocks.

    The noise is Gaussian. The noisy embedding is `x^0_t + scale · ‖x^0_t‖ / √d_model ·
    ε` with standard normal `ε`: noise of scale 1 is about as long as the embedding, so
    that models can be compared. With `relative=False` it is `x^0_t + scale · ε`, the
    paper's levels: the same noise is then more to a model with a shorter embedding.
    Before the first layer the expected similarity is close to `1 / √(1 + r²)`, with r
    the length of the noise over that of the embedding; deeper it says whether the
    blocks damp the noise or amplify it. The samples of ε, float64 from a CPU generator
    with the seed, are the same for every scale.

    With `final_norm=True` the trace's last depth is compared after the final norm.

    Args:
        trace: a traced prompt.
        scales: how large the noise is.
        position: the token; the last by default.
        relative: whether the noise is relative to the length of the embedding.
        n_samples: how many times noise is drawn.
        seed: of the noise.
        progress: wraps the loop over scales and samples; `None`: a bar in a terminal or
            notebook, `False`: none.

    Raises:
        ValueError: no scales, a negative or infinite one, a position out of range, or
            an embedding that is zero, to which no noise is relative.

    Cost: `n_scales · n_samples` forward passes of the prompt.

    Example:
        >>> noisy = tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2)
        >>> noisy.cosine_similarity.shape
        torch.Size([2, 2, 3])
    """
    t = trace.position_index(position)
    # 0 is a scale: the clean trajectory beside itself.
    are_sizes = all(math.isfinite(scale) and scale >= 0 for scale in scales)
    if not len(scales) or not are_sizes:
        raise ValueError(
            "`scales` must be finite numbers of at least 0, one or more, "
            f"got {list(scales)}"
        )
    clean = trace.residual[:, t]
    noise = _noise(clean, n_samples, seed)
    if relative:
        length = clean[0].norm()
        if length == 0:
            raise ValueError(
                f"the embedding of token {t} is zero, and noise is relative to it: "
                "choose another token, or relative=False"
            )
        # ε is about √d_model long.
        noise = length / math.sqrt(trace.d_model) * noise
    cosines = clean.new_empty(len(scales), n_samples, len(clean))
    runs = range(len(scales) * n_samples)
    for run in with_progress(runs, progress, "perturbation"):
        level, sample = divmod(run, n_samples)
        noisy = _noisy_trajectory(trace, t, scales[level] * noise[sample])
        cosines[level, sample] = direction_cosine(clean, noisy)
    return Perturbation(
        cosine_similarity=cosines,
        scales=tuple(float(scale) for scale in scales),
        position=t,
        seed=seed,
        provenance=trace.provenance | {"position": t},
        relative=relative,
    )


def _noise(
    clean: Float[Tensor, "n_layers_plus_1 d_model"], n_samples: int, seed: int
) -> Float[Tensor, "n_samples d_model"]:
    """Return standard normal noise, the same on every device and in every dtype."""
    generator = seeded(seed)
    size = (n_samples, clean.shape[1])
    # Drawn in float64 on the CPU, and only then moved to the model's device and dtype.
    noise = torch.randn(size, dtype=torch.float64, generator=generator)
    return noise.to(clean)


def _noisy_trajectory(
    trace: Trace, position: int, noise: Float[Tensor, " d_model"]
) -> Float[Tensor, "n_layers_plus_1 d_model"]:
    """Return a token's path through the blocks, with noise added to its embedding."""
    X = trace.residual[0].clone()
    X[position] += noise
    noisy = [X[position]]
    for block in trace.blocks:
        # All tokens run on: later ones hear of the noise by attention.
        X = X + block(X)
        noisy.append(X[position])
    return torch.stack(noisy)
