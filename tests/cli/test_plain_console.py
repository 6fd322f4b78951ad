"""Names, labels, paths and score files as text: terminals, markup, pictures and
spreadsheets do not act on them.
"""

import csv
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest

import tiny
from fake_survey import survey
from tl_coupling.cli.plain_console import PlainConsole
from tl_coupling.files import as_cell, of_cell, plain, write_table
from tl_coupling.studies.generalization import read_scores

# Clears the screen, names the window, turns text around; markup and emoji of rich;
# mathematics that does not parse.
ESCAPES = "\x1b[2J\x1b]0;x\x07\x9b2J\u202e"
AS_TEXT = r"\x1b[2J\x1b]0;x\x07\x9b2J\u202e"
MARKUP = "[red]x[-red] :bomb: $\\frac$ <b>"
BACKSLASH = "\\"
HOSTILE = f"{MARKUP}{ESCAPES}"
SHOWN = f"{MARKUP}{AS_TEXT}"


@pytest.fixture
def said(call, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """All that a command shows in a wide terminal, with its bars."""
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(*arguments: object, **options: Any) -> str:
        streams = call(*arguments, drawn=True, **options)
        text = f"{streams.out}\n{streams.err}"
        # But for rich's own: colours, the cursor, lines that are drawn again.
        text = re.sub(r"\x1b\[(?:[\d;]*[mA]|2K|\?25[lh])", "", text)
        assert not set(text) & set("\x1b\x07\x9b\u202e💣")
        assert "is left out" not in text
        return text

    return run


@pytest.fixture
def hostile_folder(folder_model: Path, tmp_path: Path) -> Path:
    """A model in a folder with such a name."""
    return Path(shutil.copytree(folder_model, tmp_path / HOSTILE))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("a\x00\x08\x7f\r", r"a\x00\x08\x7f\r"),
        ("half a \ud800", r"half a \ud800"),
        (
            "Straße, 東京, ρ = 0.5 ± 1 −\ntwo lines",
            "Straße, 東京, ρ = 0.5 ± 1 −\ntwo lines",
        ),
    ],
)
def test_what_terminals_act_on_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_label(said, folder_model: Path, tmp_path: Path) -> None:
    # netCDF takes a backslash for a slash.
    out = tmp_path / HOSTILE.replace(BACKSLASH, "")
    options = {"model": folder_model, "label": HOSTILE, "k": 4, "out": out}
    options["prompt"] = "w1 w2 w3"
    # Titles are as narrow as their tables.
    shown = " ".join(
        said("depth", **options, untrained=True, all_measures=True).split()
    )
    assert f"{SHOWN}: depth coupling" in shown
    assert f"{SHOWN}: every choice" in shown
    assert (
        f"wrote to {tmp_path}/{MARKUP.replace(BACKSLASH, '')}{AS_TEXT}: depth.nc,"
        in shown
    )
    shown = " ".join(said("redundancy", **options).split())
    assert f"{SHOWN}: change in loss" in shown


@pytest.mark.parametrize("command", ["depth", "compare-trajectories", "precision"])
def test_an_error_is_one_line_of_text(said, tmp_path: Path, command: str) -> None:
    name = f"./{HOSTILE}"
    options = {"model": name, "prompt": "w1", "out": tmp_path / "out"}
    shown = said(command, **options, status=2)
    assert SHOWN in shown.splitlines()[-1]
    shown = said("--debug", command, **options, status=2)
    assert "Traceback" in shown
    assert SHOWN in shown.splitlines()[-1]


def test_bars_and_columns_of_several_models(
    said, hostile_folder: Path, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": [hostile_folder, folder_model], "prompt": "w1 w2 w3"}
    shown = said("compare-trajectories", **options, out=tmp_path / "paths")
    assert f"measuring {tmp_path}/{SHOWN} …" in shown
    # In the table.
    assert f"│ {tmp_path}/{SHOWN} │" in shown
    assert len(list((tmp_path / "paths").glob("*.png"))) == 2


def test_names_of_precisions(said, folder_model: Path, tmp_path: Path) -> None:
    precisions = [f"{HOSTILE}={folder_model}", "bfloat16"]
    options = {"model": folder_model, "prompt": "w1 w2 w3", "k": 4, "out": tmp_path}
    shown = said("precision", **options, precision=precisions)
    assert f"┃ {SHOWN} ┃" in shown
    assert f"{SHOWN}: mean over 1 prompt" in shown
    ElementTree.parse(tmp_path / "precision.svg")


def test_names_in_a_survey(said, folder_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"{i}{HOSTILE}", "prompt": f"w1 w2 w{i}", "task": HOSTILE}
        for i in range(3)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    models = [f"{HOSTILE}={folder_model}", f"none{HOSTILE}={tmp_path / 'missing'}"]
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "config.json").write_text(
        json.dumps({"model_type": HOSTILE})
    )
    options = {"prompts": prompts, "k": 4, "all_measures": True}
    shown = said("survey", model=models, **options, out=tmp_path / "out", status=1)
    assert f"warning: 1 of 2 units failed and are left out: none{SHOWN}@main" in shown
    assert f"│ {SHOWN} │" in shown
    assert f"(k = 4), {SHOWN}" in shown
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


