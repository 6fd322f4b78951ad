"""`python -m same_numbers BEFORE [AFTER]`: whether two commits give the same numbers.

The same commands run in both, and everything that they write and print is compared.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from same_numbers.comparison import (
    ComparedFile,
    compare_folders,
    compare_outcomes,
    table,
)
from same_numbers.left_out import NOT_CONTENT, NOT_NUMBERS, NOT_RESULTS
from same_numbers.run import Selection, run_scenario
from same_numbers.scenario import COMMANDS, selected_commands
from same_numbers.trees import WORKING_TREE, InputError, checked_out, commit_of


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print a table; return 1 if anything differs, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m same_numbers",
        description=__doc__,
        epilog="exit status 0: all equal; 1: something differs; 2: bad input",
    )
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument(
        "after", metavar="AFTER", nargs="?", help=f"another; {WORKING_TREE} by default"
    )
    parser.add_argument(
        "--notebooks", action="store_true", help="run those in demos/ as well"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only commands and notebooks whose name contains one of these",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep what was written, in a new one",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep the outcome as JSON"
    )
    options = parser.parse_args(arguments)
    try:
        return _compare(options)
    except (InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    selection = Selection(options.only, options.notebooks)
    _check_selection(selection)
    commits = {"before": commit_of(options.before), "after": None}
    if options.after is not None:
        commits["after"] = commit_of(options.after)
    if options.save:
        _check_folder_of(options.save)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="tl_coupling_same_")
        root = Path(stack.enter_context(temporary)).resolve()
        results = root / "results"
        if options.keep:
            results = _new_folder(options.keep)
        else:
            results.mkdir()
        compared = _run_both(commits, root / "tree", results, selection)
    print(f"\n{table(compared)}", flush=True)
    if options.save:
        options.save.write_text(_as_json(commits, compared), encoding="utf-8")
    return int(any(file.differences for file in compared))


def _check_selection(selection: Selection) -> None:
    """Refuse parts of names that no command has; notebooks are known to their tree."""
    if not selected_commands(selection.only) and not selection.notebooks:
        parts = " or ".join(map(repr, selection.only))
        names = ", ".join(command.name for command in COMMANDS)
        raise InputError(f"no command has {parts} in its name; there are {names}")


def _check_folder_of(file: Path) -> None:
    if not file.parent.is_dir():
        raise InputError(f"wanted a file in a folder that exists, got {file}")


def _new_folder(folder: Path) -> Path:
    """Make the folder: what lay there before would be compared."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"wanted a new or empty folder to keep results in, got {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _run_both(
    commits: dict[str, str | None], tree: Path, results: Path, selection: Selection
) -> list[ComparedFile]:
    """Run one tree after the other in the same place: no path in it differs."""
    from same_numbers.inputs import write_inputs

    write_inputs(results / "inputs")
    outcomes = {}
    for role, commit in commits.items():
        print(f"{role}: {commit or WORKING_TREE}", flush=True)
        with checked_out(commit, tree):
            outcomes[role] = run_scenario(tree, results / role, selection)
    steps = compare_outcomes(outcomes["before"], outcomes["after"])
    if not steps:
        raise InputError(f"no step has {' or '.join(selection.only)} in its name")
    return steps + compare_folders(results / "before", results / "after")


def _as_json(commits: dict[str, str | None], compared: list[ComparedFile]) -> str:
    outcome: dict[str, Any] = {
        **commits,
        "files": [asdict(file) for file in compared],
        "left out": {**NOT_NUMBERS, **NOT_CONTENT, **NOT_RESULTS},
    }
    return json.dumps(outcome, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
