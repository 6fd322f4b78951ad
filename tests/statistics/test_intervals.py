"""Intervals, permutations and rank correlations against statsmodels, scipy, closed
forms and loops.
"""

from itertools import permutations

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from tl_coupling.statistics import (
    block_permutations,
    cluster_robust,
    crossed_mean,
    orders_of_blocks,
    percentile_interval,
    prediction_interval,
    rank_correlation,
    rank_correlation_of_rows,
    simultaneous_band,
)

FAMILIES = np.array([0, 0, 0, 1, 1, 2, 3, 3])


def random_design(seed: int = 0, n_columns: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.column_stack(
        [np.ones(len(FAMILIES)), rng.standard_normal((len(FAMILIES), n_columns - 1))]
    )


def residuals(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y - design @ np.linalg.lstsq(design, y, rcond=None)[0]


# means over two axes


def test_a_crossed_mean_of_two_axes_is_that_of_each_entry():
    x = np.random.default_rng(4).standard_normal((5, 3, 2))
    x[1, 2] = np.nan
    mean, half_width = crossed_mean(x)
    for i in range(2):
        mean_of_entry, half_width_of_entry = crossed_mean(x[..., i])
        assert mean_of_entry.shape == half_width_of_entry.shape == ()
        assert mean_of_entry == pytest.approx(mean[i])
        assert half_width_of_entry == pytest.approx(half_width[i])


@pytest.mark.parametrize("n", [6, 2])
def test_a_crossed_mean_of_one_column_has_the_t_interval(n: int):
    x = np.random.default_rng(5).standard_normal((n, 1))
    mean, half_width = crossed_mean(x)
    low, high = stats.t.interval(0.95, n - 1, x.mean(), stats.sem(x[:, 0]))
    assert [mean - half_width, mean + half_width] == pytest.approx([low, high])


# cluster-robust errors


def test_families_of_one_are_hc2():
    design = random_design()
    y = np.random.default_rng(1).standard_normal(8)
    errors, _ = cluster_robust(design, residuals(design, y), np.arange(8))
    np.testing.assert_allclose(errors, sm.OLS(y, design).fit(cov_type="HC2").bse)


def test_errors_of_families_are_as_written_down():
    design = random_design(2)
    y = np.random.default_rng(3).standard_normal(8)
    e = residuals(design, y)
    bread = np.linalg.inv(design.T @ design)
    meat = np.zeros((3, 3))
    for family in range(4):
        own = family == FAMILIES
        values, vectors = np.linalg.eig(
            np.eye(own.sum()) - design[own] @ bread @ design[own].T
        )
        score = (
            design[own].T
            @ vectors
            @ np.diag(values**-0.5)
            @ np.linalg.inv(vectors)
            @ e[own]
        )
        meat += np.outer(score, score)
    errors, _ = cluster_robust(design, e, FAMILIES)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(bread @ meat @ bread)))


def test_variances_are_unbiased_and_have_their_degrees_of_freedom():
    # An element of V is a quadratic form eᵀQe of the errors, read off by polarisation:
    # its mean for independent errors is tr Q, and χ² of tr(Q)² / tr(Q²) degrees of
    # freedom, scaled, has its mean and variance.
    design = random_design()
    _, freedom = cluster_robust(design, np.ones(8), FAMILIES)

    def variance(e: np.ndarray) -> np.ndarray:
        return cluster_robust(design, residuals(design, e), FAMILIES)[0] ** 2

    units = np.eye(8)
    alone = [variance(unit) for unit in units]
    Q = np.array(
        [[(variance(a + b) - variance(a - b)) / 4 for b in units] for a in units]
    )
    np.testing.assert_allclose(sum(alone), np.diag(np.linalg.inv(design.T @ design)))
    for column in range(3):
        form = Q[:, :, column]
        assert freedom[column] == pytest.approx(
            np.trace(form) ** 2 / np.trace(form @ form)
        )


