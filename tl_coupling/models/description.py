"""A loaded model described: its kind, where it came from, how it was processed, how long its context is."""

import importlib.metadata
import weakref
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.border import warn_caller

_loaded_as: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

_PACKAGES = ("tl-coupling", "transformer-lens", "transformers", "torch", "numpy")
# In which fields of a HuggingFace configuration models declare how many positions they have.
_CONTEXT_FIELDS = ("n_positions", "max_position_embeddings", "max_context_length", "max_seq_len", "max_sequence_length")
_WANTED = "wanted a decoder (GPT-2, Llama, …) or an encoder of text (BERT, …)"


def remember(model: nn.Module, loaded_as: dict[str, Any]) -> None:
    """Keep how a model was loaded, for its provenance, as long as the model lives."""
    _loaded_as[model] = loaded_as


def loaded_as(model: nn.Module) -> dict[str, Any]:
    """How a model was loaded; its own name where `load_model` did not load it."""
    cfg: Any = getattr(model, "cfg", None)
    return _loaded_as.get(model, {"model": getattr(cfg, "model_name", type(model).__name__)})


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
    if named & VISION_ARCHITECTURES:
        return f"a vision model: it reads pixels, not tokens; {_WANTED}"
    return None


def reads_both_ways(model: nn.Module) -> bool:
    """Whether tokens also see those after them (BERT), so that an appended token changes them."""
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    cfg: Any = model.cfg
    is_decoder = is_bridge(model) and getattr(_config(model), "is_decoder", False)
    is_masked = getattr(cfg, "architecture", None) in MASKED_LM_ARCHITECTURES
    return not is_decoder and (is_masked or getattr(cfg, "attention_dir", "causal") == "bidirectional")


def context_length(model: nn.Module) -> int | None:
    """How many tokens a model's context holds; None where the architecture sets no limit.

    What the configuration declares: a table of positions (GPT-2, BERT), or the length given for rotary and ALiBi
    models. State-space models (Mamba, RWKV) and ALiBi models without one (BLOOM) have no limit, though TransformerLens
    puts 2048 there. A HookedTransformer's tables have `cfg.n_ctx` rows; with ALiBi it has none.
    """
    cfg: Any = model.cfg
    limits = [] if getattr(cfg, "positional_embedding_type", None) == "alibi" else [cfg.n_ctx]
    config = _config(model) if is_bridge(model) else None
    if config is not None:
        # `to_dict`, because RWKV answers `max_position_embeddings` with its training length.
        held = (getattr(config, "text_config", None) or config).to_dict()
        declared = [held[field] for field in _CONTEXT_FIELDS if held.get(field)]
        # RoBERTa's table has rows that are not positions; TransformerLens leaves them out.
        limits = [*declared, cfg.n_ctx] if declared else []
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
    return loaded_as(model) | {
        "backend": "bridge" if is_bridge(model) else "hooked",
        "architecture": type(getattr(model, "original_model", model)).__name__,
        "n_layers": len(model.blocks),
        "d_model": int(residual.shape[-1]),
        "n_params": sum(p.numel() for p in model.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "weight_processing": processing or ["none"],
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Which of TransformerLens' weight processings were applied."""
    found = []
    if str(getattr(model.cfg, "normalization_type", "")).endswith("Pre") and not is_bridge(model):
        found.append("fold_ln")
    if getattr(model, "compatibility_mode", False):
        found.append("enable_compatibility_mode")
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
    original: Any = bridge.original_model
    return getattr(original, "config", None)


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
