"""Ctrl-C and SIGTERM in a command: it stops where it is, and more of them do not disturb how it stops."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Within this time after the first the command is still busy stopping.
_STOPPING_SECONDS = 10.0


class Interrupted(KeyboardInterrupt):
    """What the signals raise.

    Attributes:
        status: what shells expect of a command that the signal ended.
    """

    status = 128 + signal.SIGINT


class Terminated(Interrupted):
    """SIGTERM, as batch systems and `timeout` send it."""

    status = 128 + signal.SIGTERM


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first signal raises `Interrupted`, wherever the main thread is."""
    first = -_STOPPING_SECONDS

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal first
        if time.monotonic() - first < _STOPPING_SECONDS:
            return
        first = time.monotonic()
        raise Terminated if number == signal.SIGTERM else Interrupted

    def raised_where_nobody_can_catch_it(unraisable: "sys.UnraisableHookArgs") -> None:
        """In a destructor or a callback Python prints the exception and goes on: the signal is sent once more."""
        nonlocal first
        if isinstance(unraisable.exc_value, Interrupted):
            first = -_STOPPING_SECONDS
            number = unraisable.exc_value.status - 128
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        else:
            before_hook(unraisable)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    before_hook, sys.unraisablehook = sys.unraisablehook, raised_where_nobody_can_catch_it
    try:
        yield
    finally:
        sys.unraisablehook = before_hook
        for number, handler in before.items():
            # An interrupted process only ends from here on.
            signal.signal(number, signal.SIG_IGN if first > 0 else handler)
