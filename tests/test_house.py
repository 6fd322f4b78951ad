"""The layout of the package: which room may import which, how many there are, and
nothing twice inside `cli/`.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rooms import (
    LEVEL,
    MODULES,
    PACKAGE,
    PUBLIC_PATHS,
    classes_by_room,
    every_import,
    imported,
    imports_between_files,
    imports_between_rooms,
    reach_ins,
    room_named,
    room_of,
)

TESTS = Path(__file__).parent
FOLDERS = sorted(
    str(path.parent.relative_to(PACKAGE))
    for path in PACKAGE.glob("**/__init__.py")
    if path.parent != PACKAGE
)
# There is none today; more than a handful would be a habit.
MOST_REACH_INS = 5

# Rooms of one level, side by side, do not know each other but for these.
WITHIN_A_LEVEL = {
    ("results", "arguments"),
    ("results", "files"),
    ("measures", "spectra"),
    ("influence", "comparisons"),
    ("interactive", "pictures"),
    ("report", "interactive"),
    ("report", "pictures"),
}
SHOWING = ("pictures", "interactive", "report", "studies.plots")
NEEDED_BY_ALL = ("arguments", "files", "progress", "interrupts")
# Of these, pictures and the report need not even know a class.
NEVER_SHOWN = ("models", "blocks", "jacobians")
# But for what was recorded: pictures show a stream.
SHOWN_ALL_THE_SAME = {"Trace"}
# What pictures call of lower rooms, and what for: nothing here runs a model, traces,
# differentiates or decomposes.
CALLED_BY_PICTURES = {
    "changes_in_words": "what was done to the Jacobians, for a title",
    "attention_sinks": "which tokens are left out of a picture's limits",
    "change_and_predictors": "rows of a result, side by side",
    "check_alike": "refuses portraits that one page cannot show side by side",
    "check_k": "refuses a k that a result does not hold",
    "check_redundancy": "refuses a dataset that is no result of redundancy",
    "covariate_lines": "made where its caller has not made it",
    "crossed_mean": "the band around a mean over seeds and prompts",
    "inverse_singular_value_fit": "made where its caller has not made it",
    "label_of": "a name",
    "mean_name": "a name",
    "measure_named": "a name",
    "measured_in": "a name",
    "null_interval_of_coupling": "the band around the null of a mean over pairs",
    "null_name": "a name",
    "pairs_of_layers": "a name",
    "plural": "a number with its noun",
    "small_map": "draws a map, for results as well",
    "prompts_in_words": "which prompts a mean is over, for a title",
    "prompt_relation": "made where its caller has not made it",
    "random_subspace_null": "a closed form, drawn as a line",
    "split_by_task": "the rows of a table, split by task",
    "step_order": "the order of columns",
    "strongest_heads": "names, in the order of a column",
    "trajectory_pca": "the axes of a trajectory's plane",
}


def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr("rooms.PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\nimport torch\n"
        "if TYPE_CHECKING:\n    from tl_coupling.pictures import a\n"
        "def f():\n    from tl_coupling.files import b\n    from . "
        "import c\n    from ..models.loading import d\n"
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
    assert 10 < len(rooms) <= 27


def test_a_public_path_hands_out_names_of_its_rooms_and_is_imported_by_no_room():
    for name, rooms in PUBLIC_PATHS.items():
        assert {module for module, _ in every_import(PACKAGE / f"{name}.py")} == {
            f"tl_coupling.{room}" for room in rooms
        }
    paths = {f"tl_coupling.{name}" for name in PUBLIC_PATHS}
    through_a_path = [
        path for path in MODULES if paths & {module for module, _ in every_import(path)}
    ]
    assert not through_a_path


def test_nothing_is_imported_from_above():
    upward = [
        where
        for room, other, where in imports_between_rooms()
        if other and LEVEL[other] > LEVEL[room]
    ]
    assert not upward, upward


def test_rooms_of_one_level_import_each_other_only_where_listed():
    """Statistics, for one, know no measure: what they need is passed to them."""
    sideways = {
        (room, other): where
        for room, other, where in imports_between_rooms()
        if other and LEVEL[other] == LEVEL[room]
    }
    unlisted = [sideways[pair] for pair in sideways.keys() - WITHIN_A_LEVEL]
    assert not unlisted, unlisted
    assert sideways.keys() >= WITHIN_A_LEVEL, "take what is not imported off the list"


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


def test_files_do_not_import_each_other_in_a_circle():
    """Also not for type checkers alone: two files that know each other are one."""
    try:
        TopologicalSorter(imports_between_files()).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(str(file) for file in error.args[1]))


def test_no_string_names_a_class_or_module_of_a_higher_room():
    """An arrow upwards in disguise: a check that knows a class by its name."""
    classes = classes_by_room()
    upward = []
    for path in MODULES:
        level = LEVEL[room_of(path)]
        higher = {room for room in LEVEL if LEVEL[room] > level}
        of_higher = set().union(*(classes.get(room, set()) for room in higher))
        of_higher -= classes[room_of(path)]
        modules = {f"tl_coupling.{room}" for room in higher}
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if not re.fullmatch(r"[\w.]+", node.value):
                continue
            first_two = ".".join(node.value.split(".")[:2])
            if node.value.rpartition(".")[2] in of_higher or first_two in modules:
                where = path.relative_to(PACKAGE)
                upward.append(f"{where}:{node.lineno} names {node.value!r}")
    assert not upward, upward


def test_few_imports_reach_past_the_door_of_another_room():
    """What other rooms need, a room hands out in its `__init__`."""
    assert len(found := list(reach_ins())) <= MOST_REACH_INS, "\n".join(found)


def test_pictures_and_the_report_import_results_and_compute_nothing():
    """They know results by their classes, and the names of measures. A function that
    they call all the same is listed with what it is for.
    """
    seen = set()
    computing = []
    for path in MODULES:
        if room_of(path) not in SHOWING:
            continue
        for module, name in every_import(path):
            room = room_named(f"{module}.{name}".split(".")[1:])
            if room in SHOWING or room in NEEDED_BY_ALL:
                continue
            seen.add(name)
            is_type = name[0].isupper() and room not in NEVER_SHOWN
            is_type |= name in SHOWN_ALL_THE_SAME
            if not is_type and name not in CALLED_BY_PICTURES:
                where = path.relative_to(PACKAGE)
                computing.append(f"{where} imports {module}.{name}")
    assert not computing
    assert seen >= CALLED_BY_PICTURES.keys(), "take what is not imported off the list"


@pytest.mark.parametrize("room", FOLDERS)
def test_tests_mirror_the_package(room: str):
    """`tests/room/test_file.py` or `test_file_aspect.py` tests `room/file.py`."""
    files = {path.stem for path in (PACKAGE / room).glob("*.py")}
    tested = [path.stem.removeprefix("test_") for path in (TESTS / room).glob("*.py")]
    assert tested
    for name in tested:
        assert any(name == file or name.startswith(f"{file}_") for file in files), name
