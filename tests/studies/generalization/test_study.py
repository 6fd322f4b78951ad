"""From a survey to statistics: tables, scores, resampling, the summary."""

import json

import numpy as np
import pandas
import pytest
import xarray
from scipy import stats

import tiny
import tl_coupling as tlc
from fake_survey import KS, survey
from tl_coupling.studies.generalization import (
    bootstrap,
    covariate_lines,
    fits_across_tasks,
    generalization_study,
    linear_fit,
    prompt_correlations,
    read_scores,
    task_means,
)
from tl_coupling.studies.generalization.model_tables import coupling_table, prompt_table
from unequal_variance import line_of_unequal_variance


def scores_of(data: xarray.Dataset, slope=50.0, noise=1.0, **more) -> pandas.DataFrame:
    """Scores on a line over coupling at the first k and the last checkpoint."""
    rng = np.random.default_rng(7)
    x = data["mean_coupling"].isel(k=0, checkpoint=-1).mean("prompt").values
    score = 20 + slope * x + noise * rng.standard_normal(len(x))
    return pandas.DataFrame({"model": data["model"].values, "score": score} | more)


def table_of(data, k=None, measure="coupling", **arguments) -> pandas.DataFrame:
    return coupling_table(prompt_table(data, k, measure), measure=measure, **arguments)


# reading scores


def written(tmp_path, text: str):
    path = tmp_path / "scores.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_scores_are_read(tmp_path):
    text = "\ufeffmodel, score,family,training_tokens\nNA,1.5,x,1e12\nb,2,y,\nc, ,,3\nd,-4,z,4\n"
    read = read_scores(written(tmp_path, text))
    assert read["model"].tolist() == ["NA", "b", "c", "d"]
    np.testing.assert_array_equal(read["score"], [1.5, 2, np.nan, -4])
    np.testing.assert_array_equal(read["training_tokens"], [1e12, np.nan, 3, 4])
    assert read["family"].tolist() == ["x", "y", "", "z"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a CSV file"),
        ("name,score\na,1\n", "no column 'model'; the columns are name, score"),
        ("model,points\na,1\n", "no column 'score'"),
        ("model,score, score\na,1,2\nb,2,3\nc,3,4\n", "more than one column 'score'"),
        (
            "model,score\na,1\nb,high\nc,3\n",
            "'score' of model 'b' must be a finite number, got 'high'",
        ),
        (
            "model,score\na,1\nb,inf\nc,3\n",
            "'score' of model 'b' must be a finite number",
        ),
        ("model,score\na,1\nb,2\nc,3\na,4\n", "more than one row for a"),
        (
            "model,checkpoint,score\na,1,1\na,1,2\nc,3,4\n",
            "more than one row for a at 1",
        ),
        (
            "model,score\na,1\nb,2\nc,\n",
            "scores of at least three models are needed, got 2",
        ),
        (
            "model,score\na,1\nb,1e300\nc,3\n",
            "'score' has a value of 1e\\+300 in size, .*; give it in another unit",
        ),
        (
            "model,score\na,1e-200\nb,0\nc,3e-200\n",
            "'score' has no value above 3e-200 in size, .* another unit",
        ),
        (
            "model,score\na,1,2,3\nb,2,3,4\nc,3,4,5\n",
            "lines are longer than the header",
        ),
        (
            "model,score\na,1\nb,2,7\nc,3\n",
            "not a CSV file .* Expected 2 fields in line 3, saw 3",
        ),
    ],
)
def test_scores_that_are_none(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_scores(written(tmp_path, text))
    assert "scores.csv" in str(raised.value)


def test_no_such_file(tmp_path):
    with pytest.raises(OSError, match=r"none\.csv"):
        read_scores(tmp_path / "none.csv")


# tables


def test_a_table_has_a_row_for_every_model_and_checkpoint_measured():
    data = survey(n_models=4, checkpoints=(0, 1000)).load()
    data["mean_coupling"][1, 0] = np.nan
    data["mean_coupling"][2, 1, :2] = np.nan
    table = table_of(data, 5, scores="loss")
    assert list(table) == [
        "model",
        "checkpoint",
        "coupling",
        "null",
        "loss",
        "n_layers",
        "d_model",
        "n_parameters",
    ]
    assert len(table) == 7
    row = table[(table["model"] == "org/m2") & (table["checkpoint"] == 1000)].iloc[0]
    assert row["coupling"] == pytest.approx(
        data["mean_coupling"].values[2, 1, 2:, 0].mean()
    )
    assert row["null"] == pytest.approx(1 - np.sqrt(0.8))
    assert row["loss"] == pytest.approx(data["loss"].values[2, 1].mean())
    assert row["n_layers"] == data["n_layers"].values[2, 1]


def test_scores_go_to_their_models_whatever_their_order():
    data = survey(n_models=4, checkpoints=(0, 1000))
    scores = scores_of(data, family=[*"wxyz"], training_tokens=[1.0, 2, 3, 4])
    table = table_of(data, 5, scores=scores[::-1])
    expected = dict(zip(scores["model"], scores["score"], strict=True))
    assert table["score"].tolist() == [expected[model] for model in table["model"]]
    assert list(table)[:5] == ["model", "checkpoint", "coupling", "null", "score"]
    assert set(table["training_tokens"]) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "name", ["coupling", "null", "n_layers", "d_model", "n_parameters"]
)
def test_columns_of_the_surveys_own_are_refused(name):
    data = survey()
    scores = scores_of(data, **{name: 99.0})
    message = (
        f"the survey has a column {name!r} of its own, and the scores "
        f"another one .*org/m0.*; rename that"
    )
    with pytest.raises(ValueError, match=message):
        generalization_study(data, scores, n_resamples=50)
    with pytest.raises(
        ValueError, match=f"column {name!r} of its own: rename that of the scores"
    ):
        generalization_study(
            data, scores.assign(**{name: range(8)}), score=name, n_resamples=50
        )


