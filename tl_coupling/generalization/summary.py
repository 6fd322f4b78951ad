"""Everything at once: does coupling go with the score, and what speaks against it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tl_coupling.border import Count, Seed, checked
from tl_coupling.coupling import Measure
from tl_coupling.generalization.associations import (
    Association,
    PromptCorrelation,
    association,
    by_task,
    fits_across_tasks,
    k_sweep,
    prompt_correlations,
    task_fits,
)
from tl_coupling.generalization.fits import ExponentialFit, LinearFit, complete_rows, exponential_fit, subset_fits
from tl_coupling.generalization.regressions import (
    COVARIATES,
    LeaveOneOut,
    PartialRegression,
    covariate_fits,
    leave_one_out,
    partial_regression,
)
from tl_coupling.generalization.tables import largest_k, measured, needed

if TYPE_CHECKING:
    import pandas
    import xarray

_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Generalization:
    """Coupling against a score across models.

    Attributes:
        measure, k, score: what is compared; `score` is "loss" where the survey's own loss stands in for one.
        table: a row a model that has both.
        n_prompts: over which the coupling of a model is a mean.
        association: the line, Spearman's ρ and the bootstrap, over all models.
        exponential: the exponential fit; `None` where there is none.
        influence: the line without each model; `None` where there are three.
        covariates: each covariate alone, beside coupling on the same models.
        partial: coupling with each covariate held fixed, and with all of them, by what is held fixed.
        subsets: the line on each subset.
        by_k, by_task: the association at each k, and on the prompts of each task.
        across_tasks: within each model, the line over tasks.
        prompt_length, prompt_difficulty: within each model, coupling of its prompts against these.
        left_out: what is not here and why: models without score or coupling, statistics without enough models.
    """

    measure: str
    k: int
    score: str
    table: "pandas.DataFrame"
    n_prompts: int
    association: Association
    exponential: ExponentialFit | None
    influence: LeaveOneOut | None
    covariates: "pandas.DataFrame"
    partial: dict[str, PartialRegression]
    subsets: dict[str, LinearFit]
    by_k: dict[int, Association]
    by_task: dict[str, Association]
    across_tasks: dict[str, LinearFit]
    prompt_length: dict[str, PromptCorrelation]
    prompt_difficulty: dict[str, PromptCorrelation]
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it: tables as lists of rows, `None` for what is not finite."""
        return _jsonable(self)


