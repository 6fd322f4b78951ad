"""`make same`'s own judgement: a change planted in a result is seen, whatever its
format; what takes another time is not.
"""

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import pytest
import xarray
from nbformat import v4
from PIL import Image

import tl_coupling.cli
from same_numbers import trees
from same_numbers.__main__ import main
from same_numbers.comparison import (
    ComparedFile,
    compare_folders,
    compare_outcomes,
    table,
)
from same_numbers.in_tree import check_package, outcome_of
from same_numbers.outcome import Outcome, Outcomes, take_outcomes, write_outcomes
from same_numbers.run import KERNEL_START
from same_numbers.scenario import COMMANDS, selected_commands
from same_numbers.values import Difference, differences, digest

COUPLING = np.array([[0.5, np.nan], [0.25, 2.0]], dtype=np.float32)
PRINTED = """\
      cost of depth coupling
┏━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┓
┃ model ┃ layers ┃ seconds per prompt ┃
┡━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━┩
│ tiny  │      2 │               {seconds} │
└───────┴────────┴────────────────────┘
    loading included; of the
    processes that did it
R² = 0.25, ρ = −0.5
"""
PAGE = (
    "<html><p>coupling 0.5</p><div id='{name}'>of <b>2</b> layers</div>"
    "<img src='data:image/png;base64,{png}'></html>"
)
SVG = '<?xml version="1.0"?><svg><path d="M 46.2 212.3 L 3 4"/><text>2</text></svg>'


def pixels() -> np.ndarray:
    return np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