def test_a_score_is_not_called_as_the_surveys_loss_is():
    """It would be taken for the loss on the survey's prompts, in nats per token."""
    data = survey()
    scores = scores_of(data).rename(columns={"score": "loss"})
    with pytest.raises(
        ValueError, match="column 'loss' of its own: rename that of the scores"
    ):
        generalization_study(data, scores, score="loss", n_resamples=50)
    study = generalization_study(
        data.drop_vars("loss"), scores, score="loss", n_resamples=50
    )
    assert study.table["loss"].tolist() == scores["loss"].tolist()


def test_what_scores_say_as_the_survey_does_is_taken():
    """Sizes that were measured, and those of the models for which there are none."""
    data = survey()
    sizes = {
        name: data[name].values[:, 0].copy() for name in ("n_layers", "n_parameters")
    }
    data["n_parameters"][0] = np.nan
    study = generalization_study(data, scores_of(data, **sizes), n_resamples=50)
    assert study.table["n_parameters"].tolist() == sizes["n_parameters"].tolist()


def test_scores_of_checkpoints():
    data = survey(n_models=3, checkpoints=(0, 1000))
    scores = pandas.DataFrame(
        {
            "model": data["model"].values.repeat(2),
            "checkpoint": [1000, 0] * 3,
            "score": [10.0, 1, 20, 2, 30, 3],
        }
    )
    table = table_of(data, 5, scores=scores)
    assert table["score"].tolist() == [1, 10, 2, 20, 3, 30]


def test_one_model_across_training_is_a_table_too():
    data = (
        survey(n_models=1, checkpoints=(0, 10, 100))
        .isel(model=0, drop=True)
        .assign_attrs(model="pythia")
    )
    table = table_of(data)
    assert table["model"].tolist() == ["pythia"] * 3
    assert table["checkpoint"].tolist() == [0, 10, 100]


def test_scores_of_models_that_were_not_measured_are_named_and_left_out():
    data = survey(n_models=5)
    scores = scores_of(data)
    more = pandas.concat(
        [scores, pandas.DataFrame({"model": ["org/m9", "gpt-5"], "score": [1.0, 2.0]})]
    )
    expected = generalization_study(data, scores, n_resamples=50)
    with pytest.warns(
        UserWarning,
        match=r"that were not measured: gpt-5, org/m9; measured: org/m0, .*org/m4",
    ) as caught:
        study = generalization_study(data, more, n_resamples=50)
    assert (
        len([warning for warning in caught if "not measured" in str(warning.message)])
        == 1
    )
    assert caught[0].filename == __file__
    assert study.to_dict() == expected.to_dict()
    with (
        pytest.warns(UserWarning, match="not measured: org/m9"),
        pytest.raises(
            ValueError,
            match="scores of at least three measured models are needed, got 2",
        ),
    ):
        generalization_study(
            data,
            scores.assign(model=["org/m0", "org/m1", "org/m9", "x", "y"]),
            n_resamples=50,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 7}, r"`k` = 7 was not measured; there are \[5, 10\]"),
        ({"measure": "captured_energy"}, "no 'mean_captured_energy'"),
        ({"scores": "accuracy"}, '`scores` must be a table or "loss"'),
        (
            {"scores": pandas.DataFrame({"model": ["gpt5"] * 3, "score": 1.0})},
            "more than one row for gpt5",
        ),
    ],
)
def test_tables_that_cannot_be_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        table_of(survey(), **arguments)


@pytest.mark.parametrize("dim", ["prompt", "model", "checkpoint"])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_survey_that_holds_nothing(dim, is_empty):
    """Neither prompts, models nor checkpoints; or of all of them no value."""
    data = survey()
    scores = scores_of(data)
    data = (
        data.isel({dim: slice(0)})
        if is_empty
        else data.where(data[dim] == "none of these")
    )
    for ask in (
        lambda: generalization_study(data, scores),
        lambda: task_means(data),
        lambda: prompt_correlations(data),
    ):
        with pytest.raises(
            ValueError, match="the survey holds no coupling of any model on any prompt"
        ):
            ask()


