"""Items at once in forked processes: their results, errors and warnings are those of one
after the other, and no process is left behind.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
import tl_coupling.jacobians
from tl_coupling.jacobians import Decomposed
from tl_coupling.jacobians.forks import can_fork, of_each
from tl_coupling.surveys import Settings, measure_prompts

HERE = os.getpid()
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux"),
]
TEXTS = ["w3 w14 w15 w92", "w5 w6 w7", "w9 w2 w6 w5 w35", "w8 w1"]
SETTINGS = Settings(k=(2, 4), n_singular_values=6)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("gpt_neox"), tokenizer_folder)


def with_pid(item: int) -> tuple[int, int]:
    return item, os.getpid()


@pytest.mark.parametrize("n_items", [0, 1, 2, 7])
def test_results_come_in_order_and_from_processes_of_their_own(n_items, two_threads):
    items = (item for item in range(n_items))
    results = list(of_each(with_pid, items, 2))
    assert [item for item, _ in results] == list(range(n_items))
    pids = {pid for _, pid in results}
    # One item needs no process; of several, each has its own.
    assert pids == {HERE} if n_items == 1 else HERE not in pids
    assert len(pids) == n_items
    assert not multiprocessing.active_children()


def test_a_slow_item_does_not_stop_the_others(two_threads):
    def pause(seconds: float) -> float:
        time.sleep(seconds)
        return time.monotonic()

    slow, *quick = of_each(pause, [1.0, 0.0, 0.0, 0.0], 2)
    assert all(end < slow for end in quick)


def test_only_a_few_items_are_read_ahead(two_threads):
    read = []

    def endless() -> Iterator[int]:
        for item in count():
            read.append(item)
            yield item

    results = of_each(with_pid, endless(), 2)
    assert [next(results)[0], next(results)[0]] == [0, 1]
    assert len(read) <= 6
    results.close()
    assert not multiprocessing.active_children()


def test_each_has_one_thread(two_threads):
    def n_threads(_: int) -> int:
        return torch.get_num_threads()

    assert list(of_each(n_threads, range(2), 2)) == [1, 1]
    torch.set_num_threads(4)
    assert list(of_each(n_threads, range(2), 2)) == [1, 1]
    # Two forks would leave most of five threads without work.
    torch.set_num_threads(5)
    assert list(of_each(n_threads, range(2), 2)) == [5, 5]


def test_they_compute_after_several_threads_have(two_threads):
    # In a process of its own: with several threads a fork would wait forever.
    code = """
        import torch
        from tl_coupling.jacobians.forks import of_each
        torch.set_num_threads(4)
        matrix = torch.ones(600, 600)
        def total(factor):
            product = (factor * matrix).exp() @ matrix
            return float(torch.linalg.qr(product)[1].abs().max())
        here = [total(factor) for factor in range(2)]
        forked = list(of_each(total, range(2), 2))
        assert torch.allclose(torch.tensor(here), torch.tensor(forked)), (here, forked)
    """
    code = textwrap.dedent(code)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_error_is_the_one_of_one_by_one(two_threads):
    def inverse(item: int) -> float:
        return 1 / item

    results = of_each(inverse, [2, 0, 4], 2)
    assert next(results) == 0.5
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_fork_did_not_give_is_computed_here(number, two_threads):
    def killed(item: int) -> tuple[int, int]:
        if item == 1 and os.getpid() != HERE:
            os.kill(os.getpid(), number)
        return with_pid(item)

    results = list(of_each(killed, range(3), 2))
    assert [item for item, _ in results] == [0, 1, 2]
    assert results[1] == (1, HERE)
    assert HERE not in (results[0][1], results[2][1])


def test_what_cannot_be_sent_is_computed_here(two_threads):
    results = list(of_each(lambda item: lambda: item, range(3), 2))
    assert [result() for result in results] == [0, 1, 2]


def test_warnings_are_given_here(two_threads):
    def warn(item: int) -> int:
        warnings.warn(f"item {item} is odd", UserWarning, stacklevel=1)
        return item

    with pytest.warns(UserWarning, match="is odd") as caught:
        assert list(of_each(warn, range(3), 2)) == [0, 1, 2]
    texts = [str(warning.message) for warning in caught]
    assert texts == ["item 0 is odd", "item 1 is odd", "item 2 is odd"]
    assert {warning.filename for warning in caught} == {__file__}


def test_a_warning_that_is_an_error_is_one(two_threads):
    def warn(item: int) -> int:
        warnings.warn("never", UserWarning, stacklevel=1)
        return item

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="never"):
            list(of_each(warn, range(3), 2))


def test_an_interrupt_ends_them():
    """Ctrl-C in a terminal goes to all processes of a group."""
    program = """
        import sys, time, torch
        from tl_coupling.jacobians.forks import of_each
        torch.set_num_threads(2)

        def pause(item):
            print("begun", flush=True)
            time.sleep(60)

        list(of_each(pause, range(4), 2))
    """
    process = started(program)
    process.stdout.readline(), process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    # One traceback, of this process alone.
    assert errors.count("Traceback") == 1


@pytest.mark.long("interrupts processes")
@pytest.mark.parametrize("where", ["before", "after_in_parent", "after_in_child"])
def test_an_interrupt_while_it_forks_is_not_lost(where):
    """Python forgets an exception in what it calls before and after a fork."""
    program = f"""
        import multiprocessing, os, signal, time, torch
        from tl_coupling.jacobians.forks import of_each
        torch.set_num_threads(2)
        is_sent = multiprocessing.Value("b", False)

        def interrupt():
            # Each fork would send one, and a second one interrupts the first.
            with is_sent.get_lock():
                if is_sent.value:
                    return
                is_sent.value = True
            os.killpg(0, signal.SIGINT)

        os.register_at_fork({where}=interrupt)
        list(of_each(time.sleep, [60, 60], 2))
    """
    process = started(program)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert "KeyboardInterrupt" in errors


def test_they_end_with_the_process_that_forked_them():
    program = """
        import os, time, torch
        from tl_coupling.jacobians.forks import of_each
        torch.set_num_threads(2)

        def pause(item):
            print(os.getpid(), flush=True)
            time.sleep(60)

        list(of_each(pause, range(4), 2))
    """
    process = started(program)
    process.stdout.readline(), process.stdout.readline()
    process.kill()
    # They hold its output open, which ends with the last of them.
    process.communicate(timeout=20)


def started(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_forks_need_threads_to_share_out(monkeypatch, two_threads):
    assert can_fork()
    torch.set_num_threads(1)
    assert not can_fork()
    torch.set_num_threads(2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_fork()


@pytest.fixture
def pids(monkeypatch) -> list[int]:
    """The processes in which prompts are decomposed, as far as this one knows."""
    known: list[int] = []

    def decompose_each(*args: Any) -> Iterator[Decomposed]:
        known.append(os.getpid())
        return tl_coupling.jacobians.decompose_each(*args)

    monkeypatch.setattr("tl_coupling.comparisons.pairs.decompose_each", decompose_each)
    return known


def test_prompts_at_once_give_what_they_give_one_by_one(model, pids, two_threads):
    at_once = measure_prompts(model, TEXTS, SETTINGS)
    assert not pids, "a prompt was measured in this process"
    torch.set_num_threads(1)
    one_by_one = measure_prompts(model, TEXTS, SETTINGS)
    assert pids == [HERE] * len(TEXTS)
    assert at_once.attrs == one_by_one.attrs
    assert set(at_once) == set(one_by_one)
    for name, expected in one_by_one.items():
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(at_once[name], expected, rtol=1e-6, atol=1e-6)
        else:
            assert at_once[name].equals(expected), name


def test_a_mean_over_prompts_is_taken_at_once(model, pids, two_threads):
    traces = [tlc.trace(model, text) for text in TEXTS]
    at_once = tlc.mean_depth_coupling(traces, 4)
    assert not pids, "a prompt was measured in this process"
    # The limit is one process's.
    limited = tlc.mean_depth_coupling(traces, 4, max_memory="1 GB")
    assert pids == [HERE]
    torch.testing.assert_close(at_once.means, limited.means)
    torch.testing.assert_close(at_once.spreads, limited.spreads)
    assert at_once.provenance == limited.provenance


def test_a_model_with_hooks_is_measured_in_this_process(model, two_threads):
    seen = []
    hook = model.blocks[0].register_forward_hook(lambda *_: seen.append(os.getpid()))
    assert tlc.plan(model, 4).prompts_at_once == 1
    measure_prompts(model, TEXTS, SETTINGS)
    assert set(seen) == {HERE}
    hook.remove()
    assert tlc.plan(model, 4).prompts_at_once == 2


def test_errors_of_prompts_at_once_name_the_prompt(model, monkeypatch, two_threads):
    def refuse(trace: tlc.Trace, *args: Any, **options: Any) -> NoReturn:
        raise ValueError(f"{trace.n_pos} tokens are refused")

    monkeypatch.setattr("tl_coupling.surveys.measurements.depth_couplings", refuse)
    with pytest.raises(ValueError, match="prompt '0': 4 tokens are refused"):
        measure_prompts(model, TEXTS, SETTINGS)
    assert not multiprocessing.active_children()


def test_as_many_prompts_at_once_as_fit_in_memory(model, monkeypatch, two_threads):
    plan = tlc.plan(model, 4)
    assert plan.prompts_at_once == 2
    assert "prompts of a survey at a time" in str(plan)
    of_one = plan.jacobians + plan.result + plan.working
    for n_that_fit, expected in ((0.5, 1), (1.5, 1), (2.5, 2), (100, 2)):
        free = n_that_fit * 2 * of_one
        monkeypatch.setattr(
            "tl_coupling.jacobians.memory._free_memory", lambda _, free=free: free
        )
        assert tlc.plan(model, 4).prompts_at_once == expected
    torch.set_num_threads(1)
    assert tlc.plan(model, 4).prompts_at_once == 1


def test_a_worker_of_a_pool_measures_its_prompts_one_by_one(two_threads):
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(can_fork) is False
