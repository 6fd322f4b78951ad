"""Noise of coupling from having few prompts, and what it does to the slope."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import ceil, comb

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from tl_coupling.statistics.fits import LinearFit
from tl_coupling.statistics.intervals import LEVEL, Interval

# Below it prompts are said to be too few.
WANTED = 0.9
_MOST_SPLITS = 200


@dataclass(frozen=True)
class Attenuation:
    """How well prompts tell models apart, and the slope that many prompts would give.

    Attributes:
        reliability: share of the variance of the models' means that other prompts would
            confirm: the covariance of means over halves of the prompts, mean over
            splits, over the variance of means over all. With every split of complete
            data it is Cronbach's α; noise can bring it below 0.
        reliability_interval: Feldt's, as if every model was measured on every prompt:
            `(1 − reliability) / (1 − truth)` has the F distribution. Models in families
            count as one per family.
        n_prompts, n_wanted: prompts there are; that a reliability of .9 needs (Spearman
            and Brown), `None` where reliability is not above 0.
        slope, slope_interval: corrected: `cov(x, y) / cov(x, x)` across halves, so that
            noise which a loss shares with coupling drops out; of a score it is the
            slope over the reliability. Its interval is Fieller's for a ratio, with the
            error of the reliability in it, and not symmetric. NaN where the interval of
            the reliability contains 0, or Fieller's is unbounded. A limit on the estimate
            itself would choose those that are too high, and bias the slope.
        n_splits: into halves of the prompts; all that there are, or 200 of them.

    Source: Spearman 1904; Cronbach 1951, *Coefficient alpha and the internal structure
    of tests*; Feldt 1965, *The approximate sampling distribution of Kuder–Richardson
    reliability coefficient twenty*; Fieller 1954, *Some problems in interval
    estimation*. What it covers: `make bench-statistics`.
    """

    reliability: float
    reliability_interval: Interval
    n_prompts: int
    n_wanted: int | None
    slope: float
    slope_interval: Interval
    n_splits: int


def attenuation(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    line: LinearFit,
    *,
    seed: int,
) -> Attenuation:
    """Return how reliable the models' means are, and the corrected slope of their line.

    Args:
        x: coupling of each model on each prompt; NaN where it was not measured.
        y: the score, or the loss on each prompt.
        line: the fit that is corrected.
        seed: of the splits into halves, where there are too many for all of them.

    Raises:
        ValueError: one prompt; in every split, a model that was not measured on both
            halves.
    """
    n_prompts = x.shape[1]
    if n_prompts < 2:
        raise ValueError("reliability needs at least two prompts, got 1")
    if y.ndim == 1:
        # A score is the same on every prompt: it has no noise to share.
        y = np.broadcast_to(y[:, None], x.shape)
    halves = np.array(list(_halves(n_prompts, np.random.default_rng(seed))))
    x_1 = _centred_means(x, halves)
    x_2 = _centred_means(x, ~halves)
    y_1 = _centred_means(y, halves)
    y_2 = _centred_means(y, ~halves)
    is_usable = np.isfinite(x_1 + x_2 + y_1 + y_2).all(1)
    if not is_usable.any():
        raise ValueError(
            "reliability needs models that were all measured on both halves of the "
            "prompts"
        )
    # Covariances of the models' means across halves, mean over splits.
    x_covariance = np.mean((x_1 * x_2)[is_usable])
    xy_covariance = np.mean((x_1 * y_2 + x_2 * y_1)[is_usable]) / 2
    overall_means = _centred_means(x, np.ones((1, n_prompts), bool))
    reliability = float(x_covariance / np.mean(overall_means**2))
    # Models of one family count as one.
    n_groups = line.n_families or len(x)
    # Degrees of freedom of the models' means, and of the noise.
    freedoms = (n_groups - 1, (len(x) - 1) * (n_prompts - 1))
    reliability_interval = _feldt_interval(reliability, freedoms)
    slope = np.nan
    slope_interval = (np.nan, np.nan)
    if reliability_interval[0] > 0:
        slope_interval = _fieller_interval(
            float(xy_covariance / x_covariance), reliability, freedoms, line
        )
    if np.isfinite(slope_interval).all():
        slope = float(xy_covariance / x_covariance)
    return Attenuation(
        reliability=reliability,
        reliability_interval=reliability_interval,
        n_prompts=n_prompts,
        n_wanted=_n_wanted(n_prompts, reliability),
        slope=slope,
        slope_interval=slope_interval,
        n_splits=int(is_usable.sum()),
    )


def _feldt_interval(reliability: float, freedoms: tuple[int, int]) -> Interval:
    """Return the interval of a reliability."""
    upper = (1 + LEVEL) / 2
    low = 1 - (1 - reliability) * stats.f.ppf(upper, *freedoms)
    high = 1 - (1 - reliability) * stats.f.ppf(1 - upper, *freedoms)
    return float(low), float(high)


def _fieller_interval(
    slope: float, reliability: float, freedoms: tuple[int, int], line: LinearFit
) -> Interval:
    """Return the slopes b for which `(slope − b) · reliability` is within its error; NaN
    where they have no end.

    The errors of the line and of the reliability count as independent.
    """
    line_error = float(np.diff(line.slope_interval)[0] / 2)
    t = stats.t.ppf((1 + LEVEL) / 2, line.freedom)
    # The variance of log F, to first order.
    spread = np.sqrt(2 / freedoms[0] + 2 / freedoms[1])
    reliability_error = float(t * (1 - reliability) * spread)
    # (slope − b)² reliability² = line_error² + b² reliability_error², a quadratic in
    # b.
    remainder = reliability**2 - reliability_error**2
    if remainder <= 0:
        return np.nan, np.nan
    middle = slope * reliability**2 / remainder
    discriminant = (
        line_error**2 * remainder + (slope * reliability * reliability_error) ** 2
    )
    half_width = float(np.sqrt(discriminant) / remainder)
    return middle - half_width, middle + half_width


def _n_wanted(n_prompts: int, reliability: float) -> int | None:
    """Return how many prompts a reliability of .9 needs (Spearman and Brown)."""
    if reliability <= 0:
        return None
    # A test m times as long has `m r / (1 + (m − 1) r)`: solved for m.
    return ceil(n_prompts * WANTED / (1 - WANTED) * (1 - reliability) / reliability)


def _halves(n: int, rng: np.random.Generator) -> Iterator[Bool[np.ndarray, " n"]]:
    """Yield halves of n prompts, the other half being the rest: each once if there are
    few enough, else drawn.
    """
    if comb(n, n // 2) > 2 * _MOST_SPLITS:
        for _ in range(_MOST_SPLITS):
            yield rng.permutation(n) < n // 2
        return
    for half in combinations(range(n), n // 2):
        # With an even number of prompts, the half without the first prompt is the rest
        # of another half.
        if n % 2 or 0 in half:
            yield np.isin(np.arange(n), half)


def _centred_means(
    values: Float[np.ndarray, "n_models n_prompts"],
    halves: Bool[np.ndarray, "n_splits n_prompts"],
) -> Float[np.ndarray, "n_splits n_models"]:
    """Return the mean of each model over each half, less that of all models; NaN where
    a model was measured on none of it.
    """
    is_known = np.isfinite(values)
    sums = halves @ np.where(is_known, values, 0.0).T
    n_known = halves @ is_known.T.astype(float)
    with np.errstate(invalid="ignore"):
        means = sums / n_known
    return means - means.mean(1, keepdims=True)
