"""Ctrl-C, held back where it would leave something half done."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals that came while they were held back, and the handlers that were there before;
# none while they are not.
_held = SimpleNamespace(came=[], handlers={})


@contextmanager
def interrupts_held(seconds: float | None = None) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM wait for `hear_interrupts`, or for the end;
    at most so many seconds.

    A second one takes effect at once.
    """
    if _held.handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {
        n: handler for n in _SIGNALS if callable(handler := signal.getsignal(n))
    }
    came: list[int] = []
    timers: list[threading.Timer] = []

    def hold(number: int, frame: Any) -> None:
        if came:
            handlers[number](number, frame)
        came.append(number)
        if seconds is not None:
            timers.append(threading.Timer(seconds, os.kill, (os.getpid(), number)))
            timers[-1].start()

    try:
        with _none_delivered():
            _held.came, _held.handlers = came, handlers
            for number in handlers:
                signal.signal(number, hold)
        yield
    finally:
        with _none_delivered():
            _held.came, _held.handlers = [], {}
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for timer in timers:
                timer.cancel()
        if came:
            handlers[came[0]](came[0], None)


def hear_interrupts() -> None:
    """Deliver what was held back."""
    if _held.came:
        number = _held.came[0]
        _held.came.clear()
        _held.handlers[number](number, None)


@contextmanager
def _none_delivered() -> Iterator[None]:
    """A few statements that no signal may come between; on Windows it may."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
