"""The level of every interval, intervals of means, and rank correlations: one place for what is meant by them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

Interval = tuple[float, float]

LEVEL = 0.95
_UPPER = (1 + LEVEL) / 2


def crossed_mean(x: Float[np.ndarray, "rows cols ..."]) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Mean over the first two axes, both samples (seeds and prompts), and half its t interval.

    Squared standard error: `s²_rows / n_rows + s²_cols / n_cols`, of the means of rows and of columns. Degrees of
    freedom: Welch and Satterthwaite's. Interaction of rows and columns counts twice, so intervals are rather too wide.
    NaN is left out; an axis of one is not a sample, and with none the interval is NaN.
    """
    masked = np.ma.masked_invalid(x)
    squares, by_freedom, is_sampled = np.zeros((3, *x.shape[2:]))
    for axis in (0, 1):
        means = masked.mean(1 - axis)
        n = means.count(0)
        square = (means.var(0, ddof=1) / np.maximum(n, 1)).filled(0) if len(means) > 1 else np.zeros(x.shape[2:])
        squares, by_freedom = squares + square, by_freedom + square**2 / np.maximum(n - 1, 1)
        is_sampled = is_sampled + (n > 1)
    freedom = np.divide(squares**2, by_freedom, out=np.ones(x.shape[2:]), where=squares > 0)
    half = stats.t.ppf(_UPPER, freedom) * np.sqrt(squares)
    return np.ma.filled(masked.mean((0, 1)), np.nan), np.where(is_sampled > 0, half, np.nan)


def rank_correlation_of_rows(
    a: Float[np.ndarray, "n_samples n"], b: Float[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, " n_samples"]:
    """Spearman's ρ of each row: Pearson's r of the ranks, ties at their mean rank; NaN where it is undefined."""
    if a.shape[1] < 3:
        return np.full(len(a), np.nan)
    a, b = (stats.rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (a, b))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ of `n` pairs, and its two-sided p by scipy's t approximation: rough below ten pairs."""

    n: int
    rho: float
    p: float


def rank_correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> RankCorrelation:
    """Spearman's ρ of paired values, ties at their mean rank; NaN where it is undefined."""
    return RankCorrelation(len(x), *map(float, stats.spearmanr(x, y)))


def t_interval(estimate: float, error: float, freedom: int) -> Interval:
    """`estimate ± t · error`, with `t` of that many degrees of freedom."""
    half = float(stats.t.ppf(_UPPER, freedom)) * error
    return estimate - half, estimate + half


def percentile_interval(draws: Float[np.ndarray, "draws ..."]) -> Float[np.ndarray, "2 ..."]:
    """Lower and upper end of the interval that holds the middle 95 % of the draws (first axis)."""
    return np.quantile(draws, [(1 - LEVEL) / 2, _UPPER], axis=0)


def resamples(n: int, n_resamples: int, rng: np.random.Generator) -> Iterator[Int[np.ndarray, "draws n"]]:
    """Indices of bootstrap samples, n of n with replacement, some hundred samples at a time to bound the memory."""
    for start in range(0, n_resamples, 500):
        yield rng.integers(n, size=(min(500, n_resamples - start), n))


def is_constant(values: Float[np.ndarray, "... n"]) -> Bool[np.ndarray, "..."] | np.bool_:
    """Whether values along the last axis differ by no more than rounding."""
    return np.ptp(values, axis=-1) <= 1e-12 * np.abs(values).max(-1)
