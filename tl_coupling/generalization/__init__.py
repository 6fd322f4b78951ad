"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score.
"""

from tl_coupling.generalization.associations import (
    Bootstrap,
    PromptCorrelation,
    bootstrap,
    prompt_correlations,
    task_means,
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
