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


def rank_correlation_of_rows(
    a: Float[np.ndarray, "n_samples n"], b: Float[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, " n_samples"]:
    """Spearman's ρ of each row: Pearson's r of the ranks, ties at their mean rank; NaN where it is undefined."""
    if a.shape[1] < FEWEST_RANKED:
        return np.full(len(a), np.nan)
    a, b = (stats.rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (a, b))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
