"""Noise of coupling from having few prompts, and what it does to the slope."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import ceil, comb

import numpy as np
from jaxtyping import Bool, Float

from tl_coupling.statistics.fits import LinearFit
from tl_coupling.statistics.intervals import Interval

# Below it prompts are said to be too few; below the second the slope would more than
# double, and is not corrected.
WANTED, LEAST = 0.9, 0.5
_MOST_SPLITS = 200


@dataclass(frozen=True)
class Attenuation:
    """How well prompts tell models apart, and the slope that many prompts would give.

    Attributes:
        reliability: share of the variance of the models' means that other prompts would
            confirm: the covariance of means over halves of the prompts, mean over
            splits, over the variance of means over all. With every split of complete
            data it is Cronbach's α; noise can bring it below 0.
        n_prompts, n_wanted: prompts there are; that a reliability of .9 needs (Spearman
            and Brown), `None` where reliability is not above 0.
        slope, slope_interval: corrected: `cov(x, y) / cov(x, x)` across halves, so that
            noise which a loss shares with coupling drops out; of a score it is the
            slope over the reliability. Its interval is as wide as that of the slope
            over the reliability, which counts as known. NaN below a reliability of .5.
        n_splits: into halves of the prompts; all that there are, or 200 of them.

    Source: Spearman 1904; Cronbach 1951, *Coefficient alpha and the internal structure
    of tests*.
    """

    reliability: float
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
    """Reliability of the models' means of x, NaN where it was not measured, and the
    corrected slope of their line.

    Raises:
        ValueError: one prompt; in every split, a model that was not measured on both
            halves.
    """
    n_prompts = x.shape[1]
    if n_prompts < 2:
        raise ValueError("reliability needs at least two prompts, got 1")
    halves = np.array(list(_halves(n_prompts, np.random.default_rng(seed))))
    y = np.broadcast_to(y[:, None], x.shape) if y.ndim == 1 else y
    x_1, x_2, y_1, y_2 = (
        _centred_means(of, half) for of in (x, y) for half in (halves, ~halves)
    )
    usable = np.isfinite(x_1 + x_2 + y_1 + y_2).all(1)
    if not usable.any():
        raise ValueError(
            "reliability needs models that were all measured on both halves of the prompts"
        )
    shared, crossed = (
        np.mean((x_1 * x_2)[usable]),
        np.mean((x_1 * y_2 + x_2 * y_1)[usable]) / 2,
    )
    reliability = float(
        shared / np.mean(_centred_means(x, np.ones((1, n_prompts), bool)) ** 2)
    )
    n_wanted = (
        ceil(n_prompts * WANTED / (1 - WANTED) * (1 - reliability) / reliability)
        if reliability > 0
        else None
    )
    slope = half = np.nan
    if reliability >= LEAST:
        slope, half = (
            float(crossed / shared),
            float(np.diff(line.slope_interval)[0] / 2 / reliability),
        )
    return Attenuation(
        reliability,
        n_prompts,
        n_wanted,
        slope,
        (slope - half, slope + half),
        int(usable.sum()),
    )


def _halves(n: int, rng: np.random.Generator) -> Iterator[Bool[np.ndarray, " n"]]:
    """Halves of n prompts, the other half being the rest: each once if there are few
    enough, else drawn.
    """
    if comb(n, n // 2) <= 2 * _MOST_SPLITS:
        for half in combinations(range(n), n // 2):
            if n % 2 or 0 in half:
                yield np.isin(np.arange(n), half)
        return
    for _ in range(_MOST_SPLITS):
        yield rng.permutation(n) < n // 2


def _centred_means(
    values: Float[np.ndarray, "n_models n_prompts"],
    halves: Bool[np.ndarray, "n_splits n_prompts"],
) -> Float[np.ndarray, "n_splits n_models"]:
    """Mean of each model over each half, less that of all models; NaN where one was
    measured on none of it.
    """
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        means = (
            halves @ np.where(known, values, 0.0).T / (halves @ known.T.astype(float))
        )
    return means - means.mean(1, keepdims=True)
