"""The path of a token through the residual stream: shape, logit lens, principal
components. Pure tensors.

A trajectory is `x^0, …, x^L` (Aubry et al. 2025, sections 3.2 and 3.3). The first axis
of `x` is depth: 0 is what enters the first block, `l` what leaves block `l − 1`; the
last axis is `d_model`; axes between (positions, prompts) are a batch whose tokens are
measured one by one. *Step* `l`, from `x[l]` to `x[l + 1]`, is what block `l` adds.

Everything is computed in float64, since norms and their logarithms are subtracted from
each other, and returned in x's dtype, or float32 if that is narrower. numpy arrays are
taken as well. Every function raises TypeError or ValueError unless x is floating-point
and finite, has a width of at least one, and at least two depths (`norms`, entropy and
components: one). What compares steps says nothing of a single one, and warns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, warn_caller

Trajectories = Float[Tensor, "n_layers_plus_1 *batch d_model"]


def _odd(window: int) -> None:
    if window < 1 or window % 2 == 0:
        raise ValueError(f"must be an odd number of steps, got {window}")


Window = Annotated[int, _odd]


@checked
def norms(x: Trajectories) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    """Euclidean norm `‖x^l‖₂` of each token at every depth, in units of x.

    Example:
        >>> tlc.trajectories.norms(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        tensor([ 5., 10.])
    """
    return _narrowed(_finite(x, at_least=1).norm(dim=-1), x)


@checked
def attention_sinks(x: Float[Tensor, "n_layers_plus_1 n_pos d_model"]) -> list[int]:
    """Positions of tokens whose norm at some depth exceeds ten times that of the median
    token (median of the maxima).

    Example:
        >>> tlc.trajectories.attention_sinks(torch.tensor([[[1.0], [1.0], [1.0]], [[500.0], [2.0], [3.0]]]))
        [0]
    """
    largest = norms(x).amax(0)
    return (largest > 10 * largest.median()).nonzero().flatten().tolist()


@checked
def step_lengths(x: Trajectories) -> Float[Tensor, "n_layers_plus_1-1 *batch"]:
    r"""Length of every step along the depth, in units of x; entry `l` is the step that
    block `l` makes.

    .. math:: \|x^{l+1} - x^l\|_2

    Example:
        >>> tlc.step_lengths(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]))
        tensor([5., 1.])
    """
    return _narrowed(_finite(x).diff(dim=0).norm(dim=-1), x)


@checked
def line_shape_score(
    x: Trajectories, window: Window | None = None
) -> Float[Tensor, "*batch"] | Float[Tensor, "n_windows *batch"]:
    r"""Line-shape score: how straight a token's path through the depth is.

    .. math:: \mathrm{LSS} = \frac{L}{\big\|\sum_l e^l\big\|_2}, \qquad
        e^l = \frac{x^l - x^{l-1}}{\|x^l - x^{l-1}\|_2}

    Dimensionless and at least 1; 1 for a straight line that never turns back, whatever
    its spacing. (The paper says "co-linear"; a line walked back and forth is co-linear
    too, and scores higher.) Steps in random directions score about √L, a closed loop of
    unit steps inf (or, after rounding, a number beyond 1e12). Invariant under rotation,
    translation and scale. A zero step has no direction: what contains one is NaN, with
    a warning.

    `window`, an odd number of steps up to L, scores every run of that many consecutive
    steps instead of the whole (the paper's figure has 11, which it calls "layers"; we
    count steps): `[n_windows *batch]` with `n_windows = L − window + 1`, where entry
    `i` covers steps `i` to `i + window − 1`, centred on step `i + window // 2`. Cost:
    O(L d) per token, O(L · window · d) with a window; memory for three float64 copies
    of x. Source: Aubry et al. 2025, eq. 15 and 16.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 5.0]])
        >>> tlc.line_shape_score(corner)
        tensor(1.4142)
        >>> tlc.line_shape_score(corner, window=1)
        tensor([1., 1.])
    """
    units = _unit_steps(x)
    n = len(units)
    if window is None:
        _warn_of_one_step(x, "the line-shape score", 1)
        return _score(n, units.sum(0), x)
    if window > n:
        raise ValueError(
            f"`window` must be at most {n} for these trajectories of {n} steps, got {window}"
        )
    return _score(window, units.unfold(0, window, 1).sum(-1), x)


@checked
def line_shape_score_by_depth(
    x: Trajectories,
) -> Float[Tensor, "n_layers_plus_1-1 *batch"]:
    """Line-shape score of the first 1, 2, …, L steps; see `line_shape_score`.

    Entry `l` scores `x[0]` to `x[l + 1]`: the first is 1, the last is
    `line_shape_score(x)`. From a zero step on, all are NaN, with a warning.

    Example:
        >>> tlc.trajectories.line_shape_score_by_depth(torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 5.0]]))
        tensor([1.0000, 1.4142])
    """
    units = _unit_steps(x)
    n_steps = torch.arange(1, len(units) + 1, dtype=units.dtype, device=units.device)
    return _score(n_steps.reshape(-1, *[1] * (x.ndim - 2)), units.cumsum(0), x)


@checked
def expodistance(x: Trajectories) -> Float[Tensor, "*batch"]:
    r"""Expodistance: how far the norm is from growing by the same factor at every
    layer.

    .. math:: \mathrm{ED} = \frac{\operatorname{Var}_l(\alpha^l)}{(\operatorname{Avg}_l \alpha^l)^2}, \qquad
        \alpha^l = \ln \frac{\|x^l\|_2}{\|x^{l-1}\|_2}

    Dimensionless; 0 for exact exponential growth (or decay) of the norm. The variance
    is the population's, over the L steps. Invariant under rotation and scale, not under
    translation.

    The mean growth is `ln(‖x^L‖ / ‖x^0‖) / L`: only the two ends enter it. If the norm
    returns to about where it began, as after a final norm (the paper's last entry is
    normalised: `trace(…, final_norm=True)`), ED is large and ill-conditioned: a
    relative error δ in `‖x^L‖` changes ED by a fraction of about `2 δ / ln(‖x^L‖ /
    ‖x^0‖)`.

    ED is undefined (NaN, with a warning) where a norm is 0, and where it would consist
    of rounding: for `|ln(‖x^L‖ / ‖x^0‖)| ≤ 8 ε`, with ε the machine epsilon of x's
    dtype. Source: Aubry et al. 2025, eq. 17 and 18.

    Example:
        >>> tlc.expodistance(torch.tensor([[1.0], [2.0], [8.0]]))  # rates ln 2 and 2 ln 2: (1/2)² / (3/2)²
        tensor(0.1111)
    """
    lengths = _finite(x).norm(dim=-1)
    _warn_of_one_step(x, "expodistance", 0)
    alpha = lengths.masked_fill(lengths == 0, math.nan).log().diff(dim=0)
    growth = alpha.mean(0)
    # ‖x^L‖ and ‖x^0‖ each carry up to half an ε from the rounding of x alone: a growth
    # of a few ε may be none.
    level = growth.abs() * len(alpha) <= 8 * torch.finfo(x.dtype).eps
    _warn_undefined(
        "expodistance",
        {"with a norm of 0": (lengths == 0).any(0), "whose norm does not grow": level},
    )
    return _narrowed(
        (alpha - growth).square().mean(0)
        / growth.masked_fill(level, math.nan).square(),
        x,
    )


@checked
def equidistance(x: Trajectories) -> Float[Tensor, "*batch"]:
    r"""Equidistance: how unequal the step lengths are, by their coefficient of
    variation over depth.

    .. math:: \frac{\operatorname{Std}_l \|x^l - x^{l-1}\|_2}{\operatorname{Avg}_l \|x^l - x^{l-1}\|_2}

    The standard deviation is the population's, over the L steps. Dimensionless, in [0,
    √(L − 1)]; 0 for equally long steps, whatever their directions. Invariant under
    rotation, translation and scale. Undefined (NaN, with a warning) for a trajectory
    that never moves.

    Example:
        >>> tlc.equidistance(torch.tensor([[0.0], [1.0], [4.0]]))  # steps 1 and 3: 1 / 2
        tensor(0.5000)
    """
    lengths = _finite(x).diff(dim=0).norm(dim=-1)
    _warn_of_one_step(x, "equidistance", 0)
    mean = lengths.mean(0)
    _warn_undefined("equidistance", {"that never move": mean == 0})
    return _narrowed(
        (lengths - mean).square().mean(0).sqrt()
        / mean.masked_fill(mean == 0, math.nan),
        x,
    )


@checked
def logit_lens_entropy(
    x: Trajectories, unembed: Callable[[Tensor], Tensor]
) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    r"""Entropy of the logit lens at every depth, in nats: 0 to `ln d_vocab`.

    .. math:: H^l = -\sum_v p_v \ln p_v, \qquad p = \operatorname{softmax}(\mathrm{unembed}(x^l))

    `unembed`, usually final norm and unembedding, maps `[*batch d_model]` to logits
    `[*batch d_vocab]`. It is called at each depth, with `x[l]` in x's own dtype,
    without gradients. A last entry that is normalised already (`trace(…,
    final_norm=True)`) would be normalised twice; `entropy_by_depth` avoids that. Raises
    ValueError if `unembed` returns another shape, NaN or +inf (−inf, a token ruled out,
    is fine).

    Example:
        >>> tlc.trajectories.logit_lens_entropy(torch.eye(2), lambda stream: 0 * stream)
        tensor([0.6931, 0.6931])
    """
    _finite(x, at_least=1)
    entropies = []
    for depth, stream in enumerate(x):
        with torch.no_grad():
            logits = unembed(stream)
        if logits.ndim != stream.ndim or logits.shape[:-1] != stream.shape[:-1]:
            got = f"{list(logits.shape)} for {list(stream.shape)}"
            raise ValueError(
                f"`unembed` must map [*batch d_model] to [*batch d_vocab], got {got}"
            )
        entropies.append(torch.special.entr(logits.double().softmax(-1)).sum(-1))
        if not entropies[-1].isfinite().all():
            wanted = "logits without NaN or +inf"
            raise ValueError(
                f"`unembed` must return {wanted}, got some at depth {depth}: use a wider dtype?"
            )
    return _narrowed(torch.stack(entropies), x)


@dataclass(frozen=True, eq=False)
class TrajectoryPCA:
    """Trajectories in the principal components of the last depth's embeddings; see
    `trajectory_pca`.

    `explained_variance_ratio` is each component's share of the variance at the last
    depth (not at other depths).

    Example:
        >>> pca = tlc.trajectories.trajectory_pca(trace.residual, n_components=2)
        >>> pca.components.shape, pca.projected.shape
        (torch.Size([2, 32]), torch.Size([3, 8, 2]))
    """

    components: Float[Tensor, "n_components d_model"]
    mean: Float[Tensor, " d_model"]
    projected: Float[Tensor, "n_layers_plus_1 *batch n_components"]
    explained_variance_ratio: Float[Tensor, " n_components"]

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{float(share):.0%}" for share in self.explained_variance_ratio
        )
        return f"TrajectoryPCA({len(self.components)} components with {shares} of the last depth's variance)"


@checked
def trajectory_pca(x: Trajectories, n_components: Count = 2) -> TrajectoryPCA:
    """Principal components of the last depth's embeddings `x^L`, and every depth's
    coordinates in them.

    `projected[l] = (x^l − mean(x^L)) componentsᵀ` in units of x, with the mean over
    tokens (all batch axes), as in the paper's PCA figures. Components are orthonormal,
    of largest variance first, and their entry of largest magnitude is positive. n
    tokens span at most n − 1 directions; a component without variance has an arbitrary
    one, with a warning.

    Raises ValueError for fewer than 2 tokens, tokens that are all the same at the last
    depth, or `n_components` above the number of tokens or `d_model`. Cost: one float64
    SVD of `[n_tokens d_model]`.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [1.0, 0.0]]])
        >>> pca = tlc.trajectories.trajectory_pca(x, n_components=1)
        >>> pca.components, pca.projected[..., 0]
        (tensor([[1., 0.]]), tensor([[-1., -2.],
                [ 1., -1.]]))
    """
    wide = _finite(x, at_least=1)
    last = wide[-1].reshape(-1, wide.shape[-1])
    n, d = last.shape
    if n < 2:
        raise ValueError(
            f"principal components want at least 2 tokens, got {n}: give `x` more positions"
        )
    if n_components > (most := min(n, d)):
        raise ValueError(
            f"`n_components` must lie in [1, {most}] for {n} tokens of width {d}, got {n_components}"
        )
    mean = last.mean(0)
    _, sigma, Vh = torch.linalg.svd(last - mean, full_matrices=False)
    rank = int((sigma > torch.finfo(sigma.dtype).eps * max(n, d) * last.norm()).sum())
    if rank == 0:
        raise ValueError(
            f"principal components want tokens that differ, got {n} equal ones in `x[-1]`"
        )
    if rank < n_components:
        warn_caller(
            f"the {n} tokens of `x[-1]` span {rank} of the {n_components} components: the others are arbitrary"
        )
    components = Vh[:n_components]
    components = (
        components
        * components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    )
    projected = einsum(
        wide - mean, components, "depth ... d, component d -> depth ... component"
    )
    shares = (sigma.square() / sigma.square().sum())[:n_components]
    return TrajectoryPCA(
        *(_narrowed(part, x) for part in (components, mean, projected, shares))
    )


def direction_cosine(
    a: Float[Tensor, "*batch d_model"], b: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch"]:
    """Cosine of the angle between a and b, in [−1, 1]; NaN with a warning where one of
    them is zero or not finite.
    """
    a, b = (
        v / v.abs().amax(-1, keepdim=True) for v in (a.double(), b.double())
    )  # squares of large entries overflow
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    if n := int(cosine.isnan().sum()):
        warn_caller(
            f"{n} of {cosine.numel()} cosine similarities are undefined (NaN): a vector is zero or infinite"
        )
    return cosine.clamp(-1, 1)


def _finite(x: Tensor, at_least: int = 2) -> Tensor:
    """Trajectories in float64; raises unless they are finite and have that many
    depths.
    """
    if len(x) < at_least:
        got = f"with at least {at_least} depths, got shape {list(x.shape)}"
        raise ValueError(
            f"`x` must be [n_layers+1 *batch d_model] {got}: give the whole residual stream, depth first"
        )
    if x.shape[-1] == 0:
        raise ValueError(
            f"`x` must have tokens of at least one entry, got shape {list(x.shape)}"
        )
    broken = ~x.isfinite().flatten(1).all(1)
    if broken.any():
        at = f"at depth {_listed(broken)}"
        raise ValueError(
            f"`x` must be finite, got NaN or infinite entries {at}: measure in a wider dtype?"
        )
    return x.double()


def _narrowed(result: Tensor, x: Tensor) -> Tensor:
    """A float64 result in x's dtype, or float32 if that is narrower."""
    return result.to(torch.promote_types(x.dtype, torch.float32))


