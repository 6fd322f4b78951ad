"""`tl-coupling generalization` as a user meets it."""

import json
import sys
from contextlib import nullcontext

import numpy as np
import pandas
import pytest
from scipy import stats

import tiny
from blank_pictures import unrendered
from command_line import typed, warnings_shown
from fake_survey import survey
from tl_coupling import Settings
from tl_coupling.cli import main
from tl_coupling.studies.generalization import paper_table1
from unequal_variance import line_of_unequal_variance

PICTURES = {
    "generalization.png",
    "forest.png",
    "k_sweep.png",
    "covariates.png",
    "quartiles.png",
}


@pytest.fixture
def call(monkeypatch, capsys, as_a_user):
    """The command in this process: exit status, standard output, standard error, both
    as one line. Pictures are rendered with `drawn=True`.
    """

    def run(
        *arguments: object, drawn: bool = False, **options: object
    ) -> tuple[int, str, str]:
        words = [*map(str, arguments), *typed(**options)]
        monkeypatch.setattr(sys, "argv", ["tl-coupling", "generalization", *words])
        monkeypatch.setenv("COLUMNS", "200")
        rendering = nullcontext() if drawn else unrendered()
        with rendering, warnings_shown(), pytest.raises(SystemExit) as stopped:
            main()
        streams = capsys.readouterr()
        return (
            stopped.value.code or 0,
            " ".join(streams.out.split()),
            " ".join(streams.err.split()),
        )

    return run


@pytest.fixture
def given(tmp_path):
    """A survey's file, its scores' file, and both in memory."""
    data = survey(n_models=10)
    x = data["mean_coupling"].values[:, 0, :, 0].mean(1)
    scores = pandas.DataFrame(
        {
            "model": data["model"].values,
            "score": 20 + 60 * x,
            "arc": np.random.default_rng(0).random(10),
        }
    )
    data.to_netcdf(tmp_path / "sweep.nc")
    scores.to_csv(tmp_path / "scores.csv", index=False)
    return tmp_path / "sweep.nc", tmp_path / "scores.csv", data, scores


def test_scores_of_the_papers_table(call, given, tmp_path):
    """Joined by the names on the hub, without a word on the models of the table that
    were not measured.
    """
    _, _, data, _ = given
    table = paper_table1().dropna(subset=["score"]).head(10)
    data.assign_coords(model=table["model"].tolist()).to_netcdf(tmp_path / "hub.nc")
    out = tmp_path / "out"
    status, _, errors = call(
        survey=tmp_path / "hub.nc", scores="table1", resamples=20, out=out
    )
    assert status == 0
    assert "were not measured" not in errors
    written = pandas.read_csv(out / "table.csv")
    assert dict(zip(written["model"], written["score"], strict=True)) == dict(
        zip(table["model"], table["score"], strict=True)
    )


def test_scores_of_a_file(call, given, tmp_path):
    file, scores, _, table = given
    options = {"survey": file, "scores": scores, "k": 5, "resamples": 100}
    options |= {"subset": "high=score > 45", "control": "log10(n_parameters)"}
    status, output, _ = call(**options, out=tmp_path / "out", drawn=True)
    assert status == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["association"]["linear"]["r_squared"] == pytest.approx(1)
    assert summary["association"]["linear"]["slope"] == pytest.approx(60)
    assert list(summary["partial"]) == ["log10(n_parameters)"]
    assert summary["subsets"]["high"]["n"] == (table["score"] > 45).sum()
    written = pandas.read_csv(tmp_path / "out" / "table.csv")
    assert written["score"].tolist() == pytest.approx(table["score"].tolist())
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == PICTURES
    assert "score against coupling (k = 5)" in output
    assert "given log10(n_parameters)" in output
    low, high = summary["association"]["bootstrap"]["r_squared"]
    assert f"R² = 1.000 ({low:.3f} to {high:.3f})" in output


def test_another_column_is_the_score(call, given, tmp_path):
    file, scores, data, table = given
    call(
        survey=file, scores=scores, score_column="arc", k=5, resamples=100, out=tmp_path
    )
    fit = json.loads((tmp_path / "summary.json").read_text())["association"]["linear"]
    coupling = data["mean_coupling"].values[:, 0, :, 0].mean(1)
    slope, _, _, p = line_of_unequal_variance(coupling, table["arc"])
    assert (fit["y"], fit["slope"], fit["p"]) == (
        "arc",
        pytest.approx(slope),
        pytest.approx(p),
    )


@pytest.mark.parametrize("scores", [[], ["--scores", "loss"]])
def test_without_scores_the_loss_stands_in(call, given, tmp_path, scores):
    file, _, data, _ = given
    status, output, _ = call(
        "--survey", file, *scores, "--resamples", 100, "--out", tmp_path / "out"
    )
    assert status == 0
    assert "loss against coupling (k = 10)" in output
    fit = json.loads((tmp_path / "out" / "summary.json").read_text())["association"][
        "linear"
    ]
    x, y = (
        data["mean_coupling"].values[:, 0, :, 1].mean(1),
        data["loss"].values[:, 0].mean(1),
    )
    assert fit["slope"] == pytest.approx(stats.linregress(x, y).slope)


