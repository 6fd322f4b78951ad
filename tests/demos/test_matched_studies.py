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

NULL = 1 - np.sqrt(1 - 1 / 4)
KINDS = list(product((16, 32, 64), (0.001, 0.002, 0.004), range(5)))
SIZE = "--vocabulary 300 --n-ctx 16 --windows 4 --passages 1 --k 4 --warmup 2 --jobs 1"
CAPACITY = (
    "--widths 16 32 --learning-rates 0.01 0.02 --steps 24 --n-layers 2 --seeds 1 "
    "--between 0.5 --below -1 9"
)
GAP = (
    "--tokens 512 --subsets 2 --other-text 0 0.5 --learning-rates 0.01 0.02 --width 16 "
    "--n-layers 2 --steps 24 --draws 20"
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


@pytest.mark.long("fits hundreds of made-up studies")
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


@pytest.mark.long("trains the models of a study")
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


@pytest.mark.long("trains the models of a study")
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


@pytest.mark.long("trains models")
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


@pytest.fixture(scope="module")
def of_gap(
    small_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("gap")
    return out, run(gap, f"{GAP} --below -3", small_text, out)


@pytest.mark.long("trains the models of a study")
def test_the_gap_is_compared_where_training_losses_are_equal(of_gap):
    out, output = of_gap
    table = pandas.read_csv(out / "measured.csv")
    assert table["subset"].nunique() == 2
    assert table["run"].nunique() == 8
    gaps = table["loss_held_out"] - table["loss_training"]
    np.testing.assert_allclose(table["gap"], gaps)
    (name,) = [
        mark for mark in table["mark"].unique() if mark.startswith("training loss")
    ]
    of_mark = table[table["mark"] == name].dropna(subset="gap")
    assert len(of_mark) >= 6
    mark = float(name.removeprefix("training loss "))
    assert of_mark["loss_training"].between(mark - 0.005, mark + 0.005).all()
    # The line through all models is printed.
    chance = of_mark["null"]
    above = (of_mark["value"] - chance) / (1 - chance)
    line = stats.linregress(above, of_mark["gap"])
    effects = pandas.read_csv(out / "effects.csv").set_index("question")
    slope = effects.loc["gap on coupling, over all", "slope"]
    assert slope == pytest.approx(line.slope)
    assert f"{line.slope:.3f} [" in output
    report = (out / "report.txt").read_text()
    assert report in output
    with redirect_stdout(StringIO()) as printed:
        assert gap.main(["--draws", "20", "--table", str(out)]) == 0
    assert printed.getvalue() == report
    assert (out / "gap.png").stat().st_size > 10_000


@pytest.mark.long("trains the models of a study")
def test_what_the_study_could_see_is_said_before_the_other_subsets_are_learned(
    small_text, tmp_path, monkeypatch
):
    order = []
    power_of = gap.power_of
    monkeypatch.setattr(
        gap,
        "power_of",
        lambda models, *rest: order.append(models) or power_of(models, *rest),
    )
    all_runs = gap.all_runs
    monkeypatch.setattr(
        gap, "all_runs", lambda runs, *rest: order.append(runs) or all_runs(runs, *rest)
    )
    run(gap, f"{GAP} --below -3", small_text, tmp_path)
    first, models, others = order
    assert {one.known["subset"] for one in first} == {"512 tokens, 0"}
    assert set(models["subset"]) == {"512 tokens, 0"}
    assert {one.known["subset"] for one in others} == {"512 tokens, 1"}


def test_subsets_share_no_text_with_each_other_or_with_what_they_are_mixed_with(
    small_corpus,
):
    subsets, first = gap.subsets_of(small_corpus, [512, 1024], 2)
    pieces = [
        tuple(piece)
        for subset in subsets.values()
        for piece in subset.tokens.view(-1, small_models.PIECE).tolist()
    ]
    assert len(pieces) == len(set(pieces)) == first == 6
    subset = subsets[512, 1]
    half = gap.mixed(subset, small_corpus, first, 0.5)
    found = [
        tuple(piece) for piece in half.tokens.view(-1, small_models.PIECE).tolist()
    ]
    own = tuple(subset.tokens.tolist())
    assert len(found) == 2 * gap.REPEATS
    assert found.count(own) == gap.REPEATS
    assert set(found) & set(pieces) == {own}
    assert half.digest != subset.digest
    assert gap.mixed(subset, small_corpus, first, 0.0) is subset


def planted(
    rng: np.random.Generator, share_on_gap: float, gap_on_coupling: float
) -> pandas.DataFrame:
    """Three amounts of text, four subsets of each, three shares, two rates. The step
    falls with the rate and rises with the share; coupling differs by itself.
    """
    grid = list(product((1, 2, 4), range(4), (0.0, 0.3, 0.6), (0.002, 0.004)))
    table = pandas.DataFrame(grid, columns=["n_tokens", "i", *gap_report.CELL[1:]])
    table["subset"] = table["n_tokens"].astype(str) + "-" + table["i"].astype(str)
    of_text = dict(zip(table["subset"].unique(), rng.standard_normal(12), strict=True))
    text = table["subset"].map(of_text)
    noise = rng.standard_normal((3, len(table)))
    table["coupling"] = 0.3 + 0.05 * noise[0]
    table[gap_report.STEP] = (
        8 + table["other_text"] - np.log2(table["learning_rate"]) + 0.1 * noise[1]
    )
    table["gap"] = (
        text
        + share_on_gap * table["other_text"]
        + gap_on_coupling * table["coupling"]
        + 0.02 * noise[2]
    )
    return table.assign(mark="m")


def test_effects_are_those_planted_within_subsets():
    table = planted(np.random.default_rng(0), -0.5, 2.0)
    effects = gap_report.effects(table).set_index("question")
    for question, slope in (
        ("gap on share of other text", -0.5),
        ("step on share of other text", 1.0),
        ("coupling on share of other text", 0.0),
    ):
        row = effects.loc[question]
        assert row["slope_low"] < slope < row["slope_high"]
        assert row["n"] == 72
    # The share moves the gap beside coupling, which the step follows in part.
    row = effects.loc[gap_report.DECIDING]
    assert 0 < row["slope_low"] < 2.0 < row["slope_high"]
    # Texts differ by a hundred times what is left within them.
    assert effects.loc["gap on coupling, over all", "slope_low"] < 0


@pytest.mark.long("fits hundreds of made-up studies")
def test_the_gap_has_no_slope_where_coupling_does_not_go_with_it():
    """What the study prints if the claim is false: in at most one in twenty of such
    studies, an interval that leaves out 0, although the share moves the gap.
    """
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(60):
        effects = gap_report.effects(planted(rng, -0.5, 0.0))
        row = effects.set_index("question").loc[gap_report.DECIDING]
        found += bool(row["slope_low"] > 0 or row["slope_high"] < 0)
    # 95 % of binomial draws with p = .05.
    assert found <= 6


def test_four_of_five_studies_see_the_slope_that_can_be_detected():
    rng = np.random.default_rng(2)
    table = planted(rng, 0.0, 0.0)
    design = gap_report.design_at(table, gap_report.QUESTIONS[gap_report.DECIDING])
    slope = gap_report.detectable(design, 0.02, 8, 400)
    n_seen = 0
    for _ in range(400):
        y = slope * table["coupling"].to_numpy() + 0.02 * rng.standard_normal(72)
        low, _ = design.slope(y).interval(8)
        n_seen += low > 0
    # Four standard errors, of both simulations.
    assert n_seen / 400 == pytest.approx(0.8, abs=4 * (2 * 0.16 / 400) ** 0.5)


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
        (gap, "--subsets 0", "`--subsets`, `--jobs` and `--steps` must be at least 1"),
        (gap, "--other-text 1", "`--other-text` must lie in [0, 1), got [1.0]"),
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
        for argv in ([], ["--small"], ["--small", "--steps", "7"])
    )
    assert small.steps < whole.steps
    assert given.steps == 7
    assert vars(small).keys() == vars(whole).keys()
    assert study.SMALL.keys() <= vars(whole).keys()


@pytest.mark.long("trains the models of a study")
@pytest.mark.parametrize("study", [capacity, gap])
def test_a_small_study_of_the_library_s_source_works(study, tmp_path):
    with redirect_stdout(StringIO()) as said:
        assert study.main(["--small", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "[" in said.getvalue()
    assert list(tmp_path.glob("*.png"))
