"""Ctrl-C and SIGTERM, which wait where they would leave something half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM wait for the end of this context.

    It is for a few statements, or a file. A second one takes effect at once. In threads
    other than the main one, nothing has to wait: Python runs no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    came: list[int] = []

    def deliver(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        # SIG_DFL and SIG_IGN are numbers: such signals were never held.
        if callable(handler):
            handler(number, frame)

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            deliver(number, frame)

    held = [number for number in _SIGNALS if callable(handlers[number])]
    try:
        for number in held:
            signal.signal(number, hold)
        yield
    finally:
        for number in held:
            signal.signal(number, handlers[number])
        if len(came) == 1:
            deliver(came[0], None)
