"""Checks of what users pass to functions, against the annotations there."""

import dataclasses
import functools
import importlib
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from tl_coupling.arguments.annotations import Text
from tl_coupling.arguments.kinds import Argument, Kind, Sizes, WrongType, kind_of
from tl_coupling.arguments.measuring import is_measured, measure_members, measuring
from tl_coupling.arguments.messages import described

_Public = TypeVar("_Public", bound=Callable[..., object])


def checked(public: _Public) -> _Public:
    """Check the arguments of a function against their annotations; compute `measuring`.

    A dataclass checks the arguments from which an instance is made, and its public
    methods and properties compute `measuring` as well.

    Values are converted where their meaning is clear: numpy's numbers to Python's,
    numpy arrays to tensors, lists to arrays or tuples. A size that is named twice must
    be the same in all arguments of a call; of jaxtyping's marks, `*`, `#` and `...` are
    read.
    In `Annotated`, a string is a hint for the error message, and a function raises
    ValueError for values that it excludes.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong shape, or a value that the annotation excludes.
    """
    if isinstance(public, type):
        # A dataclass stays a class: only what makes an instance is wrapped.
        public.__init__ = checked(public.__init__)  # type: ignore[misc]
        if dataclasses.is_dataclass(public):
            measure_members(public)
        return public
    # At the first call, when everything that the annotations name exists.
    signature = functools.cache(lambda: _Signature(public))

    @is_measured
    @functools.wraps(public)
    def checked_call(*args: object, **kwargs: object) -> object:
        with measuring():
            converted = signature().convert(args, kwargs)
            return public(*converted.args, **converted.kwargs)

    # `help` and Jupyter show types, without the rules on their values.
    plain_signature = _plain_signature(inspect.signature(public))
    checked_call.__signature__ = plain_signature  # type: ignore[attr-defined]
    return typing.cast(_Public, checked_call)


def check_text(text: str, name: str) -> None:
    """Raise ValueError, naming the argument, if a character of a text is half of one."""
    _convert(kind_of(Text), Argument(text, name, {}))


class _Signature:
    """The parameters of a function, and the kinds of values that they take."""

    def __init__(self, public: Callable[..., object]) -> None:
        self.name = public.__qualname__
        self.signature = _evaluated_signature(public)
        self.kinds = {
            name: kind_of(parameter.annotation)
            for name, parameter in self.signature.parameters.items()
        }

    def convert(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> inspect.BoundArguments:
        """Return a call's arguments, converted to what their annotations ask for."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        # Shared by all arguments of one call.
        sizes: Sizes = {}
        for name, value in bound.arguments.items():
            parameter = self.signature.parameters[name]
            kind = self.kinds[name]
            # Options are checked one by one, under their own names.
            if parameter.kind is parameter.VAR_KEYWORD:
                for option, setting in value.items():
                    value[option] = _convert(kind, Argument(setting, option, sizes))
            else:
                bound.arguments[name] = _convert(kind, Argument(value, name, sizes))
        return bound


def _convert(kind: Kind, argument: Argument) -> object:
    """Return the value of an argument, or raise an error that names the argument."""
    try:
        return kind.convert(argument)
    except WrongType as error:
        message = f"must be {kind.words()}, got {described(argument.value)}"
        if hint := str(error):
            message += f": {hint}"
        raise TypeError(f"`{argument.name}` {message}") from None
    except ValueError as error:
        raise ValueError(f"`{argument.name}` {error}") from None


def _plain_signature(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature whose annotations hold no `Annotated`."""
    parameters = [
        parameter.replace(annotation=_plain_type(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    return signature.replace(
        parameters=parameters,
        return_annotation=_plain_type(signature.return_annotation),
    )


def _plain_type(annotation: Any) -> Any:
    """Return an annotation without `Annotated`, also inside of others."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    parts = typing.get_args(annotation)
    plain_parts = tuple(map(_plain_type, parts))
    # Unchanged annotations keep their identity, and how they are written.
    if plain_parts == parts:
        return annotation
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, plain_parts)
    return origin[plain_parts]


def _evaluated_signature(public: Callable[..., object]) -> inspect.Signature:
    """Return a signature in which annotations are evaluated that are strings.

    Those name classes of pandas and xarray, which are imported only where they are
    used.
    """
    annotations = str(inspect.unwrap(public).__annotations__)
    libraries = {
        name: importlib.import_module(name)
        for name in ("pandas", "xarray")
        if name in annotations
    }
    return inspect.signature(public, locals=libraries, eval_str=True)
