"""Files written whole: beside other writers, alive or killed, and for others to
read.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xarray

from tl_coupling.files import (
    as_cell,
    file_name,
    of_cell,
    remove_left_overs,
    write_atomically,
)
from tl_coupling.studies.surveys import units
from tl_coupling.studies.surveys.units import (
    Folder,
    Unit,
    is_finished,
    load_unit,
    run_unit,
)

UNIT = Unit("unit-1", {"number": 1})
DAY = 24 * 3600


def result(value: float) -> xarray.Dataset:
    return xarray.Dataset({"x": ("i", np.full(1000, value))})


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Writes half of its result, and the rest when it may.
_WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_files import UNIT, result
from tl_coupling.studies.surveys.units import run_unit

folder = Path(sys.argv[1])

class Slow:
    def to_netcdf(self, path, engine):
        result(1).to_netcdf(path, engine=engine)
        whole = path.read_bytes()
        path.write_bytes(whole[:2000])
        (folder / "half").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
        path.write_bytes(whole)

print(run_unit(folder, UNIT, lambda unit: Slow()).status)
"""


@contextmanager
def half_written(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", _WRITER, str(folder), str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as writer:
        try:
            wait_until(lambda: (folder / "half").exists() or writer.poll() is not None)
            yield writer
        finally:
            writer.kill()


def unfinished(folder: Path) -> list[Path]:
    return list(folder.glob(".unit-1.*"))


@pytest.mark.long("starts processes")
def test_two_processes_at_one_unit_both_finish_it(tmp_path: Path) -> None:
    with half_written(tmp_path) as writer:
        (theirs,) = unfinished(tmp_path)
        assert run_unit(tmp_path, UNIT, lambda unit: result(1)).status == "computed"
        assert is_finished(tmp_path, UNIT)
        assert unfinished(tmp_path) == [theirs]
        (tmp_path / "go on").touch()
        output, errors = writer.communicate(timeout=60)
        assert (output.strip(), errors, writer.returncode) == ("computed", "", 0)
    assert is_finished(tmp_path, UNIT)
    assert unfinished(tmp_path) == []
    xarray.testing.assert_identical(load_unit(tmp_path, UNIT), result(1))


@pytest.mark.long("kills processes")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    with half_written(tmp_path) as writer:
        writer.kill()
        writer.wait()
        assert len(unfinished(tmp_path)) == 1
        run_unit(tmp_path, UNIT, lambda unit: result(1))
        assert unfinished(tmp_path) == []


def test_files_of_nobody_known_here_are_removed_when_they_are_old(
    tmp_path: Path,
) -> None:
    endings = (
        f"{'0' * 12}-{os.getpid()}-ab12.nc",
        f"{'0' * 12}-1-ab12.json",
        "ab12.nc",
        f"{'0' * 12}-99999999999-a.nc",
    )
    ours = [tmp_path / f".unit-1.{ending}" for ending in endings]
    foreign = [
        tmp_path / name
        for name in (
            ".unit-11.ab12.nc",
            ".unit-1.5.ab12.nc",
            ".unit-1.nc",
            "unit-1.ab12.nc",
        )
    ]
    for path in (*ours, *foreign):
        path.write_bytes(b"half")
    remove_left_overs(tmp_path, "unit-1")
    assert all(path.exists() for path in (*ours, *foreign))
    for path in (*ours, *foreign):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    remove_left_overs(tmp_path, "unit-1")
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in foreign)


