"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score.
"""

# ruff: noqa: F401
from tl_coupling.generalization.associations import (
    FEWEST_RESAMPLED,
    Bootstrap,
    bootstrap,
    resampled,
)
from tl_coupling.generalization.covariates import CovariateLine, covariate_lines
from tl_coupling.generalization.model_tables import paper_table1, read_scores
from tl_coupling.generalization.prompt_correlations import (
    PromptCorrelation,
    PromptPoints,
    PromptRelation,
    prompt_correlations,
    prompt_relation,
)
from tl_coupling.generalization.study import generalization_study
from tl_coupling.generalization.study_result import Generalization
from tl_coupling.generalization.tasks import (
    fits_across_tasks,
    split_by_task,
    task_means,
)
from tl_coupling.statistics import LinearFit, linear_fit

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
    "task_means",
]
