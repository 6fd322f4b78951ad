"""Every notebook in demos/ runs from top to bottom, and its own assertions hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

pytestmark = pytest.mark.on_4_only

NOTEBOOKS = sorted((Path(__file__).parents[2] / "demos").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, smollm2: nn.Module) -> None:
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-p", "no:cacheprovider", notebook]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
