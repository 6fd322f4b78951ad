"""Coupling against a score across models, and across the tasks and prompts of a model.

Models, or families of them, and prompts are samples, and resampled. Pairs of layers
never are: those of one model are all there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas
import xarray
from jaxtyping import Float, Int

from tl_coupling import statistics
from tl_coupling.arguments import Count, Seed, checked, warn_caller
from tl_coupling.generalization.tables import (
    at_one_checkpoint,
    coupling_table,
    per_prompt,
)
from tl_coupling.measures import Measure
from tl_coupling.statistics import (
    LEVEL,
    Interval,
    RankCorrelation,
    check_size,
    is_constant,
    percentile_interval,
)
from tl_coupling.statistics.fits import LinearFit, family_codes, linear_fit
from tl_coupling.surveys.readings import pairs_of_layers

# Of four models intervals of the slope cover .66, of three families .69, and from six
# on .93 to .98 (make bench-statistics). Of five they barely hold, and a tenth of the
# draws has fewer than three models.
FEWEST_RESAMPLED = 6


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Intervals over models and prompts: percentiles of the draws, see
    `statistics.percentile_interval`.

    Attributes:
        r_squared, slope, intercept, rho: of the linear fit, and of Spearman's
            correlation. R² cannot be negative, so its interval never holds 0; look at
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
    resampled: str = field(
        default="models, and prompts within each draw, the same for all its models",
        repr=False,
    )

    @property
    def too_few(self) -> str:
        """Why the intervals do not hold, or nothing: with fewer than six models or
        families the t interval does.
        """
        n, what = (
            (self.n_models, "models")
            if self.n_families is None
            else (self.n_families, "families")
        )
        if n >= FEWEST_RESAMPLED:
            return ""
        return f"{n} {what} are too few to resample (wanted {FEWEST_RESAMPLED}): the t interval holds"


@dataclass(frozen=True, eq=False)
class Association:
    """Coupling against a score across models: the line, the rank correlation, and a
    bootstrap of both.
    """

    linear: LinearFit
    spearman: RankCorrelation
    bootstrap: Bootstrap


@dataclass(frozen=True)
class PromptCorrelation(RankCorrelation):
    """Rank correlations over the prompts of a model.

    ρ has its interval by a bootstrap, with the draws dropped as constant, and
    `within_tasks`, its mean over the prompts of each task, weighted by their number:
    NaN where no task has three prompts that differ.

    Example:
        >>> of_model = tlc.generalization.prompt_correlations(data, "n_pos", n_resamples=100)
        >>> of_model["width8"].n, -1 <= of_model["width8"].rho <= 1
        (4, True)
    """

    interval: Interval
    n_dropped: int
    within_tasks: float


@checked
def bootstrap(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    *,
    families: Sequence[str] | Sequence[int] | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Bootstrap:
    """Resample models with replacement and, within each draw, prompts with replacement,
    the same for all models.

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
    if families is not None and len(families) != len(x):
        raise ValueError(
            f"`families` must have a label for each of {len(x)} models, got {len(families)}"
        )
    codes = (
        None
        if families is None
        else family_codes(pandas.DataFrame({"family": list(families)}), "family")
    )
    drawn = resampled(x, y, codes, n_resamples=n_resamples, seed=seed)
    if drawn.too_few:
        warn_caller(f"{drawn.too_few}; `linear_fit` gives it")
    return drawn


def resampled(
    x: Float[np.ndarray, "n_models n_prompts"],
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"],
    families: Int[np.ndarray, " n_models"] | None,
    *,
    n_resamples: int,
    seed: int,
) -> Bootstrap:
    """As `bootstrap`, of families by number, without the warning."""
    y = np.broadcast_to(y[:, None], x.shape) if y.ndim == 1 else y
    known = np.isfinite(x).any(1) & np.isfinite(y).any(1)
    if known.sum() < 3:
        raise ValueError(
            f"resampling models needs at least three that have both values, got {known.sum()}"
        )
    x, y = x[known], y[known]
    for name, values in (("`x`", x), ("`y`", y)):
        check_size(values, name)
    n_models, n_prompts = x.shape
    groups = (
        np.arange(n_models)
        if families is None
        else np.unique(families[known], return_inverse=True)[1]
    )
    n_families = int(groups.max()) + 1 if 0 < groups.max() < n_models - 1 else None
    groups = np.arange(n_models) if n_families is None else groups
    # The models of each group in a row, and n_models in the places that a smaller one
    # leaves free.
    members = np.full((groups.max() + 1, np.bincount(groups).max()), n_models)
    for group, row in enumerate(members):
        row[: (groups == group).sum()] = np.flatnonzero(groups == group)
    rng = np.random.default_rng(seed)
    kept = []
    for drawn in statistics.resamples(len(members), n_resamples, rng):
        counts = rng.multinomial(
            n_prompts, np.full(n_prompts, 1 / n_prompts), size=len(drawn)
        ).astype(float)
        models = np.sort(members[drawn].reshape(len(drawn), -1), 1)
        there = models < n_models
        first = np.where(there, models, models[:, :1])
        drawn_x, drawn_y = (
            np.take_along_axis(_means(values, counts), first, 1) for values in (x, y)
        )
        n_different = 1 + (np.diff(first, axis=1) > 0).sum(1)
        usable = (
            np.isfinite(drawn_x + drawn_y).all(1)
            & (n_different >= 3)
            & (np.ptp(groups[first], axis=1) > 0)
        )
        usable &= ~(is_constant(drawn_x) | is_constant(drawn_y))
        kept.append(
            _statistics(
                *(
                    np.where(there, values, np.nan)[usable]
                    for values in (drawn_x, drawn_y)
                )
            )
        )
    _, slope, intercept, *_ = draws = np.concatenate(kept, axis=1)
    if not len(slope):
        raise ValueError(
            f"all {n_resamples} draws are degenerate: fewer than three different models, or all alike"
        )
    centre = np.nanmean(x, 1)
    band_x = np.linspace(centre.min(), centre.max(), 50)
    band = percentile_interval(
        intercept[:, None] + slope[:, None] * band_x, len(members)
    )
    # In the order of the attributes.
    found: list[Any] = [
        *map(tuple, percentile_interval(draws.T, len(members)).T.tolist()),
        band_x,
        *band,
    ]
    result = Bootstrap(
        *[
            *found,
            n_resamples,
            n_resamples - len(slope),
            n_models,
            n_prompts,
            n_families,
        ]
    )
    return (
        result
        if n_families is None
        else replace(result, resampled=f"whole families of {result.resampled}")
    )


