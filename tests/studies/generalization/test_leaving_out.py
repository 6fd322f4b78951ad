"""Models that are related: robust intervals, fixed effects, leaving families out,
resampling them, and what is said.
"""

import dataclasses
import json

import numpy as np
import pandas
import pytest
from scipy import stats

from fake_survey import survey
from tl_coupling.statistics.fits import (
    covariate_fits,
    exponential_fit,
    fits_within,
    subset_fits,
)
from tl_coupling.studies.generalization import (
    bootstrap,
    generalization_study,
    leaving_out,
    linear_fit,
)
from tl_coupling.studies.generalization.leaving_out import (
    leave_one_family_out,
    leave_one_out,
)
from tl_coupling.studies.generalization.study_remarks import is_by_outcome
from tl_coupling.studies.plots.generalization import (
    plot_forest,
    plot_generalization,
    plot_k_sweep,
)

LABELS = [*"aaaabbbccd", None, " "]


def related(seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    codes = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5])
    x, e = (
        rng.standard_normal(6)[codes] + 0.5 * rng.standard_normal(12) for _ in range(2)
    )
    table = pandas.DataFrame(
        {
            "model": [f"m{i}" for i in range(12)],
            "x": 0.5 + 0.01 * x,
            "y": 40 + 2 * x + 3 * e,
        }
    )
    return table.assign(family=LABELS, size=rng.standard_normal(12))


