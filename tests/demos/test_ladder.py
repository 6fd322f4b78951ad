"""The ladder of small models at a size of a minute, and its pieces."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import xarray
from scipy import stats

import ladder
import tl_coupling as tlc

SMALL = (
    "--widths 16 32 --depths 2 3 --steps 4 12 --seeds 1 "
    "--vocabulary 300 --n-ctx 16 --passages 3 --k 4 8 --per-task 0"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def options(small_text: Path, out: Path) -> list[str]:
    return [*SMALL.split(), "--text", str(small_text), "--out", str(out), "--jobs", "2"]


def test_a_ladder_is_all_sizes_and_no_seed_twice(options):
    configs = ladder.ladder(ladder.arguments_of(options))
    shapes = {(config.width, config.n_layers, config.steps) for config in configs}
    assert shapes == {(w, d, s) for w in (16, 32) for d in (2, 3) for s in (4, 12)}
    assert len({config.seed for config in configs}) == len(configs) == 8
    assert len(ladder.ladder(ladder.arguments_of([]))) == 24


def test_held_out_loss_is_that_of_the_unigram_model_for_constant_logits(
    small_config, small_corpus
):
    """Logits that do not depend on the input give the cross-entropy of one fixed
    distribution.
    """

    class Constant(torch.nn.Module):
        def forward(self, ids):
            logits = torch.zeros(*ids.shape, 300)
            logits[..., 7] = 3.0
            return type("Output", (), {"logits": logits})

    model = Constant()
    loss = ladder.held_out_loss(model, small_corpus, small_config)
    total = 299 + np.exp(3.0)
    # The mean of two numbers, by how often token 7 comes.
    low, high = np.log(total) - 3, np.log(total)
    assert low <= loss <= high
    ids = [
        i
        for text in small_corpus.held_out
        for i in small_corpus.tokenizer(text)["input_ids"]
    ]
    n = len(ids) // 16
    windows = np.array(ids[: n * 16]).reshape(n, 16)[
        np.linspace(0, n - 1, min(ladder.EVALUATED, n)).astype(int), 1:
    ]
    assert loss == pytest.approx(high - 3 * (windows == 7).mean(), rel=1e-5)


@pytest.fixture(scope="module")
def printed(options: list[str]) -> str:
    """Run the study; return what it prints."""
    with redirect_stdout(StringIO()) as said:
        assert ladder.main(options) == 0
    return said.getvalue()


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("ladder")
def test_the_study_trains_scores_surveys_and_compares(options, out, printed):
    assert (out / "report.txt").read_text() in "".join(
        line for line in printed.splitlines(True) if not line.startswith("wrote ")
    )
    measured = pandas.read_csv(out / "measured.csv")
    output = " ".join(printed.split())
    scores = pandas.read_csv(out / "scores.csv")
    assert len(scores) == 8
    assert set(scores["training_tokens"]) == {4 * 16 * 16, 12 * 16 * 16}
    assert scores["held_out_loss"].between(4, 6).all()
    summary = json.loads((out / "generalization.json").read_text())
    assert len(summary["table"]) == 8
    coupling = {row["model"]: row["coupling"] for row in summary["table"]}
    assert dict(zip(measured["model"], measured["coupling"], strict=True)) == (
        pytest.approx(coupling, abs=1e-5)
    )
    for row in summary["table"]:
        assert row["held_out_loss"] == pytest.approx(
            scores.set_index("model").loc[row["model"], "held_out_loss"]
        )
    assert {"width 16", "2 blocks", "4 steps"} <= set(summary["subsets"])
    # Size and text explain the loss of models this small better than anything: what
    # matters is that it is all there.
    assert summary["association"]["linear"]["n"] == 8
    assert {path.name for path in out.glob("*.png")} >= {
        "generalization.png",
        "forest.png",
        "k_sweep.png",
    }
    (path,) = out.glob("redundancy-w*-d3-*.nc")
    changed = xarray.load_dataset(path)
    assert dict(changed.loss_dropped.sizes) == {
        "prompt": 3,
        "layer": changed.sizes["layer"],
    }
    assert path.with_suffix(".png").stat().st_size > 10_000
    rho = float(
        tlc.redundancy.redundancy_correlations(changed).coupling.sel(
            change="dropped", blocks="all", k=4
        )
    )
    assert f"{rho:+.2f}" in output
    assert "the paper's Table 1" in output
    assert "log10(params_billion) with depth and width held fixed: partial R²" in output
    line = summary["association"]["linear"]
    assert f"slope {line['slope']:.4g} ({line['slope_interval'][0]:.4g} to" in output
    assert (
        "given log10(n_parameters) + n_layers + d_model + log10(training_tokens)"
        in output
        or summary["left_out"]
    )
    assert "smollm2" not in output


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("ladder")
def test_what_is_finished_is_kept(options, out, printed):
    """Models, and units of the survey, by the time they were written."""

    def written() -> dict[str, int]:
        files = [
            *(out / "models").rglob("*.safetensors"),
            *(out / "survey").glob("*.nc"),
        ]
        return {str(path): path.stat().st_mtime_ns for path in files}

    files_before = written()
    assert len(files_before) == 16
    assert ladder.main(options) == 0
    assert written() == files_before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--jobs", "0"], "`workers` must be at least 1, got 0"),
        (["--passages", "500"], "wanted 500 held-out passages"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line(options, given, message, capsys):
    assert ladder.main([*options, *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1


def redundancy_of(cost, coupling, influence) -> xarray.Dataset:
    """What `layer_redundancy` returns, on two prompts, with the same for pairs."""
    n = len(cost)
    columns = {
        "loss": ("prompt", np.zeros(2)),
        "block_influence": (("prompt", "layer"), np.tile(influence, (2, 1))),
        "coupling_with_others": (
            ("prompt", "k", "layer"),
            np.tile(coupling, (2, 1, 1)),
        ),
        "coupling_of_pair": (
            ("prompt", "k", "pair"),
            np.tile(coupling[:-1], (2, 1, 1)),
        ),
        "loss_dropped": (("prompt", "layer"), np.tile(cost, (2, 1))),
    }
    for change in ("swapped", "merged"):
        columns[f"loss_{change}"] = (("prompt", "pair"), np.tile(cost[:-1], (2, 1)))
    return xarray.Dataset(columns, {"k": [10], "layer": range(n)})


def test_what_is_left_given_depth_is_the_partial_correlation_of_ranks():
    """By the recursion of partial correlations, over scipy's ranks."""
    rng = np.random.default_rng(0)
    cost, coupling, influence = rng.standard_normal((3, 20))
    row = ladder.given_depth(redundancy_of(cost, coupling, influence), 10).loc[
        "dropped"
    ]

    def rho(x, y):
        return stats.spearmanr(x, y).statistic

    middle = abs(np.arange(20) - 9.5)
    assert row["rho"] == pytest.approx(rho(cost, coupling))
    for name, control in (("middle", middle), ("influence", influence)):
        r, a, b = rho(cost, coupling), rho(cost, control), rho(coupling, control)
        partial = (r - a * b) / ((1 - a**2) * (1 - b**2)) ** 0.5
        assert row[f"given_{name}"] == pytest.approx(partial)
        # As linear regression's p of one of two covariates, which t gives as well.
        t = partial * (17 / (1 - partial**2)) ** 0.5
        assert row[f"p_{name}"] == pytest.approx(2 * stats.t.cdf(-abs(t), 17))
    shifts = [abs(rho(cost, np.roll(coupling, i))) for i in range(20)]
    expected = np.mean([value >= abs(row["rho"]) - 1e-9 for value in shifts])
    assert row["p_shift"] == pytest.approx(expected)


