"""A loaded model: its kind, where it came from, how it was processed, its context."""

import importlib.metadata
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import warn_caller
from tl_coupling.models.digests import weights_digest
from tl_coupling.models.facts import facts_of
from tl_coupling.models.own_model import OwnModel, adapters_in_words

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
_WANTED = (
    "wanted a decoder (GPT-2, Llama, …), an encoder of text (BERT, …) or a vision "
    "transformer (ViT, …)"
)
# Rows of the embedding whose mean shows whether writing weights are centred.
_N_ROWS_OF_EMBEDDING = 1000


def is_bridge(model: nn.Module) -> bool:
    """Say whether this wraps a HuggingFace model, as a TransformerBridge and an
    `OwnModel` do, rather than a HookedTransformer.
    """
    return getattr(model, "original_model", None) is not None


def config_of(bridge: nn.Module) -> Any:
    """Return the HuggingFace configuration of the model that a bridge wraps; None for
    models of another origin.
    """
    return getattr(bridge.original_model, "config", None)


def describe_kind(model: nn.Module) -> str | None:
    """Say why a model has no single residual stream, as an end of "this model is …".

    None if it has one.
    """
    if is_bridge(model):
        kind = kind_of_config(config_of(model))
        if kind:
            return kind
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return None
    stacks = [
        repr(name)
        for name, module in model.named_children()
        if isinstance(module, nn.ModuleList)
    ]
    structure = "it has no list of blocks"
    if stacks:
        structure = f"its stacks are {', '.join(stacks)}"
    return f"a model without one stack of blocks, `blocks`: {structure}; {_WANTED}"


def kind_of_config(config: Any) -> str | None:
    """Say the same as `describe_kind` of a HuggingFace configuration, before any weights
    are read.
    """
    from transformer_lens.utilities.architectures import AUDIO_ARCHITECTURES

    if getattr(config, "is_encoder_decoder", False):
        return (
            "an encoder–decoder (sequence-to-sequence) model: two stacks of blocks, "
            "each with its own residual stream (`tl_coupling.trace_modules` takes the "
            f"blocks of one); {_WANTED}"
        )
    architectures = set(getattr(config, "architectures", None) or ())
    if architectures & AUDIO_ARCHITECTURES:
        return f"an audio model: it reads sound; {_WANTED}"
    return None


def is_packed(part: nn.Module) -> bool:
    """Say whether this is a linear layer of bitsandbytes whose weight is quantised, to
    4 or 8 bits.
    """
    weight = part._parameters.get("weight")
    if weight is None:
        return False
    # Those that are not on a device yet, or are quantised at each call, hold floats.
    is_int8 = weight.dtype == torch.int8 and hasattr(weight, "SCB")
    return is_int8 or getattr(weight, "quant_state", None) is not None


def has_packed_parts(model: nn.Module) -> bool:
    """Say whether some linear layers of a model are quantised."""
    return any(map(is_packed, model.modules()))


def reads_pixels(model: Any) -> bool:
    """Say whether this is a bridge of a vision model (ViT, DeiT)."""
    return bool(getattr(model.cfg, "is_visual_model", False))


def context_length(model: Any) -> int | None:
    """Return how many tokens a model's context holds; None if nothing limits it.

    What the configuration declares: a table of positions (GPT-2, BERT), or the length
    given for rotary and ALiBi models. State-space models (Mamba, RWKV) and ALiBi models
    without one (BLOOM) have no limit, though TransformerLens puts 2048 there. A
    HookedTransformer's tables have `cfg.n_ctx` rows; with ALiBi it has none.

    Example:
        >>> tlc.models.context_length(model) >= trace.n_pos
        True
    """
    config = config_of(model) if is_bridge(model) else None
    if config is not None:
        # `to_dict`, because RWKV answers `max_position_embeddings` with its training
        # length.
        fields = (getattr(config, "text_config", None) or config).to_dict()
        limits = [fields[name] for name in _CONTEXT_FIELDS if fields.get(name)]
        # RoBERTa's table has rows that are not positions; TransformerLens leaves them
        # out.
        if limits:
            limits.append(model.cfg.n_ctx)
    elif getattr(model.cfg, "positional_embedding_type", None) == "alibi":
        limits = []
    else:
        limits = [model.cfg.n_ctx]
    lengths = [int(limit) for limit in limits if limit is not None and limit > 0]
    return min(lengths, default=None)


