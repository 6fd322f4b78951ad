"""`python -m same_numbers.in_tree TREE`: run the scenario with the package of one tree.

In a process of its own, whose working directory is the empty folder of results.
"""

import argparse
import os
import random
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np

from same_numbers.outcome import Outcome, write_outcomes
from same_numbers.scenario import Command, is_selected, selected_commands


def main() -> int:
    """Run all that is selected, and write how each step ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--notebooks", action="store_true")
    options = parser.parse_args()
    check_package(options.tree)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    steps: dict[str, Callable[[], int]] = {
        command.name: partial(run_command, command)
        for command in selected_commands(options.only)
    }
    if options.notebooks:
        for path in sorted((options.tree / "demos").glob("*.ipynb")):
            name = f"notebook-{path.stem}"
            if is_selected(name, options.only):
                steps[name] = partial(run_notebook, path, Path(f"{name}.ipynb"))
    outcomes: dict[str, Outcome] = {}
    for name, step in steps.items():
        print(f"  {name}", flush=True)
        outcomes[name] = outcome_of(step)
        # At once: what ends this process leaves the others' outcomes.
        write_outcomes(Path(), outcomes)
    return 0


def check_package(tree: Path) -> None:
    """Exit unless the package that is imported is the tree's."""
    import tl_coupling

    imported = Path(tl_coupling.__file__ or "").resolve()
    if not imported.is_relative_to(tree.resolve()):
        sys.exit(f"wanted the package in {tree}, imported {imported}")


def outcome_of(step: Callable[[], int]) -> Outcome:
    """Return how a step ended, whatever it raised."""
    errors = StringIO()
    with redirect_stderr(errors):
        try:
            status = step()
        except Exception:
            traceback.print_exc()
            status = 1
    if status == 0:
        return Outcome()
    print(errors.getvalue(), file=sys.stderr)
    lines = errors.getvalue().strip().splitlines() or ["no message"]
    return Outcome(status, lines[-1])


def run_command(command: Command) -> int:
    """Run `python -m tl_coupling …` in this process; return its exit status.

    One process for all of them: half of a command's time goes into imports.
    """
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (whatever draws from the global generator)
    torch.manual_seed(0)
    out = command.name + command.suffix
    arguments_before = sys.argv
    sys.argv = ["tl-coupling", *command.arguments, "--out", out]
    try:
        with (
            open(f"{command.name}.txt", "w", encoding="utf-8") as printed,
            redirect_stdout(printed),
        ):
            runpy.run_module("tl_coupling", run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = arguments_before
    return 0


def run_notebook(path: Path, result: Path) -> int:
    """Run a notebook where it lies, as `jupyter execute` does, and save it here."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    # The interpreter's own kernel, which is found beside it.
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    nbformat.write(notebook, os.fspath(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
