"""The study of vision transformers: its statistics against those by hand, and a grid of
a minute.
"""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas
import pytest
import xarray
from PIL import Image
from scipy import stats

import tl_coupling as tlc
import vit
import vit_models
import vit_report
from drawn_texts import unreadable
from unequal_variance import of_unequal_variance
from vit_models import TrainingConfig

SMALL = (
    "--width 16 --n-layers 3 --n-heads 2 --epochs 2 --warmup 1 "
    "--train-images 200 --images 3 --patches 2 --k 4 "
    "--weight-decay 0.01 0.1 --stochastic-depth 0 0.3 --seeds 1"
)
HELD_FIXED = ("stochastic depth held fixed", "stochastic depth held fixed, linearly")


def test_measured_tokens_are_the_class_token_and_patches_with_the_last():
    assert vit.positions_of(16, 4) == [0, 1, 6, 11, 16]
    assert vit.positions_of(16, 1) == [0, 16]
    assert vit.positions_of(4, 4) == [0, 1, 2, 3, 4]
    for n in (0, 17):
        with pytest.raises(ValueError, match=r"must lie in \[1, 16\]"):
            vit.positions_of(16, n)


@pytest.fixture(scope="module")
def synthetic() -> vit_report.Study:
    """Coupling 0.2 + 0.5 · rate at the class token, and accuracy that follows it at a
    fixed rate, both with noise.
    """
    rng = np.random.default_rng(0)
    grid = [
        (decay, rate, seed)
        for seed in range(3)
        for decay in (0.01, 0.1)
        for rate in (0.0, 0.1, 0.3)
    ]
    models = pandas.DataFrame(
        grid, columns=["weight_decay", "stochastic_depth", "seed"]
    )
    rate = models["stochastic_depth"].to_numpy()
    of_models = np.stack(
        [0.2 + 0.5 * rate, np.full(18, 0.3), 0.4 - rate]
    ) + 0.02 * rng.standard_normal((3, 18))
    models["test_accuracy"] = (
        0.9
        + 0.4 * (of_models[0] - 0.5 * rate)
        - 0.3 * rate
        + 0.001 * rng.standard_normal(18)
    )
    models["train_accuracy"] = models["train_loss"] = models["idle_weights_left"] = 1.0
    values = of_models[..., None] + 0.005 * rng.standard_normal((3, 18, 5))
    coupling = xarray.DataArray(
        values, dims=("position", "model", "prompt"), coords={"position": [0, 1, 4]}
    )
    return vit_report.Study(
        "noise", 100, 50, models, coupling.assign_attrs(null=0.05), 10
    )


def least_squares(y: np.ndarray, *columns: np.ndarray) -> tuple[float, float, float]:
    """Slope of the first column, with its 95 % t interval, HC2."""
    X = np.column_stack([*columns, np.ones(len(y))]).astype(float)
    coefficients, errors, freedom = of_unequal_variance(X, y)
    half = stats.t.ppf(0.975, freedom[0]) * errors[0]
    return coefficients[0], coefficients[0] - half, coefficients[0] + half


def test_claims_are_least_squares_by_hand(synthetic):
    claims, left_out = vit_report.claims(synthetic)
    assert not left_out
    # 2 weight decays and one over all; 3 rates and four over all; for each of three
    # tokens.
    assert len(claims) == 3 * (2 + 1 + 3 + 4)
    rows = claims.set_index(["claim", "token", "among"]).sort_index()
    rate, decay, accuracy = (
        synthetic.models[n].to_numpy()
        for n in ("stochastic_depth", "weight_decay", "test_accuracy")
    )
    tokens = {
        "class token": synthetic.coupling.values[0].mean(1),
        "last patch": synthetic.coupling.values[2].mean(1),
        "patches": synthetic.coupling.values[1:].mean((0, 2)),
    }
    indicators = [rate == 0.1, rate == 0.3]

    def check(row, wanted, n):
        assert row["n"] == n
        assert tuple(row[["slope", "slope_low", "slope_high"]]) == pytest.approx(wanted)

    for token, x in tokens.items():
        on_rate, on_coupling = (
            rows.loc["coupling on rate", token],
            rows.loc["accuracy on coupling", token],
        )
        for one in (0.01, 0.1):
            mask = decay == one
            check(
                on_rate.loc[f"weight decay {one:g}"],
                least_squares(x[mask], rate[mask]),
                9,
            )
        check(
            on_rate.loc["weight decay held fixed"],
            least_squares(x, rate, decay == 0.1),
            18,
        )
        for one in (0.0, 0.1, 0.3):
            mask = rate == one
            row = on_coupling.loc[f"stochastic depth {one:g}"]
            check(row, least_squares(accuracy[mask], x[mask]), 6)
            assert row["rho"] == pytest.approx(
                stats.spearmanr(x[mask], accuracy[mask]).statistic
            )
            assert row["rho_low"] <= row["rho"] <= row["rho_high"]
            assert row["boot_low"] < row["slope"] < row["boot_high"]
        check(on_coupling.loc["all models"], least_squares(accuracy, x), 18)
        check(
            on_coupling.loc["stochastic depth held fixed"],
            least_squares(accuracy, x, *indicators),
            18,
        )
        check(
            on_coupling.loc["stochastic depth held fixed, linearly"],
            least_squares(accuracy, x, rate),
            18,
        )
        both = on_coupling.loc["stochastic depth and weight decay held fixed"]
        check(both, least_squares(accuracy, x, *indicators, decay == 0.1), 18)
    planted = rows.loc["accuracy on coupling", "class token"].loc[
        "stochastic depth held fixed"
    ]
    assert planted["slope_low"] < 0.4 < planted["slope_high"]
    assert (
        rows.loc["coupling on rate", "class token"].loc[
            "weight decay held fixed", "slope_low"
        ]
        > 0
    )


