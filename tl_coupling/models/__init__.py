"""Models: loading them, tokenising for them, and describing a loaded one."""

from tl_coupling.models.loaded import context_length, describe_kind, describe_model, is_bridge, str_tokens, tokenize
from tl_coupling.models.loading import EMBEDDED_MODEL, Backend, ModelError, load_model, named_device

__all__ = ["EMBEDDED_MODEL", "Backend", "ModelError", "context_length", "describe_kind", "describe_model"]
__all__ += ["is_bridge", "load_model", "named_device", "str_tokens", "tokenize"]
