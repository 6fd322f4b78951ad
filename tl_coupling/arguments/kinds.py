"""The kinds of values that annotations ask for.

Each kind says which values it accepts, what they become, and how it is called in an
error message. `kind_of` reads an annotation.
"""

import inspect
import operator
import os
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

from tl_coupling.arguments.messages import counted, described, format_shape

_Class = TypeVar("_Class", bound=type)

# How an instance of a class is made, as `made_by` says where the class is defined.
MAKERS: dict[type, str] = {}
# Nouns for classes of other libraries; other classes go by their own names.
_NOUNS: dict[object, str] = {
    nn.Module: "torch.nn.Module",
    os.PathLike: "path",
    Callable: "function",
}


def made_by(call: str) -> Callable[[_Class], _Class]:
    """Return a class decorator that records how an instance is made.

    Where an argument should be an instance and is not, the error message names `call`,
    an expression that follows `tl_coupling.`, such as `"svd(J)"`.
    """

    def record(cls: _Class) -> _Class:
        MAKERS[cls] = call
        return cls

    return record


class WrongType(Exception):
    """A value has the wrong type; the message is a hint at what to do, or empty."""


class Size(NamedTuple):
    """The lengths of a named axis, or of the axes that `*name` stands for.

    `source` is the argument that set them.
    """

    lengths: list[int]
    source: str


# The sizes of the axes that were named in a call so far.
Sizes = dict[str, Size]


class Argument(NamedTuple):
    """A value that was passed to a function, or an item of one.

    `sizes` holds the axes of the arguments that were checked before, and belongs to the
    whole call.
    """

    value: object
    name: str
    sizes: Sizes


class Kind(ABC):
    """What an annotation asks for."""

    @abstractmethod
    def convert(self, argument: Argument) -> object:
        """Return the value, converted where it is clear what is meant.

        Raises:
            WrongType: the value has the wrong type.
            ValueError: it has a wrong shape, or is excluded; the message continues a
                sentence that begins with the name of the argument.
        """

    @abstractmethod
    def words(self, several: bool = False) -> str:
        """Return what is accepted in words, in the singular or in the plural."""


@dataclass(frozen=True)
class _Simple(Kind):
    """A value of one of Python's simple types, or of the same type in numpy."""

    singular: str
    plural: str
    accepted: type | tuple[type, ...]
    constructor: Callable[[Any], object] | None = None
    is_number: bool = False

    def convert(self, argument: Argument) -> object:
        """Return the value, numpy's as Python's; truth values are not numbers.

        An array of no axes is a number, but not a whole one.
        """
        value = argument.value
        # A mean or a loss is often still an array of no axes.
        if self.accepted is Real and isinstance(value, Tensor | np.ndarray):
            value = value if value.ndim else value.item()
        # In Python True is 1, and `k=True` is a slip.
        is_truth_value = isinstance(value, bool | np.bool_)
        if not isinstance(value, self.accepted) or (self.is_number and is_truth_value):
            raise WrongType
        return value if self.constructor is None else self.constructor(value)

    def words(self, several: bool = False) -> str:
        """Return as in "a whole number"."""
        return self.plural if several else self.singular


_ANYTHING = _Simple("anything", "anything", object)
_NONE = _Simple("None", "None", types.NoneType)
_TRUTH = _Simple("True or False", "booleans", (bool, np.bool_), bool)
_WHOLE = _Simple("a whole number", "whole numbers", Integral, int, is_number=True)
_NUMBER = _Simple("a number", "numbers", Real, float, is_number=True)
_TEXT = _Simple("a string", "strings", str)
_SIMPLE: dict[object, _Simple] = {
    Any: _ANYTHING,
    inspect.Parameter.empty: _ANYTHING,
    types.NoneType: _NONE,
    bool: _TRUTH,
    int: _WHOLE,
    float: _NUMBER,
    str: _TEXT,
}