def test_means_of_a_rate_are_over_its_models(synthetic):
    means = vit_report.means(synthetic, "stochastic_depth").set_index(
        "stochastic_depth"
    )
    values = synthetic.coupling.values[0][
        (synthetic.models["stochastic_depth"] == 0.1).to_numpy()
    ]
    assert means.loc[0.1, "n"] == 6
    assert means.loc[0.1, "class token"] == pytest.approx(values.mean())
    of_models, of_images = (
        values.mean(axis).var(ddof=1) / values.shape[1 - axis] for axis in (1, 0)
    )
    freedom = (of_models + of_images) ** 2 / (of_models**2 / 5 + of_images**2 / 4)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(of_models + of_images)
    assert means.loc[0.1, "class token_low"] == pytest.approx(values.mean() - half)
    assert means.loc[0.1, "class token_high"] == pytest.approx(values.mean() + half)


def test_too_few_models_are_left_out_and_said(synthetic):
    first = synthetic.models["seed"] == 0
    few = vit_report.Study(
        "noise",
        100,
        50,
        synthetic.models[first],
        synthetic.coupling[:, first.to_numpy()],
        10,
    )
    claims, left_out = vit_report.claims(few)
    assert "accuracy on coupling, patches, stochastic depth 0.1: a fit" in "\n".join(
        left_out
    )
    assert not claims["among"].isin(["stochastic depth 0.1"]).any()
    assert {"weight decay 0.1", "all models"} <= set(claims["among"])
    # Three models at each weight decay, six in all.
    is_resampled = claims["boot_low"].notna() & claims["rho_low"].notna()
    assert set(claims["among"][is_resampled]) == {"all models"}
    assert claims["rho"][claims["among"] == "weight decay 0.1"].notna().all()


def test_intervals_stand_behind_their_estimates():
    table = pandas.DataFrame(
        {
            "among": ["a", "b"],
            "n": [8, 9],
            "slope": [0.5, -1.0],
            "slope_low": [0.25, -2],
            "slope_high": [0.75, 0],
        }
        | {"p": [0.012345, 0.5], "boot_low": [0.1, np.nan], "boot_high": [0.2, np.nan]}
    )
    heading, *rows = vit_report.readable(table).splitlines()
    assert heading.split() == ["among", "n", "slope", "p", "boot"]
    assert " ".join(rows[0].split()) == "a 8 0.500 [0.250, 0.750] 0.012 [0.100, 0.200]"
    assert " ".join(rows[1].split()) == "b 9 -1.000 [-2.000, 0.000] 0.5"


