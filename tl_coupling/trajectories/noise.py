"""What becomes of noise in one token's embedding on its way through the model (Aubry et al. 2025, appendix)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, Seed, checked
from tl_coupling.progress import Progress, with_progress
from tl_coupling.trajectories.shapes import direction_cosine


@dataclass(frozen=True, eq=False)
class Perturbation:
    """`cosine_similarity`, `cos(x^l, x̃^l)` of a token's clean and noisy trajectory, at depths 0 to L.

    `scales` are lengths of the noise divided by that of the clean embedding; `position` is the token.
    """

    cosine_similarity: Float[Tensor, "n_scales n_samples n_layers_plus_1"]
    scales: tuple[float, ...]
    position: int
    seed: int
    provenance: dict[str, Any]

    @property
    def mean(self) -> Float[Tensor, "n_scales n_layers_plus_1"]:
        """Mean similarity over the samples."""
        return self.cosine_similarity.mean(1)

    def __repr__(self) -> str:
        n_scales, n_samples, n_depths = self.cosine_similarity.shape
        return (
            f"Perturbation(model={self.provenance.get('model')!r}, position={self.position}, {n_scales} scales × "
            f"{n_samples} samples × {n_depths} depths, mean cosine {float(self.mean[:, 0].mean()):.3f} before the "
            f"first layer, {float(self.mean[:, -1].mean()):.3f} after the last)"
        )


@checked
def perturbation(
    trace: Trace,
    scales: Sequence[int | float] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    *,
    position: int = -1,
    n_samples: Count = 8,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Perturbation:
    """Add Gaussian noise to one token's embedding and follow how its direction changes through the blocks.

    `x̃^0_t = x^0_t + scale · ‖x^0_t‖ / √d_model · ε` with standard normal `ε`: noise of scale 1 is about as long as the
    embedding. (The paper's levels are absolute; relative ones let models be compared.) Before the first layer the
    expected similarity is close to `1 / √(1 + scale²)`; deeper it says whether the blocks damp the noise or amplify it.
    The samples of ε, float64 from a CPU generator with the seed, are the same for every scale.

    Args:
        trace: a traced prompt. With `final_norm=True` the last depth is compared after the final norm.
        scales: sizes of the noise, relative to the embedding; at least 0.
        position: the token; the last by default, as in the paper.
        n_samples: how many samples of noise for each scale.
        seed: of the noise.
        progress: wraps the loop over forward passes; `None`: a bar in a terminal or notebook, `False`: none.

    Raises:
        ValueError: no scales, a negative or infinite one, a position out of range, or an embedding that is zero.

    Cost: `n_scales · n_samples` forward passes of the prompt.

    Example:
        >>> perturbation(trace, (0.1, 1.0), n_samples=2).cosine_similarity.shape
        torch.Size([2, 2, 3])
    """
    t = trace.position_index(position)
    if not len(scales) or not all(math.isfinite(scale) and scale >= 0 for scale in scales):
        raise ValueError(f"`scales` must be finite numbers of at least 0, one or more, got {list(scales)}")
    clean = trace.residual[:, t]
    size = clean[0].norm()
    if size == 0:
        raise ValueError(f"the embedding of token {t} is zero, and noise is relative to it: choose another token")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n_samples, trace.d_model, dtype=torch.float64, generator=generator).to(clean)
    noise = size / math.sqrt(trace.d_model) * noise

    cosines = clean.new_empty(len(scales) * n_samples, len(clean))
    for run in with_progress(range(len(cosines)), progress, "perturbation"):
        X = trace.residual[0].clone()
        X[t] += scales[run // n_samples] * noise[run % n_samples]
        noisy = [X[t]]
        for block in trace.blocks:
            X = X + block(X)
            noisy.append(X[t])
        cosines[run] = direction_cosine(clean, torch.stack(noisy))
    return Perturbation(
        cosine_similarity=cosines.reshape(len(scales), n_samples, len(clean)),
        scales=tuple(float(scale) for scale in scales),
        position=t,
        seed=seed,
        provenance=trace.provenance | {"position": t},
    )
