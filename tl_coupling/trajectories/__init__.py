"""Trajectories of tokens through the residual stream: their shape, their projections, and how far they are linear."""

# ruff: noqa: F401
from tl_coupling.trajectories.noise import Perturbation, perturbation
from tl_coupling.trajectories.predictions import Linearisation, linearisation
from tl_coupling.trajectories.projections import TrajectoryPCA, entropy_by_depth, logit_lens_entropy, trajectory_pca
from tl_coupling.trajectories.result import TrajectoryResult, measure_trajectory
from tl_coupling.trajectories.shapes import (
    attention_sinks,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    norms,
    step_lengths,
)
