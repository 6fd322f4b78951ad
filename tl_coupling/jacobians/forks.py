"""A function of several items at once, each in a process that is forked from this one.

A fork has everything that is in memory, such as a model, without a copy of it. Several
items with a thread each take less time than one after the other with all threads: much
of the work on one item is Python, or products too small for several threads.

A fork has one thread: torch's threads (libgomp) wait forever for each other in a fork
of a process in which several have run.
"""

import multiprocessing
import os
import pickle
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tl_coupling.arguments import measuring
from tl_coupling.interrupts import hear_interrupts, ignore_interrupts, interrupts_held

Item = TypeVar("Item")
Result = TypeVar("Result")
# How often a fork looks whether this process is still there, and this one whether it
# was interrupted.
_POLL_SECONDS = 0.2
# Items that are begun before the first of them has been taken, for each one at a time.
_MOST_AHEAD = 2
# Where each warning was shown: one of several forks is not shown again.
_shown: dict[Any, Any] = {}


def can_fork() -> bool:
    """Say whether forks are safe here, and of use.

    They are on Linux (a Mac's libraries do not bear them), outside a worker of another
    pool, which may have no children, and with more than one thread.
    """
    is_worker = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not is_worker and torch.get_num_threads() > 1


def of_each(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[Result]:
    """Yield the function of each item, in order.

    With `at_once` above 1 that many are computed at a time, each by a fork with one
    thread, unless more than half of the threads would have nothing to do. What a fork
    does not give, because it raised an error or was killed, is computed here: errors
    are those of one by one. Warnings of a fork are given here too; what else it changes
    is lost.

    Args:
        function: of one item. Its result must be picklable.
        items: read as they are needed, a few ahead.
        at_once: how many are computed at a time, if there are so many.
    """
    unread = iter(items)
    first = list(islice(unread, at_once))
    unread = chain(first, unread)
    at_once = len(first)
    if at_once <= 1 or 2 * at_once < torch.get_num_threads():
        yield from map(function, unread)
        return
    begun: deque[_Fork[Item, Result]] = deque()
    is_read = False
    try:
        while begun or not is_read:
            n_running = sum(fork.is_running for fork in begun)
            has_room = n_running < at_once and len(begun) < _MOST_AHEAD * at_once
            if has_room and not is_read:
                for item in unread:
                    begun.append(_Fork(function, item))
                    break
                else:
                    is_read = True
            elif begun[0].is_running:
                _hear(begun)
            else:
                yield begun.popleft().result()
    finally:
        for fork in begun:
            fork.end()


def _hear(forks: "Iterable[_Fork[Item, Result]]") -> None:
    """Wait until one of those that are running is done, and take what it gives."""
    running = {fork.pipe: fork for fork in forks if fork.is_running}
    heard: list[Any] = []
    while not heard:
        hear_interrupts()
        heard = wait(list(running), _POLL_SECONDS)
    for pipe in heard:
        running[pipe].take()


class _Sent(NamedTuple):
    """What a fork sends: the function's value, and the warnings on the way."""

    value: Any
    warnings: list[tuple[Any, type[Warning], str, int]]


class _Fork(Generic[Item, Result]):
    """A process that computes the function of one item."""

    def __init__(self, function: Callable[[Item], Result], item: Item) -> None:
        context = multiprocessing.get_context("fork")
        self.function = function
        self.item = item
        self.pipe: Connection
        self.pipe, theirs = context.Pipe(duplex=False)
        self.is_running = True
        self._sent: _Sent | None = None
        self.process: BaseProcess = context.Process(
            target=_compute, args=(function, item, theirs), daemon=True
        )
        # Python forgets an exception in what it calls before and after a fork. A fork has
        # no other threads: none of them may be measuring, and hold what it needs.
        with measuring(), interrupts_held(), warnings.catch_warnings():
            # Python 3.12 warns of threads; those of this process hold no lock that a
            # fork takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def take(self) -> None:
        """Take what it sends, if it sends something, and end it."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            self._sent = pickle.loads(self.pipe.recv_bytes())
        self.end()

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.is_running = False
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def result(self) -> Result:
        """Return the function's value, computed here where the process gave none."""
        if self._sent is None:
            return self.function(self.item)
        for text, category, file, line in self._sent.warnings:
            warnings.warn_explicit(text, category, file, line, registry=_shown)
        value: Result = self._sent.value
        return value


def _compute(function: Callable[[Item], Result], item: Item, pipe: Connection) -> None:
    """Send the function of an item; what a fork does."""
    ignore_interrupts()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # What went wrong is seen where it is computed again.
    with suppress(Exception), warnings.catch_warnings(record=True) as caught:
        value = function(item)
        shown = [(w.message, w.category, w.filename, w.lineno) for w in caught]
        pipe.send_bytes(pickle.dumps(_Sent(value, shown)))


def _end_with(parent: int) -> None:
    """End this process when the one that forked it is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
