"""Warnings that point at the line of the user's code that led to them."""

import sys
import warnings

# Packages whose frames lie between the user's line and the warning.
_PACKAGES_BETWEEN = ("tl_coupling", "jaxtyping", "contextlib")


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that led here.

    It is found however many calls lie between.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back:
        # Of jaxtyping and contextlib, the wrappers around functions of this package.
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _PACKAGES_BETWEEN:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
