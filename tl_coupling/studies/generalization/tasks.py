"""Coupling on each task: means of every model, and the line across the tasks of a
model.
"""

import numpy as np
import pandas
import xarray
from jaxtyping import Float

from tl_coupling.arguments import Count, Seed, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.measures import AnyMeasure, measure_named
from tl_coupling.statistics import (
    ALL_PROMPTS,
    Interval,
    LinearFit,
    linear_fit,
    percentile_interval,
    resamples,
    t_interval,
)
from tl_coupling.studies.generalization.associations import FEWEST_RESAMPLED
from tl_coupling.studies.generalization.model_tables import (
    checkpoint_rows,
    coupling_table,
    prompt_table,
)
from tl_coupling.studies.surveys import (
    UNTRAINED,
    pairs_of_layers,
    select_orientation,
    step_order,
)

# Of a map that holds every k.
_SHOWN_KS = (3, 10, 30)
_COLUMNS = (
    "model",
    "checkpoint",
    "task",
    "n_prompts",
    "mean",
    "low",
    "high",
    "null",
    "loss",
    "d_model",
    "n_layers",
)


def split_by_task(data: xarray.Dataset) -> dict[str, xarray.Dataset]:
    """Return the prompts of each task; those without a task are left out."""
    if "task" not in data.coords:
        return {}
    tasks = data["task"].values.astype(str)
    return {
        task: data.isel(prompt=np.flatnonzero(tasks == task))
        for task in dict.fromkeys(tasks.tolist())
        if task
    }


