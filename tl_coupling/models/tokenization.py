"""Token ids, made from text as the model's own tokenizer means it, and their names."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tl_coupling.arguments import check_text
from tl_coupling.models.facts import facts_of
from tl_coupling.models.loaded import config_of, context_length, is_bridge

_GIVE_IDS = "give the prompt as token ids"


def tokenize(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> tuple[Int[Tensor, " n_pos"], dict[str, object]]:
    """Return the token ids of one prompt, and their provenance. Ids are taken as they
    are.

    Text begins with what the tokenizer prepends by itself (`prepend_bos=None`), nothing
    (`False`), or at least a BOS token (`True`). What a tokenizer appends (`</s>`) is
    left off, so that the last position is the last token of the text. Models that read
    both ways (BERT) keep it: their other tokens see the `[SEP]`, and were trained to.

    Raises:
        ValueError: an empty prompt, ids of more than one prompt, text without a
            tokenizer or with lone surrogates, no BOS token.

    Example:
        >>> tokens, provenance = tlc.models.tokenize(model, "w3 w14 w15", prepend_bos=True)
        >>> tokens
        tensor([ 0,  3, 14, 15])
    """
    if not isinstance(prompt, str):
        unknown = "token ids given"
        return _ids_of_one_prompt(prompt), {
            "prepend_bos": unknown,
            "append_eos": unknown,
        }
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"this model has no tokenizer: {_GIVE_IDS}")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    check_text(prompt, "prompt")
    text = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    prefix, suffix = _special_tokens_around(text, prompt, _own_tokenizer(model))
    if prepend_bos is False:
        prefix = []
    elif prepend_bos and not prefix:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "`prepend_bos=True`, but this model's tokenizer has no BOS token"
            )
        prefix = [tokenizer.bos_token_id]
    if not _reads_both_ways(model):
        suffix = []
    ids = torch.tensor([*prefix, *text, *suffix], dtype=torch.long)
    return ids, {"prepend_bos": bool(prefix), "append_eos": bool(suffix)}


def _ids_of_one_prompt(ids: Sequence[int] | Tensor) -> Int[Tensor, " n_pos"]:
    tokens = torch.as_tensor(ids, dtype=torch.long, device="cpu")
    is_batch_of_one = tokens.ndim == 2 and len(tokens) == 1
    if tokens.ndim != 1 and not is_batch_of_one:
        raise ValueError(
            "`prompt` must be text, or token ids [n_pos] or [1 n_pos] of one prompt; "
            f"got shape {list(tokens.shape)}"
        )
    return tokens.flatten()


def _own_tokenizer(model: Any) -> Any:
    """Return the model's tokenizer as it was saved.

    TransformerLens may have replaced it by one that always prepends a BOS token.
    """
    tokenizer = model.tokenizer
    if tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return tokenizer
    trusted = facts_of(model).loaded_as.get("trust_remote_code", False)
    return _reloaded_tokenizer(tokenizer.name_or_path, trusted) or tokenizer


def _special_tokens_around(
    text: list[int], prompt: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after those of the prompt's
    text.
    """
    encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    is_special = encoded["special_tokens_mask"]
    # The mask tells an appended token from the same token in the text, but not every
    # tokenizer fills it in: then the text is looked for from the end.
    by_mask = is_special.index(0) if 0 in is_special else 0
    n_text = len(text)
    for start in (by_mask, *range(len(ids) - n_text, -1, -1)):
        if ids[start : start + n_text] == text:
            return ids[:start], ids[start + n_text :]
    raise ValueError(
        "this model's tokenizer splits the text differently when it adds special "
        f"tokens: {_GIVE_IDS}"
    )


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None


def _reads_both_ways(model: Any) -> bool:
    """Say whether tokens also see those after them (BERT), so that an appended token
    changes them.
    """
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    if is_bridge(model) and getattr(config_of(model), "is_decoder", False):
        return False
    if getattr(model.cfg, "architecture", None) in MASKED_LM_ARCHITECTURES:
        return True
    return getattr(model.cfg, "attention_dir", "causal") == "bidirectional"


def check_tokens(model: Any, tokens: Int[Tensor, " n_pos"]) -> None:
    """Raise ValueError unless a model can be run on token ids."""
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: wanted at least one token")
    n_ctx = context_length(model)
    if n_ctx is not None and n_ctx < len(tokens):
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, this model's context holds {n_ctx}: "
            "shorten the prompt"
        )
    d_vocab = model.cfg.d_vocab
    if d_vocab is None or d_vocab <= 0:
        return
    lowest = int(tokens.min())
    highest = int(tokens.max())
    if lowest < 0 or highest >= d_vocab:
        raise ValueError(
            f"token ids must lie in [0, {d_vocab - 1}], got {lowest} … {highest}"
        )


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Return each token as text; its id where the model has no tokenizer."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return tuple(map(str, tokens.tolist()))
    return tuple(
        tokenizer.decode([token], clean_up_tokenization_spaces=False)
        for token in tokens.tolist()
    )
