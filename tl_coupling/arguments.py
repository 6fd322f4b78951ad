"""Checks of the arguments of public functions, with errors of one line; warnings that
point at the caller's line.
"""

import functools
import importlib
import inspect
import math
import operator
import os
import reprlib
import sys
import types
import typing
import warnings
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

_Public = TypeVar("_Public", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
# Named sizes of one call, and the argument that set each.
_Sizes = dict[str, tuple[list[int], str]]

# In the singular, in the plural, what is accepted, what it becomes.
_SIMPLE: dict[Any, tuple[str, str, Any, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        (Any, inspect.Parameter.empty),
        ("anything", "anything", object, lambda value: value),
    ),
    types.NoneType: ("None", "None", types.NoneType, lambda value: value),
    bool: ("True or False", "booleans", (bool, np.bool_), bool),
    int: ("a whole number", "whole numbers", Integral, int),
    float: ("a number", "numbers", Real, float),
    str: ("a string", "strings", str, lambda value: value),
}
_NOUNS = {nn.Module: "torch.nn.Module", os.PathLike: "path", Callable: "function"}
# How an instance of a class is made, in words that the class gives where it is defined.
_MAKERS: dict[type, str] = {}


def _rule(fits: Callable[[Any], bool], wanted: str) -> Callable[[Any], None]:
    def hold(value: Any) -> None:
        if not fits(value):
            raise ValueError(f"must {wanted}, got {value!r}")

    return hold


def at_least(least: int) -> Callable[[Any], None]:
    """Annotates a number that must not be smaller."""
    return _rule(lambda value: value >= least, f"be at least {least}")


def _device(device: str | torch.device) -> None:
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(
            f'must be a device such as "cpu" or "cuda:0", got {device!r}'
        ) from None


def _of_whole_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of one (a lone surrogate), which no file can hold"
        raise ValueError(
            f"must be text in Unicode, got {ascii(text)[:80]}: {half}"
        ) from None


# Not of paths: a file may have a name that is not UTF-8.
Text = Annotated[str, _of_whole_characters]
AnyPath = Annotated[
    str | os.PathLike[str], _rule(lambda path: bool(os.fspath(path)), "not be empty")
]
Count = Annotated[int, at_least(1)]
Seed = Annotated[int, at_least(0)]
Device = Annotated[str | torch.device, _device]
_FLOATING = "be a floating-point dtype such as torch.float32"
FloatDtype = Annotated[
    torch.dtype, _rule(lambda dtype: dtype.is_floating_point, _FLOATING)
]
Finite = Annotated[float, _rule(math.isfinite, "be finite")]
Positive = Annotated[
    float, _rule(lambda value: 0 < value < math.inf, "be above 0 and finite")
]


def checked(public: _Public) -> _Public:
    """Check the arguments of a function, or of a dataclass when one is made, against
    their annotations.

    What is unambiguous is converted: numpy's numbers to Python's, numpy arrays to
    tensors, lists to arrays or tuples. A size that is named twice must be the same in
    all arguments of a call; of jaxtyping's marks, `*` and `#` are read. In `Annotated`,
    a string is a hint for the error message and a function raises ValueError on what it
    excludes.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong shape, or a value that the annotation excludes.
    """
    if isinstance(public, type):
        public.__init__ = checked(public.__init__)  # type: ignore[misc]
        return public
    # At the first call, when everything that the annotations name exists.
    evaluated = functools.cache(lambda: _signature(public))

    @functools.wraps(public)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        try:
            given = evaluated().bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{public.__qualname__}: {error}") from None
        sizes: _Sizes = {}
        for name, value in given.arguments.items():
            parameter = evaluated().parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                value |= {
                    option: _taken(parameter.annotation, one, option, sizes)
                    for option, one in value.items()
                }
            else:
                given.arguments[name] = _taken(parameter.annotation, value, name, sizes)
        return public(*given.args, **given.kwargs)

    return typing.cast(_Public, with_checks)


def made_by(call: str) -> Callable[[_Class], _Class]:
    """Return a class decorator that records how an instance is made.

    Where an argument should be an instance and is not, the error message names `call`,
    an expression that follows `tl_coupling.`, such as `"svd(J)"`.
    """

    def record(cls: _Class) -> _Class:
        _MAKERS[cls] = call
        return cls

    return record


def check_text(text: str, name: str) -> None:
    """Raise ValueError, naming the argument, unless the text has whole characters
    alone.
    """
    _taken(Text, text, name, {})


def _signature(public: Callable[..., Any]) -> inspect.Signature:
    """With annotations evaluated that are strings, because pandas and xarray are
    imported only where they are used.
    """
    texts = str(inspect.unwrap(public).__annotations__)
    late = {
        module: importlib.import_module(module)
        for module in ("pandas", "xarray")
        if module in texts
    }
    return inspect.signature(public, locals=late, eval_str=True)


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that led here, however many calls lie
    between.
    """
    level, frame = 1, sys._getframe()
    inside = ("tl_coupling", "jaxtyping", "contextlib")
    while (
        frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inside
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class _WrongType(Exception):
    """Holds a hint at what to do, or nothing."""


def _taken(kind: Any, value: Any, name: str, sizes: _Sizes) -> Any:
    """The value, converted to what its annotation asks for; or an error that names the
    argument.
    """
    try:
        return _take(kind, value, name, sizes)
    except _WrongType as error:
        raise TypeError(
            f"`{name}` must be {_words(kind)}, got {_shown(value)}{str(error) and f': {error}'}"
        ) from None
    except ValueError as error:
        raise ValueError(f"`{name}` {error}") from None


def _take(kind: Any, value: Any, name: str, sizes: _Sizes) -> Any:
    """As `_taken`; raises `_WrongType`, or ValueError with the rest of a sentence that
    begins with the name.
    """
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        _, _, accepted, convert = _SIMPLE[kind]
        if not isinstance(value, accepted) or (
            kind in (int, float) and isinstance(value, bool | np.bool_)
        ):
            raise _WrongType
        return convert(value)
    if origin is Annotated:
        try:
            value = _take(inside[0], value, name, sizes)
        except _WrongType as hint:
            raise _WrongType(
                next((rule for rule in inside[1:] if isinstance(rule, str)), hint)
            ) from None
        for rule in filter(callable, inside[1:]):
            rule(value)
        return value
    if origin is Literal:
        if any(isinstance(value, type(one)) and value == one for one in inside):
            return value
        raise ValueError(f"must be {_words(kind)}, got {_shown(value)}")
    if origin in (typing.Union, types.UnionType):
        errors: list[Exception] = []
        for one in inside:
            # A value of another type than the literals is meant for another member.
            if typing.get_origin(one) is Literal and not isinstance(
                value, tuple(map(type, typing.get_args(one)))
            ):
                continue
            try:
                return _take(one, value, name, sizes)
            except (_WrongType, ValueError) as error:
                errors.append(error)
        # The error of one that accepts the type but not the value says most.
        hints = dict.fromkeys(filter(None, map(str, errors)))
        raise next(
            (error for error in errors if isinstance(error, ValueError)),
            _WrongType("; ".join(hints)),
        )
    if origin in (Sequence, tuple):
        items = (
            value.tolist()
            if hasattr(value, "tolist") and not isinstance(value, type)
            else value
        )
        items = (
            tuple(items)
            if isinstance(items, Iterator | ValuesView | KeysView)
            else items
        )
        # A set has no order.
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise _WrongType
        held = [_take(inside[0], item, name, sizes) for item in items]
        return (
            tuple(held)
            if origin is tuple
            else items
            if all(map(operator.is_, held, items))
            else held
        )
    if inspect.isclass(kind) and issubclass(kind, AbstractArray):
        return _take_array(kind, value, name, sizes)
    # A class is not its instance, though it has the same methods; but it can be called.
    if not isinstance(value, wanted := origin or kind) or (
        isinstance(value, type) and wanted is not Callable
    ):
        maker = _MAKERS.get(wanted)
        raise _WrongType(f"`tl_coupling.{maker}` makes one" if maker else "")
    if origin in (Mapping, dict):
        # Results that are drawn side by side may have sizes of their own.
        pairs = {
            _take(inside[0], k, name, {}): _take(inside[1], v, name, dict(sizes))
            for k, v in value.items()
        }
        return (
            value if all(map(operator.is_, pairs.values(), value.values())) else pairs
        )
    return value


def _take_array(kind: Any, value: Any, name: str, sizes: _Sizes) -> Any:
    """As `_take`, of what has the shape that other arguments' sizes demand; sets the
    sizes that it has.
    """
    hint = ""
    if kind.array_type is not Tensor:
        try:
            value = np.asarray(
                value.detach().cpu() if isinstance(value, Tensor) else value
            )
        except (TypeError, ValueError):
            raise _WrongType from None
        value = value.astype(float) if value.dtype.kind in "iu" else value
    elif (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "biuf"
        and value.dtype.itemsize <= 8
    ):
        # A copy: torch refuses arrays that are read-only, reversed or in foreign byte
        # order.
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")).copy())
    elif not isinstance(value, Tensor):
        raise _WrongType
    elif "float32" in kind.dtypes:
        hint = "convert it with `.float()` or `.double()`"
    if str(value.dtype).removeprefix("torch.") not in kind.dtypes:
        raise _WrongType(hint)
    shape, dims, wanted = list(value.shape), kind.dim_str.split(), _axes(kind)
    given, n_spread = f"got {_row(shape)}", len(shape) - len(dims) + 1
    if n_spread < 0 or (n_spread != 1 and "…" not in wanted):
        raise ValueError(f"must have shape {wanted}, {given}")
    found = dict(sizes)
    for dim in dims:
        n_axes = n_spread if "*" in dim else 1
        size, shape = shape[:n_axes], shape[n_axes:]
        known, source = found.setdefault(key := dim.strip("*#"), (size, name))
        pairs = zip(reversed(size), reversed(known), strict=False)
        repeats = (
            "#" in dim
            and len(size) <= len(known)
            and all(one in (1, whole) for one, whole in pairs)
        )
        if size != known and not repeats:
            why = (
                f" with {key} = {_row(known) if '*' in dim else known[0]} as in `{source}`"
                if source != name
                else ""
            )
            raise ValueError(f"must have shape {wanted}{why}, {given}")
    sizes.update(found)
    return value


def _axes(kind: Any) -> str:
    return _row(
        "…" if "*" in dim else dim.replace("_plus_1", "+1")
        for dim in kind.dim_str.split()
    )


def _row(axes: Iterable[Any]) -> str:
    return f"[{' '.join(map(str, axes))}]"


def _words(kind: Any, several: bool = False) -> str:
    """What an annotation asks for, in words: one of them or several."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        one, many, _, _ = _SIMPLE[kind]
        return many if several else one
    if origin is Annotated:
        return _words(inside[0], several)
    if origin is Literal:
        choices = [f'"{one}"' if isinstance(one, str) else str(one) for one in inside]
        return (
            " or ".join(choices)
            if len(inside) < 3
            else f"one of {', '.join(map(str, inside))}"
        )
    if origin in (typing.Union, types.UnionType):
        # A whole number is a number. None is named last.
        kinds = [
            one
            for one in inside
            if one is not types.NoneType and not (one is int and float in inside)
        ]
        kinds += [types.NoneType] if types.NoneType in inside and not several else []
        *first, last = dict.fromkeys(_words(one, several) for one in kinds)
        return f"{', '.join(first)} or {last}" if first else last
    rest = ""
    if origin in (Sequence, tuple):
        noun, rest = "list", f" of {_words(inside[0], True)}"
    elif origin in (Mapping, dict):
        noun, rest = (
            "mapping",
            f" from {_words(inside[0], True)} to {_words(inside[1], True)}",
        )
    elif inspect.isclass(kind) and issubclass(kind, AbstractArray):
        content = (
            "floating-point "
            if "float32" in kind.dtypes
            else "integer "
            if "int32" in kind.dtypes
            else ""
        )
        noun, rest = (
            f"{content}{'torch tensor' if kind.array_type is Tensor else 'array'}",
            f" {_axes(kind)}",
        )
    elif (wanted := origin or kind) in _NOUNS:
        noun = _NOUNS[wanted]
    else:
        room = wanted.__module__.partition(".")[0]
        noun = f"{room}.{wanted.__name__}".removeprefix("tl_coupling.").removeprefix(
            "builtins."
        )
    return (
        f"{noun}s{rest}"
        if several
        else f"{'an' if noun[0] in 'aeiouAEIOUx' else 'a'} {noun}{rest}"
    )


def _shown(value: Any) -> str:
    """A value in a few words, on one line."""
    if isinstance(value, Tensor | np.ndarray):
        what = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{what} of {value.dtype} and shape {_row(value.shape)}"
    name, several = type(value).__name__, isinstance(value, list | tuple | set | dict)
    parts = (
        [*value, *value.values()]
        if isinstance(value, dict)
        else value
        if several
        else [value]
    )
    if all(
        isinstance(part, str | bytes | complex | Real | type | torch.dtype | None)
        for part in parts
    ):
        return " ".join(reprlib.repr(value).split())
    return f"a {name}" if several else name
