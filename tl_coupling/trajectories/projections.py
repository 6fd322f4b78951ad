"""What a trajectory looks like from outside: through the unembedding, and in two dimensions. Pure tensors.

Axes and precision are those of `shapes`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import Count, checked, warn_caller
from tl_coupling.trajectories.shapes import finite, narrowed


@dataclass(frozen=True, eq=False)
class TrajectoryPCA:
    """Trajectories in the principal components of the last depth's embeddings.

    Attributes:
        components: orthonormal directions, largest variance first; the entry of largest magnitude is positive.
        mean: of the last depth's embeddings; subtracted at every depth.
        projected: `projected[l]` are the coordinates of `x[l]`, in units of x.
        explained_variance_ratio: share of the last depth's variance along each component; says nothing of other depths.
    """

    components: Float[Tensor, "n_components d_model"]
    mean: Float[Tensor, " d_model"]
    projected: Float[Tensor, "n_layers_plus_1 *batch n_components"]
    explained_variance_ratio: Float[Tensor, " n_components"]


@checked
def logit_lens_entropy(
    x: Float[Tensor, "n_layers_plus_1 *batch d_model"], unembed: Callable[[Tensor], Tensor]
) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    """Entropy `H = −Σ_v p_v ln p_v`, in nats, of `p = softmax(unembed(x^l))` at every depth (the logit lens).

    Between 0 and `ln d_vocab`, the entropy of a uniform guess.

    Args:
        x: trajectories, depth first. If its last entry is normalised already (`trace(…, final_norm=True)`), an
            `unembed` that normalises does so twice there.
        unembed: from the residual stream to logits, `[*batch d_model] → [*batch d_vocab]`; for a model that is final
            norm, then unembedding. Called once for each depth, with `x[l]` in x's own dtype, without gradients.

    Raises:
        TypeError, ValueError: x is not a finite floating-point tensor with a depth and a `d_model` axis; `unembed`
            returns another shape, NaN or +inf (−inf, a token ruled out, is fine).

    Cost: `n_layers + 1` calls of `unembed`; memory for a few float64 copies of one depth's logits.

    Example:
        >>> logit_lens_entropy(torch.eye(2), lambda stream: 0 * stream)
        tensor([0.6931, 0.6931])
    """
    finite(x, at_least=1)
    with torch.no_grad():
        return narrowed(torch.stack([_entropy(unembed(stream), stream, depth) for depth, stream in enumerate(x)]), x)


@checked
def trajectory_pca(x: Float[Tensor, "n_layers_plus_1 *batch d_model"], n_components: Count = 2) -> TrajectoryPCA:
    """Principal components of the last depth's embeddings `x^L`, and every depth's coordinates in them.

    `projected[l] = (x^l − mean(x^L)) componentsᵀ`, the mean being over tokens (all batch axes). Signs are fixed: the
    entry of largest magnitude in each component is positive. For a view of some depths only, slice `projected`.

    Args:
        x: trajectories, depth first; at least 2 tokens.
        n_components: how many, at most the smaller of `n_tokens` and `d_model`.

    n tokens span at most n − 1 directions. Where a component has no variance left its direction is arbitrary: a warning
    says which.

    Raises:
        TypeError, ValueError: x is not a finite floating-point tensor with a depth and a `d_model` axis, or has fewer
            than 2 tokens, or tokens that are all the same at the last depth; `n_components` is out of range.

    Cost: one float64 SVD of `[n_tokens d_model]`.

    Source: the paper's PCA figures.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [1.0, 0.0]]])
        >>> pca = trajectory_pca(x, n_components=1)
        >>> pca.components, pca.projected[..., 0]
        (tensor([[1., 0.]]), tensor([[-1., -2.],
                [ 1., -1.]]))
    """
    wide = finite(x, at_least=1)
    last = rearrange(wide[-1], "... d_model -> (...) d_model")
    n_tokens, d_model = last.shape
    if n_tokens < 2:
        raise ValueError(f"principal components want at least 2 tokens, got {n_tokens}: give `x` more positions")
    largest = min(n_tokens, d_model)
    if n_components > largest:
        raise ValueError(
            f"`n_components` must lie in [1, {largest}] for {n_tokens} tokens of width {d_model}, got {n_components}"
        )
    mean = last.mean(0)
    _, sigma, Vh = torch.linalg.svd(last - mean, full_matrices=False)
    rank = int((sigma > torch.finfo(sigma.dtype).eps * max(n_tokens, d_model) * last.norm()).sum())
    if rank == 0:
        raise ValueError(f"principal components want tokens that differ, got {n_tokens} equal ones in `x[-1]`")
    if rank < n_components:
        warn_caller(
            f"the {n_tokens} tokens of `x[-1]` span {rank} of the {n_components} components asked for: the others have "
            "no variance and an arbitrary direction"
        )
    components = Vh[:n_components]
    components = components * components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    return TrajectoryPCA(
        components=narrowed(components, x),
        mean=narrowed(mean, x),
        projected=narrowed(einsum(wide - mean, components, "depth ... d, component d -> depth ... component"), x),
        explained_variance_ratio=narrowed((sigma.square() / sigma.square().sum())[:n_components], x),
    )


def _entropy(logits: Tensor, stream: Tensor, depth: int) -> Tensor:
    if logits.ndim != stream.ndim or logits.shape[:-1] != stream.shape[:-1]:
        raise ValueError(
            f"`unembed` must map [*batch d_model] to [*batch d_vocab], got {list(logits.shape)} for "
            f"{list(stream.shape)}"
        )
    entropy = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    if not bool(torch.isfinite(entropy).all()):
        raise ValueError(
            f"`unembed` must return logits without NaN or +inf, got some at depth {depth}: use a wider dtype?"
        )
    return entropy
