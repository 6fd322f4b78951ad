"""Forked children of a process in which another thread is at work. Those that compute
are of scripts in processes of their own.
"""

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from forking import CHILD_SECONDS, check_child, entered_by_another_thread
from rooms import MODULES, PACKAGE
from tl_coupling.arguments import cached_property, fork_safe_lock, shared_changes

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here"),
    # Python 3.12 and later warn of what is tried here.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
# What every script begins with.
IMPORTS = """
import threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
import tl_coupling as tlc
from forking import check_child, entered_by_another_thread
"""


def run_script(code: str) -> None:
    """Run a script in a process of its own; AssertionError where it fails or hangs."""
    tests = Path(__file__).parents[1]
    folders = [PACKAGE.parent, tests, tests / "support"]
    finished = subprocess.run(
        [sys.executable, "-c", IMPORTS + code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=10 * CHILD_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_a_child_finds_a_lock_free_that_another_thread_holds() -> None:
    lock = fork_safe_lock()

    def take() -> None:
        with lock, lock:
            pass
        # It is a lock there, too.
        with entered_by_another_thread(lock):
            assert not lock.acquire(blocking=False)
        assert lock.acquire(blocking=False)

    with entered_by_another_thread(lock):
        check_child(take)
        assert not lock.acquire(blocking=False)


def test_a_child_keeps_the_lock_that_its_own_thread_holds() -> None:
    lock = fork_safe_lock()

    def others_wait() -> None:
        taken = []
        thread = threading.Thread(
            target=lambda: taken.append(lock.acquire(timeout=0.1))
        )
        thread.start()
        thread.join()
        assert taken == [False]
        # As the end of the context in which the parent forked.
        lock.release()
        with entered_by_another_thread(lock):
            pass

    with lock:
        check_child(others_wait)


def test_a_child_takes_back_what_another_thread_changed() -> None:
    """The last change first, all of them where one cannot be taken back, and none of its
    own thread's.
    """
    state = {"own": 0, "other": 0, "nested": 0}

    @contextmanager
    def changed(name: str) -> Iterator[None]:
        with shared_changes() as undo:
            # To what it was: in another order it would become something else.
            undo.callback(state.update, {name: state[name]})
            state[name] += 1
            yield

    @contextmanager
    def another_change() -> Iterator[None]:
        parent = os.getpid()

        def fail() -> None:
            if os.getpid() != parent:
                raise ValueError

        with (
            changed("other"),
            changed("nested"),
            changed("nested"),
            shared_changes() as undo,
        ):
            undo.callback(fail)
            yield

    def check() -> None:
        assert state == {"own": 1, "other": 0, "nested": 0}
        own.close()
        assert state == {"own": 0, "other": 0, "nested": 0}

    with ExitStack() as own:
        own.enter_context(changed("own"))
        with entered_by_another_thread(another_change()):
            check_child(check)
            assert state == {"own": 1, "other": 1, "nested": 2}
        assert state == {"own": 1, "other": 0, "nested": 0}
    assert state == {"own": 0, "other": 0, "nested": 0}


def test_a_child_computes_a_property_that_another_thread_computes() -> None:
    """Of another object, too: before 3.12 Python's own has one lock for all."""
    is_begun = threading.Event()
    may_end = threading.Event()

    class Result:
        @cached_property
        def value(self) -> object:
            if threading.current_thread() is not threading.main_thread():
                is_begun.set()
                may_end.wait()
            return object()

    first = Result()
    second = Result()
    thread = threading.Thread(target=lambda: first.value, daemon=True)
    thread.start()
    is_begun.wait()
    check_child(lambda: (first.value, second.value))
    assert second.value is second.value
    may_end.set()
    thread.join()
    assert first.value is first.value


def test_a_child_measures_while_another_thread_does() -> None:
    """However it is forked, and with torch's settings as they are in its parent."""
    run_script(
        """
import multiprocessing, os, subprocess, sys
from tl_coupling.arguments import measuring

torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
J = torch.diag(torch.tensor([4.0, 3.0]))

# It computes nothing: MKL has a lock of its own, which a thread holds as it ends.
def wait_for_turn():
    with measuring():
        pass

def measure():
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_float32_matmul_precision() == "medium"
    assert tlc.svd(J).S.tolist() == [4, 3]
    # One thread at a time, there too.
    with entered_by_another_thread(measuring()):
        thread = threading.Thread(target=wait_for_turn, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    # And children of the child.
    if os.getpid() == first:
        return
    with entered_by_another_thread(measuring()):
        check_child(lambda: tlc.svd(J))

first = os.getpid()
context = multiprocessing.get_context("fork")
with entered_by_another_thread(measuring()):
    check_child(measure)
    process = context.Process(target=measure)
    process.start()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    code = "import sys; sys.exit(0)"
    subprocess.run([sys.executable, "-c", code], preexec_fn=measure, check=True)
"""
    )


@pytest.mark.long("starts transformers, and measures a model some fifty times")
def test_a_child_measures_the_model_that_another_thread_measures() -> None:
    """Wherever that one is: weights, hooks and settings are as before it began, and
    numbers the same to the bit.
    """
    run_script(
        """
import sys
from torch import nn
import tiny

model = tiny.huggingface_model("llama", dtype=torch.bfloat16).train()
ids = torch.tensor([tiny.TOKENS])
blocks = tiny.layers_of(model)

def measure():
    step = tlc.training.measure(blocks, lambda: model(ids), 4)
    return step.depth.matrices, step.depth.provenance["paths"]

def state():
    facts = []
    for module in model.modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        facts.append((module.training, hooks, "forward" in vars(module)))
    facts += [(p.dtype, p.requires_grad, float(p.sum())) for p in model.parameters()]
    # Of all modules, and of torch.
    facts.append(len(nn.modules.module._global_forward_pre_hooks))
    facts.append(torch.backends.cuda.flash_sdp_enabled())
    return facts

expected, paths = measure()
# Parts of blocks are replaced, too.
assert all("recorded" in path for path in paths.values()), paths
before = state()

class Stopping:
    # Calls a measurement in this thread, and stops it at a call of the package's.
    def __init__(self, place):
        self.n_calls = 0
        self.place = place
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def count(self, frame, event, _):
        if event != "call" or "tl_coupling" not in frame.f_code.co_filename:
            return
        self.n_calls += 1
        if self.n_calls == self.place:
            self.is_there.set()
            self.may_go.wait()

    def __call__(self):
        sys.setprofile(self.count)
        try:
            self.found, _ = measure()
        finally:
            sys.setprofile(None)

def child():
    assert state() == before
    found, _ = measure()
    assert torch.equal(found, expected)

whole = Stopping(0)
whole()
n_changed = 0
for i in range(1, 26):
    stopping = Stopping(i * whole.n_calls // 27)
    thread = threading.Thread(target=stopping, daemon=True)
    thread.start()
    assert stopping.is_there.wait(60)
    n_changed += state() != before
    check_child(child)
    stopping.may_go.set()
    thread.join()
    # The parent goes on as if nothing had been forked.
    assert torch.equal(stopping.found, expected)
    assert state() == before
assert n_changed > 15, n_changed
""",
    )


def test_a_child_measures_where_its_parent_did_with_several_threads() -> None:
    """GNU's OpenMP waits in a child for threads that only the parent has."""
    run_script(
        """

torch.set_num_threads(2)
J = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))

def measure():
    n_threads = torch.get_num_threads()
    S = tlc.svd(J).S
    assert torch.get_num_threads() == n_threads
    return S

def check():
    torch.testing.assert_close(measure(), expected)
    # The child's own number is its own business.
    torch.set_num_threads(1)
    torch.testing.assert_close(measure(), expected)

expected = measure()
check_child(check)
"""
    )


def test_locks_of_modules_are_free_in_children() -> None:
    """And so are properties that are computed once."""
    other_locks = []
    for path in MODULES:
        if path.name == "forks.py":
            continue
        tree = ast.parse(path.read_text())
        other_locks += [
            f"{path.relative_to(PACKAGE)}: {ast.unparse(statement)}"
            for statement in tree.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            and any(name in ast.unparse(statement) for name in ("Lock(", "Condition("))
        ]
        other_locks += [
            f"{path.relative_to(PACKAGE)}: {ast.unparse(statement)}"
            for statement in ast.walk(tree)
            if isinstance(statement, ast.ImportFrom)
            and statement.module == "functools"
            and "cached_property" in ast.unparse(statement)
        ]
    assert other_locks == []


def test_hooks_are_taken_back_in_children() -> None:
    """Every file that hooks a module names them among what is."""
    for path in MODULES:
        source = path.read_text()
        hooks = "register_forward_" in source or "register_module_" in source
        assert not hooks or "shared_changes" in source, path
