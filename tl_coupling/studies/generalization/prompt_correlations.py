"""Coupling against a property of the prompts, within each model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import xarray
from jaxtyping import Bool, Float, Shaped

from tl_coupling.arguments import Count, Seed, checked
from tl_coupling.measures import AnyMeasure, measure_named
from tl_coupling.statistics import (
    Interval,
    RankCorrelation,
    is_constant,
    percentile_interval,
    rank_correlation,
    rank_correlation_of_rows,
    resamples,
)
from tl_coupling.studies.generalization.model_tables import (
    checkpoint_rows,
    prompt_table,
)


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
def prompt_correlations(
    data: xarray.Dataset,
    against: str | Mapping[str, float] = "n_pos",
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    checkpoint: int | str | None = None,
    n_resamples: Count = 1000,
    seed: Seed = 0,
) -> dict[str, PromptCorrelation]:
    """Correlate coupling on each prompt with a property of the prompt, in each model.

    Returns Spearman's ρ by the name of the model.

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
    return correlations_over_prompts(
        data,
        against,
        k=k,
        measured=measure_named(measure).name,
        checkpoint=checkpoint,
        n_resamples=n_resamples,
        seed=seed,
    )


def correlations_over_prompts(
    data: xarray.Dataset,
    against: str | Mapping[str, float],
    *,
    k: int | None,
    measured: str,
    checkpoint: int | str | None,
    n_resamples: int = 1000,
    seed: int,
) -> dict[str, PromptCorrelation]:
    """Return `prompt_correlations` of what the data hold under the name of a measure."""
    extra_variables = (against,) if isinstance(against, str) else ()
    survey = prompt_table(data, k, measured, extra_variables=extra_variables)
    name = against if isinstance(against, str) else "difficulty"
    properties = _property_of_prompts(survey, against)
    coupling = survey["x"].values
    # Rows of checkpoints at which a model was not measured are no candidates.
    has_coupling = np.isfinite(coupling).any(1)
    tasks = np.full(survey.sizes["prompt"], "")
    if "task" in survey.coords:
        tasks = survey["task"].values.astype(str)
    rows = survey[["model", "checkpoint"]].to_dataframe()[has_coupling]
    correlations = {}
    for place, model in checkpoint_rows(rows, checkpoint)["model"].items():
        is_known = np.isfinite(coupling[place]) & np.isfinite(properties[place])
        x = coupling[place][is_known]
        y = properties[place][is_known].astype(float)
        # Two prompts always correlate by 1 or −1, and equal ones do not at all.
        if len(x) < 3 or is_constant(x) or is_constant(y):
            raise ValueError(
                f"{measured} against {name} of {model!r} needs at least three prompts "
                "that differ in both"
            )
        correlations[str(model)] = _prompt_correlation(
            x, y, tasks[is_known], n_resamples, seed
        )
    return correlations


def _property_of_prompts(
    survey: xarray.Dataset, prompt_property: str | Mapping[str, float]
) -> Shaped[np.ndarray, "n_rows n_prompts"]:
    """Return what was measured of each prompt, or its difficulty, along the rows of
    `prompt_table`.
    """
    if isinstance(prompt_property, str):
        if (
            prompt_property not in survey
            or "prompt" not in survey[prompt_property].dims
        ):
            raise ValueError(f"{prompt_property!r} was not measured on each prompt")
        values = survey[prompt_property]
    else:
        ids = [str(prompt) for prompt in survey["prompt"].values]
        if unknown := sorted(set(prompt_property) - set(ids)):
            raise ValueError(
                "a difficulty is given for prompts that were not measured: "
                f"{', '.join(unknown[:5])}"
            )
        # A prompt without a difficulty is left out later, as NaN.
        difficulties = [prompt_property.get(prompt, np.nan) for prompt in ids]
        values = xarray.DataArray(difficulties, dims="prompt")
    return values.broadcast_like(survey["x"]).transpose("row", "prompt").values


