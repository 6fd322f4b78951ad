"""Everything at once: does coupling go with the score, and what speaks against it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas
import xarray

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.generalization import associations, leaving_out, remarks
from tl_coupling.generalization.associations import Association, PromptCorrelation
from tl_coupling.generalization.tables import (
    LAST,
    checked_scores,
    in_rows,
    measured,
    needed,
    per_prompt,
    with_families,
)
from tl_coupling.measures import Measure
from tl_coupling.statistics import fits, rank_correlation
from tl_coupling.statistics.attenuation import Attenuation, attenuation
from tl_coupling.statistics.familywise import ALL_PROMPTS, Familywise, familywise
from tl_coupling.surveys.readings import with_diagonal

# Parameters and tokens span decades: untransformed, the largest model would decide.
_COVARIATES = ("log10(n_parameters)", "n_layers", "d_model", "log10(training_tokens)")


@made_by("generalization.generalization_study(data, scores)")
@dataclass(frozen=True, eq=False, repr=False)
class Generalization:
    """Coupling against a score across models.

    Attributes:
        measure, k, score: what is compared; `score` is "loss" where the survey's own
            loss takes the place of one.
        table, n_prompts: one row per model that has both; over how many prompts its
            coupling is a mean.
        association, exponential, influence: the line, ρ and bootstrap over all models;
            the exponential fit; the line without each model. `None` where there are too
            few models.
        attenuation: reliability of the models' means, and the slope corrected for it;
            `None` with one prompt.
        familywise: the p of having looked at every k, measure, task and subset.
        covariates, subsets: each covariate alone, beside coupling on the same models;
            the line on each subset.
        selected: the subsets that were chosen by the score.
        partial: coupling with each covariate held fixed, and with all of them, by what
            is held fixed; with "family", differences inside families alone.
        family_influence, within_families: where models are of families, the line
            without each family, and inside each one of at least three models.
        by_k, by_task: the association at each k, and on the prompts of each task. Every
            k sees the same draws.
        across_tasks, prompt_length, prompt_difficulty: within each model, over its
            tasks or its prompts.
        left_out: what is missing and why: models without score or coupling, statistics
            without enough models.

    Example:
        >>> scores = tlc.generalization.read_scores("scores.csv")
        >>> study = tlc.generalization.generalization_study(data, scores, n_resamples=100)
        >>> study.table.model.tolist()[:2], list(study.by_k)
        (['width8', 'width12'], [2, 4])
    """

    measure: str
    k: int
    score: str
    table: pandas.DataFrame
    n_prompts: int
    association: Association
    exponential: fits.ExponentialFit | None
    influence: leaving_out.LeaveOneOut | None
    attenuation: Attenuation | None
    familywise: Familywise
    covariates: pandas.DataFrame
    partial: dict[str, fits.LinearFit]
    subsets: dict[str, fits.LinearFit]
    selected: tuple[str, ...]
    family_influence: leaving_out.LeaveOneOut | None
    within_families: dict[str, fits.LinearFit]
    by_k: dict[int, Association]
    by_task: dict[str, Association]
    across_tasks: dict[str, fits.LinearFit]
    prompt_length: dict[str, PromptCorrelation]
    prompt_difficulty: dict[str, PromptCorrelation]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        line = self.association.linear
        low, high = line.slope_interval
        families = "" if line.n_families is None else f" in {line.n_families} families"
        return (
            f"Generalization({self.score} against {self.measure}, k = {self.k}, {line.n} models{families}, "
            f"{self.n_prompts} prompts:\n  slope {line.slope:.4g} ({low:.4g} to {high:.4g}), "
            f"R² = {line.r_squared:.3f}, p = {line.p:.2g}, Spearman's ρ = {self.association.spearman.rho:.3f})"
        )

    @property
    def slopes(self) -> pandas.DataFrame:
        """The slope over all models, on each subset, and with covariates held fixed,
        with its interval.

        Over all models the bootstrap's interval stands below that of t, if there are
        enough models, and below it the slope corrected for the noise of having few
        prompts. Columns `n` (models), `slope`, `low`, `high`, `r_squared` (partial
        where something is held fixed), `p`, `vif`.
        """
        import pandas

        line, drawn, nan = (
            self.association.linear,
            self.association.bootstrap,
            float("nan"),
        )
        given = {f"given {name}": fit for name, fit in self.partial.items()}
        all_models, *rows = [
            (
                name,
                fit.n,
                fit.slope,
                *fit.slope_interval,
                fit.r_squared,
                fit.p,
                fit.vif if fit.controls else nan,
            )
            for name, fit in (
                ("all models", line),
                *self.subsets.items(),
                *given.items(),
            )
        ]
        more = (
            []
            if drawn.too_few
            else [
                (
                    "all models, bootstrap",
                    line.n,
                    line.slope,
                    *drawn.slope,
                    nan,
                    nan,
                    nan,
                )
            ]
        )
        if (found := self.attenuation) is not None and found.slope == found.slope:
            more.append(
                (
                    "all models, corrected",
                    line.n,
                    found.slope,
                    *found.slope_interval,
                    nan,
                    nan,
                    nan,
                )
            )
        columns = ["fit", "n", "slope", "low", "high", "r_squared", "p", "vif"]
        return pandas.DataFrame([all_models, *more, *rows], columns=columns).set_index(
            "fit"
        )

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before believing the slope, a line each."""
        return remarks.of(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it: tables as lists of rows, `None` for what is
        not finite.
        """
        import pandas

        def plain(value: Any) -> Any:
            if isinstance(value, pandas.DataFrame):
                return (value.reset_index() if value.index.name else value).to_dict(
                    "records"
                )
            return value.tolist()

        everything = asdict(self) | {"remarks": self.remarks}
        return json.loads(
            json.dumps(everything, default=plain), parse_constant=lambda _: None
        )


@checked
def generalization_study(
    data: xarray.Dataset,
    scores: pandas.DataFrame | str = "loss",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    diagonal: bool | None = None,
    score: str = "score",
    checkpoint: int | str | None = None,
    controls: Sequence[str] | None = None,
    subsets: Mapping[str, str | Sequence[bool] | pandas.Series] | None = None,
    families: Mapping[str, str] | None = None,
    difficulty: Mapping[str, float] | None = None,
    n_resamples: Count = 2000,
    seed: Seed = 0,
) -> Generalization:
    """Coupling against a score across models, with what else could explain it.

    Args:
        data: a survey: what `run` or `measure_prompts` gives, along `model` and
            `checkpoint`.
        scores: from `read_scores`; or `"loss"`, the mean loss on the same prompts in
            nats per token: lower is better, and models with different tokenizers cannot
            be compared by it. On a task, the column with the task's name is the score
            if there is one. Models that were not measured are left out, with a warning.
        k, measure: as in `CouplingMap.values`; by default the largest k that was
            measured.
        diagonal: whether means are over all pairs of layers, as in the paper, or over
            different ones; by default as they were measured. Of two orientations the
            first is taken: `surveys.one_orientation` gives the other.
        score: which column of `scores`.
        checkpoint: of all models; by default the last of the survey, models that were
            not measured there being left out and named; "last" for each model's own
            last, and "untrained" for the untrained twins.
        controls: covariates, as in `linear_fit`; by default depth, width and the
            logarithms of parameters and training tokens, those that are known and
            differ.
        subsets: by name, a query over the table such as `"score > 45 and n_layers <=
            32"`, or a mask over its rows.
        families: by model, such as "Pythia"; by default the column `family` of the
            scores. Models of a family are not independent: intervals, p, bootstrap and
            permutations then take families as the sample. A model without a family is
            one of its own.
        difficulty: of prompts, by id.
        n_resamples, seed: as in `bootstrap`; also of permutations.

    Raises:
        ValueError: fewer than three models that have both; coupling or score the same
            for all; arguments that name what is not there. Statistics that only lack
            models are in `left_out` instead.

    Cost: one bootstrap for each k, task and model, and `n_resamples` correlations at
    every k, measure, task and subset.

    Example:
        >>> import numpy as np, pandas, xarray
        >>> coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * np.arange(4)[:, None]
        >>> dims = ("model", "prompt", "k")
        >>> data = xarray.Dataset({"mean_coupling": (dims, coupling)}, {"model": list("abcde"), "k": [10]})
        >>> scores = pandas.DataFrame({"model": list("abcde"), "score": [30, 35, 41, 43, 52]})
        >>> tlc.generalization.generalization_study(data, scores, n_resamples=100)
        Generalization(score against coupling, k = 10, 5 models, 4 prompts:
          slope 52 (35.16 to 68.84), R² = 0.970, p = 0.0022, Spearman's ρ = 1.000)
    """
    data = data if diagonal is None else with_diagonal(data, diagonal)
    # Read once: a survey may be spread over thousands of files. Any of its measures may
    # have been looked at.
    data = needed(
        data,
        measure,
        also=(
            "n_pos",
            *(name for name in map(str, data.data_vars) if name[:5] == "mean_"),
        ),
    )
    models = data["model"].values.astype(str).tolist() if "model" in data.dims else []
    if isinstance(scores, str):
        score = "loss"
    elif models:
        # Here, so that there is one warning for models that were not measured.
        scores = checked_scores(scores, score, models)
    if families is not None and (unknown := sorted(set(families) - set(models))):
        raise ValueError(
            f"`families` names models that were not measured: {', '.join(unknown)}"
        )
    ks = sorted(data["k"].values.tolist())
    k = ks[-1] if k is None else k
    where: dict[str, Any] = {"k": k, "measure": measure, "checkpoint": checkpoint}

    def associated(
        part: xarray.Dataset, k: int, score: str
    ) -> tuple[Association, pandas.DataFrame, Any, Any]:
        """Also the table by place along the rows of the survey, x and y on each prompt,
        and what is left out.
        """
        table, x, y, left_out = measured(
            per_prompt(part, k, measure), scores, measure, score, where["checkpoint"]
        )
        table, related = with_families(table, families)
        codes = None if related is None else fits.family_codes(table, related)
        line = fits.linear_fit(table, measure, score, families=related)
        columns = table[[measure, score]].to_numpy(float).T
        rank = rank_correlation(
            *columns, families=codes, n_permutations=n_resamples, seed=seed
        )
        drawn = associations.resampled(x, y, codes, n_resamples=n_resamples, seed=seed)
        return Association(line, rank, drawn), table, (x, y), left_out

    def tried(
        what: str, compute: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """The result; where it cannot be computed, `None`, and the reason in
        `left_out`.
        """
        try:
            return compute(*args, **options)
        except ValueError as error:
            left_out[what] = str(error)
            return None

    def each(
        what: str, keys: Iterable[Any], compute: Callable[[Any], Any]
    ) -> dict[Any, Any]:
        return {
            key: found
            for key in keys
            if (found := tried(f"{what}{key}", compute, key)) is not None
        }

    main, places, (x, y), left_out = associated(data, k, score)
    if checkpoint != LAST:
        # The same for every k, task and model.
        where["checkpoint"] = places["checkpoint"].tolist()[0]
    table, related = with_families(places.reset_index(drop=True), None)
    columns, subsets = (table, measure, score), subsets or {}
    if main.bootstrap.too_few:
        left_out["bootstrap"] = main.bootstrap.too_few
    if controls is not None:
        if len(set(controls)) < len(controls):
            raise ValueError(
                f"`controls` must be different columns, got {list(controls)}"
            )
        # An unknown name is the caller's mistake, not a lack of models.
        fits.complete_rows(table, controls)
    known = [
        name
        for name in _COVARIATES
        if name.removeprefix("log10(").removesuffix(")") in table
    ]
    chosen = known if controls is None else controls
    usable = list(
        each(
            "covariate ",
            chosen,
            lambda name: fits.covariate_fits(
                *columns, covariates=[name], families=related
            ),
        )
    )
    fixed = {name: [name] for name in usable} | (
        {" + ".join(usable): usable} if len(usable) > 1 else {}
    )
    fixed |= {} if related is None else {related: []}

    def given(name: str) -> fits.LinearFit:
        within = related if name == related else None
        return fits.linear_fit(
            *columns, controls=fixed[name], families=related, within=within
        )

    of_subsets = fits.subset_fits(*columns, subsets=subsets, families=related)
    tasks = associations.by_task(data)
    score_of = {
        task: task if not isinstance(scores, str) and task in scores else score
        for task in tasks
    }
    in_task = {task: data["task"].values.astype(str) == task for task in tasks}
    looked_at = familywise(
        in_rows(data, data),
        places,
        in_task | {ALL_PROMPTS: np.ones(data.sizes["prompt"], bool)},
        None if isinstance(scores, str) else score_of | {ALL_PROMPTS: score},
        subsets,
        None if related is None else fits.family_codes(table, related),
        look=(k, measure),
        n_permutations=n_resamples,
        seed=seed,
    )
    of_prompts: Any = partial(associations.prompt_correlations, seed=seed, **where)
    return Generalization(
        measure=measure,
        k=k,
        score=score,
        table=table,
        n_prompts=main.bootstrap.n_prompts,
        association=main,
        exponential=tried(
            "exponential", fits.exponential_fit, *columns, families=related
        ),
        influence=tried(
            "influence", leaving_out.leave_one_out, *columns, families=related
        ),
        attenuation=tried("reliability", attenuation, x, y, main.linear, seed=seed),
        familywise=looked_at,
        covariates=fits.covariate_fits(*columns, covariates=usable, families=related),
        partial=each("given ", fixed, given),
        subsets=of_subsets,
        selected=tuple(
            name
            for name, one in subsets.items()
            if remarks.is_by_outcome(table, {score, *score_of.values()}, one)
        ),
        family_influence=None
        if related is None
        else tried(
            "families", leaving_out.leave_one_family_out, *columns, families=related
        ),
        within_families={}
        if related is None
        else fits.fits_within(*columns, families=related),
        by_k=each(
            "k = ",
            ks,
            lambda one: main if one == k else associated(data, one, score)[0],
        ),
        by_task=each(
            "task ", tasks, lambda task: associated(tasks[task], k, score_of[task])[0]
        ),
        across_tasks=tried(
            "across tasks", associations.fits_across_tasks, data, scores, **where
        )
        or {},
        prompt_length=each(
            "prompt length, ",
            models,
            lambda model: of_prompts(data.sel(model=[model])).get(model),
        ),
        prompt_difficulty=of_prompts(data, difficulty) if difficulty else {},
        left_out=left_out,
    )
