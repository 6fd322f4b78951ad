"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score.
"""

# ruff: noqa: F401
from tl_coupling.statistics import LinearFit, linear_fit
from tl_coupling.studies.generalization.associations import (
    FEWEST_RESAMPLED,
    Bootstrap,
    bootstrap,
    resampled,
)
from tl_coupling.studies.generalization.covariates import CovariateLine, covariate_lines
from tl_coupling.studies.generalization.model_tables import paper_table1, read_scores
from tl_coupling.studies.generalization.prompt_correlations import (
    PromptCorrelation,
    PromptPoints,
    PromptRelation,
    prompt_correlations,
    prompt_relation,
)
from tl_coupling.studies.generalization.study import generalization_study
from tl_coupling.studies.generalization.study_result import Generalization
from tl_coupling.studies.generalization.tasks import (
    fits_across_tasks,
    split_by_task,
    task_maps,
    task_means,
)

__all__ = [
    "Bootstrap",
    "Generalization",
    "LinearFit",
    "PromptCorrelation",
    "bootstrap",
    "generalization_study",
    "linear_fit",
    "paper_table1",
    "prompt_correlations",
    "read_scores",
    "task_maps",
    "task_means",
]