def test_figures_show_the_models(synthetic):
    rates, accuracy = (
        vit_report.draw_rates(synthetic),
        vit_report.draw_accuracy(synthetic),
    )
    for figure, n_lines in ((rates, 2 * 2 + 1), (accuracy, 3 * 2)):
        assert [len(ax.lines) for ax in figure.axes] == [n_lines] * 3
        assert [ax.get_title() for ax in figure.axes] == [
            "class token",
            "last patch",
            "mean over 2 patches",
        ]
        assert "18 ViTs on noise, mean over 5 test images" in figure.get_suptitle()
        assert unreadable(figure) == []
    mean, points = rates.axes[0].lines[:2]
    assert mean.get_label() == "weight decay 0.01"
    drawn_models = synthetic.table[synthetic.table["weight_decay"] == 0.01]
    np.testing.assert_allclose(
        mean.get_ydata(),
        drawn_models.groupby("stochastic_depth")["class token"].mean(),
    )
    np.testing.assert_allclose(points.get_ydata(), drawn_models["class token"])
    points, line = accuracy.axes[0].lines[:2]
    drawn_models = synthetic.table[synthetic.table["stochastic_depth"] == 0]
    np.testing.assert_allclose(points.get_ydata(), 100 * drawn_models["test_accuracy"])
    slope = np.diff(line.get_ydata()) / np.diff(line.get_xdata())
    expected = least_squares(
        100 * drawn_models["test_accuracy"].to_numpy(),
        drawn_models["class token"].to_numpy(),
    )[0]
    assert slope[0] == pytest.approx(expected)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    assert vit.main([*SMALL.split(), "--jobs", "2", "--out", str(folder)]) == 0
    return folder


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("vit")
def test_the_study_measures_what_a_trace_gives(out):
    table = pandas.read_csv(out / "models.csv").set_index("model")
    assert len(table) == 4
    grid = table[["weight_decay", "stochastic_depth"]].sort_values(
        ["weight_decay", "stochastic_depth"]
    )
    assert grid.to_numpy().tolist() == [[0.01, 0], [0.01, 0.3], [0.1, 0], [0.1, 0.3]]
    name = table.index[-1]
    model = tlc.load_model(str(out / "models" / name), device="cpu")
    (images,) = (out / "measured").glob("*/images")
    drawn = {0: [], 1: [], 16: []}
    for path in sorted(images.iterdir()):
        x = vit_models.pixels(np.array(Image.open(path))[None])
        for position, values in drawn.items():
            values.append(tlc.depth_coupling(tlc.trace(model, x), 4, position).mean(4))
    at = {position: np.mean(values) for position, values in drawn.items()}
    expected = [at[0], at[16], (at[1] + at[16]) / 2]
    assert table.loc[
        name, ["class token", "last patch", "patches"]
    ].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 6) for value in expected}) == 3


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("vit")
def test_the_study_says_what_it_found_and_what_it_left_out(out):
    record = json.loads((out / "study.json").read_text())
    assert (
        record["images"],
        record["n_measured"],
        record["positions"],
        record["k"],
    ) == (
        "digits",
        3,
        [0, 1, 16],
        4,
    )
    assert (record["n_train"], record["n_test"]) == (200, 450)
    # Two models at each weight decay and each rate are too few for a line, and four for
    # both factors.
    assert len(record["left_out"]) == 3 * 5
    assert {row["among"] for row in record["claims"]} == {
        "weight decay held fixed",
        "all models",
        *HELD_FIXED,
    }
    pandas.testing.assert_frame_equal(
        pandas.DataFrame(record["claims"]), pandas.read_csv(out / "claims.csv")
    )
    for name in ("coupling-rates", "coupling-accuracy"):
        assert (out / f"{name}.png").stat().st_size > 20_000


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("vit")
def test_a_second_run_trains_and_measures_nothing(out, capsys):
    def written() -> dict[Path, int]:
        files = [*(out / "models").rglob("*"), *(out / "measured").rglob("*.nc")]
        return {path: path.stat().st_mtime_ns for path in files if path.is_file()}

    written_before, text = written(), (out / "claims.csv").read_text()
    # Of each model weights, two configs and what is known of its training; and what was
    # measured at three tokens.
    assert len(written_before) == 4 * 4 + 4 * 3
    assert vit.main([*SMALL.split(), "--jobs", "2", "--out", str(out)]) == 0
    assert written() == written_before
    assert (out / "claims.csv").read_text() == text
    output = capsys.readouterr().out
    assert "4 ViTs on digits, mean over 3 test images" in output
    mean = pandas.read_csv(out / "models.csv")["test_accuracy"].mean()
    assert f"on average {100 * mean:.1f} %" in output
    assert (
        f"over 450 images: {100 * np.sqrt(mean * (1 - mean) / 450):.2f} percentage points"
        in output
    )


@pytest.mark.long("starts a process")
def test_the_script_runs_by_itself_and_shows_an_example():
    """From another folder, without the paths of the tests."""
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    script = subprocess.run(
        [sys.executable, vit.__file__, "--help"],
        capture_output=True,
        text=True,
        env=variables,
        cwd="/",
    )
    assert script.returncode == 0, script.stderr
    assert "python demos/studies/vit.py --out out/vit" in script.stdout
    for field in fields(TrainingConfig):
        assert (
            field.name == "seed" or f"--{field.name.replace('_', '-')}" in script.stdout
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--data nowhere",
            "there is no folder nowhere: wanted digits, fashion-mnist, cifar10",
        ),
        ("--data cifar10", "CIFAR-10 cannot be had from the hub"),
        ("--train-images 2000", "wanted 2000 training images, digits has 1347"),
        ("--seeds 0", "`--seeds` and `--jobs` must be at least 1, got 0"),
        ("--patch 3", "patches must fill the image of 8 × 8 pixels, got a side of 3"),
        ("--n-heads 3", "heads must fill the width, got 3 heads in 16"),
        ("--stochastic-depth 0 1", "must lie in [0, 1), got 1.0"),
        ("--warmup 3", "the warm-up must lie in [0, 2] epochs, got 3"),
        ("--patches 17", "`--patches` must lie in [1, 16], got 17"),
        ("--images 451", "`--images` must lie in [1, 450], got 451"),
        ("--k 17", "`--k` must lie in [1, 16]"),
    ],
)
def test_bad_input_is_one_line_before_any_work(given, message, tmp_path, capsys):
    assert (
        vit.main([*SMALL.split(), "--out", str(tmp_path / "out"), *given.split()]) == 2
    )
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
