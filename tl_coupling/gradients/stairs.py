"""Functions without a slope, and those that hide theirs from autograd, told by their
names.

Where the steps of a staircase are wider than the moves of the slope check, it looks
constant there, and only its name reveals it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

_STAIRS = {
    "round",
    "floor",
    "ceil",
    "trunc",
    "fix",
    "quantize_per_tensor",
    "quantize_per_channel",
}
# They round where they give whole numbers.
_CASTS = {"to", "type", "long", "int", "short", "char"}
# They give the values of a tensor without its gradient, or change that.
# A computation without gradients. It may be beside the step: norms of TransformerLens's
# bridges compute for their hooks what the model computes by itself.
NO_GRAD = "no_grad"
_STOPS = {
    "detach",
    "detach_",
    "item",
    "tolist",
    "numpy",
    "__float__",
    "register_hook",
}


class Stairs(TorchFunctionMode):
    """Context that notes a function with slope zero, if one is differentiated in it,
    and what stops a gradient.

    `called` is the name of the last such function, or None; `stop` what stopped a
    gradient first: `NO_GRAD` only where nothing else did.
    """

    called: str | None = None
    stop: str | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function, and note its name if it has slope zero."""
        output = func(*args, **(kwargs or {}))
        stop = _stop(func, args, output)
        if stop and self.stop in (None, NO_GRAD):
            self.stop = stop
        if (name := _stairs_name(func, output)) and _is_differentiated(args[0]):
            self.called = name
        return output


def _stairs_name(func: Callable[..., Any], output: object) -> str | None:
    """Return the name of a function of torch if it has slope zero."""
    if isinstance(func, OpOverloadPacket) and str(func).startswith("quantized."):
        return str(func)
    name: str = getattr(func, "__name__", "")
    is_whole = isinstance(output, Tensor) and not output.is_floating_point()
    if name in _STAIRS or (name in _CASTS and is_whole):
        return name
    return None


def _stop(func: Callable[..., Any], args: Sequence[Any], output: object) -> str | None:
    """Return what keeps a differentiated tensor's gradient from an output."""
    if not any(map(_is_differentiated, args)):
        return None
    name: str = getattr(func, "__name__", "")
    if name in _STOPS:
        return name
    if not isinstance(output, Tensor) or output.requires_grad:
        return None
    if name == "__get__" and output.is_floating_point():
        return "data"
    return None if torch.is_grad_enabled() else NO_GRAD


def _is_differentiated(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
