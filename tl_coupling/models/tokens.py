"""Text to token ids and back, with the special tokens that belong to the model."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tl_coupling.models.description import loaded_as, reads_both_ways


def tokenize(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> tuple[Int[Tensor, " n_pos"], dict[str, Any]]:
    """Token ids of one prompt, and their provenance. Ids are taken as they are.

    Text begins with what the tokenizer prepends by itself (`prepend_bos=None`), nothing (`False`), or at least a BOS
    token (`True`). What a tokenizer appends (`</s>`) is left off, so that the last position is the last token of the
    text. Models that read both ways (BERT) keep it: their other tokens see the `[SEP]`, and were trained to.

    Raises:
        ValueError: an empty prompt, ids of more than one prompt, text without a tokenizer, no BOS token.
    """
    if not isinstance(prompt, str):
        given = torch.as_tensor(prompt, dtype=torch.long, device="cpu")
        given = given[0] if given.ndim == 2 and len(given) == 1 else given
        if given.ndim != 1:
            wanted = "text, or token ids [n_pos] or [1 n_pos] of one prompt"
            raise ValueError(f"`prompt` must be {wanted}; got shape {list(given.shape)}")
        return given, {"prepend_bos": "token ids given", "append_eos": "token ids given"}
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    text = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    own = _own_default(tokenizer, bool(loaded_as(model).get("trust_remote_code")))
    before, after = _around(text, own(prompt, return_special_tokens_mask=True))
    if prepend_bos is False:
        before = []
    elif prepend_bos and not before:
        if tokenizer.bos_token_id is None:
            raise ValueError("`prepend_bos=True`, but this model's tokenizer has no BOS token")
        before = [tokenizer.bos_token_id]
    after = after if reads_both_ways(model) else []
    ids = torch.tensor([*before, *text, *after], dtype=torch.long)
    return ids, {"prepend_bos": bool(before), "append_eos": bool(after)}


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Each token as text; its id where the model has no tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return tuple(map(str, tokens.tolist()))
    return tuple(tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in tokens.tolist())


def _around(text: list[int], encoded: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after the text's own tokens."""
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    # The mask tells an appended token from the same token in the text, but not every tokenizer fills it in.
    starts = [special.index(0) if 0 in special else 0, *range(len(ids) - len(text), -1, -1)]
    start = next((i for i in starts if ids[i : i + len(text)] == text), None)
    if start is None:
        raise ValueError(
            "this model's tokenizer splits the text differently when it adds special tokens: give token ids"
        )
    return ids[:start], ids[start + len(text) :]


def _own_default(tokenizer: Any, trust_remote_code: bool) -> Any:
    """The tokenizer with its own default for BOS: TransformerLens replaces it by one that always prepends."""
    if tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return tokenizer
    return _reloaded_tokenizer(tokenizer.name_or_path, trust_remote_code) or tokenizer


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
