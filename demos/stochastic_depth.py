"""Stochastic depth, for all small models that are trained here: branches of blocks are
dropped at random.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def drop_rates(n_layers: int, rate: float) -> list[float]:
    """DeiT's linear rule: from 0 at the first block to `rate` at the last."""
    return [rate * layer / max(1, n_layers - 1) for layer in range(n_layers)]


class DropPath(nn.Module):
    """Stochastic depth: while training, a sample's branch is dropped at this rate, and
    else scaled to keep the mean.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        if not self.training or self.rate == 0:
            return branch
        is_kept = torch.rand(len(branch), *[1] * (branch.ndim - 1)) >= self.rate
        return branch * is_kept / (1 - self.rate)