@checked
def task_means(
    data: xarray.Dataset,
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> pandas.DataFrame:
    """Mean coupling of every model and checkpoint on each task, with its interval over
    prompts.

    Args:
        data, k, measure: as in `generalization_study`.
        n_resamples, seed: as in `bootstrap`, over the prompts of the task alone.

    Returns:
        columns `model`, `checkpoint`, `task` ("all prompts" last; alone where prompts
        have no task), `n_prompts`, `mean`, `low` and `high` (95 % interval; NaN with
        one prompt), `null` (what random subspaces would give), `loss` (mean, in nats
        per token). `attrs` names `k`, `measure` and the `pairs` of layers that the
        means are over.

    Raises:
        ValueError: the k or the measure was not measured; fewer than one draw.

    Example:
        >>> table = tlc.generalization.task_means(data, k=4, n_resamples=100)
        >>> table[table.model == "width8"].task.tolist()
        ['sums', 'riddles', 'all prompts']
    """
    held = per_prompt(data, k, measure)
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(held.sizes["row"]):
        here = held.isel(row=row).dropna("prompt", subset=["x"])
        for task, part in (
            [*by_task(here).items(), ("all prompts", here)]
            if here.sizes["prompt"]
            else []
        ):
            x, n = part["x"].values, part.sizes["prompt"]
            draws = [
                x[drawn].mean(1) for drawn in statistics.resamples(n, n_resamples, rng)
            ]
            low, high = (
                percentile_interval(np.concatenate(draws), n)
                if n > 1
                else (np.nan, np.nan)
            )
            mean, null, loss = (
                float(part[name].mean()) if name in part else np.nan
                for name in ("x", "null", "loss")
            )
            which = str(part["model"].values), part["checkpoint"].values.item(), task, n
            rows.append((*which, mean, low, high, null, loss))
    columns = [
        "model",
        "checkpoint",
        "task",
        "n_prompts",
        "mean",
        "low",
        "high",
        "null",
        "loss",
    ]
    table = pandas.DataFrame(rows, columns=columns)
    table.attrs |= {
        "k": held["k"].item(),
        "measure": measure,
        "pairs": pairs_of_layers(data),
    }
    return table


def fits_across_tasks(
    data: xarray.Dataset,
    scores: pandas.DataFrame | str,
    *,
    k: int,
    measure: str,
    checkpoint: int | str | None,
) -> dict[str, LinearFit]:
    """Within each model, its coupling on each task against its score there, in a column
    with the name of the task.

    Source: Aubry et al. 2025, table 3. Errors as of `linear_fit`, and for fewer than
    three tasks that have a score.
    """
    parts = {
        t: part
        for t, part in by_task(data).items()
        if isinstance(scores, str) or t in scores
    }
    if len(parts) < 3:
        raise ValueError(
            f"a fit across tasks needs at least three tasks that have scores, got {list(parts)}"
        )
    rows = []
    for task, part in parts.items():
        table = coupling_table(
            per_prompt(part, k, measure), scores, measure=measure, score=task
        )
        table = at_one_checkpoint(table, checkpoint).rename(
            columns={task: "score", "loss": "score"}
        )
        rows.append(table[["model", measure, "score"]].dropna())
    models = pandas.concat(rows, ignore_index=True).groupby("model", sort=False)
    return {
        str(model): linear_fit(points, measure, "score")
        for model, points in models
        if len(points) > 2
    }


@checked
def prompt_correlations(
    data: xarray.Dataset,
    against: str | Mapping[str, float] = "n_pos",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    checkpoint: int | str | None = None,
    n_resamples: Count = 1000,
    seed: Seed = 0,
) -> dict[str, PromptCorrelation]:
    """Within each model, by name, Spearman's ρ of the coupling on each prompt and a
    property of the prompt.

    Args:
        data, k, measure, checkpoint: as in `generalization_study`.
        against: what was measured of prompts, `"n_pos"` for their length in tokens or
            `"loss"`; or a difficulty by prompt id. Prompts without it are left out.
        n_resamples, seed: as in `bootstrap`, over prompts alone.

    Raises:
        ValueError: nothing of that name was measured; unknown prompt ids; for some
            model, fewer than three prompts, or no difference between them.

    Source: Aubry et al. 2025, figure 10. Cost: for each model, `n_resamples` rankings
    of the prompts.

    Example:
        >>> difficulty = {"p0": 1, "p1": 3, "p2": 2, "p3": 4}
        >>> list(tlc.generalization.prompt_correlations(data, difficulty, n_resamples=100))[:2]
        ['width8', 'width12']
    """
    held = per_prompt(
        data, k, measure, also=(against,) if isinstance(against, str) else ()
    )
    if isinstance(against, str):
        if against not in held or "prompt" not in held[against].dims:
            raise ValueError(f"{against!r} was not measured on each prompt")
        name, other = against, held[against]
    else:
        ids = [str(prompt) for prompt in held["prompt"].values]
        if unknown := sorted(set(against) - set(ids)):
            raise ValueError(
                f"a difficulty is given for prompts that were not measured: {', '.join(unknown[:5])}"
            )
        name, other = (
            "difficulty",
            xarray.DataArray([against.get(i, np.nan) for i in ids], dims="prompt"),
        )
    xs, ys = (
        held["x"].values,
        other.broadcast_like(held["x"]).transpose("row", "prompt").values,
    )
    tasks = (
        held["task"].values.astype(str)
        if "task" in held.coords
        else np.full(held.sizes["prompt"], "")
    )
    rows = held[["model", "checkpoint"]].to_dataframe()[np.isfinite(xs).any(1)]
    found = {}
    for row, model in at_one_checkpoint(rows, checkpoint)["model"].items():
        both = np.isfinite(xs[row]) & np.isfinite(ys[row])
        x, y = xs[row][both], ys[row][both].astype(float)
        if len(x) < 3 or is_constant(x) or is_constant(y):
            raise ValueError(
                f"{measure} against {name} of {model!r} needs at least three prompts that differ in both"
            )
        drawn = statistics.resamples(len(x), n_resamples, np.random.default_rng(seed))
        rho = np.concatenate(
            [
                statistics.rank_correlation_of_rows(x[prompts], y[prompts])
                for prompts in drawn
            ]
        )
        low, high = percentile_interval(rho[np.isfinite(rho)], len(x)).tolist()
        of_all = asdict(statistics.rank_correlation(x, y))
        dropped, inside = int(np.isnan(rho).sum()), _within_tasks(x, y, tasks[both])
        found[str(model)] = PromptCorrelation(
            **of_all, interval=(low, high), n_dropped=dropped, within_tasks=inside
        )
    return found


def by_task(data: xarray.Dataset) -> dict[str, xarray.Dataset]:
    """The prompts of each task; those without one are left out."""
    if "task" not in data.coords:
        return {}
    tasks = data["task"].values.astype(str)
    return {
        task: data.isel(prompt=np.flatnonzero(tasks == task))
        for task in dict.fromkeys(tasks.tolist())
        if task
    }


def _within_tasks(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], tasks: np.ndarray
) -> float:
    """Mean over tasks of Spearman's ρ of their prompts, weighted by how many; those
    without a task are left out.
    """
    parts = [tasks == task for task in np.unique(tasks) if task]
    rho = np.array(
        [
            statistics.rank_correlation_of_rows(x[None, part], y[None, part])[0]
            for part in parts
        ]
    )
    n = np.array([part.sum() for part in parts])[known := np.isfinite(rho)]
    return float(rho[known] @ n / n.sum()) if len(n) else np.nan


def _means(
    values: Float[np.ndarray, "n_models n_prompts"], counts: np.ndarray
) -> np.ndarray:
    """Mean of each model over the prompts of each draw, `[draws n_models]`; NaN where
    it was measured on none.
    """
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return (
            counts @ np.where(known, values, 0.0).T / (counts @ known.T.astype(float))
        )


def _statistics(
    x: Float[np.ndarray, "draws n"], y: Float[np.ndarray, "draws n"]
) -> Float[np.ndarray, "5 draws"]:
    """R², slope, intercept, ρ and mean of x, of all draws at once; NaN at the end of a
    draw that has fewer models.
    """
    rho = statistics.rank_correlation_of_rows(x, y)
    mean_x, mean_y = (np.nanmean(values, 1, keepdims=True) for values in (x, y))
    dx, dy = np.nan_to_num(x - mean_x), np.nan_to_num(y - mean_y)
    xx, yy, xy = (dx * dx).sum(1), (dy * dy).sum(1), (dx * dy).sum(1)
    slope, mean = xy / xx, mean_x[:, 0]
    return np.stack([xy**2 / (xx * yy), slope, mean_y[:, 0] - slope * mean, rho, mean])
