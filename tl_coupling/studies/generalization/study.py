"""Everything at once: does coupling go with the score, and what speaks against it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pandas
import xarray
from jaxtyping import Bool, Int

from tl_coupling.arguments import Count, Seed, checked
from tl_coupling.measures import AnyMeasure, mean_name, measure_named, measured_in
from tl_coupling.statistics import (
    ALL_PROMPTS,
    Attenuation,
    ExponentialFit,
    Familywise,
    LinearFit,
    Subset,
    attenuation,
    check_not_repeated,
    complete_rows,
    covariate_fits,
    exponential_fit,
    family_codes,
    familywise,
    fits_within,
    linear_fit,
    rank_correlation,
    subset_fits,
)
from tl_coupling.studies.generalization.associations import Association, resampled
from tl_coupling.studies.generalization.leaving_out import (
    LeaveOneOut,
    leave_one_family_out,
    leave_one_out,
)
from tl_coupling.studies.generalization.model_tables import (
    LAST,
    MeasuredModels,
    add_families,
    checked_scores,
    common_prompts,
    load_needed,
    measured,
    prompt_table,
    stack_rows,
)
from tl_coupling.studies.generalization.prompt_correlations import (
    PromptCorrelation,
    correlations_over_prompts,
)
from tl_coupling.studies.generalization.study_remarks import (
    CommonPrompts,
    is_by_outcome,
)
from tl_coupling.studies.generalization.study_result import Generalization
from tl_coupling.studies.generalization.tasks import fits_across_tasks, split_by_task
from tl_coupling.studies.surveys import with_diagonal

# Parameters and tokens span decades: untransformed, the largest model would decide.
_COVARIATES = ("log10(n_parameters)", "n_layers", "d_model", "log10(training_tokens)")

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


@checked
def generalization_study(
    data: xarray.Dataset,
    scores: pandas.DataFrame | str = "loss",
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
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
    """Compare coupling with a score across models, and with what else could explain it.

    Models are compared on the prompts that all of them have: means over different
    prompts differ for that reason alone.

    Args:
        data: a survey: what `run_survey` or `measure_prompts` gives, along `model` and
            `checkpoint`.
        scores: from `read_scores`; or `"loss"`, the mean loss on the same prompts in
            nats per token: lower is better, and models with different tokenizers cannot
            be compared by it. On a task, the column with the task's name is the score
            if there is one. Models that were not measured are left out, with a warning.
        k, measure: as in `CouplingMap.values`; by default the largest k that was
            measured.
        diagonal: whether means are over all pairs of layers, as in the paper, or over
            different ones; by default as they were measured. Of two orientations the
            first is taken: `surveys.select_orientation` gives the other.
        score: which column of `scores`.
        checkpoint: of all models; by default the last of the survey, models that were
            not measured there being left out and named; "last" for each model's own
            last, and "untrained" for the untrained twins.
        controls: covariates, as in `linear_fit`, none of which follows from the others;
            by default depth, width and the logarithms of parameters and training tokens,
            those that are known and differ.
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
            for all; arguments that name what is not there; controls that repeat each
            other; a model, prompt or k that is in the survey twice. Statistics that only
            lack models are in `left_out` instead.

    Cost: one bootstrap for each k, task and model, and `n_resamples` correlations at
    every k, measure, task and subset.

    Example:
        >>> import numpy as np, pandas, xarray
        >>> coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * np.arange(4)[:, None]
        >>> dims = ("model", "prompt", "k")
        >>> coords = {"model": list("abcde"), "k": [10]}
        >>> data = xarray.Dataset({"mean_coupling": (dims, coupling)}, coords)
        >>> scores = pandas.DataFrame({"model": list("abcde"), "score": [30, 35, 41, 43, 52]})
        >>> tlc.generalization.generalization_study(data, scores, n_resamples=100)
        Generalization(score against coupling, k = 10, 5 models, 4 prompts:
          slope 52 (28.61 to 75.39), R² = 0.970, Spearman's ρ = 1.000, p = 0.011 (0.03
          corrected for 1 tests))
    """
    # Means over other pairs of layers are taken anew from the maps.
    if diagonal is not None:
        data = with_diagonal(data, diagonal)
    # Read once: a survey may be spread over thousands of files. Any of its measures may
    # have been looked at.
    means = [mean_name(name) for name in measured_in(data.data_vars)]
    name_of_measure = measure_named(measure).name
    survey = load_needed(data, name_of_measure, extra_variables=("n_pos", *means))
    models = _models_of(survey)
    if isinstance(scores, str):
        score = "loss"
    elif models:
        # Here, so that there is one warning for models that were not measured.
        scores = checked_scores(scores, score, models)
    if families is not None and (unknown := sorted(set(families) - set(models))):
        raise ValueError(
            f"`families` names models that were not measured: {', '.join(unknown)}"
        )
    question = Question(
        data=survey,
        scores=scores,
        measure=name_of_measure,
        k=int(survey["k"].max()) if k is None else k,
        score=score,
        checkpoint=checkpoint,
        families=families,
        n_resamples=n_resamples,
        seed=seed,
    )
    return Study(question).result(controls, subsets or {}, difficulty or {})


def _models_of(survey: xarray.Dataset) -> list[str]:
    if "model" not in survey.dims:
        return []
    return survey["model"].values.astype(str).tolist()


@dataclass(frozen=True, eq=False)
class Question:
    """Which coupling is compared with which score, of which models.

    Attributes:
        data: what `load_needed` reads of a survey.
        scores, score: checked scores and their column, or "loss" twice.
        measure, k, checkpoint: of the coupling; of all models.
        families: by model, or `None` for those of the scores.
        n_resamples, seed: of bootstraps and permutations.
    """

    data: xarray.Dataset
    scores: pandas.DataFrame | str
    measure: str
    k: int
    score: str
    checkpoint: int | str | None
    families: Mapping[str, str] | None
    n_resamples: int
    seed: int

    def models(self) -> MeasuredModels:
        """Return the models that have both values, with their families."""
        survey = prompt_table(self.data, self.k, self.measure)
        models = measured(
            survey, self.scores, self.measure, self.score, self.checkpoint
        )
        # Families that are asked for take the place of those of the scores.
        table, _ = add_families(models.table, self.families)
        return replace(models, table=table)

    def association(self, models: MeasuredModels) -> Association:
        """Return the line through the models, their rank correlation, and intervals."""
        table, families = add_families(models.table, None)
        # Permutations and resamples need families as numbers.
        codes = None if families is None else family_codes(table, families)
        line = linear_fit(table, self.measure, self.score, families=families)
        rank = rank_correlation(
            table[self.measure].to_numpy(float),
            table[self.score].to_numpy(float),
            families=codes,
            n_permutations=self.n_resamples,
            seed=self.seed,
        )
        intervals = resampled(
            models.x, models.y, codes, n_resamples=self.n_resamples, seed=self.seed
        )
        return Association(line, rank, intervals)

    def answer(self) -> Association:
        """Return the association of the models that have both values."""
        return self.association(self.models())


class Attempts:
    """Statistics that may lack models: those that cannot be computed leave a reason.

    Attributes:
        reasons: why, by the name of the statistic.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)

    def result(self, name: str, compute: Callable[[], _Result]) -> _Result | None:
        """Return what is computed, or `None` where it cannot be."""
        try:
            return compute()
        # A `ValueError` of a statistic says what it lacks: models, or differences.
        except ValueError as error:
            self.reasons[name] = str(error)
            return None

    def results(
        self,
        prefix: str,
        keys: Iterable[_Key],
        compute: Callable[[_Key], _Result | None],
    ) -> dict[_Key, _Result]:
        """Return what is computed for each key, without those that have no result."""
        results = {}
        for key in keys:
            result = self.result(f"{prefix}{key}", partial(compute, key))
            if result is not None:
                results[key] = result
        return results


