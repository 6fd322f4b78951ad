"""The border of the package: arguments that come in are held against their annotations, warnings point back out.

`checked` stands on what users call. It reads the annotations once and turns whatever does not fit into one line that
names the argument. What a caller means all the same is taken: numpy's numbers as Python's, numpy arrays for tensors,
lists where arrays or tuples are wanted. Only the values that need no model are judged here.
"""

import functools
import importlib
import inspect
import math
import os
import sys
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch

from tl_coupling.kinds import Kind, OtherKind, Sizes, kind_of, shown

_Public = TypeVar("_Public", bound=Callable[..., Any])

# Annotations written as text, because these are imported only where they are used.
_IMPORTED_LATE = ("pandas", "xarray")


@dataclass(frozen=True)
class AtLeast:
    """Annotates a number that must not be smaller."""

    least: int

    def __call__(self, value: int | float) -> None:
        """Raise ValueError if it is."""
        if not value >= self.least:
            raise ValueError(f"must be at least {self.least}, got {value}")


def _finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {value}")


def _positive(value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"must be above 0 and finite, got {value}")


def _not_empty(path: str | os.PathLike[str]) -> None:
    if not os.fspath(path):
        raise ValueError("must not be empty")


def _known_to_torch(device: str | torch.device) -> None:
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f'must be a device such as "cpu" or "cuda:0", got {device!r}') from None


def _floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"must be a floating-point dtype such as torch.float32, got {dtype}")


AnyPath = Annotated[str | os.PathLike[str], _not_empty]
Count = Annotated[int, AtLeast(1)]
Seed = Annotated[int, AtLeast(0)]
Device = Annotated[str | torch.device, _known_to_torch]
FloatDtype = Annotated[torch.dtype, _floating]
Finite = Annotated[float, _finite]
Positive = Annotated[float, _positive]


def checked(public: _Public) -> _Public:
    """Hold the arguments of a function, or of a dataclass when one is made, against their annotations.

    Tensors are held against their shapes too: a size that is named twice must be the same in all arguments of a call.
    Return values, and arguments without annotation, are not looked at. Costs microseconds a call.

    Raises:
        TypeError: an argument of another kind.
        ValueError: the right kind and another shape, or a value that the annotation excludes.

    Example:
        >>> import numpy as np
        >>> from jaxtyping import Float
        >>> @checked
        ... def corner(A: Float[torch.Tensor, "n n"], k: Count) -> torch.Tensor:
        ...     return A[:k, :k]
        >>> corner(np.eye(3), np.int64(1))
        tensor([[1.]], dtype=torch.float64)
        >>> corner(torch.eye(3), 2.5)
        Traceback (most recent call last):
        TypeError: `k` must be a whole number, got 2.5
        >>> corner(torch.ones(3, 4), 1)
        Traceback (most recent call last):
        ValueError: `A` must have shape [n n], got [3 4]
    """
    if isinstance(public, type):
        public.__init__ = checked(public.__init__)  # type: ignore[misc]
        return public
    signature = inspect.signature(public)
    kinds: dict[str, Kind] = {}

    @functools.wraps(public)
    def at_the_border(*args: Any, **kwargs: Any) -> Any:
        if not kinds:
            # Late: by the first call everything that an annotation names is there.
            kinds.update(_kinds(public, signature))
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{public.__qualname__}: {error}") from None
        sizes: Sizes = {}
        for name, value in given.arguments.items():
            if name in kinds:
                given.arguments[name] = taken(value, name, kinds[name], sizes)
        return public(*given.args, **given.kwargs)

    return typing.cast(_Public, at_the_border)


def taken(value: Any, name: str, kind: Kind, sizes: Sizes) -> Any:
    """The value as it is meant, or one line that names it."""
    try:
        return kind.take(value, name, sizes)
    except OtherKind as what_to_do:
        hint = f": {what_to_do}" if str(what_to_do) else ""
        raise TypeError(f"`{name}` must be {kind.one}, got {shown(value)}{hint}") from None
    except ValueError as error:
        raise ValueError(f"`{name}` {error}") from None


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that led here, however many calls lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "tl_coupling",
        "jaxtyping",
        "contextlib",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _kinds(public: Callable[..., Any], signature: inspect.Signature) -> dict[str, Kind]:
    own = inspect.unwrap(public).__globals__
    kinds = {}
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            late = {module: importlib.import_module(module) for module in _IMPORTED_LATE if module in annotation}
            annotation = eval(annotation, own, late)
        if annotation is not inspect.Parameter.empty:
            kind = kind_of(annotation)
            kinds[name] = _options(kind) if parameter.kind is inspect.Parameter.VAR_KEYWORD else kind
    return kinds


def _options(kind: Kind) -> Kind:
    """Of arguments that have no names in the signature."""

    def take(value: Any, _: str, sizes: Sizes) -> Any:
        return {name: taken(one, name, kind, sizes) for name, one in value.items()}

    return Kind(kind.many, kind.many, take)
