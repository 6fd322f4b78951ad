"""The studies of capacity and of the generalization gap: their statistics against those
by hand, runs of seconds.
"""

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pandas
import pytest
import statsmodels.api as sm
import xarray
from scipy import stats

import capacity
import capacity_report
import gap
import gap_report
import matched_losses
import small_models
import tl_coupling as tlc

pytestmark = pytest.mark.on_4_only

NULL = 1 - np.sqrt(1 - 1 / 4)
KINDS = list(product((16, 32, 64), (0.001, 0.002, 0.004), range(5)))
SIZE = "--vocabulary 300 --n-ctx 16 --windows 4 --passages 1 --k 4 --warmup 2 --jobs 1"
CAPACITY = (
    "--widths 16 32 --learning-rates 0.01 0.02 --steps 24 --n-layers 2 --seeds 1 "
    "--between 0.5 --below -1 9"
)
GAP = (
    "--tokens 1024 4096 --weight-decay 0 --stochastic-depth 0 "
    "0.3 --seeds 1 --width 16 --n-layers 2 --steps 16 --learning-rate 0.01"
)


@pytest.fixture(scope="module")
def synthetic() -> pandas.DataFrame:
    """Coupling that rises by 0.05 for each doubling of width and falls by 0.03 for each
    doubling of the rate; one model did not reach the last mark.
    """
    rng = np.random.default_rng(0)
    rows = []
    for seed, (width, rate, _) in enumerate(KINDS):
        for mark in ("untrained", "early", "late"):
            true = 0.6 + 0.05 * np.log2(width) + -0.03 * np.log2(rate)
            missing = mark == "late" and seed == 0
            found = np.nan if missing else true + 0.002 * rng.standard_normal()
            row = {"measure": "coupling", "size": "K = 4", "mark": mark}
            row |= {"width": width, "learning_rate": rate, "seed": seed, "k": 4}
            row |= {"null": NULL, "step": 10.0, "loss_held_out": 3.0}
            value = NULL + (1 - NULL) * found
            rows.append(row | {"above_chance": found, "value": value})
    return pandas.DataFrame(rows)


def test_slopes_are_least_squares_with_hc2_over_models(synthetic):
    """Standard errors by statsmodels; Satterthwaite's degrees of freedom by drawing what
    an HC2 variance is where errors are equal.
    """
    slopes = capacity_report.slopes(synthetic).set_index(["mark", "of", "at"])
    models = synthetic[synthetic["mark"] == "early"]
    rates = sorted(models["learning_rate"].unique())
    X = np.column_stack(
        [np.ones(45), np.log2(models["width"])]
        + [models["learning_rate"] == rate for rate in rates[1:]]
    ).astype(float)
    y = models["above_chance"].to_numpy()
    fit = sm.OLS(y, X).fit(cov_type="HC2")
    row = slopes.loc["early", "width", "all"]
    m = len(slopes)
    assert row["slope"] == pytest.approx(fit.params[1])
    for columns, level in (
        (("low", "high"), 0.05),
        (("low_all", "high_all"), 0.05 / m),
    ):
        half = stats.t.ppf(1 - level / 2, row["df"]) * fit.bse[1]
        expected = fit.params[1] - half, fit.params[1] + half
        assert tuple(row[list(columns)]) == pytest.approx(expected)
    rng = np.random.default_rng(2)
    variances = [
        sm.OLS(rng.standard_normal(45), X).fit(cov_type="HC2").bse[1] ** 2
        for _ in range(3000)
    ]
    df = 2 * np.mean(variances) ** 2 / np.var(variances)
    assert row["df"] == pytest.approx(df, rel=0.1)


def test_what_was_planted_is_found_and_looks_are_counted(synthetic):
    slopes = capacity_report.slopes(synthetic)
    # Two marks, two factors, each at three levels and over all.
    assert len(slopes) == 2 * 2 * 4
    planted = slopes["of"].map({"width": 0.05, "learning_rate": -0.03})
    assert slopes["low_all"].lt(planted).all()
    assert slopes["high_all"].gt(planted).all()
    of_all = slopes[slopes["at"] == "all"].set_index(["mark", "of"])
    assert of_all["n"].to_dict() == {
        ("early", "width"): 45,
        ("early", "learning_rate"): 45,
        ("late", "width"): 44,
        ("late", "learning_rate"): 44,
    }