@checked
def generalization_study(
    data: "xarray.Dataset",
    scores: "pandas.DataFrame | str" = "loss",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    score: str = "score",
    checkpoint: int | str | None = None,
    controls: Sequence[str] | None = None,
    subsets: "Mapping[str, str | Sequence[bool] | pandas.Series] | None" = None,
    difficulty: Mapping[str, float] | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Generalization:
    """Coupling against a score across models, with what could explain it otherwise.

    Args:
        data: a survey: what `measure_prompts` gives, along `model` and `checkpoint`.
        scores: as `read_scores` gives them; or `"loss"`, the mean loss on the same prompts in nats per token: lower is
            better, and models with different tokenizers cannot be compared by it.
        k: how many top singular vectors; the largest number that was measured by default.
        measure: as in `CouplingMap.values`.
        score: which column of `scores`.
        checkpoint: of all models; each model's last by default, and "untrained" for the untrained twins.
        controls: covariates, columns or expressions such as `"log10(n_parameters)"`; by default depth, width and
            the logarithms of parameters and training tokens, those that are known and differ.
        subsets: as in `subset_fits`.
        difficulty: of prompts, by id.
        n_resamples, seed: as in `bootstrap`.

    Raises:
        ValueError: fewer than three models that have both; coupling or score the same for all; arguments that name
            what is not there. What merely lacks models is `left_out` instead.

    Cost: a bootstrap for each k and task, and one for each model.

    Example:
        >>> import numpy as np, pandas, xarray
        >>> from tl_coupling.generalization import generalization_study
        >>> coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * np.arange(4)[:, None]
        >>> dims = ("model", "prompt", "k")
        >>> data = xarray.Dataset({"mean_coupling": (dims, coupling)}, {"model": list("abcde"), "k": [10]})
        >>> scores = pandas.DataFrame({"model": list("abcde"), "score": [30, 35, 41, 43, 52]})
        >>> result = generalization_study(data, scores, n_resamples=100)
        >>> round(result.association.linear.slope), round(result.association.linear.r_squared, 2)
        (52, 0.97)
    """
    import pandas

    # Read once: a survey may stand in thousands of files.
    data = needed(data, measure, also=("n_pos",))
    k = largest_k(data) if k is None else k
    held = measured(data, k, measure, scores, score, checkpoint)
    table, x, y = held.table, held.measure, held.score
    left_out = dict(held.left_out)

    def unless_impossible(name: str, compute: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result | None:
        try:
            return compute(*args, **kwargs)
        except ValueError as error:
            left_out[name] = str(error)
            return None

    if controls is not None and len(set(controls)) < len(controls):
        raise ValueError(f"`controls` must be different columns, got {list(controls)}")
    main = association(held, n_resamples=n_resamples, seed=seed)
    chosen = [name for column, name in COVARIATES.items() if column in table] if controls is None else list(controls)
    if controls is not None:
        # A name that is not there is the caller's mistake, not a lack of models.
        complete_rows(table, chosen)
    alone = {name: unless_impossible(f"covariate {name}", covariate_fits, table, y, x, [name]) for name in chosen}
    usable = list(_there(alone))
    held_fixed = {name: [name] for name in usable} | ({" + ".join(usable): usable} if len(usable) > 1 else {})
    partial = {
        name: unless_impossible(f"given {name}", partial_regression, table, y, x, fixed)
        for name, fixed in held_fixed.items()
    }
    where: dict[str, Any] = {"measure": measure, "checkpoint": checkpoint}
    drawn: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    by_k = {k: main}
    for one in sorted({int(one) for one in data["k"].values} - {k}):
        by_k |= unless_impossible(f"k = {one}", k_sweep, data, scores, ks=[one], score=score, **where, **drawn) or {}
    tasks: dict[str, Association] = {}
    for task, part in by_task(data).items():
        tasks |= unless_impossible(f"task {task}", task_fits, part, scores, k=k, score=score, **where, **drawn) or {}
    of_prompts: dict[str, Any] = {"k": k, "seed": seed, **where}
    lengths: dict[str, PromptCorrelation] = {}
    for model in data["model"].values.tolist() if "model" in data.dims else ():
        of_model = data.sel(model=[model])
        lengths |= unless_impossible(f"prompt length, {model}", prompt_correlations, of_model, **of_prompts) or {}
    return Generalization(
        measure=measure,
        k=k,
        score=y,
        table=table,
        n_prompts=held.n_prompts,
        association=main,
        exponential=unless_impossible("exponential", exponential_fit, table, x, y),
        influence=unless_impossible("influence", leave_one_out, table, x, y),
        covariates=pandas.concat([covariate_fits(table, y, x, []), *_there(alone).values()]),
        partial=_there(partial),
        subsets=subset_fits(table, subsets or {}, x, y),
        by_k=dict(sorted(by_k.items())),
        by_task=tasks,
        across_tasks=unless_impossible("across tasks", fits_across_tasks, data, scores, k=k, **where) or {},
        prompt_length=lengths,
        prompt_difficulty=prompt_correlations(data, difficulty, **of_prompts) if difficulty else {},
        left_out=left_out,
    )


def _there(results: "Mapping[Any, _Result | None]") -> dict[Any, _Result]:
    return {name: result for name, result in results.items() if result is not None}


def _jsonable(value: Any) -> Any:
    import pandas

    if is_dataclass(value) and not isinstance(value, type):
        return {name: _jsonable(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, pandas.DataFrame):
        named = value if isinstance(value.index, pandas.RangeIndex) else value.reset_index()
        return [_jsonable(row) for row in named.to_dict("records")]
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_jsonable(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
