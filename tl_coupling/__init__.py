"""Transformer block coupling and residual-stream trajectories for TransformerLens models."""

from typing import TYPE_CHECKING, Any

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
from tl_coupling.prompts import Prompt, read_prompts
from tl_coupling.spectra import Spectrum, svd

if TYPE_CHECKING:
    from tl_coupling.plots import (
        plot_adjacency,
        plot_coupling,
        plot_coupling_matrices,
        plot_locality,
        plot_singular_values,
    )

__version__ = "0.1.0"

# matplotlib and networkx are loaded when something is drawn.
_PLOTS = ("plot_adjacency", "plot_coupling", "plot_coupling_matrices", "plot_locality", "plot_singular_values")


def __getattr__(name: str) -> Any:
    if name in _PLOTS:
        from tl_coupling import plots

        return getattr(plots, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLOTS])
