"""Functions of torch, with what makes a block nonlinear held constant.

A block is a sum of linear maps of the stream whose coefficients depend on the stream.
Within `Freezing`, the coefficients are constants:

* **a norm**: the number by which it divides (`sqrt`, `rsqrt`, `std`, any denominator);
* **attention**: its pattern (`softmax`), and what else weighs rows or experts
  (`sigmoid`, `topk`);
* **an activation** `φ(x)`: the ratio `φ(x) / x`;
* **a gated MLP** `φ(g) · y`: its gate `φ(g)`.

Functions are known by their names, as torch calls them, whatever module calls them.
Only what is differentiated counts. A function that is not known is left alone: whether
the block became linear is seen by its values (`frozen`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.tensor_notes import TensorNotes

# Held as they are: scales, patterns, choices.
_CONSTANTS = {
    "softmax",
    "sqrt",
    "rsqrt",
    "std",
    "norm",
    "vector_norm",
    "reciprocal",
    "topk",
}
# Held as they are too, and gates: what they multiply is an activation.
_GATES = {"sigmoid", "exp", "softplus", "hardsigmoid"}
# Functions of one entry each that are zero at zero: the ratio is held.
_ACTIVATIONS = {
    "celu",
    "elu",
    "erf",
    "gelu",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "silu",
    "softsign",
    "square",
    "tanh",
}
# Their ratio is held, but they are no gates.
_BOUNDS = {"clamp", "clip", "clamp_max", "clamp_min"}
_PRODUCTS = {"mul", "multiply"}
_QUOTIENTS = {"div", "divide", "true_divide"}
# The outputs of these are no gates, whatever they get.
_MIXING = {
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    "linear",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "_grouped_mm",
    "grouped_mm",
    "grouped_mm_fallback",
}

_Function = Callable[..., Any]


# A mode, because the coefficients arise inside the block's own code, whoever wrote it.
class Freezing(TorchFunctionMode):
    """Context in which the coefficients of a block are constants.

    They are those of the call that is made in it, or those of a call that was
    `recorded`, once that is `replayed`. A tensor is differentiated if it requires
    gradients; weights must not.
    """

    def __init__(self) -> None:
        super().__init__()
        # Outputs of activations, which are gates of what they are multiplied with.
        self._gates: TensorNotes[bool] = TensorNotes()
        self._recorded: list[Tensor] | None = None
        self._replayed: Iterator[Tensor] | None = None
        # Makes a tensor one that is not differentiated.
        self._constant: Callable[[Tensor], Tensor] = Tensor.detach

    @contextmanager
    def holding(self, constant: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Hold values by this function: of a record, which sees what is detached."""
        self._constant = constant
        try:
            yield
        finally:
            self._constant = Tensor.detach

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Note the constants of a call, in order."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replayed(self, constants: Sequence[Tensor]) -> Iterator[None]:
        """Take these constants, in order, in place of the call's own."""
        self._replayed = iter(constants)
        try:
            yield
        finally:
            self._replayed = None

    def __torch_function__(
        self,
        func: _Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, or what it is with constants in it."""
        options = dict(kwargs or {})
        if not args and "input" in options:
            args = (options.pop("input"),)
        inputs = list(_tensors([args, options]))
        if not any(map(self._varies, inputs)):
            return func(*args, **options)
        name = _name_of(func)
        if name in _PRODUCTS and len(args) == 2:
            output = self._product(func, *args)
        else:
            output = self._called(func, name, args, options)
        is_gate = name in _ACTIVATIONS or name in _GATES
        if not is_gate and name not in _MIXING:
            is_gate = all(map(self._is_gate, filter(self._varies, inputs)))
        if is_gate or self._makes_gate(name, inputs):
            for tensor in _tensors(output):
                self._gates[tensor] = True
        return output

    # Functions with constants in them

    def _called(
        self, func: _Function, name: str, args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **options)
        if name == "multi_head_attention_forward":
            return self._run_composite(func, *args, **options)
        if name in _QUOTIENTS and len(args) > 1 and _is_differentiated(args[1]):
            return func(args[0], self._held(args[1]), *args[2:], **options)
        x: Any = args[0] if args else None
        if not _is_differentiated(x):
            return func(*args, **options)
        if name == "__rdiv__":
            return func(self._held(x), *args[1:], **options)
        if name == "pow":
            is_power = isinstance(args[1], int | float) and args[1] % 1 == 0 < args[1]
            name = "square" if is_power else "sqrt"
        if name in _CONSTANTS or name in _GATES:
            return self._held_all(func(*args, **options))
        if name in _ACTIVATIONS or name in _BOUNDS:
            # A copy: some write over what they get.
            return self._times_ratio(x, func(x.clone(), *args[1:], **options))
        if name == "layer_norm":
            return self._layer_norm(*args, **options)
        if name == "rms_norm":
            return self._rms_norm(*args, **options)
        if name == "glu":
            x, gate = x.chunk(2, *(args[1:] or options.values() or [-1]))
            return x * self._held(gate.sigmoid())
        output = func(*args, **options)
        is_choice = isinstance(output, Tensor) and not output.is_floating_point()
        return self._held(output) if is_choice else output

    def _product(self, func: _Function, left: Any, right: Any) -> Any:
        """Hold the gate of a product constant; of a square, the ratio.

        Where both factors are gates, or neither is, nothing says which to hold.
        """
        if not (_is_differentiated(left) and _is_differentiated(right)):
            return func(left, right)
        if left is right:
            return func(left, self._held(right))
        if self._is_gate(left) == self._is_gate(right):
            return func(left, right)
        if self._is_gate(left):
            return func(self._held(left), right)
        return func(left, self._held(right))

    def _times_ratio(self, x: Tensor, value: Tensor) -> Tensor:
        """Return `x · (value / x)`, the ratio held constant."""
        is_zero = x == 0
        ratio = torch.where(is_zero, torch.zeros_like(x), value / x)
        value_at_zero = torch.where(is_zero, value, torch.zeros_like(x))
        return x * self._held(ratio) + self._held(value_at_zero)

    def _layer_norm(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        dims = tuple(range(-len(normalized_shape), 0))
        centred = x - x.mean(dims, keepdim=True)
        output = self._rms_norm(centred, normalized_shape, weight, eps)
        return output if bias is None else output + bias

    def _rms_norm(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        dims = tuple(range(-len(normalized_shape), 0))
        if eps is None:
            eps = torch.finfo(x.dtype).eps
        scale = (x.square().mean(dims, keepdim=True) + eps).sqrt()
        output = x / self._held(scale)
        return output if weight is None else output * weight

    def _attention(
        self, func: _Function, query: Tensor, key: Tensor, *args: Any, **options: Any
    ) -> Any:
        return func(self._held(query), self._held(key), *args, **options)

    def _run_composite(self, func: _Function, *args: Any, **options: Any) -> Any:
        """Run a function of torch that is made of others, with constants in those."""
        # It would hand itself over once more: it asks `has_torch_function` (torch 2.13,
        # `nn.functional`). A copy of it asks one that says no.
        assert isinstance(func, FunctionType)
        scope = {**func.__globals__, "has_torch_function": lambda _: False}
        copy = FunctionType(func.__code__, scope, argdefs=func.__defaults__)
        with self:
            return copy(*args, **options)

    # Constants

    def _held_all(self, output: Any) -> Any:
        """Hold a tensor, or each of a named tuple (values and indices)."""
        if isinstance(output, Tensor):
            return self._held(output)
        return type(output)([self._held(tensor) for tensor in output])

    def _held(self, value: Tensor) -> Tensor:
        """Return a value as a constant: this one, or that of the recorded call."""
        constant = self._constant(value)
        if self._replayed is not None:
            constant = next(self._replayed)
        if self._recorded is not None:
            self._recorded.append(constant.clone())
        return constant

    # Gates

    def _is_gate(self, tensor: Tensor) -> bool:
        return self._gates.get(tensor) is True

    def _varies(self, tensor: Tensor) -> bool:
        """Say whether a tensor depends on the stream: it, or what was held of it."""
        return _is_differentiated(tensor) or self._is_gate(tensor)

    def _makes_gate(self, name: str, inputs: Sequence[Tensor]) -> bool:
        """Say whether a function makes an activation: it multiplies with a gate."""
        multiplies = name in _PRODUCTS or name in _QUOTIENTS
        return multiplies and any(map(self._is_gate, inputs))


def _name_of(func: _Function) -> str:
    """Return a function's name: in place or not, whichever side it is called from."""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        names = {"__itruediv__": "div", "__imul__": "mul", "__mul__": "mul"}
        return names.get(name, name)
    return name.removesuffix("_")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, also those inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _tensors(entry)


def _is_differentiated(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
