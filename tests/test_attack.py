"""A hundredth of `make attack`; and that it finds what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attack.child import BUG, DONE, REFUSED, Child, done
from attack.subject import Subject, finished

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks, and looks processes up as Linux does"
    ),
]


@pytest.mark.long("attacks processes, folders and disks")
def test_a_small_share_of_every_attack_finds_nothing(tmp_path: Path) -> None:
    # Those of workers and commands take half a minute each; test_interrupts.py and
    # studies/surveys/test_executors.py have their like.
    kinds = ["runs", "measurements", "folders", "plan", "changes", "disks", "inputs"]
    kinds += ["arguments", "threads", "saved files"]
    command = [sys.executable, "-m", "attack", "--share", "0.02", "--only", *kinds]
    ended = subprocess.run(
        [*command, "--save", tmp_path / "found.json"],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-1000:]
    counts = json.loads((tmp_path / "found.json").read_text())["attacks"]
    assert {name: row["attacks"] for name, row in counts.items()} == {
        **{
            "kills of runs": 3,
            "interrupts of measurements": 8,
            "interrupts of runs": 2,
        },
        **{"racing plans": 1, "orphans of an earlier plan": 1},
        **{"changes under streamed models": 1, "changes under resident models": 1},
        **{"damaged folders": 1, "full disks": 1, "hostile inputs": 2},
        **{"changed arguments": 2, "threads": 1, "damaged saved files": 4},
    }


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("attack"))


@pytest.mark.long("runs a survey and damages it")
def test_a_wrong_value_and_a_unit_computed_again_are_found(subject: Subject) -> None:
    folder = subject.new_folder()
    subject.run(folder)
    finished_before = finished(folder)
    assert len(finished_before) == subject.n_units == 6
    assert subject.faults(folder, finished_before, "nothing") == []
    # Another model's values under a checksum of their own.
    one, other = folder / "a@main+0", folder / "b@main+0"
    record = json.loads(one.with_suffix(".json").read_text())
    del record["digest"]
    record["sha256"] = json.loads(other.with_suffix(".json").read_text())["sha256"]
    one.with_suffix(".json").write_text(json.dumps(record))
    one.with_suffix(".nc").write_bytes(other.with_suffix(".nc").read_bytes())
    faults = subject.faults(folder, finished_before, "a forgery")
    assert [fault.partition(":")[0] for fault in faults] == [
        "wrong value",
        "recomputed or lost",
    ]
    assert subject.completed(folder, "a forgery") == [
        "wrong value: run again after a forgery"
    ]


def test_a_bug_is_told_from_a_refusal() -> None:
    def told() -> None:
        raise ValueError("one line")

    def two_lines() -> None:
        raise ValueError("one\nline")

    def bug() -> None:
        raise KeyError("provenance")

    child = Child(told)
    assert child.faults("it", (REFUSED,)) == []
    assert child.said() == "one line\n"
    assert done(told, "it")[0].startswith("status 2: it")
    assert done(two_lines, "it", (REFUSED,))[0].startswith("more than a line: it")
    assert done(bug, "it", (DONE, BUG))[0].startswith("traceback: it")
