"""Pictures of results, with matplotlib.

Every function draws what a result holds and labels itself from it, takes `ax=` (or
`fig=`) and returns what it drew on; by default that is a new figure, which a notebook
and `plt.show()` display. Inside `with off_screen():` pyplot neither shows nor keeps
figures: for programs that only save them.

>>> ax = tlc.plot_coupling(tlc.depth_coupling(trace, k=4))
"""

# ruff: noqa: F401, F405

import importlib
from typing import TYPE_CHECKING

from tl_coupling.plots.carriers import (
    plot_carriers,
    plot_carriers_by_depth,
    plot_head_coupling,
)
from tl_coupling.plots.differences import plot_comparison
from tl_coupling.plots.directions import (
    plot_ablation,
    plot_rotation,
    plot_steering,
    plot_subspace,
)
from tl_coupling.plots.dynamics import (
    plot_eigenvalues,
    plot_product_map,
    plot_products,
)
from tl_coupling.plots.labels import measure_label, new_figure, off_screen, paper_style
from tl_coupling.plots.layers import (
    draw_arcs,
    most_arcs,
    plot_adjacency,
    plot_locality,
    plot_singular_values,
    weighted_pairs,
)
from tl_coupling.plots.lenses import plot_lens_audit
from tl_coupling.plots.maps import (
    color_scale,
    plot_alignment_matrices,
    plot_coupling,
    plot_coupling_matrices,
    plot_influence,
    plot_spread,
)
from tl_coupling.plots.patches import patches_of, picture_of, plot_patches
from tl_coupling.plots.predictions import (
    plot_inverse_singular_values,
    plot_linearisation,
    plot_perturbation,
)
from tl_coupling.plots.prompts import plot_prompt_coupling, plot_prompt_map
from tl_coupling.plots.trajectories import plot_trajectories
from tl_coupling.plots.trajectory_metrics import plot_trajectory_metrics

if TYPE_CHECKING:
    from tl_coupling.studies.plots import *  # noqa: F403

__all__ = [
    "animate_coupling",
    "off_screen",
    "paper_style",
    "plot_ablation",
    "plot_adjacency",
    "plot_adjacency_strip",
    "plot_alignment_matrices",
    "plot_carriers",
    "plot_carriers_by_depth",
    "plot_comparison",
    "plot_coupling",
    "plot_coupling_matrices",
    "plot_coupling_strip",
    "plot_covariates",
    "plot_eigenvalues",
    "plot_emergence",
    "plot_forest",
    "plot_generalization",
    "plot_growth",
    "plot_head_coupling",
    "plot_influence",
    "plot_inverse_singular_values",
    "plot_k_sweep",
    "plot_lens_audit",
    "plot_linearisation",
    "plot_locality",
    "plot_patches",
    "plot_perturbation",
    "plot_precision",
    "plot_product_map",
    "plot_products",
    "plot_profiles",
    "plot_prompt_coupling",
    "plot_prompt_map",
    "plot_prompts",
    "plot_quartiles",
    "plot_redundancy",
    "plot_rotation",
    "plot_shapes",
    "plot_singular_values",
    "plot_spread",
    "plot_steering",
    "plot_subspace",
    "plot_task_means",
    "plot_trajectories",
    "plot_trajectory_metrics",
]


def __getattr__(name: str) -> object:
    # Studies stand above this room: their pictures are loaded when one is asked for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("tl_coupling.studies.plots"), name)
