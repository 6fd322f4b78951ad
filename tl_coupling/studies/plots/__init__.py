"""Pictures of studies, which `tlc.plots` hands out beside its own."""

from tl_coupling.studies.plots.generalization import (
    plot_forest,
    plot_generalization,
    plot_k_sweep,
    plot_task_means,
)
from tl_coupling.studies.plots.growth import plot_growth, plot_shapes
from tl_coupling.studies.plots.precision import plot_precision
from tl_coupling.studies.plots.redundancy import plot_redundancy
from tl_coupling.studies.plots.surveys import (
    plot_covariates,
    plot_profiles,
    plot_prompts,
    plot_quartiles,
)
from tl_coupling.studies.plots.sweeps import (
    animate_coupling,
    plot_adjacency_strip,
    plot_coupling_strip,
    plot_emergence,
)

__all__ = [
    "animate_coupling",
    "plot_adjacency_strip",
    "plot_coupling_strip",
    "plot_covariates",
    "plot_emergence",
    "plot_forest",
    "plot_generalization",
    "plot_growth",
    "plot_k_sweep",
    "plot_precision",
    "plot_profiles",
    "plot_prompts",
    "plot_quartiles",
    "plot_redundancy",
    "plot_shapes",
    "plot_task_means",
]
