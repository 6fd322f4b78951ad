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
from tl_coupling.executors import process_pool, slurm_executor
from tl_coupling.generalization import (
    Generalization,
    bootstrap,
    coupling_table,
    generalization_study,
    leave_one_out,
    paper_table1,
    partial_regression,
    read_scores,
    task_means,
)
from tl_coupling.influence import Influence, cross_token_influence
from tl_coupling.jacobians import block_jacobian, block_jacobians, block_jvp, block_vjp
from tl_coupling.measurements import Settings, measure_prompts
from tl_coupling.models import ModelError, load_model
from tl_coupling.portraits import Portrait, portrait
from tl_coupling.prompts import Prompt, load_prompts, open_llm_leaderboard_prompts, prompts_per_task, read_prompts
from tl_coupling.redundancy import layer_redundancy, redundancy_correlations
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
from tl_coupling.survey import Survey, open_survey, run
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
    from tl_coupling.interactive import *  # noqa: F403
    from tl_coupling.plots import *  # noqa: F403
    from tl_coupling.report import *  # noqa: F403

__version__ = "0.1.0"

# Loaded when something is drawn (matplotlib, networkx, circuitsvis) or by `dir`; rooms by how their names begin.
_DRAWN = {
    "plot_": "tl_coupling.plots",
    "show_": "tl_coupling.interactive",
    "html_report": "tl_coupling.report",
    "write_report": "tl_coupling.report",
}


def __getattr__(name: str) -> Any:
    for beginning, room in _DRAWN.items():
        if name.startswith(beginning):
            return getattr(importlib.import_module(room), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for room in _DRAWN.values() for name in importlib.import_module(room).__all__)})
