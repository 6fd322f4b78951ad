"""Models: loading them, what they are run on, and describing a loaded one."""

from tl_coupling.models.inputs import ModelInput, model_input, tokenize
from tl_coupling.models.loaded import (
    context_length,
    describe_kind,
    describe_model,
    describe_modules,
    is_bridge,
    reads_pixels,
)
from tl_coupling.models.loading import (
    EMBEDDED_MODEL,
    Backend,
    Memory,
    ModelError,
    empty_model,
    load_model,
    named_device,
)
from tl_coupling.models.streaming import filled, is_hollow, looked_up, looks_up

__all__ = ["EMBEDDED_MODEL", "Backend", "Memory", "ModelError", "ModelInput", "context_length", "describe_kind"]
__all__ += ["describe_model", "describe_modules", "empty_model", "filled", "is_bridge", "is_hollow", "load_model"]
__all__ += ["looked_up", "looks_up", "model_input", "named_device", "reads_pixels", "tokenize"]