def _prompt_correlation(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    tasks: Shaped[np.ndarray, " n"],
    n_resamples: int,
    seed: int,
) -> PromptCorrelation:
    rho = np.concatenate(
        [
            # Prompts are drawn in pairs of coupling and property.
            rank_correlation_of_rows(x[drawn], y[drawn])
            for drawn in resamples(len(x), n_resamples, np.random.default_rng(seed))
        ]
    )
    is_defined = np.isfinite(rho)
    low, high = percentile_interval(rho[is_defined], len(x)).tolist()
    return PromptCorrelation(
        **asdict(rank_correlation(x, y)),
        interval=(low, high),
        n_dropped=int(np.isnan(rho).sum()),
        within_tasks=_mean_within_tasks(x, y, tasks),
    )


def _mean_within_tasks(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    tasks: Shaped[np.ndarray, " n"],
) -> float:
    """Return the mean over tasks of Spearman's ρ of their prompts, weighted by their
    number; prompts without a task are left out.
    """
    members = [tasks == task for task in np.unique(tasks) if task]
    rho = np.array(
        [
            rank_correlation_of_rows(x[None, is_in_task], y[None, is_in_task])[0]
            for is_in_task in members
        ]
    )
    sizes = np.array([is_in_task.sum() for is_in_task in members])
    is_defined = np.isfinite(rho)
    if not is_defined.any():
        return np.nan
    # A task of many prompts says more.
    weights = sizes[is_defined]
    return float(rho[is_defined] @ weights / weights.sum())


@dataclass(frozen=True, eq=False)
class PromptPoints:
    """Prompts by a property and by their coupling, in the groups of their tasks.

    Attributes:
        x, y: property and coupling of the prompts of each task, by its name; of
            prompts without tasks all stand under "".
        correlation: Spearman's and Kendall's over the prompts of all tasks; `None`
            below three prompts, and where x or y is constant.
    """

    x: dict[str, Float[np.ndarray, " n"]]
    y: dict[str, Float[np.ndarray, " n"]]
    correlation: RankCorrelation | None


@dataclass(frozen=True, eq=False)
class PromptRelation:
    """Coupling against a property of the prompts, over all of them and within tasks.

    Attributes:
        n_prompts: those that have both values.
        pooled: the values as they are.
        within_tasks: the values less the mean of their task; `None` where prompts have
            no task.
    """

    n_prompts: int
    pooled: PromptPoints
    within_tasks: PromptPoints | None


def prompt_relation(
    x: Float[np.ndarray, " n_prompts"],
    y: Float[np.ndarray, " n_prompts"],
    tasks: Mapping[str, Bool[np.ndarray, " n_prompts"]],
) -> PromptRelation:
    """Relate the coupling of one model on each prompt, y, to a property of the prompts.

    Args:
        x, y: NaN where a prompt has none; such prompts are left out.
        tasks: which prompts are of each task, by its name; empty without tasks.
    """
    is_known = np.isfinite(x) & np.isfinite(y)
    members = {task: is_in_task & is_known for task, is_in_task in tasks.items()}
    members = members or {"": is_known}
    pooled = PromptPoints(
        {task: x[is_in_task] for task, is_in_task in members.items()},
        {task: y[is_in_task] for task, is_in_task in members.items()},
        # Also the prompts that have no task.
        _correlation(x[is_known], y[is_known]),
    )
    n_prompts = int(is_known.sum())
    if not tasks:
        return PromptRelation(n_prompts, pooled, None)
    # Differences between tasks are taken out; what is left is within them.
    x_within = {task: values - values.mean() for task, values in pooled.x.items()}
    y_within = {task: values - values.mean() for task, values in pooled.y.items()}
    correlation = _correlation(
        np.concatenate(list(x_within.values())), np.concatenate(list(y_within.values()))
    )
    centred_points = PromptPoints(x_within, y_within, correlation)
    return PromptRelation(n_prompts, pooled, centred_points)


def _correlation(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]
) -> RankCorrelation | None:
    if len(x) < 3 or is_constant(x) or is_constant(y):
        return None
    return rank_correlation(x, y)
