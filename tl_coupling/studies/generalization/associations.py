"""Coupling against a score across models: the line, the rank correlation, and intervals
of both.

Models, or families of them, and prompts are samples, and resampled. Pairs of layers
never are: those of one model are all there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas
from jaxtyping import Bool, Float, Int

from tl_coupling.arguments import Count, Seed, checked, warn_caller
from tl_coupling.statistics import (
    LEVEL,
    Interval,
    LinearFit,
    RankCorrelation,
    check_size,
    family_codes,
    is_constant,
    percentile_interval,
    rank_correlation_of_rows,
    resamples,
)

# Intervals of the slope cover .66 for four models, .69 for three families, and .93 to
# .98 from six models on (make bench-statistics). For five they barely hold, and a tenth
# of the draws has fewer than three models.
FEWEST_RESAMPLED = 6
_RESAMPLED = "models, and prompts within each draw, the same for all its models"
# The band bends smoothly between its points.
_N_BAND_POINTS = 50


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Intervals over models and prompts: percentiles of the draws, see
    `statistics.percentile_interval`.

    Attributes:
        r_squared, slope, intercept, rho: of the linear fit, and of Spearman's
            correlation. R² cannot be negative, so its interval never contains 0; look at
            the slope or ρ to see whether there is anything to find.
        mean, band_x, band_low, band_high: of x, over models and prompts; pointwise
            interval of the line.
        n_resamples, n_dropped: draws asked for; left out as they had fewer than three
            models, or two families, or x or y constant.
        n_families: how many families were resampled whole, `None` where models were.

    Example:
        >>> study = tlc.generalization.generalization_study(data, n_resamples=100)
        >>> intervals = study.association.bootstrap
        >>> intervals.slope[0] < intervals.slope[1], intervals.n_models, intervals.level
        (True, 6, 0.95)
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
    n_families: int | None = None
    level: float = LEVEL
    resampled: str = field(default=_RESAMPLED, repr=False)

    @property
    def too_few(self) -> str:
        """Say why the intervals do not hold; empty where they do.

        With fewer than six models or families the t interval of `linear_fit` holds.
        """
        sample_size, unit = self.n_models, "models"
        if self.n_families is not None:
            sample_size, unit = self.n_families, "families"
        if sample_size >= FEWEST_RESAMPLED:
            return ""
        return (
            f"{sample_size} {unit} are too few to resample "
            f"(wanted {FEWEST_RESAMPLED}): the t interval holds"
        )


@dataclass(frozen=True, eq=False)
class Association:
    """Coupling against a score across models: the line, the rank correlation, and a
    bootstrap of both.
    """

    linear: LinearFit
    spearman: RankCorrelation
    bootstrap: Bootstrap


@checked
def bootstrap(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    *,
    families: Sequence[str] | Sequence[int] | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Bootstrap:
    """Resample models with replacement, and within each draw the prompts.

    The prompts of a draw are the same for all its models.
    A model's x is its mean over the prompts drawn, and so is its y where y is measured
    per prompt (the loss). Warns with fewer than six models or families.

    Args:
        x, y: coupling of each model on each prompt, NaN where it was not measured; its
            score, or its loss on each.
        families: a label for each model; those of one label are drawn together, and one
            without ("") is drawn alone. Where all have the same one, models are drawn.
        n_resamples, seed: draws; seed of `numpy.random.default_rng`.

    Raises:
        ValueError: fewer than three models with both; no draws, or all of them
            degenerate; values above 1e50 in size, or all below 1e-50.

    Cost: `n_resamples · n_models · n_prompts` operations; memory hardly grows with the
    draws.

    Example:
        >>> import numpy as np
        >>> x = np.arange(8.0)[:, None] + np.zeros(5)
        >>> result = tlc.generalization.bootstrap(x, 2 * x[:, 0] + 1)
        >>> round(result.slope[0], 6), round(result.slope[1], 6), round(result.r_squared[0], 6)
        (2.0, 2.0, 1.0)
    """
    codes = None
    if families is not None:
        if len(families) != len(x):
            raise ValueError(
                f"`families` must have a label for each of {len(x)} models, "
                f"got {len(families)}"
            )
        labels = pandas.DataFrame({"family": list(families)})
        codes = family_codes(labels, "family")
    result = resampled(x, y, codes, n_resamples=n_resamples, seed=seed)
    if result.too_few:
        warn_caller(f"{result.too_few}; `linear_fit` gives it")
    return result


def resampled(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    families: Int[np.ndarray, " n_models"] | None,
    *,
    n_resamples: int,
    seed: int,
) -> Bootstrap:
    """Resample as `bootstrap` does, families being numbered, without its warning."""
    if y.ndim == 1:
        # A score is the same on every prompt, whichever are drawn.
        y = np.broadcast_to(y[:, None], x.shape)
    check_size(x, "`x`")
    check_size(y, "`y`")
    has_both = _have_both(x, y)
    x = x[has_both]
    y = y[has_both]
    n_models, n_prompts = x.shape
    groups, n_families = _groups(
        n_models, None if families is None else families[has_both]
    )
    # `[statistic draw]`, without degenerate draws.
    draws = _draws(x, y, groups, n_resamples, np.random.default_rng(seed))
    n_usable = draws.shape[1]
    if not n_usable:
        raise ValueError(
            f"all {n_resamples} draws are degenerate: "
            "fewer than three different models, or all alike"
        )
    # The sample is as large as there are groups: models, or families.
    n_groups = int(groups.max()) + 1
    means = np.nanmean(x, 1)
    band_x = np.linspace(means.min(), means.max(), _N_BAND_POINTS)
    band_low, band_high = _band(draws, band_x, n_groups)
    ends = percentile_interval(draws.T, n_groups).T.tolist()
    # In the order of `_line_statistics`.
    r_squared, slope, intercept, rho, mean = [(low, high) for low, high in ends]
    return Bootstrap(
        r_squared=r_squared,
        slope=slope,
        intercept=intercept,
        rho=rho,
        mean=mean,
        band_x=band_x,
        band_low=band_low,
        band_high=band_high,
        n_resamples=n_resamples,
        n_dropped=n_resamples - n_usable,
        n_models=n_models,
        n_prompts=n_prompts,
        n_families=n_families,
        resampled=f"{'' if n_families is None else 'whole families of '}{_RESAMPLED}",
    )


def _have_both(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, "n_models n_prompts"],
) -> Bool[np.ndarray, " n_models"]:
    """Say which models have both values; ValueError where fewer than three do."""
    has_both = np.isfinite(x).any(1) & np.isfinite(y).any(1)
    if has_both.sum() < 3:
        raise ValueError(
            "resampling models needs at least three that have both values, "
            f"got {has_both.sum()}"
        )
    return has_both


def _band(
    draws: Float[np.ndarray, "5 n_draws"],
    x: Float[np.ndarray, " points"],
    n_resampled: int,
) -> Float[np.ndarray, "2 points"]:
    """Return the ends of the pointwise interval of the lines of all draws."""
    _, slope, intercept, *_ = draws
    lines = intercept[:, None] + slope[:, None] * x
    return percentile_interval(lines, n_resampled)


def _groups(
    n_models: int, families: Int[np.ndarray, " n_models"] | None
) -> tuple[Int[np.ndarray, " n_models"], int | None]:
    """Return the number of the group with which each model is drawn, and how many
    families there are: `None` where each model is drawn alone.
    """
    if families is not None:
        groups = np.unique(families, return_inverse=True)[1]
        n_families = int(groups.max()) + 1
        if 1 < n_families < n_models:
            return groups, n_families
    return np.arange(n_models), None


def _members(
    groups: Int[np.ndarray, " n_models"],
) -> Int[np.ndarray, "n_groups largest"]:
    """Return the models of each group in a row; where a group is smaller than the
    largest, `n_models` fills the row.
    """
    n_models = len(groups)
    members = np.full((groups.max() + 1, np.bincount(groups).max()), n_models)
    for group, row in enumerate(members):
        own = np.flatnonzero(groups == group)
        row[: len(own)] = own
    return members


def _draws(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, "n_models n_prompts"],
    groups: Int[np.ndarray, " n_models"],
    n_resamples: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, "5 n_usable"]:
    """Return the statistics of all draws that are not degenerate, see
    `_line_statistics`.
    """
    n_models, n_prompts = x.shape
    members = _members(groups)
    even_odds = np.full(n_prompts, 1 / n_prompts)
    statistics = []
    for drawn_groups in resamples(len(members), n_resamples, rng):
        n_draws = len(drawn_groups)
        # How often each prompt is in each draw.
        counts = rng.multinomial(n_prompts, even_odds, size=n_draws).astype(float)
        # Sorted, the fill value comes last, and different models can be counted.
        models = np.sort(members[drawn_groups].reshape(n_draws, -1), 1)
        is_model = models < n_models
        # The first model of a draw stands in the places that are free.
        filled = np.where(is_model, models, models[:, :1])
        # Means over a draw's prompts are taken of all models, and then those of the
        # draw picked.
        drawn_x = np.take_along_axis(_means(x, counts), filled, 1)
        drawn_y = np.take_along_axis(_means(y, counts), filled, 1)
        is_usable = _is_usable(drawn_x, drawn_y, filled, groups)
        statistics.append(
            _line_statistics(
                np.where(is_model, drawn_x, np.nan)[is_usable],
                np.where(is_model, drawn_y, np.nan)[is_usable],
            )
        )
    return np.concatenate(statistics, axis=1)


def _is_usable(
    x: Float[np.ndarray, "draws n"],
    y: Float[np.ndarray, "draws n"],
    models: Int[np.ndarray, "draws n"],
    groups: Int[np.ndarray, " n_models"],
) -> Bool[np.ndarray, " draws"]:
    """Say which draws have three different models, two groups, and x and y that vary.

    The models of a draw are sorted.
    """
    # Two models always lie on a line.
    n_different = 1 + (np.diff(models, axis=1) > 0).sum(1)
    has_both = np.isfinite(x + y).all(1)
    is_varied = (n_different >= 3) & (np.ptp(groups[models], axis=1) > 0)
    return has_both & is_varied & ~(is_constant(x) | is_constant(y))


def _means(
    values: Float[np.ndarray, "n_models n_prompts"],
    counts: Float[np.ndarray, "draws n_prompts"],
) -> Float[np.ndarray, "draws n_models"]:
    """Return the mean of each model over the prompts of each draw; NaN where it was
    measured on none of them.
    """
    is_known = np.isfinite(values)
    # A prompt counts as often as it was drawn.
    sums = counts @ np.where(is_known, values, 0.0).T
    n_known = counts @ is_known.T.astype(float)
    with np.errstate(invalid="ignore"):
        return sums / n_known


def _line_statistics(
    x: Float[np.ndarray, "draws n"], y: Float[np.ndarray, "draws n"]
) -> Float[np.ndarray, "5 draws"]:
    """Return R², slope, intercept, ρ and mean of x, of all draws at once.

    A draw that has fewer models than the others ends in NaN.
    """
    rho = rank_correlation_of_rows(x, y)
    mean_x = np.nanmean(x, 1, keepdims=True)
    mean_y = np.nanmean(y, 1, keepdims=True)
    # The places that a draw does not fill add nothing to its sums.
    dx = np.nan_to_num(x - mean_x)
    dy = np.nan_to_num(y - mean_y)
    xx = (dx * dx).sum(1)
    yy = (dy * dy).sum(1)
    xy = (dx * dy).sum(1)
    slope = xy / xx
    intercept = mean_y[:, 0] - slope * mean_x[:, 0]
    return np.stack([xy**2 / (xx * yy), slope, intercept, rho, mean_x[:, 0]])
