"""A tree's scenario in a fresh process, whose surroundings are the same for every tree."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from same_numbers.outcome import Outcome, Outcomes, take_outcomes

TOOLS = Path(__file__).parents[1]
# What would come from the machine, the clock or a random generator otherwise.
FIXED = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    # In which no cell of a table is broken.
    "COLUMNS": "300",
    # The date in a drawing.
    "SOURCE_DATE_EPOCH": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
# Names within an SVG are random unless salted.
MATPLOTLIBRC = "svg.hashsalt: same numbers\n"
# Notebooks show the names of temporary folders, which are random unless counted.
KERNEL_START = """\
import itertools
import tempfile

tempfile._name_sequence = (f"{number:08}" for number in itertools.count())
"""
PROCESS = "the process of all steps"


@dataclass(frozen=True)
class Selection:
    """Which steps run.

    Attributes:
        only: those whose name contains one of these; all if there are none.
        notebooks: whether notebooks are among them.
    """

    only: Sequence[str] = ()
    notebooks: bool = False


def run_scenario(tree: Path, results: Path, selection: Selection) -> Outcomes:
    """Run the scenario of a tree; its results lie in the new folder afterwards.

    Returns:
        How each step ended, and the process itself.
    """
    # Both trees' results are written in the same place: no path in them differs.
    running = results.parent / "running"
    running.mkdir()
    command = [sys.executable, "-m", "same_numbers.in_tree", str(tree)]
    if selection.notebooks:
        command.append("--notebooks")
    if selection.only:
        command += ["--only", *selection.only]
    # As empty for the second tree as for the first.
    temporary = results.parent / "temporary"
    temporary.mkdir()
    surroundings = environment(tree, results.parent, temporary)
    ended = subprocess.run(command, cwd=running, env=surroundings)
    shutil.rmtree(temporary)
    outcomes = take_outcomes(running)
    message = f"exit status {ended.returncode}"
    outcomes[PROCESS] = Outcome(ended.returncode, message)
    running.rename(results)
    return outcomes


def environment(tree: Path, folder: Path, temporary: Path) -> Mapping[str, str]:
    """Return the variables of the process; the tree comes first on its path."""
    rc_file = folder / "matplotlibrc"
    rc_file.write_text(MATPLOTLIBRC)
    start_folder = folder / "ipython" / "profile_default" / "startup"
    start_folder.mkdir(parents=True, exist_ok=True)
    (start_folder / "names.py").write_text(KERNEL_START)
    path = os.pathsep.join([str(tree), str(TOOLS)])
    places = {
        "PYTHONPATH": path,
        # No hub's cache: what is not embedded or an input is not found.
        "HF_HOME": str(folder / "hub"),
        "MATPLOTLIBRC": str(rc_file),
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(temporary),
    }
    return {**os.environ, **FIXED, **places}
