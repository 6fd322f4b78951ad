"""Fits and regressions against certified and published results, closed forms and
numpy.
"""

import numpy as np
import pandas
import pytest
from scipy import stats
from statsmodels.datasets import longley, stackloss

from tl_coupling.statistics import rank_correlation
from tl_coupling.statistics.fits import covariate_fits, exponential_fit, subset_fits
from tl_coupling.studies.generalization import linear_fit, paper_table1
from tl_coupling.studies.generalization.leaving_out import leave_one_out
from unequal_variance import line_of_unequal_variance, of_unequal_variance

# Anscombe, Graphs in Statistical Analysis, The American Statistician 27 (1973).
X = [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5]
ANSCOMBE = {
    "I": (X, [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68]),
    "II": (X, [9.14, 8.14, 8.74, 8.77, 9.26, 8.10, 6.13, 3.10, 9.13, 7.26, 4.74]),
    "III": (X, [7.46, 6.77, 12.74, 7.11, 7.81, 8.84, 6.08, 5.39, 8.15, 6.42, 5.73]),
    "IV": (
        [8, 8, 8, 8, 8, 8, 8, 19, 8, 8, 8],
        [6.58, 5.76, 7.71, 8.84, 8.47, 7.04, 5.25, 12.50, 5.56, 7.91, 6.89],
    ),
}
# NIST StRD, Longley: certified coefficients and their standard deviations.
LONGLEY = {
    "GNPDEFL": (15.0618722713733, 84.9149257747669),
    "GNP": (-0.0358191792925910, 0.0334910077722432),
    "UNEMP": (-2.02022980381683, 0.488399681651699),
    "ARMED": (-1.03322686717359, 0.214274163161675),
    "POP": (-0.0511041056535807, 0.226073200069370),
    "YEAR": (1829.15146461355, 455.478499142212),
}
# car::vif of the same regression.
LONGLEY_VIF = {
    "GNPDEFL": 135.53244,
    "GNP": 1788.51348,
    "UNEMP": 33.61889,
    "ARMED": 3.58893,
    "POP": 399.15102,
    "YEAR": 758.98060,
}


def anscombe(which: str) -> pandas.DataFrame:
    x, y = ANSCOMBE[which]
    return pandas.DataFrame({"x": x, "y": y})


