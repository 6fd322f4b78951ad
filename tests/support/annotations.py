"""The annotations of tl_coupling checked at every call: types by beartype, shapes by
jaxtyping.
"""

import dataclasses
import functools
import inspect
from types import CellType, CodeType, FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

# A warning is shown at the first caller outside tl_coupling and jaxtyping.
__name__ = "jaxtyping.tests"

_jaxtyped = jaxtyping.jaxtyped
_compiled: dict[CodeType, Any] = {}


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
    hints = fn.__annotations__.values()
    has_shapes = any(map(_has_shape, hints))
    if any(isinstance(hint, str) for hint in hints) or (
        has_shapes and inspect.isgeneratorfunction(fn)
    ):
        return _jaxtyped(fn, **given)
    with_checks = _again(fn) if "<locals>" in fn.__qualname__ else beartype(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        if not has_shapes:
            return with_checks(*args, **kwargs)
        with _jaxtyped("context"):
            return with_checks(*args, **kwargs)

    return fn if with_checks is fn else call


def _has_shape(hint: Any) -> bool:
    is_shape = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_shape or any(map(_has_shape, get_args(hint)))


def _again(fn: Any) -> Any:
    """`beartype(fn)` of a function within another, compiled once; what is kept of it
    holds no variable of that.
    """
    code = fn.__code__
    if code not in _compiled:
        cells = tuple(CellType() for _ in code.co_freevars)
        empty = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, cells)
        for name in ("__annotations__", "__kwdefaults__", "__module__", "__qualname__"):
            setattr(empty, name, getattr(fn, name))
        compiled = beartype(empty)
        _compiled[code] = None if compiled is empty else compiled
    if (compiled := _compiled[code]) is None:
        return fn
    again = FunctionType(compiled.__code__, compiled.__globals__, compiled.__name__)
    again.__kwdefaults__ = compiled.__kwdefaults__ | {"__beartype_func": fn}
    return again
