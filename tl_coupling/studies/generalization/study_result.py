"""What a study across models found."""

import json
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import pandas

from tl_coupling.arguments import made_by
from tl_coupling.statistics import (
    Attenuation,
    ExponentialFit,
    Familywise,
    LinearFit,
)
from tl_coupling.studies.generalization import study_remarks
from tl_coupling.studies.generalization.associations import Association
from tl_coupling.studies.generalization.leaving_out import LeaveOneOut
from tl_coupling.studies.generalization.prompt_correlations import PromptCorrelation
from tl_coupling.studies.generalization.study_remarks import CommonPrompts


@made_by("generalization.generalization_study(data, scores)")
@dataclass(frozen=True, eq=False, repr=False)
class Generalization:
    """Coupling against a score across models.

    Attributes:
        measure, k, score: what is compared; `score` is "loss" where the survey's own
            loss takes the place of one.
        table, n_prompts: one row per model that has both; over how many prompts its
            coupling is a mean: those that all models have.
        association, exponential, influence: the line, ρ and bootstrap over all models;
            the exponential fit; the line without each model. `None` where there are too
            few models.
        common_prompts: which prompts all models were measured on, and the line that
            means over different prompts would give; `None` where these are all prompts.
        attenuation: reliability of the models' means, and the slope corrected for it;
            `None` with one prompt.
        familywise: the p of having looked at every k, measure, task and subset.
        covariates, subsets: each covariate alone, beside coupling on the same models;
            the line on each subset.
        selected: the subsets that were chosen by the score.
        partial: coupling with each covariate held fixed, and with all of them, by what
            is held fixed; with "family", differences inside families alone.
        family_influence, within_families: where models are of families, the line
            without each family of at least two models, and inside each one of at least
            three.
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
    exponential: ExponentialFit | None
    influence: LeaveOneOut | None
    common_prompts: CommonPrompts | None
    attenuation: Attenuation | None
    familywise: Familywise
    covariates: pandas.DataFrame
    partial: dict[str, LinearFit]
    subsets: dict[str, LinearFit]
    selected: tuple[str, ...]
    family_influence: LeaveOneOut | None
    within_families: dict[str, LinearFit]
    by_k: dict[int, Association]
    by_task: dict[str, Association]
    across_tasks: dict[str, LinearFit]
    prompt_length: dict[str, PromptCorrelation]
    prompt_difficulty: dict[str, PromptCorrelation]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        line = self.association.linear
        low, high = line.slope_interval
        families = "" if line.n_families is None else f" in {line.n_families} families"
        return (
            f"Generalization({self.score} against {self.measure}, k = {self.k}, "
            f"{line.n} models{families}, {self.n_prompts} prompts:\n"
            f"  slope {line.slope:.4g} ({low:.4g} to {high:.4g}), "
            f"R² = {line.r_squared:.3f}, "
            f"Spearman's ρ = {self.association.spearman.rho:.3f}, "
            f"p = {line.p:.2g} ({self.familywise.p:.2g}\n"
            f"  corrected for {len(self.familywise.table)} tests))"
        )

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `table`: one row for each model, as every result has it."""
        return self.table.copy()

    @property
    def slopes(self) -> pandas.DataFrame:
        """Return the slope over all models, on each subset, and with covariates held
        fixed.

        Each has its interval. Over all models the bootstrap's interval stands below
        that of t, if there are enough models, and below it the slope corrected for the
        noise of having few prompts. Where models were measured on different prompts,
        all this is over those that all have, and the line of means over those of each
        stands there too.

        Columns `n` (models), `slope`, `low`, `high`, `r_squared` (partial where
        something is held fixed), `p`, `vif`, `freedom` (degrees of freedom of the
        interval and of p).
        """
        line = self.association.linear
        bootstrap = self.association.bootstrap
        corrected = self.attenuation
        # The order is that of the table: all models first, then what qualifies them.
        rows = [("all models", _row_of(line))]
        # With few models the t interval above is the one that holds.
        if not bootstrap.too_few:
            row = _SlopeRow(line.n, line.slope, *bootstrap.slope)
            rows.append(("all models, bootstrap", row))
        if corrected is not None and not math.isnan(corrected.slope):
            row = _SlopeRow(line.n, corrected.slope, *corrected.slope_interval)
            rows.append(("all models, corrected", row))
        common = self.common_prompts
        if common is not None and common.mixed_line is not None:
            rows.append(("all models, different prompts", _row_of(common.mixed_line)))
        rows += [(name, _row_of(fit)) for name, fit in self.subsets.items()]
        rows += [(f"given {name}", _row_of(fit)) for name, fit in self.partial.items()]
        names = pandas.Index([name for name, _ in rows], name="fit")
        return pandas.DataFrame(
            [row for _, row in rows], names, list(_SlopeRow._fields)
        )

    @property
    def remarks(self) -> list[str]:
        """Return what a reader must know before believing the slope, a line each."""
        line = self.association.linear
        groups = {
            "inside the families": self.within_families,
            "on the tasks": {
                task: association.linear for task, association in self.by_task.items()
            },
            "across the tasks of the models": self.across_tasks,
        }
        correlations = {
            "length": self.prompt_length,
            "difficulty": self.prompt_difficulty,
        }
        return [
            *study_remarks.remark_on_strength(
                self.association, self.familywise, self.exponential
            ),
            *study_remarks.remark_on_different_prompts(self.common_prompts),
            *study_remarks.remark_on_single_family(self.table),
            *study_remarks.remark_on_noise(self.attenuation, line),
            *study_remarks.remark_on_slopes_inside_families(
                line, self.partial.get("family")
            ),
            *study_remarks.remark_on_reversed_slopes(line, groups),
            *study_remarks.remark_on_reversed_correlations(correlations),
            *study_remarks.remark_on_selection(self.selected),
            *study_remarks.remark_on_influence("model", self.influence),
            *study_remarks.remark_on_influence("family", self.family_influence),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON can hold it.

        Tables are lists of rows; what is not finite is `None`.
        """
        # Remarks are made on demand and are no field.
        everything = asdict(self) | {"remarks": self.remarks}
        text = json.dumps(everything, default=_plain)
        # JSON has no NaN: Python writes it all the same, and reads it here as `None`.
        as_json: dict[str, object] = json.loads(text, parse_constant=lambda _: None)
        return as_json


class _SlopeRow(NamedTuple):
    """A row of `Generalization.slopes`, by its columns."""

    n: int
    slope: float
    low: float
    high: float
    r_squared: float = math.nan
    p: float = math.nan
    vif: float = math.nan
    freedom: float = math.nan


def _row_of(fit: LinearFit) -> _SlopeRow:
    # Without controls it is 1, and says nothing.
    vif = fit.vif if fit.controls else math.nan
    return _SlopeRow(
        fit.n,
        fit.slope,
        *fit.slope_interval,
        r_squared=fit.r_squared,
        p=fit.p,
        vif=vif,
        freedom=fit.freedom,
    )


def _plain(value: pandas.DataFrame | np.ndarray | np.generic) -> object:
    """Return what JSON has no type for, as lists and numbers."""
    if not isinstance(value, pandas.DataFrame):
        return value.tolist()
    # A named index is a column, such as the name of a covariate.
    table = value.reset_index() if value.index.name else value
    return table.to_dict("records")
