"""Models: loading them, what they are run on, and describing a loaded one."""

from tl_coupling.models.inputs import ModelInput, model_input, tokenize
from tl_coupling.models.loaded import (
    ModelError,
    context_length,
    describe_kind,
    describe_model,
    describe_modules,
    is_bridge,
    reads_pixels,
)
from tl_coupling.models.loading import EMBEDDED_MODEL, Backend, load_model, named_device
from tl_coupling.models.quantized import Quantization, dequantising, dequantising_when_called, is_gguf

__all__ = ["EMBEDDED_MODEL", "Backend", "ModelError", "ModelInput", "context_length", "describe_kind", "describe_model"]
__all__ += ["describe_modules", "is_bridge", "load_model", "model_input", "named_device", "reads_pixels", "tokenize"]
__all__ += ["Quantization", "dequantising", "dequantising_when_called", "is_gguf"]