@checked
def task_means(
    data: xarray.Dataset,
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> pandas.DataFrame:
    """Return the mean coupling of every model and checkpoint on each task.

    Means have an interval over prompts: of fewer than six prompts the t interval.

    Args:
        data, k, measure: as in `generalization_study`.
        n_resamples, seed: as in `bootstrap`, over the prompts of the task alone.

    Returns:
        columns `model`, `checkpoint`, `task` ("all prompts" last; alone where prompts
        have no task), `n_prompts`, `mean`, `low` and `high` (95 % interval; NaN with
        one prompt), `null` (what random subspaces would give), `loss` (mean, in nats
        per token), `d_model` and `n_layers` (NaN where unknown).
        `attrs` names `k`, `measure` and the `pairs` of layers that the means are over.

    Raises:
        ValueError: the k or the measure was not measured; fewer than one draw.

    Example:
        >>> table = tlc.generalization.task_means(data, k=4, n_resamples=100)
        >>> table[table.model == "width8"].task.tolist()
        ['sums', 'riddles', 'all prompts']
    """
    measured = measure_named(measure).name
    survey = prompt_table(data, k, measured)
    # One stream of draws serves all rows, in their order.
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(survey.sizes["row"]):
        model_survey = survey.isel(row=place).dropna("prompt", subset=["x"])
        # The model was not measured at this checkpoint.
        if not model_survey.sizes["prompt"]:
            continue
        for task, part in [
            *split_by_task(model_survey).items(),
            (ALL_PROMPTS, model_survey),
        ]:
            low, high = _interval_of_mean(part["x"].values, n_resamples, rng)
            rows.append(
                {
                    "model": str(part["model"].values),
                    "checkpoint": part["checkpoint"].values.item(),
                    "task": task,
                    "n_prompts": part.sizes["prompt"],
                    "mean": _mean(part, "x"),
                    "low": low,
                    "high": high,
                    "null": _mean(part, "null"),
                    "loss": _mean(part, "loss"),
                    "d_model": _mean(part, "d_model"),
                    "n_layers": _mean(part, "n_layers"),
                }
            )
    table = pandas.DataFrame(rows, columns=list(_COLUMNS))
    table.attrs |= {
        "k": survey["k"].item(),
        "measure": measured,
        "pairs": pairs_of_layers(data),
    }
    return table


@checked
def task_maps(data: xarray.Dataset | CouplingMap) -> xarray.Dataset:
    """Return the mean map of every model and checkpoint on each task.

    `interactive.show_atlas` shows them.

    Args:
        data: of `open_survey`, `run_survey`, `checkpoint_sweep` or `measure_prompts`; a
            map of layers, whose task is its prompt, at k = 3, 10, 30 and all that it
            holds; or what this function returned, which stays as it is.

    Returns:
        a Dataset over `model`, `checkpoint` and `task` (prompts without a task are left
        out where others have one; else it is "all prompts"): `coupling`, the mean over
        the prompts of the task that were measured, `[… k layer other_layer]`;
        `null_coupling`, what random subspaces would give, `[… k]`; and `n_prompts`. Of
        two orientations the first.

    Raises:
        ValueError: there are no maps of layers in the data.

    Example:
        >>> settings = tlc.Settings(k=(2, 4))
        >>> sums = [tlc.Prompt("w1 w2 w3", "a", "sums"), tlc.Prompt("w4 w5", "b", "sums")]
        >>> maps = tlc.generalization.task_maps(
        ...     tlc.surveys.measure_prompts(model, sums, settings)
        ... )
        >>> dict(maps["coupling"].sizes)
        {'model': 1, 'checkpoint': 1, 'task': 1, 'k': 2, 'layer': 2, 'other_layer': 2}
    """
    if isinstance(data, CouplingMap):
        return _map_of_prompt(data)
    if "task" in data.dims:
        return data
    data = select_orientation(data)
    dims_of_map = data["coupling"].dims if "coupling" in data else ()
    if not {"prompt", "k", "layer", "other_layer"} <= set(dims_of_map):
        raise ValueError(
            "wanted a survey with a map of coupling for each prompt, there is none in the "
            f"data: {', '.join(map(str, data.data_vars)) or 'nothing'}"
        )
    names = {"model": str(data.attrs.get("model") or "model"), "checkpoint": "main"}
    for dim, name in names.items():
        if dim not in data.dims:
            data = data.drop_vars(dim, errors="ignore").expand_dims({dim: [name]})
    data = data.sel(
        checkpoint=sorted(data["checkpoint"].values.tolist(), key=step_order)
    )
    maps = {
        task: _mean_map(part)
        for task, part in (split_by_task(data) or {ALL_PROMPTS: data}).items()
    }
    return xarray.concat(
        list(maps.values()), xarray.Variable("task", list(maps))
    ).transpose("model", "checkpoint", "task", ...)


def _mean_map(part: xarray.Dataset) -> xarray.Dataset:
    """Return the mean over the prompts of a task, and how many were measured."""
    is_measured = part["coupling"].notnull().any(["k", "layer", "other_layer"])
    return xarray.Dataset(
        {
            "coupling": part["coupling"].mean("prompt"),
            "null_coupling": part["null_coupling"].mean("prompt"),
            "n_prompts": is_measured.sum("prompt"),
        }
    )


def _map_of_prompt(result: CouplingMap) -> xarray.Dataset:
    """Return a map of layers as that of a task."""
    if result.kind != "depth":
        raise ValueError(
            f"wanted a map of layers, of `depth_coupling`, got one of kind {result.kind!r}"
        )
    ks = sorted({*(k for k in _SHOWN_KS if k < result.k), result.k})
    values = np.stack([result.coupling(k).cpu().numpy() for k in ks])
    facts = result.provenance
    checkpoint = UNTRAINED if facts.get("untrained") else facts.get("checkpoint")
    single = xarray.Dataset(
        {
            "coupling": (["k", "layer", "other_layer"], values),
            "null_coupling": ("k", [result.null(k) for k in ks]),
            "n_prompts": result.n_prompts,
        },
        {
            "k": ks,
            "layer": list(result.row_layers),
            "other_layer": list(result.col_layers),
        },
    )
    return single.expand_dims(
        model=[str(facts.get("model") or "model")],
        checkpoint=["main" if checkpoint is None else checkpoint],
        task=[str(facts.get("prompt") or ALL_PROMPTS)],
    )


def _mean(part: xarray.Dataset, name: str) -> float:
    return float(part[name].mean()) if name in part else np.nan


def _interval_of_mean(
    values: Float[np.ndarray, " n"], n_resamples: int, rng: np.random.Generator
) -> Interval:
    """Return the bootstrap interval of a mean: the t interval of fewer than six values,
    whose resamples say too little; NaN of one value.
    """
    n = len(values)
    # Drawn even of few values, so that later tasks see the same draws.
    means = [values[drawn].mean(1) for drawn in resamples(n, n_resamples, rng)]
    if n < 2:
        return np.nan, np.nan
    if n < FEWEST_RESAMPLED:
        error = values.std(ddof=1) / np.sqrt(n)
        return t_interval(float(values.mean()), float(error), float(n - 1))
    low, high = percentile_interval(np.concatenate(means), n)
    return low, high


def fits_across_tasks(
    data: xarray.Dataset,
    scores: pandas.DataFrame | str,
    *,
    k: int,
    measure: str,
    checkpoint: int | str | None,
) -> dict[str, LinearFit]:
    """Fit, within each model, its score on each task to its coupling there.

    The score on a task is the column with the name of the task.

    Raises:
        ValueError: fewer than three tasks that have a score; as in `linear_fit`.

    Source: Aubry et al. 2025, table 3.
    """
    # A score on a task is the column of its name; a loss is there for all.
    parts = {
        task: part
        for task, part in split_by_task(data).items()
        if isinstance(scores, str) or task in scores
    }
    if len(parts) < 3:
        raise ValueError(
            "a fit across tasks needs at least three tasks that have scores, "
            f"got {list(parts)}"
        )
    tables = []
    for task, part in parts.items():
        survey = prompt_table(part, k, measure)
        table = coupling_table(survey, scores, measure=measure, score=task)
        table = checkpoint_rows(table, checkpoint)
        # The scores may have a column "score" as well: that of all tasks.
        task_points = table[["model", measure]]
        task_points = task_points.assign(score=table[task if task in table else "loss"])
        tables.append(task_points.dropna())
    models = pandas.concat(tables, ignore_index=True).groupby("model", sort=False)
    return {
        str(model): linear_fit(points, measure, "score")
        for model, points in models
        # A line through two points fits always.
        if len(points) > 2
    }