class _Annotated(Kind):
    """A kind with what `Annotated` adds to it.

    A string is a hint for the error message, a function raises ValueError on what it
    excludes.
    """

    def __init__(self, kind: Kind, metadata: Sequence[object]) -> None:
        self.kind = kind
        self.hints = [entry for entry in metadata if isinstance(entry, str)]
        self.rules: list[Callable[..., object]] = list(filter(callable, metadata))

    def convert(self, argument: Argument) -> object:
        """Return the value as its kind does, unless a rule excludes it."""
        try:
            value = self.kind.convert(argument)
        except WrongType as error:
            raise WrongType(*self.hints[:1] or error.args) from None
        except ValueError as error:
            raise ValueError(": ".join([str(error), *self.hints[:1]])) from None
        for rule in self.rules:
            rule(value)
        return value

    def words(self, several: bool = False) -> str:
        """Return the words of the kind: rules have their own messages."""
        return self.kind.words(several)


class _Literal(Kind):
    """One of some values."""

    def __init__(self, choices: Sequence[object]) -> None:
        self.choices = choices

    def convert(self, argument: Argument) -> object:
        """Return the value, which must equal a choice and be of its type."""
        value = argument.value
        for choice in self.choices:
            # By type as well: 1 == True.
            if isinstance(value, type(choice)) and value == choice:
                return value
        raise ValueError(f"must be {self.words()}, got {described(value)}")

    def is_meant_by(self, value: object) -> bool:
        """Say whether a value has the type of a choice."""
        return isinstance(value, tuple(type(choice) for choice in self.choices))

    def words(self, several: bool = False) -> str:
        """Return the choices, which are the same for one value and several."""
        del several  # The methods of all kinds take it.
        if len(self.choices) > 2:
            return f"one of {', '.join(map(str, self.choices))}"
        return " or ".join(map(_quoted, self.choices))


def _quoted(choice: object) -> str:
    """Return a choice as it is written in Python, strings in double quotes."""
    return f'"{choice}"' if isinstance(choice, str) else str(choice)


class _Union(Kind):
    """A value of one of some kinds, which are tried in order."""

    def __init__(self, members: Sequence[Kind]) -> None:
        self.members = members

    def convert(self, argument: Argument) -> object:
        """Return the value as the first member does that accepts it."""
        # What can be walked through once is there for the second kind of list too.
        n_lists = sum(isinstance(member, _List) for member in self.members)
        if n_lists > 1 and isinstance(argument.value, Iterator):
            argument = argument._replace(value=tuple(argument.value))
        excluded: list[ValueError] = []
        hints: list[str] = []
        for member in self.members:
            # A value of another type than the literals is meant for another member.
            if isinstance(member, _Literal) and not member.is_meant_by(argument.value):
                continue
            try:
                return member.convert(argument)
            except ValueError as error:
                excluded.append(error)
            except WrongType as error:
                hints.append(str(error))
        # The error of a member that accepts the type but not the value says most.
        if excluded:
            raise excluded[0]
        raise WrongType("; ".join(dict.fromkeys(filter(None, hints))))

    def words(self, several: bool = False) -> str:
        """Return as in "a string, a number or None"."""
        named = [member for member in self.members if member is not _NONE]
        if _NUMBER in named:
            # A whole number is a number.
            named = [member for member in named if member is not _WHOLE]
        if _NONE in self.members and not several:
            named.append(_NONE)
        *first, last = dict.fromkeys(member.words(several) for member in named)
        if not first:
            return last
        return f"{', '.join(first)} or {last}"


class _List(Kind):
    """Some values of one kind, in order."""

    def __init__(self, item: Kind, becomes_tuple: bool) -> None:
        self.item = item
        self.becomes_tuple = becomes_tuple

    def convert(self, argument: Argument) -> object:
        """Return the items in the sequence that came, or in a new one if they change.

        Arrays, tensors, iterators and views of a mapping become sequences; a set has no
        order, and is refused.
        """
        items = argument.value
        # Arrays and tensors; a class has the method too, without a value.
        if hasattr(items, "tolist") and not isinstance(items, type):
            items = items.tolist()
        if isinstance(items, Iterator | ValuesView | KeysView):
            items = tuple(items)
        # A text is a sequence of characters, and hardly meant so.
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise WrongType
        converted = [self.item.convert(argument._replace(value=item)) for item in items]
        if self.becomes_tuple:
            return tuple(converted)
        # The caller's own sequence, where nothing had to be converted: it may have
        # methods of its own.
        if all(map(operator.is_, converted, items)):
            return items
        return converted

    def words(self, several: bool = False) -> str:
        """Return as in "a list of strings"."""
        return counted("list", f" of {self.item.words(several=True)}", several)


