"""Coupling against a score across models; and across tasks and prompts, within a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tl_coupling import statistics
from tl_coupling.border import Count, Seed, checked
from tl_coupling.coupling import Measure
from tl_coupling.generalization.fits import LinearFit, linear_fit
from tl_coupling.generalization.resampling import Bootstrap, bootstrap
from tl_coupling.generalization.tables import Measured, at_one_checkpoint, coupling_table, per_prompt
from tl_coupling.statistics import Interval, RankCorrelation, rank_correlation

if TYPE_CHECKING:
    import pandas
    import xarray

ALL = "all prompts"


@dataclass(frozen=True, eq=False)
class Association:
    """Coupling against a score across models: the line, the rank correlation, and a bootstrap of both."""

    linear: LinearFit
    spearman: RankCorrelation
    bootstrap: Bootstrap


@dataclass(frozen=True)
class PromptCorrelation(RankCorrelation):
    """Spearman's ρ over the prompts of a model; its interval by a bootstrap, with the draws dropped as constant."""

    interval: Interval
    n_dropped: int


def association(of: Measured, *, n_resamples: int, seed: int) -> Association:
    """The line, the rank correlation and the bootstrap of coupling against score; errors as of the first and last."""
    line = linear_fit(of.table, of.measure, of.score)
    x, y = (of.table[name].to_numpy(float) for name in (of.measure, of.score))
    return Association(line, rank_correlation(x, y), bootstrap(of.x, of.y, n_resamples=n_resamples, seed=seed))


@checked
def task_means(
    data: "xarray.Dataset",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> "pandas.DataFrame":
    """Mean coupling of every model and checkpoint on each task, with its interval over prompts.

    Args:
        data, k, measure: as in `generalization_study`.
        n_resamples: draws of a bootstrap over the prompts of the task.
        seed: of `numpy.random.default_rng`.

    Returns:
        columns `model`, `checkpoint`, `task` ("all prompts" last; alone where prompts have no task), `n_prompts`,
        `mean`, `low` and `high` (95 % percentiles; NaN with one prompt), `null` (what random subspaces would give),
        `loss` (mean, in nats per token). `attrs` names `k` and `measure`.

    Raises:
        ValueError: the k or the measure was not measured; fewer than one draw.
    """
    import pandas

    held = per_prompt(data, k, measure)
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(held.sizes["row"]):
        here = held.isel(row=row).dropna("prompt", subset=["x"])
        for task, part in [*by_task(here).items(), (ALL, here)] if here.sizes["prompt"] else []:
            x, n = part["x"].values, part.sizes["prompt"]
            low, high = np.nan, np.nan
            if n > 1:
                draws = [x[drawn].mean(1) for drawn in statistics.resamples(n, n_resamples, rng)]
                low, high = statistics.percentile_interval(np.concatenate(draws))
            means = {name: float(part[name].mean()) if name in part else np.nan for name in ("x", "null", "loss")}
            which = str(part["model"].values), part["checkpoint"].values.item(), task, n
            rows.append((*which, means["x"], low, high, means["null"], means["loss"]))
    columns = ["model", "checkpoint", "task", "n_prompts", "mean", "low", "high", "null", "loss"]
    table = pandas.DataFrame(rows, columns=columns)
    table.attrs |= {"k": held["k"].item(), "measure": measure}
    return table


def fits_across_tasks(
    data: "xarray.Dataset", scores: "pandas.DataFrame | str", *, k: int, measure: str, checkpoint: int | str | None
) -> dict[str, LinearFit]:
    """Within each model, its coupling on each task against its score there, in a column with the name of the task.

    Raises:
        ValueError: fewer than three tasks that have a score; otherwise as `coupling_table` and `linear_fit`.

    Source: Aubry et al. 2025, table 3.
    """
    import pandas

    parts = {t: part for t, part in by_task(data).items() if isinstance(scores, str) or t in scores}
    if len(parts) < 3:
        raise ValueError(f"a fit across tasks needs at least three tasks that have scores, got {list(parts)}")
    rows = []
    for task, part in parts.items():
        table = coupling_table(per_prompt(part, k, measure), scores, measure=measure, score=task)
        table = at_one_checkpoint(table, checkpoint).rename(columns={task: "score", "loss": "score"})
        rows.append(table[["model", measure, "score"]].dropna())
    models = pandas.concat(rows, ignore_index=True).groupby("model", sort=False)
    return {str(model): linear_fit(points, measure, "score") for model, points in models if len(points) > 2}


@checked
def prompt_correlations(
    data: "xarray.Dataset",
    against: str | Mapping[str, float] = "n_pos",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    checkpoint: int | str | None = None,
    n_resamples: Count = 1000,
    seed: Seed = 0,
) -> dict[str, PromptCorrelation]:
    """Within each model, Spearman's ρ of the coupling on each prompt and a property of the prompt.

    Args:
        data, k, measure, checkpoint: as in `generalization_study`.
        against: what was measured of prompts, `"n_pos"` for their length in tokens or `"loss"`; or a difficulty by
            prompt id. Prompts without it are left out.
        n_resamples, seed: as in `bootstrap`, over prompts alone.

    Returns:
        by model.

    Raises:
        ValueError: nothing of that name was measured; unknown prompt ids; for some model, fewer than three prompts, or
            no difference between them.

    Cost: for each model, `n_resamples` rankings of the prompts.

    Source:
        Aubry et al. 2025, figure 10.
    """
    held = per_prompt(data, k, measure, also=(against,) if isinstance(against, str) else ())
    if isinstance(against, str):
        if against not in held or "prompt" not in held[against].dims:
            raise ValueError(f"{against!r} was not measured on each prompt")
        name, other = against, held[against].broadcast_like(held["x"]).transpose("row", "prompt").values
    else:
        ids = [str(prompt) for prompt in held["prompt"].values]
        if unknown := sorted(set(against) - set(ids)):
            raise ValueError(f"a difficulty is given for prompts that were not measured: {', '.join(unknown[:5])}")
        name, other = "difficulty", np.tile([against.get(prompt, np.nan) for prompt in ids], (held.sizes["row"], 1))
    found = {}
    rows = held[["model", "checkpoint"]].to_dataframe()[held["x"].notnull().any("prompt").values]
    for row, model in at_one_checkpoint(rows, checkpoint)["model"].items():
        both = np.isfinite(held["x"].values[row]) & np.isfinite(other[row])
        x, y = held["x"].values[row][both], other[row][both].astype(float)
        if len(x) < 3 or statistics.is_constant(x) or statistics.is_constant(y):
            raise ValueError(f"{measure} against {name} of {model!r} needs at least three prompts that differ in both")
        drawn = statistics.resamples(len(x), n_resamples, np.random.default_rng(seed))
        rho = np.concatenate([statistics.rank_correlation_of_rows(x[prompts], y[prompts]) for prompts in drawn])
        low, high = statistics.percentile_interval(rho[np.isfinite(rho)]).tolist()
        of_all = rank_correlation(x, y)
        found[str(model)] = PromptCorrelation(of_all.n, of_all.rho, of_all.p, (low, high), int(np.isnan(rho).sum()))
    return found


def by_task(data: "xarray.Dataset") -> "dict[str, xarray.Dataset]":
    """The prompts of each task; those without one are left out."""
    if "task" not in data.coords:
        return {}
    tasks = data["task"].values.astype(str)
    return {task: data.isel(prompt=np.flatnonzero(tasks == task)) for task in dict.fromkeys(tasks.tolist()) if task}