def test_nothing_is_left_where_cost_and_coupling_follow_depth_alone():
    """Both are smooth in depth, with noise of their own."""
    rng = np.random.default_rng(1)
    middle = abs(np.arange(60) - 29.5)
    cost, minus_coupling = middle + rng.standard_normal((2, 60))
    influence = rng.standard_normal(60)
    data = redundancy_of(cost, -minus_coupling, influence)
    row = ladder.given_depth(data, 10).loc["dropped"]
    assert row["rho"] < -0.9
    assert row["given_influence"] < -0.9
    assert row["p_middle"] > 0.05


@pytest.mark.long("changes every block of SmolLM2")
def test_the_real_model_is_surveyed_by_task_and_its_blocks_changed(
    monkeypatch, tmp_path, folder_model
):
    """A tiny model in place of SmolLM2."""
    monkeypatch.setattr(ladder, "EMBEDDED_MODEL", str(folder_model))
    monkeypatch.setattr(ladder, "K_SMOLLM2", (4, 8))
    changed = []
    monkeypatch.setattr(
        ladder, "redundancy", lambda *arguments: changed.append(arguments) or "ρ"
    )
    lines = [
        {"id": f"{task}{i}", "prompt": f"w{first + i} w2 w3", "task": task}
        for task, first in (("a", 3), ("b", 10))
        for i in range(5)
    ]
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    arguments = [
        "--out",
        str(tmp_path),
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--per-task",
        "3",
        "--jobs",
        "1",
    ]
    said = ladder.survey_smollm2(ladder.arguments_of(arguments))
    assert (tmp_path / "smollm2-tasks.png").stat().st_size > 10_000
    rows = [line.split() for line in said.splitlines() if folder_model.name in line]
    assert [(row[3], row[4]) for row in rows[:2]] == [("a", "3"), ("b", "3")]
    assert sorted(prompt.task for prompt in changed[0][2]) == [*"aabb"]


def test_without_a_hub_the_real_model_is_left_out_and_said(monkeypatch):
    def unreachable(name, n):
        assert (name, n) == ("open_llm_leaderboard", 30)
        raise OSError("the hub cannot be reached")

    with monkeypatch.context() as without_hub:
        without_hub.setattr(tlc, "load_prompts", unreachable, raising=False)
        said = ladder.survey_smollm2(ladder.arguments_of([]))
    assert said == "SmolLM2 is left out: the hub cannot be reached"
    with pytest.raises(OSError, match=r"nowhere\.jsonl"):
        ladder.survey_smollm2(ladder.arguments_of(["--prompts", "nowhere.jsonl"]))
