"""Types that annotate arguments: a type, and a rule for its values.

In `Annotated`, a function raises ValueError on what the annotation excludes; its
message continues a sentence that begins with the name of the argument.
"""

import math
import os
from collections.abc import Callable
from typing import Annotated, TypeVar

import torch

_Value = TypeVar("_Value")
# By the names that the command line takes.
FLOAT_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _rule(
    is_allowed: Callable[[_Value], bool], demand: str
) -> Callable[[_Value], None]:
    """Return a function that raises ValueError unless a value is allowed.

    The error says that the value must `demand`, a phrase such as "be finite".
    """

    def check(value: _Value) -> None:
        if not is_allowed(value):
            raise ValueError(f"must {demand}, got {value!r}")

    return check


def at_least(least: int) -> Callable[[int], None]:
    """Return a rule for `Annotated`: the number must not be smaller than `least`."""
    return _rule(lambda number: number >= least, f"be at least {least}")


def _device(device: str | torch.device) -> None:
    """Raise ValueError unless torch knows a device of this name."""
    try:
        # Known to torch, whether or not this machine has one.
        torch.device(device)
    except RuntimeError:
        raise ValueError(
            f'must be a device such as "cpu" or "cuda:0", got {device!r}'
        ) from None


def _check_characters(text: str) -> None:
    """Raise ValueError if the text holds half of a character, a lone surrogate."""
    try:
        # UTF-8 has no form for half a character.
        text.encode()
    except UnicodeEncodeError as error:
        start = f"must be text in Unicode, got {ascii(text)[:80]}: "
        reason = f"character {error.start} is half of one (a lone surrogate), "
        raise ValueError(f"{start}{reason}which no file can hold") from None


def _has_no_null(text: str | os.PathLike[str]) -> bool:
    return "\0" not in os.fspath(text)


def _float_dtype(dtype: torch.dtype | str) -> None:
    """Raise ValueError unless this is a floating-point dtype, or one's name."""
    is_float = dtype in FLOAT_DTYPES
    if isinstance(dtype, torch.dtype):
        is_float = dtype.is_floating_point
    if not is_float:
        named = ", ".join(f'"{name}"' for name in FLOAT_DTYPES)
        raise ValueError(
            "must be a floating-point dtype such as torch.float32, or one of "
            f"{named}, got {dtype!r}"
        )


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """Return a floating-point dtype, given itself or by its name."""
    return FLOAT_DTYPES[dtype] if isinstance(dtype, str) else dtype


# Not of paths: a file may have a name that is not UTF-8.
Text = Annotated[str, _check_characters]
AnyPath = Annotated[
    str | os.PathLike[str],
    _rule(lambda path: bool(os.fspath(path)), "not be empty"),
    _rule(_has_no_null, "be a path without null characters, which no file can have"),
]
Count = Annotated[int, at_least(1)]
Seed = Annotated[int, at_least(0)]
Device = Annotated[str | torch.device, _device]
FloatDtype = Annotated[
    torch.dtype,
    _rule(
        lambda dtype: dtype.is_floating_point,
        "be a floating-point dtype such as torch.float32",
    ),
]
NamedFloatDtype = Annotated[torch.dtype | str, _float_dtype]
Finite = Annotated[float, _rule(math.isfinite, "be finite")]
Positive = Annotated[
    float, _rule(lambda number: 0 < number < math.inf, "be above 0 and finite")
]
