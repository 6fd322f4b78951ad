"""What annotations ask for: a kind of value, in words, and how it is taken from what a caller gives."""

import collections.abc
import inspect
import itertools
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

# How what is wanted is made, by its class.
_MAKERS = {
    "BlockFunction": "`trace.blocks` holds them",
    "CouplingMap": "`tl_coupling.depth_coupling(trace)` makes one",
    "Generalization": "`tl_coupling.generalization_study(data, scores)` makes one",
    "Influence": "`tl_coupling.cross_token_influence(trace)` makes one",
    "Linearisation": "`tl_coupling.linearisation(trace)` makes one",
    "Module": "`tl_coupling.load_model(name)` makes one",
    "Perturbation": "`tl_coupling.perturbation(trace)` makes one",
    "Portrait": "`tl_coupling.portrait(trace)` makes one",
    "Prompt": "`tl_coupling.Prompt(id, text)` makes one",
    "Settings": "`tl_coupling.Settings(k=…)` makes one",
    "Spectrum": "`tl_coupling.svd(J)` makes one",
    "Survey": "`tl_coupling.Survey(models, prompts)` makes one",
    "Trace": "`tl_coupling.trace(model, prompt)` makes one",
    "dtype": "torch.float32 is one",
}


class _Size(NamedTuple):
    """A named size of this call, and the argument that set it."""

    size: Any
    argument: str


Sizes = dict[str, _Size]


class OtherKind(Exception):
    """The value is of another kind; holds what to do about it, if that is known."""


@dataclass(frozen=True)
class Kind:
    """What an annotation asks for, in words, and how a value is taken: returned as it is meant, or refused.

    `take(value, name, sizes)` raises `OtherKind`, or ValueError with the rest of a sentence that begins with the name.
    """

    one: str
    many: str
    take: Callable[[Any, str, Sizes], Any]


