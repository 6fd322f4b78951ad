"""What a trajectory looks like from outside: through the unembedding, and in two dimensions.

Axes and precision are those of `shapes`, and so is what is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked, warn_caller
from tl_coupling.trajectories.shapes import Trajectories, finite, narrowed


@dataclass(frozen=True, eq=False)
class TrajectoryPCA:
    """Trajectories in the principal components of the last depth's embeddings; see `trajectory_pca`.

    `explained_variance_ratio` is each component's share of the variance at the last depth (not at other depths).
    """

    components: Float[Tensor, "n_components d_model"]
    mean: Float[Tensor, " d_model"]
    projected: Float[Tensor, "n_layers_plus_1 *batch n_components"]
    explained_variance_ratio: Float[Tensor, " n_components"]

    def __repr__(self) -> str:
        shares = ", ".join(f"{float(share):.0%}" for share in self.explained_variance_ratio)
        return f"TrajectoryPCA({len(self.components)} components with {shares} of the last depth's variance)"


@checked
def logit_lens_entropy(x: Trajectories, unembed: Callable[[Tensor], Tensor]) -> Float[Tensor, "n_layers_plus_1 *batch"]:
    """Entropy `H = −Σ_v p_v ln p_v` of `p = softmax(unembed(x^l))` at every depth, in nats: 0 to `ln d_vocab`.

    `unembed`, usually final norm and unembedding, maps `[*batch d_model]` to logits `[*batch d_vocab]`. It is called at
    each depth, with `x[l]` in x's own dtype, without gradients. A last entry that is normalised already
    (`trace(…, final_norm=True)`) would be normalised twice; `entropy_by_depth` avoids that.

    Raises:
        ValueError: `unembed` returns another shape, NaN or +inf (−inf, a token ruled out, is fine).

    Example:
        >>> logit_lens_entropy(torch.eye(2), lambda stream: 0 * stream)
        tensor([0.6931, 0.6931])
    """
    finite(x, at_least=1)
    with torch.no_grad():
        return narrowed(torch.stack([_entropy(unembed(stream), stream, depth) for depth, stream in enumerate(x)]), x)


@checked
def entropy_by_depth(trace: Trace) -> Float[Tensor, "n_layers_plus_1 n_pos"]:
    """Entropy of the logit lens in nats, at every depth and token: `logit_lens_entropy` with the model's own logits.

    A last depth that is normalised already (`final_norm=True`) is not normalised again. Raises ValueError for a model
    without unembedding. Cost: `n_layers + 1` unembeddings of the prompt.

    Example:
        >>> entropy_by_depth(trace).shape
        torch.Size([3, 8])
    """
    x = trace.residual
    last = partial(trace.logits, normalised=trace.final_norm)
    return torch.cat([logit_lens_entropy(x[:-1], trace.logits), logit_lens_entropy(x[-1:], last)])


@checked
def trajectory_pca(x: Trajectories, n_components: Count = 2) -> TrajectoryPCA:
    """Principal components of the last depth's embeddings `x^L`, and every depth's coordinates in them.

    `projected[l] = (x^l − mean(x^L)) componentsᵀ` in units of x, with the mean over tokens (all batch axes), as in the
    paper's PCA figures. Components are orthonormal, of largest variance first, and their entry of largest magnitude is
    positive. n tokens span at most n − 1 directions; a component without variance has an arbitrary one, with a warning.

    Raises:
        ValueError: fewer than 2 tokens, tokens that are all the same at the last depth, or `n_components` above the
            number of tokens or `d_model`.

    Cost: one float64 SVD of `[n_tokens d_model]`.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [1.0, 0.0]]])
        >>> pca = trajectory_pca(x, n_components=1)
        >>> pca.components, pca.projected[..., 0]
        (tensor([[1., 0.]]), tensor([[-1., -2.],
                [ 1., -1.]]))
    """
    wide = finite(x, at_least=1)
    last = wide[-1].reshape(-1, wide.shape[-1])
    n_tokens, d_model = last.shape
    if n_tokens < 2:
        raise ValueError(f"principal components want at least 2 tokens, got {n_tokens}: give `x` more positions")
    if n_components > (most := min(n_tokens, d_model)):
        raise ValueError(
            f"`n_components` must lie in [1, {most}] for {n_tokens} tokens of width {d_model}, got {n_components}"
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
