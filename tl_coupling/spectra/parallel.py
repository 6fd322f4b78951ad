"""A function of several items in threads.

torch's linear algebra lets go of Python's lock, so that one decomposition runs beside
another, or beside the Python that makes the next matrix. Small matrices gain more from
one core each than from all cores on one.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import torch

from tl_coupling.arguments import join_measuring

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Shares(NamedTuple):
    """How torch's threads are shared out: between workers, and this thread."""

    n_workers: int
    threads_of_worker: int
    own_threads: int


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> list[Result]:
    """Return the function of each item, in order; each worker has one of the cores.

    One item alone has all of them.

    Args:
        function: of one item: linear algebra, and little Python.
        items: read by this thread, one more than there are workers at a time.
        device: where the items are computed. On another than the CPU, which has cores
            of its own, they are computed one after the other by this thread.

    Example:
        >>> from tl_coupling.spectra.parallel import parallel_map
        >>> matrices = [torch.eye(2), torch.eye(3)]
        >>> parallel_map(torch.trace, matrices, torch.device("cpu"))
        [tensor(2.), tensor(3.)]
    """
    unread = iter(items)
    first = list(islice(unread, 2))
    if len(first) == 1:
        return [function(first[0])]
    n_threads = torch.get_num_threads()
    shares = _Shares(n_threads, threads_of_worker=1, own_threads=1)
    return _mapped(function, chain(first, unread), device, shares)


def background_map(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> list[Result]:
    """Return the function of each item, in order, while the next items are made.

    Jacobians take Python, products of a few rows, and one core; their SVDs the others.

    Args:
        function: of one item, called by one worker, which has half of the cores.
        items: made by this thread, with the other half: threads of torch that wait for
            each other spin, and take the time of those that work. Two are held at a
            time.
        device: as in `parallel_map`.
    """
    n_threads = torch.get_num_threads()
    of_worker = n_threads // 2
    shares = _Shares(
        n_workers=min(1, of_worker),
        threads_of_worker=of_worker,
        own_threads=n_threads - of_worker,
    )
    return _mapped(function, items, device, shares)


def _mapped(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    device: torch.device,
    shares: _Shares,
) -> list[Result]:
    n_threads = torch.get_num_threads()
    if device.type != "cpu" or n_threads == 1:
        return list(map(function, items))

    def begin_worker() -> None:
        torch.set_num_threads(shares.threads_of_worker)
        join_measuring()

    results: list[Result] = []
    begun: deque[Future[Result]] = deque()
    with ExitStack() as undo:
        pool = ThreadPoolExecutor(shares.n_workers, initializer=begin_worker)
        undo.callback(torch.set_num_threads, n_threads)
        undo.callback(pool.shutdown, cancel_futures=True)
        torch.set_num_threads(shares.own_threads)
        for item in items:
            begun.append(pool.submit(function, item))
            # Not kept while the next is made.
            del item
            if len(begun) > shares.n_workers:
                results.append(begun.popleft().result())
        results.extend(future.result() for future in begun)
    return results
