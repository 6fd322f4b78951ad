"""Trajectories of tokens through the residual stream.

Their shapes, their projections, and how far they are linear.
"""
# ruff: noqa: F401

from tl_coupling.trajectories.gradients import (
    GradientPrediction,
    coupled_gradient,
    gradient_prediction,
)
from tl_coupling.trajectories.lens_audits import LensAudit, lens_audit
from tl_coupling.trajectories.lenses import check_lens, product_lens
from tl_coupling.trajectories.predictions import (
    Linearisation,
    Perturbation,
    linearisation,
    perturbation,
)
from tl_coupling.trajectories.residual_alignment import (
    ResidualAlignment,
    residual_alignment,
)
from tl_coupling.trajectories.result import (
    SHAPES,
    TrajectoryResult,
    entropy_by_depth,
    measure_trajectory,
)
from tl_coupling.trajectories.shapes import (
    TrajectoryPCA,
    Window,
    attention_sinks,
    direction_cosine,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    logit_lens_entropy,
    norms,
    step_lengths,
    trajectory_pca,
)

__all__ = [
    "GradientPrediction",
    "LensAudit",
    "Linearisation",
    "Perturbation",
    "ResidualAlignment",
    "TrajectoryPCA",
    "TrajectoryResult",
    "attention_sinks",
    "coupled_gradient",
    "entropy_by_depth",
    "equidistance",
    "expodistance",
    "gradient_prediction",
    "lens_audit",
    "line_shape_score",
    "line_shape_score_by_depth",
    "linearisation",
    "logit_lens_entropy",
    "measure_trajectory",
    "norms",
    "perturbation",
    "product_lens",
    "residual_alignment",
    "step_lengths",
    "trajectory_pca",
]
__dir__ = __all__.copy
