"""Shapes of trajectories, the logit lens and principal components, of tensors alone.

A trajectory is the path of a token through the residual stream, `x^0, …, x^L` (Aubry et
al. 2025, sections 3.2 and 3.3). The first axis of `x` is depth: 0 is what enters the
first block, `l` what leaves block `l − 1`. The last axis is `d_model`. Axes between
them (positions, prompts) are a batch, whose tokens are measured one by one. *Step* `l`,
from `x[l]` to `x[l + 1]`, is what block `l` adds.

Everything is computed in float64, since norms and their logarithms are subtracted from
each other, and returned in x's dtype, or in float32 if that dtype is narrower. Numpy
arrays are accepted too. Every function raises TypeError or ValueError unless x is
floating-point and finite, has a width of at least one, and has at least two depths (one
for `norms`, the entropy and the components). Measures that compare steps say nothing
about a single step, and warn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, warn_caller

# In float64, e to this is 0.
_LEAST_LOGIT = -1e4
_LOGITS_AT_ONCE = 2**18
Trajectories = Float[Tensor, "n_layers_plus_1 *batch d_model"]


def _odd(window: int) -> None:
    if window < 1 or window % 2 == 0:
        raise ValueError(f"must be an odd number of steps, got {window}")


Window = Annotated[int, _odd]


@checked
def norms(x: Trajectories) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    """Return the Euclidean norm `‖x^l‖₂` of each token at every depth, in units of x.

    Example:
        >>> tlc.trajectories.norms(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        tensor([ 5., 10.])
    """
    return _narrowed(_finite(x, fewest_depths=1).norm(dim=-1), x)


@checked
def attention_sinks(x: Float[Tensor, "n_layers_plus_1 n_pos d_model"]) -> list[int]:
    """Return the positions of tokens whose norms are far above those of the others.

    A token counts with its largest norm over depth: that of a sink exceeds ten times
    the median over tokens.

    Example:
        >>> x = torch.tensor([[[1.0], [1.0], [1.0]], [[500.0], [2.0], [3.0]]])
        >>> tlc.trajectories.attention_sinks(x)
        [0]
    """
    largest_norms = norms(x).amax(0)
    is_sink = largest_norms > 10 * largest_norms.median()
    return is_sink.nonzero().flatten().tolist()


@checked
def step_lengths(x: Trajectories) -> Float[Tensor, "n_layers_plus_1-1 *batch"]:
    r"""Return the length of every step along the depth, in units of x.

    .. math:: \|x^{l+1} - x^l\|_2

    Entry `l` is the step that block `l` makes.

    Example:
        >>> tlc.step_lengths(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]))
        tensor([5., 1.])
    """
    return _narrowed(_finite(x).diff(dim=0).norm(dim=-1), x)


@checked
def line_shape_score(
    x: Trajectories, window: Window | None = None
) -> Float[Tensor, "*batch"] | Float[Tensor, "n_windows *batch"]:
    r"""Return the line-shape score: how straight a token's path through depth is.

    .. math:: \mathrm{LSS} = \frac{L}{\big\|\sum_l e^l\big\|_2}, \qquad
        e^l = \frac{x^l - x^{l-1}}{\|x^l - x^{l-1}\|_2}

    Dimensionless and at least 1; 1 for a straight line that never turns back, whatever
    its spacing. (The paper says "co-linear"; a line walked back and forth is co-linear
    too, and scores higher.) Steps in random directions score about √L. A closed loop of
    unit steps scores inf or, after rounding, a number beyond 1e12. The score is
    invariant under rotation, translation and scale. A zero step has no direction, so
    the score of a path that contains one is NaN, with a warning.

    Args:
        x: the trajectories.
        window: an odd number of steps, at most L. Every run of that many consecutive
            steps is scored, instead of the whole path. (The paper's figure has 11,
            which it calls "layers"; we count steps.)

    Returns:
        `[*batch]`; with a window `[n_windows *batch]`, where `n_windows` is
        `L − window + 1`. Entry `i` covers steps `i` to `i + window − 1` and is centred
        on step `i + window // 2`.

    Cost: O(L d) per token, O(L · window · d) with a window; memory for three float64
    copies of x.

    Source: Aubry et al. 2025, eq. 15 and 16.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 5.0]])
        >>> tlc.line_shape_score(corner)
        tensor(1.4142)
        >>> tlc.line_shape_score(corner, window=1)
        tensor([1., 1.])
    """
    unit_steps = _unit_steps(x)
    n_steps = len(unit_steps)
    if window is None:
        _warn_of_one_step(x, "the line-shape score", 1)
        return _score(n_steps, unit_steps.sum(0), x)
    if window > n_steps:
        raise ValueError(
            f"`window` must be at most {n_steps} for these trajectories "
            f"of {n_steps} steps, got {window}"
        )
    # [n_windows *batch d_model window]
    windows = unit_steps.unfold(0, window, 1)
    return _score(window, windows.sum(-1), x)


@checked
def line_shape_score_by_depth(
    x: Trajectories,
) -> Float[Tensor, "n_layers_plus_1-1 *batch"]:
    """Return the line-shape score of the first 1, 2, …, L steps.

    Entry `l` scores `x[0]` to `x[l + 1]`, as `line_shape_score` does: the first entry
    is 1, the last is `line_shape_score(x)`. From a zero step on, all entries are NaN,
    with a warning.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 5.0]])
        >>> tlc.trajectories.line_shape_score_by_depth(corner)
        tensor([1.0000, 1.4142])
    """
    unit_steps = _unit_steps(x)
    # `[n_steps 1 …]`: the score of the first n steps has n in its numerator.
    n_steps = torch.arange(1, len(unit_steps) + 1).to(unit_steps)
    batch_axes = [1] * (x.ndim - 2)
    return _score(n_steps.reshape(-1, *batch_axes), unit_steps.cumsum(0), x)


@checked
def expodistance(x: Trajectories) -> Float[Tensor, "*batch"]:
    r"""Return the expodistance: how far the norm is from growing exponentially.

    .. math::
        \mathrm{ED} = \frac{\operatorname{Var}_l(\alpha^l)}{(\operatorname{Avg}_l \alpha^l)^2},
        \qquad \alpha^l = \ln \frac{\|x^l\|_2}{\|x^{l-1}\|_2}

    Dimensionless; 0 where the norm grows (or shrinks) by the same factor at every
    layer. The variance is the population's, over the L steps. ED is invariant under
    rotation and scale, but not under translation.

    The mean growth is `ln(‖x^L‖ / ‖x^0‖) / L`: only the two ends enter it. If the norm
    returns to about where it began, as it does after a final norm (the paper's last
    entry is normalised: `trace(…, final_norm=True)`), ED is large and ill-conditioned:
    a relative error δ in `‖x^L‖` changes ED by a fraction of about `2 δ / ln(‖x^L‖ /
    ‖x^0‖)`.

    ED is undefined (NaN, with a warning) where a norm is 0, and where it would consist
    of rounding: for `|ln(‖x^L‖ / ‖x^0‖)| ≤ 8 ε`, with ε the machine epsilon of x's
    dtype.

    Source: Aubry et al. 2025, eq. 17 and 18.

    Example:
        >>> # Growth rates ln 2 and 2 ln 2: (1/2)² / (3/2)².
        >>> tlc.expodistance(torch.tensor([[1.0], [2.0], [8.0]]))
        tensor(0.1111)
    """
    lengths = _finite(x).norm(dim=-1)
    _warn_of_one_step(x, "expodistance", 0)
    is_zero = lengths == 0
    # NaN in place of −∞: the whole path is then undefined.
    growth_rates = lengths.masked_fill(is_zero, math.nan).log().diff(dim=0)
    mean_rate = growth_rates.mean(0)
    # ‖x^L‖ and ‖x^0‖ each carry up to half an ε from the rounding of x alone: a growth
    # of a few ε may be none.
    # The mean rate times L is `ln(‖x^L‖ / ‖x^0‖)`.
    is_level = mean_rate.abs() * len(growth_rates) <= 8 * torch.finfo(x.dtype).eps
    _warn_undefined(
        "expodistance",
        {"with a norm of 0": is_zero.any(0), "whose norm does not grow": is_level},
    )
    variance = (growth_rates - mean_rate).square().mean(0)
    return _narrowed(variance / mean_rate.masked_fill(is_level, math.nan).square(), x)


@checked
def equidistance(x: Trajectories) -> Float[Tensor, "*batch"]:
    r"""Return the equidistance: how unequal a token's steps are in length.

    .. math::
        \frac{\operatorname{Std}_l \|x^l - x^{l-1}\|_2}
            {\operatorname{Avg}_l \|x^l - x^{l-1}\|_2}

    This is the coefficient of variation of the step lengths; the standard deviation is
    the population's, over the L steps. Dimensionless, in [0, √(L − 1)]; 0 for equally
    long steps, whatever their directions. Equidistance is invariant under rotation,
    translation and scale. It is undefined (NaN, with a warning) for a trajectory that
    never moves.

    Example:
        >>> tlc.equidistance(torch.tensor([[0.0], [1.0], [4.0]]))  # steps 1 and 3: 1 / 2
        tensor(0.5000)
    """
    # Steps, not positions, are compared.
    lengths = _finite(x).diff(dim=0).norm(dim=-1)
    _warn_of_one_step(x, "equidistance", 0)
    mean_length = lengths.mean(0)
    never_moves = mean_length == 0
    _warn_undefined("equidistance", {"that never move": never_moves})
    standard_deviation = (lengths - mean_length).square().mean(0).sqrt()
    return _narrowed(
        standard_deviation / mean_length.masked_fill(never_moves, math.nan), x
    )


@checked
def logit_lens_entropy(
    x: Trajectories, unembed: Callable[[Tensor], Tensor]
) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    r"""Return the entropy of the logit lens at every depth, in nats: 0 to `ln d_vocab`.

    .. math::
        H^l = -\sum_v p_v \ln p_v,
        \qquad p = \operatorname{softmax}(\mathrm{unembed}(x^l))

    Args:
        x: the trajectories. If the last entry is normalised already (`trace(…,
            final_norm=True)`), an `unembed` with a final norm normalises it twice;
            `entropy_by_depth` avoids that.
        unembed: maps `[*batch d_model]` to logits `[*batch d_vocab]`; usually the final
            norm and the unembedding. It is called once for each depth, with `x[l]` in
            x's own dtype, without gradients.

    Raises:
        ValueError: `unembed` returns another shape, NaN or +inf. (−inf is fine: a token
            that is ruled out.)

    Example:
        >>> tlc.trajectories.logit_lens_entropy(torch.eye(2), lambda stream: 0 * stream)
        tensor([0.6931, 0.6931])
    """
    _finite(x, fewest_depths=1)
    entropies = []
    # Depth by depth: logits of all at once may not fit into memory.
    for stream in x:
        with torch.no_grad():
            logits = unembed(stream)
        if logits.ndim != stream.ndim or logits.shape[:-1] != stream.shape[:-1]:
            raise ValueError(
                "`unembed` must map [*batch d_model] to [*batch d_vocab], "
                f"got {list(logits.shape)} for {list(stream.shape)}"
            )
        entropies.append(entropy_of(logits))
    return entropies_by_depth(torch.stack(entropies), x)


def entropy_of(logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch"]:
    """Return the entropy of each row of logits in nats, in float64."""
    # A few rows at a time stay in the processor's cache.
    n_rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    rows = logits.reshape(-1, logits.shape[-1])
    entropies = [_entropy_of_rows(some) for some in rows.split(n_rows)]
    return torch.cat(entropies).reshape(logits.shape[:-1])


def _entropy_of_rows(
    logits: Float[Tensor, "n_rows d_vocab"],
) -> Float[Tensor, " n_rows"]:
    """Return `ln Σ e^z − Σ z e^z / Σ e^z`, of logits z less the largest."""
    z = logits.double()
    z -= z.amax(-1, keepdim=True)
    # The logit of a token that is ruled out is −inf, and the product would be NaN.
    z.clamp_min_(_LEAST_LOGIT)
    weights = z.exp()
    total = weights.sum(-1)
    return total.log() - (weights * z).sum(-1) / total


def entropies_by_depth(
    entropies: Float[Tensor, "n_layers_plus_1 *batch"], x: Trajectories
) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    """Return entropies in x's dtype; ValueError unless all are finite."""
    for depth, depth_entropies in enumerate(entropies):
        if not depth_entropies.isfinite().all():
            raise ValueError(
                "`unembed` must return logits without NaN or +inf, "
                f"got some at depth {depth}: use a wider dtype?"
            )
    return _narrowed(entropies, x)


