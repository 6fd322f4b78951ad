"""Token ids of one prompt, in the shapes in which tokenizers give them."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def ids_of_one_prompt(
    ids: Sequence[int] | Tensor, argument: str
) -> Int[Tensor, " n_pos"]:
    """Return token ids of one prompt, `[n_pos]` or `[1 n_pos]`, as a tensor on the CPU.

    Raises ValueError for any other shape, and for none.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long, device="cpu")
    is_batch_of_one = tokens.ndim == 2 and len(tokens) == 1
    if tokens.ndim != 1 and not is_batch_of_one:
        wanted = "token ids [n_pos] or [1 n_pos] of one prompt"
        if argument == "prompt":
            wanted = f"text, or {wanted}"
        raise ValueError(
            f"`{argument}` must be {wanted}; got shape {list(tokens.shape)}: give each "
            "prompt by itself, unpadded"
        )
    if not tokens.numel():
        raise ValueError("the prompt is empty: wanted at least one token")
    return tokens.flatten()