class _Instance(Kind):
    """An instance of a class, or something that can be called."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def convert(self, argument: Argument) -> object:
        """Return the instance."""
        value = argument.value
        # A class is not its instance, though it has the same methods; but it can be
        # called.
        is_class = isinstance(value, type) and self.cls is not Callable
        if is_class or not isinstance(value, self.cls):
            if self.cls in MAKERS:
                raise WrongType(f"`tl_coupling.{MAKERS[self.cls]}` makes one")
            raise WrongType
        return value

    def words(self, several: bool = False) -> str:
        """Return as in "a CouplingMap", a foreign class with its package."""
        noun = self.cls.__name__
        package = self.cls.__module__.partition(".")[0]
        if self.cls in _NOUNS:
            noun = _NOUNS[self.cls]
        elif package not in ("tl_coupling", "builtins"):
            noun = f"{package}.{noun}"
        return counted(noun, "", several)


class _Mapping(Kind):
    """A mapping from keys of one kind to values of one kind."""

    def __init__(self, mapping: type, key: Kind, value: Kind) -> None:
        self.mapping = _Instance(mapping)
        self.key = key
        self.value = value

    def convert(self, argument: Argument) -> object:
        """Return the mapping that came, or a dict if its values change."""
        mapping = self.mapping.convert(argument)
        assert isinstance(mapping, Mapping)
        converted = {}
        for key, value in mapping.items():
            # Results that are drawn side by side may have sizes of their own.
            converted_key = self.key.convert(Argument(key, argument.name, {}))
            sizes = dict(argument.sizes)
            converted[converted_key] = self.value.convert(
                Argument(value, argument.name, sizes)
            )
        if all(map(operator.is_, converted.values(), mapping.values())):
            return mapping
        return converted

    def words(self, several: bool = False) -> str:
        """Return as in "a mapping from strings to numbers"."""
        keys = self.key.words(several=True)
        values = self.value.words(several=True)
        return counted("mapping", f" from {keys} to {values}", several)


# jaxtyping's mark of axes without a name, which may differ between arguments.
_ANY_AXES = "..."


class _Axis(NamedTuple):
    """One name in a shape.

    Of jaxtyping's marks, `*` stands for any number of axes, and `#` for axes that may
    be 1 or missing, as in broadcasting.
    """

    name: str
    is_variadic: bool
    broadcasts: bool

    @property
    def shown(self) -> str:
        """The axis in an error message."""
        return "…" if self.is_variadic else self.name.replace("_plus_1", "+1")


class _Array(Kind):
    """A tensor or an array of some dtypes, with named axes."""

    def __init__(self, annotation: type[AbstractArray]) -> None:
        self.is_tensor = annotation.array_type is Tensor
        self.dtypes = annotation.dtypes
        self.axes = [
            _Axis(dim.strip("*#"), "*" in dim or dim == _ANY_AXES, "#" in dim)
            for dim in annotation.dim_str.split()
        ]

    def convert(self, argument: Argument) -> Tensor | np.ndarray:
        """Return a tensor or array of the wanted kind, and note the sizes of its axes.

        numpy arrays become tensors where these are wanted; lists and whole numbers
        become arrays of floating-point numbers where those are.
        """
        value = argument.value
        array = _torch_tensor(value) if self.is_tensor else _numpy_array(value)
        if str(array.dtype).removeprefix("torch.") not in self.dtypes:
            is_real = isinstance(value, Tensor) and not value.is_complex()
            # Whole numbers or booleans in place of floating-point ones: what to do is
            # clear.
            if self.is_tensor and self._is_floating and is_real:
                raise WrongType("convert it with `.float()` or `.double()`")
            raise WrongType
        argument.sizes.update(self._sizes(list(array.shape), argument))
        return array

    def _sizes(self, shape: list[int], argument: Argument) -> Sizes:
        """Return the known sizes and those of this shape.

        Raises ValueError where an axis has another size than in an earlier argument.
        """
        # How many axes the variadic name stands for, if there is one.
        n_spread = len(shape) - len(self.axes) + 1
        has_variadic = any(axis.is_variadic for axis in self.axes)
        if n_spread < 0 or (n_spread != 1 and not has_variadic):
            raise ValueError(
                f"must have shape {self._shape}, got {format_shape(shape)}"
            )
        # A copy: a shape that does not fit must leave no sizes behind.
        sizes = dict(argument.sizes)
        start = 0
        for axis in self.axes:
            n_axes = n_spread if axis.is_variadic else 1
            lengths = shape[start : start + n_axes]
            start += n_axes
            if axis.name == _ANY_AXES:
                continue
            # The first argument that names an axis sets its size.
            size = sizes.setdefault(axis.name, Size(lengths, argument.name))
            fits = lengths == size.lengths or (
                axis.broadcasts and _broadcasts(lengths, size.lengths)
            )
            if not fits:
                source = ""
                if size.source != argument.name:
                    source = f" with {_sizes_in_words(axis, size)}"
                raise ValueError(
                    f"must have shape {self._shape}{source}, got {format_shape(shape)}"
                )
        return sizes

    def words(self, several: bool = False) -> str:
        """Return as in "a floating-point torch tensor [n k]"."""
        content = ""
        if self._is_floating:
            content = "floating-point "
        elif "int32" in self.dtypes:
            content = "integer "
        noun = "torch tensor" if self.is_tensor else "array"
        return counted(f"{content}{noun}", f" {self._shape}", several)

    @property
    def _is_floating(self) -> bool:
        return "float32" in self.dtypes

    @property
    def _shape(self) -> str:
        return format_shape(axis.shown for axis in self.axes)


def _check_has_numbers(tensor: Tensor) -> None:
    """Raise WrongType unless a tensor holds a number at each of its places, and torch
    computes with them.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise WrongType("a dense one is wanted (`torch.stack`, `.to_dense()`)")
    if tensor.is_meta:
        raise WrongType("on the device meta it has no numbers")
    if tensor.is_floating_point() and tensor.element_size() < 2:
        raise WrongType("convert it with `.float()`: torch does not compute in 8 bits")