def test_a_survey_without_k():
    data = survey().isel(k=slice(0))
    with pytest.raises(ValueError, match="the survey holds no k"):
        generalization_study(data, scores_of(survey()))


def test_only_what_is_needed_is_read_from_a_lazy_survey():
    class Forbidden(xarray.backends.BackendArray):
        shape, dtype = (8, 1, 6, 2, 3, 3), np.dtype(float)

        def __getitem__(self, key):
            raise AssertionError("maps of pairs of layers were read")

    maps = xarray.Variable(
        ("model", "checkpoint", "prompt", "k", "layer", "other_layer"),
        xarray.core.indexing.LazilyIndexedArray(Forbidden()),
    )
    lazy = survey().chunk(model=2).assign(coupling=maps)
    pandas.testing.assert_frame_equal(table_of(lazy, 5), table_of(survey(), 5))


# resampling


def test_the_mean_varies_by_models_and_by_prompts():
    # x = a_m + b_p: the variance of the mean is var(a) / M + var(b) / P, and never that
    # of layer pairs.
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(40), 2 * rng.standard_normal(60)
    result = bootstrap(a[:, None] + b, a, n_resamples=4000)
    expected = 1.96 * np.sqrt(a.var() / 40 + b.var() / 60)
    low, high = result.mean
    assert (high - low) / 2 == pytest.approx(expected, rel=0.06)
    assert (high + low) / 2 == pytest.approx(a.mean() + b.mean(), abs=0.1 * expected)


def test_all_models_of_a_draw_see_the_same_prompts():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(10)
    # Prompts that differ far more than models: drawn apart for each model, they would
    # drown the slope.
    result = bootstrap(a[:, None] + 100 * rng.standard_normal(12), a)
    assert result.slope == pytest.approx((1, 1))
    assert result.r_squared == pytest.approx((1, 1))


def test_a_loss_is_taken_on_the_prompts_drawn():
    x = np.random.default_rng(0).standard_normal((6, 9))
    result = bootstrap(x, 3 * x - 1)
    assert result.slope == pytest.approx((3, 3))
    assert result.intercept == pytest.approx((-1, -1))
    assert result.rho == pytest.approx((1, 1))


@pytest.mark.parametrize(("few", "many"), [((6, 40), (60, 40)), ((30, 3), (30, 80))])
def test_few_models_or_prompts_make_wide_intervals(few, many):
    def width(shape):
        rng = np.random.default_rng(1)
        low, high = bootstrap(
            rng.standard_normal((shape[0], 1)) + rng.standard_normal(shape[1]),
            np.arange(shape[0]) * 1.0,
        ).mean
        return high - low

    assert width(few) > 1.5 * width(many)


def test_intervals_are_those_of_a_loop_over_draws():
    rng = np.random.default_rng(5)
    x = rng.random((9, 1)) + 0.3 * rng.standard_normal((9, 7))
    y = 4 * x.mean(1) + rng.standard_normal(9)
    slopes, r_squared, rhos, lines = [], [], [], []
    while len(slopes) < 1500:
        models, prompts = rng.choice(9, 9), rng.choice(7, 7)
        if len(set(models)) < 3:
            continue
        drawn = x[models][:, prompts].mean(1)
        fit = stats.linregress(drawn, y[models])
        slopes.append(fit.slope)
        r_squared.append(fit.rvalue**2)
        rhos.append(stats.spearmanr(drawn, y[models]).statistic)
        lines.append(fit.intercept + fit.slope * x.mean(1).max())
    result = bootstrap(x, y, n_resamples=6000)
    found = [
        result.slope,
        result.r_squared,
        result.rho,
        (result.band_low[-1], result.band_high[-1]),
    ]
    for interval, draws in zip(found, (slopes, r_squared, rhos, lines), strict=True):
        # Hesterberg's expanded percentiles: of nine models, t has eight degrees of
        # freedom.
        tail = stats.norm.sf(stats.t.ppf(0.975, 8) * np.sqrt(9 / 8))
        expected = np.quantile(draws, [tail, 1 - tail])
        np.testing.assert_allclose(interval, expected, atol=0.12 * np.ptp(expected))


def test_intervals_cover_what_is_true():
    covered = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        models, prompts = rng.standard_normal(30), rng.standard_normal(40)
        result = bootstrap(
            0.5 + models[:, None] + prompts,
            2 * models + rng.standard_normal(30),
            n_resamples=200,
            seed=seed,
        )
        covered.append(
            [
                low <= true <= high
                for true, (low, high) in ((2, result.slope), (0.5, result.mean))
            ]
        )
    # Percentiles of 30 models are a little narrow; at 95 % three standard errors of 150
    # are 5 %.
    slope, mean = np.mean(covered, 0)
    assert 0.87 <= slope <= 0.995
    assert 0.87 <= mean <= 0.995


def test_degenerate_draws_are_counted():
    x = np.array([[1.0], [2], [4]])
    with pytest.warns(UserWarning, match="too few to resample"):
        result = bootstrap(x, np.array([1.0, 2, 3]), n_resamples=5000)
    # All three models: 3! of 3³ draws.
    assert result.n_dropped / 5000 == pytest.approx(1 - 6 / 27, abs=0.02)
    rng = np.random.default_rng(0)
    assert bootstrap(rng.random((30, 2)), rng.random(30)).n_dropped == 0


