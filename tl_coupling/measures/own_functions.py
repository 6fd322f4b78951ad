"""Functions that users measure by: their names, what they may return, and whether two
of one name are the same.
"""

import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import format_shape, warn_caller

# `A, S ↦ value`, of coupling matrices and the singular values of their J_1.
MeasureFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# What tells functions apart that were made by one line, such as `threshold=.5`.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def function_name(function: MeasureFunction) -> str:
    """Return what a function is called in results; ValueError where it has no name."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        shown = name if isinstance(name, str) else type(function).__name__
        raise ValueError(
            "a measure of your own needs a name, which results keep, got "
            f"{shown}: write it with `def name(A, S)`"
        )
    return name


def source_digest(function: MeasureFunction) -> str | None:
    """Return a SHA-256 of a function's source, its defaults and what it closes over.

    None for a function that was not written in Python. What it calls is not in it.
    """
    try:
        source = inspect.getsource(function)
    # Typed at a prompt, or made by `exec`: there is no file.
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return None
        constants = [value for value in code.co_consts if isinstance(value, _PLAIN)]
        source = repr((code.co_code, code.co_names, constants))
    cells = getattr(function, "__closure__", None) or ()
    values = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
        *(cell.cell_contents for cell in cells),
    ]
    plain_values = [value for value in values if isinstance(value, _PLAIN)]
    return hashlib.sha256(f"{source}{plain_values}".encode()).hexdigest()


def call_function(
    function: MeasureFunction,
    name: str,
    A: Float[Tensor, "*batch k k"],
    S: Float[Tensor, "*batch k"],
) -> Float[Tensor, "*batch"]:
    """Return what a function gives; TypeError and ValueError for anything but one real
    number for each matrix.
    """
    values = function(A, S)
    if not isinstance(values, Tensor) or values.is_complex():
        kind = type(values).__name__
        if isinstance(values, Tensor):
            kind = f"a tensor of {values.dtype}"
        raise TypeError(
            f"`{name}(A, S)` must return a tensor of real numbers, one for each matrix, "
            f"got {kind}"
        )
    if values.shape != A.shape[:-2]:
        raise ValueError(
            f"`{name}(A, S)` must return one value for each matrix of A, of shape "
            f"{format_shape(A.shape)}, which is shape {format_shape(A.shape[:-2])}, got "
            f"{format_shape(values.shape)}: reduce the last two axes of A alone"
        )
    return values.to(A)


def nan_where_not_finite(values: Tensor, name: str) -> Tensor:
    """Return the values with NaN in place of infinities, and warn where there is any."""
    is_undefined = ~torch.isfinite(values)
    if bool(is_undefined.any()):
        warn_caller(
            f"`{name}` is not finite for {int(is_undefined.sum())} matrices: "
            "the measure is undefined there (NaN)"
        )
    # NaN, and not an infinity that a mean would carry on in silence.
    return values.masked_fill(is_undefined, torch.nan)


def check_reaches_processes(function: MeasureFunction, name: str) -> None:
    """Raise ValueError for a function that processes of a pool cannot find."""
    advice = (
        f"`{name}` cannot be sent to other processes: write it at the top level of a "
        "module that they can import, or leave `executor` out"
    )
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise ValueError(advice) from None
    # They run the script again; what was typed in a notebook or at a prompt is in none.
    is_of_main = getattr(function, "__module__", None) == "__main__"
    if is_of_main and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(advice)
