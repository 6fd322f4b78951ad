"""Checkpoints that are matched by loss: what it is on windows of a text, and what
counting tokens and pairs reaches.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn


@dataclass(frozen=True)
class LossMarks:
    """Checkpoints chosen by loss and not by step: where it first falls to each of some
    values.

    Attributes:
        values: in nats.
        windows: what losses are taken on, by name, in eval mode.
        of: the name of the loss that must fall.
        stops: whether training is over when all are reached.
    """

    values: tuple[float, ...]
    windows: Mapping[str, Int[Tensor, "n n_ctx"]] = field(repr=False)
    of: str
    stops: bool = False

    @property
    def digest(self) -> str:
        tokens = {name: windows.tolist() for name, windows in self.windows.items()}
        return hashlib.sha256(
            repr(("both sides", self.values, self.of, self.stops, tokens)).encode()
        ).hexdigest()[:8]

    def losses(self, model: Any) -> dict[str, float]:
        """On each set of windows; the model is left as it was."""
        was_training = model.training
        model.eval()
        losses = {
            name: mean_loss(model, windows) for name, windows in self.windows.items()
        }
        model.train(was_training)
        return losses


def is_evaluated(step: int, steps: int) -> bool:
    """Whether losses are taken at this step: every sixteenth of the way there, at most
    16 steps apart.
    """
    return step in (0, steps) or step % min(16, max(1, step // 16)) == 0


def windows_of(
    tokens: Int[Tensor, " n_tokens"], n_ctx: int, n: int
) -> Int[Tensor, "n n_ctx"]:
    """At most `n` windows, evenly spread, that do not overlap.

    Raises:
        ValueError: the text is shorter than one.
    """
    n_windows = len(tokens) // n_ctx
    if not n_windows:
        raise ValueError(f"wanted a text of at least {n_ctx} tokens, got {len(tokens)}")
    return tokens[: n_windows * n_ctx].view(n_windows, n_ctx)[
        torch.linspace(0, n_windows - 1, min(n, n_windows)).long()
    ]


@torch.no_grad()
def mean_loss(model: Any, windows: Int[Tensor, "n n_ctx"]) -> float:
    """Mean negative log-likelihood of each window's tokens given those before, but its
    first; in nats.
    """
    logits = model(windows).logits[:, :-1]
    return float(
        nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    )


def counting_losses(
    tokens: Int[Tensor, " n_tokens"], windows: Int[Tensor, "n n_ctx"], vocabulary: int
) -> dict[str, float]:
    """Return what models that only count have on the tokens that `mean_loss` is about:
    "unigram" and "bigram", in nats.

    `p(t) = (c(t) + 1) / (N + V)`, and `p(t | s) = (c(s t) + T(s) p(t)) / (c(s) +
    T(s))`, where `T(s)` different tokens follow s. Source: Witten and Bell 1991, *The
    zero-frequency problem*, IEEE Trans. Inf. Theory 37.
    """
    unigram = torch.bincount(tokens, minlength=vocabulary).double() + 1
    unigram /= unigram.sum()
    pairs = torch.bincount(
        tokens[:-1] * vocabulary + tokens[1:], minlength=vocabulary**2
    ).double()
    pairs = pairs.view(vocabulary, vocabulary)
    followers = (pairs > 0).sum(1, keepdim=True)
    n_seen = pairs.sum(1, keepdim=True)
    bigram = torch.where(
        n_seen > 0, (pairs + followers * unigram) / (n_seen + followers), unigram
    )
    before = windows[:, :-1]
    after = windows[:, 1:]
    return {
        name: -float(p.log().mean())
        for name, p in (("unigram", unigram[after]), ("bigram", bigram[before, after]))
    }
