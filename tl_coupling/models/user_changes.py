"""What a user has changed of a model's code: hooks, forwards, classes."""

from collections.abc import Callable
from typing import Any

from torch import nn

# What these packages put on a module is how a model computes, and no intervention of the
# user's.
_PACKAGES_OF_MODELS = (
    "transformer_lens",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "torch",
)
# Where a module keeps a forward of its own, also below that of accelerate.
_OWN_FORWARDS = ("forward", "_old_forward", "_original_forward")


def is_of_user(function: object) -> bool:
    """Say whether a function, or a class, is in no package that models are made of."""
    function = getattr(function, "func", function)  # Of a `functools.partial`.
    package = str(getattr(function, "__module__", "")).split(".")[0]
    return package not in _PACKAGES_OF_MODELS


def hooks_on(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on a module's forward pass."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def backward_hooks_on(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on a module's gradients."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def changed_by_user(model: nn.Module) -> str | None:
    """Say what a user has changed of how a HuggingFace model computes, beside weights
    and configuration; None where nothing is.
    """
    for path, module in model.named_modules():
        change = _change(module)
        if change is not None:
            return f"{change} ({path or 'the model itself'})"
    return None


def _change(module: nn.Module) -> str | None:
    if any(map(is_of_user, [*hooks_on(module), *backward_hooks_on(module)])):
        return "a hook"
    own_forwards = (vars(module).get(name) for name in _OWN_FORWARDS)
    if any(is_of_user(forward) for forward in own_forwards if forward is not None):
        return "a forward of its own"
    kind: Any = type(module)
    if is_of_user(kind):
        return f"a module of a class of yours, {kind.__name__}"
    if is_of_user(kind.forward) or is_of_user(kind.__call__):
        return f"{kind.__name__} with another forward"
    return None
