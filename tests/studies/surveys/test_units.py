"""Units of work on disk: kept, done again, failed, and a disk that is full."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xarray

from tl_coupling.files import file_name
from tl_coupling.studies.surveys.units import (
    VERSION,
    Folder,
    Unit,
    load_unit,
    plan_digest,
    record,
)

PLAN = {"of": "units"}
UNITS = [Unit(f"unit-{i}", {"number": i}) for i in range(3)]


class Measurement:
    """Gives each unit its own values and counts how often it was asked."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.asked: list[int] = []

    def __call__(self, unit: Unit) -> xarray.Dataset:
        number = unit.subject["number"]
        self.asked.append(number)
        if number in self.failing:
            raise RuntimeError(f"no\nluck with {number}")
        return xarray.Dataset({"x": ("i", np.arange(5.0) + 100 * number)})


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    Folder(tmp_path, PLAN).run(UNITS, Measurement())
    return tmp_path


def test_each_unit_is_a_result_and_a_record(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "plan.json",
        *(f"unit-{i}.{ending}" for i in range(3) for ending in ("nc", "json")),
    }
    for i, unit in enumerate(UNITS):
        np.testing.assert_array_equal(
            load_unit(finished, unit)["x"], np.arange(5) + 100 * i
        )
        read_back = record(finished, unit)
        assert read_back is not None
        assert (read_back["status"], read_back["what"]) == ("finished", {"number": i})


def test_what_is_finished_is_kept_and_not_touched(finished: Path) -> None:
    files_before, again = snapshot(finished), Measurement()
    outcomes = Folder(finished, PLAN).run(UNITS, again)
    assert [outcome.status for outcome in outcomes] == ["kept"] * 3
    assert again.asked == []
    assert snapshot(finished) == files_before


def truncated(folder: Path) -> None:
    path = folder / "unit-1.nc"
    path.write_bytes(path.read_bytes()[:-100])


def one_bit_flipped(folder: Path) -> None:
    path = folder / "unit-1.nc"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def record_of_another_shape(folder: Path) -> None:
    (folder / "unit-1.json").write_text("[1, 2]")


def record_not_text(folder: Path) -> None:
    (folder / "unit-1.json").write_bytes(b"\xff\xfe{")


def record_of_another_checksum(folder: Path) -> None:
    """Valid JSON, with what a failing disk, or somebody, has made of it."""
    text = (folder / "unit-1.json").read_text()
    (folder / "unit-1.json").write_text(text.replace('"seconds": ', '"seconds": 1'))


def record_nested_too_deeply(folder: Path) -> None:
    (folder / "unit-1.json").write_bytes(b"[" * 100_000)


def said(is_said: bool) -> AbstractContextManager[object]:
    """Expect, or not, that a run names the result that it measured anew."""
    if not is_said:
        return nullcontext()
    return pytest.warns(UserWarning, match=r"1 result in .* was measured anew: unit-1$")


def both_of_another_unit(folder: Path) -> None:
    for ending in ("nc", "json"):
        shutil.copy(folder / f"unit-2.{ending}", folder / f"unit-1.{ending}")


@pytest.mark.parametrize(
    ("damage", "is_said"),
    [
        (truncated, True),
        (one_bit_flipped, True),
        # A record that nobody can read says nothing of a result.
        (record_of_another_shape, False),
        (record_not_text, False),
        (record_of_another_checksum, False),
        (record_nested_too_deeply, False),
        (both_of_another_unit, True),
        (lambda folder: (folder / "unit-1.nc").unlink(), True),
        (lambda folder: (folder / "unit-1.nc").write_bytes(b""), True),
        (lambda folder: shutil.copy(folder / "unit-2.nc", folder / "unit-1.nc"), True),
        (lambda folder: (folder / "unit-1.json").unlink(), False),
        (lambda folder: (folder / "unit-1.json").write_text(""), False),
        (lambda folder: (folder / "unit-1.json").write_text('{"what": {"num'), False),
    ],
)
def test_what_is_missing_or_damaged_is_done_again_and_nothing_else(
    finished: Path, damage: Callable[[Path], object], is_said: bool
) -> None:
    files_before = snapshot(finished)
    damage(finished)
    again = Measurement()
    with said(is_said):
        outcomes = Folder(finished, PLAN).run(UNITS, again)
    assert [outcome.status for outcome in outcomes] == ["kept", "computed", "kept"]
    assert again.asked == [1]
    after = snapshot(finished)
    assert after.keys() == files_before.keys()
    assert {name for name in files_before if after[name] != files_before[name]} <= {
        "unit-1.nc",
        "unit-1.json",
    }
    assert [o.status for o in Folder(finished, PLAN).run(UNITS, again)] == ["kept"] * 3
    np.testing.assert_array_equal(
        load_unit(finished, UNITS[1])["x"], np.arange(5) + 100
    )


