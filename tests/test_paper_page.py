"""docs/PAPER.md: each command runs on a tiny model, or says what it needs; each
figure of the paper has a row in the table, and a section.
"""

import ast
import json
import re
import shlex
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as formulas
from matplotlib.figure import Figure
from scipy import stats

import tiny
from findings import findings
from tl_coupling.studies.generalization import linear_fit, paper_table1

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "PAPER.md").read_text()
# What the paper shows, by its numbers or, where its text has none, its labels.
SHOWN = [
    "1a",
    "1b",
    "1c–e",
    "2",
    "3",
    "4",
    "8",
    "9 left",
    "9 right",
    "10",
    "11",
    "12",
    "16",
    "17",
    "23",
    "24",
    "25",
    "34",
    "37",
    "fixed-input",
    "fixed-output",
    "hyperparameters",
    "vary-K",
    "svalues",
    "pca",
    "lss-expo",
    "norm-expo-training",
    "T1",
    "T2",
    "T3",
    "T4",
    "§5.2 spread",
    "§5.3 accuracy",
    "§5.5 steps",
    "§6.1",
    "§6.1 eigenvectors",
    "§6.2",
    "§6.2 spans",
    "LSS 4.25",
    "A.3",
    "A.3 rank",
    "A.6",
]


VERDICTS = {"agrees", "differs", "in part", "open", "drawn", "not run", "no claim"}


class Row(NamedTuple):
    """The section of a figure, table or claim of the paper."""

    heading: str
    figures: str
    claim: str
    seen: str
    command: str


def rows() -> list[Row]:
    parts = ("Figures", "The paper", "Seen here", "Command")
    pattern = "\n\n".join(rf"\*\*{part}:\*\* (.+)" for part in parts)
    return [Row(*found) for found in re.findall(rf"### (.+)\n\n{pattern}", PAGE)]


