"""Ctrl-C and SIGTERM, as terminals and batch systems send them: to real processes,
while they are at something.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import typer
import xarray

from forking import check_child
from tl_coupling.cli.console import work_in
from tl_coupling.files import write_atomically
from tl_coupling.interrupts import interrupts_held
from tl_coupling.studies.surveys.executors import process_pool
from tl_coupling.studies.surveys.survey import Survey, run_survey
from tl_coupling.studies.surveys.units import Folder, Unit, plan_digest, record

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes here"),
]


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Collect the signals that reach this process, in place of its own handlers."""
    heard: list[int] = []
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _: heard.append(number))
    yield heard
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_held_back_comes_at_the_end(
    heard: list[int], number: int
) -> None:
    handler = signal.getsignal(number)
    with interrupts_held():
        signal.raise_signal(number)
        assert heard == []
    assert heard == [number]
    assert signal.getsignal(number) is handler
    signal.raise_signal(number)
    assert heard == [number, number]


def test_a_second_signal_takes_effect_at_once(heard: list[int]) -> None:
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]


def test_inner_blocks_do_not_release_what_an_outer_one_holds(heard: list[int]) -> None:
    with interrupts_held():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        assert heard == []
    assert heard == [signal.SIGINT]


def test_an_error_beside_an_interrupt_is_not_lost() -> None:
    def both() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("beside it")

    with pytest.raises(KeyboardInterrupt) as interrupted:
        both()
    assert str(interrupted.value.__context__) == "beside it"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_holds_nothing_back(heard: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def hold() -> None:
        with interrupts_held():
            assert [signal.getsignal(number) for number in SIGNALS] == handlers

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold).result()


def wait_until(ready: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# The command, with units that take their time at one thing. Workers import this file as
# well.
_COMMAND = """
import os, sys, time
from pathlib import Path
import numpy as np, xarray
from tl_coupling.studies.surveys.survey import MeasureModel
from tl_coupling.cli import main

folder, stage = Path(os.environ["TL_COUPLING_TEST_MARK"]), os.environ["TL_COUPLING_TEST_STAGE"]

class Slow:
    def to_netcdf(self, path, engine):
        path.write_bytes(b"half")
        at_it()

def at_it():
    (folder / f"pid-{os.getpid()}").touch()
    while True:
        np.linalg.svd(np.ones((50, 50)))

def measure(self, unit):
    if unit.subject["prompts"] == [0, 1]:
        return xarray.Dataset({"x": ("i", np.arange(5.0))})
    if stage == "measuring":
        at_it()
    return Slow()

MeasureModel.__call__ = measure
if __name__ == "__main__":
    main()
"""


@pytest.mark.long("interrupts processes")
@pytest.mark.parametrize(
    ("stage", "workers", "signals"),
    [
        ("writing", 2, [signal.SIGINT] * 3),
        ("loading", 2, [signal.SIGINT]),
        ("measuring", 2, [signal.SIGTERM]),
        ("measuring", None, [signal.SIGINT] * 2),
        # A write that hangs: the second signal does not wait for it.
        ("writing", None, [signal.SIGTERM] * 2),
    ],
)
def test_a_command_ends_within_seconds_in_one_line(
    tmp_path: Path, stage: str, workers: int | None, signals: list[signal.Signals]
) -> None:
    (tmp_path / "command.py").write_text(_COMMAND)
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(1, 9))
    )
    options = [
        "--model",
        "some/model",
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--prompts-per-unit",
        1,
    ]
    options += ["--out", tmp_path / "out", *(("--workers", workers) if workers else ())]
    command = list(
        map(str, [sys.executable, tmp_path / "command.py", "survey", *options])
    )
    variables = os.environ | {
        "TL_COUPLING_TEST_MARK": str(tmp_path),
        "TL_COUPLING_TEST_STAGE": stage,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, env=variables, start_new_session=True, **pipes
    ) as driver:
        try:
            units = tmp_path / "out" / "units"

            def is_at_it() -> bool:
                if stage == "loading":
                    return (units / "plan.json").exists()
                return (
                    any(tmp_path.glob("pid-*"))
                    and (units / "some%2Fmodel@main+0.json").exists()
                )

            wait_until(lambda: is_at_it() or driver.poll() is not None)
            # Somewhere in the start of the workers.
            time.sleep(0.5 if stage == "loading" else 0)
            start = time.monotonic()
            for number in signals:
                if driver.poll() is None:
                    os.killpg(driver.pid, number)
                time.sleep(0.1)
            output, errors = driver.communicate(timeout=30)
        finally:
            driver.kill()
    assert time.monotonic() - start < 15
    n = 0 if stage == "loading" else 1
    expected = (
        f"tl-coupling: interrupted: {units} keeps {n} of 8 finished; "
        "run the same again to do the rest"
    )
    assert (output, errors.strip()) == ("", expected)
    assert driver.returncode == 128 + signals[0]
    wait_until(
        lambda: (
            not any(is_running(int(path.name[4:])) for path in tmp_path.glob("pid-*"))
        ),
        10,
    )
    if workers is None:
        assert not list(units.glob(".*"))


@pytest.mark.long("interrupts processes")
def test_a_command_without_units_says_what_it_has_written(
    call, folder_model: Path, tmp_path: Path, monkeypatch
) -> None:
    """The second of its files is not written any more."""
    from tl_coupling.cli import console

    written = []

    def interrupted(path: Path, write: Callable[[Path], object]) -> Path:
        written.append(write_atomically(path, write))
        os.kill(os.getpid(), signal.SIGINT)
        return path

    monkeypatch.setattr(console, "write_atomically", interrupted)
    own_handler = signal.getsignal(signal.SIGINT)
    try:
        output = call(
            "depth", model=folder_model, prompt="w3 w4", k=4, out=tmp_path, status=130
        ).err
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    names = ", ".join(sorted(["depth.nc", *(path.name for path in written)]))
    assert (
        f"tl-coupling: interrupted: {tmp_path} has {names} of this run; "
        "the same command does all of it" in output
    )
    assert len(written) == 1