def test_seeds():
    rng = np.random.default_rng(0)
    x, y = rng.random((8, 5)), rng.random(8)
    assert bootstrap(x, y, seed=1).slope == bootstrap(x, y, seed=1).slope
    assert bootstrap(x, y, seed=1).slope != bootstrap(x, y, seed=2).slope


def test_prompts_that_a_model_lacks_are_left_out_of_its_mean():
    x = np.arange(6.0)[:, None] + np.zeros(8)
    x[0, :3] = np.nan
    result = bootstrap(
        np.vstack([x, np.full(8, np.nan)]), np.append(5 * np.arange(6.0), 99)
    )
    assert result.n_models == 6
    assert result.slope == pytest.approx((5, 5))


@pytest.mark.parametrize(
    ("x", "y", "arguments", "message"),
    [
        (np.zeros((2, 4)), np.zeros(2), {}, "at least three .* got 2"),
        (np.zeros((5, 4)), np.arange(5.0), {}, "all 2000 draws are degenerate"),
        (
            np.ones((5, 4)),
            1e300 * np.arange(5.0),
            {},
            r"`y` has a value of 4e\+300 in size",
        ),
        (
            1e-200 * np.ones((5, 4)),
            np.arange(5.0),
            {},
            "`x` has no value above 1e-200 in size",
        ),
        (
            np.ones((5, 4)),
            np.arange(5.0),
            {"n_resamples": 0},
            "`n_resamples` must be at least 1",
        ),
    ],
)
def test_nothing_to_resample(x, y, arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(x, y, **arguments)


# sweeps, tasks, prompts


def test_each_k_has_its_own_fit():
    data = survey()
    rng = np.random.default_rng(0)
    data["mean_coupling"][..., 1] = rng.random((8, 1, 6))
    scores = scores_of(data, noise=0)
    by_k = generalization_study(data, scores, n_resamples=50).by_k
    assert list(by_k) == list(KS)
    assert by_k[5].linear.r_squared == pytest.approx(1)
    x = data["mean_coupling"].values[:, 0, :, 1].mean(1)
    assert by_k[10].linear.r_squared == pytest.approx(
        np.corrcoef(x, scores["score"])[0, 1] ** 2
    )


def test_tasks_have_their_prompts_and_their_scores():
    data = survey()
    scores = scores_of(data, arc=np.random.default_rng(3).random(8))
    by_task = generalization_study(data, scores, k=5, n_resamples=50).by_task
    x = data["mean_coupling"].values[:, 0, :, 0]
    for task, prompts, score in (
        ("arc", x[:, :3], scores["arc"]),
        ("mmlu", x[:, 3:], scores["score"]),
    ):
        assert by_task[task].linear.r_squared == pytest.approx(
            np.corrcoef(prompts.mean(1), score)[0, 1] ** 2
        )
        assert by_task[task].bootstrap.n_prompts == 3


def test_within_a_model_across_tasks():
    data = survey(n_models=4, n_prompts=6).assign_coords(
        task=("prompt", ["a", "a", "b", "b", "c", "c"])
    )
    rng = np.random.default_rng(0)
    scores = pandas.DataFrame(
        {"model": data["model"].values} | {task: rng.random(4) for task in "abc"}
    )
    across_tasks = generalization_study(
        data, scores, score="a", k=5, n_resamples=50
    ).across_tasks
    x = data["mean_coupling"].values[2, 0, :, 0].reshape(3, 2).mean(1)
    assert across_tasks["org/m2"].r_squared == pytest.approx(
        np.corrcoef(x, scores.loc[2, [*"abc"]].astype(float))[0, 1] ** 2
    )
    assert across_tasks["org/m2"].n == 3
    # A leaderboard has a column of the mean as well, which is none of the tasks.
    with_mean = scores.assign(score=rng.random(4))
    again = fits_across_tasks(data, with_mean, k=5, measure="coupling", checkpoint=None)
    assert again["org/m2"].slope == pytest.approx(across_tasks["org/m2"].slope)
    with pytest.raises(ValueError, match="at least three tasks"):
        fits_across_tasks(
            data, scores[["model", "a", "b"]], k=5, measure="coupling", checkpoint=None
        )


def test_length_and_difficulty_of_prompts():
    data = survey(n_models=3, n_prompts=30)
    x, length = data["mean_coupling"].values[1, 0, :, 0], data["n_pos"].values[1, 0]
    by_length = prompt_correlations(data, k=5, n_resamples=500)["org/m1"]
    expected = stats.spearmanr(x, length)
    assert (by_length.rho, by_length.p, by_length.n) == pytest.approx(
        (expected.statistic, expected.pvalue, 30)
    )
    low, high = by_length.interval
    assert low < by_length.rho < high
    # Fisher's z has a standard error of about 1.06 / √(n − 3) on ranks.
    assert np.arctanh(high) - np.arctanh(low) == pytest.approx(
        2 * 1.96 * 1.06 / np.sqrt(27), rel=0.25
    )
    difficulty = {f"p{i}": float(-x[i]) for i in range(20)}
    by_difficulty = prompt_correlations(data, difficulty, k=5)["org/m1"]
    assert (by_difficulty.rho, by_difficulty.n) == pytest.approx((-1, 20))
    assert by_difficulty.interval == pytest.approx((-1, -1))


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("colour", "'colour' was not measured on each prompt"),
        ("n_layers", "'n_layers' was not measured on each prompt"),
        ({"q": 1.0}, "not measured: q"),
        ({"p1": 1.0}, "at least three prompts"),
    ],
)
def test_nothing_known_of_prompts(against, message):
    with pytest.raises(ValueError, match=message):
        prompt_correlations(survey(), against)


