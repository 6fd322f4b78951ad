"""Slopes with fixed effects, against statsmodels."""

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from statsmodels.stats.outliers_influence import variance_inflation_factor

from slopes import design_of


@pytest.fixture(scope="module")
def table() -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    rows = pandas.DataFrame({"group": np.repeat(list("abcd"), 6), "kind": [0, 1] * 12})
    effect = rows["group"].map(dict(zip("abcd", (0, 5, -3, 9), strict=True)))
    rows["z"] = rng.standard_normal(24) + effect
    rows["x"] = 0.8 * rows["z"] + 0.5 * rng.standard_normal(24)
    rows["y"] = 2 * rows["x"] - rows["z"] + effect + 0.3 * rng.standard_normal(24)
    return rows


def test_a_slope_is_least_squares_with_a_constant_for_each_value(table):
    slope = design_of(table, "x", ["z"], ["group", "kind"]).slope(table["y"].to_numpy())
    fit = smf.ols("y ~ x + z + C(group) + C(kind)", table).fit(cov_type="HC2")
    assert slope.estimate == pytest.approx(fit.params["x"])
    # Rows that are no clusters: CR2 is HC2.
    assert slope.error == pytest.approx(fit.bse["x"])
    low, high = slope.interval(1)
    assert (low + high) / 2 == pytest.approx(fit.params["x"])
    wide = slope.interval(20)
    assert wide[0] < low < high < wide[1]


def test_clusters_of_one_row_are_rows_and_larger_ones_are_not(table):
    y = table["y"].to_numpy()
    by_row = design_of(table.assign(row=range(24)), "x", ["z"], ["group"], "row")
    assert by_row.slope(y) == design_of(table, "x", ["z"], ["group"]).slope(y)
    by_group = design_of(table, "x", ["z"], ["group"], "group").slope(y)
    assert by_group.freedom < by_row.slope(y).freedom


def test_the_inflation_is_that_of_covariates_within_groups(table):
    columns = ["x", "z"]
    within = table[columns] - table.groupby("group")[columns].transform("mean")
    expected = variance_inflation_factor(within.to_numpy(), 0)
    assert design_of(table, "x", ["z"], ["group"]).vif == pytest.approx(expected)
    assert design_of(table, "x", fixed=["group"]).vif == pytest.approx(1)


def test_x_that_does_not_vary_within_groups_has_no_slope(table):
    effect = table["group"].map(ord)
    with pytest.raises(ValueError, match="too few rows to see a slope of 'effect': 24"):
        design_of(table.assign(effect=effect), "effect", fixed=["group"])
