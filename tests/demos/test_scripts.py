"""Every demo and study starts as a script of its own, without the paths that the tests
have.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.on_4_only

DEMOS = Path(__file__).parents[2] / "demos"
SCRIPTS = sorted(
    path
    for path in DEMOS.rglob("*.py")
    if "argparse" in path.read_text() and "__main__" in path.read_text()
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_does(script: Path, tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    command = [sys.executable, str(script), "--help"]
    said = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "--out" in said.stdout


def test_all_studies_are_among_them() -> None:
    assert {"capacity", "early_surge", "gap", "ladder", "vit", "train_and_trace"} <= {
        path.stem for path in SCRIPTS
    }