# the summary


def test_the_summary_holds_it_all_and_is_json():
    data = survey(n_models=12)
    scores = scores_of(data, training_tokens=np.arange(12) * 1e12)
    scores.loc[0, "score"] = np.nan
    result = generalization_study(
        data,
        scores,
        k=5,
        subsets={"deep": "n_layers > 15"},
        difficulty={f"p{i}": float(i) for i in range(6)},
        n_resamples=100,
    )
    x = data["mean_coupling"].values[1:, 0, :, 0].mean(1)
    slope, _, _, p = line_of_unequal_variance(x, scores["score"][1:])
    assert result.association.linear.slope == pytest.approx(slope)
    assert result.association.linear.p == pytest.approx(p)
    assert result.left_out["org/m0"] == "no score"
    assert list(result.partial) == [
        "log10(n_parameters)",
        "n_layers",
        "d_model",
        "log10(training_tokens)",
        "log10(n_parameters) + n_layers + d_model + log10(training_tokens)",
    ]
    assert list(result.covariates.index) == [
        "log10(n_parameters)",
        "n_layers",
        "d_model",
        "log10(training_tokens)",
    ]
    assert set(result.by_k) == set(KS)
    assert result.by_k[5] is result.association
    assert set(result.by_task) == {"arc", "mmlu"}
    assert (
        set(result.prompt_length)
        == set(result.prompt_difficulty)
        == set(data["model"].values)
    )
    read = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert read["association"]["linear"]["n"] == 11
    assert len(read["table"]) == len(read["influence"]["table"]) == 11
    assert read["influence"]["table"][0]["model"] == "org/m1"
    assert read["covariates"][1]["covariate"] == "n_layers"
    assert read["association"]["bootstrap"]["resampled"].startswith(
        "models, and prompts"
    )
    assert read["by_k"]["10"]["linear"]["r_squared"] == pytest.approx(
        result.by_k[10].linear.r_squared
    )
    assert len(repr(result).splitlines()) <= 3
    assert "k = 5" in repr(result)
    corrected = f"({result.familywise.p:.2g}\n  corrected for"
    assert corrected in repr(result)

    slopes, fit = result.slopes, result.partial["n_layers"]
    assert list(slopes.index) == [
        "all models",
        "all models, bootstrap",
        "all models, corrected",
        "deep",
        *(f"given {n}" for n in result.partial),
    ]
    expected = (fit.n, fit.slope, *fit.slope_interval, fit.r_squared, fit.p, fit.vif)
    expected = (*expected, fit.freedom)
    assert tuple(slopes.loc["given n_layers"]) == pytest.approx(expected)
    assert (
        tuple(slopes.loc["all models, bootstrap"][["low", "high"]])
        == result.association.bootstrap.slope
    )


def test_the_table_of_covariates_has_the_p_of_their_picture():
    """Models of four families, whose size is that of the family."""
    data = survey(n_models=12)
    scores = scores_of(data, training_tokens=np.repeat(np.arange(1, 5), 3) * 1e12)
    families = {model: f"family {i // 3}" for i, model in enumerate(data.model.values)}
    result = generalization_study(data, scores, k=5, families=families, n_resamples=50)
    lines = covariate_lines(result.table, result.score, list(result.covariates.index))
    assert len(lines) >= 3
    drawn = {line.covariate: line.fit.p for line in lines}
    assert drawn == pytest.approx(result.covariates["p"].to_dict())
    (tokens,) = (line for line in lines if "tokens" in line.covariate)
    independent = linear_fit(result.table, tokens.covariate, result.score)
    assert tokens.fit.p != pytest.approx(independent.p, rel=0.05)


def test_maps_of_layers_change_nothing():
    data = survey()
    maps = np.random.default_rng(0).random((8, 1, 6, 2, 3, 3))
    with_maps = data.assign(
        coupling=(("model", "checkpoint", "prompt", "k", "layer", "other_layer"), maps)
    )
    plain, other = (
        generalization_study(d, scores_of(data), n_resamples=50).to_dict()
        for d in (data, with_maps)
    )
    assert plain == other