def _unit_steps(x: Tensor) -> Tensor:
    steps = _finite(x).diff(dim=0)
    lengths = steps.norm(dim=-1, keepdim=True)
    zero = lengths == 0
    if zero.any():
        still = zero.flatten(1)
        warn_caller(
            f"{int(zero.sum())} steps of {int(still.any(0).sum())} of {still.shape[1]} tokens have length 0, at layer "
            f"{_listed(still.any(1))}: the line-shape score of a path with such a step is undefined (NaN)"
        )
    return steps / lengths.masked_fill(zero, math.nan)


def _score(n_steps: int | Tensor, total: Tensor, x: Tensor) -> Tensor:
    # The triangle inequality says ≥ 1; on a straight line rounding alone may say less.
    return _narrowed((n_steps / total.norm(dim=-1)).clamp_min(1), x)


def _warn_undefined(measure: str, causes: dict[str, Tensor]) -> None:
    counts = ", ".join(
        f"{int(tokens.sum())} {cause}"
        for cause, tokens in causes.items()
        if tokens.any()
    )
    if counts:
        n_tokens = next(iter(causes.values())).numel()
        warn_caller(
            f"{measure} is undefined (NaN) for some of {n_tokens} tokens: {counts}"
        )


def _warn_of_one_step(x: Tensor, measure: str, always: int) -> None:
    if len(x) == 2:
        warn_caller(
            f"these trajectories have one step: {measure} is {always} whatever it is, and says nothing"
        )


def _listed(true: Tensor, most: int = 5) -> str:
    indices = [str(i) for i in true.nonzero().flatten().tolist()]
    return ", ".join(indices[:most]) + (
        f" and {len(indices) - most} more" if len(indices) > most else ""
    )