def kind_of(annotation: Any) -> Kind:
    """What an annotation asks for."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin is Annotated:
        return _restricted(kind_of(inside[0]), inside[1:])
    if origin is Literal:
        return _one_of(inside)
    if origin in (typing.Union, types.UnionType):
        return _either([kind_of(one) for one in inside])
    if origin is collections.abc.Callable:
        return Kind("a function", "functions", _is(callable))
    if origin in (collections.abc.Sequence, tuple):
        return _list_of(kind_of(inside[0]), tuple if origin is tuple else None)
    if origin in (collections.abc.Mapping, dict):
        return _mapping(origin, kind_of(inside[0]), kind_of(inside[1]))
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return _array(annotation)
    if inspect.isclass(origin or annotation):
        return _instance(origin or annotation)
    return _SIMPLE[Any]


def _is(right: Callable[[Any], bool], meant: Callable[[Any], Any] | None = None) -> Callable[[Any, str, Sizes], Any]:
    def take(value: Any, _: str, __: Sizes) -> Any:
        if not right(value):
            raise OtherKind
        return value if meant is None else meant(value)

    return take


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool | np.bool_)


_SIMPLE: dict[Any, Kind] = {
    Any: Kind("anything", "anything", _is(lambda _: True)),
    None: Kind("None", "None", _is(lambda value: value is None)),
    types.NoneType: Kind("None", "None", _is(lambda value: value is None)),
    bool: Kind("True or False", "truth values", _is(lambda value: isinstance(value, bool | np.bool_), bool)),
    int: Kind("a whole number", "whole numbers", _is(lambda value: _is_number(value, Integral), int)),
    float: Kind("a number", "numbers", _is(lambda value: _is_number(value, Real), float)),
    str: Kind("a text", "texts", _is(lambda value: isinstance(value, str))),
    Literal[False]: Kind("False", "False", _is(lambda value: value is False)),
}


def _instance(wanted: type) -> Kind:
    room = wanted.__module__.partition(".")[0]
    name = (
        wanted.__name__
        if room in ("tl_coupling", "builtins", "collections", "pathlib")
        else f"{room}.{wanted.__name__}"
    )
    name = {nn.Module: "torch.nn.Module", os.PathLike: "path"}.get(wanted, name)

    def take(value: Any, _: str, __: Sizes) -> Any:
        # A class is not what it makes, though it has the same methods.
        if not isinstance(value, wanted) or isinstance(value, type):
            raise OtherKind(_MAKERS.get(wanted.__name__, ""))
        return value

    return Kind(f"{'an' if name[0] in 'aeiouAEIOUx' else 'a'} {name}", f"{name}s", take)


def _restricted(kind: Kind, rules: Sequence[Callable[[Any], None]]) -> Kind:
    def take(value: Any, name: str, sizes: Sizes) -> Any:
        value = kind.take(value, name, sizes)
        for rule in rules:
            rule(value)
        return value

    return Kind(kind.one, kind.many, take)


def _one_of(choices: tuple[Any, ...]) -> Kind:
    few = len(choices) < 3
    wanted = " or ".join(f'"{choice}"' for choice in choices) if few else f"one of {', '.join(choices)}"

    def take(value: Any, _: str, __: Sizes) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be {wanted}, got {shown(value)}")
        return value

    return Kind(wanted, wanted, take)


def _either(kinds: list[Kind]) -> Kind:
    """Of several kinds; `None` is named last. Where one fits but for its value, that is what is said."""
    last = [kind for kind in kinds if kind.one != "None"]
    # A whole number is a number.
    ones = [kind.one for kind in last if not (kind.one == "a whole number" and any(k.one == "a number" for k in last))]
    wanted = " or ".join(dict.fromkeys([*ones, *(["None"] if len(last) < len(kinds) else [])]))
    many = " or ".join(dict.fromkeys(kind.many for kind in last if kind.one in ones))

    def take(value: Any, name: str, sizes: Sizes) -> Any:
        wrong: ValueError | None = None
        hints: dict[str, None] = {}
        for kind in kinds:
            own = dict(sizes)
            try:
                value = kind.take(value, name, own)
            except OtherKind as hint:
                hints |= {str(hint): None}
            except ValueError as error:
                wrong = wrong or error
            else:
                sizes.update(own)
                return value
        raise wrong or OtherKind("; ".join(filter(None, hints)))

    return Kind(wanted, many, take)


def _list_of(kind: Kind, into: type | None) -> Kind:
    def take(value: Any, name: str, sizes: Sizes) -> Any:
        if isinstance(value, str | bytes | Mapping | type):
            raise OtherKind
        # numpy's, pandas' and torch's one-dimensional ones.
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, Sequence):
            # What can be walked through only once is, here. A set has no order.
            if not isinstance(items, collections.abc.Iterator | collections.abc.ValuesView | collections.abc.KeysView):
                raise OtherKind
            items = tuple(items)
        held = [kind.take(item, name, sizes) for item in items]
        if into is not None:
            return into(held)
        return items if all(map(_same, held, items)) else held

    return Kind(f"a list of {kind.many}", f"lists of {kind.many}", take)


def _mapping(wanted: Any, keys: Kind, values: Kind) -> Kind:
    what = f"from {keys.many} to {values.many}"

    def take(value: Any, name: str, sizes: Sizes) -> Any:
        if not isinstance(value, wanted):
            raise OtherKind
        # Results that are drawn side by side may have sizes of their own.
        held = {keys.take(k, name, {}): values.take(v, name, dict(sizes)) for k, v in value.items()}
        return value if all(map(_same, held.values(), value.values())) else held

    return Kind(f"a mapping {what}", f"mappings {what}", take)


def _same(one: Any, other: Any) -> bool:
    return one is other


def _array(annotation: Any) -> Kind:
    dims = [part.partition("=")[2] or part for part in annotation.dim_str.split()]
    shape = "[" + " ".join("…" if "*" in dim or dim == "..." else dim for dim in dims).replace("_plus_1", "+1") + "]"
    floating = "float32" in annotation.dtypes
    tensor = annotation.array_type is Tensor
    content = {True: "floating-point ", False: ""}[floating]
    noun = f"{content}torch tensor" if tensor else f"{content}array"

    def take(value: Any, name: str, sizes: Sizes) -> Any:
        value = _as_tensor(value) if tensor else _as_floats(value)
        if str(value.dtype).removeprefix("torch.") not in annotation.dtypes:
            raise OtherKind("convert it with `.float()` or `.double()`" if floating and tensor else "")
        _hold_shape(tuple(value.shape), dims, shape, name, sizes)
        return value

    return Kind(f"a {noun} {shape}", f"{noun}s {shape}", take)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        # A copy: torch takes none that is read-only, runs backwards or has foreign bytes.
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")).copy())
    if not isinstance(value, Tensor):
        raise OtherKind
    return value


def _as_floats(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iuf" or isinstance(value, str):
            raise OtherKind
        return array if array.dtype.kind == "f" else array.astype(float)
    except (TypeError, ValueError):
        raise OtherKind from None


def _hold_shape(found: tuple[int, ...], dims: list[str], shape: str, name: str, sizes: Sizes) -> None:
    """Raise ValueError unless the shape fits, also with the sizes that other arguments have set."""
    given = f"got [{' '.join(map(str, found))}]"
    spread = [i for i, dim in enumerate(dims) if "*" in dim or dim == "..."]
    n_spread = len(found) - len(dims) + 1
    if n_spread < 0 or (not spread and n_spread != 1):
        raise ValueError(f"must have shape {shape}, {given}")
    sides = iter(found)
    for i, dim in enumerate(dims):
        size: Any = tuple(itertools.islice(sides, n_spread)) if i in spread else next(sides)
        key = dim.strip("*#")
        if dim == "..." or key.startswith("_"):
            continue
        known = _Size(int(key), name) if key.isdecimal() else sizes.setdefault(key, _Size(size, name))
        if size != known.size and not ("#" in dim and _spreads(size, known.size)):
            why = f" with {key} = {_plain(known.size)} as in `{known.argument}`" if known.argument != name else ""
            raise ValueError(f"must have shape {shape}{why}, {given}")


def _spreads(size: Any, over: Any) -> bool:
    """Whether axes of this size are repeated to fill those, as in a sum of tensors."""
    if isinstance(size, int):
        return size == 1
    padded = (1,) * (len(over) - len(size)) + size
    return len(padded) == len(over) and all(one in (1, whole) for one, whole in zip(padded, over, strict=True))


def _plain(size: Any) -> str:
    return str(size) if isinstance(size, int) else f"[{' '.join(map(str, size))}]"


def shown(value: Any) -> str:
    """A value in a few words, on one line."""
    if isinstance(value, Tensor | np.ndarray):
        what = "tensor" if isinstance(value, Tensor) else "array"
        return f"a {what} of {value.dtype} and shape [{' '.join(map(str, value.shape))}]"
    held: Any = [value]
    if isinstance(value, list | tuple | set):
        held = value
    elif isinstance(value, dict):
        held = [*value, *value.values()]
    if all(isinstance(part, str | bytes | complex | Real | type | torch.dtype | None) for part in held):
        return " ".join(reprlib.repr(value).split())
    return f"a {type(value).__name__}" if isinstance(value, list | tuple | dict | set) else type(value).__name__