def test_a_unit_that_is_now_something_else_is_done_again(finished: Path) -> None:
    again = Measurement()
    with pytest.warns(UserWarning, match="2 results in .*: unit-0, unit-1$"):
        Folder(finished, PLAN).run(
            [Unit("unit-0", {"number": 7}), Unit("unit-1", {"number": "1"})],
            lambda unit: again(UNITS[2]),
        )
    assert again.asked == [2, 2]


def test_a_failure_is_recorded_the_others_go_on_and_a_rerun_tries_again(
    tmp_path: Path,
) -> None:
    first = Measurement(failing=(1,))
    outcomes = Folder(tmp_path, PLAN).run(UNITS, first)
    assert [(o.status, o.error) for o in outcomes] == [
        ("computed", None),
        ("failed", "RuntimeError: no luck with 1"),
        ("computed", None),
    ]
    assert record(tmp_path, UNITS[1]) == {
        "what": {"number": 1},
        "plan": plan_digest(tmp_path),
        "status": "failed",
        "error": "RuntimeError: no luck with 1",
    }
    assert not (tmp_path / "unit-1.nc").exists()
    second = Measurement()
    assert [o.status for o in Folder(tmp_path, PLAN).run(UNITS, second)] == [
        "kept",
        "computed",
        "kept",
    ]
    assert second.asked == [1]


