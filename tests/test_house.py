"""The layout of the package: which room may import which, how many there are, and
nothing twice inside `cli/`.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tl_coupling as tlc

pytestmark = pytest.mark.on_4_only

PACKAGE = Path(tlc.__file__).parent
# From the bottom up: a room imports rooms of lower levels, and of its own level as long
# as there is no cycle.
LEVELS = [
    "arguments interrupts progress files",
    "models prompts",
    "spectra measures statistics saved",
    "blocks",
    "gradients",
    "traces",
    "jacobians",
    "comparisons influence trajectories",
    "portraits",
    "surveys",
    "redundancy generalization",
    "plots interactive report",
    "cli",
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0][:2] != "__"
]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports at run time, also inside
    functions.
    """
    unread: list[ast.AST] = [ast.parse(path.read_text())]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unread += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["tl_coupling", *path.relative_to(PACKAGE).parts]
            start = (
                [*here[: -node.level], *filter(None, [node.module])]
                if node.level
                else [node.module or ""]
            )
            yield from (
                (node.lineno, ".".join([*start, alias.name])) for alias in node.names
            )
        else:
            unread += ast.iter_child_nodes(node)


def imports_between_rooms() -> Iterator[tuple[str, str, str]]:
    """The importing room, the imported one, and where it says so; "" is the package
    itself.
    """
    for path in MODULES:
        for line, name in imported(path):
            top, *rest = name.split(".")
            if top == "tl_coupling":
                other = rest[0] if rest and rest[0] in LEVEL else ""
                if other != room_of(path):
                    yield (
                        room_of(path),
                        other,
                        f"{path.relative_to(PACKAGE)}:{line} imports {name}",
                    )


def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\nimport torch\n"
        "if TYPE_CHECKING:\n    from tl_coupling.plots import a\n"
        "def f():\n    from tl_coupling.files import b\n    from . import c\n    from ..models.loading import d\n"
    )
    expected = [
        "typing.TYPE_CHECKING",
        "torch",
        "tl_coupling.files.b",
        "tl_coupling.room.c",
    ]
    assert [name for _, name in sorted(imported(module))] == [
        *expected,
        "tl_coupling.models.loading.d",
    ]


def test_every_room_has_a_level():
    rooms = {room_of(path) for path in MODULES}
    assert rooms <= LEVEL.keys()
    assert 10 < len(rooms) <= 25


def test_nothing_is_imported_from_above():
    upward = [
        where
        for room, other, where in imports_between_rooms()
        if other and LEVEL[other] > LEVEL[room]
    ]
    assert not upward


def test_no_room_imports_the_package_itself():
    assert not [
        where
        for room, other, where in imports_between_rooms()
        if not other and room != "cli"
    ]


def test_rooms_do_not_import_each_other_in_a_circle():
    below: dict[str, set[str]] = {}
    for room, other, _ in imports_between_rooms():
        below.setdefault(room, set()).add(other)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_transformer_lens_is_known_to_models_and_blocks_only():
    rooms = {
        room_of(path)
        for path in MODULES
        for _, name in imported(path)
        if name.split(".")[0] == "transformer_lens"
    }
    assert rooms <= {"models", "blocks"}
    assert rooms


def test_no_six_lines_stand_twice_in_the_commands():
    seen: dict[tuple[str, ...], str] = {}
    twice = []
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        numbered = [
            (n, line.strip()) for n, line in enumerate(path.read_text().splitlines(), 1)
        ]
        lines = [(n, line) for n, line in numbered if line.strip("()[]{}, ")]
        for i in range(len(lines) - 5):
            six = tuple(line for _, line in lines[i : i + 6])
            here = f"{path.name}:{lines[i][0]}"
            if six in seen:
                twice.append(f"{seen[six]} and {here}")
            seen.setdefault(six, here)
    assert not twice
