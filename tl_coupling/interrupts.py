"""Ctrl-C, held back where it would leave something half done."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(eq=False)
class _Pending:
    """Signals that came while they were held back, and the handlers to deliver them to.

    Both are empty while signals are not held back. `thread` holds them back.
    """

    came: list[int] = field(default_factory=list)
    handlers: dict[int, _Handler] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    def deliver_first(self) -> None:
        """Call the handler of the first signal that came, and forget the others."""
        number = self.came[0]
        self.came.clear()
        self.handlers[number](number, None)


# What `hear_interrupts` delivers: it is called from deep within a block that holds.
_pending = _Pending()
# Those whose handlers are replaced, the outermost first.
_held: list[_Pending] = []


def _python_handlers() -> dict[int, _Handler]:
    """Return the handlers that are functions, not those that the system keeps."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {
        # SIG_DFL and SIG_IGN cannot be called: such signals are left as they are.
        number: handler
        for number, handler in handlers.items()
        if callable(handler)
    }


@contextmanager
def interrupts_held(seconds: float | None = None) -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until `hear_interrupts`, or until the end.

    They wait for as many seconds at most. A second one takes effect at once.
    """
    global _pending
    # Held back already, or a thread, in which Python never runs handlers.
    if _pending.handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending = _Pending(handlers=_python_handlers())
    timers: list[threading.Timer] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pending.came:
            pending.handlers[number](number, frame)
        pending.came.append(number)
        if seconds is not None:
            # Sent again after the time is up: as the second one it takes effect.
            timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
            timers.append(timer)
            timer.start()

    _held.append(pending)
    try:
        _pending = pending
        for number in pending.handlers:
            signal.signal(number, hold)
        yield
    finally:
        try:
            _put_back(pending.handlers)
        finally:
            _held.remove(pending)
            _pending = _Pending()
            for timer in timers:
                timer.cancel()
        if pending.came:
            pending.deliver_first()


def hear_interrupts() -> None:
    """Deliver what was held back."""
    if _pending.came:
        _pending.deliver_first()


@contextmanager
def none_delivered() -> Iterator[None]:
    """Let no handler of Ctrl-C or SIGTERM run between a few statements, but after them.

    Handlers run in the main thread, whichever thread the system gives a signal to: a
    mask of this thread's signals would not hold back what another one receives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending = _Pending(handlers=_python_handlers())

    def hold(number: int, _frame: FrameType | None) -> None:
        pending.came.append(number)

    _held.append(pending)
    try:
        for number in pending.handlers:
            signal.signal(number, hold)
        yield
    finally:
        try:
            _put_back(pending.handlers)
        finally:
            _held.remove(pending)
        if pending.came:
            pending.deliver_first()


def _put_back(handlers: dict[int, _Handler]) -> None:
    """Install handlers again; all of them, also where one is called in between."""
    if not handlers:
        return
    (number, handler), *others = handlers.items()
    try:
        signal.signal(number, handler)
    finally:
        _put_back(dict(others))


def _hear_in_child() -> None:
    """Give a child the handlers that its parent has when it holds nothing back.

    What is half done is the parent's, and nobody there may end what holds them back.
    """
    global _pending
    if not _held:
        return
    outermost = _held[0]
    _put_back(outermost.handlers)
    # Of another thread no frame is left that would do this.
    if outermost.thread != threading.get_ident():
        _held.clear()
        _pending = _Pending()


# Windows forks no processes.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hear_in_child)