def test_a_survey_that_is_stopped_after_its_last_unit_names_the_folder_of_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units are in a folder of the output; those of an earlier run are not named."""
    old = tmp_path / "figures" / "before.png"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (0, 0))
    finished = tmp_path / "units" / "tiny" / "step0.nc"

    def measure_and_stop() -> None:
        with work_in(tmp_path):
            finished.parent.mkdir(parents=True)
            finished.touch()
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        measure_and_stop()
    error = capsys.readouterr().err
    assert f"interrupted: {tmp_path} has units of this run" in error


UNITS = [Unit(f"unit-{i}", {"number": i}) for i in range(6)]


def measure_or_hang(unit: Unit) -> xarray.Dataset:
    folder = Path(os.environ["TL_COUPLING_TEST_MARK"])
    (folder / f"asked-{unit.key}").touch()
    if unit.subject["number"] and not (folder / "go on").exists():
        (folder / f"pid-{os.getpid()}").touch()
        while True:
            time.sleep(0.01)
    return xarray.Dataset({"x": ("i", np.arange(5.0) + unit.subject["number"])})


@pytest.mark.long("interrupts worker processes")
def test_an_interrupted_pool_ends_its_workers_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TL_COUPLING_TEST_MARK", str(tmp_path))
    folder = tmp_path / "results"
    folder.mkdir()

    def interrupt() -> None:
        try:
            wait_until(
                lambda: (
                    len(list(tmp_path.glob("pid-*"))) == 2
                    and record(folder, UNITS[0]) is not None
                )
            )
            # A worker that is stopped, as Ctrl-Z does it, hears of nothing but SIGKILL.
            os.kill(int(next(tmp_path.glob("pid-*")).name[4:]), signal.SIGSTOP)
        finally:
            # Or nothing would end the units, which wait for a mark.
            os.kill(os.getpid(), signal.SIGINT)

    with process_pool(2) as pool:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(
            KeyboardInterrupt,
            match=r"results keeps 1 of 6 finished; run the same again to do the rest",
        ):
            Folder(folder, {}).run(UNITS, measure_or_hang, executor=pool)
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        workers = list(tmp_path.glob("pid-*"))
        assert not any(is_running(int(path.name[4:])) for path in workers)
        n_asked = len(list(tmp_path.glob("asked-*")))
        # Those that a worker had not begun are not begun any more.
        assert n_asked == 3
        (tmp_path / "go on").touch()
        outcomes = Folder(folder, {}).run(UNITS, measure_or_hang, executor=pool)
        assert [o.status for o in outcomes] == ["kept"] + ["computed"] * 5
    assert list(folder.glob(".*")) == []
    with pytest.raises(RuntimeError, match="was shut down"):
        pool.submit(max, 1, 2)


def test_a_survey_says_so_where_it_has_a_folder_and_keeps_still_where_not(
    tmp_path: Path,
) -> None:
    survey = Survey({"some": "some/model"}, ["w1", "w2"], prompts_per_unit=1)

    def interrupted(units: object) -> object:
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted: .*results keeps 0 of 2 finished"
    ):
        run_survey(survey, tmp_path / "results", progress=interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_survey(survey, progress=interrupted)
    assert str(caught.value) == ""


def poison(unit: Unit) -> xarray.Dataset:
    if unit.subject["number"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return xarray.Dataset({"x": ("i", np.arange(5.0))})


@pytest.mark.long("kills worker processes")
def test_a_unit_that_kills_its_worker_is_named_and_the_others_are_done(
    tmp_path: Path,
) -> None:
    seen = []

    def progress(units):
        assert len(units) == 6
        for unit in units:
            seen.append(unit.key)
            yield unit

    with process_pool(2) as pool:
        outcomes = Folder(tmp_path, {}).run(UNITS, poison, progress, pool)
    assert [o.status == "failed" for o in outcomes] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert sorted(seen) == [unit.key for unit in UNITS]
    error = "WorkerDied: its worker died, twice: out of memory?"
    recorded = {
        "what": {"number": 1},
        "plan": plan_digest(tmp_path),
        "status": "failed",
        "error": error,
    }
    assert record(tmp_path, UNITS[1]) == recorded


def die(n_threads: int) -> None:
    os._exit(3)


@pytest.mark.long("starts worker processes")
def test_workers_that_cannot_begin_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tl_coupling.studies.surveys import executors

    monkeypatch.setattr(executors, "_begin", die)
    guard = r"died before they began: .* under `if __name__ == \"__main__\":`"
    with pytest.raises(OSError, match=guard), process_pool(1) as pool:
        Folder(tmp_path, {}).run(UNITS, measure_or_hang, executor=pool)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_signal_that_another_thread_receives_waits_as_well(heard: list[int]) -> None:
    """The system may give a signal to any thread; its handler runs in the main one."""
    with interrupts_held():
        sender = threading.Thread(target=signal.raise_signal, args=[signal.SIGINT])
        sender.start()
        sender.join()
        # Python runs handlers between any two of its steps.
        sum(range(1000))
        assert heard == []
    assert heard == [signal.SIGINT]


def test_a_child_is_ended_by_a_second_signal_at_the_latest(heard: list[int]) -> None:
    """Of a process that was forked while its parent held signals back."""

    def hear() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert heard == [signal.SIGTERM]

    with interrupts_held():
        check_child(hear)
    assert heard == []