def test_an_old_result_does_not_pass_for_that_of_a_unit_that_failed_since(
    finished: Path,
) -> None:
    truncated(finished)
    undamaged = (finished / "unit-2.nc").read_bytes()
    Folder(finished, PLAN).run(UNITS, Measurement(failing=(1,)))
    (finished / "unit-1.nc").write_bytes(undamaged)
    again = Measurement()
    Folder(finished, PLAN).run(UNITS, again)
    assert again.asked == [1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_user_can_stop_it_and_go_on_later(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    def stopped(unit: Unit) -> xarray.Dataset:
        if unit is UNITS[1]:
            raise stop
        return Measurement()(unit)

    with pytest.raises(stop):
        Folder(tmp_path, PLAN).run(UNITS, stopped)
    again = Measurement()
    Folder(tmp_path, PLAN).run(UNITS, again)
    assert again.asked == [1, 2]


def test_progress_wraps_the_loop(tmp_path: Path) -> None:
    seen = []

    def progress(units):
        for unit in units:
            seen.append(unit.key)
            yield unit

    Folder(tmp_path, PLAN).run(UNITS, Measurement(), progress)
    assert seen == ["unit-0", "unit-1", "unit-2"]


def test_another_plan_is_refused_by_name_and_nothing_is_overwritten(
    finished: Path,
) -> None:
    files_before = snapshot(finished)
    Folder(finished, {"of": "units"})
    with pytest.raises(
        ValueError,
        match=r'\(k, of\): wanted \{"k": 3, "of": "ünits"\}, found .*"units"',
    ) as caught:
        Folder(finished, {"of": "ünits", "k": 3})
    assert str(finished) in str(caught.value)
    assert snapshot(finished) == files_before


def test_a_plan_is_what_json_makes_of_it(tmp_path: Path) -> None:
    Folder(tmp_path, {"pair": (1, 2)}).run(UNITS[:1], Measurement())
    Folder(tmp_path, {"pair": [1, 2]})
    with pytest.raises(ValueError, match="another plan"):
        Folder(tmp_path, {"pair": [2, 1]})


def test_what_differs_is_named_however_long_it_is(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"\(a, of, z\)") as caught:
        Folder(finished, {"a": "long " * 1000, "of": "units!", "z": 1})
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_of_long_lists_what_differs_is_shown(tmp_path: Path) -> None:
    texts = [f"a long prompt, number {i} of many" for i in range(50)]
    Folder(tmp_path, {"prompts": texts}).run(UNITS[:1], Measurement())
    with pytest.raises(ValueError, match="another plan") as caught:
        Folder(tmp_path, {"prompts": [*texts[:-1], "an edited one", "a new one"]})
    message = str(caught.value)
    assert 'wanted {"prompts": ["an edited one", "a new one"]}' in message
    assert 'found {"prompts": ["a long prompt, number 49 of many"]}' in message


def test_the_bar_says_what_an_earlier_run_has_done(tmp_path: Path) -> None:
    folder = Folder(tmp_path, PLAN)
    shown: list[str] = []

    def seen(items: object, progress: object, label: str) -> object:
        shown.append(label)
        return items

    with mock.patch("tl_coupling.studies.surveys.units.with_progress", seen):
        folder.run(UNITS, Measurement(failing=(1,)))
        folder.run(UNITS, Measurement())
        folder.run(UNITS, Measurement())
    assert shown == ["units", "units (2 kept)", "units (3 kept)"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'["of"]', b'"text"', b"7", b"null", b"\xff\xfe"]
)
def test_a_damaged_plan_is_said(finished: Path, content: bytes) -> None:
    (finished / "plan.json").write_bytes(content)
    files_before = snapshot(finished)
    with pytest.raises(
        ValueError, match=r"plan\.json is damaged: restore it, or choose"
    ):
        Folder(finished, {"of": "units"})
    assert snapshot(finished) == files_before


def test_a_plan_that_was_changed_is_not_believed(finished: Path) -> None:
    plan = finished / "plan.json"
    plan.write_text(plan.read_text().replace("units", "unit5"))
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        Folder(finished)


@pytest.mark.parametrize("ending", ["nc", "json"])
def test_a_folder_in_place_of_a_file_is_one_clear_error(
    finished: Path, ending: str
) -> None:
    (finished / f"unit-1.{ending}").unlink()
    (finished / f"unit-1.{ending}").mkdir()
    with pytest.raises(
        OSError, match=rf"^cannot write .*unit-1\.{ending}: Is a directory$"
    ):
        Folder(finished, PLAN).run(UNITS, Measurement())


def test_a_plan_binds_from_the_first_result_on(tmp_path: Path) -> None:
    """A first run that fails on its arguments can be repeated with others."""
    Folder(tmp_path, {"k": 999}).run(UNITS, Measurement(failing=(0, 1, 2)))
    outcomes = Folder(tmp_path, {"k": 2}).run(UNITS, Measurement())
    assert [outcome.status for outcome in outcomes] == ["computed"] * 3
    with pytest.raises(ValueError, match=r"another plan \(k\)"):
        Folder(tmp_path, {"k": 999})
    assert Folder(tmp_path).plan == {"version": VERSION, "k": 2}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "an older version"),
        (1, "an older version"),
        (VERSION + 1, "another version"),
    ],
)
def test_folders_of_other_versions_are_refused_with_what_to_do(
    finished: Path, version: int | None, said: str
) -> None:
    """Until 0.1.0 plans had no version."""
    (finished / "plan.json").write_text(
        json.dumps(PLAN if version is None else {"version": version} | PLAN)
    )
    files_before = snapshot(finished)
    for plan in (None, PLAN):
        with pytest.raises(
            ValueError,
            match=f"was written by {said} of tl_coupling .*choose another folder",
        ):
            Folder(finished, plan)
    assert snapshot(finished) == files_before


def one_only(unit: Unit) -> xarray.Dataset:
    return xarray.Dataset({"x": ("i", np.full(5, -1.0))})