def png_of(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    return file.getvalue()


def in_text(picture: np.ndarray) -> str:
    return base64.b64encode(png_of(picture)).decode()


def write_netcdf(
    path: Path, coupling: np.ndarray = COUPLING, p: float = 2.0, seconds: float = 1.5
) -> None:
    provenance = {"p": p, "paths": {"layer 0": "reverse"}, "seconds": seconds}
    xarray.Dataset(
        {
            "coupling": (("layer", "other_layer"), coupling),
            "seconds": ((), seconds),
            "task": (("layer",), ["first", "second"]),
        },
        attrs={"k": 4, "provenance": json.dumps(provenance)},
    ).to_netcdf(path)


def write_notebook(
    path: Path,
    text: str = "coupling 0.5\n",
    picture: np.ndarray | None = None,
    loss: float = 1.5,
    seconds: float = 1.0,
) -> None:
    png = in_text(pixels() if picture is None else picture)
    data = xarray.Dataset({"loss": ("x", [loss, 2]), "seconds": ("x", [seconds, 3])})
    shown = {"text/plain": repr(data), "text/html": data._repr_html_()}
    # In two pieces; a time decides in how many.
    outputs = [
        v4.new_output("stream", name="stdout", text="k = 10\n"),
        v4.new_output("stream", name="stderr", text=f"{seconds} s"),
        v4.new_output("stream", name="stdout", text=text),
        v4.new_output("display_data", {"image/png": png, "text/plain": "<Figure>"}),
        v4.new_output("execute_result", shown),
    ]
    cells = [v4.new_markdown_cell("Text"), v4.new_code_cell("f()", outputs=outputs)]
    nbformat.write(v4.new_notebook(cells=cells), path)


def write_summary(path: Path, mean: float = 0.5, seconds: float = 1.0) -> None:
    layers = [{"path": "reverse", "values": [1, mean]}, {"path": None}]
    path.write_text(json.dumps({"layers": layers, "seconds": {"loading": seconds}}))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Provide equal results of two trees, a file of every format."""
    both = (tmp_path / "before", tmp_path / "after")
    for folder in both:
        (folder / "units").mkdir(parents=True)
        write_netcdf(folder / "units" / "depth.nc")
        write_summary(folder / "summary.json")
        (folder / "table.csv").write_text("model,mean,seconds\na,0.5,1\nb,0.25,2\n")
        np.savez(folder / "maps.npz", first=COUPLING)
        np.save(folder / "map.npy", COUPLING)
        (folder / "map.png").write_bytes(png_of(pixels()))
        (folder / "map.svg").write_text(SVG)
        page = PAGE.format(name="random-1", png=in_text(pixels()))
        (folder / "report.html").write_text(page)
        (folder / "survey.txt").write_text(PRINTED.format(seconds="2.36"))
        (folder / "weights.bin").write_bytes(b"123")
        write_notebook(folder / "notebook.ipynb")
    return both


def compared_differences(folders: tuple[Path, Path]) -> list[Difference]:
    compared = compare_folders(*folders)
    for file in compared:
        are_equal = file.before is not None and file.before == file.after
        assert are_equal != bool(file.differences), "hashes and values say the same"
    return [difference for file in compared for difference in file.differences]


def test_equal_results_are_equal(folders: tuple[Path, Path]) -> None:
    compared = compare_folders(*folders)
    assert not compared_differences(folders)
    assert {file.kind for file in compared} == {
        *("netCDF", "NumPy", "JSON", "CSV", "PNG", "SVG", "HTML", "notebook"),
        *("printed", "other files"),
    }
    assert all(file.n_numbers > 0 for file in compared)


def changed_pixel(row: int = 2) -> np.ndarray:
    picture = pixels()
    picture[row, 1, 0] += 1
    return picture


def changed_coupling() -> np.ndarray:
    coupling = COUPLING.copy()
    coupling[1, 0] = np.nextafter(np.float32(0.25), np.float32(1))
    return coupling


def without_its_nan() -> np.ndarray:
    return np.nan_to_num(COUPLING)


def replace_in(path: Path, former: str, new: str) -> None:
    text = path.read_text()
    assert former in text
    path.write_text(text.replace(former, new))


# By the file: the variable that is reported, part of the message, and what is planted.
PLANTED: list[tuple[str, str, str, Callable[[Path], object]]] = [
    (
        "units/depth.nc",
        "coupling",
        "1 of 4 numbers differ, by up to 2.98e-08 absolute, 1.19e-07 relative",
        lambda path: write_netcdf(path, changed_coupling()),
    ),
    (
        "units/depth.nc",
        "coupling",
        "by up to inf absolute",
        lambda path: write_netcdf(path, without_its_nan()),
    ),
    (
        "units/depth.nc",
        "coupling",
        "float32 became float64",
        lambda path: write_netcdf(path, COUPLING.astype(np.float64)),
    ),
    (
        "units/depth.nc",
        "coupling",
        "shape (2, 2) became (2, 1)",
        lambda path: write_netcdf(path, COUPLING[:, :1]),
    ),
    (
        "units/depth.nc",
        "provenance/p",
        "by up to 1 absolute, 0.333 relative",
        lambda path: write_netcdf(path, p=3.0),
    ),
    (
        "summary.json",
        "layers/0/values",
        "1 of 2 numbers differ, by up to 1e-12 absolute",
        lambda path: write_summary(path, 0.5 + 1e-12),
    ),
    (
        "summary.json",
        "layers/0/path",
        "'\"reverse\"' became '\"linearised\"'",
        lambda path: replace_in(path, "reverse", "linearised"),
    ),
    (
        "table.csv",
        "mean",
        "1 of 2 numbers differ, by up to 0.01",
        lambda path: replace_in(path, "0.25", "0.26"),
    ),
    (
        "table.csv",
        "model",
        "line 2: 'b' became 'c'",
        lambda path: replace_in(path, "b,", "c,"),
    ),
    (
        "maps.npz",
        "first",
        "1 of 4 numbers differ",
        lambda path: np.savez(path, first=changed_coupling()),
    ),
    (
        "map.npy",
        "array",
        "1 of 4 numbers differ",
        lambda path: np.save(path, changed_coupling()),
    ),
    (
        "map.png",
        "pixels",
        "1 of 80 numbers differ, by up to 1 absolute",
        lambda path: path.write_bytes(png_of(changed_pixel())),
    ),
    (
        "map.svg",
        "elements",
        "1 of 4 numbers differ, by up to 0.1 absolute",
        lambda path: replace_in(path, "46.2", "46.3"),
    ),
    (
        "report.html",
        "text",
        "1 of 2 numbers differ, by up to 1 absolute",
        lambda path: replace_in(path, "<b>2</b>", "<b>3</b>"),
    ),
    (
        "report.html",
        "text",
        "became 'upling 0.5 nats'",
        lambda path: replace_in(path, "0.5", "0.5 nats"),
    ),
    (
        "report.html",
        "picture 0",
        "1 of 80 numbers differ",
        lambda path: path.write_text(
            PAGE.format(name="random-1", png=in_text(changed_pixel()))
        ),
    ),
    (
        "survey.txt",
        "text",
        "1 of 3 numbers differ, by up to 1 absolute, 2 relative",
        lambda path: replace_in(path, "−0.5", "+0.5"),
    ),
    (
        "survey.txt",
        "text",
        "1 of 3 numbers differ, by up to 1 absolute, 0.333",
        lambda path: replace_in(path, "      2 │", "      3 │"),
    ),
    (
        "weights.bin",
        "bytes",
        "1 of 3 numbers differ",
        lambda path: path.write_bytes(b"124"),
    ),
    (
        "notebook.ipynb",
        "cell 0 stdout",
        "1 of 2 numbers differ, by up to 0.1 absolute",
        lambda path: write_notebook(path, "coupling 0.6\n"),
    ),
    (
        "notebook.ipynb",
        "cell 0 output 0 image/png",
        "1 of 80 numbers differ",
        lambda path: write_notebook(path, picture=changed_pixel()),
    ),
    (
        "notebook.ipynb",
        "cell 0 output 1 text/plain",
        "1 of 3 numbers differ, by up to 0.1 absolute",
        lambda path: write_notebook(path, loss=1.6),
    ),
    ("units/depth.nc", "file", "is missing after", lambda path: path.unlink()),
]


@pytest.mark.parametrize(("name", "variable", "message", "plant"), PLANTED)
def test_a_planted_change_is_reported(
    folders: tuple[Path, Path],
    name: str,
    variable: str,
    message: str,
    plant: Callable[[Path], object],
) -> None:
    plant(folders[1] / name)
    reported = [str(difference) for difference in compared_differences(folders)]
    # Another shape has other dimensions; an object has text and HTML.
    assert len(reported) == 1 or "shape" in message or "output 1" in variable
    line = next(line for line in reported if f"  {variable}: " in line)
    assert line.startswith(f"{name}  ")
    assert message in line
    assert line in table(compare_folders(*folders))


def test_every_format_has_a_planted_change(folders: tuple[Path, Path]) -> None:
    files = {path for path in folders[0].rglob("*") if path.is_file()}
    named = {folders[0] / name for name, *_ in PLANTED}
    assert named == files


def test_a_new_file_and_a_new_variable_are_reported(
    folders: tuple[Path, Path],
) -> None:
    (folders[1] / "more.csv").write_text("a\n1\n")
    replace_in(folders[1] / "summary.json", '"seconds"', '"mean": 1, "seconds"')
    assert [str(difference) for difference in compared_differences(folders)] == [
        "more.csv  file: is missing before",
        "summary.json  mean: is new",
    ]


def test_times_alone_are_no_difference(folders: tuple[Path, Path]) -> None:
    after = folders[1]
    write_netcdf(after / "units" / "depth.nc", seconds=7.0)
    write_summary(after / "summary.json", seconds=7.0)
    replace_in(after / "table.csv", "0.25,2", "0.25,3")
    page = PAGE.format(name="random-2", png=in_text(pixels()))
    (after / "report.html").write_text(page)
    wider = PRINTED.format(seconds="12.36").replace("━┓", "━━┓")
    wider = wider.replace("of the\n    ", "of the ")
    (after / "survey.txt").write_text(wider)
    write_notebook(after / "notebook.ipynb", seconds=9.0)
    assert not compared_differences(folders)


def test_zeros_of_either_sign_are_the_same() -> None:
    before = {"zero": np.array([0.0, 1.0])}
    after = {"zero": np.array([-0.0, 1.0])}
    assert digest(before) == digest(after)
    assert not differences("file", before, after)


def test_steps_that_fail_or_do_not_run_are_reported() -> None:
    failed = Outcome(2, "tl-coupling: no such option")
    finished = Outcome()
    compared = compare_outcomes(
        {"depth": finished, "tokens": failed, "survey": finished},
        {"depth": finished, "tokens": failed},
    )
    lines = [str(line) for step in compared for line in step.differences]
    assert lines == [
        "tokens  status before: tl-coupling: no such option",
        "tokens  status after: tl-coupling: no such option",
        "survey  status after: it did not run",
    ]
    assert compared[0] == ComparedFile("depth", "steps")


def test_outcomes_are_no_results(tmp_path: Path) -> None:
    outcomes = {"depth": Outcome(), "tokens": Outcome(2, "no such option")}
    assert take_outcomes(tmp_path) == {}
    write_outcomes(tmp_path, outcomes)
    assert take_outcomes(tmp_path) == outcomes
    assert not list(tmp_path.iterdir())


def test_what_a_step_raises_is_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    def step() -> int:
        raise RuntimeError("no memory")

    assert outcome_of(step) == Outcome(1, "RuntimeError: no memory")
    assert "Traceback" in capsys.readouterr().err
    assert outcome_of(lambda: 0) == Outcome()


def test_another_trees_package_is_refused(tmp_path: Path) -> None:
    check_package(Path(__file__).parents[1])
    with pytest.raises(SystemExit, match="wanted the package in"):
        check_package(tmp_path)


def test_every_command_is_in_the_scenario() -> None:
    assert {
        command.arguments[0] for command in COMMANDS
    } == tl_coupling.cli.COMMANDS.keys()
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)


def test_temporary_names_in_notebooks_are_counted(tmp_path: Path) -> None:
    made = "print(tempfile.mkdtemp(), tempfile.mkdtemp())"
    printed = subprocess.run(
        [sys.executable, "-c", KERNEL_START + made],
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [Path(name).name for name in printed.split()]
    assert names == ["tmp00000000", "tmp00000001"]


def test_a_command_brings_what_it_reads() -> None:
    selected = [command.name for command in selected_commands(["generalization"])]
    assert selected == ["tiny-survey", "tiny-generalization"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a repository with one commit, and a working tree that went on."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr(trees, "ROOT", root)
    (root / ".gitignore").write_text("out/\n")
    (root / "changed.py").write_text("before")
    (root / "deleted.py").write_text("before")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for arguments in (["init"], ["add", "."], [*identity, "commit", "-m", "one"]):
        subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)
    (root / "changed.py").write_text("after")
    (root / "deleted.py").unlink()
    (root / "new.py").write_text("after")
    (root / "out").mkdir()
    (root / "out" / "result").write_text("ignored")
    return root


def files_of(tree: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in tree.glob("*")
        if not path.name.startswith(".git")
    }


def test_a_commit_and_the_working_tree(repository: Path, tmp_path: Path) -> None:
    commit = trees.commit_of("HEAD")
    assert len(commit) == 40
    with trees.checked_out(commit, tmp_path / "tree") as tree:
        assert files_of(tree) == {"changed.py": "before", "deleted.py": "before"}
    with trees.checked_out(None, tmp_path / "tree") as tree:
        assert files_of(tree) == {"changed.py": "after", "new.py": "after"}
    assert not (tmp_path / "tree").exists()
    listed = ["git", "worktree", "list"]
    known = subprocess.run(listed, cwd=repository, capture_output=True, text=True)
    assert len(known.stdout.splitlines()) == 1


@pytest.fixture
def made_up_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Provide what each tree measures, in place of the scenario."""
    means = {"before": 0.5, "after": 0.5}

    def run(tree: Path, results: Path, _: object) -> Outcomes:
        assert (tree / "changed.py").exists()
        results.mkdir()
        write_summary(results / "summary.json", means[results.name])
        return {"tiny-depth": Outcome()}

    monkeypatch.setattr("same_numbers.__main__.run_scenario", run)
    monkeypatch.setattr("same_numbers.inputs.write_inputs", lambda _: None)
    return means


def test_status_0_table_and_json_where_all_is_equal(
    made_up_runs: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "outcome.json"
    assert main(["HEAD", "--save", str(saved)]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "kind   equal  differ  numbers compared",
        "JSON       1       0                 2",
        "steps      1       0                 0",
        "all        2       0                 2",
    ]
    outcome = json.loads(saved.read_text())
    assert outcome["before"] == trees.commit_of("HEAD")
    assert outcome["after"] is None
    assert "seconds" in outcome["left out"]
    (_, summary) = outcome["files"]
    assert summary["before"] == summary["after"]


def test_status_1_and_kept_results_where_a_number_differs(
    made_up_runs: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_runs["after"] = 0.75
    kept = tmp_path / "kept"
    assert main(["HEAD", "HEAD", "--keep", str(kept)]) == 1
    assert "summary.json  layers/0/values: 1 of 2 numbers differ, by up to 0.25" in (
        capsys.readouterr().out
    )
    assert (kept / "after" / "summary.json").exists()
    # What lies there would be compared again.
    assert main(["HEAD", "--keep", str(kept)]) == 2
    assert "wanted a new or empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-branch"], "error: wanted a commit of .*, got 'no-such-branch'"),
        (["HEAD", "no-such"], "error: wanted a commit of .*, got 'no-such'"),
        (["HEAD", "--only", "nothing"], "error: no command has 'nothing' in its name"),
        (["HEAD", "--save", "nowhere/a.json"], "error: wanted a file in a folder"),
    ],
)
def test_status_2_and_one_line_for_bad_input(
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(message, line)