def robust(
    design: np.ndarray, y: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coefficients, CR2 errors and their degrees of freedom, with n × n matrices
    throughout.
    """
    bread = np.linalg.inv(design.T @ design)
    hat = design @ bread @ design.T
    annihilator = np.eye(len(y)) - hat
    coefficients = bread @ design.T @ y
    n_columns = design.shape[1]
    V = np.zeros(n_columns)
    forms = [[] for _ in range(n_columns)]
    for code in np.unique(codes):
        pick = np.diag((codes == code) * 1.0)
        values, vectors = np.linalg.eigh(pick @ annihilator @ pick)
        root = sum(
            v**-0.5 * np.outer(u, u)
            for v, u in zip(values, vectors.T, strict=True)
            if v > 1e-9
        )
        weights = bread @ design.T @ pick @ root @ annihilator
        V += (weights @ y) ** 2
        for column in range(n_columns):
            forms[column].append(weights[column])
    lambdas = [np.linalg.eigvalsh(np.array(form).T @ np.array(form)) for form in forms]
    return (
        coefficients,
        np.sqrt(V),
        np.array(
            [eigenvalues.sum() ** 2 / (eigenvalues**2).sum() for eigenvalues in lambdas]
        ),
    )


@pytest.mark.parametrize("controls", [[], ["size"]])
def test_intervals_are_cluster_robust(controls):
    table = related()
    design = np.column_stack(
        [
            np.ones(12),
            table["x"],
            *(table[name] - table[name].mean() for name in controls),
        ]
    )
    codes = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5])
    (intercept, slope, *_), errors, freedom = robust(
        design, table["y"].to_numpy(), codes
    )
    fit = linear_fit(table, "x", "y", controls=controls, families="family")
    half = stats.t.ppf(0.975, freedom) * errors
    assert fit.slope_interval == pytest.approx((slope - half[1], slope + half[1]))
    assert fit.intercept_interval == pytest.approx(
        (intercept - half[0], intercept + half[0])
    )
    assert (fit.freedom, fit.n_families) == (pytest.approx(freedom[1]), 6)
    assert fit.p == pytest.approx(2 * stats.t.sf(abs(slope) / errors[1], freedom[1]))
    # What does not depend on it.
    plain = linear_fit(table, "x", "y", controls=controls)
    assert (fit.slope, fit.r_squared, fit.vif) == (
        plain.slope,
        plain.r_squared,
        plain.vif,
    )
    _, _, freedom = robust(design, table["y"].to_numpy(), np.arange(12))
    assert (plain.n_families, plain.freedom) == (None, pytest.approx(freedom[1]))


@pytest.mark.parametrize("labels", [["one"] * 12, range(12), [None] * 12])
def test_one_family_or_none_is_independent(labels):
    table = related().assign(family=labels)
    assert linear_fit(table, "x", "y", families="family") == linear_fit(table, "x", "y")


def test_labels_are_any_and_must_be_there():
    table = related().assign(number=[3, 3, 3, 3, 5, 5, 5, 7, 7, 9, np.nan, np.nan])
    assert linear_fit(table, "x", "y", families="number") == linear_fit(
        table, "x", "y", families="family"
    )
    with pytest.raises(
        ValueError, match="no column 'maker'; the columns are model, x, y, family, size"
    ):
        linear_fit(table, "x", "y", families="maker")


def test_within_families_is_the_regression_of_what_is_left_of_their_means():
    table = related()
    several = table[:9]
    own = several.groupby("family")[["x", "y"]]
    x, y = (several[["x", "y"]] - own.transform("mean")).to_numpy().T
    slope = x @ y / (x @ x)
    residuals = y - slope * x
    error = np.sqrt(residuals @ residuals / (9 - 3 - 1) / (x @ x))
    fit = linear_fit(table, "x", "y", within="family", equal_variance=True)
    assert (fit.n, fit.controls, fit.freedom) == (9, ("family",), 5)
    assert fit.slope == pytest.approx(slope)
    assert fit.r_squared == pytest.approx((x @ y) ** 2 / (x @ x) / (y @ y))
    half = stats.t.ppf(0.975, 5) * error
    assert fit.slope_interval == pytest.approx((slope - half, slope + half))
    # Robust as well: against the regression with an intercept of each family.
    codes = pandas.factorize(several["family"])[0]
    design = np.column_stack([np.ones(9), several["x"], codes[:, None] == [1, 2]])
    _, errors, freedom = robust(design, several["y"].to_numpy(), codes)
    half = stats.t.ppf(0.975, freedom[1]) * errors[1]
    found = linear_fit(table, "x", "y", within="family", families="family")
    assert found.slope_interval == pytest.approx((slope - half, slope + half))


def test_within_families_of_two_alone():
    with pytest.raises(
        ValueError, match="a fit of 'y' on x needs at least 3 models, got 2"
    ):
        linear_fit(related()[7:], "x", "y", within="family")
    with pytest.raises(
        ValueError, match="a fit within 2 values of 'family' needs 4 models, got 3"
    ):
        linear_fit(
            related()[:4].assign(family=[*"aabb"], y=[1, 3, 2, np.nan]),
            "x",
            "y",
            within="family",
        )


def test_every_fit_takes_families():
    table = related()
    fit = linear_fit(table, "x", "y", families="family")
    assert (
        subset_fits(table, "x", "y", subsets={"all": [True] * 12}, families="family")[
            "all"
        ]
        == fit
    )
    beside = covariate_fits(
        table, "x", "y", covariates=["size"], families="family"
    ).loc["size"]
    assert beside["x_p"] == fit.p
    assert beside["p"] == linear_fit(table, "size", "y", families="family").p
    # A curve that is nearly straight has the interval of the line.
    straight = table.assign(x=table["x"] * 1e-4, y=table["y"] + 1e4)
    curve, line = (
        of(straight, "x", "y", families="family")
        for of in (exponential_fit, linear_fit)
    )
    assert curve.p == pytest.approx(line.p, rel=0.01)
    height = curve.predict(np.array([straight["x"].mean()]))[0]
    assert np.diff(curve.b_interval)[0] * height == pytest.approx(
        np.diff(line.slope_interval)[0], rel=0.01
    )
    assert exponential_fit(straight, "x", "y").p == pytest.approx(
        linear_fit(straight, "x", "y").p, rel=0.01
    )


def test_without_each_family():
    table = related()
    influence = leave_one_family_out(table, "x", "y", families="family")
    assert influence.table.index.tolist() == ["a", "b", "c"]
    for name, row in influence.table.iterrows():
        other_families = table[table["family"] != name]
        by_hand = stats.linregress(other_families["x"], other_families["y"])
        assert (row["slope"], row["r_squared"]) == pytest.approx(
            (by_hand.slope, by_hand.rvalue**2)
        )
        assert row["p"] == linear_fit(other_families, "x", "y", families="family").p
    with pytest.raises(ValueError, match="no two models have the same 'model'"):
        leave_one_family_out(table, "x", "y", families="model")
    with pytest.raises(
        ValueError,
        match="without 'a': a fit of 'y' on x needs at least 3 models, got 2",
    ):
        leave_one_family_out(
            table[2:6].assign(family=[*"aabc"]), "x", "y", families="family"
        )


@pytest.mark.parametrize("unknown", [[], ["a"], ["f"], ["a", "f"]])
def test_a_model_without_a_score_hides_no_choice_by_it(unknown):
    """NaN is neither above nor below the others' scores."""
    table = pandas.DataFrame({"score": [1.0, 2, 3, 4, 5, 6]}, index=[*"abcdef"])
    table.loc[unknown, "score"] = np.nan
    chosen = table.index.isin([*"def"])
    assert is_by_outcome(table, {"score"}, chosen)
    mixed = table.index.isin([*"bce"])
    assert not is_by_outcome(table, {"score"}, mixed)
    nothing_known = table.assign(score=np.nan)
    assert not is_by_outcome(nothing_known, {"score"}, chosen)


def test_a_fit_whose_p_is_not_known_is_significant_no_more(monkeypatch):
    """NaN is not above the level, and was taken for a p below it."""
    x = np.arange(8.0)
    noise = np.random.default_rng(0).normal(size=8)
    names = [*"abcdefgh"]
    table = pandas.DataFrame({"model": names, "x": x, "y": x + 0.1 * noise})

    def without_b_unknown(table, *args, **options):
        fit = linear_fit(table, *args, **options)
        is_without_b = "b" not in set(table["model"])
        return dataclasses.replace(fit, p=np.nan) if is_without_b else fit

    monkeypatch.setattr(leaving_out, "linear_fit", without_b_unknown)
    assert leave_one_out(table, "x", "y").not_significant == ("b",)


def test_one_family_carries_the_claim():
    rng = np.random.default_rng(0)
    x = np.append(rng.random(8), [3, 3.1, 3.2])
    y = np.append(-0.2 * x[:8] + 0.3 * rng.standard_normal(8), [4, 4.1, 4.3])
    table = pandas.DataFrame(
        {"x": x, "y": y, "family": [*"aabbccdd", "far", "far", "far"]}
    )
    influence = leave_one_family_out(table, "x", "y", families="family")
    assert influence.most_influential == "far"
    assert influence.sign_changes == ("far",)
    # No single model does.
    assert leave_one_out(table, "x", "y").sign_changes == ()


def test_families_are_resampled_whole():
    rng = np.random.default_rng(1)
    labels = [*"aaaabbbccdeeffgh"]
    codes = pandas.factorize(np.array(labels))[0]
    x = rng.random(8)[codes, None] + 0.2 * rng.standard_normal((16, 5))
    y = 4 * x.mean(1) + rng.standard_normal(8)[codes]
    slopes = []
    rhos = []
    means = []
    for _ in range(1500):
        families = rng.choice(8, 8)
        prompts = rng.choice(5, 5)
        models = np.concatenate(
            [np.flatnonzero(codes == family) for family in families]
        )
        if len(set(models)) < 3 or len(set(families)) < 2:
            continue
        drawn = x[models][:, prompts].mean(1)
        slopes.append(stats.linregress(drawn, y[models]).slope)
        rhos.append(stats.spearmanr(drawn, y[models]).statistic)
        means.append(drawn.mean())
    result = bootstrap(x, y, families=labels, n_resamples=6000)
    assert (result.n_families, result.n_models, result.too_few) == (8, 16, "")
    assert result.resampled.startswith("whole families of models")
    tail = stats.norm.sf(stats.t.ppf(0.975, 7) * np.sqrt(8 / 7))
    for interval, draws in (
        (result.slope, slopes),
        (result.rho, rhos),
        (result.mean, means),
    ):
        expected = np.quantile(draws, [tail, 1 - tail])
        np.testing.assert_allclose(interval, expected, atol=0.15 * np.ptp(expected))


def test_families_of_one_model_change_no_number():
    rng = np.random.default_rng(2)
    x = rng.random((9, 4))
    y = rng.random(9)
    x[8] = np.nan
    alone = bootstrap(x, y, families=list(range(9)), n_resamples=50)
    plain = bootstrap(x, y, n_resamples=50)
    for name in ("slope", "rho", "r_squared", "mean", "n_families", "n_dropped"):
        assert getattr(alone, name) == getattr(plain, name)
    with pytest.raises(
        ValueError, match="`families` must have a label for each of 9 models, got 2"
    ):
        bootstrap(x, y, families=["a", "b"])


def test_few_models_or_families_are_too_few():
    rng = np.random.default_rng(3)
    x = rng.random((20, 4))
    y = rng.random(20)
    with pytest.warns(
        UserWarning,
        match=r"^5 models are too few to resample \(wanted 6\): the t interval holds",
    ):
        bootstrap(x[:5], y[:5], n_resamples=50)
    with pytest.warns(UserWarning, match="^5 families are too few") as caught:
        bootstrap(x, y, families=[*"abcde"] * 4, n_resamples=50)
    assert caught[0].filename == __file__


# the study


def simpson() -> tuple:
    """Four families of three: up over all models, down inside each."""
    rng = np.random.default_rng(0)
    place = np.repeat(np.arange(4), 3)
    inside = np.tile([-1, 0, 1], 4)
    coupling = 0.3 + 0.1 * place + 0.02 * inside
    data = survey(coupling[:, None] + 0.001 * rng.standard_normal((12, 6)))
    score = 10 * place - 2 * inside + 0.1 * rng.standard_normal(12)
    labels = [["Pythia", "OPT", "Llama", "Qwen"][i] for i in place]
    return data, pandas.DataFrame(
        {"model": data["model"].values, "score": score, "family": labels}
    )


def test_a_study_of_families():
    data, scores = simpson()
    # Chosen for their scores; for something else.
    subsets = {
        "good": "score > 8",
        "deep": "n_layers > 10",
        "best": (scores["score"] > 18).to_numpy(),
    }
    result = generalization_study(data, scores, k=5, subsets=subsets, n_resamples=100)
    line = result.association.linear
    assert line == linear_fit(result.table, "coupling", "score", families="family")
    assert line.n_families == 4
    assert "12 models in 4 families, 6 prompts" in repr(result)
    assert result.subsets["good"].n_families == 3
    inside = result.partial["family"]
    assert inside == linear_fit(
        result.table, "coupling", "score", families="family", within="family"
    )
    assert inside.slope < 0 < line.slope
    assert result.slopes.index[-1] == "given family"
    assert set(result.within_families) == {"Pythia", "OPT", "Llama", "Qwen"}
    assert result.within_families == fits_within(
        result.table, "coupling", "score", families="family"
    )
    assert result.family_influence.table.index.tolist() == [
        "Pythia",
        "OPT",
        "Llama",
        "Qwen",
    ]
    assert result.selected == ("good", "best")
    assert result.association.bootstrap.n_families == 4
    assert "families of one model" not in result.left_out
    assert result.left_out["bootstrap"].startswith(
        "4 families are too few to resample (wanted 6)"
    )
    assert "all models, bootstrap" not in result.slopes.index
    remarks = "\n".join(result.remarks)
    low, high = inside.slope_interval
    assert (
        f"Simpson: inside families the slope is {inside.slope:.4g} ({low:.4g} to "
        f"{high:.4g})" in remarks
    )
    assert (
        "Simpson: the slope has the other sign inside the families Pythia, OPT, "
        "Llama, Qwen" in remarks
    )
    assert "chosen by the score: good, best" in remarks
    assert "without one family R² is" in remarks
    read = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert read["remarks"] == result.remarks
    assert read["partial"]["family"]["n_families"] == 4
    assert (
        "too few for a band"
        in plot_generalization(result).get_legend().get_texts()[0].get_text()
    )
    assert not plot_generalization(result).collections
    assert "too few models for intervals" in plot_k_sweep(result).get_title()
    assert len(plot_forest(result).get_yticklabels()) == len(result.slopes)


def test_a_family_of_one_model_is_named_where_it_has_no_row():
    data, scores = simpson()
    scores.loc[11, "family"] = "Phi"
    result = generalization_study(data, scores, k=5, n_resamples=50)
    assert "Phi" not in result.family_influence.table.index
    alone = scores["model"][11]
    assert result.left_out["families of one model"] == (
        f"the line without {alone} is in `influence`, and not in `family_influence`"
    )
    assert alone in result.influence.table.index


def test_families_are_given_or_read_or_neither():
    data, scores = simpson()
    read = generalization_study(data, scores, n_resamples=50)
    family_of = dict(zip(scores["model"], scores["family"], strict=True))
    alone = scores.drop(columns="family")
    assert (
        generalization_study(data, alone, families=family_of, n_resamples=50).to_dict()
        == read.to_dict()
    )
    by_loss = generalization_study(data, families=family_of, n_resamples=50)
    assert by_loss.association.linear.n_families == 4
    # Models that are not named are families of their own.
    some = generalization_study(
        data, alone, families={"org/m0": "x", "org/m1": "x"}, n_resamples=50
    )
    assert some.association.linear.n_families == 11
    none = generalization_study(data, scores, families={}, n_resamples=50)
    assert none.association.linear == linear_fit(none.table, "coupling", "score")
    assert (none.family_influence, none.within_families) == (None, {})
    with pytest.raises(
        ValueError, match="`families` names models that were not measured: gpt-5"
    ):
        generalization_study(data, alone, families={"gpt-5": "GPT"}, n_resamples=50)


def test_a_reversal_over_the_prompts_of_a_model_is_said():
    rng = np.random.default_rng(0)
    data = survey(n_models=4, n_prompts=14).assign_coords(
        task=("prompt", [*["arc"] * 5, *["mmlu"] * 7, "", "one"])
    )
    length = np.array([*range(5), *range(20, 27), 28, 29])
    data["n_pos"] = data["n_pos"].dims, np.broadcast_to(length, data["n_pos"].shape)
    # Coupling falls with length inside tasks, and rises from one to the other.
    x = (
        np.where(length < 10, 0.2, 0.6)
        - 0.01 * length
        + 0.02 * rng.standard_normal((4, 14))
    )
    data["mean_coupling"][:] = x[:, None, :, None]
    result = generalization_study(data, k=5, n_resamples=50)
    for i, correlation in enumerate(result.prompt_length.values()):
        inside = [
            stats.spearmanr(x[i, part], length[part]).statistic
            for part in (slice(0, 5), slice(5, 12))
        ]
        assert correlation.within_tasks == pytest.approx(
            (5 * inside[0] + 7 * inside[1]) / 12
        )
        assert correlation.within_tasks < 0 < correlation.rho
    remark = (
        "Simpson: ρ with prompt length has the other sign within "
        "tasks for org/m0, org/m1, org/m2, org/m3"
    )
    assert remark in result.remarks


def test_one_family_says_nothing_of_others():
    data, scores = simpson()
    result = generalization_study(data, scores.assign(family="Pythia"), n_resamples=50)
    assert (
        "all models are of one family, Pythia: nothing is known about others"
        in result.remarks
    )
    assert result.association.linear.n_families is None


def test_a_reversal_on_tasks_and_prompts_that_are_too_few_are_said():
    rng = np.random.default_rng(0)
    x = rng.random((10, 6))
    data = survey(x)
    up = pandas.DataFrame(
        {"model": data["model"].values, "score": x.mean(1), "arc": -x[:, :3].mean(1)}
    )
    result = generalization_study(data, up, k=5, n_resamples=100)
    attenuation = result.attenuation
    remarks = "\n".join(result.remarks)
    assert "Simpson: the slope has the other sign on the tasks arc" in remarks
    assert (
        f"6 prompts are too few: reliability of the models' means "
        f"{attenuation.reliability:.2f}, 0.9 needs"
    ) in remarks
    assert "is too wide to correct the slope for it" in remarks
    assert "all models, corrected" not in result.slopes.index
    assert (
        f"p ≤ {result.familywise.p:.3g} by permutation of the scores, over 6 tests"
        in remarks
    )