def random_table(n=12, seed=0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    size = rng.standard_normal(n)
    coupling = 0.5 * size + rng.standard_normal(n)
    score = 40 + 3 * coupling + 2 * size + rng.standard_normal(n)
    return pandas.DataFrame(
        {"coupling": coupling, "size": 1e9 * (5 + size), "score": score}
    )


# linear


@pytest.mark.parametrize("which", ANSCOMBE)
def test_anscombes_quartet(which):
    fit = linear_fit(anscombe(which), "x", "y", equal_variance=True)
    assert fit.slope == pytest.approx(0.500, abs=5e-4)
    assert fit.intercept == pytest.approx(3.00, abs=5e-3)
    assert fit.r_squared == pytest.approx(0.667, abs=1e-3)
    assert fit.p == pytest.approx(0.00217, abs=2e-5)
    # The published standard error of the slope, 0.118, and the t table's 2.262 for 9
    # degrees of freedom.
    assert fit.slope_interval == pytest.approx(
        (0.5 - 2.262 * 0.118, 0.5 + 2.262 * 0.118), abs=2e-3
    )
    assert fit.intercept_interval == pytest.approx(
        (3.0 - 2.262 * 1.125, 3.0 + 2.262 * 1.125), abs=5e-3
    )
    assert fit.n == 11


def test_a_line_by_hand():
    # x̄ = 2, ȳ = 3: Sxx = 2, Sxy = 3, Syy = 6; R² = 9/12; t = 1.5 / (√1.5 / √2) = √3
    # with one degree of freedom: p = 1/3.
    fit = linear_fit(pandas.DataFrame({"x": [1, 2, 3], "y": [1, 4, 4]}), "x", "y")
    assert (fit.slope, fit.intercept, fit.r_squared) == pytest.approx((1.5, 0, 0.75))
    assert fit.p == pytest.approx(1 / 3)


def test_correlation_is_pearsons_and_partial_with_controls():
    table = random_table().assign(score=lambda rows: -rows["score"])
    fit = linear_fit(table, "coupling", "score")
    expected = stats.pearsonr(table["coupling"], table["score"]).statistic
    assert fit.correlation == pytest.approx(expected)
    # Of what the control leaves of both.
    left = {
        name: table[name]
        - np.polyval(np.polyfit(table["size"], table[name], 1), table["size"])
        for name in ("coupling", "score")
    }
    partial = linear_fit(table, "coupling", "score", controls=["size"])
    expected = stats.pearsonr(left["coupling"], left["score"]).statistic
    assert partial.correlation == pytest.approx(expected)


@pytest.mark.parametrize("controls", [[], ["size"]])
def test_errors_are_hc2_with_bell_and_mccaffreys_degrees_of_freedom(controls):
    table = random_table()
    names = ["coupling", *controls]
    centred = table[controls] - table[controls].mean()
    design = np.column_stack([np.ones(12), table["coupling"], centred])
    coefficients, errors, freedom = of_unequal_variance(
        design, table["score"].to_numpy()
    )
    fit = linear_fit(table, names[0], "score", controls=controls)
    half = stats.t.ppf(0.975, freedom) * errors
    (intercept, slope), half = coefficients[:2], half[:2]
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept))
    assert fit.intercept_interval == pytest.approx(
        (intercept - half[0], intercept + half[0])
    )
    assert fit.slope_interval == pytest.approx((slope - half[1], slope + half[1]))
    assert fit.freedom == pytest.approx(freedom[1])
    assert fit.p == pytest.approx(2 * stats.t.sf(abs(slope) / errors[1], freedom[1]))
    assert not fit.has_equal_variance


def test_equal_sizes_of_two_groups_are_welchs_test():
    """Of two groups of one size HC2 is Welch's error; the degrees of freedom are those
    of equal variance, 2 (n − 1).
    """
    rng = np.random.default_rng(0)
    groups = rng.standard_normal((2, 7)) * [[1], [5]] + [[0], [4]]
    table = pandas.DataFrame({"group": np.repeat([0, 1], 7), "y": groups.ravel()})
    fit = linear_fit(table, "group", "y")
    welch = stats.ttest_ind(groups[1], groups[0], equal_var=False)
    assert fit.freedom == pytest.approx(12)
    assert fit.p == pytest.approx(2 * stats.t.sf(abs(welch.statistic), 12))


def test_a_row_that_is_fitted_whatever_it_is_has_errors_of_equal_variance():
    """Anscombe's fourth: its slope is that of one point, whose own variance no residual
    shows.
    """
    fit = linear_fit(anscombe("IV"), "x", "y")
    assert fit == linear_fit(anscombe("IV"), "x", "y", equal_variance=True)
    assert fit.has_equal_variance
    assert fit.freedom == 9


@pytest.mark.long("simulates hundreds of studies")
@pytest.mark.parametrize("n", [6, 12, 24])
def test_intervals_hold_where_the_variance_grows_with_x(n):
    """Scores at a floor vary less: variance .2 + x² of the errors. Textbook intervals
    hold in .80 to .86 of the studies.
    """
    is_covered = {False: [], True: []}
    for seed in range(600):
        rng = np.random.default_rng((seed, n))
        x = rng.standard_normal(n)
        y = x + np.sqrt(0.2 + x**2) * rng.standard_normal(n)
        table = pandas.DataFrame({"x": x, "y": y})
        for equal_variance, covered in is_covered.items():
            fit = linear_fit(table, "x", "y", equal_variance=equal_variance)
            low, high = fit.slope_interval
            covered.append(low <= 1 <= high)
    assert np.mean(is_covered[False]) >= 0.91
    assert np.mean(is_covered[True]) <= 0.88


