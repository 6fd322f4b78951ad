"""Models: loading them, what they are run on, and describing a loaded one."""

from tl_coupling.models.inputs import ModelInput, model_input, tokenize
from tl_coupling.models.loaded import (
    Change,
    ModelError,
    context_length,
    describe_kind,
    describe_model,
    describe_modules,
    is_bridge,
    is_packed,
    reads_pixels,
)
from tl_coupling.models.loading import EMBEDDED_MODEL, Backend, Memory, empty_model, load_model, named_device
from tl_coupling.models.quantized import Quantization, dequantising, is_gguf, needs_package
from tl_coupling.models.streaming import filled, is_hollow, looked_up, looks_up

__all__ = [
    "EMBEDDED_MODEL",
    "Backend",
    "Change",
    "Memory",
    "ModelError",
    "ModelInput",
    "Quantization",
    "context_length",
]
__all__ += ["dequantising", "describe_kind", "describe_model", "describe_modules", "empty_model", "filled", "is_bridge"]
__all__ += ["is_gguf", "is_hollow", "is_packed", "load_model", "looked_up", "looks_up", "model_input", "named_device"]
__all__ += ["needs_package", "reads_pixels", "tokenize"]