def commands(needs_hub: bool) -> list[list[str]]:
    """What stands after `tl-coupling`, each once."""
    commands: dict[str, None] = {}
    for row in rows():
        if ("needs the hub" in row.command) == needs_hub:
            commands |= dict.fromkeys(re.findall(r"`tl-coupling (.+?)`", row.command))
    return [shlex.split(command) for command in commands]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's setup makes, but random and tiny."""
    folder = tmp_path_factory.mktemp("page")
    for seed, width in enumerate((16, 32, 48, 64)):
        for step in (1, 16, 256):
            sizes = {
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "head_dim": width // 4,
            }
            model = tiny.huggingface_model("llama", seed + step, **sizes)
            model.save_pretrained(folder / f"models/width{width}/step{step}")
            tiny.save_tokenizer(folder / f"models/width{width}/step{step}")
    lines = [
        {
            "id": f"{task}-{i}",
            "task": task,
            "prompt": f"w{i} w{3 * i} w7 w{2 * i}" + i * " w5",
            "difficulty": i % 3,
        }
        for i, task in enumerate(("sums", "sums", "riddles", "odds"), 1)
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def check_pictures(folder: Path) -> None:
    """Assert that each picture that is named is in the folder of its command."""
    for row in rows():
        command = re.findall(r"`tl-coupling (.+?)`", row.command)
        if command and "needs the hub" not in row.command:
            out = folder / command[0].split("--out ")[1].split()[0]
            for picture in re.findall(r"`([\w-]+\.png)`", row.command):
                assert (out / picture).exists(), (
                    picture,
                    sorted(path.name for path in out.glob("*.png")),
                )


@pytest.mark.long("runs every command of a page")
def test_every_command_runs_prints_and_draws_what_is_named(
    folder: Path, call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page: later ones use what earlier ones wrote."""
    monkeypatch.chdir(folder)
    # Pictures are drawn here; that they render is what tests/pictures is for, and takes
    # most of the time.
    monkeypatch.setattr(
        Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"drawn")
    )
    assert len(commands(False)) > 7
    for command in commands(False):
        if command[0] in ("depth", "tokens", "trajectory"):
            command = [
                *command,
                "--model",
                "models/width64/step256",
                "--prompt",
                "w1 w2 w3 w4",
            ]
        if command[0] == "compare-trajectories":
            command[command.index("--prompt") + 1] = "w1 w2 w3 w4"
        assert call(
            *(8 if part in ("30", "50") else part for part in command)
        ).out.strip(), command
        assert list(Path(command[command.index("--out") + 1]).glob("*.png")), command
    for row in rows():
        for script in re.findall(r'`python -c "(.+?)"`', row.command):
            exec(
                script.replace("smollm2-135m", "models/width64/step256").replace(
                    "What is the", "w1 w2 w3"
                ),
                # One namespace, as of a script: comprehensions see its names.
                {},
            )
    assert Path("sizes.png").exists()
    check_pictures(folder)


@pytest.mark.parametrize("command", commands(True), ids=lambda command: command[0])
def test_what_needs_the_hub_knows_its_options_and_has_a_test(
    command: list[str], call
) -> None:
    help_text = call(command[0], "--help").out
    assert all(
        re.search(rf"(?<!\S){option}\b", help_text)
        for option in command
        if option.startswith("--")
    )


def test_what_needs_the_hub_names_a_test_against_the_loopback_hub() -> None:
    for row in rows():
        if "needs the hub" in row.command:
            file, name = re.findall(r"`(tests/\S+\.py)::(\w+)`", row.command)[0]
            tree = ast.parse((ROOT / file).read_text())
            assert name in {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            }, name


def test_every_figure_has_a_row_with_a_command_and_what_was_seen() -> None:
    named = {name.strip("` ") for row in rows() for name in row.figures.split(",")}
    assert not set(SHOWN) - named
    for row in rows():
        assert row.claim, row
        assert row.seen, row
        assert "`" in row.command, row


def test_the_table_has_a_row_with_a_verdict_for_each_section() -> None:
    table = PAGE.partition("| figure |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == len(rows())
    for line, row in zip(table, rows(), strict=True):
        figures, badge, shown, _ = line.strip("| ").split(" | ")
        anchor = re.sub(r"[^\w -]", "", row.heading.lower()).replace(" ", "-")
        assert shown == f"[{row.heading}](#{anchor}): {row.claim.rstrip('.')}"
        assert set(figures.split(", ")) <= set(row.figures.split(", "))
        verdict = badge.partition("`")[2].strip("`")
        assert verdict in VERDICTS
        assert (verdict == "not run") == row.seen.startswith("not run")


def verdicts() -> list[tuple[str, str]]:
    """Each figure of the table with a verdict of it."""
    table = PAGE.partition("| figure |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("| ").split(" | ")[:2] for line in table]
    return [
        (figure, badge.partition("`")[2].strip("`"))
        for figures, badge in cells
        for figure in figures.split(", ")
    ]


def test_a_figure_has_one_verdict() -> None:
    figures = [figure for figure, _ in verdicts()]
    assert len(figures) == len(set(figures))


def test_a_verdict_says_no_more_than_the_findings() -> None:
    """What the findings say was shown by nothing, or says nothing, does not decide."""
    claims = {
        "it does so better than parameters, width or depth": ("T1", "9 right"),
        "their coupling goes with accuracy at a fixed rate": ("11", "12"),
    }
    said = dict(verdicts())
    for claim, figures in claims.items():
        (line,) = [line for line in findings().splitlines() if f"[{claim}](" in line]
        assert line.endswith("| neither |")
        assert {said[figure] for figure in figures} == {"open"}
    badge = re.search(r"Does coupling rise.+?bdg-\w+}`([\w ]+)`", findings(), re.DOTALL)
    assert badge[1] == said["1b in small models"] == said["§5.3 accuracy"]
    decides_nothing = {
        "A.3 rank": "nothing follows from it",
        "34": "more so when untrained",
    }
    for figure, words in decides_nothing.items():
        (line,) = [
            line for line in PAGE.splitlines() if line.startswith(f"| {figure} |")
        ]
        assert words in line
        assert said[figure] in ("open", "in part")


def test_what_sizes_explain_in_table_1_is_what_the_pages_say() -> None:
    table = paper_table1().dropna(subset="score")
    is_base = table.variant == "base"
    is_of_code = table.family.isin(["CodeLlama", "CodeGemma"])
    of_findings = findings()
    for models in (table[is_base & ~is_of_code], table):
        for x in (np.log(models.params_billion), models.d_model, models.n_layers):
            r_squared = f"{stats.linregress(x, models.score).rvalue ** 2:.3f}"
            assert r_squared in PAGE
            assert r_squared in of_findings
    assert len(table[is_base & ~is_of_code]) == 23


def test_what_vision_transformers_of_the_study_say_is_what_the_page_says() -> None:
    """Least squares with a constant for each level of what is held fixed."""
    path = ROOT / "demos" / "studies" / "results" / "vit" / "models.csv"
    models = pandas.read_csv(path).rename(columns={"class token": "coupling"})
    for y, x, fixed, words in (
        (
            "coupling",
            "stochastic_depth",
            "weight_decay",
            "coupling on the rate {} with",
        ),
        (
            "test_accuracy",
            "coupling",
            "stochastic_depth",
            "{} with the rate held fixed",
        ),
        ("test_accuracy", "coupling", "weight_decay", "4 has it, {} with the weight"),
        ("test_accuracy", "coupling", None, "{} over all"),
    ):
        levels = sorted(models[fixed].unique().tolist())[1:] if fixed else []
        controls = [f"{fixed} == {level!r}" for level in levels]
        fit = linear_fit(models, x, y, controls=controls)
        low, high = fit.slope_interval
        said = f"{fit.slope:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")
        assert words.format(said) in PAGE
        formula = f"{y} ~ {x}" + (f" + C({fixed})" if fixed else "")
        slope = formulas.ols(formula, models).fit().params[x]
        assert fit.slope == pytest.approx(slope)
    accuracy = models["test_accuracy"]
    mean = accuracy.mean()
    text = " ".join(findings().split())
    assert f"over models, {100 * accuracy.std():.2f} percentage points" in text
    assert f"450 images, {100 * (mean * (1 - mean) / 450) ** 0.5:.2f}, so" in text


def test_what_few_layers_can_show_of_rank_correlations() -> None:
    """p of Spearman's ρ over all orders of six layers, or of five pairs."""
    for n, rho in ((6, 0.94), (6, 0.83), (5, 0.3), (5, 0.4), (5, 0.7), (5, 0.9)):
        orders = np.array(list(permutations(range(n))))
        values = np.array([np.corrcoef(range(n), order)[0, 1] for order in orders])
        p = (np.abs(values) > rho - 0.005).mean()
        said = f"{rho:.2f} (p {p:.2f})".replace("(p 0.", "(p .")
        assert said in findings()
        assert f"{rho:.2f}, p {p:.2f}".replace("p 0.", "p .") in PAGE


def test_names_on_the_hub_are_in_transformer_lens_registry() -> None:
    """All models of Table 1, but MPT, which left its place."""
    import transformer_lens

    file = (
        Path(transformer_lens.__file__).parent
        / "tools/model_registry/data/supported_models.json"
    )
    known = {model["model_id"] for model in json.loads(file.read_text())["models"]}
    names = paper_table1()["model"]
    assert names.is_unique
    assert set(names) - known == {"mosaicml/mpt-30b", "mosaicml/mpt-7b"}
