"""Units handed to other processes: the same results, and what becomes of them when a
worker or the driver is killed.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pickle import PicklingError

import numpy as np
import pytest
import xarray

from tl_coupling.studies.surveys import executors
from tl_coupling.studies.surveys.executors import (
    AsTheyFinish,
    Preemptible,
    WorkerDied,
    process_pool,
    submitted,
)
from tl_coupling.studies.surveys.units import Folder, Unit, load_unit, record

UNITS = [Unit(f"unit-{i}", {"number": i}) for i in range(4)]


def measure(unit: Unit) -> xarray.Dataset:
    return xarray.Dataset({"x": ("i", np.arange(5.0) + 100 * unit.subject["number"])})


def measure_or_die(unit: Unit) -> xarray.Dataset:
    """Number 2 kills its process until its mark is there."""
    if (
        unit.subject["number"] == 2
        and not Path(os.environ["TL_COUPLING_TEST_MARK"]).exists()
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(unit)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.nc")}


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The same units, done in this process."""
    folder = tmp_path / "alone"
    folder.mkdir()
    Folder(folder, {}).run(UNITS, measure)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.mark.long("starts worker processes")
def test_a_process_pool_gives_the_same_files(alone: Path, folder: Path) -> None:
    with process_pool(2) as executor:
        outcomes = Folder(folder, {}).run(UNITS, measure, executor=executor)
        again = Folder(folder, {}).run(UNITS, measure, executor=executor)
    assert [(o.unit, o.status) for o in outcomes] == [
        (unit, "computed") for unit in UNITS
    ]
    assert [o.status for o in again] == ["kept"] * 4
    assert bytes_of(folder) == bytes_of(alone)


def test_progress_runs_over_what_came_back_and_knows_how_much_will(
    folder: Path,
) -> None:
    Folder(folder, {}).run(UNITS[:1], measure)
    lengths, seen = [], set()

    def progress(units):
        lengths.append(len(units))
        for unit in units:
            seen.add(unit.key)
            yield unit

    with ThreadPoolExecutor(2) as executor:
        Folder(folder, {}).run(UNITS, measure, progress, executor)
    assert lengths == [3]
    assert seen == {"unit-1", "unit-2", "unit-3"}


def test_a_failure_elsewhere_is_recorded_like_one_here(folder: Path) -> None:
    def failing(unit: Unit) -> xarray.Dataset:
        if unit is UNITS[1]:
            raise RuntimeError("no\nluck")
        return measure(unit)

    with ThreadPoolExecutor(1) as executor:
        outcomes = Folder(folder, {}).run(UNITS, failing, executor=executor)
    assert [o.status for o in outcomes] == [
        "computed",
        "failed",
        "computed",
        "computed",
    ]
    assert outcomes[1].error == "RuntimeError: no luck"


def test_a_disk_that_cannot_be_written_ends_the_run_and_cancels_the_rest(
    folder: Path,
) -> None:
    cancelled = []

    class Never(Future):
        def cancel(self) -> bool:
            cancelled.append(self)
            return super().cancel()

    class Elsewhere:
        def submit(self, fn, /, *arguments):
            unit = arguments[1]
            if unit is not UNITS[0]:
                return Never()
            future: Future = Future()
            future.set_exception(OSError("cannot write"))
            return future

    with pytest.raises(OSError, match="cannot write"):
        Folder(folder, {}).run(UNITS, measure, executor=Elsewhere())
    assert len(cancelled) == 3