def test_a_run_that_is_refused_leaves_the_plan_of_the_other(tmp_path: Path) -> None:
    """Its rerun would return the other's values under its own plan."""
    pytest.importorskip("fcntl")
    other_plan = {"of": "other prompts"}

    def inside(units):
        plan_before = (tmp_path / "plan.json").read_bytes()
        with pytest.raises(
            ValueError, match="another run, or one of its workers, is using"
        ):
            Folder(tmp_path, other_plan).run(UNITS, one_only)
        assert (tmp_path / "plan.json").read_bytes() == plan_before
        yield from units

    Folder(tmp_path, PLAN).run(UNITS, Measurement(), inside)
    with pytest.raises(ValueError, match=r"another plan \(of\)"):
        Folder(tmp_path, other_plan).run(UNITS, one_only)
    assert Folder(tmp_path).plan == {"version": VERSION, **PLAN}


def test_the_plan_is_checked_again_when_a_run_begins(tmp_path: Path) -> None:
    """Both looked while the folder was empty."""
    first, second = (
        Folder(tmp_path, {"of": "first"}),
        Folder(tmp_path, {"of": "second"}),
    )
    first.run(UNITS, Measurement())
    with pytest.raises(ValueError, match=r"another plan \(of\)"):
        second.run(UNITS, one_only)
    assert Folder(tmp_path).plan["of"] == "first"
    np.testing.assert_array_equal(load_unit(tmp_path, UNITS[0])["x"], np.arange(5))


class Queue:
    """Keeps what it is given, as a cluster does whose driver was killed."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, fn, /, *arguments):
        self.jobs.append(partial(fn, *arguments))
        future: Future = Future()
        future.set_exception(RuntimeError("gone"))
        return future


@pytest.mark.parametrize("fails", [False, True])
def test_jobs_that_an_earlier_plan_left_write_nothing(
    tmp_path: Path, fails: bool
) -> None:
    queue = Queue()
    Folder(tmp_path, {"position": 0}).run(
        UNITS, Measurement((0, 1, 2)) if fails else one_only, None, queue
    )
    Folder(tmp_path, {"position": -1}).run(UNITS, Measurement())
    files_before = snapshot(tmp_path)
    for job in queue.jobs:
        status, error = job()
        assert status == "failed"
        assert "the folder is now of another plan" in error
    assert snapshot(tmp_path) == files_before


def test_a_job_of_an_earlier_plan_that_is_measuring_writes_nothing_either(
    tmp_path: Path,
) -> None:
    def while_another_run_begins_and_ends(unit: Unit) -> xarray.Dataset:
        Folder(tmp_path, {"position": -1}).run(UNITS, Measurement())
        return one_only(unit)

    queue = Queue()
    Folder(tmp_path, {"position": 0}).run(
        UNITS[:1], while_another_run_begins_and_ends, None, queue
    )
    assert queue.jobs[0]()[0] == "failed"
    np.testing.assert_array_equal(load_unit(tmp_path, UNITS[0])["x"], np.arange(5))
    assert [
        o.status for o in Folder(tmp_path, {"position": -1}).run(UNITS, Measurement())
    ] == ["kept"] * 3


def result_of_another_plan(folder: Path) -> None:
    """What came too late to be stopped."""
    other_folder = folder.parent / f"{folder.name}-other"
    other_folder.mkdir()
    Folder(other_folder, {"of": "another plan"}).run(UNITS[1:2], one_only)
    for ending in ("nc", "json"):
        shutil.copy(other_folder / f"unit-1.{ending}", folder)


def test_results_of_another_plan_are_done_again(finished: Path) -> None:
    result_of_another_plan(finished)
    again = Measurement()
    with said(True):
        outcomes = Folder(finished, PLAN).run(UNITS, again)
    assert [outcome.status for outcome in outcomes] == ["kept", "computed", "kept"]
    assert again.asked == [1]
    np.testing.assert_array_equal(
        load_unit(finished, UNITS[1])["x"], np.arange(5) + 100
    )


def test_a_unit_that_another_plan_replaced_during_the_run_has_failed(
    tmp_path: Path,
) -> None:
    def progress(units):
        for unit in units:
            if unit is UNITS[2]:
                result_of_another_plan(tmp_path)
            yield unit

    outcomes = Folder(tmp_path, PLAN).run(UNITS, Measurement(), progress)
    assert [outcome.status for outcome in outcomes] == [
        "computed",
        "failed",
        "computed",
    ]
    message = (
        "its result was replaced by a job of another plan: end that job, and run again"
    )
    assert outcomes[1].error == message


def test_records_of_earlier_versions_are_of_the_plan_beside_them(
    finished: Path,
) -> None:
    for unit in UNITS:
        path = finished / f"{unit.key}.json"
        content = json.loads(path.read_text())
        del content["plan"], content["digest"]
        path.write_text(json.dumps(content))
    files_before = snapshot(finished)
    assert [o.status for o in Folder(finished, PLAN).run(UNITS, one_only)] == [
        "kept"
    ] * 3
    assert snapshot(finished) == files_before


def test_results_without_a_plan_are_not_ours(finished: Path) -> None:
    (finished / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"holds results, but no plan\.json"):
        Folder(finished, {"of": "units"})
    assert not (finished / "plan.json").exists()


def test_names_of_files_are_safe_and_different() -> None:
    names = [
        "step1",
        "STEP.1-a_b",
        "refs/pr/1",
        "../up",
        "a b",
        "a%20b",
        "ü",
        "\u02f1",
        "/1",
        "*[?]",
        "~",
    ]
    files = [file_name(name) for name in names]
    assert files[:2] == names[:2]
    assert len(set(files)) == len(names)
    assert not any(c in "".join(files) for c in "/\\ *?[]:")
    assert not any(name.startswith(".") for name in files)
    long = [file_name("字" * n) for n in (60, 61)]
    assert len(set(long)) == 2
    assert all(len(name) < 200 for name in long)
    assert "/" not in os.path.normpath(f"x-{file_name('../up')}")


_ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from unittest import mock
import numpy as np, xarray
from tl_coupling.studies.surveys.units import Folder, Unit

folder, limit = Path(sys.argv[1]), int(sys.argv[2])

def measure(unit):
    print("asked", unit.key)
    return xarray.Dataset({"x": ("i", np.arange(unit.subject["size"], dtype=float))})

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    sizes = {"small": 10, "large": 9999, "last": 5}
    Folder(folder, {"of": "sizes"}).run([Unit(key, {"size": size}) for key, size in sizes.items()], measure)
except OSError as error:
    print("OSError:", error)
"""


