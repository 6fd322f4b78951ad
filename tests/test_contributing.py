"""CONTRIBUTING's recipe for a measure, followed in a copy of the tree: no test there
stands in the way, and the new measure is in every result.
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
ADDED = {
    "tl_coupling/measures/measure.py": _CODE,
    "tests/measures/test_measure.py": _LOOP,
}


@pytest.mark.long("runs the tests of several rooms")
def test_a_measure_is_added_as_contributing_says(tmp_path: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    for name, additions in ADDED.items():
        file = tmp_path / name
        code = file.read_text()
        for before, text in additions.items():
            assert code.count(before) == 1, before
            code = code.replace(before, text + before)
        file.write_text(code)
    script = (
        "import tl_coupling as tlc; print(tlc.__file__, list(tlc.measures.MEASURES))"
    )
    said = _run(tmp_path, "-c", script)
    # The copy, and not what is installed.
    assert said.startswith(str(tmp_path))
    assert "diagonal_share" in said
    _run(tmp_path, "-m", "pytest", "-m", "not long", "-p", "no:cacheprovider", *TESTS)


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout
