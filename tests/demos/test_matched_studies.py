"""The studies of capacity and of the generalization gap: their statistics against those
by hand, runs of seconds.
"""

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pandas
import pytest
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
MARKS = {"unigram": 4.0, "bigram": 3.0, "bigram − 0.2": 2.8}
SHAPES = list(product((16, 32, 64), (2, 4), (0, 1)))
SIZE = (
    "--vocabulary 300 --n-ctx 16 --windows 4 --passages 1 --k 4 "
    "--warmup 2 --jobs 1 --learning-rate 0.01"
)
CAPACITY = "--widths 16 32 --steps 16 12 --depths 2 --seeds 1 --between 0.5 --below 9"
GAP = (
    "--tokens 1024 4096 --weight-decay 0 --stochastic-depth 0 "
    "0.3 --seeds 1 --width 16 --n-layers 2 --steps 16"
)


@pytest.fixture(scope="module")
def synthetic() -> pandas.DataFrame:
    """Coupling that rises by 0.05 for each doubling of width and by 0.02 of depth,
    after a peak at the first mark.
    """
    rng = np.random.default_rng(0)
    rows = []
    for seed, (width, n_layers, _) in enumerate(SHAPES):
        for mark, loss in {"untrained": 5.7, **MARKS, "end": 2.7}.items():
            true = (
                0.05 * np.log2(width)
                + 0.02 * np.log2(n_layers)
                + (0.2 if mark == "unigram" else 0)
            )
            missing = mark == "bigram − 0.2" and width == 16 and n_layers == 2
            found = np.nan if missing else true + 0.002 * rng.standard_normal()
            row = {
                "measure": "coupling",
                "size": "K = 4",
                "mark": mark,
                "width": width,
                "n_layers": n_layers,
            }
            row |= {
                "seed": seed,
                "n_parameters": 12 * n_layers * width**2,
                "k": 4,
                "null": NULL,
                "step": 10.0,
            }
            rows.append(
                row
                | {
                    "loss_held_out": loss,
                    "above_chance": found,
                    "value": NULL + (1 - NULL) * found,
                }
            )
    return pandas.DataFrame(rows)


def test_trends_are_least_squares_over_shapes(synthetic):
    trends = capacity_report.trends(synthetic, MARKS).set_index("mark")
    means = (
        synthetic[synthetic["mark"] == "bigram"]
        .groupby(["width", "n_layers"])["above_chance"]
        .mean()
    )
    X = np.column_stack([np.ones(6), *np.log2(np.array(means.index.tolist()).T)])
    slopes, residuals, *_ = np.linalg.lstsq(X, means.to_numpy(), rcond=None)
    errors = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * residuals[0] / 3)
    half = stats.t.ppf(0.975, 3) * errors
    row = trends.loc["bigram"]
    for i, name in ((1, "width"), (2, "depth")):
        expected = slopes[i], slopes[i] - half[i], slopes[i] + half[i]
        assert tuple(row[[name, f"{name}_low", f"{name}_high"]]) == pytest.approx(
            expected
        )
    assert row["width"] == pytest.approx(0.05, abs=0.005)
    assert trends["n"].to_dict() == {
        "untrained": 6,
        "unigram": 6,
        "bigram": 6,
        "bigram − 0.2": 5,
        "end": 6,
        "left of the peak": 5,
    }
    # Where a shape is missing, and where losses are not matched, nothing is permuted.
    assert trends["p"].notna().to_dict() == {
        mark: mark in ("unigram", "bigram") for mark in trends.index
    }


def test_permutations_are_those_of_widths_within_depths():
    """Against Pearson's r of every order, one by one."""
    rng = np.random.default_rng(1)
    x, values = (
        np.array([4.0, 5.0, 7.0]),
        rng.standard_normal((3, 2, 3)) + np.array([0, 0.4, 1.0]),
    )

    def correlation(of, orders):
        centred = of - of.mean(1, keepdims=True)
        return abs(stats.pearsonr(centred.ravel(), np.ravel(orders)).statistic)

    every = list(product(permutations(x), repeat=2))
    r = np.array([[correlation(look, orders) for look in values] for orders in every])
    own = [correlation(look, (x, x)) for look in values]
    expected = [
        [(r[:, i] >= own[i] - 1e-9).mean(), (r.max(1) >= own[i] - 1e-9).mean()]
        for i in range(3)
    ]
    np.testing.assert_allclose(capacity_report.permuted(values, x), expected)


def test_the_peak_and_what_is_left_of_it(synthetic):
    peaks = capacity_report.peaks(synthetic, MARKS)
    assert len(peaks) == 12
    assert set(peaks["peak at"]) == {"unigram"}
    by_seed = synthetic.set_index(["seed", "mark"])["above_chance"]
    for row in peaks.itertuples():
        assert row.left == pytest.approx(
            by_seed[row.seed, "bigram − 0.2"] / by_seed[row.seed, "unigram"],
            nan_ok=True,
        )
    assert peaks["left"].isna().sum() == 2


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
    assert set(zip(table["width"], table["n_layers"], table["seed"], strict=True)) == {
        (16, 2, 0),
        (32, 2, 1),
    }
    losses = dict(
        one.rsplit(" ", 1)
        for one in output.split("nats: ")[1].split("\n")[0].split(", ")
    )
    at_mark = table[table["mark"] == "unigram"]
    unigram = float(losses["unigram"])
    assert at_mark["loss_held_out"].between(unigram - 0.3, unigram + 1e-3).all()
    # No model has a loss below 0.
    assert table.loc[table["mark"] == "bigram − 9", "value"].isna().all()
    assert output.count("not reached") >= 6
    assert table.loc[table["mark"] == "untrained", "step"].eq(0).all()
    # One cell, as measured by the library.
    (checkpoint,) = (out / "models").glob("width32-*/step0")
    model = tlc.load_model(str(checkpoint), device="cpu")
    corpus = small_models.build_corpus(small_models.read_documents(small_text), 300)
    (prompt,) = small_models.passages(corpus.held_out, corpus.tokenizer, 1, 16)
    here = table.query(
        "width == 32 and mark == 'untrained' and size == 'K = d/8'"
    ).set_index("measure")
    coupling = tlc.depth_coupling(tlc.trace(model, prompt), k=4).mean()
    assert here.loc["coupling", "value"] == pytest.approx(coupling)
    assert f"{coupling:.3f} [{coupling:.3f}, {coupling:.3f}]" in output
    assert (out / "capacity.png").stat().st_size > 20_000


def test_what_is_finished_is_kept_and_the_rest_done_again(
    of_capacity, small_text, monkeypatch
):
    out, output = of_capacity
    files = sorted((out / "measured").glob("*.nc"))
    assert len(files) == 2
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
            "--steps 5",
            "one number of steps for each, got widths [16, 32] and steps [5]",
        ),
        (
            capacity,
            "--depths 1 2",
            "`--depths` must be at least 2: coupling is between blocks, got 1",
        ),
        (
            capacity,
            "--between 1.5",
            "`--between` must lie in (0, 1) and `--below` above 0, got [1.5] and [9.0]",
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
