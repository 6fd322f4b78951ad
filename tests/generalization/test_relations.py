"""Points with what is said of them, against scipy on the same points."""

import numpy as np
import pandas
import pytest
from scipy import stats

from tl_coupling.generalization import (
    covariate_lines,
    linear_fit,
    paper_table1,
    prompt_relation,
)


def test_each_covariate_has_its_points_and_its_line():
    table = paper_table1()
    lines = {line.covariate: line for line in covariate_lines(table, "score")}
    assert list(lines) == [
        "log10(params_billion)",
        "n_layers",
        "d_model",
        "log10(training_tokens)",
    ]
    size = lines["log10(params_billion)"]
    np.testing.assert_array_equal(size.x, np.log10(table["params_billion"]))
    np.testing.assert_array_equal(size.y, table["score"])
    assert size.fit == linear_fit(table, "log10(params_billion)", "score")


def test_a_covariate_that_cannot_be_fitted_is_left_out_unless_it_was_asked_for():
    of_one_depth = paper_table1().query("n_layers == 32")
    usual = [line.covariate for line in covariate_lines(of_one_depth, "score")]
    assert "n_layers" not in usual
    assert "d_model" in usual
    with pytest.raises(ValueError, match="'n_layers' is the same for all"):
        covariate_lines(of_one_depth, "score", ["n_layers"])


def test_what_is_explained_is_no_covariate():
    table = pandas.DataFrame({"n_layers": [1, 2, 4, 8], "d_model": [8, 16, 16, 64]})
    assert [line.covariate for line in covariate_lines(table, "n_layers")] == [
        "d_model"
    ]


def test_prompts_within_their_tasks_are_less_the_mean_of_their_task():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12))
    x[3] = y[7] = np.nan
    is_sum = np.arange(12) < 6
    relation = prompt_relation(x, y, {"sums": is_sum, "riddles": ~is_sum})
    assert relation.n_prompts == 10
    is_known = np.isfinite(x) & np.isfinite(y)
    expected = stats.spearmanr(x[is_known], y[is_known])
    assert relation.pooled.correlation is not None
    assert relation.pooled.correlation.rho == pytest.approx(expected.statistic)
    sums = x[is_sum & is_known]
    assert relation.within_tasks is not None
    np.testing.assert_array_equal(relation.within_tasks.x["sums"], sums - sums.mean())
    assert relation.within_tasks.correlation is not None
    assert relation.within_tasks.correlation.n == 10


def test_prompts_without_tasks_stand_together():
    x, y = np.arange(2.0 * 5).reshape(2, 5)
    relation = prompt_relation(x, y, {})
    assert relation.within_tasks is None
    np.testing.assert_array_equal(relation.pooled.x[""], x)


def test_prompts_that_do_not_differ_or_are_too_few_have_no_correlation():
    y = np.arange(5.0)
    assert prompt_relation(np.full(5, 7.0), y, {}).pooled.correlation is None
    assert prompt_relation(y[:2], y[:2], {}).pooled.correlation is None