def test_a_mean_of_equal_families_has_the_error_of_their_means():
    families = np.repeat(np.arange(5), 3)
    y = np.random.default_rng(0).standard_normal(15) + families
    error, freedom = cluster_robust(np.ones((15, 1)), y - y.mean(), families)
    means = y.reshape(5, 3).mean(1)
    assert error[0] == pytest.approx(means.std(ddof=1) / np.sqrt(5))
    assert freedom[0] == pytest.approx(4)


# rank correlations


@pytest.mark.parametrize("n", [4, 5])
def test_perfect_order_has_the_p_of_its_two_orders(n):
    correlation = rank_correlation(np.arange(n) ** 3.0, np.arange(n) * 1.0)
    assert (correlation.rho, correlation.tau) == pytest.approx((1, 1))
    assert (correlation.p, correlation.tau_p) == pytest.approx(
        (2 / len(list(permutations(range(n)))),) * 2
    )


@pytest.mark.parametrize("ties", [False, True])
def test_exact_p_is_that_of_a_loop_over_all_orders(ties):
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((2, 6))
    if ties:
        x, y = np.round(x), np.round(2 * y)
    orders = [y[list(order)] for order in permutations(range(6))]
    correlation = rank_correlation(x, y)
    for statistic, p, of in (
        (correlation.rho, correlation.p, stats.spearmanr),
        (correlation.tau, correlation.tau_p, stats.kendalltau),
    ):
        assert statistic == pytest.approx(of(x, y).statistic)
        all_of_them = np.abs([of(x, order).statistic for order in orders])
        assert p == pytest.approx(np.mean(all_of_them >= abs(statistic) - 1e-12))


def test_kendall_is_exact_as_scipys():
    x, y = np.random.default_rng(5).standard_normal((2, 8))
    expected = stats.kendalltau(x, y, method="exact")
    correlation = rank_correlation(x, y)
    assert (correlation.tau, correlation.tau_p) == pytest.approx(
        (expected.statistic, expected.pvalue)
    )


def test_nothing_to_rank():
    with pytest.warns(stats.ConstantInputWarning):
        correlation = rank_correlation(np.ones(5), np.arange(5.0))
    assert np.isnan(
        [correlation.rho, correlation.p, correlation.tau, correlation.tau_p]
    ).all()


def test_rows_that_end_earlier():
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 4, (2, 3, 9)).astype(float)
    a[1, 6:] = b[1, 6:] = np.nan
    rho = rank_correlation_of_rows(a, b)
    expected = [
        stats.spearmanr(a[i, :n], b[i, :n]).statistic for i, n in enumerate((9, 6, 9))
    ]
    np.testing.assert_allclose(rho, expected)


# permutations


def test_families_stay_together_and_every_order_of_them_is_as_likely():
    drawn = block_permutations(
        np.array([0, 0, 1, 2, 1]), 16_000, np.random.default_rng(0)
    )
    orders, counts = np.unique(drawn, axis=0, return_counts=True)
    # Families {0, 1} and {2, 4} change places, and members inside each: 2 · 2 · 2;
    # model 3 is alone of its size.
    expected = {
        tuple(np.array([*pair[0], pair[1][0], 3, pair[1][1]]))
        for families in (((0, 1), (2, 4)), ((2, 4), (0, 1)))
        for pair in (
            (f, s) for f in permutations(families[0]) for s in permutations(families[1])
        )
    }
    assert set(map(tuple, orders.tolist())) == expected
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    "families", [[0, 0, 1, 2, 1, 3], [4, 4, 4, 2, 2, 2], [0, 1, 2, 3], [0, 0, 0, 1]]
)
def test_few_orders_are_all_taken(families):
    """Against all n! permutations: those that take families to families."""
    families = np.array(families)
    wanted = {
        order
        for order in permutations(range(len(families)))
        if is_of_blocks(families, families[list(order)])
    }
    rng = np.random.default_rng(0)
    orders, is_all = orders_of_blocks(families, len(wanted) - 1, rng)
    assert is_all
    assert list(orders[0]) == list(range(len(families)))
    assert len(orders) == len(wanted)
    assert set(map(tuple, orders)) == wanted
    orders, is_all = orders_of_blocks(families, len(wanted) - 2, rng)
    assert not is_all
    assert list(orders[0]) == list(range(len(families)))
    assert len(orders) == len(wanted) - 1


