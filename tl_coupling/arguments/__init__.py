"""Checks of the arguments of public functions, with errors of one line; warnings that
point at the caller's line.
"""

from tl_coupling.arguments.annotations import (
    FLOAT_DTYPES,
    AnyPath,
    Count,
    Device,
    Finite,
    FloatDtype,
    NamedFloatDtype,
    Positive,
    Seed,
    Text,
    at_least,
)
from tl_coupling.arguments.caller import warn_caller
from tl_coupling.arguments.checking import check_text, checked
from tl_coupling.arguments.kinds import made_by

__all__ = [
    "FLOAT_DTYPES",
    "AnyPath",
    "Count",
    "Device",
    "Finite",
    "FloatDtype",
    "NamedFloatDtype",
    "Positive",
    "Seed",
    "Text",
    "at_least",
    "check_text",
    "checked",
    "made_by",
    "warn_caller",
]
