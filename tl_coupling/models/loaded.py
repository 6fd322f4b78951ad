"""A loaded model: its kind, where it came from, how it was processed, its context; text to token ids and back."""

import importlib.metadata
import weakref
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.border import warn_caller

# How models were loaded, as long as they live.
LOADED_AS: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

_PACKAGES = ("tl-coupling", "transformer-lens", "transformers", "torch", "numpy")
# In which fields of a HuggingFace configuration models declare how many positions they have.
_CONTEXT_FIELDS = ("n_positions", "max_position_embeddings", "max_context_length", "max_seq_len", "max_sequence_length")
_GIVE_IDS = "give the prompt as token ids"
_WANTED = "wanted a decoder (GPT-2, Llama, …) or an encoder of text (BERT, …)"


def is_bridge(model: nn.Module) -> bool:
    """Whether this is a TransformerBridge (which wraps a HuggingFace model) rather than a HookedTransformer."""
    return getattr(model, "original_model", None) is not None


def describe_kind(model: nn.Module) -> str | None:
    """Why a model has no single residual stream over tokens, as an end of "this model is …"; None if it has one."""
    if is_bridge(model) and (kind := kind_of_config(_config(model))):
        return kind
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return None
    stacks = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
    found = f"its stacks are {', '.join(map(repr, stacks))}" if stacks else "it has no list of blocks"
    return f"a model without one stack of blocks, `blocks`: {found}; {_WANTED}"


