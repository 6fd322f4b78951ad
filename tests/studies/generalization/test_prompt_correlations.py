"""The prompts of one model by a property and by their coupling, against scipy."""

import numpy as np
import pytest
from scipy import stats

from tl_coupling.studies.generalization import prompt_relation


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