def test_a_model_that_lacks_the_last_checkpoint_is_named_and_left_out_unless_it_is_asked_for():
    data = survey(n_models=5, checkpoints=(1000, 0, 20))
    data["mean_coupling"][:, 0] += 0.1
    data["mean_coupling"][2, 0] = np.nan
    result = generalization_study(data, "loss", n_resamples=50)
    assert result.table["checkpoint"].tolist() == [1000] * 4
    assert result.table["model"].tolist() == ["org/m0", "org/m1", "org/m3", "org/m4"]
    why = "no coupling at k = 10 at checkpoint 1000, only at 0, 20 (“last” takes each model's last)"
    assert result.left_out["org/m2"] == why
    assert "org/m2" not in result.prompt_length
    assert result.score == "loss"
    assert result.table["coupling"][0] == pytest.approx(
        data["mean_coupling"].values[0, 0, :, 1].mean()
    )
    at_last = generalization_study(data, "loss", checkpoint="last", n_resamples=50)
    assert at_last.table["checkpoint"].tolist() == [1000, 1000, 20, 1000, 1000]
    assert "org/m2" not in at_last.left_out
    assert at_last.prompt_length["org/m2"].n == 6
    named = generalization_study(data, "loss", checkpoint="0", n_resamples=50).table
    assert named["checkpoint"].tolist() == [0] * 5
    with pytest.raises(
        ValueError, match="checkpoint 7 was not measured; there are 0, 20, 1000"
    ):
        generalization_study(data, "loss", checkpoint=7)


def test_a_model_scored_at_an_earlier_step_alone_is_not_without_a_score():
    data = survey(n_models=5, checkpoints=(0, 1000))
    scores = pandas.DataFrame(
        {"model": data["model"].values, "checkpoint": [1000, 1000, 0, 1000, 1000]}
    )
    scores["score"] = [3.0, 1, 4, 1, 5]
    left_out = generalization_study(data, scores, n_resamples=50).left_out
    assert (
        left_out["org/m2"]
        == "no score at checkpoint 1000, only at 0 (“last” takes each model's last)"
    )
    at_last = generalization_study(
        data, scores, checkpoint="last", n_resamples=50
    ).table
    assert at_last["checkpoint"].tolist() == [1000, 1000, 0, 1000, 1000]
    assert at_last["score"].tolist() == [3, 1, 4, 1, 5]
    # Without a score at any step; with too few of them at the last.
    at_last = generalization_study(
        data,
        scores.assign(score=[3, 1, np.nan, 1, 5]),
        checkpoint="last",
        n_resamples=50,
    )
    assert at_last.left_out["org/m2"] == "no score"
    scores["checkpoint"] = [1000, 0, 0, 0, 1000]
    with pytest.raises(
        ValueError,
        match=r"got 2: org/m0, org/m4; org/m1: no score at checkpoint 1000, only at 0 \(“last”",
    ):
        generalization_study(data, scores, n_resamples=50)


def test_numbered_checkpoints_are_in_order_as_text_too():
    data = survey(n_models=4, checkpoints=("main", "1000", "9"))
    assert table_of(data)["checkpoint"][:3].tolist() == ["9", "1000", "main"]
    assert set(generalization_study(data, n_resamples=50).table["checkpoint"]) == {
        "main"
    }


def test_untrained_twins_are_a_baseline_and_nothing_else():
    data = survey(n_models=4, checkpoints=("main", "untrained"))
    data["mean_coupling"][:, 1] *= 0.1
    trained = generalization_study(data, n_resamples=50)
    assert set(trained.table["checkpoint"]) == {"main"}
    baseline = generalization_study(data, checkpoint="untrained", n_resamples=50)
    np.testing.assert_allclose(
        baseline.table["coupling"], 0.1 * trained.table["coupling"]
    )
    data["mean_coupling"][2, 0] = np.nan
    assert (
        generalization_study(data, n_resamples=50).left_out["org/m2"]
        == "no coupling at k = 10"
    )


def test_prompts_that_only_some_models_know_are_said():
    data = survey(n_models=5)
    data["mean_coupling"][:, :, 5] = np.nan
    assert generalization_study(data, n_resamples=50).n_prompts == 5
    data["mean_coupling"][3, :, 4] = np.nan
    with (
        pytest.warns(UserWarning, match="org/m3: some prompts .* the 4 of 5 that all"),
        pytest.warns(UserWarning, match="org/m3: some prompts .* the 1 of 2 that all"),
    ):
        result = generalization_study(data, n_resamples=50)
    assert result.table["coupling"][3] == pytest.approx(
        data["mean_coupling"].values[3, 0, :4, 1].mean()
    )


def survey_of_a_task_that_couples_more() -> tuple[xarray.Dataset, pandas.DataFrame]:
    """Better models couple more, and all of them on the last two of six prompts."""
    rng = np.random.default_rng(2)
    quality = np.linspace(0, 1, 8)
    coupling = 0.2 + 0.1 * quality[:, None] + 0.02 * rng.standard_normal((8, 6))
    coupling[:, 4:] += 0.5
    data = survey(coupling)
    data["task"] = ("prompt", ["arc", "arc", "arc", "arc", "mmlu", "mmlu"])
    scores = pandas.DataFrame(
        {"model": data["model"].values, "score": 30 + 20 * quality}
    )
    return data, scores


