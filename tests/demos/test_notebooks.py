"""The notebooks in demos/, as they are committed and as they run now, beside their files
and on Colab: what they print is what their text says.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from torch import nn
from transformers import ViTImageProcessorPil

import tiny
from on_colab import PHOTOGRAPHS, ROOT, Colab, raw_files
from zoo.models import original_model

DEMOS = Path(__file__).parents[2] / "demos"
NOTEBOOKS = sorted(DEMOS.glob("*.ipynb"))


class Printed:
    """What a notebook printed."""

    def __init__(self, notebook: Any) -> None:
        outputs = [
            output for cell in notebook["cells"] for output in cell.get("outputs", [])
        ]
        self.text = "".join(
            "".join(output["text"])
            for output in outputs
            if output["output_type"] == "stream"
        )

    def numbers(self, pattern: str) -> list[float]:
        """Return the numbers in place of every `#`, where this is printed first."""
        printed = re.search(
            re.escape(pattern).replace(r"\#", r"([-+]?\d[\d.e+-]*)%?"), self.text
        )
        assert printed, f"{pattern!r} is not in\n{self.text}"
        return [float(number) for number in printed.groups()]


def quickstart(printed: Printed) -> None:
    trained, untrained, null = printed.numbers("k = 10: trained #, untrained #, null #")
    assert trained > 3 * null > 2 * untrained
    assert printed.numbers("from token 5 to token 2: largest entry #") == [0]
    assert printed.numbers("loaded: #, computed: #") == [trained, trained]


def tokens_and_trajectories(printed: Printed) -> None:
    means = {}
    for name in ("self", "fixed input", "fixed output"):
        means[name], untrained, null = printed.numbers(
            f"{name}, k = 10: trained #, untrained #, null #"
        )
        assert means[name] > 1.5 * null > untrained
    assert means["self"] == max(means.values()) > 3 * null
    with_itself, with_another = printed.numbers("a token with itself #, with another #")
    assert with_itself > with_another > 3 * null
    row, column = printed.numbers(
        "first token: its J_1 with the others' vectors #, the others' J_1 with its vectors #"
    )
    assert column > 2 * row
    ((trained,), (untrained,)) = (
        printed.numbers(f"\n{run}: the strongest other source is # times")
        for run in RUNS
    )
    assert trained > 2 * untrained
    lss, ed, equidistance = (
        printed.numbers(f"{m}: trained #, untrained #")
        for m in ("LSS", "ED", "equidistance")
    )
    assert lss[0] < lss[1]
    assert ed[0] > ed[1]
    assert equidistance[0] > equidistance[1]
    assert printed.numbers("first token # times the median token")[0] > 10
    sink, others = printed.numbers("first token #, the others #")
    assert sink > 50 > others
    trained, untrained = printed.numbers(
        "entropy at the end: trained # nats, untrained # nats"
    )
    assert trained < untrained / 2
    for run in RUNS:
        one_step, previous = printed.numbers(
            f"relative error, {run}, mean: one_step #, previous #"
        )
        assert one_step > previous
    one_step, previous = printed.numbers(
        "relative error, trained, first layer: one_step #, previous #"
    )
    assert one_step < previous
    line = "{}, scale 1: cosine similarity # before the first layer, # after the last"
    (before, after), (_, after_untrained) = (
        printed.numbers(line.format(run)) for run in RUNS
    )
    assert before == pytest.approx(1 / math.sqrt(2), abs=0.05)
    assert after_untrained > after > before + 0.1
    assert all(
        printed.numbers(f"{run}: the last token leaves # times")[0] > 20 for run in RUNS
    )


def directions(printed: Printed) -> None:
    _, summed, product = printed.numbers(
        "sum over # components #, product with the stream #"
    )
    assert summed == pytest.approx(product, abs=0.01)
    unchanged = re.search("unchanged: (.*)", printed.text)
    steered = re.findall(r"scale [-+]0.3: (.*)", printed.text)
    assert unchanged
    assert "Paris" in unchanged[1]
    assert len(steered) == 2
    assert set(steered) != {unchanged[1]}
    (ratio,) = printed.numbers("measured over predicted KL at 0.01: #")
    assert ratio == pytest.approx(1, abs=0.05)
    random, rotated, own = (
        printed.numbers(f"KL at 0.3, {kind}: # nats")[0]
        for kind in ("random", "rotated", "singular vectors")
    )
    assert min(own, rotated) > 2 * random
    read, written, random = printed.numbers("most shared: read #, written #, random #")
    assert min(read, written) > random
    for side in ("write", "read"):
        shared, random, principal = (
            printed.numbers(f"{side}, {kind}: # nats per token")[0]
            for kind in ("shared", "random", "principal")
        )
        assert principal > shared > 2 * random


def carriers(printed: Printed) -> None:
    (difference,) = printed.numbers("their sum differs from the Jacobian by # of")
    assert difference < 1e-5
    sizes = {}
    for label in ("attn_out", "mlp_out", "mlp∘attn"):
        carried, size, excess, low, high = printed.numbers(
            f"{label}: # of coupling, # of J, excess # (random # to #)"
        )
        assert excess == pytest.approx(carried - size, abs=0.002)
        sizes[label] = excess, low, high
    assert sizes["attn_out"][0] > sizes["attn_out"][2]
    line = "{}: gain # [#, #] nats, # directions carry the product, # if turned"
    _, low, _, n_directions, n_turned = printed.numbers(line.format("trained"))
    assert low > 0
    assert n_directions < n_turned / 2
    _, low, high, n_directions, n_turned = printed.numbers(line.format("untrained"))
    assert low < 0 < high
    assert n_directions == pytest.approx(n_turned, rel=0.05)
    for layer in (14, 20):
        share, random, henrici, random_henrici = printed.numbers(
            f"layer {layer}: # complex (random #), Henrici # (random #)"
        )
        assert share > 0.9
        assert abs(share - random) < 0.05
        assert henrici < random_henrici


def emergence(printed: Printed) -> None:
    line = "step {}: coupling # (null #), loss #, line-shape score #"
    first, middle, last = (printed.numbers(line.format(step)) for step in (0, 32, 256))
    assert first[0] == pytest.approx(first[1], abs=0.05)
    assert middle[0] > 3 * middle[1]
    assert middle[0] > last[0] > first[0]
    assert first[2] > middle[2] > last[2]


def generalization(printed: Printed) -> None:
    r_squared, _, n, _ = printed.numbers("R² = #, p = #, n = #; Spearman's ρ = #")
    assert n == 8
    low, high = printed.numbers("without one model R² is # to #;")
    assert low <= r_squared <= high
    *_, drawn_low, drawn_high = printed.numbers(
        "slope #; t interval # to #, bootstrap # to #"
    )
    assert drawn_low < drawn_high
    with_score, rows, of_size, _ = printed.numbers(
        "# of # rows have a score; log size alone: R² = #, p = #"
    )
    assert (with_score, rows) == (36, 42)
    assert 0.25 < of_size < 0.35
    assert re.search(r"dropped\s+all\s", printed.text)


def vision(printed: Printed) -> None:
    for where in ("class token", "last patch"):
        (trained, null), (untrained, _) = (
            printed.numbers(f"\n{run}, {where}: #, null #") for run in RUNS
        )
        assert trained > 3 * null > 2 * untrained
    line = "\n{}: coupling of what each token does to the class token #, null #"
    (trained, null), (untrained, _) = (
        printed.numbers(line.format(run)) for run in RUNS
    )
    # The model is trained here, and differs from processor to processor: .57 and .22.
    assert trained > 1.5 * null
    assert trained > 1.3 * untrained
    line = (
        "\n{}: line_shape_score #, equidistance #, "
        "vector_alignment_across_blocks #, tail_energy #"
    )
    trained, untrained = (printed.numbers(line.format(run)) for run in RUNS)
    assert trained[0] < untrained[0]
    assert trained[2] > 2 * untrained[2]
    assert trained[3] < untrained[3]
    by_bridge, by_blocks = printed.numbers("by TransformerLens: #, by its blocks: #")
    assert by_bridge == pytest.approx(by_blocks, abs=2e-3)


RUNS = ("trained", "untrained")
CHECKS: dict[str, Callable[[Printed], None]] = {
    check.__name__: check
    for check in (
        quickstart,
        tokens_and_trajectories,
        directions,
        carriers,
        emergence,
        generalization,
        vision,
    )
}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")


@pytest.fixture(scope="session")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Colab:
    return Colab(tmp_path_factory.mktemp("colab"))


@pytest.mark.long("runs a whole notebook")
@pytest.mark.xdist_group("colab")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_on_colab_and_says_what_its_text_says(
    path: Path, smollm2: nn.Module, quiet: None, colab: Colab, tmp_path: Path
) -> None:
    """In an empty folder, with the package from its wheel and what the first cell
    fetches.
    """
    folder = tmp_path / "empty"
    folder.mkdir()
    notebook = colab.run(path, folder, _hub(tmp_path))
    fetched = {Path(url).name for url in _fetched(path) if url.endswith(".py")}
    assert {file.name for file in folder.glob("*.py")} == fetched
    # The numbers in that text are about a model that is trained elsewhere.
    if path.stem != "vision":
        CHECKS[path.stem](Printed(notebook))


def _hub(folder: Path) -> Path:
    """Make a hub's cache with a small ViT by the name of the one that Colab fetches."""
    vit = original_model("ViTForImageClassification", n_layers=8)
    tiny.add_to_hub_cache(folder / "hub", "google/vit-base-patch16-224", {"main": vit})
    (snapshot,) = folder.glob("hub/*/snapshots/*")
    ViTImageProcessorPil(size={"height": 16, "width": 8}).save_pretrained(snapshot)
    return folder


