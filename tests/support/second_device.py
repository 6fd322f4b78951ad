"""A second device for tests where there is no GPU: torch's dispatch key for private
backends, computed by the CPU.

`install()` makes `torch.device("second")` known to this process for good, so that it
belongs into a process of its own (autograd, for example, counts the devices once). From
torch's side this is a device like any other: autograd and `torch.func` reach it through
its dispatch key, backward passes run in its own thread, and views share memory. What a
kernel gets is checked as CUDA's kernels check it: operands on the CPU are refused,
unless they are single numbers, and so are random numbers from the CPU's generator. One
check is stricter: an index on the CPU is refused, which CUDA would copy to the device,
and wait. `.numpy()` is refused by torch itself, as is any other way to reach the
memory.

Device memory is memory of the CPU under another name: a DLPack capsule whose header
names the other device.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "second"
_aten = torch.ops.aten
# DLPack's numbers of the CPU and of a private device, and where in the capsule the
# number stands (after a pointer).
_CPU, _PRIVATE, _OFFSET = 1, 12, ctypes.sizeof(ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = (
    ctypes.c_void_p,
    [ctypes.py_object, ctypes.c_char_p],
)
# Views that are made by each backend; the CPU's kernels touch only sizes and strides,
# and share the storage, by whose number of users autograd decides whether it may add in
# place.
_VIEWS = (
    _aten.as_strided.default,
    _aten.view.default,
    _aten._reshape_alias.default,
    _aten.unfold.default,
)
# What the CPU has under another name, or not at all.
_IN_PLACE_OF: dict[Any, Callable[..., Any]] = {
    _aten.convolution_overrideable.default: _aten.convolution.default,
    _aten.convolution_backward_overrideable.default: lambda gradient, x, weight, *rest: (
        _aten.convolution_backward(gradient, x, weight, [len(weight)], *rest)
    ),
    _aten.histc.default: lambda x, *rest: _aten.histc(x.double(), *rest).to(x.dtype),
    # torch's zeros for forward mode have no memory.
    _aten._efficientzerotensor.default: _aten.zeros.default,
}
_libraries: list[torch.library.Library] = []


class _Module(_DummyBackendModule):
    """`torch.second`: what torch asks of a device's module."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def install() -> torch.device:
    """Make the device known."""
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, _Module())
        anything = torch.library.Library("_", "IMPL")
        anything.fallback(_computed_by_the_cpu, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("_copy_from", _copy, "PrivateUse1")
        for view in _VIEWS:
            aten.impl(
                view.name(),
                partial(view._op_dk, torch._C.DispatchKey.CPU),
                "PrivateUse1",
            )
        aten.impl("resize_", _resize, "PrivateUse1")
        for operation in _IN_PLACE_OF:
            aten.impl(
                operation.name(),
                partial(_computed_by_the_cpu, operation),
                "PrivateUse1",
            )
        _libraries.extend((anything, aten))
    return torch.device(NAME)


def _relabelled(x: Tensor, device: int) -> Tensor:
    """Return the same memory as a tensor on another device."""
    capsule = torch._C._to_dlpack(x)
    ctypes.cast(
        _pointer(capsule, b"dltensor") + _OFFSET, ctypes.POINTER(ctypes.c_int32)
    )[0] = device
    return torch._C._from_dlpack(capsule)


def _is_here(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def _on_cpu(x: Any) -> Any:
    """Return the same memory, or the same argument, for the CPU."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return _relabelled(x, _CPU) if _is_here(x) else x


def _copy(source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the one kernel whose operands may lie on different devices."""
    _on_cpu(destination).copy_(_on_cpu(source))
    return destination


def _resize(
    x: Tensor, size: list[int], *, memory_format: torch.memory_format | None = None
) -> Tensor:
    if x.shape == tuple(size):
        return x
    resized = torch.empty(size, dtype=x.dtype)
    n = min(x.numel(), resized.numel())
    resized.view(-1)[:n] = _relabelled(x, _CPU).reshape(-1)[:n]
    x.data = _relabelled(resized, _PRIVATE)
    return x


def _computed_by_the_cpu(
    operation: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> Any:
    """Any other kernel."""
    if any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in operation._schema.returns
    ):
        raise NotImplementedError(f"{operation} makes a view: add it to `_VIEWS`")
    # What is given, by what the CPU gets for it: in-place operations return what they
    # got.
    given: dict[int, tuple[Any, Any]] = {}

    def on_cpu(one: Any) -> Any:
        if isinstance(one, torch.Generator) and one.device.type != NAME:
            raise RuntimeError(
                f"{operation}: wanted a generator on {NAME}, got one on {one.device}"
            )
        if isinstance(one, Tensor) and not _is_here(one) and one.ndim:
            raise RuntimeError(
                f"{operation}: wanted all tensors on {NAME}, got one of shape "
                f"{list(one.shape)} on cpu"
            )
        theirs = _on_cpu(one)
        given[id(theirs)] = theirs, one
        return theirs

    outs = {
        argument.name: kwargs.pop(argument.name)
        for argument in operation._schema.arguments
        if argument.is_out and argument.name in kwargs
    }
    args, kwargs = (
        _each(on_cpu, args),
        {name: _each(on_cpu, one) for name, one in kwargs.items()},
    )
    # An output may have to grow, which foreign memory cannot.
    written = {name: on_cpu(out).clone() for name, out in outs.items()}
    output = _IN_PLACE_OF.get(operation, operation)(*args, **kwargs, **written)
    for name, out in outs.items():
        _resize(out, written[name].shape)
        _on_cpu(out).copy_(written[name])
        given[id(written[name])] = written[name], out

    def back(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return given[id(one)][1] if id(one) in given else _relabelled(one, _PRIVATE)

    return _each(back, output)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or what a list or tuple holds, changed."""
    return (
        type(value)(_each(change, item) for item in value)
        if isinstance(value, list | tuple)
        else change(value)
    )