def test_a_large_offset_of_x_does_not_matter():
    table = random_table()
    shifted = table.assign(coupling=table["coupling"] + 1e7)
    fit = linear_fit(shifted, "coupling", "score")
    expected = linear_fit(table, "coupling", "score")
    assert fit.slope_interval == pytest.approx(expected.slope_interval, rel=1e-5)


def test_rows_that_lack_a_value_are_left_out_and_expressions_are_columns():
    table = pandas.DataFrame({"x": [1, 10, 100, 1000, 7], "y": [1.0, 3, 5, 7, np.nan]})
    fit = linear_fit(table, "log10(x)", "y")
    assert (fit.slope, fit.intercept, fit.n) == pytest.approx((2, 1, 4))


@pytest.mark.parametrize(
    ("table", "x", "message"),
    [
        ({"x": [1, 2], "y": [1, 2]}, "x", "at least 3 models, got 2"),
        ({"x": [2, 2, 2], "y": [1, 2, 3]}, "x", "'x' is the same for all 3 models, 2"),
        ({"x": [1, 2, 3], "y": [5.0, 5, 5]}, "x", "'y' is the same"),
        (
            {"x": [1, 2, 3], "y": [1, 2, 3]},
            "z",
            "no column or expression 'z'; the columns are x, y",
        ),
        ({"x": [1, 2, 3], "y": [1, 2, 3]}, "@table", "no column or expression"),
        ({"x": ["a", "b", "c"], "y": [1, 2, 3]}, "x", "'x' does not hold numbers"),
        ({"x": [1, np.inf, 3, 4], "y": [1, 2, 3, 4]}, "x", "infinite values"),
        (
            {"x": [1, 2, 3, 4], "y": [1, 2e300, 3, 4]},
            "x",
            r"'y' has a value of 2e\+300 in size",
        ),
        (
            {"x": [1e-200, 0, 3e-200, 4e-200], "y": [1, 2, 3, 4]},
            "x",
            "'x' has no value above 4e-200 in size",
        ),
    ],
)
@pytest.mark.parametrize("fit", [linear_fit, exponential_fit])
def test_nothing_to_fit(fit, table, x, message):
    with pytest.raises(ValueError, match=message):
        fit(pandas.DataFrame(table), x, "y")


def test_statsmodels_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "tl-coupling\[survey\]"'):
        linear_fit(anscombe("I"), "x", "y")


# exponential


@pytest.mark.parametrize(("a", "b"), [(2.0, 3.0), (50.0, -1.5), (-3.0, 0.7)])
def test_an_exponential_is_recovered(a, b):
    x = np.linspace(0.1, 0.9, 7)
    fit = exponential_fit(pandas.DataFrame({"x": x, "y": a * np.exp(b * x)}), "x", "y")
    assert (fit.a, fit.b, fit.r_squared) == pytest.approx((a, b, 1.0), rel=1e-6)
    assert fit.p < 1e-12


def test_the_exponential_fit_is_least_squares_on_y():
    rng = np.random.default_rng(1)
    x = rng.random(15)
    y = 20 * np.exp(1.2 * x) + 4 * rng.standard_normal(15)
    table = pandas.DataFrame({"x": x, "y": y})
    fit = exponential_fit(table, "x", "y", equal_variance=True)
    design = np.column_stack([np.exp(fit.b * x), fit.a * x * np.exp(fit.b * x)])
    residuals = y - fit.a * np.exp(fit.b * x)
    # Stationary: residuals are orthogonal to both derivatives.
    np.testing.assert_allclose(
        design.T @ residuals,
        0,
        atol=1e-4 * np.linalg.norm(design) * np.linalg.norm(residuals),
    )
    error = np.sqrt(np.linalg.inv(design.T @ design)[1, 1] * residuals @ residuals / 13)
    assert fit.p == pytest.approx(2 * stats.t.sf(fit.b / error, 13), rel=1e-3)
    assert fit.b_interval == pytest.approx(
        (fit.b - 2.1604 * error, fit.b + 2.1604 * error), rel=1e-3
    )
    assert fit.r_squared == pytest.approx(
        1 - (residuals**2).sum() / ((y - y.mean()) ** 2).sum()
    )
    # As if the curve were straight there.
    _, errors, freedom = of_unequal_variance(design, design @ [0, fit.b] + residuals)
    half = stats.t.ppf(0.975, freedom[1]) * errors[1]
    found = exponential_fit(table, "x", "y")
    assert found.b_interval == pytest.approx((fit.b - half, fit.b + half), rel=1e-3)