def test_a_warning_of_missing_prompts_points_at_the_users_line():
    data = survey(n_models=5)
    data["mean_coupling"][3, :, 4] = np.nan
    message = "org/m3: some prompts were not measured; means are over the 5 of 6"
    with (
        pytest.warns(UserWarning, match=message) as warned,
        pytest.warns(UserWarning, match="org/m3: some prompts .* the 2 of 3 that all"),
    ):
        generalization_study(data, n_resamples=50)
    assert {record.filename for record in warned} == {__file__}


@pytest.mark.filterwarnings("ignore:.*some prompts were not measured")
def test_a_missing_task_does_not_flip_the_slope():
    """Models are compared on what all have; means over different prompts are a remark."""
    data, scores = survey_of_a_task_that_couples_more()
    whole = generalization_study(data, scores, n_resamples=50)
    assert whole.association.linear.slope > 0
    # The smallest p that 50 permutations can give.
    assert whole.familywise.p == 1 / 51
    assert "p ≤ 0.0196 by permutation of the scores" in "".join(whole.remarks)
    assert whole.common_prompts is None
    assert "different prompts" not in "".join([*whole.slopes.index, *whole.remarks])
    data["mean_coupling"][6:, :, 4:] = np.nan
    result = generalization_study(data, scores, n_resamples=50)
    mixed = np.nanmean(data["mean_coupling"].values[:, 0, :, 1], 1)
    common = data["mean_coupling"].values[:, 0, :4, 1].mean(1)
    theirs = stats.linregress(common, scores["score"])
    mixed_slope = np.polyfit(mixed, scores["score"], 1)[0]
    assert mixed_slope < 0 < theirs.slope
    line = result.association.linear
    assert line.slope == pytest.approx(theirs.slope)
    assert line.r_squared == pytest.approx(theirs.rvalue**2)
    rho = stats.spearmanr(common, scores["score"]).statistic
    assert result.association.spearman.rho == pytest.approx(rho)
    np.testing.assert_allclose(result.table["coupling"], common)
    assert result.n_prompts == result.association.bootstrap.n_prompts == 4
    low, high = result.association.bootstrap.slope
    assert low < theirs.slope < high
    assert result.by_k[10].linear.slope == pytest.approx(theirs.slope)
    assert result.by_task["arc"].linear.slope == pytest.approx(theirs.slope)
    assert result.by_task["mmlu"].linear.n == 6
    looks = result.familywise.table.set_index(["k", "measure", "task", "subset"])
    main = looks.loc[(10, "coupling", "all prompts", "all models")]
    assert main["r"] == pytest.approx(theirs.rvalue)
    of_task = looks.loc[(10, "coupling", "mmlu", "all models")]
    assert of_task["n"] == 6
    assert result.familywise.p == 1 / 51

    assert result.common_prompts.mixed_line.slope == pytest.approx(mixed_slope)
    assert result.common_prompts.line.slope == pytest.approx(theirs.slope)
    assert result.slopes.loc["all models", "slope"] == pytest.approx(theirs.slope)
    assert result.slopes.loc["all models, different prompts", "slope"] == pytest.approx(
        mixed_slope
    )
    (remark,) = [line for line in result.remarks if "different prompts" in line]
    assert remark.startswith(
        "org/m6, org/m7 lack some of 6 prompts: models are compared on the 4 that all"
    )
    assert f"would give the slope {mixed_slope:.4g}" in remark
    title = tlc.plots.plot_generalization(result).get_title()
    assert "mean over 4 prompts (of 6; some models lack the others)" in " ".join(
        title.split()
    )
    assert result.to_dict()["common_prompts"]["n_prompts"] == 4


@pytest.mark.filterwarnings("ignore:.*some prompts were not measured")
def test_losses_and_models_without_a_common_prompt():
    data = survey(n_models=5)
    data["mean_coupling"][3, :, 4] = np.nan
    of_losses = generalization_study(data, n_resamples=50)
    kept = [0, 1, 2, 3, 5]
    coupling = data["mean_coupling"].values[:, 0, kept, 1].mean(1)
    loss = data["loss"].values[:, 0, kept].mean(1)
    slope = np.polyfit(coupling, loss, 1)[0]
    assert of_losses.association.linear.slope == pytest.approx(slope)
    looks = of_losses.familywise.table.set_index(["k", "measure", "task", "subset"])
    r = looks.loc[(10, "coupling", "all prompts", "all models"), "r"]
    assert r == pytest.approx(np.corrcoef(coupling, loss)[0, 1])
    data["mean_coupling"][0, :, :3] = np.nan
    data["mean_coupling"][1, :, 3:] = np.nan
    result = generalization_study(data, n_resamples=50)
    assert (result.common_prompts.n_prompts, result.common_prompts.line) == (0, None)
    assert "and none was measured in all models), and may" in "".join(result.remarks)
    mixed = np.nanmean(data["mean_coupling"].values[:, 0, :, 1], 1)
    np.testing.assert_allclose(result.table["coupling"], mixed)


