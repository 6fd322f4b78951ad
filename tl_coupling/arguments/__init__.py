"""What every public call begins with: checks of its arguments, with errors of one line,
and the arithmetic in which it computes; warnings that point at the caller's line.
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
from tl_coupling.arguments.checking import check_text, checked
from tl_coupling.arguments.kinds import made_by
from tl_coupling.arguments.measuring import (
    defaults_of_model,
    join_measuring,
    measuring,
    others_measuring,
)
from tl_coupling.arguments.messages import described, warn_caller

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
    "defaults_of_model",
    "described",
    "join_measuring",
    "made_by",
    "measuring",
    "others_measuring",
    "warn_caller",
]
