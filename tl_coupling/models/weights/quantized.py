"""Quantised weights: loading them, and the changes that make modules compute with the
numbers that they stand for.

What is measured of a quantised model is the model of its dequantised weights: kernels
for packed weights round the activations too (int8) or compute in half precision, and
integers have no derivative. bitsandbytes' layers stay packed in memory and are
dequantised block by block; what else transformers can dequantise, it does on loading.
"""

import copy
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs
from tl_coupling.models.formats import (
    FLOAT_INSTEAD,
    format_of_fields,
    quantization_fields,
)
from tl_coupling.models.loaded import is_packed, version
from tl_coupling.models.module_state import Change

Quantization = Literal["nf4", "int8"]
_BITSANDBYTES = ("nf4", "fp4", "int8")
_INSTALL = {
    "bitsandbytes": 'pip install "tl-coupling[quantized]"',
    "compressed_tensors": f"pip install compressed-tensors, or {FLOAT_INSTEAD}",
    "gguf": "pip install gguf",
    "peft": (
        "pip install peft, or measure the base model, without `adapter_config.json` in "
        "its folder"
    ),
}


def dequantised(part: Any) -> Float[Tensor, "d_out d_in"]:
    """Return the weight of a packed layer: int8 as float32, 4 bits in the dtype that was
    quantised.

    Of int8, each row is integers times its scale / 127; of 4 bits, each block of 64
    entries is numbers of a table of 16 times its scale, two to a byte, the first in its
    upper half (Dettmers et al. 2022, 2023). Not by bitsandbytes, whose kernel for the
    CPU (0.50.2) takes other scales where rows are not whole blocks.
    """
    weight = part.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        # bitsandbytes moves the scales from the weight to the layer's state when it is
        # first run.
        scales = part.state.SCB if weight.SCB is None else weight.SCB
        return weight.data * (scales[:, None] / 127)
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "bitsandbytes has rounded the scales of these 4-bit weights to bfloat16, as "
            "it does when a model is run on this processor: load the model again, and "
            "measure it before it is run"
        )
    if state.absmax.dim() != 1:
        raise ValueError(
            "these 4-bit weights were saved after bitsandbytes had run them on a CPU, "
            "with their scales in another order: quantise the float checkpoint again"
        )
    # A byte holds two numbers: a table of all pairs looks both up at once.
    pairs = torch.cartesian_prod(state.code.float(), state.code.float())
    packed = weight.data.view(torch.uint8).flatten().int()
    values = pairs.index_select(0, packed).flatten()[: state.shape.numel()]
    scaled = _scaled(values, _scales(state), state.blocksize)
    return scaled.view(state.shape).to(state.dtype)


def _scales(state: Any) -> Float[Tensor, " n_blocks"]:
    """Return the scale of each block of 4-bit weights; they may be quantised
    themselves.
    """
    if not state.nested:
        return state.absmax
    inner = state.state2
    values = inner.code.index_select(0, state.absmax.flatten().int())
    # Nested (double) quantisation: scales less their mean, in 8 bits.
    return _scaled(values, inner.absmax, inner.blocksize).add_(state.offset)


def _scaled(
    values: Float[Tensor, " n"], scales: Float[Tensor, " n_blocks"], size: int
) -> Float[Tensor, " n"]:
    """Multiply blocks of values with their scales, in place; the last block may be
    shorter.
    """
    n_whole = len(values) // size
    values[: n_whole * size].view(-1, size).mul_(scales[:n_whole, None])
    # The sum is the one scale of a last, shorter block, or 0 where there is none.
    values[n_whole * size :].mul_(scales[n_whole:].sum())
    return values