# ranks


def test_spearman_by_its_rank_formula():
    x = np.array([3.0, 1, 4, 15, 9, 2, 6])
    y = np.array([2.0, 7, 1, 8, 28, 18, 4])
    # Ranks of x 3 1 4 7 6 2 5; of y 2 4 1 5 7 6 3.
    d = np.array([1, -3, 3, 2, -1, -4, 2])
    rho = 1 - 6 * (d**2).sum() / (7 * 48)
    assert rank_correlation(x, y).rho == pytest.approx(rho)
    # Above nine pairs p is that of the t approximation.
    twice = rank_correlation(np.append(x, 100 + x), np.append(y, 100 + y))
    t = twice.rho * np.sqrt(12 / (1 - twice.rho**2))
    assert twice.p == pytest.approx(2 * stats.t.sf(abs(t), 12))


# subsets


def test_subsets_by_query_and_by_mask():
    table = random_table()
    fits = subset_fits(
        table,
        "coupling",
        "score",
        subsets={
            "above": "score > 40",
            "mask": (table["score"] > 40).to_numpy(),
            "all": [True] * 12,
        },
    )
    above = table[table["score"] > 40]
    slope, _, _, p = line_of_unequal_variance(above["coupling"], above["score"])
    assert fits["above"] == fits["mask"]
    assert (fits["above"].slope, fits["above"].p) == pytest.approx((slope, p))
    assert fits["all"] == linear_fit(table, "coupling", "score")


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ("score > 1000", "subset 'odd': .* needs at least 3 models, got 0"),
        ("points > 3", "subset 'odd': no column or expression 'points > 3'"),
        ("score + 1", "subset 'odd': it must be true or false for each of 12 rows"),
        ([True], "subset 'odd': it must be true or false"),
        ("score >", "subset 'odd': no column or expression"),
    ],
)
def test_subsets_that_are_none(subset, message):
    with pytest.raises(ValueError, match=message):
        subset_fits(random_table(), "coupling", "score", subsets={"odd": subset})


# partial regression


@pytest.mark.parametrize("name", LONGLEY)
def test_longley_as_certified(name):
    table = longley.load_pandas().data
    coefficient, deviation = LONGLEY[name]
    fit = linear_fit(
        table,
        name,
        "TOTEMP",
        controls=[other for other in LONGLEY if other != name],
        equal_variance=True,
    )
    t = coefficient / deviation
    assert fit.slope == pytest.approx(coefficient, rel=1e-8)
    assert fit.slope_interval == pytest.approx(
        (
            coefficient - 2.2621571628 * deviation,
            coefficient + 2.2621571628 * deviation,
        ),
        rel=1e-7,
    )
    assert fit.r_squared == pytest.approx(t**2 / (t**2 + 9), rel=1e-7)
    assert fit.p == pytest.approx(2 * stats.t.sf(abs(t), 9), rel=1e-6)
    assert fit.vif == pytest.approx(LONGLEY_VIF[name], rel=1e-5)


def test_stackloss_as_published():
    # The printed summary of R's lm(stack.loss ~ .) with its standard errors.
    published = {
        "AIRFLOW": (0.7156, 5.8e-05),
        "WATERTEMP": (1.2953, 0.00263),
        "ACIDCONC": (-0.1521, 0.34405),
    }
    table = stackloss.load_pandas().data
    for name, (coefficient, p) in published.items():
        fit = linear_fit(
            table,
            name,
            "STACKLOSS",
            controls=[other for other in published if other != name],
            equal_variance=True,
        )
        assert fit.slope == pytest.approx(coefficient, abs=5e-5)
        assert fit.p == pytest.approx(p, rel=5e-3)


