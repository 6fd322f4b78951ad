"""What `tl_coupling` hands out, and what it loads for that."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tl_coupling as tlc

# DESIGN.md's names, of those that are handed out at the top.
PROMISED = """load_model trace block_jacobian block_jacobians svd coupling_matrix miscoupling normalized_miscoupling
spectral_miscoupling captured_energy depth_coupling self_coupling context_coupling line_shape_score expodistance
equidistance step_lengths plot_coupling plot_coupling_matrices plot_adjacency plot_trajectories"""


def loaded_by(code: str) -> set[str]:
    """What a fresh Python has loaded after this."""
    code = f"import sys; {code}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_every_name_that_is_listed_is_there() -> None:
    assert set(PROMISED.split()) <= set(tlc.__all__) <= set(dir(tlc))
    assert len(set(tlc.__all__)) == len(tlc.__all__) <= 45
    assert all(hasattr(tlc, name) for name in dir(tlc))


def test_type_checkers_are_told_the_same() -> None:
    stub = ast.parse(Path(tlc.__file__).with_suffix(".pyi").read_text())
    told = {
        alias.asname: getattr(sys.modules[node.module], alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert told == {name: getattr(tlc, name) for name in dir(tlc)}


@pytest.mark.parametrize("name", ["plot_nonsense", "nonsense"])
def test_a_name_that_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(tlc, name)


def test_nothing_is_loaded_before_it_is_used() -> None:
    heavy = {"torch", "matplotlib", "transformer_lens", "xarray"}
    assert not heavy & loaded_by("import tl_coupling; dir(tl_coupling)")
    rooms = {f"tl_coupling.{room}" for room in ("plots", "interactive", "report")}
    assert not rooms & loaded_by("import tl_coupling; tl_coupling.depth_coupling")


def test_rooms_are_there_on_a_fresh_import() -> None:
    assert "tl_coupling.plots.maps" in loaded_by("import tl_coupling; tl_coupling.plots.plot_coupling")
