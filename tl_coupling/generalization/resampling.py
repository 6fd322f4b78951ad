"""Bootstrap over models and prompts, the two things that are samples of a larger population.

Pairs of layers are never resampled: those of one model are all there are, and far from independent.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from tl_coupling import statistics
from tl_coupling.border import Count, Seed, checked
from tl_coupling.statistics import LEVEL, Interval, is_constant, percentile_interval

_BAND_POINTS = 50


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Percentile intervals over models and prompts.

    Attributes:
        r_squared, slope, intercept, rho: of the linear fit, and of Spearman's correlation. R² cannot be negative, so
            its interval never holds 0; look at the slope or ρ to see whether there is anything to find.
        mean: of x, over models and prompts.
        band_x, band_low, band_high: pointwise interval of the line.
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
    band_x: Float[np.ndarray, " points"] = field(repr=False)
    band_low: Float[np.ndarray, " points"] = field(repr=False)
    band_high: Float[np.ndarray, " points"] = field(repr=False)
    n_resamples: int
    n_dropped: int
    n_models: int
    n_prompts: int
    level: float = LEVEL
    resampled: str = field(default="models, and prompts within each draw, the same for all its models", repr=False)


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

    Cost: `n_resamples · n_models · n_prompts` operations; memory hardly grows with the draws.

    Example:
        >>> import numpy as np
        >>> from tl_coupling.generalization import bootstrap
        >>> x = np.arange(8.0)[:, None] + np.zeros(5)
        >>> result = bootstrap(x, 2 * x[:, 0] + 1)
        >>> round(result.slope[0], 6), round(result.slope[1], 6), round(result.r_squared[0], 6)
        (2.0, 2.0, 1.0)
    """
    y = np.broadcast_to(y[:, None], x.shape) if y.ndim == 1 else y
    known = np.isfinite(x).any(1) & np.isfinite(y).any(1)
    if known.sum() < 3:
        raise ValueError(f"resampling models needs at least three that have both values, got {known.sum()}")
    x, y = x[known], y[known]
    n_models, n_prompts = x.shape
    rng = np.random.default_rng(seed)
    kept = []
    for models in statistics.resamples(n_models, n_resamples, rng):
        counts = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=len(models)).astype(float)
        drawn_x, drawn_y = (np.take_along_axis(_means(values, counts), models, 1) for values in (x, y))
        n_different = 1 + (np.diff(np.sort(models, 1), axis=1) > 0).sum(1)
        usable = np.isfinite(drawn_x + drawn_y).all(1) & (n_different >= 3)
        usable &= ~(is_constant(drawn_x) | is_constant(drawn_y))
        kept.append(_statistics(drawn_x[usable], drawn_y[usable]))
    draws = {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}
    n_kept = len(draws["slope"])
    if not n_kept:
        raise ValueError(f"all {n_resamples} draws are degenerate: fewer than three different models, or all alike")
    centre = np.nanmean(x, 1)
    band_x = np.linspace(centre.min(), centre.max(), _BAND_POINTS)
    band = np.stack([percentile_interval(draws["intercept"] + draws["slope"] * point) for point in band_x], 1)
    intervals: dict[str, Any] = {name: tuple(percentile_interval(values).tolist()) for name, values in draws.items()}
    return Bootstrap(
        **intervals,
        band_x=band_x,
        band_low=band[0],
        band_high=band[1],
        n_resamples=n_resamples,
        n_dropped=n_resamples - n_kept,
        n_models=n_models,
        n_prompts=n_prompts,
    )


def _means(values: Float[np.ndarray, "n_models n_prompts"], counts: np.ndarray) -> np.ndarray:
    """Mean of each model over the prompts of each draw, `[draws n_models]`; NaN where it was measured on none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return counts @ np.where(known, values, 0.0).T / (counts @ known.T.astype(float))


def _statistics(x: Float[np.ndarray, "draws n"], y: Float[np.ndarray, "draws n"]) -> dict[str, np.ndarray]:
    """Of all draws at once: scipy fits one sample at a time."""
    dx, dy = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    xx, yy, xy = (dx * dx).sum(1), (dy * dy).sum(1), (dx * dy).sum(1)
    slope, mean = xy / xx, x.mean(1)
    return {
        "r_squared": xy**2 / (xx * yy),
        "slope": slope,
        "intercept": y.mean(1) - slope * mean,
        "rho": statistics.rank_correlation_of_rows(x, y),
        "mean": mean,
    }
