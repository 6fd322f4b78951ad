"""Public functions under the names that they had in earlier versions."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tl_coupling.arguments.messages import warn_caller

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed(function: _Function, earlier: str) -> _Function:
    """Return a function that warns of its earlier name and does the same.

    Args:
        function: a public function, under its present name.
        earlier: the earlier name, as users write it: `room.name`.
    """

    @functools.wraps(function)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        message = f"`{earlier}` is called `{function.__name__}` now: use that name"
        warn_caller(message, DeprecationWarning)
        return function(*args, **kwargs)

    return cast(_Function, warn_and_call)