def test_no_slope_where_coupling_depends_on_the_loss_alone(synthetic):
    """What the study prints if neither width nor rate does anything: in at
    most one in twenty of such studies, a slope whose joint interval leaves out 0.
    """
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(200):
        noise = 0.2 + 0.02 * rng.standard_normal(len(synthetic))
        slopes = capacity_report.slopes(synthetic.assign(above_chance=noise))
        found += bool((slopes["low_all"].gt(0) | slopes["high_all"].lt(0)).any())
    # 95 % of binomial draws with p = .05.
    assert found <= 15


def test_above_chance_is_0_for_random_subspaces_and_1_for_shared_ones():
    dims = ("mark", "prompt", "size", "measure")
    values = np.array([NULL, 1.0]).reshape(2, 1, 1, 1) + np.array([-0.1, 0.1]).reshape(
        1, 2, 1, 1
    )
    null = (("mark", "size", "measure"), np.full((2, 1, 1), NULL))
    coordinates = {"mark": ["a", "b"], "size": ["K = 4"], "measure": ["coupling"]}
    table = matched_losses.table_of(
        [xarray.Dataset({"value": (dims, values), "null": null}, coordinates)]
    )
    assert table["above_chance"].tolist() == pytest.approx([0, 1])


def run(study, options: str, text: Path, out: Path) -> str:
    """Return what the study prints."""
    with redirect_stdout(StringIO()) as said:
        assert (
            study.main(
                [
                    *options.split(),
                    *SIZE.split(),
                    "--text",
                    str(text),
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
    return said.getvalue()


@pytest.fixture(scope="module")
def of_capacity(
    small_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("capacity")
    return out, run(capacity, CAPACITY, small_text, out)


def test_models_are_measured_where_their_losses_are_equal(of_capacity, small_text):
    out, output = of_capacity
    table = pandas.read_csv(out / "measured.csv")
    kinds = set(zip(table["width"], table["learning_rate"], table["seed"], strict=True))
    assert kinds == {(16, 0.01, 0), (16, 0.02, 1), (32, 0.01, 2), (32, 0.02, 3)}
    losses = dict(
        one.rsplit(" ", 1)
        for one in output.split("nats: ")[1].split("\n")[0].split(", ")
    )
    at_mark = table[table["mark"] == "bigram + 1"].dropna(subset="value")
    assert at_mark["seed"].nunique() >= 3
    assert at_mark["loss_held_out"].round(3).eq(float(losses["bigram + 1"])).all()
    # No model has a loss below 0.
    assert table.loc[table["mark"] == "bigram − 9", "value"].isna().all()
    assert "not reached" in output
    assert table.loc[table["mark"] == "untrained", "step"].eq(0).all()
    assert (out / "capacity.png").stat().st_size > 10_000


def test_values_at_a_mark_lie_between_those_of_the_checkpoints_around_it(
    of_capacity, small_text
):
    """Measured again by the library, at the checkpoints that were kept."""
    out, _ = of_capacity
    (folder,) = (out / "models").glob("width32-layers2-seed2-*")
    training = json.loads((folder / "training.json").read_text())
    marks = [mark for mark in ("50% of the way", "bigram + 1", "bigram", "bigram − 9")]
    by_name = sorted(training["reached"], key=lambda mark: -mark[0])
    names = sorted(marks[:2], key=lambda name: -loss_of(out, name)) + marks[2:]
    value, steps = dict(zip(names, by_name, strict=True))["bigram + 1"]
    corpus = small_models.build_corpus(small_models.read_documents(small_text), 300)
    (prompt,) = small_models.passages(corpus.held_out, corpus.tokenizer, 1, 16)
    couplings = []
    for step in steps:
        model = tlc.load_model(str(folder / f"step{step}"), device="cpu")
        couplings.append(tlc.depth_coupling(tlc.trace(model, prompt), k=4).mean())
    before, after = [training["evaluated"][str(step)]["held_out"] for step in steps]
    assert before > value >= after
    expected = np.interp(-value, [-before, -after], couplings)
    table = pandas.read_csv(out / "measured.csv").query(
        "seed == 2 and mark == 'bigram + 1' and size == 'K = d/8'"
    )
    found = table.set_index("measure").loc["coupling", "value"]
    assert found == pytest.approx(expected, rel=1e-5)


def loss_of(out: Path, mark: str) -> float:
    table = pandas.read_csv(out / "measured.csv")
    return table.loc[table["mark"] == mark, "loss_held_out"].mean()


def test_what_is_finished_is_kept_and_the_rest_done_again(
    of_capacity, small_text, monkeypatch
):
    out, output = of_capacity
    files = sorted((out / "measured").glob("*.nc"))
    assert len(files) == 4
    before = {
        path: path.stat().st_mtime_ns
        for path in (*files, *(out / "models").rglob("*.safetensors"))
    }
    # As after a kill between two measurements.
    files[0].unlink()
    monkeypatch.setattr(small_models, "learn", None)
    assert run(capacity, CAPACITY, small_text, out) == output
    assert [path for path in before if before[path] != path.stat().st_mtime_ns] == [
        files[0]
    ]


def test_the_gap_is_compared_where_training_losses_are_equal(small_text, tmp_path):
    output = run(gap, f"{GAP} --resamples 50 --below -3", small_text, tmp_path)
    table = pandas.read_csv(tmp_path / "measured.csv")
    assert (
        table["gap"] - (table["loss_held_out"] - table["loss_training"])
    ).abs().max() < 1e-12
    assert table["family"].nunique() == 4
    (name,) = [
        mark for mark in table["mark"].unique() if mark.startswith("training loss")
    ]
    of_mark = table[table["mark"] == name]
    mark = float(name.removeprefix("training loss "))
    assert of_mark["loss_training"].between(mark - 0.3, mark + 0.01).all()
    line = stats.linregress(of_mark["value"], of_mark["gap"])
    study = json.loads((tmp_path / "study.json").read_text())
    assert study[name]["association"]["linear"]["slope"] == pytest.approx(line.slope)
    assert f"slope {line.slope:.4g}" in output
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "generalization.png",
        "slopes-1.png",
    }


def test_a_mark_that_few_reached_is_said():
    with pytest.raises(
        ValueError, match="at least three models whose training loss got there, got 0"
    ):
        gap_report.study_at([], pandas.DataFrame(), 50)


def test_effects_of_text_and_regularisation_are_those_planted():
    grid = list(product((1024, 4096, 16384), (0.0, 0.5), (0.0, 0.3), (0, 1)))
    table = pandas.DataFrame(grid, columns=[*gap_report.CELL, "seed"])
    noise = 0.001 * np.random.default_rng(0).standard_normal((2, len(table)))
    table["value"] = 0.3 + 0.1 * table["stochastic_depth"] + noise[0]
    table["gap"] = (
        2 - 0.1 * np.log2(table["n_tokens"]) - 0.2 * table["weight_decay"] + noise[1]
    )
    table = table.assign(
        mark="m", step=1.0, loss_training=2.0, loss_held_out=2.5, null=NULL
    )
    coupling, of_gap = gap_report.effects(table, ["m"]).to_dict("records")
    assert (coupling["n"], of_gap["n"]) == (12, 12)
    planted = {"coupling": (0, 0, 0.1), "gap": (-0.1, -0.2, 0)}
    for row in (coupling, of_gap):
        for name, slope in zip(
            ("text", "decay", "drop"), planted[row["of"]], strict=True
        ):
            assert row[f"{name}_low"] < slope < row[f"{name}_high"]
            assert row[f"{name}_high"] - row[f"{name}_low"] < 0.02


@pytest.mark.parametrize(
    ("study", "given", "message"),
    [
        (
            capacity,
            "--learning-rates 0.01 0.01",
            "`--learning-rates` wants at least two, got [0.01, 0.01]",
        ),
        (
            capacity,
            "--n-layers 1",
            "`--n-layers` must be at least 2: coupling is between blocks, got 1",
        ),
        (
            capacity,
            "--between 1.5",
            "`--between` must lie in (0, 1), got [1.5]",
        ),
        (capacity, "--k 17", "must give 2 to 16 vectors at width 16; K = 17 gives 17"),
        (
            capacity,
            "--share 0.0625",
            "must give 2 to 16 vectors at width 16; K = d/16 gives 1",
        ),
        (capacity, "--seeds 0", "`--seeds`, `--jobs` and `--steps` must be at least 1"),
        (gap, "--stochastic-depth 1", "`--stochastic-depth` must lie in [0, 1)"),
        (gap, "--tokens 99", "wanted 99 tokens to learn from, in pieces of 512"),
        (gap, "--n-layers 1", "`--n-layers` must be at least 2"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    study, given, message, small_text, tmp_path, capsys
):
    options = CAPACITY if study is capacity else f"{GAP} --below 0"
    command = [
        *options.split(),
        *SIZE.split(),
        "--text",
        str(small_text),
        "--out",
        str(tmp_path / "out"),
        *given.split(),
    ]
    assert study.main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("study", [capacity, gap])
def test_a_small_study_is_smaller_and_what_is_given_counts(study):
    whole, small, given = (
        study.arguments_of(argv)
        for argv in ([], ["--small"], ["--small", "--seeds", "7"])
    )
    assert small.seeds < whole.seeds
    assert given.seeds == 7
    assert vars(small).keys() == vars(whole).keys()
    assert study.SMALL.keys() <= vars(whole).keys()