@dataclass(frozen=True, eq=False)
class TrajectoryPCA:
    """Hold trajectories in the principal components of the last depth.

    `trajectory_pca` makes it.

    Attributes:
        components: the orthonormal principal components of the last depth's embeddings.
        mean: the mean over tokens at the last depth.
        projected: the coordinates of every token at every depth.
        explained_variance_ratio: each component's share of the variance at the last
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

    @checked
    def project(
        self, x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch n_components"]:
        """Return `(x − mean) componentsᵀ`: other streams, such as those of another
        prompt, in these components.

        Example:
            >>> pca = tlc.trajectories.trajectory_pca(trace.residual)
            >>> torch.allclose(pca.project(trace.residual), pca.projected, atol=1e-4)
            True
        """
        return (x.to(self.mean) - self.mean) @ self.components.mT

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{float(share):.0%}" for share in self.explained_variance_ratio
        )
        return (
            f"TrajectoryPCA({len(self.components)} components "
            f"with {shares} of the last depth's variance)"
        )


@checked
def trajectory_pca(x: Trajectories, n_components: Count = 2) -> TrajectoryPCA:
    """Return the principal components of the last depth, and every depth in them.

    `projected[l]` is `(x^l − mean(x^L)) componentsᵀ` in units of x, with the mean over
    tokens (all batch axes), as in the paper's PCA figures. Components are orthonormal,
    the one of largest variance comes first, and the entry of largest magnitude of each
    is positive. n tokens span at most n − 1 directions; a component without variance
    has an arbitrary direction, with a warning.

    Raises:
        ValueError: fewer than 2 tokens, tokens that are all the same at the last depth,
            or `n_components` above the number of tokens or `d_model`.

    Cost: one float64 SVD of `[n_tokens d_model]`.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [1.0, 0.0]]])
        >>> pca = tlc.trajectories.trajectory_pca(x, n_components=1)
        >>> pca.components, pca.projected[..., 0]
        (tensor([[1., 0.]]), tensor([[-1., -2.],
                [ 1., -1.]]))
    """
    stream = _finite(x, fewest_depths=1)
    # Tokens of all batch axes are one sample.
    last = rearrange(stream[-1], "... d -> (...) d")
    n_tokens, d_model = last.shape
    if n_tokens < 2:
        raise ValueError(
            f"principal components want at least 2 tokens, got {n_tokens}: "
            "give `x` more positions"
        )
    most_components = min(n_tokens, d_model)
    if n_components > most_components:
        raise ValueError(
            f"`n_components` must lie in [1, {most_components}] for {n_tokens} tokens "
            f"of width {d_model}, got {n_components}"
        )
    mean = last.mean(0)
    _, sigma, Vh = torch.linalg.svd(last - mean, full_matrices=False)
    # Below it, a singular value may be the rounding of `last`.
    rounding = torch.finfo(sigma.dtype).eps * max(n_tokens, d_model) * last.norm()
    rank = int((sigma > rounding).sum())
    if rank == 0:
        raise ValueError(
            f"principal components want tokens that differ, got {n_tokens} equal ones "
            "in `x[-1]`"
        )
    if rank < n_components:
        warn_caller(
            f"the {n_tokens} tokens of `x[-1]` span {rank} of the {n_components} "
            "components: the others are arbitrary"
        )
    components = Vh[:n_components]
    largest_entry = components.abs().argmax(1, keepdim=True)
    # The largest entry of each component becomes positive, as signs are arbitrary.
    components = components * components.gather(1, largest_entry).sign()
    projected = einsum(
        stream - mean, components, "depth ... d, component d -> depth ... component"
    )
    variances = sigma.square()
    shares = (variances / variances.sum())[:n_components]
    return TrajectoryPCA(
        components=_narrowed(components, x),
        mean=_narrowed(mean, x),
        projected=_narrowed(projected, x),
        explained_variance_ratio=_narrowed(shares, x),
    )


def direction_cosine(
    a: Float[Tensor, "*batch d_model"], b: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch"]:
    """Return the cosine of the angle between a and b, in [−1, 1].

    It is NaN, with a warning, where one of them is zero or not finite.
    """
    # At their own scale, squares of large entries overflow.
    a = a.double() / a.double().abs().amax(-1, keepdim=True)
    b = b.double() / b.double().abs().amax(-1, keepdim=True)
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    n_undefined = int(cosine.isnan().sum())
    if n_undefined:
        warn_caller(
            f"{n_undefined} of {cosine.numel()} cosine similarities are undefined (NaN): "
            "a vector is zero or infinite"
        )
    return cosine.clamp(-1, 1)


def _finite(x: Tensor, fewest_depths: int = 2) -> Tensor:
    """Return trajectories in float64, if they are finite and have enough depths."""
    if len(x) < fewest_depths:
        raise ValueError(
            "`x` must be [n_layers+1 *batch d_model] with at least "
            f"{fewest_depths} depths, got shape {list(x.shape)}: "
            "give the whole residual stream, depth first"
        )
    if x.shape[-1] == 0:
        raise ValueError(
            f"`x` must have tokens of at least one entry, got shape {list(x.shape)}"
        )
    is_broken = ~x.isfinite().flatten(1).all(1)
    if is_broken.any():
        raise ValueError(
            "`x` must be finite, got NaN or infinite entries "
            f"at depth {_listed(is_broken)}: measure in a wider dtype?"
        )
    return x.double()


def _narrowed(result: Tensor, x: Tensor) -> Tensor:
    """Return a float64 result in x's dtype, or in float32 if that is narrower."""
    return result.to(torch.promote_types(x.dtype, torch.float32))


