"""Differences of means, against the textbook's formulas and statsmodels."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from tl_coupling.statistics import holm, paired_difference, unpaired_difference


@pytest.fixture
def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(7, 2, 3))
    return first, first + 0.3 + 0.5 * rng.normal(size=(7, 2, 3))


def test_a_paired_difference_is_the_textbooks(samples):
    first, second = samples
    difference = paired_difference(first, second)
    changes = second - first
    half = stats.t.ppf(0.975, 6) * changes.std(0, ddof=1) / np.sqrt(7)
    np.testing.assert_allclose(difference.estimate, changes.mean(0))
    np.testing.assert_allclose(difference.low, changes.mean(0) - half)
    np.testing.assert_allclose(difference.high, changes.mean(0) + half)
    np.testing.assert_array_equal(difference.degrees_of_freedom, 6)
    of_one = DescrStatsW(changes[:, 1, 2]).ttest_mean(0)
    assert difference.p[1, 2] == pytest.approx(of_one[1])


def test_an_unpaired_difference_is_welchs(samples):
    first, second = samples[0], samples[1][:4]
    difference = unpaired_difference(first, second)
    for i, j in np.ndindex(2, 3):
        pair = (i, j)
        theirs = CompareMeans(DescrStatsW(second[:, i, j]), DescrStatsW(first[:, i, j]))
        low, high = theirs.tconfint_diff(usevar="unequal")
        _, p, freedom = theirs.ttest_ind(usevar="unequal")
        assert difference.low[pair] == pytest.approx(low)
        assert difference.high[pair] == pytest.approx(high)
        assert difference.p[pair] == pytest.approx(p)
        assert difference.degrees_of_freedom[pair] == pytest.approx(freedom)


def test_of_one_sample_there_is_no_interval():
    with pytest.warns(UserWarning, match="the difference of single samples"):
        difference = paired_difference(np.ones((1, 2)), np.full((1, 2), 3.0))
    np.testing.assert_array_equal(difference.estimate, 2)
    for field in (difference.low, difference.high, difference.p):
        assert np.isnan(field).all()


@pytest.mark.parametrize("of", [paired_difference, unpaired_difference])
def test_nothing_differs_from_itself(of):
    same = np.ones((3, 2))
    difference = of(same, same)
    np.testing.assert_array_equal(difference.low, 0)
    np.testing.assert_array_equal(difference.high, 0)
    np.testing.assert_array_equal(difference.p, 1)


def test_holm_is_statsmodels_and_leaves_unknown_p_out():
    p = np.random.default_rng(1).uniform(size=20) ** 3
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1])
    with_unknown = np.insert(p, [3, 8], np.nan)
    corrected = holm(with_unknown)
    assert np.isnan(corrected[[3, 9]]).all()
    np.testing.assert_allclose(corrected[~np.isnan(corrected)], holm(p))
