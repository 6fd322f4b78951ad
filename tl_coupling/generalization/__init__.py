"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score.
"""

# ruff: noqa: F401
from tl_coupling.generalization.associations import (
    FEWEST_RESAMPLED,
    Bootstrap,
    PromptCorrelation,
    bootstrap,
    by_task,
    prompt_correlations,
    task_means,
)
from tl_coupling.generalization.relations import (
    CovariateLine,
    PromptPoints,
    PromptRelation,
    covariate_lines,
    prompt_relation,
)
from tl_coupling.generalization.study import Generalization, generalization_study
from tl_coupling.generalization.tables import paper_table1, read_scores
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
