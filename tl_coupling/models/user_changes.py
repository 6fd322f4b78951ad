"""What a user has put on a model's modules: hooks."""

from collections.abc import Callable

from torch import nn

# Hooks that these packages put on a module are part of how a model computes, and no
# intervention of the user's.
_PACKAGES_OF_MODELS = (
    "transformer_lens",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "torch",
)


def is_of_user(function: object) -> bool:
    """Say whether a function is in no package that models are made of."""
    function = getattr(function, "func", function)  # Of a `functools.partial`.
    package = str(getattr(function, "__module__", "")).split(".")[0]
    return package not in _PACKAGES_OF_MODELS


def hooks_on(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on a module's forward pass."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def backward_hooks_on(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on a module's gradients."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
