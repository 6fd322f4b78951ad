"""What each depth of a traced prompt would say next."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import checked
from tl_coupling.trajectories.projections import logit_lens_entropy


@checked
def entropy_by_depth(trace: Trace) -> Float[Tensor, "n_layers_plus_1 n_pos"]:
    """Entropy of the logit lens in nats, at every depth and token; `logit_lens_entropy` with the model's own logits.

    The last depth of a trace with `final_norm=True` is normalised already, and is not normalised twice.

    Raises:
        ValueError: the model has no unembedding.

    Cost: `n_layers + 1` unembeddings of the prompt.

    Example:
        >>> entropy_by_depth(trace).shape
        torch.Size([3, 8])
    """
    x = trace.residual
    last = partial(trace.logits, normalised=trace.final_norm)
    return torch.cat([logit_lens_entropy(x[:-1], trace.logits), logit_lens_entropy(x[-1:], last)])
