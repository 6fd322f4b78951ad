"""What an intervention does to a model's predictions."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_coupling.blocks import own_arithmetic
from tl_coupling.directions.interventions import Hook

# How much memory the logits of one pass may take.
_BYTES_OF_LOGITS = 200_000_000
# Log-probabilities are in float64 unless a caller asks for less.
_BYTES_OF_NUMBER = 8


def rows_at_once(n_pos: int, d_vocab: int) -> int:
    """Return how many rows of a batch have logits that fit into memory."""
    return max(1, _BYTES_OF_LOGITS // (n_pos * d_vocab * _BYTES_OF_NUMBER))


def log_probabilities(
    model: Any,
    tokens: Int[Tensor, " n_pos"],
    hooks: Sequence[Hook] = (),
    n_rows: int = 1,
    positions: slice = slice(None),
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "n_rows n_some d_vocab"]:
    """Return log-probabilities of a batch of copies of one prompt, with hooks in place,
    at some of its positions.
    """
    batch = tokens.expand(n_rows, -1)
    with torch.no_grad(), own_arithmetic(model), model.hooks(fwd_hooks=list(hooks)):
        logits = model(batch, return_type="logits")
    return logits[:, positions].to(dtype).log_softmax(-1)


def kl(
    log_p_before: Float[Tensor, "... d_vocab"],
    log_p_after: Float[Tensor, "n_rows ... d_vocab"],
) -> Float[Tensor, "n_rows ..."]:
    """Return `KL(before ‖ after)` of each row, in nats, from log-probabilities."""
    return (log_p_before.exp() * (log_p_before - log_p_after)).sum(-1)


def losses(
    log_p: Float[Tensor, "n_rows n_pos d_vocab"], tokens: Int[Tensor, " n_pos"]
) -> Float[Tensor, " n_rows"]:
    """Return the mean negative log-likelihood of the tokens from the second on, nats."""
    # Position t predicts token t + 1: the last position predicts none that is known.
    next_tokens = tokens[1:].expand(len(log_p), -1)[..., None]
    return -log_p[:, :-1].gather(-1, next_tokens).double().mean((1, 2))