def test_a_plan_leaves_no_left_overs_either(tmp_path: Path) -> None:
    left_over = tmp_path / ".plan.ab12.json"
    left_over.write_bytes(b"half")
    os.utime(left_over, (time.time() - 2 * DAY,) * 2)
    Folder(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_record_is_of_the_result_that_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our checksum and our record another process puts its own result and
    record in place.
    """
    write_record = units.write_record

    def after_another(folder: Path, unit: Unit, content: dict[str, object]) -> None:
        monkeypatch.setattr(units, "write_record", write_record)
        run_unit(folder, unit, lambda unit: result(2))
        write_record(folder, unit, content)

    monkeypatch.setattr(units, "write_record", after_another)
    run_unit(tmp_path, UNIT, lambda unit: result(1))
    assert is_finished(tmp_path, UNIT)
    xarray.testing.assert_identical(load_unit(tmp_path, UNIT), result(2))


def test_a_failure_does_not_undo_what_another_process_finished(tmp_path: Path) -> None:
    def fails_late(unit: Unit) -> xarray.Dataset:
        run_unit(tmp_path, unit, lambda unit: result(2))
        raise RuntimeError("out of memory")

    assert run_unit(tmp_path, UNIT, fails_late).status == "kept"
    assert is_finished(tmp_path, UNIT)


def test_files_are_as_readable_as_any_new_file(tmp_path: Path) -> None:
    for mask in (0o022, 0o077, 0o000):
        own_mask = os.umask(mask)
        try:
            path = write_atomically(
                tmp_path / f"{mask}.txt",
                lambda unfinished: unfinished.write_text("text"),
            )
        finally:
            os.umask(own_mask)
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_umask_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the whole process's: a file that another thread makes meanwhile would be
    anybody's to write.
    """

    def umask(mask: int) -> int:
        raise AssertionError(f"the umask was set to {mask:o}")

    monkeypatch.setattr(os, "umask", umask)
    write_atomically(
        tmp_path / "one.txt", lambda unfinished: unfinished.write_text("text")
    )
    assert (tmp_path / "one.txt").read_text() == "text"


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("old")

    def fails(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fails)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one.txt", "old")]


@pytest.mark.parametrize(
    "error", [RuntimeError("NetCDF: HDF error"), OSError(28, "No space left on device")]
)
def test_a_disk_that_fills_is_one_clear_error(tmp_path: Path, error: Exception) -> None:
    """netCDF's is no OSError."""

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    reason = (
        "NetCDF: HDF error"
        if isinstance(error, RuntimeError)
        else "No space left on device"
    )
    with pytest.raises(
        OSError, match=rf"^cannot write .*sweep\.nc: {reason}; is the disk full"
    ):
        write_atomically(tmp_path / "sweep.nc", write)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_something_else_stays_what_it_is(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match=r"^a bug$"):
        write_atomically(tmp_path / "sweep.nc", write)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_a_file_and_a_second_one_does_not(
    tmp_path: Path, stop: signal.Signals
) -> None:
    """Amid netCDF's calls it could leave a lock taken, and whoever closes the file
    waits for ever.
    """

    def write(path: Path, n_signals: int) -> None:
        for _ in range(n_signals):
            os.kill(os.getpid(), stop)
        path.write_text("whole")

    own_handler = signal.signal(stop, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "once", lambda path: write(path, 1))
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "twice", lambda path: write(path, 2))
        assert signal.getsignal(stop) is signal.default_int_handler
    finally:
        signal.signal(stop, own_handler)
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("step1000", "step1000"),
        ("org/model@main", "org%2Fmodel%40main"),
        (".hidden", "%2Ehidden"),
        ("a" * 150, "a" * 150),
    ],
)
def test_short_names_can_be_read(text: str, name: str) -> None:
    assert file_name(text) == name


def test_long_names_are_cut_and_still_differ() -> None:
    names = [file_name("a" * 400 + end) for end in "xy"]
    assert all(len(name) == 150 + len("~") + 16 for name in names)
    assert len(set(names)) == 2


@pytest.mark.parametrize("value", ["plain", "a = b", "-0.3", "+1e5", "", 3, None, 0.5])
def test_a_cell_that_is_no_formula_stays_as_it_is(value: object) -> None:
    assert as_cell(value) == value
    assert of_cell(value) == value


@pytest.mark.parametrize("text", ["=1+1", "@sum", "+a", "-x", "\t=1"])
def test_a_formula_is_marked_and_read_again(text: str) -> None:
    assert as_cell(text) == f"'{text}"
    assert of_cell(as_cell(text)) == text