@pytest.mark.parametrize(("n_families", "size"), [(24, 1), (12, 6), (16, 6), (64, 2)])
def test_more_orders_than_a_machine_s_integer_holds_are_drawn(
    n_families: int, size: int
) -> None:
    """24! and 720¹² are no 64-bit integers, and 720¹⁶ and 2⁶⁴ are 0 in them."""
    families = np.repeat(np.arange(n_families), size)
    orders, is_all = orders_of_blocks(families, 99, np.random.default_rng(0))
    assert not is_all
    assert len(orders) == 100
    assert all(is_of_blocks(families, families[order]) for order in orders)


def is_of_blocks(families: np.ndarray, taken: np.ndarray) -> bool:
    """Say whether each family takes the values of one whole family."""
    sources = [set(taken[families == family]) for family in set(families)]
    return all(len(source) == 1 for source in sources) and len(
        set.union(*sources)
    ) == len(sources)


def test_without_families_all_orders_are_drawn():
    orders, counts = np.unique(
        block_permutations(np.arange(4), 24_000, np.random.default_rng(1)),
        axis=0,
        return_counts=True,
    )
    assert len(orders) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_families_with_correlated_members_do_not_make_rank_correlations_significant():
    families = np.repeat(np.arange(6), 4)
    correlations = []
    as_if_independent = []
    for seed in range(200):
        x, y = np.random.default_rng(seed).standard_normal((2, 6))[:, families]
        x, y = (
            values + 0.3 * np.random.default_rng((seed, i)).standard_normal(24)
            for i, values in enumerate((x, y))
        )
        correlations.append(
            rank_correlation(x, y, families=families, n_permutations=100, seed=seed)
        )
        as_if_independent.append(rank_correlation(x, y).p)
    rejected = np.array([[ranked.p, ranked.tau_p] for ranked in correlations]) <= 0.05
    # Three standard errors of 200 draws at .05.
    assert (rejected.mean(0) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)).all()
    assert np.mean(np.array(as_if_independent) <= 0.05) > 0.2


# percentiles


@pytest.mark.parametrize("n", [4, 12])
def test_the_interval_of_a_mean_is_the_t_interval(n):
    y = np.random.default_rng(n).standard_normal(n)
    # What a bootstrap of a mean tends to: normal, with the variance over n and not n −
    # 1.
    draws = y.mean() + y.std() / np.sqrt(n) * stats.norm.ppf(
        (np.arange(400_000) + 0.5) / 400_000
    )
    expected = stats.t.interval(0.95, n - 1, y.mean(), stats.sem(y))
    np.testing.assert_allclose(percentile_interval(draws, n), expected, rtol=1e-3)
    np.testing.assert_allclose(
        percentile_interval(draws), np.quantile(draws, [0.025, 0.975])
    )


@pytest.mark.long("simulates hundreds of curves")
@pytest.mark.parametrize(
    ("n", "least", "most"), [(20, 0.935, 0.975), (60, 0.93, 0.975)]
)
def test_a_band_holds_one_more_whole_curve_in_95_of_100(n, least, most):
    """Curves whose points go together, as depths of one product do."""
    rng = np.random.default_rng(0)
    n_held, n_held_by_pointwise, n_repeats = 0, 0, 1500
    for _ in range(n_repeats):
        steps = rng.normal(size=(n + 1, 25))
        curves = steps.cumsum(1) + 5
        curves[:, 0] = 3.0
        *draws, new = curves
        low, high = simultaneous_band(np.stack(draws))
        n_held += bool(((new >= low) & (new <= high)).all())
        low, high = prediction_interval(np.stack(draws))
        n_held_by_pointwise += bool(((new >= low) & (new <= high)).all())
    assert least <= n_held / n_repeats <= most
    assert n_held_by_pointwise / n_repeats < 0.9
