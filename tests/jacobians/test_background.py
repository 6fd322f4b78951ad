"""Batches are computed in order by another thread, and nothing is left behind."""

import threading
import time

import pytest
import torch
from torch import Tensor

from tl_coupling.jacobians.background import InBackground


@pytest.fixture
def two_threads():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n_threads)


BATCHES = [torch.full((2,), float(i)) for i in range(6)]


def slow_first(batch: Tensor) -> float:
    time.sleep(0.05 if batch[0] == 0 else 0)
    return float(batch.sum())


@pytest.mark.parametrize("allowed", [True, False])
def test_results_are_in_order_and_threads_as_before(
    allowed: bool, two_threads: None
) -> None:
    computing: set[str] = set()

    def noted(batch: Tensor) -> float:
        computing.add(threading.current_thread().name)
        return slow_first(batch)

    with InBackground(noted, allowed) as sums:
        assert torch.get_num_threads() == (1 if allowed else 2)
        for batch in BATCHES:
            sums.begin(batch)
        assert sums.results() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert torch.get_num_threads() == 2
    assert (threading.main_thread().name in computing) != allowed


def test_few_batches_wait_at_a_time(two_threads: None) -> None:
    may_go_on = threading.Event()
    begun: list[int] = []

    def wait(batch: Tensor) -> None:
        assert may_go_on.wait(10)

    def give() -> None:
        with InBackground(wait, True) as waiting:
            for i, batch in enumerate(BATCHES):
                waiting.begin(batch)
                begun.append(i)
            waiting.results()

    giving = threading.Thread(target=lambda: (torch.set_num_threads(2), give()))
    giving.start()
    time.sleep(0.2)
    assert len(begun) == 2
    may_go_on.set()
    giving.join(10)
    assert len(begun) == len(BATCHES)


def test_an_error_reaches_the_program(two_threads: None) -> None:
    def fail(batch: Tensor) -> None:
        raise ValueError("no SVD of it")

    with InBackground(fail, True) as failing:
        failing.begin(BATCHES[0])
        with pytest.raises(ValueError, match="no SVD of it"):
            failing.results()
    assert torch.get_num_threads() == 2
