"""Coupling against a score at one k, at each k, on each task; and against prompts, within a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tl_coupling.border import Count, Seed, checked
from tl_coupling.coupling import Measure
from tl_coupling.generalization.fits import (
    Interval,
    LinearFit,
    RankCorrelation,
    is_constant,
    linear_fit,
    rank_correlation,
)
from tl_coupling.generalization.resampling import Bootstrap, bootstrap, correlation, percentiles
from tl_coupling.generalization.tables import (
    Measured,
    at_one_checkpoint,
    coupling_table,
    largest_k,
    measured,
    of_rows,
    per_prompt,
)

if TYPE_CHECKING:
    import pandas
    import xarray

_CHUNK = 250
ALL = "all prompts"


@dataclass(frozen=True, eq=False)
class Association:
    """Coupling against a score across models: the line, the rank correlation, and what other samples would give."""

    linear: LinearFit
    spearman: RankCorrelation
    bootstrap: Bootstrap


@dataclass(frozen=True)
class PromptCorrelation:
    """Spearman's ρ of coupling and a property of the prompts, within one model.

    Attributes:
        n: prompts that have both.
        rho: in [−1, 1]; its interval is a bootstrap over prompts, 95 % percentiles.
        p: of ρ = 0.
        n_dropped: draws left out because one side was constant.
    """

    n: int
    rho: float
    interval: Interval
    p: float
    n_dropped: int


def association(of: Measured, *, n_resamples: int = 2000, seed: int = 0) -> Association:
    """The line, the rank correlation and the bootstrap of coupling against score.

    Raises:
        ValueError: as `linear_fit` and `bootstrap`.
    """
    return Association(
        linear=linear_fit(of.table, of.measure, of.score),
        spearman=rank_correlation(of.table, of.measure, of.score),
        bootstrap=bootstrap(of.x, of.y, n_resamples=n_resamples, seed=seed),
    )


@checked
def k_sweep(
    data: "xarray.Dataset",
    scores: "pandas.DataFrame | str",
    *,
    ks: Sequence[int] | None = None,
    measure: Measure = "coupling",
    score: str = "score",
    checkpoint: int | str | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> dict[int, Association]:
    """Coupling against score at each number of singular vectors; every k sees the same draws.

    Args:
        data, scores, measure, score: as in `coupling_table`.
        ks: all that were measured by default. At k = 1 every coupling is 1, and there is nothing to fit.
        checkpoint: of all models; each model's last by default, and "untrained" for the untrained twins.
        n_resamples, seed: as in `bootstrap`.

    Raises:
        ValueError: as `coupling_table`, `linear_fit` and `bootstrap`.

    Source:
        Aubry et al. 2025, figure of the correlation for varying K.
    """
    ks = sorted(int(k) for k in data["k"].values) if ks is None else ks
    return {
        k: association(measured(data, k, measure, scores, score, checkpoint), n_resamples=n_resamples, seed=seed)
        for k in ks
    }


@checked
def task_fits(
    data: "xarray.Dataset",
    scores: "pandas.DataFrame | str",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    score: str = "score",
    checkpoint: int | str | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> dict[str, Association]:
    """Coupling on the prompts of each task against score, across models.

    The score is the column that has the name of the task, where `scores` has one; the loss is that on the task's
    prompts. Arguments and errors as in `k_sweep`; prompts without a task are left out.
    """
    return {
        task: association(
            measured(part, k, measure, scores, _score_of(task, scores, score), checkpoint),
            n_resamples=n_resamples,
            seed=seed,
        )
        for task, part in by_task(data).items()
    }


@checked
def task_means(
    data: "xarray.Dataset",
    k: int | None = None,
    measure: Measure = "coupling",
    *,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> "pandas.DataFrame":
    """Mean coupling of every model and checkpoint on each task, with its interval over prompts.

    Args:
        data, k, measure: as in `coupling_table`.
        n_resamples: draws of a bootstrap over the task's prompts.
        seed: of `numpy.random.default_rng`.

    Returns:
        columns `model`, `checkpoint`, `task` ("all prompts" last; alone where prompts have none), `n_prompts`, `mean`,
        `low` and `high` (95 % percentiles; NaN with one prompt), `null` (what random subspaces would give), `loss`
        (mean, in nats per token). `attrs` names `k` and `measure`.

    Raises:
        ValueError: as `coupling_table`; fewer than one draw.
    """
    import pandas

    k = largest_k(data) if k is None else k
    held = per_prompt(data, k, measure)
    rng = np.random.default_rng(seed)
    rows = []
    for model, checkpoint in product(held["model"].values, held["checkpoint"].values):
        here = held.sel(model=model, checkpoint=checkpoint).dropna("prompt", subset=["x"])
        for task, part in [*by_task(here).items(), (ALL, here)] if here.sizes["prompt"] else []:
            x, n = part["x"].values, part.sizes["prompt"]
            low, high = percentiles(x[rng.integers(n, size=(n_resamples, n))].mean(1)) if n > 1 else (np.nan, np.nan)
            means = {name: float(part[name].mean()) if name in part else np.nan for name in ("x", "null", "loss")}
            rows.append((str(model), checkpoint, task, n, means["x"], low, high, means["null"], means["loss"]))
    columns = ["model", "checkpoint", "task", "n_prompts", "mean", "low", "high", "null", "loss"]
    table = pandas.DataFrame(rows, columns=columns)
    table.attrs |= {"k": k, "measure": measure}
    return table


@checked
def fits_across_tasks(
    data: "xarray.Dataset",
    scores: "pandas.DataFrame | str",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    checkpoint: int | str | None = None,
) -> dict[str, LinearFit]:
    """Within each model, its coupling on each task against its score there: a point a task.

    Args:
        data, scores, measure, checkpoint: as in `k_sweep`; `scores` needs a column for each task, by its name.
        k: as in `coupling_table`.

    Raises:
        ValueError: fewer than three tasks that have a score; otherwise as `coupling_table` and `linear_fit`.

    Source:
        Aubry et al. 2025, table 3.
    """
    import pandas

    parts = {t: part for t, part in by_task(data).items() if isinstance(scores, str) or t in scores}
    if len(parts) < 3:
        raise ValueError(f"a fit across tasks wants three tasks or more that have scores, got {list(parts)}")
    rows = []
    for task, part in parts.items():
        table = at_one_checkpoint(coupling_table(part, k, measure, scores, score=task), checkpoint)
        rows.append(table.rename(columns={task: "score", "loss": "score"})[["model", measure, "score"]])
    every = pandas.concat(rows, ignore_index=True).dropna()
    return {
        str(model): linear_fit(points, measure, "score")
        for model, points in every.groupby("model", sort=False)
        if len(points) > 2
    }


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
    """Within each model, coupling of each prompt against what the prompt is like.

    Args:
        data, k, measure: as in `coupling_table`.
        against: what was measured of prompts: `"n_pos"`, their length in tokens, or `"loss"`; or a difficulty by
            prompt id. Prompts that lack it are left out.
        checkpoint: each model's last by default.
        n_resamples, seed: as in `bootstrap`; prompts alone are resampled.

    Returns:
        by model.

    Raises:
        ValueError: nothing of that name was measured; ids of prompts that there are not; for some model, fewer than
            three prompts, or all alike.

    Cost: for each model `n_resamples · n_prompts` operations, and as many ranks.

    Source:
        Aubry et al. 2025, figure 10.
    """
    held = per_prompt(data, k, measure, also=(against,) if isinstance(against, str) else ())
    rows = at_one_checkpoint(coupling_table(data, k, measure), checkpoint)
    x = of_rows(held["x"], rows)
    if isinstance(against, str):
        if against not in held or "prompt" not in held[against].dims:
            raise ValueError(f"nothing called {against!r} was measured of prompts")
        name, other = against, of_rows(held[against].broadcast_like(held["x"]), rows)
    else:
        ids = [str(prompt) for prompt in held["prompt"].values]
        if unknown := sorted(set(against) - set(ids)):
            raise ValueError(f"a difficulty is given for prompts that were not measured: {', '.join(unknown[:5])}")
        name, other = "difficulty", np.tile([float(against.get(prompt, np.nan)) for prompt in ids], (len(rows), 1))
    found = {}
    for model, its_x, its_other in zip(rows["model"], x, other, strict=True):
        both = np.isfinite(its_x) & np.isfinite(its_other)
        its_x, its_other = its_x[both], its_other[both]
        if len(its_x) < 3 or is_constant(its_x) or is_constant(its_other):
            raise ValueError(f"{measure} against {name} of {model!r} wants three prompts or more that differ in both")
        found[model] = _over_prompts(its_x, its_other, n_resamples, seed)
    return found


def _over_prompts(
    x: Float[np.ndarray, " n_prompts"], y: Float[np.ndarray, " n_prompts"], n_resamples: int, seed: int
) -> PromptCorrelation:
    from scipy import stats

    rng = np.random.default_rng(seed)
    draws: list[Any] = []
    for start in range(0, n_resamples, _CHUNK):
        drawn = rng.integers(len(x), size=(min(_CHUNK, n_resamples - start), len(x)))
        usable = (np.ptp(x[drawn], axis=1) > 0) & (np.ptp(y[drawn], axis=1) > 0)
        ranks = (stats.rankdata(side[drawn[usable]], axis=1) for side in (x, y))
        draws.extend(correlation(*ranks)[0])
    result = stats.spearmanr(x, y)
    low, high = percentiles(np.array(draws)).tolist()
    return PromptCorrelation(
        len(x), float(result.statistic), (low, high), float(result.pvalue), n_resamples - len(draws)
    )


def by_task(data: "xarray.Dataset") -> "dict[str, xarray.Dataset]":
    """The prompts of each task; those without one are left out."""
    if "task" not in data.coords:
        return {}
    tasks = data["task"].values.astype(str)
    return {task: data.isel(prompt=np.flatnonzero(tasks == task)) for task in dict.fromkeys(tasks.tolist()) if task}


def _score_of(task: str, scores: "pandas.DataFrame | str", score: str) -> str:
    return task if not isinstance(scores, str) and task in scores else score
