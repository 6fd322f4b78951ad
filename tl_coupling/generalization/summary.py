"""Everything at once: does coupling go with the score, and what speaks against it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pandas
import xarray

from tl_coupling.border import Count, Seed, checked
from tl_coupling.coupling import Measure
from tl_coupling.generalization import associations, fits
from tl_coupling.generalization.associations import Association, PromptCorrelation
from tl_coupling.generalization.tables import checked_scores, measured, needed, per_prompt
from tl_coupling.statistics import rank_correlation

# Parameters and tokens span decades: untransformed, the largest model would decide.
_COVARIATES = ("log10(n_parameters)", "n_layers", "d_model", "log10(training_tokens)")


@dataclass(frozen=True, eq=False, repr=False)
class Generalization:
    """Coupling against a score across models.

    Attributes:
        measure, k, score: what is compared; `score` is "loss" where the survey's own loss takes the place of one.
        table, n_prompts: one row per model that has both; over how many prompts its coupling is a mean.
        association, exponential, influence: the line, ρ and bootstrap over all models; the exponential fit; the line
            without each model. `None` where there are too few models.
        covariates, subsets: each covariate alone, beside coupling on the same models; the line on each subset.
        partial: coupling with each covariate held fixed, and with all of them, by what is held fixed.
        by_k, by_task: the association at each k, and on the prompts of each task. Every k sees the same draws.
        across_tasks, prompt_length, prompt_difficulty: within each model, over its tasks or its prompts.
        left_out: what is missing and why: models without score or coupling, statistics without enough models.
    """

    measure: str
    k: int
    score: str
    table: pandas.DataFrame
    n_prompts: int
    association: Association
    exponential: fits.ExponentialFit | None
    influence: fits.LeaveOneOut | None
    covariates: pandas.DataFrame
    partial: dict[str, fits.LinearFit]
    subsets: dict[str, fits.LinearFit]
    by_k: dict[int, Association]
    by_task: dict[str, Association]
    across_tasks: dict[str, fits.LinearFit]
    prompt_length: dict[str, PromptCorrelation]
    prompt_difficulty: dict[str, PromptCorrelation]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        line = self.association.linear
        low, high = line.slope_interval
        return (
            f"Generalization({self.score} against {self.measure}, k = {self.k}, {line.n} models, {self.n_prompts} "
            f"prompts:\n  slope {line.slope:.4g} ({low:.4g} to {high:.4g}), R² = {line.r_squared:.3f}, "
            f"p = {line.p:.2g}, Spearman's ρ = {self.association.spearman.rho:.3f})"
        )

    @property
    def slopes(self) -> pandas.DataFrame:
        """The slope over all models, with t and bootstrap intervals, on each subset, and with covariates held fixed.

        Columns `n` (models), `slope`, `low`, `high`, `r_squared` (partial where something is held fixed), `p`, `vif`.
        """
        import pandas

        line, nan = self.association.linear, float("nan")
        given = {f"given {name}": fit for name, fit in self.partial.items()}
        rows = [
            (name, fit.n, fit.slope, *fit.slope_interval, fit.r_squared, fit.p, fit.vif if fit.controls else nan)
            for name, fit in (("all models", line), *self.subsets.items(), *given.items())
        ]
        rows.insert(1, ("all models, bootstrap", line.n, line.slope, *self.association.bootstrap.slope, nan, nan, nan))
        columns = ["fit", "n", "slope", "low", "high", "r_squared", "p", "vif"]
        return pandas.DataFrame(rows, columns=columns).set_index("fit")

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it: tables as lists of rows, `None` for what is not finite."""
        import pandas

        def plain(value: Any) -> Any:
            if isinstance(value, pandas.DataFrame):
                return (value.reset_index() if value.index.name else value).to_dict("records")
            return value.tolist()

        return json.loads(json.dumps(asdict(self), default=plain), parse_constant=lambda _: None)