def test_a_fit_with_controls_is_frisch_waugh_lovell():
    table = random_table()
    controls = np.column_stack([np.ones(12), table["size"] / 1e9])

    def rest(name):
        values = table[name].to_numpy()
        return values - controls @ np.linalg.lstsq(controls, values, rcond=None)[0]

    x = rest("coupling")
    y = rest("score")
    fit = linear_fit(table, "coupling", "score", controls=["size"])
    assert fit.slope == pytest.approx(x @ y / (x @ x))
    assert fit.r_squared == pytest.approx((x @ y) ** 2 / (x @ x) / (y @ y))
    r = np.corrcoef(table["coupling"], table["size"])[0, 1]
    assert fit.vif == pytest.approx(1 / (1 - r**2))
    # Eigenvalues of a 2 × 2 correlation matrix are 1 ± r.
    assert fit.condition_number == pytest.approx(np.sqrt((1 + abs(r)) / (1 - abs(r))))


@pytest.mark.parametrize(
    ("table", "controls", "message"),
    [
        (
            {"a": [1, 2, 4], "b": [1, 3, 2], "y": [1, 2, 2]},
            ["b"],
            "a fit of 'y' on a, b needs at least 4 models, got 3",
        ),
        (
            {"a": [1, 2, 4, 7, 1], "b": [2, 4, 8, 14, 2], "y": [1, 2, 2, 5, 6]},
            ["b"],
            "a, b determine each other",
        ),
        (
            {"a": [1, 2, 4, 7, 1], "b": [3] * 5, "y": [1, 2, 2, 5, 6]},
            ["b"],
            "'b' is the same for all 5 models",
        ),
        (
            {"a": [1, 2, 4, 7, 1], "y": [1, 2, 2, 5, 6]},
            ["a"],
            "must be different columns",
        ),
    ],
)
def test_controls_that_cannot_be_held_fixed(table, controls, message):
    with pytest.raises(ValueError, match=message):
        linear_fit(pandas.DataFrame(table), "a", "y", controls=controls)


def test_covariates_are_compared_on_the_same_models():
    table = random_table().assign(tokens=lambda t: t["score"] ** 2)
    table.loc[:3, "tokens"] = np.nan
    fits = covariate_fits(table, "coupling", "score", covariates=["size", "tokens"])
    last_rows = table[4:]
    assert fits.loc["tokens", "n"] == 8
    assert fits.loc["tokens", "r_squared"] == pytest.approx(
        stats.linregress(last_rows["tokens"], last_rows["score"]).rvalue ** 2
    )
    assert fits.loc["tokens", "x_r_squared"] == pytest.approx(
        stats.linregress(last_rows["coupling"], last_rows["score"]).rvalue ** 2
    )
    *_, p = line_of_unequal_variance(table["coupling"], table["score"])
    assert fits.loc["size", "x_p"] == pytest.approx(p)


# leave one out


def test_anscombes_third_hangs_on_one_point():
    influence = leave_one_out(
        anscombe("III").assign(model=[f"m{x}" for x in X]), "x", "y"
    )
    assert influence.most_influential == "m13"
    # The other ten lie on y = 4.00 + 0.346 x.
    assert influence.table.loc["m13", "slope"] == pytest.approx(0.345, abs=1e-3)
    assert influence.table.loc["m13", "r_squared"] > 0.9999
    assert influence.table["cooks_distance"].idxmax() == "m13"
    assert influence.table.loc["m13", "cooks_distance"] == pytest.approx(1.39, abs=0.01)


@pytest.mark.filterwarnings("ignore:The design matrix is rank-deficient")
def test_anscombes_fourth_is_one_point():
    with pytest.raises(ValueError, match="without '7': 'x' is the same"):
        leave_one_out(anscombe("IV"), "x", "y")