@pytest.fixture
def study(tmp_path: Path) -> tuple[Path, Path]:
    """A survey, and scores, with such names everywhere."""
    data = survey(n_models=8)
    data = data.assign_coords(model=[f"{HOSTILE}{i}" for i in range(8)])
    data.to_netcdf(tmp_path / "survey.nc")
    x = data["mean_coupling"].values[:, 0, :, 0].mean(1)
    scores = pandas.DataFrame(
        {
            "model": data["model"].values,
            HOSTILE: 20 + 60 * x,
            "family": [HOSTILE, "b"] * 4,
        }
    )
    scores.to_csv(tmp_path / "scores.csv", index=False)
    return tmp_path / "survey.nc", tmp_path / "scores.csv"


def test_names_in_a_study(said, study: tuple[Path, Path], tmp_path: Path) -> None:
    file, scores = study
    options = {"survey": file, "scores": scores, "score_column": HOSTILE}
    options |= {"subset": f"{HOSTILE}=n_layers > 5", "resamples": 20}
    options["out"] = tmp_path / "out"
    shown = said("generalization", **options)
    assert f"{SHOWN} against coupling (k = 10)" in shown
    assert re.search(
        rf"without one family R² is .*; {re.escape(SHOWN)} changes it most", shown
    )
    assert len(list((tmp_path / "out").glob("*.png"))) == 5
    options["score_column"] = f"no{HOSTILE}"
    shown = said("generalization", **options, status=2)
    assert f"no column 'no{MARKUP}" in shown.replace("\\\\", "\\")


# spreadsheets

FORMULAS = [
    *(
        "=HYPERLINK(1)",
        "+1+cmd",
        "-x",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "\n=1",
        "-",
        "=",
        "'=1",
        "''@a",
    ),
    *('="a",b', "=1\r\n=2"),
]
HARMLESS = ["gpt2", "-0.3", "+1e-5", "a=b", "it's", "'quoted'", "", "§", "1-2"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text_and_comes_back(text: str) -> None:
    assert as_cell(text) == f"'{text}"
    assert of_cell(as_cell(text)) == text


@pytest.mark.parametrize("value", [*HARMLESS, -0.3, 4, None, float("inf"), -1e300])
def test_numbers_and_names_are_written_as_they_are(value: Any) -> None:
    assert as_cell(value) is value
    assert of_cell(value) is value


def test_a_table_of_formulas_is_read_again(tmp_path: Path) -> None:
    names = [name for name in FORMULAS if name == name.strip()]
    table = pandas.DataFrame(
        {"model": names, "=score": [-0.3 * i for i in range(len(names))], "-note": "@x"}
    )
    write_table(table, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["model", "'=score", "'-note"]
    assert [row[0] for row in rows] == [f"'{name}" for name in names]
    assert [float(row[1]) for row in rows] == table["=score"].tolist()
    read = read_scores(tmp_path / "table.csv", score="=score")
    assert read.to_dict("list") == table.to_dict("list")


@pytest.mark.long("runs every command")
def test_no_command_writes_a_formula(call, folder_model: Path, tmp_path: Path) -> None:
    """Labels, names of precisions, and of columns, models and families in scores."""
    options = {"model": folder_model, "prompt": "w1 w2 w3", "k": 4}
    precisions = [f"@x={folder_model}", "bfloat16"]
    call("precision", **options, precision=precisions, out=tmp_path / "precision")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n{"prompt": "w6 w7"}\n'
    )
    models = [f"@m0={folder_model}"]
    for i in (1, 2):
        tiny.huggingface_model("llama", seed=i).save_pretrained(tmp_path / f"m{i}")
        tiny.save_tokenizer(tmp_path / f"m{i}")
        models.append(f"@m{i}={tmp_path / f'm{i}'}")
    options = {"model": models, "prompts": prompts, "k": 4, "all_measures": True}
    call("survey", **options, out=tmp_path / "survey")
    (tmp_path / "scores.csv").write_text(
        "model,+score,family,-note\n'@m0,1,=a,+\n@m1,2,=a,x\n@m2,4,=b,-1\n"
    )
    options = {"scores": tmp_path / "scores.csv", "score_column": "+score"}
    options |= {"survey": tmp_path / "survey", "resamples": 20}
    call("generalization", **options, out=tmp_path / "study")
    written = sorted(tmp_path.glob("*/*.csv"))
    assert [path.name for path in written] == ["table.csv", "table.csv", "measures.csv"]
    for path in written:
        with path.open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [
            cell
            for cell in cells
            if cell[:1] in tuple("=+@\t\r") or re.match("-[^0-9]", cell)
        ]
    again = read_scores(tmp_path / "study" / "table.csv", score="+score")
    assert again["model"].tolist() == ["@m0", "@m1", "@m2"]
    assert again["family"].tolist() == ["=a", "=a", "=b"]
    assert again["-note"].tolist() == ["+", "x", "-1"]


def test_a_stage_that_takes_long_is_a_line_in_a_log(capsys, monkeypatch):
    monkeypatch.setattr("tl_coupling.cli.plain_console._SECONDS_TO_LINE", 0.05)
    console = PlainConsole(stderr=True)
    with console.stage("loading [gpt2] …"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "loading [gpt2] …\n"
    monkeypatch.setattr("tl_coupling.cli.plain_console._SECONDS_TO_LINE", 60)
    with console.stage("drawing …"):
        pass
    assert not capsys.readouterr().err
