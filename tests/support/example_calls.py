"""Calls that the examples in docstrings make: every public function has one."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tl_coupling as tlc
from fingerprints import fingerprint
from test_public_names import examples


class Call(NamedTuple):
    """A call that an example makes, and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Watched:
    """A module whose functions are the same, and note each call of one of them."""

    def __init__(self, module: Any, function: Callable[..., Any], calls: list[Call]):
        self.module, self.function, self.calls = module, function, calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if inspect.ismodule(value):
            return Watched(value, self.function, self.calls)
        return self.noted if value is self.function else value

    def noted(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(list(a) if inspect.isgenerator(a) else a for a in args)
        # These objects: a trace may come to hold more.
        given = tensors_of((args, kwargs))
        before = fingerprint(given)
        call = Call(as_given(args), as_given(kwargs), self.function(*args, **kwargs))
        assert fingerprint(given) == before, "it wrote to these"
        self.calls.append(call)
        return call.result


def as_given(arguments: Any) -> Any:
    """Return arguments with generators as they are now: a call draws from them."""
    if isinstance(arguments, torch.Generator):
        return arguments.clone_state()
    if isinstance(arguments, dict):
        return {name: as_given(value) for name, value in arguments.items()}
    if type(arguments) in (list, tuple):
        return type(arguments)(map(as_given, arguments))
    return arguments


def calls_in_example(function: Callable[..., Any], names: dict[str, Any]) -> list[Call]:
    """Return the calls of a function in its example, which finds these names."""
    calls: list[Call] = []
    names = {**names, "tlc": Watched(tlc, function, calls)}
    for example in examples(function):
        exec(example.source, names)
    assert calls, f"the example of {function.__qualname__} does not call it"
    return calls


def tensors_of(value: Any) -> list[Any]:
    """Return the tensors and arrays in arguments, also those of models and results."""
    if isinstance(value, Tensor | np.ndarray):
        return [value]
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in tensors_of(entry)]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    if type(value).__module__.startswith("tl_coupling"):
        return tensors_of(vars(value)) if hasattr(value, "__dict__") else []
    if hasattr(value, "variables"):
        return [variable.values for variable in value.variables.values()]
    return []
