"""Functions without a slope, and those that hide theirs from autograd, told by their
names.

Where the steps of a staircase are wider than the moves of the slope check, it looks
constant there, and only its name reveals it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

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
# They give values of a tensor that no gradient follows.
_DETACHES = {"detach", "detach_", "__get__"}
# They give its values as numbers, or change its gradient.
_HIDES = {"item", "tolist", "numpy", "__float__", "register_hook"}


# A mode, because the calls are in the block's own code, and leave no other trace.
class Stairs(TorchFunctionMode):
    """Context that notes a function with slope zero, if one is differentiated in it,
    and what stops a gradient that would have been part of the derivative.

    `called` is the name of the last such function, or None; `stop` what stopped a
    gradient last.
    """

    called: str | None = None
    stop: str | None = None

    def __init__(self) -> None:
        super().__init__()
        # Tensors that no gradient follows, by what stopped it.
        self._stopped = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call the function, and note its name if it has slope zero."""
        output = func(*args, **(kwargs or {}))
        self._note_stops(func, [*args, *(kwargs or {}).values()], output)
        if (name := _stairs_name(func, output)) and _is_differentiated(args[0]):
            self.called = name
        return output

    def _note_stops(
        self, func: Callable[..., Any], arguments: list[Any], output: object
    ) -> None:
        """Note what stops a gradient: where its values become numbers, or meet what is
        differentiated.
        """
        name: str = getattr(func, "__name__", "")
        inputs = list(tensors_in(arguments))
        is_differentiated = any(map(_is_differentiated, inputs))
        origins = [
            self._stopped[x]
            for x in inputs
            if not x.requires_grad and x in self._stopped
        ]
        if not is_differentiated and not origins:
            return
        # Its values leave torch: whatever comes of them has no gradient.
        if name in _HIDES:
            self.stop = name
        elif not origins and name not in _DETACHES and torch.is_grad_enabled():
            return
        for tensor in tensors_in([output]):
            if not tensor.is_floating_point():
                continue
            if tensor.requires_grad and origins:
                self.stop = origins[0]
            elif not tensor.requires_grad:
                self._stopped[tensor] = origins[0] if origins else _word(name)


def _word(name: str) -> str:
    """Return what stopped a gradient, as it is written."""
    if name not in _DETACHES:
        return "no_grad"
    return "data" if name == "__get__" else name


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in tuples and lists of them."""
    # A stack, because this runs for every operation of a block.
    unread = list(values)
    while unread:
        value = unread.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            unread.extend(value)


def _stairs_name(func: Callable[..., Any], output: object) -> str | None:
    """Return the name of a function of torch if it has slope zero."""
    if isinstance(func, OpOverloadPacket) and str(func).startswith("quantized."):
        return str(func)
    name: str = getattr(func, "__name__", "")
    is_whole = isinstance(output, Tensor) and not output.is_floating_point()
    if name in _STAIRS or (name in _CASTS and is_whole):
        return name
    return None


def _is_differentiated(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
