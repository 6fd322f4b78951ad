"""What every public call begins with: checks of its arguments, with errors of one line,
and the arithmetic in which it computes, one thread at a time, also in forked children;
warnings that point at the caller's line.
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
    dtype_named,
)
from tl_coupling.arguments.checking import check_text, checked
from tl_coupling.arguments.forks import (
    cached_property,
    fork_safe_lock,
    shared_changes,
)
from tl_coupling.arguments.kinds import made_by
from tl_coupling.arguments.measuring import (
    defaults_of_model,
    join_measuring,
    measuring,
    others_measuring,
)
from tl_coupling.arguments.messages import described, format_shape, warn_caller
from tl_coupling.arguments.renamed import renamed
from tl_coupling.arguments.token_ids import ids_of_one_prompt

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
    "cached_property",
    "check_text",
    "checked",
    "defaults_of_model",
    "described",
    "dtype_named",
    "fork_safe_lock",
    "format_shape",
    "ids_of_one_prompt",
    "join_measuring",
    "made_by",
    "measuring",
    "others_measuring",
    "renamed",
    "shared_changes",
    "warn_caller",
]