def write_under(limit: int, folder: Path) -> list[str]:
    """What the run prints where no file may grow beyond `limit` bytes (0: no limit)."""
    ended = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(folder), str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr[-500:]
    assert "Traceback" not in ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.long("fills a disk")
@pytest.mark.skipif(
    sys.platform != "linux", reason="limits the size of files as Linux does"
)
def test_a_full_disk_is_one_clear_error_and_a_rerun_completes(tmp_path: Path) -> None:
    printed = write_under(60_000, tmp_path)
    assert printed[:2] == ["asked small", "asked large"]
    assert len(printed) == 3
    assert printed[2].startswith(f"OSError: cannot write {tmp_path / 'large.nc'}: ")
    assert "is the disk full" in printed[2]
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.json",
        "small.nc",
        "small.json",
    }
    files_before = snapshot(tmp_path)
    assert write_under(0, tmp_path) == ["asked large", "asked last"]
    assert {
        name: content
        for name, content in snapshot(tmp_path).items()
        if name in files_before
    } == files_before
    np.testing.assert_array_equal(
        load_unit(tmp_path, Unit("large", {}))["x"], np.arange(9999)
    )


@pytest.mark.long("fills a disk")
@pytest.mark.skipif(
    sys.platform != "linux", reason="limits the size of files as Linux does"
)
def test_a_disk_without_room_for_anything_is_said_of_the_file_that_was_wanted(
    tmp_path: Path,
) -> None:
    """netCDF says "Permission denied" of a temporary file then, and a text file has no
    name in its error.
    """
    (printed,) = write_under(10, tmp_path)
    assert printed.startswith(f"OSError: cannot write {tmp_path / 'plan.json'}: ")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").write_text(json.dumps({"version": VERSION, "of": "sizes"}))
    asked, printed = write_under(50, tmp_path)
    assert asked == "asked small"
    assert printed.startswith(f"OSError: cannot write {tmp_path / 'small.nc'}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
