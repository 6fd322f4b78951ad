"""CONTRIBUTING's recipes for a measure and for a picture, followed in a copy of the
tree: no test there stands in the way, the new measure is in every result, and the new
picture where users look for it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("tl_coupling", "tests", "tools", "docs", "conftest.py", "pyproject.toml")
# Rooms whose tests go through all measures.
TESTS = (
    "tests/measures",
    "tests/comparisons/test_maps.py",
    "tests/comparisons/test_means.py",
    "tests/comparisons/test_pairs.py",
    "tests/studies/surveys/test_measurements.py",
    "tests/test_progress.py",
    "tests/trajectories/test_residual_alignment.py",
    "tests/trajectories/test_shapes.py",
)
_CODE = {
    "# A measure by its name, or itself.\n": '''
class DiagonalShare(Measure):
    """`‖diag A‖ / ‖A‖_F`."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return the share."""
        del S_1
        size = nan_where_zero(torch.linalg.matrix_norm(A), "‖A‖_F")
        return A.diagonal(dim1=-2, dim2=-1).norm(dim=-1) / size

    def corner_values(self, corners: Corners) -> Tensor:
        """Return the share in every corner."""
        return corners.diagonal.square().cumsum(-1).sqrt() / corners.size_or_nan

    def null(self, moments: Moments) -> Tensor:
        """Return `√(E Σ a_ii² / E ‖A‖_F²)`."""
        return (moments.diagonal / nan_where_zero(moments.total, "‖A‖_F")).sqrt()


''',
    "]\n\n\n@dataclass(frozen=True)\nclass Corners:": '    "diagonal_share",\n',
    "        )\n    }\n)\n": """            DiagonalShare(
                "diagonal_share", "diagonal share", "diagonal share", bounded=True
            ),
""",
}
_LOOP = {
    '        "released_norm": math.sqrt(': '        "diagonal_share": math.sqrt(1 - off / total),\n'
}
# What is put into which file, before which line.
A_MEASURE = {
    "tl_coupling/measures/measure.py": _CODE,
    "tests/measures/test_measure.py": _LOOP,
}
_PICTURE = {
    "@checked\ndef plot_singular_values(": '''
@checked
def plot_norms(result: CouplingMap, *, ax: Axes | None = None) -> Axes:
    """Draw the Frobenius norms of the Jacobians by depth.

    Example:
        >>> ax = tlc.plots.plot_norms(tlc.depth_coupling(trace, k=4))
    """
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 3.6).subplots()
    ax.plot(result.row_layers, result.frobenius_norms.cpu().numpy())
    ax.set(xlabel="layer", ylabel="Frobenius norm of J")
    return ax


'''
}
_PICTURE_TEST = {
    "def test_adjacency_draws_the_mean_of_both_orders(": """
def test_norms_are_drawn():
    result = random_map(layers=(4, 5, 6, 9))
    (line,) = plot_norms(result).lines
    np.testing.assert_allclose(line.get_ydata(), result.frobenius_norms)


"""
}
A_PICTURE = {
    "tl_coupling/pictures/layers.py": _PICTURE,
    "tl_coupling/pictures/__init__.py": {
        "    plot_singular_values,\n": "    plot_norms,\n",
        '    "plot_patches",\n': '    "plot_norms",\n',
    },
    "tests/pictures/test_layers.py": {
        "from tl_coupling.plots import plot_adjacency, plot_locality": (
            "from tl_coupling.plots import plot_norms\n"
        ),
        **_PICTURE_TEST,
    },
}
# Tests that go through all pictures, or all public names.
TESTS_OF_PICTURES = (
    "tests/pictures",
    "tests/test_house.py",
    "tests/test_public_names.py",
    "tests/test_not_finite.py",
    "tests/results/test_different_prompts.py",
)


@pytest.mark.long("runs the tests of several rooms")
def test_a_measure_is_added_as_contributing_says(tmp_path: Path) -> None:
    _copy_with(tmp_path, A_MEASURE)
    script = (
        "import tl_coupling as tlc; print(tlc.__file__, list(tlc.measures.MEASURES))"
    )
    said = _run(tmp_path, "-c", script)
    # The copy, and not what is installed.
    assert said.startswith(str(tmp_path))
    assert "diagonal_share" in said
    _run_tests(tmp_path, TESTS)


@pytest.mark.long("runs the tests of several rooms")
def test_a_picture_is_added_as_contributing_says(tmp_path: Path) -> None:
    _copy_with(tmp_path, A_PICTURE)
    script = "import tl_coupling as tlc; print(tlc.__file__, dir(tlc.plots))"
    said = _run(tmp_path, "-c", script)
    assert said.startswith(str(tmp_path))
    assert "plot_norms" in said
    _run_tests(tmp_path, TESTS_OF_PICTURES)


def _copy_with(folder: Path, added: dict[str, dict[str, str]]) -> None:
    """Copy the tree, and put what is added into its files."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    for name, additions in added.items():
        file = folder / name
        code = file.read_text()
        for before, text in additions.items():
            assert code.count(before) == 1, before
            code = code.replace(before, text + before)
        file.write_text(code)


def _run_tests(folder: Path, tests: tuple[str, ...]) -> None:
    _run(folder, "-m", "pytest", "-m", "not long", "-p", "no:cacheprovider", *tests)


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout
