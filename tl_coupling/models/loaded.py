"""A loaded model: its kind, where it came from, how it was processed, its context."""

import hashlib
import importlib.metadata
import weakref
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import warn_caller

# How models were loaded, as long as they live.
LOADED_AS: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = (
    weakref.WeakKeyDictionary()
)

_PACKAGES = ("tl-coupling", "transformer-lens", "transformers", "torch", "numpy")
# In which fields of a HuggingFace configuration models declare how many positions they
# have.
_CONTEXT_FIELDS = (
    "n_positions",
    "max_position_embeddings",
    "max_context_length",
    "max_seq_len",
    "max_sequence_length",
)
_WANTED = "wanted a decoder (GPT-2, Llama, …), an encoder of text (BERT, …) or a vision transformer (ViT, …)"


# Of each dimension of a weight, about how many places go into the checksum.
_SAMPLED = 4
# An object, one of its attributes, and the value that this is to have.
Change = tuple[Any, str, Any]


class ModelError(ValueError):
    """A model could not be loaded; the message says what to do.

    Example:
        >>> try:
        ...     model = tlc.load_model("./no-such-folder")
        ... except tlc.ModelError as error:
        ...     print(str(error)[:32])
        could not load './no-such-folder
    """


def is_bridge(model: nn.Module) -> bool:
    """Whether this is a TransformerBridge (which wraps a HuggingFace model) rather than
    a HookedTransformer.
    """
    return getattr(model, "original_model", None) is not None


def describe_kind(model: nn.Module) -> str | None:
    """Why a model has no single residual stream, as an end of "this model is …"; None
    if it has one.
    """
    if is_bridge(model) and (kind := kind_of_config(config_of(model))):
        return kind
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return None
    stacks = [
        name
        for name, module in model.named_children()
        if isinstance(module, nn.ModuleList)
    ]
    found = (
        f"its stacks are {', '.join(map(repr, stacks))}"
        if stacks
        else "it has no list of blocks"
    )
    return f"a model without one stack of blocks, `blocks`: {found}; {_WANTED}"


