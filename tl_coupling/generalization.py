"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score: public names of `tl_coupling.studies.generalization`.
"""

from tl_coupling.studies.generalization import (
    Bootstrap,
    Generalization,
    LinearFit,
    PromptCorrelation,
    bootstrap,
    generalization_study,
    linear_fit,
    paper_table1,
    prompt_correlations,
    read_scores,
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
    "task_means",
]
