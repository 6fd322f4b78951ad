"""Two blocks merged into one: the first block with the mean of both blocks' weights."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tl_coupling.blocks.evaluation import attributes_set
from tl_coupling.blocks.functions import BlockFunction


@contextmanager
def mean_weights(first: BlockFunction, second: BlockFunction) -> Iterator[None]:
    """Context in which each parameter of `first` is the mean of its own and `second`'s; for blocks of one kind.

    Cost: memory for one block's weights.
    """
    with first.evaluation(), second.evaluation():
        pairs = zip(first.call.module.parameters(), second.call.module.parameters(), strict=True)
        with attributes_set((p, "data", (p.data + q.data) / 2) for p, q in pairs):
            yield


def differ_in(first: BlockFunction, second: BlockFunction) -> str | None:
    """Where two blocks are of different kinds, so that the mean of their weights is no block; `None` if nowhere.

    Blocks of one kind have the same modules with the same settings (window, rotary or not, scale) and buffers,
    parameters of the same names and shapes, and are called with the same arguments (mask, positions).
    """
    blocks = first.call.module, second.call.module
    parts = [dict(block.named_modules()) for block in blocks]
    if (name := _first_difference(*({n: type(m) for n, m in side.items()} for side in parts))) is not None:
        return f"module {name!r}"
    for name in parts[0]:
        # Plain attributes.
        ours, theirs = (
            {key: v for key, v in vars(side[name]).items() if isinstance(v, bool | int | float | str)} for side in parts
        )
        for key in ours | theirs:
            a, b = ours.get(key), theirs.get(key)
            if not _same_setting(a, b, first.layer, second.layer):
                return f"{key}, {a!r} and {b!r}, of module {name!r}"
    shapes = ({n: p.shape if p.is_floating_point() else None for n, p in b.named_parameters()} for b in blocks)
    if (name := _first_difference(*shapes)) is not None:
        return f"parameter {name!r}"
    if any(not p.is_floating_point() for p in blocks[0].parameters()):
        return "parameters that are not floating-point numbers"
    if (name := _first_difference(*(dict(block.named_buffers()) for block in blocks))) is not None:
        return f"buffer {name!r}"
    if (name := _first_difference(first.call.arguments, second.call.arguments)) is not None:
        return f"argument {name!r}"
    return None


def _same_setting(a: Any, b: Any, layer_a: int, layer_b: int) -> bool:
    """Whether two settings are equal, or differ only in that each names its own layer."""
    if isinstance(a, str) and isinstance(b, str):
        return re.sub(rf"\b{layer_a}\b", "layer", a) == re.sub(rf"\b{layer_b}\b", "layer", b)
    return bool(a == b) or (type(a) is type(b) is int and a - layer_a == b - layer_b)


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first name under which two mappings hold different things, or one of them nothing."""
    names = {**one, **other}
    return next((n for n in names if n not in one or n not in other or not _equal(one[n], other[n])), None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _first_difference(a, b) is None
    return a is b or bool(a == b)