class Study:
    """A question across models, its answer, and what else could explain the score.

    The methods are the steps of `generalization_study`.
    """

    def __init__(self, question: Question) -> None:
        """Compare the models; ValueError where fewer than three have both values."""
        models = question.models()
        self.models = models
        self.main = question.association(models)
        # With "last" each model has a checkpoint of its own.
        if question.checkpoint != LAST:
            # The same for every k, task and model.
            checkpoint = models.table["checkpoint"].tolist()[0]
            question = replace(question, checkpoint=checkpoint)
        self.question = question
        self.table, self.families = add_families(
            models.table.reset_index(drop=True), None
        )
        self.tasks = split_by_task(question.data)
        self.attempts = Attempts(models.left_out)
        if self.main.bootstrap.too_few:
            self.attempts.reasons["bootstrap"] = self.main.bootstrap.too_few

    def result(
        self,
        controls: Sequence[str] | None,
        subsets: Mapping[str, Subset],
        difficulty: Mapping[str, float],
    ) -> Generalization:
        """Take all steps; arguments as in `generalization_study`.

        Reasons are in `left_out` in the order in which the steps are taken.
        """
        # This step is first: partial fits hold fixed the covariates that can be fitted.
        covariates = self.covariates(controls)
        return Generalization(
            measure=self.question.measure,
            k=self.question.k,
            score=self.question.score,
            table=self.table,
            n_prompts=self.main.bootstrap.n_prompts,
            association=self.main,
            subsets=self.subsets(subsets),
            familywise=self.looks(subsets),
            exponential=self.exponential(),
            influence=self.influence(),
            common_prompts=self.common_prompts(),
            attenuation=self.attenuation(),
            covariates=covariates,
            partial=self.slopes_given(list(covariates.index)),
            selected=self.selected(subsets),
            family_influence=self.family_influence(),
            within_families=self.lines_within_families(),
            by_k=self.associations_by_k(),
            by_task=self.associations_by_task(),
            across_tasks=self.lines_across_tasks(),
            prompt_length=self.prompt_length(),
            prompt_difficulty=self.prompt_difficulty(difficulty),
            left_out=self.attempts.reasons,
        )

    @property
    def columns(self) -> tuple[pandas.DataFrame, str, str]:
        """Return the table, and its columns of coupling and of the score."""
        return self.table, self.question.measure, self.question.score

    def covariates(self, controls: Sequence[str] | None) -> pandas.DataFrame:
        """Fit each covariate alone, beside coupling on the same models."""
        table = self.table
        if controls is None:
            controls = [name for name in _COVARIATES if _column_in(name) in table]
        else:
            if len(set(controls)) < len(controls):
                raise ValueError(
                    f"`controls` must be different columns, got {list(controls)}"
                )
            # An unknown name is the caller's mistake, not a lack of models; and so are
            # two for one thing.
            check_not_repeated(complete_rows(table, controls), "controls")

        def fit_beside_coupling(names: Sequence[str]) -> pandas.DataFrame:
            return covariate_fits(
                *self.columns, covariates=names, families=self.families
            )

        # Each by itself: a covariate that cannot be fitted does not take the others
        # along.
        rows = self.attempts.results(
            "covariate ", controls, lambda name: fit_beside_coupling([name])
        )
        return pandas.concat(rows.values()) if rows else fit_beside_coupling([])

    def subsets(self, subsets: Mapping[str, Subset]) -> dict[str, LinearFit]:
        """Fit the line on each subset of the models."""
        return subset_fits(*self.columns, subsets=subsets, families=self.families)

    def exponential(self) -> ExponentialFit | None:
        """Fit the exponential curve."""
        return self.attempts.result(
            "exponential",
            lambda: exponential_fit(*self.columns, families=self.families),
        )

    def influence(self) -> LeaveOneOut | None:
        """Fit the line without each model."""
        return self.attempts.result(
            "influence", lambda: leave_one_out(*self.columns, families=self.families)
        )

    def family_influence(self) -> LeaveOneOut | None:
        """Fit the line without each family."""
        families = self.families
        if families is None:
            return None
        influence = self.attempts.result(
            "families", lambda: leave_one_family_out(*self.columns, families=families)
        )
        table = self.columns[0]
        codes = family_codes(table, families)
        is_alone = np.bincount(codes)[codes] == 1
        if influence is not None and is_alone.any():
            names = ", ".join(table["model"][is_alone])
            self.attempts.reasons["families of one model"] = (
                f"the line without {names} is in `influence`, and not in "
                "`family_influence`"
            )
        return influence

    def lines_within_families(self) -> dict[str, LinearFit]:
        """Fit the line inside each family of at least three models."""
        if self.families is None:
            return {}
        return fits_within(*self.columns, families=self.families)

    def common_prompts(self) -> CommonPrompts | None:
        """Fit the line of means over different prompts, if some models lack some."""
        mixed = self.models.mixed
        if mixed is None:
            return None
        table, _ = add_families(mixed.table, self.question.families)
        mixed_line = self.attempts.result(
            "different prompts",
            lambda: linear_fit(table, *self.columns[1:], families=self.families),
        )
        return CommonPrompts(
            n_prompts=mixed.n_common,
            models=mixed.models,
            n_all=mixed.n_prompts,
            line=self.main.linear if mixed.n_common else None,
            mixed_line=mixed_line,
        )

    def attenuation(self) -> Attenuation | None:
        """Correct the slope for the noise of having few prompts."""
        x = self.models.x
        y = self.models.y
        line = self.main.linear
        return self.attempts.result(
            "reliability", lambda: attenuation(x, y, line, seed=self.question.seed)
        )

    def slopes_given(self, covariates: Sequence[str]) -> dict[str, LinearFit]:
        """Fit the line with each covariate held fixed, with all of them, and inside
        families.
        """
        held_fixed = {name: [name] for name in covariates}
        # All covariates are held fixed together, too.
        if len(covariates) > 1:
            held_fixed[" + ".join(covariates)] = list(covariates)
        if self.families is not None:
            # Families are held fixed by an intercept each, not as a column.
            held_fixed[self.families] = []

        def line_given(name: str) -> LinearFit:
            return linear_fit(
                *self.columns,
                controls=held_fixed[name],
                families=self.families,
                within=self.families if name == self.families else None,
            )

        return self.attempts.results("given ", held_fixed, line_given)

    def score_on(self, task: str) -> str:
        """Return the column of the score on a task: its own, if the scores have it."""
        # A loss is that of the task's own prompts, and needs no column.
        scores = self.question.scores
        if isinstance(scores, str) or task not in scores:
            return self.question.score
        return task

    def looks(self, subsets: Mapping[str, Subset]) -> Familywise:
        """Return the p of having looked at every k, measure, task and subset."""
        question = self.question
        data = question.data
        # All measures and k: any of them may have been looked at.
        rows = stack_rows(data, data)
        prompts = {
            task: self._common_of(rows, data["task"].values.astype(str) == task)
            for task in self.tasks
        }
        every_prompt = np.ones(data.sizes["prompt"], bool)
        prompts[ALL_PROMPTS] = self._common_of(rows, every_prompt)
        scores = None
        if not isinstance(question.scores, str):
            scores = {task: self.score_on(task) for task in self.tasks}
            scores[ALL_PROMPTS] = question.score
        return familywise(
            rows,
            {name: mean_name(name) for name in measured_in(data.data_vars)},
            self.models.table,
            prompts,
            scores,
            subsets,
            self.family_codes(),
            look=(question.k, question.measure),
            n_permutations=question.n_resamples,
            seed=question.seed,
        )

    def _common_of(
        self, rows: xarray.Dataset, prompts: Bool[np.ndarray, " n_prompts"]
    ) -> Bool[np.ndarray, " n_prompts"]:
        """Return which of some prompts all models have, at the k of the study."""
        means = rows[mean_name(self.question.measure)].sel(k=self.question.k)
        x = means.transpose("row", "prompt").values[self.models.table.index]
        # Prompts that no model has are no reason to leave out the others.
        has_any = np.isfinite(x).any(0)
        # The prompts that all models have are taken, from those that some model has.
        selected = np.flatnonzero(prompts & has_any)
        is_taken = prompts & ~has_any
        is_taken[selected[common_prompts(x[:, selected])]] = True
        return is_taken

    def family_codes(self) -> Int[np.ndarray, " n_models"] | None:
        """Return the number of the family of each model; `None` where models count as
        independent.
        """
        if self.families is None:
            return None
        return family_codes(self.table, self.families)

    def selected(self, subsets: Mapping[str, Subset]) -> tuple[str, ...]:
        """Return the subsets that are chosen by a score."""
        scores = {self.question.score, *map(self.score_on, self.tasks)}
        return tuple(
            name
            for name, subset in subsets.items()
            if is_by_outcome(self.table, scores, subset)
        )

    def associations_by_k(self) -> dict[int, Association]:
        """Return the association at each k."""

        def answer_at_k(k: int) -> Association:
            # This one is known already; every k sees the same draws.
            if k == self.question.k:
                return self.main
            return replace(self.question, k=k).answer()

        ks = sorted(self.question.data["k"].values.tolist())
        return self.attempts.results("k = ", ks, answer_at_k)

    def associations_by_task(self) -> dict[str, Association]:
        """Return the association on the prompts of each task."""

        def answer_on_task(task: str) -> Association:
            task_question = replace(
                self.question, data=self.tasks[task], score=self.score_on(task)
            )
            return task_question.answer()

        return self.attempts.results("task ", self.tasks, answer_on_task)

    def lines_across_tasks(self) -> dict[str, LinearFit]:
        """Fit the line over the tasks of each model."""
        question = self.question
        fits = self.attempts.result(
            "across tasks",
            lambda: fits_across_tasks(
                question.data,
                question.scores,
                k=question.k,
                measure=question.measure,
                checkpoint=question.checkpoint,
            ),
        )
        return fits or {}

    def prompt_length(self) -> dict[str, PromptCorrelation]:
        """Correlate coupling with the length of the prompts, in each model."""
        data = self.question.data

        def correlation_of_model(model: str) -> PromptCorrelation | None:
            # Model by model: one that cannot be ranked leaves its own reason.
            correlations = self._prompt_correlations(data.sel(model=[model]), "n_pos")
            return correlations.get(model)

        return self.attempts.results(
            "prompt length, ", _models_of(data), correlation_of_model
        )

    def prompt_difficulty(
        self, difficulty: Mapping[str, float]
    ) -> dict[str, PromptCorrelation]:
        """Correlate coupling with the difficulty of the prompts, in each model."""
        if not difficulty:
            return {}
        return self._prompt_correlations(self.question.data, difficulty)

    def _prompt_correlations(
        self, data: xarray.Dataset, prompt_property: str | Mapping[str, float]
    ) -> dict[str, PromptCorrelation]:
        return correlations_over_prompts(
            data,
            prompt_property,
            k=self.question.k,
            measured=self.question.measure,
            checkpoint=self.question.checkpoint,
            seed=self.question.seed,
        )


def _column_in(covariate: str) -> str:
    return covariate.removeprefix("log10(").removesuffix(")")
