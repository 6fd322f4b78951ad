"""Pictures of what the library measures, with matplotlib: `tlc.plots` hands them out."""

# ruff: noqa: F401

from tl_coupling.pictures.carriers import (
    plot_carriers,
    plot_carriers_by_depth,
    plot_head_coupling,
)
from tl_coupling.pictures.differences import plot_comparison
from tl_coupling.pictures.directions import (
    plot_ablation,
    plot_rotation,
    plot_steering,
    plot_subspace,
)
from tl_coupling.pictures.dynamics import (
    plot_eigenvalues,
    plot_product_map,
    plot_products,
)
from tl_coupling.pictures.labels import (
    measure_label,
    new_figure,
    off_screen,
    paper_style,
)
from tl_coupling.pictures.layers import (
    draw_arcs,
    most_arcs,
    plot_adjacency,
    plot_locality,
    plot_singular_values,
    weighted_pairs,
)
from tl_coupling.pictures.lenses import plot_lens_audit
from tl_coupling.pictures.maps import (
    color_scale,
    plot_alignment_matrices,
    plot_coupling,
    plot_coupling_matrices,
    plot_influence,
    plot_spread,
)
from tl_coupling.pictures.patches import patches_of, picture_of, plot_patches
from tl_coupling.pictures.predictions import (
    plot_inverse_singular_values,
    plot_linearisation,
    plot_perturbation,
)
from tl_coupling.pictures.prompts import plot_prompt_coupling, plot_prompt_map
from tl_coupling.pictures.trajectories import plot_trajectories
from tl_coupling.pictures.trajectory_metrics import plot_trajectory_metrics

__all__ = [
    "off_screen",
    "paper_style",
    "plot_ablation",
    "plot_adjacency",
    "plot_alignment_matrices",
    "plot_carriers",
    "plot_carriers_by_depth",
    "plot_comparison",
    "plot_coupling",
    "plot_coupling_matrices",
    "plot_eigenvalues",
    "plot_head_coupling",
    "plot_influence",
    "plot_inverse_singular_values",
    "plot_lens_audit",
    "plot_linearisation",
    "plot_locality",
    "plot_patches",
    "plot_perturbation",
    "plot_product_map",
    "plot_products",
    "plot_prompt_coupling",
    "plot_prompt_map",
    "plot_rotation",
    "plot_singular_values",
    "plot_spread",
    "plot_steering",
    "plot_subspace",
    "plot_trajectories",
    "plot_trajectory_metrics",
]
