"""Transformer block coupling and residual-stream trajectories for TransformerLens models.

The names that most analyses need are here; the rest is in the rooms, such as `tlc.plots` or `tlc.generalization`.
Everything is imported when it is first used. `__init__.pyi` tells type checkers the same.
"""

import importlib

__version__ = "0.1.0"

# Each room, and which of its names are handed out here.
_ROOMS = {
    "blocks": "Trace trace",
    "comparisons": "CouplingMap context_coupling depth_coupling self_coupling",
    "coupling": "captured_energy coupling_matrix miscoupling normalized_miscoupling random_subspace_null "
    "spectral_miscoupling",
    "generalization": "",
    "influence": "cross_token_influence",
    "interactive": "",
    "jacobians": "block_jacobian block_jacobians block_jvp block_vjp",
    "models": "ModelError load_model",
    "plots": "plot_adjacency plot_coupling plot_coupling_matrices plot_trajectories",
    "portraits": "portrait",
    "prompts": "Prompt load_prompts",
    "redundancy": "",
    "report": "write_report",
    "spectra": "Spectrum svd",
    "surveys": "Settings Survey checkpoint_sweep open_survey run",
    "trajectories": "equidistance expodistance line_shape_score step_lengths",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = list(_ROOM_OF)


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