@checked
def generalization_study(
    data: xarray.Dataset,
    scores: pandas.DataFrame | str = "loss",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    score: str = "score",
    checkpoint: int | str | None = None,
    controls: Sequence[str] | None = None,
    subsets: Mapping[str, str | Sequence[bool] | pandas.Series] | None = None,
    difficulty: Mapping[str, float] | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Generalization:
    """Coupling against a score across models, with what else could explain it.

    Args:
        data: a survey: what `run` or `measure_prompts` gives, along `model` and `checkpoint`.
        scores: from `read_scores`; or `"loss"`, the mean loss on the same prompts in nats per token: lower is better,
            and models with different tokenizers cannot be compared by it. On a task, the column with the task's name
            is the score if there is one. Models that were not measured are left out, with a warning.
        k, measure: as in `CouplingMap.values`; by default the largest k that was measured.
        score: which column of `scores`.
        checkpoint: of all models; each model's last by default, and "untrained" for the untrained twins.
        controls: covariates, as in `linear_fit`; by default depth, width and the logarithms of parameters and training
            tokens, those that are known and differ.
        subsets: by name, a query over the table such as `"score > 45 and n_layers <= 32"`, or a mask over its rows.
        difficulty: of prompts, by id.
        n_resamples, seed: as in `bootstrap`.

    Raises:
        ValueError: fewer than three models that have both; coupling or score the same for all; arguments that name what
            is not there. Statistics that only lack models are in `left_out` instead.

    Cost: one bootstrap for each k, task and model.

    Example:
        >>> import numpy as np, pandas, xarray
        >>> from tl_coupling.generalization import generalization_study
        >>> coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * np.arange(4)[:, None]
        >>> dims = ("model", "prompt", "k")
        >>> data = xarray.Dataset({"mean_coupling": (dims, coupling)}, {"model": list("abcde"), "k": [10]})
        >>> scores = pandas.DataFrame({"model": list("abcde"), "score": [30, 35, 41, 43, 52]})
        >>> generalization_study(data, scores, n_resamples=100)
        Generalization(score against coupling, k = 10, 5 models, 4 prompts:
          slope 52 (35.16 to 68.84), R² = 0.970, p = 0.0022, Spearman's ρ = 1.000)
    """
    # Read once: a survey may be spread over thousands of files.
    data = needed(data, measure, also=("n_pos",))
    models = data["model"].values.astype(str).tolist() if "model" in data.dims else []
    if isinstance(scores, str):
        score = "loss"
    elif models:
        # Here, so that there is one warning for models that were not measured.
        scores = checked_scores(scores, score, models)
    ks = sorted(data["k"].values.tolist())
    k = ks[-1] if k is None else k
    where: dict[str, Any] = {"k": k, "measure": measure, "checkpoint": checkpoint}

    def associated(part: xarray.Dataset, k: int, score: str) -> tuple[Association, pandas.DataFrame, Any]:
        table, x, y, left_out = measured(per_prompt(part, k, measure), scores, measure, score, checkpoint)
        line = fits.linear_fit(table, measure, score)
        rank = rank_correlation(*table[[measure, score]].to_numpy(float).T)
        drawn = associations.bootstrap(x, y, n_resamples=n_resamples, seed=seed)
        return Association(line, rank, drawn), table, left_out

    def tried(what: str, compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result; where it cannot be computed, `None`, and the reason in `left_out`."""
        try:
            return compute(*args, **options)
        except ValueError as error:
            left_out[what] = str(error)
            return None

    def each(what: str, keys: Iterable[Any], compute: Callable[[Any], Any]) -> dict[Any, Any]:
        return {key: found for key in keys if (found := tried(f"{what}{key}", compute, key)) is not None}

    main, table, left_out = associated(data, k, score)
    columns = table, measure, score
    if controls is not None:
        if len(set(controls)) < len(controls):
            raise ValueError(f"`controls` must be different columns, got {list(controls)}")
        # An unknown name is the caller's mistake, not a lack of models.
        fits.complete_rows(table, controls)
    known = [name for name in _COVARIATES if name.removeprefix("log10(").removesuffix(")") in table]
    chosen = known if controls is None else controls
    usable = list(each("covariate ", chosen, lambda name: fits.covariate_fits(*columns, covariates=[name])))
    fixed = {name: [name] for name in usable} | ({" + ".join(usable): usable} if len(usable) > 1 else {})
    tasks = associations.by_task(data)
    score_of = {task: task if not isinstance(scores, str) and task in scores else score for task in tasks}
    of_prompts: Any = partial(associations.prompt_correlations, seed=seed, **where)
    return Generalization(
        measure=measure,
        k=k,
        score=score,
        table=table,
        n_prompts=main.bootstrap.n_prompts,
        association=main,
        exponential=tried("exponential", fits.exponential_fit, *columns),
        influence=tried("influence", fits.leave_one_out, *columns),
        covariates=fits.covariate_fits(*columns, covariates=usable),
        partial=each("given ", fixed, lambda name: fits.linear_fit(*columns, controls=fixed[name])),
        subsets=fits.subset_fits(*columns, subsets=subsets or {}),
        by_k=each("k = ", ks, lambda one: main if one == k else associated(data, one, score)[0]),
        by_task=each("task ", tasks, lambda task: associated(tasks[task], k, score_of[task])[0]),
        across_tasks=tried("across tasks", associations.fits_across_tasks, data, scores, **where) or {},
        prompt_length=each("prompt length, ", models, lambda model: of_prompts(data.sel(model=[model])).get(model)),
        prompt_difficulty=of_prompts(data, difficulty) if difficulty else {},
        left_out=left_out,
    )