def test_one_planted_model_carries_the_claim():
    rng = np.random.default_rng(3)
    x = np.append(rng.random(9), 6.0)
    y = np.append(-0.2 * x[:9] + 0.3 * rng.standard_normal(9), 6.0)
    table = pandas.DataFrame({"model": [*"abcdefghi", "planted"], "x": x, "y": y})
    influence = leave_one_out(table, "x", "y")
    assert influence.most_influential == "planted"
    assert influence.sign_changes == ("planted",)
    # One point is no evidence, whatever a textbook's p says.
    assert influence.not_significant == ()
    assert linear_fit(table, "x", "y").p > 0.05
    assert linear_fit(table, "x", "y", equal_variance=True).p < 1e-4
    assert influence.r_squared_range[0] == influence.table.loc["planted", "r_squared"]


def test_influence_by_hand():
    table = random_table()
    x, y = (table[name].to_numpy() for name in ("coupling", "score"))
    influence = leave_one_out(table, "coupling", "score").table
    design = np.column_stack([np.ones(12), x])
    hat = design @ np.linalg.inv(design.T @ design) @ design.T
    leverage = np.diag(hat)
    residuals = y - hat @ y
    variance = residuals @ residuals / 10
    np.testing.assert_allclose(
        influence["cooks_distance"],
        residuals**2 * leverage / (2 * variance * (1 - leverage) ** 2),
    )
    slope = stats.linregress(x, y).slope
    for i in range(12):
        is_other = np.arange(12) != i
        fit = stats.linregress(x[is_other], y[is_other])
        spread = fit.stderr * np.sqrt(
            ((x[is_other] - x[is_other].mean()) ** 2).sum()
            / ((x - x.mean()) ** 2).sum()
        )
        assert influence["dfbetas"].iloc[i] == pytest.approx(
            (slope - fit.slope) / spread
        )
        assert influence["r_squared"].iloc[i] == pytest.approx(fit.rvalue**2)
        *_, p = line_of_unequal_variance(x[is_other], y[is_other])
        assert influence["p"].iloc[i] == pytest.approx(p)


def test_leaving_out_wants_four_models():
    with pytest.raises(ValueError, match="at least four, got 3"):
        leave_one_out(pandas.DataFrame({"x": [1, 2, 3], "y": [1, 2, 4]}), "x", "y")


# the paper's table


def test_table_1():
    table = paper_table1()
    assert len(table) == 42
    lacking = table[table["score"].isna()]
    assert set(zip(lacking["family"], lacking["params_billion"], strict=True)) == {
        ("Llama-3", 70),
        ("Falcon", 7),
        ("Phi", 1),
        ("Pythia", 2.8),
        ("Pythia", 1.4),
        ("Pythia", 1),
    }
    assert not table.duplicated(["family", "variant", "params_billion"]).any()


@pytest.mark.parametrize(
    "column", ["params_billion", "n_layers", "d_model", "training_tokens"]
)
def test_sizes_of_table_1_against_its_scores(column):
    table = paper_table1()
    complete = table[[column, "score"]].dropna()
    by_numpy = np.corrcoef(complete[column], complete["score"])[0, 1] ** 2
    fit = linear_fit(table, column, "score")
    assert fit.r_squared == pytest.approx(by_numpy)
    assert fit.n == len(complete)
    # The paper: each of them says less about the score than coupling does.
    assert fit.r_squared < 0.2


@pytest.mark.parametrize(
    ("r_squared", "p", "n"), [(0.75, 1.56e-6, 19), (0.55, 0.023, 9), (0.39, 0.023, 13)]
)
def test_the_papers_r_squared_and_p_agree_for_a_number_of_models(r_squared, p, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n)
    x = (x - x.mean()) / x.std()
    noise = rng.standard_normal(n)
    noise -= noise.mean() + x * (noise @ x) / n
    y = np.sqrt(r_squared) * x + np.sqrt(1 - r_squared) * noise / noise.std()
    table = pandas.DataFrame({"x": x, "y": y})
    fit = linear_fit(table, "x", "y", equal_variance=True)
    assert fit.r_squared == pytest.approx(r_squared)
    # R² is printed with two digits.
    assert fit.p == pytest.approx(p, rel=0.07)
