"""The two tiers of the tests, what is said of them in the end, and the errors that are
planted to see whether the fast one notices.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import plant_errors
import report_tests

CASE = '<testcase classname="tests.{room}.test_it" name="{name}" time="{time}">{end}</testcase>'


def written_run(folder: Path, name: str, *cases: dict[str, Any]) -> Path:
    defaults = {"room": "plots", "name": "test_one", "time": 0.1, "end": ""}
    texts = [CASE.format(**(defaults | case)) for case in cases]
    path = folder / f"{name}.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(texts)}</testsuite></testsuites>")
    return path


def test_what_takes_long_and_is_not_marked_is_listed(tmp_path: Path) -> None:
    fast = written_run(
        tmp_path,
        "test-tl4",
        {"name": "test_slow", "time": 5.2},
        {"name": "test_quick", "time": 4.9},
    )
    long = written_run(tmp_path, "test-long-tl4", {"name": "test_long", "time": 300})
    _, _, listed = report_tests.report([fast, long]).partition("have no mark")
    assert "tests/plots/test_it.py::test_slow" in listed
    assert "test_quick" not in listed
    assert "test_long" not in listed


def test_counts_are_those_of_each_run_and_skips_say_why(tmp_path: Path) -> None:
    skipped = {"end": '<skipped type="pytest.skip" message="no GPU here"/>'}
    runs = [
        written_run(tmp_path, "test-tl4", {}, {}, skipped, skipped),
        written_run(tmp_path, "test-tl3", {}, {"end": '<failure message="1 != 2"/>'}),
    ]
    lines = report_tests.report(runs).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["test-tl4", "2", "0", "2"],
        ["test-tl3", "1", "1", "0"],
    ]
    assert [line.split(maxsplit=2) for line in lines if "no GPU" in line] == [
        ["2", "test-tl4", "no GPU here"]
    ]


def test_a_mark_of_the_long_tier_says_why(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tiers import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers = long(reason): why")
    pytester.makepyfile("import pytest\n@pytest.mark.long\ndef test_it(): pass")
    ended = pytester.runpytest_inprocess()
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["*test_it* is marked `long` without a reason*"])


def test_a_remark_fails_a_test_of_the_fast_tier_alone(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest("from tiers import pytest_collection_modifyitems")
    pytester.makeini(
        "[pytest]\nmarkers = long(reason): why\n"
        "filterwarnings =\n    error:a remark\n    error:old"
    )
    pytester.makepyfile(
        """
        import warnings

        import pytest

        def test_fast():
            warnings.warn("a remark")

        @pytest.mark.long("all architectures")
        def test_long():
            warnings.warn("a remark")

        @pytest.mark.long("all architectures")
        def test_long_deprecation():
            warnings.warn("old", DeprecationWarning)

        @pytest.mark.filterwarnings("error:a remark")
        @pytest.mark.long("all architectures")
        def test_long_without_remarks():
            warnings.warn("a remark")
        """
    )
    ended = pytester.runpytest_inprocess("-p", "no:randomly")
    ended.assert_outcomes(passed=1, failed=3, warnings=1)
    ended.stdout.no_fnmatch_line("FAILED *::test_long - *")


def test_tests_of_a_group_run_in_one_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what they share is made once in each: pytest 9.2 and pytest-xdist 3.8 do
    that without a word (pytest-xdist#1386).
    """
    # What else is installed for pytest takes seconds to import in three processes.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.xdist_group("one")
        @pytest.mark.parametrize("n", range(8))
        def test_it(n, record_property):
            record_property("process", os.getpid())
        """
    )
    ended = pytester.runpytest_subprocess(
        *("-p", "xdist", "-n", "2", "--dist", "loadgroup", "--junit-xml", "run.xml")
    )
    ended.assert_outcomes(passed=8)
    text = (pytester.path / "run.xml").read_text()
    processes = re.findall(r'name="process" value="(\d+)"', text)
    assert len(processes) == 8
    assert len(set(processes)) == 1


def test_a_planted_error_changes_one_line_of_its_room(tmp_path: Path) -> None:
    errors = plant_errors.drawn(40, seed=1)
    assert len({error.room for error in errors}) >= 25
    assert all(plant_errors.tests_of(error.room) for error in errors)
    for error in errors:
        original = (plant_errors.ROOT / error.file).read_text()
        path = tmp_path / error.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(original)
        plant_errors.plant(error, tmp_path)
        changed = path.read_text()
        pairs = zip(original.split("\n"), changed.split("\n"), strict=True)
        different = [n for n, (old, new) in enumerate(pairs, 1) if old != new]
        assert different == [error.line]
        assert ast.dump(ast.parse(original)) != ast.dump(ast.parse(changed))


def test_every_room_has_tests_for_its_planted_errors() -> None:
    for error in plant_errors.drawn(40, seed=2):
        assert plant_errors.tests_of(error.room), error
