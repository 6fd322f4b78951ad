"""Everything at once: does coupling go with the score, and what speaks against it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tl_coupling.border import Count, Seed, checked
from tl_coupling.coupling import Measure
from tl_coupling.generalization import associations, fits
from tl_coupling.generalization.associations import Association, PromptCorrelation
from tl_coupling.generalization.fits import ExponentialFit, LeaveOneOut, LinearFit
from tl_coupling.generalization.tables import checked_scores, measured, needed

if TYPE_CHECKING:
    import pandas
    import xarray

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
# By the column that must be known. Parameters and tokens span decades: untransformed, the largest model would decide.
_COVARIATES = {
    **{"n_parameters": "log10(n_parameters)", "n_layers": "n_layers", "d_model": "d_model"},
    "training_tokens": "log10(training_tokens)",
}


@dataclass(frozen=True, eq=False, repr=False)
class Generalization:
    """Coupling against a score across models.

    Attributes:
        measure, k, score: what is compared; `score` is "loss" where the survey's own loss takes the place of one.
        table: one row per model that has both.
        n_prompts: number of prompts over which the coupling of a model is a mean.
        association: the line, Spearman's ρ and the bootstrap, over all models.
        exponential: the exponential fit; `None` where there is none.
        influence: the line without each model; `None` where there are three.
        covariates: each covariate alone, beside coupling on the same models.
        partial: coupling with each covariate held fixed, and with all of them, by what is held fixed.
        subsets: the line on each subset.
        by_k, by_task: the association at each k, and on the prompts of each task. Every k sees the same draws.
        across_tasks: within each model, the line over tasks.
        prompt_length, prompt_difficulty: within each model, coupling of its prompts against these.
        left_out: what is missing and why: models without score or coupling, statistics without enough models.
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
    partial: dict[str, LinearFit]
    subsets: dict[str, LinearFit]
    by_k: dict[int, Association]
    by_task: dict[str, Association]
    across_tasks: dict[str, LinearFit]
    prompt_length: dict[str, PromptCorrelation]
    prompt_difficulty: dict[str, PromptCorrelation]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        line, rank = self.association.linear, self.association.spearman
        low, high = line.slope_interval
        return (
            f"Generalization({self.score} against {self.measure}, k = {self.k}, {line.n} models, {self.n_prompts} "
            f"prompts:\n  slope {line.slope:.4g} ({low:.4g} to {high:.4g}), R² = {line.r_squared:.3f}, "
            f"p = {line.p:.2g}, Spearman's ρ = {rank.rho:.3f})"
        )

    @property
    def slopes(self) -> "pandas.DataFrame":
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
    """Coupling against a score across models, with what else could explain it.

    Args:
        data: a survey: what `run` or `measure_prompts` gives, along `model` and `checkpoint`.
        scores: from `read_scores`; or `"loss"`, the mean loss on the same prompts in nats per token: lower is better,
            and models with different tokenizers cannot be compared by it. On a task, the column with the task's name
            is the score if there is one. Models that were not measured are left out, with a warning.
        k: number of top singular vectors; the largest that was measured by default.
        measure: as in `CouplingMap.values`.
        score: which column of `scores`.
        checkpoint: of all models; each model's last by default, and "untrained" for the untrained twins.
        controls: covariates, columns or expressions such as `"log10(n_parameters)"`; by default depth, width and
            the logarithms of parameters and training tokens, those that are known and differ.
        subsets: by name, a query over the table such as `"score > 45 and n_layers <= 32"`, an expression as in
            `linear_fit` that is true or false; or a mask over its rows.
        difficulty: of prompts, by id.
        n_resamples, seed: as in `bootstrap`.

    Raises:
        ValueError: fewer than three models that have both; coupling or score the same for all; arguments that name
            something that is not there. Statistics that only lack models are in `left_out` instead.

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
    if not isinstance(scores, str) and models:
        # Here, so that there is one warning for models that were not measured.
        scores = checked_scores(scores, score, models)
    k = int(data["k"].max()) if k is None else k
    where: dict[str, Any] = {"measure": measure, "checkpoint": checkpoint}
    held = measured(data, scores, k=k, score=score, **where)
    table, x, y = held.table, held.measure, held.score
    left_out = dict(held.left_out)
    associate = partial(associations.association, n_resamples=n_resamples, seed=seed)

    def possible(what: str, computations: Mapping[_Key, Callable[[], _Result]]) -> dict[_Key, _Result]:
        found = {}
        for key, compute in computations.items():
            try:
                found[key] = compute()
            except ValueError as error:
                left_out[f"{what}{key}"] = str(error)
        return found

    def associated(part: "xarray.Dataset", k: int, score: str) -> Association:
        return associate(measured(part, scores, k=k, score=score, **where))

    if controls is not None:
        if len(set(controls)) < len(controls):
            raise ValueError(f"`controls` must be different columns, got {list(controls)}")
        # An unknown name is the caller's mistake, not a lack of models.
        fits.complete_rows(table, controls)
    main = associate(held)
    chosen = [name for column, name in _COVARIATES.items() if column in table] if controls is None else controls
    alone = {name: partial(fits.covariate_fits, table, x, y, covariates=[name]) for name in chosen}
    usable = list(possible("covariate ", alone))
    fixed = {name: [name] for name in usable} | ({" + ".join(usable): usable} if len(usable) > 1 else {})
    given = {name: partial(fits.linear_fit, table, x, y, controls=held_fixed) for name, held_fixed in fixed.items()}
    other_ks = [int(other) for other in data["k"].values if other != k]
    by_k = possible("k = ", {other: partial(associated, data, other, score) for other in other_ks})
    columns = () if isinstance(scores, str) else scores.columns
    parts = associations.by_task(data).items()
    tasks = {task: partial(associated, part, k, task if task in columns else score) for task, part in parts}
    of_prompts: Callable[..., dict[str, PromptCorrelation]] = partial(
        associations.prompt_correlations, k=k, seed=seed, **where
    )
    lengths = possible("prompt length, ", {model: partial(of_prompts, data.sel(model=[model])) for model in models})
    others: dict[str, Callable[[], Any]] = {
        "exponential": partial(fits.exponential_fit, table, x, y),
        "influence": partial(fits.leave_one_out, table, x, y),
        "across tasks": partial(associations.fits_across_tasks, data, scores, k=k, **where),
    }
    single = possible("", others)
    return Generalization(
        measure=measure,
        k=k,
        score=y,
        table=table,
        n_prompts=held.x.shape[1],
        association=main,
        exponential=single.get("exponential"),
        influence=single.get("influence"),
        covariates=fits.covariate_fits(table, x, y, covariates=usable),
        partial=possible("given ", given),
        subsets=fits.subset_fits(table, x, y, subsets=subsets or {}),
        by_k=dict(sorted((by_k | {k: main}).items())),
        by_task=possible("task ", tasks),
        across_tasks=single.get("across tasks", {}),
        prompt_length={model: found for of_model in lengths.values() for model, found in of_model.items()},
        prompt_difficulty=of_prompts(data, difficulty) if difficulty else {},
        left_out=left_out,
    )