def kind_of_config(config: Any) -> str | None:
    """As `describe_kind`, from a HuggingFace configuration, before any weights are
    read.
    """
    from transformer_lens.utilities.architectures import AUDIO_ARCHITECTURES

    named = set(getattr(config, "architectures", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        streams = "two stacks of blocks, each with its own residual stream"
        return f"an encoder–decoder (sequence-to-sequence) model: {streams}; {_WANTED}"
    return (
        f"an audio model: it reads sound; {_WANTED}"
        if named & AUDIO_ARCHITECTURES
        else None
    )


def is_packed(part: nn.Module) -> bool:
    """Whether this is a linear layer of bitsandbytes whose weight is quantised, to 4 or
    8 bits.
    """
    weight = part._parameters.get("weight")
    # Those that are not on a device yet, or are quantised at each call, hold floats.
    is_int8 = (
        weight is not None and weight.dtype == torch.int8 and hasattr(weight, "SCB")
    )
    return is_int8 or getattr(weight, "quant_state", None) is not None


def _packed_as(part: Any) -> str:
    """How a packed layer's weight is quantised."""
    state = getattr(part.weight, "quant_state", None)
    return "int8" if state is None else str(state.quant_type)


def reads_pixels(model: Any) -> bool:
    """Whether this is a bridge of a vision model (ViT, DeiT)."""
    return bool(getattr(model.cfg, "is_visual_model", False))


def context_length(model: Any) -> int | None:
    """How many tokens a model's context holds; None where the architecture sets no
    limit.

    What the configuration declares: a table of positions (GPT-2, BERT), or the length
    given for rotary and ALiBi models. State-space models (Mamba, RWKV) and ALiBi models
    without one (BLOOM) have no limit, though TransformerLens puts 2048 there. A
    HookedTransformer's tables have `cfg.n_ctx` rows; with ALiBi it has none.

    Example:
        >>> tlc.models.context_length(model) >= trace.n_pos
        True
    """
    limits = (
        []
        if getattr(model.cfg, "positional_embedding_type", None) == "alibi"
        else [model.cfg.n_ctx]
    )
    if is_bridge(model) and (config := config_of(model)) is not None:
        # `to_dict`, because RWKV answers `max_position_embeddings` with its training
        # length.
        held = (getattr(config, "text_config", None) or config).to_dict()
        declared = [held[field] for field in _CONTEXT_FIELDS if held.get(field)]
        # RoBERTa's table has rows that are not positions; TransformerLens leaves them
        # out.
        limits = [*declared, model.cfg.n_ctx] if declared else []
    return min(
        (int(limit) for limit in limits if limit is not None and limit > 0),
        default=None,
    )


def describe_model(
    model: Any, residual: Float[Tensor, "n_layers n_pos d_model"]
) -> dict[str, Any]:
    """Provenance of a model, JSON-able; warns if its writing weights are centred."""
    processing = _weight_processing(model, residual)
    if "center_writing_weights" in processing:
        warn_caller(
            "this model's writing weights are centred: its residual stream, Jacobians and trajectories differ from the "
            "raw model's; `tl_coupling.load_model` loads raw weights"
        )
    return LOADED_AS.get(
        model, {"model": getattr(model.cfg, "model_name", type(model).__name__)}
    ) | {
        "backend": "bridge" if is_bridge(model) else "hooked",
        "architecture": type(getattr(model, "original_model", model)).__name__,
        **_sizes(model, residual),
        "weight_processing": processing or ["none"],
    }


def missing_head(model: nn.Module) -> str | None:
    """Why a loaded model's logits mean nothing: weights behind its body that its
    checkpoint lacks, and are random.
    """
    return LOADED_AS.get(model, {}).get("head")


def describe_modules(
    blocks: nn.Module, name: str, residual: Float[Tensor, "n_layers n_pos d_model"]
) -> dict[str, Any]:
    """Provenance of residual blocks whose model is not known, JSON-able."""
    return {
        "model": name,
        "backend": "modules",
        "architecture": ", ".join(
            dict.fromkeys(type(block).__name__ for block in blocks.children())
        ),
        **_sizes(blocks, residual),
    }


def _sizes(model: nn.Module, residual: Tensor) -> dict[str, Any]:
    weight = next(model.parameters(), residual)
    return {
        "d_model": int(residual.shape[-1]),
        "n_params": LOADED_AS.get(model, {}).get("n_params")
        or sum(map(_n_weights, model.parameters())),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "weights_digest": _weights_digest(model),
        **_quantization(model),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def _weights_digest(model: nn.Module) -> str | None:
    """What tells models of one name apart: a checksum of a few weights of every
    parameter; None where it has none.

    The same on every device, and in every dtype that holds the weights exactly. A
    change of single weights may escape it. None for a streamed model, whose weights are
    in its files.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_meta:
            return None
        steps = (
            slice(None, None, max(1, size // _SAMPLED)) for size in parameter.shape
        )
        sample = parameter.detach()[tuple(steps)].float().cpu()
        if bool(sample.isnan().any()):
            return None
        digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _n_weights(parameter: Tensor) -> int:
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _quantization(model: nn.Module) -> dict[str, str]:
    """Of packed layers, how they are quantised; what is measured are their dequantised
    weights.
    """
    kinds = sorted({_packed_as(part) for part in model.modules() if is_packed(part)})
    return (
        {
            "quantization": ", ".join(kinds),
            "weights": "dequantised, one block at a time",
        }
        if kinds
        else {}
    )


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Which of TransformerLens' weight processings were applied."""
    folded = str(getattr(model.cfg, "normalization_type", "")).endswith(
        "Pre"
    ) and not is_bridge(model)
    found = ["fold_ln"] if folded else []
    found += (
        ["enable_compatibility_mode"]
        if getattr(model, "compatibility_mode", False)
        else []
    )
    # After centring every row of the stream has mean zero. A LayerNorm within the
    # stream (BERT) does that too, but only centring does it to the rows of the
    # embedding.
    embedding = getattr(model, "W_E", None)
    if (
        isinstance(embedding, Tensor)
        and embedding.is_floating_point()
        and not embedding.is_meta
    ):
        # Up to rounding. Single rows of other weights come this close, never all.
        tolerance = 1e-5 if torch.finfo(embedding.dtype).bits > 16 else 1e-2
        both = [rows.detach().float() for rows in (residual, embedding[:1000])]
        if all(
            bool((rows.mean(-1).abs() <= tolerance * rows.abs().mean(-1)).all())
            for rows in both
        ):
            found.append("center_writing_weights")
    return found


def config_of(bridge: nn.Module) -> Any:
    """The HuggingFace configuration of the model that a bridge wraps; None for models
    of other origin.
    """
    return getattr(bridge.original_model, "config", None)


@cache
def version(package: str) -> str:
    """Which version of a package is installed."""
    return next(
        (found.version for found in importlib.metadata.distributions(name=package)),
        "not installed",
    )
