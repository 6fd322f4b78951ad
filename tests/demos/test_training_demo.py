"""A small model trained here: the pieces, and the whole demo at a size of seconds."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import xarray

import small_models
import train_and_trace


def test_rank_correlations_split_at_the_peak():
    coupling, loss = np.array([0.1, 0.3, 0.6, 0.5, 0.4]), np.array([8.0, 7, 6, 5, 4])
    data = xarray.Dataset(
        {
            "mean_coupling": (
                ("seed", "checkpoint", "prompt", "k"),
                coupling[None, :, None, None],
            ),
            "loss": (("seed", "checkpoint", "prompt"), loss[None, :, None]),
        },
        {"checkpoint": [0, 1, 2, 4, 8], "k": [5]},
    )
    correlations = train_and_trace.rank_correlations(data, 5)
    # Ranks of coupling 1 2 5 4 3, of loss 5 4 3 2 1: 1 − 6 Σd² / n(n² − 1) with Σd² =
    # 16 + 4 + 4 + 4 + 4.
    assert correlations["all"] == [pytest.approx(1 - 6 * 32 / 120)]
    assert correlations["up to the peak"] == [pytest.approx(-1)]
    assert correlations["from the peak on"] == [pytest.approx(1)]


@pytest.fixture(scope="module")
def options(small_text, tmp_path_factory) -> list[str]:
    size = (
        "--width 32 --n-layers 2 --n-heads 2 --vocabulary 300 "
        "--n-ctx 16 --batch 4 --steps 6 --prompts 2 --k 5"
    )
    return [
        *size.split(),
        "--text",
        str(small_text),
        "--out",
        str(tmp_path_factory.mktemp("out")),
    ]


@pytest.fixture(scope="module")
def printed(options) -> str:
    """Run the demo; return what it prints."""
    with redirect_stdout(StringIO()) as said:
        assert train_and_trace.main([*options, "--seeds", "2", "--jobs", "1"]) == 0
    return said.getvalue()


@pytest.mark.long("trains a model")
@pytest.mark.xdist_group("training_demo")
def test_demo_trains_measures_reports_and_draws(options, printed):
    out = Path(options[-1])
    data = xarray.load_dataset(out / "training.nc")
    assert dict(data.mean_coupling.sizes) == {
        "seed": 2,
        "checkpoint": 5,
        "prompt": 2,
        "k": 1,
    }
    assert data.checkpoint.values.tolist() == [0, 1, 2, 4, 6]
    assert np.isfinite(data.mean_coupling).all()
    assert np.isfinite(data.loss).all()
    assert (data.loss.isel(checkpoint=-1) < data.loss.isel(checkpoint=0)).all()
    assert json.loads(data.training)["width"] == 32
    assert len(data.text) == 2
    figures = {path.stem for path in out.glob("*.png")}
    assert {
        "emergence",
        "strip",
        "shapes",
        "adjacency",
        "trajectories-step0",
        "trajectories-step6",
    } <= figures
    assert "0.106" in printed
    assert printed.count("rank correlation") == 3
    assert f"{float(data.mean_coupling.isel(checkpoint=0).mean()):.3f}" in printed


@pytest.mark.long("trains a model")
@pytest.mark.xdist_group("training_demo")
def test_demo_keeps_what_is_finished(options, printed, monkeypatch):
    def untouched(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(
        "tl_coupling.studies.surveys.survey.measured_prompts", untouched
    )
    monkeypatch.setattr(small_models, "new_model", untouched)
    assert train_and_trace.main([*options, "--seeds", "2", "--jobs", "1"]) == 0


@pytest.mark.long("trains a model")
def test_demo_traces_checkpoints_that_are_there(
    options, small_corpus, small_config, small_text, tmp_path
):
    folder = small_models.train(replace(small_config, steps=2), small_corpus, tmp_path)
    arguments = [
        "--model",
        str(folder),
        "--text",
        str(small_text),
        "--out",
        str(tmp_path / "out"),
    ]
    assert (
        train_and_trace.main(
            [*arguments, "--n-ctx", "16", "--prompts", "2", "--k", "4"]
        )
        == 0
    )
    data = xarray.load_dataset(tmp_path / "out" / "training.nc")
    assert data.checkpoint.values.tolist() == [0, 1, 2]
    assert data.attrs["model"] == str(folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seeds", "0"], "`--seeds` and `--jobs` must be at least 1, got 0 and"),
        (["--k", "0"], "`k` must be"),
        (["--prompts", "500"], "wanted 500 held-out passages"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--model", "no/such-model"], "no/such-model"),
    ],
)
def test_demo_says_in_one_line_what_is_wrong(options, given, message, capsys):
    assert train_and_trace.main([*options, "--jobs", "1", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
