"""The layout of the package: which room may import which, how many there are, and
nothing twice inside `cli/`.
"""

from graphlib import CycleError, TopologicalSorter

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
