"""Bootstrap over models and over prompts: the two things of which others could have been drawn.

Pairs of layers are never resampled: those of one model are anything but independent, and it has no others.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tl_coupling.border import Count, Seed, checked
from tl_coupling.generalization.fits import LEVEL, Interval

_CHUNK = 500
_BAND_POINTS = 50


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Percentile intervals over models and prompts.

    Attributes:
        r_squared, slope, intercept, rho: of the linear fit, and of Spearman's correlation. R² cannot be negative: its
            interval keeps clear of 0 where there is nothing to find; that of the slope or ρ tells.
        mean: of x, over models and prompts.
        band_x, band_low, band_high: the line, pointwise.
        n_resamples: draws asked for.
        n_dropped: draws left out: fewer than three different models, or x or y constant.
        n_models, n_prompts: what is drawn from.
        level: of the intervals.
        resampled: what is drawn.
    """

    r_squared: Interval
    slope: Interval
    intercept: Interval
    rho: Interval
    mean: Interval
    band_x: Float[np.ndarray, " points"]
    band_low: Float[np.ndarray, " points"]
    band_high: Float[np.ndarray, " points"]
    n_resamples: int
    n_dropped: int
    n_models: int
    n_prompts: int
    level: float = LEVEL
    resampled: str = "models, and prompts within each draw, the same for all its models"


@checked
def bootstrap(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    *,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Bootstrap:
    """Resample models with replacement and, within each draw, prompts with replacement, the same for all models.

    A model's x is its mean over the prompts drawn, and so is its y where y is measured per prompt (the loss).

    Args:
        x: coupling of each model on each prompt; NaN where it was not measured.
        y: score of each model, or loss on each prompt.
        n_resamples: draws.
        seed: of `numpy.random.default_rng`.

    Raises:
        ValueError: fewer than three models with both; no draws, or all of them degenerate.

    Cost: `n_resamples · n_models · n_prompts` operations; memory does not grow with the draws.

    Example:
        >>> import numpy as np
        >>> from tl_coupling.generalization import bootstrap
        >>> x = np.arange(8.0)[:, None] + np.zeros(5)
        >>> result = bootstrap(x, 2 * x[:, 0] + 1)
        >>> round(result.slope[0], 6), round(result.slope[1], 6), round(result.r_squared[0], 6)
        (2.0, 2.0, 1.0)
    """
    held = np.isfinite(x).any(1) & np.isfinite(y.reshape(len(y), -1)).any(1)
    if held.sum() < 3:
        raise ValueError(f"resampling models wants three or more that have both values, got {held.sum()}")
    x, y = x[held], y[held]
    n_models, n_prompts = x.shape
    rng = np.random.default_rng(seed)
    kept: list[dict[str, np.ndarray]] = []
    for start in range(0, n_resamples, _CHUNK):
        size = min(_CHUNK, n_resamples - start)
        models = rng.integers(n_models, size=(size, n_models))
        counts = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=size).astype(float)
        drawn_x = np.take_along_axis(_means(x, counts), models, 1)
        drawn_y = np.take_along_axis(_means(y, counts) if y.ndim == 2 else np.tile(y, (size, 1)), models, 1)
        usable = ~_degenerate(drawn_x, drawn_y, models)
        kept.append(_statistics(drawn_x[usable], drawn_y[usable]))
    draws = {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}
    n_kept = len(draws["slope"])
    if not n_kept:
        raise ValueError(f"all {n_resamples} draws are degenerate: fewer than three different models, or all alike")
    centre = np.nanmean(x, 1)
    band_x = np.linspace(centre.min(), centre.max(), _BAND_POINTS)
    lines = np.stack([percentiles(draws["intercept"] + draws["slope"] * point) for point in band_x], 1)
    intervals: dict[str, Any] = {name: tuple(percentiles(values).tolist()) for name, values in draws.items()}
    return Bootstrap(
        **intervals,
        band_x=band_x,
        band_low=lines[0],
        band_high=lines[1],
        n_resamples=n_resamples,
        n_dropped=n_resamples - n_kept,
        n_models=n_models,
        n_prompts=n_prompts,
    )


def percentiles(values: Float[np.ndarray, " draws"]) -> Float[np.ndarray, "2"]:
    """Lower and upper end of the interval that holds the middle `LEVEL` of the draws."""
    return np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])


def correlation(
    x: Float[np.ndarray, "draws n"], y: Float[np.ndarray, "draws n"]
) -> tuple[Float[np.ndarray, " draws"], Float[np.ndarray, " draws"]]:
    """Pearson's r and the slope of y on x, for every draw at once: scipy's take one sample at a time."""
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    xx, yy, xy = (x * x).sum(1), (y * y).sum(1), (x * y).sum(1)
    return xy / np.sqrt(xx * yy), xy / xx


def _statistics(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    from scipy import stats

    r, slope = correlation(x, y)
    rho, _ = correlation(stats.rankdata(x, axis=1), stats.rankdata(y, axis=1))
    mean = x.mean(1)
    return {"r_squared": r**2, "slope": slope, "intercept": y.mean(1) - slope * mean, "rho": rho, "mean": mean}


def _means(values: Float[np.ndarray, "n_models n_prompts"], counts: np.ndarray) -> np.ndarray:
    """Mean of each model over the prompts of each draw, `[draws n_models]`; NaN where it was measured on none."""
    there = np.isfinite(values)
    weights = counts @ there.T.astype(float)
    with np.errstate(invalid="ignore"):
        return counts @ np.where(there, values, 0.0).T / weights


def _degenerate(x: np.ndarray, y: np.ndarray, models: np.ndarray) -> Bool[np.ndarray, " draws"]:
    present = np.zeros(models.shape, bool)
    np.put_along_axis(present, models, True, axis=1)
    missing = np.isnan(x).any(1) | np.isnan(y).any(1)
    alike = np.zeros(len(x), bool)
    for values in (x, y):
        alike |= ~(np.ptp(values, axis=1) > 1e-12 * np.abs(values).max(1))
    return missing | alike | (present.sum(1) < 3)
