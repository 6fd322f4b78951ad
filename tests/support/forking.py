"""Children of a process in which another thread is at work."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

# A child that waits for ever is killed after so many seconds.
CHILD_SECONDS = 60


def check_child(function: Callable[[], object]) -> None:
    """Call a function in a forked child; AssertionError unless it returns there."""
    code = exit_code_of_child(function)
    assert code != -signal.SIGALRM, "the child waited for ever"
    assert code == 0, "the child printed its error"


def exit_code_of_child(function: Callable[[], object]) -> int:
    """Call a function in a forked child; return 0 where it returns there."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Nothing of the parent's is ended twice.
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def entered_by_another_thread(
    context: AbstractContextManager[object],
) -> Iterator[None]:
    """Have another thread be in a context."""
    is_entered = threading.Event()
    may_leave = threading.Event()

    def stay() -> None:
        with context:
            is_entered.set()
            may_leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    is_entered.wait()
    try:
        yield
    finally:
        may_leave.set()
        thread.join()
