"""The level of every interval, intervals of means, and rank correlations: one place for what is meant by them."""

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95
FEWEST_RANKED = 3


def half_width(x: Float[np.ndarray, "n ..."], level: float = LEVEL) -> Float[np.ndarray, "..."]:
    """Half the t interval of the mean over the first axis: `t_{n−1} s / √n`; NaN for fewer than two values."""
    n = len(x)
    if n < 2:
        return np.full(x.shape[1:], np.nan)
    return stats.t.ppf((1 + level) / 2, n - 1) * x.std(0, ddof=1) / n**0.5


def crossed_mean(
    x: Float[np.ndarray, "n_rows n_cols ..."], level: float = LEVEL
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
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
    half = stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(squares)
    return np.ma.filled(masked.mean((0, 1)), np.nan), np.where(is_sampled > 0, half, np.nan)


def rank_correlation_of_rows(
    a: Float[np.ndarray, "n_samples n"], b: Float[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, " n_samples"]:
    """Spearman's ρ of each row: Pearson's r of the ranks, ties at their mean rank; NaN where it is undefined."""
    if a.shape[1] < FEWEST_RANKED:
        return np.full(len(a), np.nan)
    a, b = (stats.rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (a, b))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