def dequantising(part: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Yield changes that make a packed layer a linear one with its dequantised weight
    in `dtype`.
    """
    weight = nn.Parameter(dequantised(part).to(dtype), requires_grad=False)
    yield part, "__class__", nn.Linear
    yield part, "weight", weight
    # Where accelerate placed the model, the layer has a `forward` of its own, which
    # calls this one.
    if "_old_forward" in vars(part):
        yield part, "_old_forward", nn.Linear.forward.__get__(part)


def needs_package(user: str, package: str) -> None:
    """Raise ModelError unless a package is there that something needs."""
    if importlib.util.find_spec(package) is None:
        raise ModelError(
            f"{user} needs {package}, which is not installed: {_INSTALL[package]}"
        )
    # When it is imported it warns that a package of kernels is missing, which are not
    # used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def how_saved(config: Any) -> str | None:
    """Say how the weights of a checkpoint are quantised, by its HuggingFace
    configuration: "nf4", "fp8", "gptq", …; None for one that is not.
    """
    fields = quantization_fields(config)
    if fields is None:
        return None
    if fields.get("load_in_8bit"):
        return "int8"
    if fields.get("load_in_4bit"):
        return str(fields.get("bnb_4bit_quant_type", "fp4"))
    method = fields.get("quant_method")
    if method is None:
        return format_of_fields(fields)
    return str(getattr(method, "value", method))


def described(quantization: Quantization | None, saved_as: str | None) -> LoadedAs:
    """Return the provenance of weights that are quantised on loading, or were when they
    were saved; nothing for others.
    """
    if quantization is None and saved_as is None:
        return {}
    quantized = "as saved"
    if quantization is not None:
        quantized = f"on loading, by bitsandbytes {version('bitsandbytes')}"
    return {
        "quantization": quantization or str(saved_as),
        "quantized": quantized,
        "weights": "dequantised on loading",
    }


def refuse_format(name: str, config: Any) -> None:
    """Raise ModelError on a checkpoint that is quantised so that transformers cannot
    dequantise it, or not without a package that is missing.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    fields = quantization_fields(config)
    saved_as = how_saved(config)
    if fields is None or saved_as is None or saved_as in _BITSANDBYTES:
        return
    kind: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(saved_as)
    # Methods whose configuration has this switch are those that transformers can
    # dequantise.
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise ModelError(
            f"{name!r} is quantised with {format_of_fields(fields)}, which "
            f"transformers does not dequantise: {FLOAT_INSTEAD}"
        )
    if saved_as == "compressed-tensors":
        user = f"{name!r}, which is saved in {format_of_fields(fields)},"
        needs_package(user, "compressed_tensors")


def refuse_streaming(name: str, quantization: str | None) -> None:
    """Raise ModelError on quantised weights where weights are to be left in their
    files.
    """
    if quantization is not None:
        raise ModelError(
            '`memory="stream"` reads weights in floating point, but those of '
            f"{name!r} are quantised or are to be ({quantization}): leave one of the "
            "two out"
        )


def loading_options(
    name: str,
    config: Any,
    quantization: Quantization | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return what HuggingFace's `from_pretrained` needs to quantise a checkpoint, or to
    load one that is quantised.

    Args:
        name: the model's name in error messages.
        config: the checkpoint's HuggingFace configuration.
        quantization: what was asked for.
        device: where the weights go.
        dtype: of what stays in floating point.

    Raises:
        ModelError: a checkpoint that transformers cannot dequantise, or that is to be
            quantised and is so already; a missing package.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    saved_as = how_saved(config)
    place = {"device_map": {"": device}}
    if quantization and saved_as:
        raise ModelError(
            f"{name!r} is quantised already ({saved_as}): leave `quantization` out"
        )
    if quantization:
        needs_package(f'`quantization="{quantization}"`', "bitsandbytes")
        return {
            **place,
            "quantization_config": _bitsandbytes_config(quantization, dtype),
        }
    if saved_as is None:
        return {}
    if saved_as in _BITSANDBYTES:
        needs_package(f"{name!r}, which is saved in {saved_as},", "bitsandbytes")
        return place
    refuse_format(name, config)
    kind: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[saved_as]
    return {**place, "quantization_config": kind(dequantize=True)}


def _bitsandbytes_config(quantization: Quantization, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def has_foreign_weights(model: nn.Module) -> bool:
    """Say whether a weight is neither of floating point nor of a packed layer: what a
    bridge made of packed weights.
    """
    packed = {id(part.weight) for part in filter(is_packed, model.modules())}
    return not all(p.is_floating_point() or id(p) in packed for p in model.parameters())


def unpacked(model: Any) -> nn.Module:
    """Return the same HuggingFace model with dequantised weights, for bridges that take
    fused matrices apart.
    """
    config = drop_quantization(model.config)
    plain = type(model)._from_config(
        config, dtype=model.dtype, attn_implementation=config._attn_implementation
    )
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers())
    for name, part in model.named_modules():
        if is_packed(part):
            weight = dequantised(part)
            # bitsandbytes holds GPT-2's matrices, which are [d_in d_out], as those of
            # linear layers.
            if not issubclass(getattr(part, "source_cls", nn.Linear), nn.Linear):
                weight = weight.mT
            state[f"{name}.weight"] = weight
    # The packed model's state has scales and tables besides.
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    return plain.to(model.device)


def drop_quantization(config: Any) -> Any:
    """Return a copy of a HuggingFace configuration that says nothing of
    quantisation.
    """
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    return plain
