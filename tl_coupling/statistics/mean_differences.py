"""Differences of means over two samples, of the same prompts or of different ones."""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from tl_coupling.arguments import checked, warn_caller
from tl_coupling.statistics.intervals import LEVEL


class Difference(NamedTuple):
    """The difference of two means, second − first, with its t interval.

    Arrays have an entry for each thing that was compared.

    Attributes:
        first, second: the means.
        estimate: `second − first`.
        low, high: ends of the 95 % interval; NaN of a single sample.
        p: two-sided, of no difference; NaN of a single sample.
        degrees_of_freedom: of the t distribution.

    A single sample is warned of.
    """

    first: Float[np.ndarray, "..."]
    second: Float[np.ndarray, "..."]
    estimate: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]
    p: Float[np.ndarray, "..."]
    degrees_of_freedom: Float[np.ndarray, "..."]


@checked
def paired_difference(
    first: Float[np.ndarray, "*shape"], second: Float[np.ndarray, "*shape"]
) -> Difference:
    """Return the mean difference of pairs, along the first axis.

    The t interval of n differences, with n − 1 degrees of freedom.

    Example:
        >>> difference = tlc.statistics.paired_difference([1.0, 2.0, 3.0], [2.0, 3.0, 7.0])
        >>> float(difference.estimate), round(float(difference.low), 2)
        (2.0, -2.3)
    """
    return _difference(first, second, is_paired=True)


@checked
def unpaired_difference(
    first: Float[np.ndarray, "*shape"], second: Float[np.ndarray, "*other_shape"]
) -> Difference:
    """Return the difference of the means of two independent samples.

    Welch's t interval, which allows different variances, with the degrees of freedom of
    Welch and Satterthwaite. Samples lie along the first axis.

    Example:
        >>> difference = tlc.statistics.unpaired_difference([1.0, 2.0, 3.0], [4.0, 6.0])
        >>> float(difference.estimate), round(float(difference.degrees_of_freedom), 1)
        (3.0, 1.7)
    """
    return _difference(first, second, is_paired=False)


@checked
def holm(p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return p corrected for the number of comparisons; NaN stays and does not count.

    The chance of any false rejection is held, whatever the dependence. Source: Holm
    1979, *A simple sequentially rejective multiple test procedure*.

    Example:
        >>> tlc.statistics.holm([0.02, 0.5, 0.01]).round(2).tolist()
        [0.04, 0.5, 0.03]
    """
    corrected = np.full(p.shape, np.nan)
    # NaN is sorted to the end, and cut off.
    order = np.argsort(p)[: np.isfinite(p).sum()]
    n_left = len(order) - np.arange(len(order))
    # No corrected p is below that of a smaller p.
    corrected[order] = np.maximum.accumulate(np.minimum(1, p[order] * n_left))
    return corrected


def _difference(
    first: Float[np.ndarray, "n ..."],
    second: Float[np.ndarray, "m ..."],
    is_paired: bool,
) -> Difference:
    first = np.asarray(first, float)
    second = np.asarray(second, float)
    means = np.asarray(first.mean(0)), np.asarray(second.mean(0))
    estimate = np.asarray(means[1] - means[0])
    nothing = np.full(estimate.shape, np.nan)
    if min(len(first), len(second)) < 2:
        warn_caller(
            "the difference of single samples (one prompt, for example) has no interval "
            "and no p (NaN): give at least two"
        )
        return Difference(*means, estimate, nothing, nothing, nothing, nothing)
    # No spread at all, such as of a model beside itself, is no reason to warn.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if is_paired:
            # The test of one sample has a spread of exactly 0 where all differences are
            # 0.
            test = stats.ttest_1samp(second - first, 0)
        else:
            test = stats.ttest_ind(second, first, equal_var=False)
        low, high = test.confidence_interval(LEVEL)
    # Without any spread scipy gives NaN, but such samples differ by 0 for certain.
    is_same = (estimate == 0) & _has_no_spread(first, second, is_paired)
    return Difference(
        *means,
        estimate,
        np.where(is_same, 0.0, low),
        np.where(is_same, 0.0, high),
        np.where(is_same, 1.0, test.pvalue),
        np.broadcast_to(np.asarray(test.df, float), estimate.shape),
    )


def _has_no_spread(
    first: Float[np.ndarray, "n ..."],
    second: Float[np.ndarray, "m ..."],
    is_paired: bool,
) -> Bool[np.ndarray, "..."]:
    if is_paired:
        return np.asarray(np.ptp(second - first, axis=0) == 0)
    return np.asarray((np.ptp(first, axis=0) == 0) & (np.ptp(second, axis=0) == 0))
