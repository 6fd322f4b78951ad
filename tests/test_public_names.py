"""What `tl_coupling` hands out, and what it loads for that."""

import ast
import builtins
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tl_coupling as tlc
from public_api import ROOMS, homes_of, public_names

# DESIGN.md's names, of those that are handed out at the top.
PROMISED = """load_model trace block_jacobian block_jacobians svd coupling_matrix miscoupling normalized_miscoupling
spectral_miscoupling captured_energy depth_coupling self_coupling context_coupling line_shape_score expodistance
equidistance step_lengths plot_coupling plot_coupling_matrices plot_adjacency plot_trajectories"""


def loaded_by(code: str) -> set[str]:
    """What a fresh Python has loaded after this."""
    code = f"import sys; {code}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_every_name_that_is_listed_is_there() -> None:
    assert set(PROMISED.split()) <= set(tlc.__all__)
    assert len(set(tlc.__all__)) == len(tlc.__all__) <= 49
    assert all(hasattr(tlc, name) for name in [*dir(tlc), *tlc.__all__])
    imported: dict[str, Any] = {}
    exec("from tl_coupling import *", imported)
    assert imported.keys() - {"__builtins__"} == set(tlc.__all__)


def test_tab_shows_twenty_names_and_the_rooms() -> None:
    """The same that the API reference and the page for language models begin with."""
    front = tlc._FRONT
    assert len(set(front)) == len(front) == 20
    assert set(front) <= set(tlc.__all__)
    assert dir(tlc) == sorted([*front, *ROOMS])
    text = (Path(__file__).parents[1] / "llms.txt").read_text()
    listed = re.search(r"in this order of use: (.+?)\.", text)
    assert listed is not None
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == front


def test_type_checkers_are_told_the_same() -> None:
    stub = ast.parse(Path(tlc.__file__).with_suffix(".pyi").read_text())
    told = {
        alias.asname: getattr(sys.modules[node.module], alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert told == {name: getattr(tlc, name) for name in [*ROOMS, *tlc.__all__]}


EARLIER = {
    "run": "run_survey",
    "surveys.run": "run_survey",
    "surveys.movements": "precision_changes",
    "surveys.one_orientation": "select_orientation",
    "comparisons.neighbours": "layer_pair",
    "comparisons.depth_couplings": "depth_coupling_by_orientation",
}


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_earlier_name_is_the_same_function_in_no_list(earlier: str) -> None:
    room_name, _, name = earlier.rpartition(".")
    room: Any = ROOMS[room_name] if room_name else tlc
    function = getattr(room, name)
    assert name not in dir(room)
    assert function.__wrapped__ is getattr(room, EARLIER[earlier])


@pytest.mark.parametrize("name", ["plot_nonsense", "nonsense"])
def test_a_name_that_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(tlc, name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("plot_locality", "it is tl_coupling.plots.plot_locality"),
        ("steer", "it is tl_coupling.directions.steer"),
        ("depth_couplng", "similar names are tl_coupling.depth_coupling"),
        ("plot_localty", "similar names are tl_coupling.plots.plot_locality"),
    ],
)
def test_a_name_of_a_room_or_like_one_is_pointed_to(name: str, hint: str) -> None:
    with pytest.raises(
        AttributeError, match=f"^module 'tl_coupling' has no attribute '{name}': {hint}"
    ) as caught:
        getattr(tlc, name)
    assert (caught.value.name, caught.value.obj) == (name, tlc)


def test_marks_that_others_look_for_load_no_room() -> None:
    assert "torch" not in loaded_by(
        "import tl_coupling; hasattr(tl_coupling, '_repr_html_')"
    )


def test_nothing_is_loaded_before_it_is_used() -> None:
    heavy = {"torch", "matplotlib", "transformer_lens", "xarray"}
    assert not heavy & loaded_by("import tl_coupling; dir(tl_coupling)")
    rooms = {f"tl_coupling.{room}" for room in ("pictures", "interactive", "report")}
    assert not rooms & loaded_by("import tl_coupling; tl_coupling.depth_coupling")


def test_rooms_are_there_on_a_fresh_import() -> None:
    assert "tl_coupling.pictures.maps" in loaded_by(
        "import tl_coupling; tl_coupling.plots.plot_coupling"
    )


# --- the reference

# What examples may use without making it; the package's docstring says what it is.
SHARED = {"torch", "tlc", "model", "trace", "image_trace", "prompts", "data", "sweep"}


def examples(thing: Any) -> list[doctest.Example]:
    """Those of its docstring that are run."""
    all_examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
    return [example for example in all_examples if doctest.SKIP not in example.options]


def taken_from_elsewhere(thing: Any) -> set[str]:
    """Names that its example neither makes nor imports."""
    nodes = list(
        ast.walk(ast.parse("".join(example.source for example in examples(thing))))
    )
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(
        dir(builtins)
    )
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.ExceptHandler)
    }
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in names} - bound