@pytest.mark.long("kills worker processes")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_worker_loses_nothing_finished_and_a_rerun_completes(
    alone: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TL_COUPLING_TEST_MARK", str(tmp_path / "mark"))
    with process_pool(1) as executor:
        outcomes = Folder(folder, {}).run(UNITS, measure_or_die, executor=executor)
    assert [o.status for o in outcomes] == [
        "computed",
        "computed",
        "failed",
        "computed",
    ]
    read_back = record(folder, UNITS[2])
    assert read_back is not None
    assert read_back["status"] == "failed"
    assert read_back["error"].startswith("WorkerDied: its worker died, twice")
    before = {
        path.name: path.stat().st_mtime_ns for path in folder.glob("unit-[013].*")
    }
    (tmp_path / "mark").touch()
    with process_pool(1) as executor:
        outcomes = Folder(folder, {}).run(UNITS, measure_or_die, executor=executor)
    assert [o.status for o in outcomes] == ["kept", "kept", "computed", "kept"]
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before
    assert bytes_of(folder) == bytes_of(alone)


# Python 3.12 warns of threads: the worker uses none of theirs.
FORKS_WARN = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def forking_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[executors.ProcessPool]:
    """Provide a pool of one worker that is there at once: it imports nothing again."""
    if sys.platform != "linux":
        pytest.skip("forks are safe on Linux")
    with process_pool(1) as pool:
        monkeypatch.setattr(pool, "_context", multiprocessing.get_context("fork"))
        yield pool


@FORKS_WARN
def test_a_pool_calls_in_a_process_of_its_own_and_gives_back_errors(
    forking_pool: executors.ProcessPool,
) -> None:
    pids = [forking_pool.submit(os.getpid).result(timeout=60) for _ in range(2)]
    assert pids[0] == pids[1] != os.getpid()
    with pytest.raises(ZeroDivisionError):
        forking_pool.submit(divmod, 1, 0).result(timeout=60)
    with pytest.raises((AttributeError, PicklingError), match="pickle"):
        forking_pool.submit(eval, "lambda: 0").result(timeout=60)
    assert forking_pool.submit(os.getpid).result(timeout=60) == pids[0]


@FORKS_WARN
def test_a_worker_that_dies_is_replaced_once(
    forking_pool: executors.ProcessPool, tmp_path: Path
) -> None:
    mark = tmp_path / "was here"
    pid = forking_pool.submit(die_once, mark).result(timeout=60)
    assert pid != os.getpid()
    with pytest.raises(WorkerDied, match="twice"):
        forking_pool.submit(os._exit, 1).result(timeout=60)


def die_once(mark: Path) -> int:
    """Kill this process, unless its mark is there."""
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return os.getpid()


@FORKS_WARN
def test_a_pool_that_is_left_by_an_error_ends_its_calls(
    forking_pool: executors.ProcessPool,
) -> None:
    waiting = forking_pool.submit(time.sleep, 60)
    queued = forking_pool.submit(time.sleep, 60)
    while not forking_pool._has_begun:
        time.sleep(0.01)
    start = time.monotonic()
    forking_pool.abort()
    assert time.monotonic() - start < 20
    with pytest.raises(WorkerDied):
        waiting.result(timeout=20)
    assert queued.cancelled() or queued.exception(timeout=20)
    # The next call starts a new process.
    assert forking_pool.submit(max, 1, 2).result(timeout=60) == 2
    forking_pool.shutdown()
    with pytest.raises(RuntimeError, match="was shut down: make a new one"):
        forking_pool.submit(max, 1, 2)


def test_work_that_cannot_be_submitted_is_one_line_and_the_rest_is_cancelled() -> None:
    class Refuses(ThreadPoolExecutor):
        def submit(self, *arguments: object) -> Future:
            raise RuntimeError("sbatch: error:\n  no such partition")

    line = r"could not be submitted \(RuntimeError: sbatch: error: no such partition\)"
    with (
        Refuses(1) as executor,
        pytest.raises(OSError, match=line),
        submitted(executor, measure, {"a": (UNITS[0],)}),
    ):
        pass


def test_what_was_submitted_is_cancelled_when_the_block_fails() -> None:
    futures: list[Future] = []

    class Waits:
        def submit(self, *arguments: object) -> Future:
            futures.append(Future())
            return futures[-1]

    work = {i: (unit,) for i, unit in enumerate(UNITS)}

    def fail_after_the_first() -> None:
        with submitted(Waits(), measure, work):
            futures[0].set_result(None)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_the_first()
    assert [future.cancelled() for future in futures] == [False, True, True, True]


def test_parameters_of_slurm_are_named_as_submitit_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submitit = pytest.importorskip("submitit")
    given: dict[str, object] = {}

    class Executor:
        def __init__(self, folder: str, cluster: str) -> None:
            given.update(folder=folder, cluster=cluster)

        def update_parameters(self, **parameters: object) -> None:
            if "slurm_wrong" in parameters:
                raise ValueError("unknown parameters:\n wrong")
            given.update(parameters)

        def submit(self, *arguments: object) -> None: ...

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr("shutil.which", lambda command: command)
    executor = executors.slurm_executor(tmp_path, partition="gpu", mem_gb=32)
    assert isinstance(executor, Executor)
    assert given == {
        "folder": str(tmp_path),
        "cluster": "slurm",
        "timeout_min": 240,
        "name": "tl-coupling",
        "slurm_partition": "gpu",
        "mem_gb": 32,
    }
    with pytest.raises(
        ValueError, match=r"does not accept .*: unknown parameters: wro"
    ):
        executors.slurm_executor(tmp_path, wrong=1)
    monkeypatch.setattr("shutil.which", lambda command: None)
    with pytest.raises(ValueError, match="there is no SLURM here: wanted its command"):
        executors.slurm_executor(tmp_path)


def test_more_workers_than_a_machine_can_bear_are_refused() -> None:
    n_cores = os.cpu_count() or 1
    message = rf"`workers` must be at most (32|{4 * n_cores}) on this machine of {n_cores} cores: .*; got 1000000000"
    with pytest.raises(ValueError, match=message):
        process_pool(10**9)
    with process_pool(32) as pool:
        assert pool.workers == 32


def test_a_run_works_after_the_scheduler_of_dask_died(
    folder: Path, alone: Path
) -> None:
    """xarray asked it for a lock on every file."""
    distributed = pytest.importorskip("distributed")
    command = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    place = folder.parent / "scheduler.json"
    options = ["--no-dashboard", "--scheduler-file", str(place)]
    scheduler = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not place.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # It has no workers: units wait until it dies.
        client = distributed.Client(scheduler_file=str(place), timeout=2)

        def progress(units):
            scheduler.kill()
            yield from units

        outcomes = Folder(folder, {}).run(UNITS, measure, progress, client)
        assert [outcome.status for outcome in outcomes] == ["failed"] * 4
        # As long as the client is this process' default.
        with client.as_current():
            outcomes = Folder(folder, {}).run(UNITS, measure)
        assert [outcome.status for outcome in outcomes] == ["computed"] * 4
        assert bytes_of(folder) == bytes_of(alone)
    finally:
        scheduler.kill()
        scheduler.wait()
        client.close(timeout=1)


_DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_executors import UNITS, measure
from tl_coupling.studies.surveys.executors import process_pool
from tl_coupling.studies.surveys.units import Folder

def slow(unit):
    time.sleep(0.5)
    return measure(unit)

if __name__ == "__main__":
    with process_pool(1) as executor:
        Folder(sys.argv[1], {}).run(UNITS, slow, executor=executor)
"""


@pytest.mark.long("kills worker processes")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_driver_loses_nothing_finished_and_a_rerun_completes(
    alone: Path, folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    driver = subprocess.Popen([sys.executable, script, folder, Path(__file__).parent])
    deadline = time.monotonic() + 60
    while not (folder / "unit-0.json").exists():
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    bytes_before = bytes_of(folder)
    # Its worker may still be writing what it was given.
    outcomes = Folder(folder, {}).run(UNITS, measure)
    assert outcomes[0].status == "kept"
    assert bytes_of(folder) == bytes_of(alone)
    assert bytes_before.items() <= bytes_of(folder).items()


def test_a_worker_that_died_after_its_last_write_has_done_its_work(
    folder: Path,
) -> None:
    class DiesAfterwards:
        def submit(self, fn, /, *arguments):
            fn(*arguments)
            future: Future = Future()
            future.set_exception(RuntimeError("killed"))
            return future

    assert [
        o.status
        for o in Folder(folder, {}).run(UNITS, measure, executor=DiesAfterwards())
    ] == ["computed"] * 4


def test_two_runs_in_one_folder_are_one_too_many(folder: Path) -> None:
    pytest.importorskip("fcntl")

    def inside(units):
        with pytest.raises(
            ValueError,
            match=r"another run, or one of its workers, is using .*results: wait for it",
        ):
            Folder(folder, {}).run(UNITS, measure)
        yield from units

    Folder(folder, {}).run(UNITS[:1], measure, inside)
    assert [o.status for o in Folder(folder, {}).run(UNITS[:1], measure)] == ["kept"]


def test_what_is_submitted_together_is_one_batch() -> None:
    class Batching:
        inside = False

        @contextmanager
        def batch(self) -> Iterator[None]:
            self.inside = True
            yield
            self.inside = False

        def submit(self, fn, /, *arguments):
            assert self.inside
            future: Future = Future()
            future.set_result(fn(*arguments))
            return future

    executor = Batching()
    with submitted(executor, max, {"a": (1, 2), "b": (5, 4)}) as finished:
        assert not executor.inside
        assert {key: finished.futures[key].result() for key in finished} == {
            "a": 2,
            "b": 5,
        }


def test_keys_come_in_the_order_in_which_their_futures_end() -> None:
    futures: dict[str, Future] = {name: Future() for name in "abc"}
    futures["c"].set_result(0)
    keys = AsTheyFinish(futures)
    order = iter(keys)
    assert len(keys) == 3
    assert next(order) == "c"
    futures["a"].set_exception(ValueError())
    assert next(order) == "a"
    futures["b"].cancel()
    assert list(order) == ["b"]


def test_a_preempted_job_is_the_same_call_once_more() -> None:
    pytest.importorskip("submitit")
    call = Preemptible(max)
    again = call.checkpoint(3, 7)
    assert again.function(*again.args) == call(3, 7) == 7


def test_results_are_read_back_as_they_were_measured(alone: Path) -> None:
    for unit in UNITS:
        xarray.testing.assert_identical(load_unit(alone, unit), measure(unit))