def _numpy_array(value: object) -> np.ndarray:
    """Return a value as a numpy array; whole numbers become floating-point."""
    try:
        if isinstance(value, Tensor):
            _check_has_numbers(value)
            value = value.detach().cpu()
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise WrongType from None
    # A list such as [1, 2] means numbers, of whatever kind.
    return array.astype(float) if array.dtype.kind in "iu" else array


def _torch_tensor(value: object) -> Tensor:
    """Return a tensor as it is, a numpy array as a tensor if torch has its dtype."""
    if isinstance(value, Tensor):
        _check_has_numbers(value)
        return value
    if isinstance(value, list | tuple):
        raise WrongType("`torch.tensor` makes one of numbers")
    if not isinstance(value, np.ndarray):
        raise WrongType
    # torch has neither texts nor objects, nor numbers of more than 64 bits.
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise WrongType
    # A copy: torch refuses arrays that are read-only, reversed or in foreign byte
    # order.
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")).copy())


def _broadcasts(lengths: list[int], target: list[int]) -> bool:
    """Say whether axes of these lengths broadcast to axes of the target's."""
    # The last axes correspond.
    pairs = zip(reversed(lengths), reversed(target), strict=False)
    return len(lengths) <= len(target) and all(
        length in (1, target_length) for length, target_length in pairs
    )


def _sizes_in_words(axis: _Axis, size: Size) -> str:
    """Return as in "n = 3 as in `x`"."""
    lengths = format_shape(size.lengths) if axis.is_variadic else size.lengths[0]
    return f"{axis.name} = {lengths} as in `{size.source}`"


def kind_of(annotation: Any) -> Kind:
    """Return the kind of values that an annotation asks for."""
    # In this order: `bool` and `int` are classes as well, and would be read as
    # instances below.
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return _Array(annotation)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Annotated:
        return _Annotated(kind_of(arguments[0]), arguments[1:])
    if origin is Literal:
        return _Literal(arguments)
    if origin in (typing.Union, types.UnionType):
        return _Union([kind_of(member) for member in arguments])
    if origin in (Sequence, tuple):
        return _List(kind_of(arguments[0]), becomes_tuple=origin is tuple)
    if origin in (Mapping, dict):
        return _Mapping(origin, kind_of(arguments[0]), kind_of(arguments[1]))
    return _Instance(origin or annotation)