def kind_of_config(config: Any) -> str | None:
    """As `describe_kind`, from a HuggingFace configuration, before any weights are read."""
    from transformer_lens.utilities.architectures import AUDIO_ARCHITECTURES, VISION_ARCHITECTURES

    named = set(getattr(config, "architectures", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        streams = "two stacks of blocks, each with its own residual stream"
        return f"an encoder–decoder (sequence-to-sequence) model: {streams}; {_WANTED}"
    if named & AUDIO_ARCHITECTURES:
        return f"an audio model: it reads sound, not tokens; {_WANTED}"
    return f"a vision model: it reads pixels, not tokens; {_WANTED}" if named & VISION_ARCHITECTURES else None


def context_length(model: Any) -> int | None:
    """How many tokens a model's context holds; None where the architecture sets no limit.

    What the configuration declares: a table of positions (GPT-2, BERT), or the length given for rotary and ALiBi
    models. State-space models (Mamba, RWKV) and ALiBi models without one (BLOOM) have no limit, though TransformerLens
    puts 2048 there. A HookedTransformer's tables have `cfg.n_ctx` rows; with ALiBi it has none.
    """
    limits = [] if getattr(model.cfg, "positional_embedding_type", None) == "alibi" else [model.cfg.n_ctx]
    if is_bridge(model) and (config := _config(model)) is not None:
        # `to_dict`, because RWKV answers `max_position_embeddings` with its training length.
        held = (getattr(config, "text_config", None) or config).to_dict()
        declared = [held[field] for field in _CONTEXT_FIELDS if held.get(field)]
        # RoBERTa's table has rows that are not positions; TransformerLens leaves them out.
        limits = [*declared, model.cfg.n_ctx] if declared else []
    return min((int(limit) for limit in limits if limit is not None and limit > 0), default=None)


def describe_model(model: Any, residual: Float[Tensor, "n_layers n_pos d_model"]) -> dict[str, Any]:
    """Provenance of a model, JSON-able; warns if its writing weights are centred."""
    parameter = next(model.parameters())
    processing = _weight_processing(model, residual)
    if "center_writing_weights" in processing:
        warn_caller(
            "this model's writing weights are centred: its residual stream, Jacobians and trajectories differ from the "
            "raw model's; `tl_coupling.load_model` loads raw weights"
        )
    return LOADED_AS.get(model, {"model": getattr(model.cfg, "model_name", type(model).__name__)}) | {
        "backend": "bridge" if is_bridge(model) else "hooked",
        "architecture": type(getattr(model, "original_model", model)).__name__,
        "n_layers": len(model.blocks),
        "d_model": int(residual.shape[-1]),
        "n_params": sum(p.numel() for p in model.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "weight_processing": processing or ["none"],
        "versions": {package: version(package) for package in _PACKAGES},
    }


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Which of TransformerLens' weight processings were applied."""
    folded = str(getattr(model.cfg, "normalization_type", "")).endswith("Pre") and not is_bridge(model)
    found = ["fold_ln"] if folded else []
    found += ["enable_compatibility_mode"] if getattr(model, "compatibility_mode", False) else []
    # After centring every row of the stream has mean zero. A LayerNorm within the stream (BERT) does that too, but only
    # centring does it to the rows of the embedding.
    embedding = getattr(model, "W_E", None)
    if isinstance(embedding, Tensor) and embedding.is_floating_point() and not embedding.is_meta:
        # Up to rounding. Single rows of other weights come this close, never all.
        tolerance = 1e-5 if torch.finfo(embedding.dtype).bits > 16 else 1e-2
        both = [rows.detach().float() for rows in (residual, embedding[:1000])]
        if all(bool((rows.mean(-1).abs() <= tolerance * rows.abs().mean(-1)).all()) for rows in both):
            found.append("center_writing_weights")
    return found


def _config(bridge: nn.Module) -> Any:
    """The HuggingFace configuration of the model that a bridge wraps; None for models of other origin."""
    return getattr(bridge.original_model, "config", None)


@cache
def version(package: str) -> str:
    """Which version of a package is installed."""
    return next((found.version for found in importlib.metadata.distributions(name=package)), "not installed")


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
        if given.ndim != 1 and not (given.ndim == 2 and len(given) == 1):
            wanted = "text, or token ids [n_pos] or [1 n_pos] of one prompt"
            raise ValueError(f"`prompt` must be {wanted}; got shape {list(given.shape)}")
        return given.flatten(), dict.fromkeys(("prepend_bos", "append_eos"), "token ids given")
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"this model has no tokenizer: {_GIVE_IDS}")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    own = tokenizer
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        # TransformerLens may have replaced it by one that always prepends.
        trusted = LOADED_AS.get(model, {}).get("trust_remote_code", False)
        own = _reloaded_tokenizer(tokenizer.name_or_path, trusted) or tokenizer
    text = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    encoded = own(prompt, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    # The mask tells an appended token from the same token in the text, but not every tokenizer fills it in.
    starts = [special.index(0) if 0 in special else 0, *range(len(ids) - len(text), -1, -1)]
    start = next((i for i in starts if ids[i : i + len(text)] == text), None)
    if start is None:
        raise ValueError(f"this model's tokenizer splits the text differently when it adds special tokens: {_GIVE_IDS}")
    before, after = ids[:start], ids[start + len(text) :]
    if prepend_bos is False:
        before = []
    elif prepend_bos and not before:
        if tokenizer.bos_token_id is None:
            raise ValueError("`prepend_bos=True`, but this model's tokenizer has no BOS token")
        before = [tokenizer.bos_token_id]
    after = after if _reads_both_ways(model) else []
    added = {"prepend_bos": bool(before), "append_eos": bool(after)}
    return torch.tensor([*before, *text, *after], dtype=torch.long), added


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Each token as text; its id where the model has no tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return tuple(map(str, tokens.tolist()))
    return tuple(tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in tokens.tolist())


def _reads_both_ways(model: Any) -> bool:
    """Whether tokens also see those after them (BERT), so that an appended token changes them."""
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    is_decoder = is_bridge(model) and getattr(_config(model), "is_decoder", False)
    is_masked = getattr(model.cfg, "architecture", None) in MASKED_LM_ARCHITECTURES
    return not is_decoder and (is_masked or getattr(model.cfg, "attention_dir", "causal") == "bidirectional")


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
