"""Whether tests notice errors: `make plant-errors` changes one line at a time of a copy
of the package, and runs the tests of its room against the copy.

Lines are drawn by a seed, at least one in each room: an operator is replaced by its
opposite, or a number by the next one. What no test notices is listed, to be read: some
changes change nothing.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tl_coupling"
OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# Seconds after which the tests of a room are taken to hang.
LIMIT = 900


class PlantedError(NamedTuple):
    """One changed expression: where it is, what it says, and what it says instead."""

    file: str
    line: int
    original: str
    changed: str
    columns: tuple[int, int]

    @property
    def room(self) -> str:
        parts = Path(self.file).with_suffix("").parts[1:]
        # Studies are several rooms.
        return "/".join(parts[: 2 if parts[0] == "studies" else 1])

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.original}  ->  {self.changed}"


def changed_nodes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield expressions of one line, each with one operator or number changed.

    Messages of errors, annotations and what type checkers alone read stay as they are.
    """
    unread = [tree]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.AnnAssign):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        unread += ast.iter_child_nodes(node)
        changed = _changed(node)
        if changed is not None:
            yield node, changed  # type: ignore[misc]


def _changed(node: ast.AST) -> ast.expr | None:
    """Return a copy of an expression with its operator or number changed."""
    changed: Any
    match node:
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            if type(operator) not in OPPOSITES:
                return None
            changed = copy.deepcopy(node)
            changed.op = OPPOSITES[type(operator)]()
        case ast.Compare(ops=[operator, *_]) if type(operator) in OPPOSITES:
            changed = copy.deepcopy(node)
            changed.ops[0] = OPPOSITES[type(operator)]()
        case ast.Constant(value=number) if type(number) in (int, float):
            # One more than 1e50 is 1e50.
            if number + 1 == number:
                return None
            changed = ast.Constant(number + 1)
        case _:
            return None
    return changed


def planted_errors(path: Path) -> list[PlantedError]:
    """Return every error that can be planted in a file."""
    source = path.read_text()
    lines = source.splitlines()
    errors = []
    for node, changed in changed_nodes(ast.parse(source)):
        line = lines[node.lineno - 1].encode()
        if node.end_lineno != node.lineno:
            continue
        columns = (node.col_offset, node.end_col_offset or 0)
        original = line[slice(*columns)].decode()
        if isinstance(changed, ast.Constant):
            replacement = ast.unparse(changed)
        else:
            replacement = f"({ast.unparse(changed)})"
        errors.append(
            PlantedError(
                file=str(path.relative_to(ROOT)),
                line=node.lineno,
                original=original,
                changed=replacement,
                columns=columns,
            )
        )
    return errors


def drawn(number: int, seed: int) -> list[PlantedError]:
    """Return so many errors, one in each room first, then in rooms by their size."""
    rng = random.Random(seed)
    by_room: dict[str, list[PlantedError]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.startswith("__"):
            for error in planted_errors(path):
                by_room.setdefault(error.room, []).append(error)
    chosen = [rng.choice(errors) for errors in by_room.values()]
    rng.shuffle(chosen)
    every_error = [error for errors in by_room.values() for error in errors]
    while len(chosen) < number:
        chosen.append(rng.choice(every_error))
    return sorted(chosen[:number])


def tests_of(room: str) -> list[str]:
    """Return the tests of a room: its folder, or the files that bear its name."""
    folder = ROOT / "tests" / room
    if folder.is_dir():
        return [str(folder)]
    return [str(path) for path in sorted(folder.parent.glob(f"test_{folder.name}*.py"))]


def plant(error: PlantedError, tree: Path) -> None:
    """Write the changed line into a copy of the checkout."""
    path = tree / error.file
    lines = path.read_text().split("\n")
    line = lines[error.line - 1].encode()
    start, end = error.columns
    lines[error.line - 1] = (
        line[:start] + error.changed.encode() + line[end:]
    ).decode()
    path.write_text("\n".join(lines))


def notices(error: PlantedError, python: Path, options: list[str]) -> str:
    """Return which test noticed the error first; "" if none did."""
    with tempfile.TemporaryDirectory(prefix="planted_") as name:
        tree = Path(name)
        shutil.copytree(
            ROOT,
            tree,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(
                ".venv*", "out", ".git", ".*_cache", "_build", "__pycache__"
            ),
        )
        plant(error, tree)
        tests = [path.replace(str(ROOT), str(tree), 1) for path in tests_of(error.room)]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *options, *tests],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return f"none ended within {LIMIT} s"
    if done.returncode == 0:
        return ""
    failed = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0].split(" - ")[0] if failed else done.stdout[-200:] + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--errors", type=Path, help="those of a file, not drawn")
    parser.add_argument("--save", type=Path, help="write the errors to this file")
    parser.add_argument("pytest", nargs="*", default=["-m", "not long"])
    options = parser.parse_args()
    if options.errors:
        read = json.loads(options.errors.read_text())
        errors = [
            PlantedError(**{**row, "columns": (*row["columns"],)}) for row in read
        ]
    else:
        errors = drawn(options.number, options.seed)
    if options.save:
        rows = [error._asdict() for error in errors]
        options.save.write_text(json.dumps(rows, indent=1))
    n_noticed = 0
    for error in errors:
        if options.list:
            print(error)
            continue
        noticed_by = notices(error, options.python, options.pytest)
        n_noticed += bool(noticed_by)
        print(f"{error}\n    {noticed_by or 'NOT NOTICED'}", flush=True)
    if not options.list:
        print(f"{n_noticed} of {len(errors)} noticed")


if __name__ == "__main__":
    main()