@pytest.mark.long("runs a whole notebook")
def test_vision_says_beside_its_files_what_its_text_says(
    smollm2: nn.Module, quiet: None
) -> None:
    """Elsewhere than on Colab it trains the model that its text is about."""
    notebook = nbformat.read(DEMOS / "vision.ipynb", as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": DEMOS}}).execute()
    vision(Printed(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_fetches_all_that_is_imported(path: Path) -> None:
    urls = [url for url in _fetched(path) if not url.startswith(PHOTOGRAPHS)]
    assert all(url.startswith(raw_files()) for url in urls)
    files = [ROOT / url.removeprefix(raw_files()) for url in urls]
    # Cells that a module is imported in where it was not fetched have a branch for that.
    cells = _sources(path)[1:]
    imported = {
        name
        for cell in cells
        for statement in ast.parse(re.sub("(?m)^ *[%!].*", "", cell)).body
        for name in _modules(statement)
    }
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            imported |= _modules(node)
    fetched = {name for name in imported if not _is_installed(name)}
    assert fetched == {file.stem for file in files}


def _is_installed(name: str) -> bool:
    """Return whether a module is found elsewhere than beside the notebooks."""
    spec = find_spec(name)
    return spec is not None and DEMOS not in Path(spec.origin or "").parents


def _modules(node: ast.AST) -> set[str]:
    """Return the modules that a statement imports, without their parts."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.module, "a file that is fetched alone is no part of a package"
        return {node.module.partition(".")[0]}
    return set()


def _fetched(path: Path) -> list[str]:
    """Return the addresses of what the first cell fetches."""
    return re.findall(r"(?m)^ +!wget .*?(\S+)$", _sources(path)[0])


def _sources(path: Path) -> list[str]:
    """Return the code of every cell of a notebook."""
    return [
        "".join(cell["source"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path: Path) -> None:
    notebook = json.loads(path.read_text())
    # A view brings the script that draws it, half a megabyte.
    n_views = sum(".interactive." in source for source in _sources(path))
    assert path.stat().st_size < 1_000_000 + 650_000 * n_views
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run `make notebooks`"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    views = [
        output
        for output in outputs
        if "tlc-view" in "".join(output.get("data", {}).get("text/html", ""))
    ]
    assert len(views) == n_views
    CHECKS[path.stem](Printed(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_for_readers(path: Path) -> None:
    sources = _sources(path)
    assert sources[0].startswith("# On Colab this installs the package.")
    assert not [
        source for source in sources if re.search(r"^\s*assert\b", source, re.MULTILINE)
    ]
    assert not [source for source in sources[1:] if "find_spec" in source]


def test_every_notebook_is_checked() -> None:
    assert CHECKS.keys() == {path.stem for path in NOTEBOOKS}
