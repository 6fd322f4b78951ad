"""What an intervention does to a model's predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.blocks import own_arithmetic
from tl_coupling.comparisons import DifferentPrompts
from tl_coupling.directions.interventions import Hook
from tl_coupling.models import tokenize
from tl_coupling.prompts import Prompt

# How much memory the logits of one pass may take.
_BYTES_OF_LOGITS = 200_000_000
# Log-probabilities are in float64 unless a caller asks for less.
_BYTES_OF_NUMBER = 8


def tokens_by_id(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prepend_bos: bool | None,
    first_position: int,
) -> dict[str, Tensor]:
    """Return the tokens of each prompt, by its id, as many as it has.

    Raises ValueError for one that is too short, and for two that are the same.
    """
    tokens_of_prompts: dict[str, Tensor] = {}
    different = DifferentPrompts()
    for prompt in prompts:
        tokens, _ = tokenize(model, prompt.prompt, prepend_bos)
        if len(tokens) < 2:
            raise ValueError(
                f"prompt {prompt.id!r}: wanted at least 2 tokens, to predict one from "
                f"the other, got {len(tokens)}"
            )
        if first_position >= len(tokens):
            raise ValueError(
                f"`first_position` must be below {len(tokens)}, the number of tokens of "
                f"prompt {prompt.id!r}, got {first_position}: nothing would be changed"
            )
        # Prompts are told apart by their tokens: one text under two names is one
        # prompt.
        different.add(prompt.id, tokens)
        tokens_of_prompts[prompt.id] = tokens
    return tokens_of_prompts


def effects_of_kind(
    effects: Float[Tensor, "n_kinds ..."], kinds: Sequence[str], kind: str
) -> Float[np.ndarray, "n_of_kind ..."]:
    """Return the rows of one kind in float64; ValueError where there are none."""
    is_of_kind = np.array(kinds) == kind
    if not is_of_kind.any():
        raise ValueError(
            f"there is no {kind!r} here, only {', '.join(dict.fromkeys(kinds))}"
        )
    rows: np.ndarray = effects.double().cpu().numpy()[is_of_kind]
    return rows


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