@pytest.mark.parametrize(
    "controls",
    [
        ["2*n_layers", "n_layers"],
        ["n_layers", "-n_layers"],
        ["d_model", "3 - d_model / 7"],
        ["log10(n_parameters)", "log10(1000 * n_parameters)"],
        ["n_layers", "d_model", "n_layers + d_model"],
        ["n_layers", "d_model", "d_model * 4"],
    ],
)
def test_controls_that_repeat_each_other_are_refused(controls):
    data = survey()
    with pytest.raises(ValueError, match="`controls` must not repeat each other: "):
        generalization_study(data, scores_of(data), controls=controls, n_resamples=9)


def test_controls_that_only_go_together_are_not_refused():
    data = survey()
    data["d_model"] = 64 * data["n_layers"] + [[3], [0], [0], [0], [0], [0], [0], [1]]
    controls = ["n_layers", "d_model", "n_layers**2", "log10(n_parameters)"]
    study = generalization_study(
        data, scores_of(data), controls=controls, n_resamples=9
    )
    assert list(study.covariates.index) == controls
    # Fewer models than could tell the controls apart are a lack of models.
    few = survey(n_models=4)
    left_out = generalization_study(
        few, scores_of(few), controls=controls[:3], n_resamples=9
    ).left_out
    assert "models" in left_out["given n_layers + d_model + n_layers**2"]


@pytest.mark.parametrize("dim", ["model", "checkpoint", "prompt", "k"])
def test_what_two_surveys_share_counts_once(dim):
    data = survey()
    twice = xarray.concat([data, data], dim, data_vars="minimal")
    with pytest.raises(ValueError, match=f"labels along `{dim}` twice "):
        generalization_study(twice, scores_of(data), n_resamples=9)


def test_what_lacks_models_is_left_out_and_said():
    data = survey(n_models=3).drop_vars("d_model")
    data["n_layers"][:] = 12
    result = generalization_study(data, scores_of(data), n_resamples=50)
    assert result.influence is None
    assert "at least four" in result.left_out["influence"]
    assert "'n_layers' is the same" in result.left_out["covariate n_layers"]
    assert "at least 4 models" in result.left_out["given log10(n_parameters)"]
    assert result.partial == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"controls": ["colour"]}, "no column or expression 'colour'"),
        ({"subsets": {"none": "score > 1e9"}}, "subset 'none'"),
        ({"k": 3}, "`k` = 3 was not measured"),
        ({"difficulty": {"q": 1.0}}, "not measured: q"),
        ({"n_resamples": 0}, "`n_resamples`"),
        ({"score": "arc"}, "no column 'arc'"),
    ],
)
def test_arguments_that_name_what_is_not_there(arguments, message):
    with pytest.raises(ValueError, match=message):
        generalization_study(survey(), scores_of(survey()), **arguments)


def test_fewer_than_three_models():
    with pytest.raises(
        ValueError,
        match=r"needs at least three models that have both, got 2: org/m0, org/m1",
    ):
        generalization_study(survey(n_models=2), "loss")


def test_on_real_measurements(tokenizer_folder):
    models = {
        f"{family}": tiny.huggingface_model(family)
        for family in ("gpt2", "llama", "gpt_neox")
    }
    settings, prompts = (
        tlc.Settings(k=(4, 8), n_singular_values=4),
        ["w1 w2 w3 w4", "w5 w6 w7 w8 w9"],
    )
    from tl_coupling.studies.surveys import as_prompts

    measured = [
        tlc.surveys.measure_prompts(
            tiny.bridge(model, tokenizer_folder), as_prompts(prompts), settings
        ).expand_dims(model=[name], checkpoint=["main"])
        for name, model in models.items()
    ]
    data = xarray.concat(measured, "model", combine_attrs="drop_conflicts")
    result = generalization_study(data, "loss", n_resamples=50)
    assert result.k == 8
    assert result.table["coupling"].tolist() == pytest.approx(
        data["mean_coupling"].sel(k=8).mean("prompt").values[:, 0].tolist()
    )
    assert result.association.linear.n == 3


def test_scores_under_other_names_are_renamed_as_the_warning_says() -> None:
    """The models of the survey, two of which the scores call otherwise."""
    data = survey(n_models=6)
    scores = scores_of(data)
    others = {"org/m1": "Org-M1", "org/m4": "their/m4"}
    renamed = scores.assign(model=scores["model"].replace(others))
    with pytest.warns(UserWarning, match=r"Org-M1, their/m4; .* NAME=MODEL"):
        study = generalization_study(data, renamed, n_resamples=50)
    assert study.association.linear.n == 4
    back = renamed.assign(
        model=renamed["model"].replace(
            {theirs: ours for ours, theirs in others.items()}
        )
    )
    expected = generalization_study(data, scores, n_resamples=50)
    again = generalization_study(data, back, n_resamples=50)
    assert again.association.linear.slope == expected.association.linear.slope
