"""Two blocks merged into one: the first block with the mean of both blocks' weights."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tl_coupling.blocks.functions import BlockFunction


@contextmanager
def mean_weights(first: BlockFunction, second: BlockFunction) -> Iterator[None]:
    """While the context lasts, each parameter of `first` is the mean of its own and `second`'s; then as it was.

    For blocks of one kind (`differ_in`). Not `torch.func.functional_call`, as in `BlockFunction.evaluation`.

    Cost: memory for one block's weights.
    """
    with first.evaluation(), second.evaluation():
        parameters = list(first.call.module.parameters())
        originals = [p.data for p in parameters]
        try:
            for p, q in zip(parameters, second.call.module.parameters(), strict=True):
                p.data = (p.data + q.data) / 2
            yield
        finally:
            for p, original in zip(parameters, originals, strict=True):
                p.data = original


def differ_in(first: BlockFunction, second: BlockFunction) -> str | None:
    """Where two blocks are of different kinds, so that the mean of their weights is no block; `None` if nowhere.

    Blocks of one kind have the same modules with the same settings (window, rotary or not, scale) and buffers,
    parameters of the same names and shapes, and are called with the same arguments (mask, positions).
    """
    ours, theirs = first.call.module, second.call.module
    modules = dict(ours.named_modules()), dict(theirs.named_modules())
    if (name := _first_difference(*({n: type(m) for n, m in side.items()} for side in modules))) is not None:
        return f"module {name!r}"
    for name, module in modules[0].items():
        settings = _settings(module), _settings(modules[1][name])
        for key in {**settings[0], **settings[1]}:
            a, b = (side.get(key) for side in settings)
            if not _same_setting(a, b, first.layer, second.layer):
                return f"{key}, {a!r} and {b!r}, of module {name!r}"
    shapes = ({n: p.shape if p.is_floating_point() else None for n, p in m.named_parameters()} for m in (ours, theirs))
    if (name := _first_difference(*shapes)) is not None:
        return f"parameter {name!r}"
    if any(not p.is_floating_point() for p in ours.parameters()):
        return "parameters that are not floating-point numbers"
    if (name := _first_difference(dict(ours.named_buffers()), dict(theirs.named_buffers()))) is not None:
        return f"buffer {name!r}"
    if (name := _first_difference(first.call.arguments, second.call.arguments)) is not None:
        return f"argument {name!r}"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module."""
    return {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}


def _same_setting(a: Any, b: Any, layer_a: int, layer_b: int) -> bool:
    """Whether two settings are equal, or differ only in that each names its own layer."""
    if isinstance(a, str) and isinstance(b, str):
        return re.sub(rf"\b{layer_a}\b", "layer", a) == re.sub(rf"\b{layer_b}\b", "layer", b)
    if type(a) is type(b) is int and a - layer_a == b - layer_b:
        return True
    return bool(a == b)


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first name under which two mappings hold different things, or one of them nothing."""
    for name in {**one, **other}:
        if name not in one or name not in other or not _equal(one[name], other[name]):
            return name
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _first_difference(a, b) is None
    return a is b or bool(a == b)