def _unit_steps(x: Tensor) -> Tensor:
    """Return the direction of each step, NaN with a warning where it has none."""
    steps = _finite(x).diff(dim=0)
    lengths = steps.norm(dim=-1, keepdim=True)
    is_zero = lengths == 0
    if is_zero.any():
        stands_still = is_zero.flatten(1)
        n_standing = int(stands_still.any(0).sum())
        warn_caller(
            f"{int(is_zero.sum())} steps of {n_standing} of {stands_still.shape[1]} tokens "
            f"have length 0, at layer {_listed(stands_still.any(1))}: "
            "the line-shape score of a path with such a step is undefined (NaN)"
        )
    return steps / lengths.masked_fill(is_zero, math.nan)


def _score(n_steps: int | Tensor, total: Tensor, x: Tensor) -> Tensor:
    """Return the line-shape score of paths whose unit steps add up to `total`."""
    # The triangle inequality says ≥ 1; on a straight line rounding alone may say less.
    return _narrowed((n_steps / total.norm(dim=-1)).clamp_min(1), x)


def _warn_undefined(measure: str, causes: dict[str, Tensor]) -> None:
    """Warn of how many tokens a measure is undefined for, by cause."""
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


def _warn_of_one_step(x: Tensor, measure: str, constant: int) -> None:
    """Warn where there is one step, for which the measure is that constant."""
    if len(x) == 2:
        warn_caller(
            f"these trajectories have one step: {measure} is {constant} whatever it is, "
            "and says nothing"
        )


def _listed(mask: Tensor, n_listed: int = 5) -> str:
    """Return the indices at which a mask is true, in words."""
    indices = [str(i) for i in mask.nonzero().flatten().tolist()]
    listed = ", ".join(indices[:n_listed])
    n_more = len(indices) - n_listed
    return f"{listed} and {n_more} more" if n_more > 0 else listed
