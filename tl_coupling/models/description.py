"""What can be asked of a model: its kind, where it came from, how it was processed, how long its context is."""

import importlib.metadata
import warnings
import weakref
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_loaded_as: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

# The fields of a HuggingFace configuration in which models declare how many positions they have.
_PACKAGES = ("tl-coupling", "transformer-lens", "transformers", "torch", "numpy")
_CONTEXT_FIELDS = ("n_positions", "max_position_embeddings", "max_context_length", "max_seq_len", "max_sequence_length")


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
    """What a model is that has no single residual stream over tokens, and what is wanted instead; None for all others.

    Completes "this model is …".

    Example:
        >>> from tl_coupling.models import describe_kind
        >>> describe_kind(model) is None
        True
    """
    if is_bridge(model) and (kind := kind_of_config(_config(model))):
        return kind
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return None
    stacks = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
    found = f"its stacks are {', '.join(map(repr, stacks))}" if stacks else "it has no list of blocks"
    return f"a model without one stack of blocks, `blocks`: {found}; {_WANTED}"


_WANTED = "wanted a decoder (GPT-2, Llama, …) or an encoder of text (BERT, …)"


def kind_of_config(config: Any) -> str | None:
    """The same of a HuggingFace configuration, before any weights are read."""
    from transformer_lens.utilities.architectures import AUDIO_ARCHITECTURES, VISION_ARCHITECTURES

    named = set(getattr(config, "architectures", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        return (
            "an encoder–decoder (sequence-to-sequence) model: two stacks of blocks, each with a residual stream of its "
            f"own; {_WANTED}"
        )
    if named & AUDIO_ARCHITECTURES:
        return f"an audio model: it reads sound, not tokens; {_WANTED}"
    if named & VISION_ARCHITECTURES:
        return f"a vision model: it reads pixels, not tokens; {_WANTED}"
    return None


def reads_both_ways(model: nn.Module) -> bool:
    """Whether tokens see those after them as well (BERT), so that a closing token is part of what the model reads."""
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    cfg: Any = model.cfg
    if is_bridge(model) and getattr(_config(model), "is_decoder", False):
        return False
    return (
        getattr(cfg, "attention_dir", "causal") == "bidirectional"
        or getattr(cfg, "architecture", None) in MASKED_LM_ARCHITECTURES
    )


def context_length(model: nn.Module) -> int | None:
    """The number of tokens that a model's context holds; None where the architecture sets no limit.

    What the model's configuration declares: a table of positions (GPT-2, BERT), or the length that rotary and ALiBi
    models name. State-space models (Mamba, RWKV) and ALiBi models that name none (BLOOM) have no limit;
    TransformerLens writes 2048 there. A HookedTransformer's tables have `cfg.n_ctx` rows; with ALiBi it has none.

    Example:
        >>> from tl_coupling.models import context_length
        >>> context_length(model)
        32
    """
    cfg: Any = model.cfg
    limits = [] if getattr(cfg, "positional_embedding_type", None) == "alibi" else [cfg.n_ctx]
    config = _config(model) if is_bridge(model) else None
    if config is not None:
        # Only what is written there: RWKV has its training length answer to `max_position_embeddings`.
        held = (getattr(config, "text_config", None) or config).to_dict()
        declared = [held[field] for field in _CONTEXT_FIELDS if held.get(field)]
        # TransformerLens knows of rows that are not positions (RoBERTa).
        limits = [*declared, cfg.n_ctx] if declared else []
    return min((int(limit) for limit in limits if limit is not None and limit > 0), default=None)


def describe_model(model: Any, residual: Float[Tensor, "n_layers n_pos d_model"]) -> dict[str, Any]:
    """Provenance of a model, JSON-able; warns if its writing weights are centred."""
    parameter = next(model.parameters())
    processing = _weight_processing(model, residual)
    if "center_writing_weights" in processing:
        warnings.warn(
            "this model's writing weights are centred: its residual stream, Jacobians and trajectories differ from the "
            "raw model's; `tl_coupling.load_model` loads raw weights",
            stacklevel=3,
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
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Which of TransformerLens' weight processings the model shows."""
    found = []
    if str(getattr(model.cfg, "normalization_type", "")).endswith("Pre") and not is_bridge(model):
        found.append("fold_ln")
    if getattr(model, "compatibility_mode", False):
        found.append("enable_compatibility_mode")
    # Centring leaves every row of the stream with mean zero. So does a LayerNorm within the stream (BERT), but not in
    # the rows of the embedding, which centring writes as well.
    embedding = getattr(model, "W_E", None)
    if isinstance(embedding, Tensor) and embedding.is_floating_point() and not embedding.is_meta:
        # As far as rounding leaves it so; of other weights single rows come that near, never all.
        tolerance = 1e-5 if torch.finfo(embedding.dtype).bits > 16 else 1e-2
        if all(_have_mean_zero(rows, tolerance) for rows in (residual, embedding[:1000])):
            found.append("center_writing_weights")
    return found


def _have_mean_zero(rows: Tensor, tolerance: float) -> bool:
    rows = rows.detach().float()
    return bool((rows.mean(-1).abs() <= tolerance * rows.abs().mean(-1)).all())


def _config(bridge: nn.Module) -> Any:
    """The HuggingFace configuration of the model that a bridge wraps; None where that is no HuggingFace model."""
    original: Any = bridge.original_model
    return getattr(original, "config", None)


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
