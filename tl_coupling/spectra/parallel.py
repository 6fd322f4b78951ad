"""A function of several items in threads.

torch's linear algebra lets go of Python's lock, so that one decomposition runs beside
another, or beside the Python that makes the next matrix. Small matrices gain more from
one core each than from all cores on one.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

from tl_coupling.arguments import join_measuring

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    device: torch.device,
    n_workers: int | None = None,
) -> list[Result]:
    """Return the function of each item, in order, while the next items are made.

    Jacobians, for one, take Python, products of a few rows, and a core or two; their
    SVDs the others.

    Args:
        function: of one item: linear algebra, and little Python.
        items: made by this thread, one more than there are workers at a time.
        device: where the items are computed. On another than the CPU, which has cores
            of its own, they are computed one after the other by this thread.
        n_workers: by default as many as there are cores. Each has one core, and this
            thread those that are left: threads of torch that wait for each other spin,
            and take the time of those that work.

    Example:
        >>> from tl_coupling.spectra import parallel_map
        >>> matrices = [torch.eye(2), torch.eye(3)]
        >>> parallel_map(torch.trace, matrices, torch.device("cpu"))
        [tensor(2.), tensor(3.)]
    """
    n_threads = torch.get_num_threads()
    if device.type != "cpu" or n_threads == 1:
        return list(map(function, items))
    if n_workers is None:
        n_workers = n_threads
    results: list[Result] = []
    begun: deque[Future[Result]] = deque()
    with ExitStack() as undo:
        pool = ThreadPoolExecutor(n_workers, initializer=_begin_worker)
        undo.callback(torch.set_num_threads, n_threads)
        undo.callback(pool.shutdown, cancel_futures=True)
        torch.set_num_threads(max(1, n_threads - n_workers))
        for item in items:
            begun.append(pool.submit(function, item))
            # Not kept while the next is made.
            del item
            if len(begun) > n_workers:
                results.append(begun.popleft().result())
        results.extend(future.result() for future in begun)
    return results


def _begin_worker() -> None:
    """Compute with one core, in the turn of the thread that waits."""
    torch.set_num_threads(1)
    join_measuring()
