"""Models: loading them, tokenising for them, and describing a loaded one."""

from tl_coupling.models.description import context_length, describe_kind, describe_model, is_bridge
from tl_coupling.models.embedded import EMBEDDED_INSTALL, EMBEDDED_MODEL
from tl_coupling.models.errors import ModelError
from tl_coupling.models.loading import Backend, load_model, named_device
from tl_coupling.models.tokens import str_tokens, tokenize

__all__ = ["EMBEDDED_INSTALL", "EMBEDDED_MODEL", "Backend", "ModelError", "load_model", "named_device"]
__all__ += ["context_length", "describe_kind", "describe_model", "is_bridge", "str_tokens", "tokenize"]
