"""Trajectories of tokens through the residual stream: their shape, their projections, and how far they are linear."""

from tl_coupling.trajectories.lens import entropy_by_depth
from tl_coupling.trajectories.noise import Perturbation, perturbation
from tl_coupling.trajectories.predictions import Linearisation, linearisation
from tl_coupling.trajectories.projections import TrajectoryPCA, logit_lens_entropy, trajectory_pca
from tl_coupling.trajectories.shapes import (
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    norms,
    step_lengths,
)

__all__ = [
    "Linearisation",
    "Perturbation",
    "TrajectoryPCA",
    "entropy_by_depth",
    "equidistance",
    "expodistance",
    "line_shape_score",
    "line_shape_score_by_depth",
    "linearisation",
    "logit_lens_entropy",
    "norms",
    "perturbation",
    "step_lengths",
    "trajectory_pca",
]
