"""Transformer block coupling and residual-stream trajectories for TransformerLens models.

What most analyses need is here; the rest is in the rooms, such as `tlc.plots` or `tlc.generalization`.
Everything is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tl_coupling.blocks import Trace, trace
    from tl_coupling.comparisons import CouplingMap, context_coupling, depth_coupling, self_coupling
    from tl_coupling.coupling import (
        captured_energy,
        coupling_matrix,
        miscoupling,
        normalized_miscoupling,
        random_subspace_null,
        spectral_miscoupling,
    )
    from tl_coupling.influence import cross_token_influence
    from tl_coupling.jacobians import block_jacobian, block_jacobians, block_jvp, block_vjp
    from tl_coupling.models import ModelError, load_model
    from tl_coupling.plots import plot_adjacency, plot_coupling, plot_coupling_matrices, plot_trajectories
    from tl_coupling.portraits import portrait
    from tl_coupling.prompts import Prompt, load_prompts
    from tl_coupling.report import write_report
    from tl_coupling.spectra import Spectrum, svd
    from tl_coupling.surveys import Settings, Survey, checkpoint_sweep, open_survey, run
    from tl_coupling.trajectories import equidistance, expodistance, line_shape_score, step_lengths

__version__ = "0.1.0"

_ROOM_OF = {
    name: room
    for room, names in {
        "models": "ModelError load_model",
        "prompts": "Prompt load_prompts",
        "blocks": "Trace trace",
        "jacobians": "block_jacobian block_jacobians block_jvp block_vjp",
        "spectra": "Spectrum svd",
        "coupling": "captured_energy coupling_matrix miscoupling normalized_miscoupling random_subspace_null "
        "spectral_miscoupling",
        "comparisons": "CouplingMap context_coupling depth_coupling self_coupling",
        "influence": "cross_token_influence",
        "trajectories": "equidistance expodistance line_shape_score step_lengths",
        "portraits": "portrait",
        "surveys": "Settings Survey checkpoint_sweep open_survey run",
        "redundancy": "",
        "generalization": "",
        "plots": "plot_adjacency plot_coupling plot_coupling_matrices plot_trajectories",
        "interactive": "",
        "report": "write_report",
    }.items()
    for name in [*names.split(), room]
}
__all__ = sorted(name for name, room in _ROOM_OF.items() if name != room)


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{room}")
    return module if name == room else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(_ROOM_OF)
