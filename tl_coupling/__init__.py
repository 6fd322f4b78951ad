"""Transformer block coupling and residual-stream trajectories for TransformerLens models."""

import importlib
from typing import TYPE_CHECKING, Any

from tl_coupling.blocks import BlockFunction, Trace, trace
from tl_coupling.checkpoints import checkpoint_sweep, local_checkpoints, pythia_steps
from tl_coupling.comparisons import CouplingMap, context_coupling, depth_coupling, depth_couplings, self_coupling
from tl_coupling.coupling import (
    captured_energy,
    coupling_matrix,
    miscoupling,
    normalized_miscoupling,
    random_subspace_null,
    spectral_miscoupling,
)
from tl_coupling.influence import Influence, cross_token_influence
from tl_coupling.jacobians import block_jacobian, block_jacobians, block_jvp, block_vjp
from tl_coupling.measurements import Settings, measure_prompts
from tl_coupling.models import ModelError, load_model
from tl_coupling.prompts import Prompt, read_prompts
from tl_coupling.spectra import (
    InverseSingularValueFit,
    Spectrum,
    asymmetry,
    effective_rank,
    inverse_singular_value_fit,
    non_normality,
    participation_ratio,
    singular_values,
    svd,
)
from tl_coupling.trajectories import (
    Linearisation,
    Perturbation,
    TrajectoryPCA,
    entropy_by_depth,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    linearisation,
    logit_lens_entropy,
    norms,
    perturbation,
    step_lengths,
    trajectory_pca,
)

if TYPE_CHECKING:
    from tl_coupling.interactive import show_layers_by_token, show_token_coupling, show_tokens
    from tl_coupling.plots import (
        plot_adjacency,
        plot_coupling,
        plot_coupling_matrices,
        plot_coupling_strip,
        plot_emergence,
        plot_influence,
        plot_inverse_singular_values,
        plot_linearisation,
        plot_locality,
        plot_perturbation,
        plot_shapes,
        plot_singular_values,
        plot_trajectories,
        plot_trajectory_metrics,
    )
    from tl_coupling.report import html_report, measure_prompt, write_report

__version__ = "0.1.0"

# Loaded when something is drawn: matplotlib, networkx, circuitsvis.
_DRAWN = {
    "tl_coupling.plots": (
        "plot_adjacency",
        "plot_coupling",
        "plot_coupling_matrices",
        "plot_coupling_strip",
        "plot_emergence",
        "plot_influence",
        "plot_inverse_singular_values",
        "plot_linearisation",
        "plot_locality",
        "plot_perturbation",
        "plot_shapes",
        "plot_singular_values",
        "plot_trajectories",
        "plot_trajectory_metrics",
    ),
    "tl_coupling.interactive": ("show_layers_by_token", "show_token_coupling", "show_tokens"),
    "tl_coupling.report": ("html_report", "measure_prompt", "write_report"),
}


def __getattr__(name: str) -> Any:
    for room, names in _DRAWN.items():
        if name in names:
            return getattr(importlib.import_module(room), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in _DRAWN.values() for name in names)])
