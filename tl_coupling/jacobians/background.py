"""Work on tensors that goes on while the next tensors are made."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tl_coupling.arguments import join_measuring

Result = TypeVar("Result")


class InBackground(Generic[Result]):
    """A function of batches that is computed by a thread of its own.

    Jacobians take Python, products of a few rows, and one core; SVDs another. The
    program's thread has one core fewer meanwhile: threads of torch that wait for each
    other spin, and take the time of those that work. Where there is one core, or a
    device of its own, each batch is computed when it is given.

    Example:
        >>> from tl_coupling.jacobians.background import InBackground
        >>> with InBackground(torch.trace, True) as traces:
        ...     traces.begin(torch.eye(2))
        ...     traces.begin(torch.eye(3))
        ...     traces.results()
        [tensor(2.), tensor(3.)]
    """

    def __init__(self, function: Callable[[Tensor], Result], allowed: bool) -> None:
        self.function = function
        self._n_threads = torch.get_num_threads()
        self._has_thread = allowed and self._n_threads > 1
        self._begun: deque[Future[Result]] = deque()
        self._results: list[Result] = []
        self._open = ExitStack()

    def __enter__(self) -> "InBackground[Result]":
        if self._has_thread:
            n_in_background = self._n_threads // 2
            self._pool = ThreadPoolExecutor(
                1, initializer=_begin_thread, initargs=(n_in_background,)
            )
            torch.set_num_threads(self._n_threads - n_in_background)
            self._open.callback(torch.set_num_threads, self._n_threads)
            self._open.callback(self._pool.shutdown, cancel_futures=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def begin(self, batch: Tensor) -> None:
        """Compute the function of a batch, after those that were given before.

        It waits until at most one other is still to be computed: batches take memory.
        """
        if not self._has_thread:
            self._results.append(self.function(batch))
            return
        while len(self._begun) > 1:
            self._results.append(self._begun.popleft().result())
        self._begun.append(self._pool.submit(self.function, batch))

    def results(self) -> list[Result]:
        """Return the function of every batch, in order, once all are computed."""
        while self._begun:
            self._results.append(self._begun.popleft().result())
        return self._results


def _begin_thread(n_threads: int) -> None:
    """Let the pool's thread compute with so many, in the turn of the program's."""
    torch.set_num_threads(n_threads)
    join_measuring()
