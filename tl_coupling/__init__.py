"""Transformer block coupling and residual-stream trajectories for TransformerLens models."""

from tl_coupling.blocks import BlockFunction, Trace, trace
from tl_coupling.comparisons import CouplingMap, depth_coupling, depth_couplings
from tl_coupling.coupling import (
    captured_energy,
    coupling_matrix,
    miscoupling,
    normalized_miscoupling,
    random_subspace_null,
    spectral_miscoupling,
)
from tl_coupling.jacobians import block_jacobian, block_jacobians, block_jvp, block_vjp
from tl_coupling.models import ModelError, load_model
from tl_coupling.spectra import Spectrum, svd

__version__ = "0.1.0"
