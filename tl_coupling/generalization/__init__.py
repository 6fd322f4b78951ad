"""Coupling against generalization across models: tables, fits, bootstrap, and what else could explain the score."""

from tl_coupling.generalization.associations import (
    Association,
    PromptCorrelation,
    fits_across_tasks,
    k_sweep,
    prompt_correlations,
    task_fits,
    task_means,
)
from tl_coupling.generalization.fits import (
    ExponentialFit,
    LinearFit,
    RankCorrelation,
    exponential_fit,
    linear_fit,
    rank_correlation,
    subset_fits,
)
from tl_coupling.generalization.regressions import (
    LeaveOneOut,
    PartialRegression,
    covariate_fits,
    leave_one_out,
    partial_regression,
)
from tl_coupling.generalization.resampling import Bootstrap, bootstrap
from tl_coupling.generalization.summary import Generalization, generalization_study
from tl_coupling.generalization.tables import coupling_table, paper_table1, read_scores

__all__ = [
    "Association",
    "Bootstrap",
    "ExponentialFit",
    "Generalization",
    "LeaveOneOut",
    "LinearFit",
    "PartialRegression",
    "PromptCorrelation",
    "RankCorrelation",
    "bootstrap",
    "coupling_table",
    "covariate_fits",
    "exponential_fit",
    "fits_across_tasks",
    "generalization_study",
    "k_sweep",
    "leave_one_out",
    "linear_fit",
    "paper_table1",
    "partial_regression",
    "prompt_correlations",
    "rank_correlation",
    "read_scores",
    "subset_fits",
    "task_fits",
    "task_means",
]