def test_rooms_hand_out_functions_and_classes_each_in_one_room_or_of_statistics() -> (
    None
):
    """Users look for a fit where they find what was fitted, so what `statistics` hands
    out may stand in another room too.
    """
    for room in ROOMS.values():
        assert len(set(room.__all__)) == len(room.__all__) > 0
        for name in room.__all__:
            value = getattr(room, name)
            assert inspect.isroutine(value) or inspect.isclass(value), name
            assert len(homes_of(value)) == 1, name


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_shows_what_its_page_documents_and_no_more(room: str) -> None:
    """As `tlc.models.<Tab>` does, in a notebook or a shell."""
    assert dir(ROOMS[room]) == sorted(ROOMS[room].__all__)


def test_what_is_at_the_top_is_in_its_room_too() -> None:
    homes = {name: homes_of(getattr(tlc, name)) for name in tlc.__all__}
    assert not [name for name, rooms in homes.items() if not rooms]


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_has_an_example_that_runs_as_it_stands(name: str) -> None:
    thing = public_names()[name]
    assert examples(thing), f"{name} has no example in its docstring"
    assert taken_from_elsewhere(thing) <= SHARED
    if inspect.isfunction(thing):
        assert any(
            f"{name.replace('tl_coupling', 'tlc', 1)}(" in example.source
            for example in examples(thing)
        )


def test_an_example_that_is_missing_or_leans_on_its_module_is_found() -> None:
    def without() -> None:
        """Nothing.

        >>> never_run()  # doctest: +SKIP
        """

    def leaning() -> None:
        """Something.

        >>> [norms(x) for x in trace.residual]
        """

    assert not examples(without)
    assert taken_from_elsewhere(leaning) == {"norms", "trace"}


def test_what_examples_share_is_said_in_the_package() -> None:
    assert SHARED - {"tlc"} == {
        word.split()[0] for word in tlc.__doc__.splitlines() if " = tlc." in word
    } | {"torch"}


@pytest.mark.parametrize("name", public_names())
def test_methods_and_properties_are_documented(name: str) -> None:
    """Of classes, whatever is the package's own and has no underscore."""
    thing = public_names()[name]
    own = (
        vars(thing)
        if inspect.isclass(thing) and not issubclass(thing, Exception)
        else {}
    )
    kinds = (property, classmethod, staticmethod)
    members = {
        n: v
        for n, v in own.items()
        if n[0] != "_" and (inspect.isroutine(v) or isinstance(v, kinds))
    }
    assert not [
        n
        for n, v in members.items()
        if not (getattr(v, "__func__", v).__doc__ or "").strip()
    ]


@pytest.mark.parametrize("name", public_names())
def test_a_signature_shows_types_without_the_rules_on_values(name: str) -> None:
    thing = public_names()[name]
    if inspect.isclass(thing) and issubclass(thing, Exception):
        pytest.skip("Python knows no signature of an exception")
    shown = str(inspect.signature(thing))
    assert "Annotated[" not in shown
    assert "<function" not in shown
