"""What users are told: values and shapes in words, warnings at their own line."""

import reprlib
import sys
import warnings
from collections.abc import Iterable
from numbers import Real

import numpy as np
import torch
from torch import Tensor

# Packages whose frames lie between the user's line and the warning.
_PACKAGES_BETWEEN = ("tl_coupling", "jaxtyping", "contextlib")
# Values of these types are shown as Python writes them.
_PLAIN = str | bytes | complex | Real | type | torch.dtype | None


def format_shape(lengths: Iterable[object]) -> str:
    """Return a tensor's shape as in `[2 3]`, or names of its axes as in `[n k]`."""
    return f"[{' '.join(map(str, lengths))}]"


def counted(noun: str, complement: str, several: bool) -> str:
    """Return a noun with its article, or in the plural, and what follows it."""
    if several:
        return f"{noun}s{complement}"
    # The x stands for "an xarray".
    article = "an" if noun[0] in "aeiouAEIOUx" else "a"
    return f"{article} {noun}{complement}"


def described(value: object) -> str:
    """Return a value in a few words, on one line."""
    if isinstance(value, Tensor | np.ndarray):
        noun = "a tensor" if isinstance(value, Tensor) else "an array"
        if isinstance(value, Tensor) and value.is_nested:
            # It has no shape.
            return f"a nested tensor of {value.dtype}"
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            noun = f"a tensor of layout {layout},"
        return f"{noun} of {value.dtype} and shape {format_shape(value.shape)}"
    is_container = isinstance(value, list | tuple | set | dict)
    if all(isinstance(part, _PLAIN) for part in _parts(value)):
        # `reprlib` cuts long values short.
        return " ".join(reprlib.repr(value).split())
    class_name = type(value).__name__
    return f"a {class_name}" if is_container else class_name


def _parts(value: object) -> Iterable[object]:
    """Return what a container holds, a dict's keys and values; else the value alone."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return value
    return [value]


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package that led here.

    It is found however many calls lie between.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back:
        # jaxtyping and contextlib put wrappers around functions of this package.
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _PACKAGES_BETWEEN:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
