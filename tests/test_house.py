"""The layout of the package: which room may import which, how many there are, and
nothing twice inside `cli/`.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rooms import LEVEL, MODULES, PACKAGE, imported, imports_between_rooms, room_of

pytestmark = pytest.mark.on_4_only


def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr("rooms.PACKAGE", tmp_path)
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


def _lines_beside_imports(path: Path) -> list[tuple[int, str]]:
    """Numbered lines that say something; every command imports much of the same."""
    source = path.read_text()
    import_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            import_lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return [
        (number, line.strip())
        for number, line in enumerate(source.splitlines(), 1)
        if number not in import_lines and line.strip("()[]{}, ")
    ]


def test_no_six_lines_stand_twice_in_the_commands():
    seen: dict[tuple[str, ...], str] = {}
    repeated = []
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        lines = _lines_beside_imports(path)
        for i in range(len(lines) - 5):
            six_lines = tuple(line for _, line in lines[i : i + 6])
            place = f"{path.name}:{lines[i][0]}"
            if six_lines in seen:
                repeated.append(f"{seen[six_lines]} and {place}")
            seen.setdefault(six_lines, place)
    assert not repeated
