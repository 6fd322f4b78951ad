"""Pictures of results, with matplotlib.

Every function draws what a result holds and labels itself from it, takes `ax=` (or
`fig=`) and returns what it drew on; by default that is a new figure, which a notebook
and `plt.show()` display. Inside `with off_screen():` pyplot neither shows nor keeps
figures: for programs that only save them.

>>> ax = tlc.plot_coupling(tlc.depth_coupling(trace, k=4))
"""

# ruff: noqa: F401
from tl_coupling.plots.carriers import (
    plot_carriers,
    plot_carriers_by_depth,
    plot_head_coupling,
)
from tl_coupling.plots.differences import plot_comparison
from tl_coupling.plots.directions import plot_ablation, plot_steering, plot_subspace
from tl_coupling.plots.dynamics import (
    plot_eigenvalues,
    plot_product_map,
    plot_products,
)
from tl_coupling.plots.generalization import (
    plot_forest,
    plot_generalization,
    plot_k_sweep,
    plot_task_means,
)
from tl_coupling.plots.growth import plot_growth, plot_shapes
from tl_coupling.plots.labels import measure_label, new_figure, off_screen, paper_style
from tl_coupling.plots.layers import (
    plot_adjacency,
    plot_locality,
    plot_singular_values,
)
from tl_coupling.plots.maps import (
    color_scale,
    plot_alignment_matrices,
    plot_coupling,
    plot_coupling_matrices,
    plot_influence,
    plot_spread,
)
from tl_coupling.plots.patches import patches_of, picture_of, plot_patches
from tl_coupling.plots.precision import plot_precision
from tl_coupling.plots.predictions import (
    plot_inverse_singular_values,
    plot_linearisation,
    plot_perturbation,
)
from tl_coupling.plots.prompts import plot_prompt_coupling, plot_prompt_map
from tl_coupling.plots.redundancy import plot_redundancy
from tl_coupling.plots.surveys import (
    plot_covariates,
    plot_profiles,
    plot_prompts,
    plot_quartiles,
)
from tl_coupling.plots.sweeps import (
    plot_adjacency_strip,
    plot_coupling_strip,
    plot_emergence,
)
from tl_coupling.plots.trajectories import plot_trajectories
from tl_coupling.plots.trajectory_metrics import plot_trajectory_metrics

__all__ = [
    "off_screen",
    "paper_style",
    *(name for name in dir() if name.startswith("plot_")),
]
