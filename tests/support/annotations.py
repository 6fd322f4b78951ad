"""The annotations of tl_coupling checked at every call: types by beartype, shapes by
jaxtyping.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

# A warning is shown at the first caller outside tl_coupling and jaxtyping.
__name__ = "jaxtyping.tests"

_jaxtyped = jaxtyping.jaxtyped
_config = jaxtyping.config
# It holds nothing itself, so that one serves all calls, also those within others.
_sizes_of_a_call = _jaxtyped("context")


def install() -> None:
    """Put the checks on every function of tl_coupling that is imported from here on.

    jaxtyping's own decorator binds the arguments of each call anew, and compiles the
    checks of a function within another whenever that is called: most of the time of
    most tests.
    """
    jaxtyping.jaxtyped = checked
    jaxtyping.install_import_hook("tl_coupling", "beartype.beartype")


def checked(fn: Any = None, **given: Any) -> Any:
    """In place of `jaxtyping.jaxtyped`, to which the rarer kinds of functions are
    left.
    """
    if fn is None:
        return functools.partial(checked, **given)
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and not hasattr(fn.__init__, "__wrapped__"):
            type.__setattr__(fn, "__init__", checked(fn.__init__, **given))
        return fn
    if not fn.__annotations__:
        return fn
    checks = _checks_of(fn)
    if checks.has_shapes and inspect.isgeneratorfunction(fn):
        return _jaxtyped(fn, **given)
    return _checked_call(fn, checks)


def _checked_call(fn: Callable[..., Any], checks: "_Checks") -> Callable[..., Any]:
    """Return `fn` with its checks, which are compiled at the first call: of a thousand
    functions a test calls a few.
    """
    with_checks: Callable[..., Any] | None = None
    if checks.has_shapes:

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal with_checks
            __tracebackhide__ = True
            if _config.jaxtyping_disable:
                return fn(*args, **kwargs)
            if with_checks is None:
                with_checks = checks.around(fn)
            with _sizes_of_a_call:
                return with_checks(*args, **kwargs)

    else:

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal with_checks
            __tracebackhide__ = True
            if _config.jaxtyping_disable:
                return fn(*args, **kwargs)
            if with_checks is None:
                with_checks = checks.around(fn)
            return with_checks(*args, **kwargs)

    return call


class _Checks:
    """The checks of the annotations of all functions that have one code.

    A function within another is made anew at each call of that.
    """

    def __init__(self, fn: Any) -> None:
        self.code: CodeType = fn.__code__
        self.hints = {
            name: _evaluated(hint, fn.__globals__)
            for name, hint in fn.__annotations__.items()
        }
        self.has_shapes = any(map(_has_shape, self.hints.values()))
        self._compiled: Any = None

    def around(self, fn: Any) -> Any:
        """Return `beartype(fn)`, which is compiled once; what is kept of it holds no
        variable of `fn`.
        """
        if self._compiled is None:
            # None where there are none: beartype takes a tuple for a sign of an outer
            # function.
            cells = tuple(CellType() for _ in self.code.co_freevars) or None
            empty = FunctionType(
                self.code, fn.__globals__, fn.__name__, fn.__defaults__, cells
            )
            for name in ("__kwdefaults__", "__module__", "__qualname__"):
                setattr(empty, name, getattr(fn, name))
            empty.__annotations__ = self.hints
            self._compiled = beartype(empty)
        compiled = self._compiled
        # It has nothing to check.
        if compiled.__code__ is self.code:
            return fn
        again = FunctionType(compiled.__code__, compiled.__globals__, compiled.__name__)
        again.__kwdefaults__ = compiled.__kwdefaults__ | {"__beartype_func": fn}
        return again


# By identity of the code, which these keep: functions of two modules may have equal code.
_checks_within: dict[int, _Checks] = {}


def _checks_of(fn: Any) -> _Checks:
    """Return the checks of a function, the same for all that one line within another
    function makes.
    """
    if "<locals>" not in fn.__qualname__:
        return _Checks(fn)
    code = fn.__code__
    if id(code) not in _checks_within:
        _checks_within[id(code)] = _Checks(fn)
    return _checks_within[id(code)]


def _evaluated(hint: Any, names: dict[str, Any]) -> Any:
    """Return the type that a string names; Any while there is none of that name."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, names)
    except (AttributeError, NameError):
        return Any


def _has_shape(hint: Any) -> bool:
    is_shape = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_shape or any(map(_has_shape, get_args(hint)))
