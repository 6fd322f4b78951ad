"""Reliability against Cronbach's α and known noise; the corrected slope against the
slope without noise.
"""

import numpy as np
import pandas
import pytest
from scipy import stats

from tl_coupling.statistics.attenuation import Attenuation, attenuation
from tl_coupling.studies.generalization import linear_fit


def found(x: np.ndarray, y: np.ndarray) -> Attenuation:
    table = pandas.DataFrame(
        {"x": np.nanmean(x, 1), "y": y if y.ndim == 1 else np.nanmean(y, 1)}
    )
    return attenuation(x, y, linear_fit(table, "x", "y"), seed=0)


@pytest.mark.parametrize("n_prompts", [2, 5, 6])
def test_reliability_over_all_halves_is_cronbachs_alpha(n_prompts):
    rng = np.random.default_rng(n_prompts)
    x = (
        2 * rng.standard_normal((9, 1))
        + rng.standard_normal((9, n_prompts))
        + 5 * rng.standard_normal(n_prompts)
    )
    y = rng.standard_normal(9)
    alpha = (
        n_prompts
        / (n_prompts - 1)
        * (1 - x.var(0, ddof=1).sum() / x.sum(1).var(ddof=1))
    )
    result = found(x, y)
    assert result.reliability == pytest.approx(alpha)
    raw = np.polyfit(x.mean(1), y, 1)[0]
    assert result.slope == pytest.approx(raw / alpha)
    low, high = result.slope_interval
    assert low < result.slope < high
    # Spearman and Brown: what so many prompts give, and one less does not.
    one = alpha / (n_prompts - (n_prompts - 1) * alpha)
    reached = [
        m * one / (1 + (m - 1) * one) >= 0.9 - 1e-12
        for m in (result.n_wanted, result.n_wanted - 1)
    ]
    assert reached == [True, False]


def test_many_prompts_are_split_at_random():
    rng = np.random.default_rng(0)
    # Variance 1 of models and 4 / 16 of their means' noise: reliability .8.
    x = rng.standard_normal((3000, 1)) + 2 * rng.standard_normal((3000, 16))
    x[0, :3] = np.nan
    result = found(x, rng.standard_normal(3000))
    assert result.n_splits == 200
    assert result.reliability == pytest.approx(0.8, abs=0.02)
    assert result.n_wanted == pytest.approx(36, abs=4)


def test_noise_shared_with_a_loss_drops_out():
    rng = np.random.default_rng(1)
    truth = rng.standard_normal((4000, 1))
    noise = rng.standard_normal((4000, 4))
    x = truth + noise
    loss = 2 * truth - 3 * noise
    raw = np.polyfit(x.mean(1), loss.mean(1), 1)[0]
    # cov / var = (2 − 3 / 4) / (1 + 1 / 4).
    assert raw == pytest.approx(1, abs=0.1)
    assert found(x, loss).slope == pytest.approx(2, abs=0.1)


def test_the_interval_covers_the_true_slope_at_a_reliability_of_a_half():
    covered = []
    slopes = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        truth = rng.standard_normal(36)
        x = truth[:, None] + np.sqrt(5) * rng.standard_normal((36, 5))
        result = found(x, truth + 0.3 * rng.standard_normal(36))
        if np.isfinite(result.slope):
            low, high = result.slope_interval
            covered.append(low <= 1 <= high)
            slopes.append(result.slope)
    # With a limit of .5 on the estimate, and its error ignored: 89 slopes, .70, .84.
    assert len(slopes) > 130
    assert 0.92 < np.mean(covered) < 0.99
    assert np.median(slopes) > 0.9


def test_the_ends_are_where_the_ratio_is_as_far_off_as_its_error():
    rng = np.random.default_rng(5)
    x = 2 * rng.standard_normal((12, 1)) + rng.standard_normal((12, 4))
    y = x.mean(1) + rng.standard_normal(12)
    line = linear_fit(pandas.DataFrame({"x": x.mean(1), "y": y}), "x", "y")
    result = attenuation(x, y, line, seed=0)
    t = stats.t.ppf(0.975, line.freedom)
    error = (line.slope_interval[1] - line.slope) / t
    noise = (1 - result.reliability) * np.sqrt(2 / 11 + 2 / 33)
    for end in result.slope_interval:
        distance = line.slope - end * result.reliability
        assert abs(distance) == pytest.approx(t * np.hypot(error, end * noise))


def test_the_interval_of_the_reliability_covers_it():
    covered = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        # Variance 1 of models and 4 / 4 of their means' noise: reliability .5.
        x = rng.standard_normal((10, 1)) + 2 * rng.standard_normal((10, 4))
        low, high = found(x, rng.standard_normal(10)).reliability_interval
        covered.append(low <= 0.5 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)


def test_noise_alone_is_not_corrected():
    x = np.random.default_rng(3).standard_normal((12, 4))
    y = np.arange(12.0)
    result = found(x, y)
    assert result.reliability_interval[0] < 0
    assert np.isnan([result.slope, *result.slope_interval]).all()


def test_one_prompt_has_no_halves():
    with pytest.raises(ValueError, match="at least two prompts, got 1"):
        found(np.arange(5.0)[:, None], np.array([1.0, 3, 2, 5, 4]))
    lacking = np.array([[1, np.nan], [2.0, 3], [4, 7], [5, 5]])
    with pytest.raises(ValueError, match="measured on both halves"):
        found(lacking, np.array([1.0, 3, 2, 5]))