def test_families_by_patterns(call, given, tmp_path):
    file, scores, _, table = given
    table.assign(score=range(10)).to_csv(scores, index=False)
    patterns = ["a=org/m[0-3]", "b=org/m[4-7]", "c=org/m[89]"]
    options = {"survey": file, "scores": scores, "resamples": 50}
    options |= {"subset": "high=score > 4", "family": patterns}
    out = tmp_path / "out"
    status, output, _ = call(**options, out=out)
    assert status == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["association"]["linear"]["n_families"] == 3
    assert "10 models in 3 families, 6 prompts" in output
    assert "95% t intervals (CR2, cluster-robust" in output
    assert "given family" in output
    assert "all models, bootstrap" not in output
    assert (
        "left out: bootstrap: 3 families are too few to resample (wanted 6): the t interval holds"
        in output
    )
    assert "chosen by the score: high" in output
    assert (
        f"p = {summary['familywise']['p']:.3g} by permutation of the scores, over 12 tests"
        in output
    )
    assert pandas.read_csv(out / "table.csv")["family"].tolist() == [*"aaaabbbbcc"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--family", "pythia"],
            '`--family` must be NAME=PATTERN, like "Pythia=*pythia*"',
        ),
        (
            ["--family", "GPT=*gpt*"],
            "`--family` GPT: no model matches '*gpt*'; there are org/m0, org/m1",
        ),
        (
            ["--family", "a=org/m1", "--family", "b=*"],
            "`--family` b: org/m1 is already of the family a",
        ),
        (["--survey", "{tmp}"], "{tmp}"),
        (["--survey", "{tmp}/none.nc"], "no survey at"),
        (["--survey", "{tmp}/scores.csv"], "is not a netCDF file that can be read"),
        (["--scores", "{tmp}/none.csv"], "none.csv"),
        (
            ["--score-column", "points"],
            "no column 'points'; the columns are model, score, arc",
        ),
        (["--k", "7"], "`k` = 7 was not measured; there are [5, 10]"),
        (["--measure", "beauty"], "'beauty' is not one of 'coupling', "),
        (["--subset", "high"], "`--subset` must be NAME=QUERY"),
        (
            ["--subset", "high=points > 3"],
            "subset 'high': no column or expression 'points > 3'",
        ),
        (["--control", "colour"], "no column or expression 'colour'"),
        (["--checkpoint", "9"], "checkpoint '9' was not measured; there are main"),
        (["--resamples", "0"], "--resamples"),
    ],
)
def test_bad_input_overwrites_nothing(call, given, tmp_path, arguments, message):
    file, scores, *_ = given
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text("earlier")
    filled = [part.replace("{tmp}", str(tmp_path)) for part in arguments]
    status, _, errors = call(
        "--survey", file, "--scores", scores, "--out", out, *filled
    )
    assert status == 2
    assert message.replace("{tmp}", str(tmp_path)) in errors
    assert [path.name for path in out.iterdir()] == ["summary.json"]
    assert (out / "summary.json").read_text() == "earlier"


def test_scores_of_models_that_were_not_measured(call, given, tmp_path):
    file, scores, _, table = given
    table.assign(model=[*table["model"][:-1], "gpt-5"]).to_csv(scores, index=False)
    status, _, errors = call(
        survey=file, scores=scores, resamples=50, out=tmp_path / "out"
    )
    assert status == 0
    assert (
        errors.count("models that were not measured: gpt-5; measured: org/m0, org/m1")
        == 1
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["association"]["linear"]["n"] == 9
    assert summary["left_out"]["org/m9"] == "no score"


def test_the_folder_of_a_survey(call, tmp_path):
    from tl_coupling.studies.surveys.survey import Survey, run_survey

    models = {}
    for family in ("gpt2", "llama", "gpt_neox"):
        models[family] = str(tmp_path / family)
        tiny.huggingface_model(family).save_pretrained(models[family])
        tiny.save_tokenizer(tmp_path / family)
    prompts = ["w1 w2 w3 w4", "w5 w6 w7 w8 w9"]
    one_model = Survey(
        models,
        prompts,
        untrained=True,
        settings=Settings(k=(4, 8), n_singular_values=4),
        prompts_per_unit=1,
    )
    data = run_survey(one_model, tmp_path / "survey").load()
    status, output, _ = call(
        "--survey", tmp_path / "survey", "--resamples", 100, "--out", tmp_path / "out"
    )
    assert status == 0
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")
    assert set(table["checkpoint"]) == {"main"}
    for model in models:
        measured = data.sel(model=model, checkpoint="main")
        assert table.loc[model, "coupling"] == pytest.approx(
            measured["mean_coupling"].sel(k=8).mean().item()
        )
        assert table.loc[model, "n_parameters"] == measured["n_parameters"].item()
    assert (
        "left out: influence: leaving one model out needs at least four, got 3"
        in output
    )


def test_choices_that_the_survey_does_not_hold(call, given, tmp_path):
    file = given[0]
    for arguments, message in (
        (("--diagonal",), "there is no map 'coupling' in the data"),
        (
            ("--orientation", "vju"),
            "`orientation` 'vju' was not measured; there is ujv",
        ),
    ):
        status, _, error = call("--survey", file, "--out", tmp_path / "out", *arguments)
        assert (status, message in error) == (2, True), error
