"""What a child of this process needs where another thread was at work when it was forked.

A child has the memory of its parent as it was in that moment, but of its threads only
the one that forked. A lock that another thread held would stay held; what another one had
changed for a while (a model's hooks, torch's settings) would stay changed, and give other
numbers.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

from tl_coupling.interrupts import interrupts_held

_Value = TypeVar("_Value")

# The stack that undoes each change, in the order in which the changes began, and the
# thread that made it.
_changes: dict[ExitStack, int] = {}


def call_in_children(function: Callable[[], object]) -> None:
    """Call a function in every child, before anything else runs there."""
    # Windows forks no processes.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def fork_safe_lock() -> Any:
    """Return an `RLock` that a child finds free, unless the thread that forks holds it."""
    lock: Any = threading.RLock()

    def free() -> None:
        # As `threading` and `logging` do with locks of their own: contexts hold this one.
        if not lock._is_owned():
            lock._at_fork_reinit()

    call_in_children(free)
    return lock


@contextmanager
def shared_changes(*contexts: AbstractContextManager[Any]) -> Iterator[ExitStack]:
    """Change, in this context, what all threads see: models, and settings of the process.

    A child that another thread forks has the changes, and not the thread that would take
    them back: it does that itself. Ctrl-C waits until all are undone.

    Args:
        contexts: are entered. None of them may be of the thread itself, as `torch.no_grad`
            is: it would be left in the child's.

    Yields:
        What undoes the changes at the end, for more of them.
    """
    undo = ExitStack()
    _changes[undo] = threading.get_ident()
    try:
        for context in contexts:
            undo.enter_context(context)
        yield undo
    finally:
        try:
            with interrupts_held():
                undo.close()
        finally:
            # An interrupt that came before it could be held may have left some changes.
            undo.close()
            _changes.pop(undo, None)


def _take_back() -> None:
    """Undo the changes of threads that this child has not, the last ones first."""
    own_thread = threading.get_ident()
    abandoned = [undo for undo, thread in _changes.items() if thread != own_thread]
    # All of them, also where one fails.
    with ExitStack() as undo_all:
        for undo in abandoned:
            undo_all.callback(_changes.pop, undo, None)
            undo_all.push(undo)


call_in_children(_take_back)


class cached_property(functools.cached_property[_Value]):
    """Python's own, without the lock that it had before 3.12: one for all instances.

    A thread that computes holds it, and may wait for another one that wants it; a child
    would wait for ever.
    """

    def __init__(self, func: Callable[[Any], _Value]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
