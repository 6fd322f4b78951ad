"""Ctrl-C, held back where it would leave something half done."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

# Signals that came while they were held back, and the handlers that were there before; none while they are not.
_held = SimpleNamespace(came=[], handlers={})


@contextmanager
def interrupts_held(seconds: float | None = None) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM wait for `hear_interrupts`, or for the end; at most so many seconds.

    A second one takes effect at once.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers: dict[int, Any] = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    if _held.handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def hold(number: int, frame: Any) -> None:
        if _held.came:
            handlers[number](number, frame)
        _held.came.append(number)
        if seconds is not None:
            timers.append(threading.Timer(seconds, os.kill, (os.getpid(), number)))
            timers[-1].start()

    try:
        _held.handlers = handlers
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        came, _held.came, _held.handlers = _held.came, [], {}
        if came:
            handlers[came[0]](came[0], None)


def hear_interrupts() -> None:
    """Deliver what was held back."""
    if _held.came:
        number = _held.came[0]
        _held.came = []
        _held.handlers[number](number, None)