def describe_model(
    model: Any, residual: Float[Tensor, "n_layers n_pos d_model"]
) -> dict[str, object]:
    """Return the provenance of a model, JSON-able; warn if its writing weights are
    centred.
    """
    processing = _weight_processing(model, residual)
    if "center_writing_weights" in processing:
        warn_caller(
            "this model's writing weights are centred: its residual stream, Jacobians "
            "and trajectories differ from the raw model's; `tl_coupling.load_model` "
            "loads raw weights"
        )
    own_name = getattr(model.cfg, "model_name", type(model).__name__)
    adapters = None
    if isinstance(model, OwnModel):
        adapters = adapters_in_words(model.original_model)
    return {
        **(facts_of(model).loaded_as or {"model": own_name}),
        **({} if adapters is None else {"adapter": adapters}),
        "backend": _backend(model),
        "architecture": type(getattr(model, "original_model", model)).__name__,
        **_common_provenance(model, residual),
        "weight_processing": processing or ["none"],
    }


def _backend(model: nn.Module) -> str:
    if isinstance(model, OwnModel):
        return "huggingface"
    return "bridge" if is_bridge(model) else "hooked"


def missing_head(model: nn.Module) -> str | None:
    """Say why a loaded model's logits mean nothing: its checkpoint lacks weights behind
    the body, which are random.
    """
    return facts_of(model).loaded_as.get("head")


def describe_modules(
    blocks: nn.Module, name: str, residual: Float[Tensor, "n_layers n_pos d_model"]
) -> dict[str, object]:
    """Return the provenance of residual blocks whose model is not known, JSON-able."""
    classes = dict.fromkeys(type(block).__name__ for block in blocks.children())
    return {
        "model": name,
        "backend": "modules",
        "architecture": ", ".join(classes),
        **_common_provenance(blocks, residual),
    }


def _common_provenance(model: nn.Module, residual: Tensor) -> dict[str, object]:
    weight = next(model.parameters(), residual)
    # A weight that accelerate has put elsewhere is on `meta` until it is needed.
    device = residual.device if weight.is_meta else weight.device
    n_params = facts_of(model).loaded_as.get("n_params")
    return {
        "d_model": int(residual.shape[-1]),
        "n_params": n_params or sum(map(n_weights, model.parameters())),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(device),
        "weights_digest": weights_digest(model),
        **_quantization(model),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def n_weights(parameter: Tensor) -> int:
    """Return how many numbers a weight has, where it is packed in fewer bytes too."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _quantization(model: nn.Module) -> dict[str, str]:
    """Say how packed layers are quantised; what is measured are their dequantised
    weights.
    """
    packed = filter(is_packed, model.modules())
    kinds = sorted({_packed_as(part) for part in packed})
    if not kinds:
        return {}
    return {
        "quantization": ", ".join(kinds),
        "weights": "dequantised, one block at a time",
    }


def _packed_as(part: nn.Module) -> str:
    state: Any = getattr(part.weight, "quant_state", None)
    return "int8" if state is None else str(state.quant_type)


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Return which of TransformerLens' weight processings were applied."""
    applied = []
    normalization = str(getattr(model.cfg, "normalization_type", ""))
    # LNPre and RMSPre: the norm without its weights, which were folded into the next
    # layer.
    if normalization.endswith("Pre") and not is_bridge(model):
        applied.append("fold_ln")
    if getattr(model, "compatibility_mode", False):
        applied.append("enable_compatibility_mode")
    # After centring every row of the stream has mean zero. A LayerNorm within the
    # stream (BERT) does that too, but only centring does it to the rows of the
    # embedding.
    embedding = getattr(model, "W_E", None)
    if not isinstance(embedding, Tensor) or embedding.is_meta:
        return applied
    if embedding.is_floating_point():
        # Up to rounding. Single rows of other weights come this close, never all.
        tolerance = 1e-5 if torch.finfo(embedding.dtype).bits > 16 else 1e-2
        first_rows = embedding[:_N_ROWS_OF_EMBEDDING]
        if all(_is_centred(rows, tolerance) for rows in (residual, first_rows)):
            applied.append("center_writing_weights")
    return applied


def _is_centred(rows: Tensor, tolerance: float) -> bool:
    # Half precision would round the mean itself.
    rows = rows.detach().float()
    return bool((rows.mean(-1).abs() <= tolerance * rows.abs().mean(-1)).all())


@cache
def version(package: str) -> str:
    """Return which version of a package is installed."""
    distributions = importlib.metadata.distributions(name=package)
    installed = next(iter(distributions), None)
    return "not installed" if installed is None else installed.version
