"""Items in threads: in order, no more than a few at a time, and torch's threads are as
they were.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tl_coupling.arguments import measuring
from tl_coupling.spectra import parallel_map

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")
ITEMS = [torch.full((2,), float(i)) for i in range(6)]
SUMS = [2.0 * i for i in range(6)]
ONE_WORKER = partial(parallel_map, n_workers=1)
MAPS = pytest.mark.parametrize("mapped", [parallel_map, ONE_WORKER])


@pytest.fixture
def n_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def slow_first(item: Tensor) -> float:
    time.sleep(0.05 if item[0] == 0 else 0)
    return float(item.sum())


@MAPS
@pytest.mark.parametrize(
    ("n", "device", "is_here"),
    [(2, CPU, False), (5, CPU, False), (1, CPU, True), (2, ELSEWHERE, True)],
)
def test_results_are_in_order_and_threads_as_before(
    mapped: Callable, n: int, device: torch.device, is_here: bool, n_threads: Callable
) -> None:
    n_threads(n)
    computing: set[str] = set()

    def noted(item: Tensor) -> float:
        computing.add(threading.current_thread().name)
        return slow_first(item)

    assert mapped(noted, iter(ITEMS), device) == SUMS
    assert torch.get_num_threads() == n
    assert (threading.main_thread().name in computing) == is_here


@pytest.mark.parametrize(
    ("n_workers", "n", "own"), [(None, 2, 1), (None, 5, 1), (1, 2, 1), (3, 8, 5)]
)
def test_each_worker_has_one_core_and_this_thread_the_others(
    n_workers: int | None, n: int, own: int, n_threads: Callable
) -> None:
    n_threads(n)
    own_threads: list[int] = []

    def items() -> Iterator[Tensor]:
        for item in ITEMS:
            own_threads.append(torch.get_num_threads())
            yield item

    def threads_of_worker(_: Tensor) -> int:
        return torch.get_num_threads()

    results = parallel_map(threads_of_worker, items(), CPU, n_workers)
    assert results == [1] * len(ITEMS)
    assert own_threads == [own] * len(ITEMS)


@MAPS
@pytest.mark.parametrize("n", [0, 1])
def test_no_item_and_one(mapped: Callable, n: int, n_threads: Callable) -> None:
    n_threads(2)
    assert mapped(slow_first, iter(ITEMS[:n]), CPU) == SUMS[:n]


@pytest.mark.parametrize(
    ("mapped", "n", "most"), [(ONE_WORKER, 4, 2), (parallel_map, 3, 4)]
)
def test_few_items_are_made_at_a_time(
    mapped: Callable, n: int, most: int, n_threads: Callable
) -> None:
    may_go_on = threading.Event()
    made: list[int] = []

    def wait(item: Tensor) -> None:
        assert may_go_on.wait(10)

    def items() -> Iterator[Tensor]:
        for i, item in enumerate(ITEMS):
            made.append(i)
            yield item

    def give() -> None:
        torch.set_num_threads(n)
        mapped(wait, items(), CPU)

    giving = threading.Thread(target=give)
    giving.start()
    time.sleep(0.2)
    assert len(made) == most
    may_go_on.set()
    giving.join(10)
    assert len(made) == len(ITEMS)


@MAPS
def test_an_error_of_an_item_reaches_the_program(
    mapped: Callable, n_threads: Callable
) -> None:
    n_threads(2)

    def fail(item: Tensor) -> None:
        raise ValueError(f"no SVD of {float(item[0])}")

    with pytest.raises(ValueError, match=r"no SVD of 0\.0"):
        mapped(fail, ITEMS, CPU)
    assert torch.get_num_threads() == 2


@MAPS
def test_an_interrupt_while_an_item_is_made_ends_it(
    mapped: Callable, n_threads: Callable
) -> None:
    n_threads(2)
    computed: list[float] = []

    def items() -> Iterator[Tensor]:
        yield from ITEMS[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped(lambda item: computed.append(slow_first(item)), items(), CPU)
    assert len(computed) <= 3
    assert torch.get_num_threads() == 2


@MAPS
def test_workers_compute_in_the_turn_of_the_program(
    mapped: Callable, n_threads: Callable
) -> None:
    """A public function, which waits for its turn, would wait for ever in a worker."""
    n_threads(2)

    def in_turn(item: Tensor) -> float:
        with measuring():
            return float(item.sum())

    with measuring():
        assert mapped(in_turn, ITEMS, CPU) == SUMS
