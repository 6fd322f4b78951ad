"""What the singular vectors of blocks mean and do: read, steered along, removed,
rotated."""

# ruff: noqa: F401
from tl_coupling.directions.ablation import Ablation, ablate
from tl_coupling.directions.decoding import Decoded, decode
from tl_coupling.directions.interventions import Directions, RotatedSide, directions_of
from tl_coupling.directions.rotation import Rotation, rotate
from tl_coupling.directions.steering import Steering, steer
from tl_coupling.directions.subspaces import Subspace, shared_subspace

__all__ = [
    "Ablation",
    "Decoded",
    "Directions",
    "Rotation",
    "Steering",
    "Subspace",
    "ablate",
    "decode",
    "directions_of",
    "rotate",
    "shared_subspace",
    "steer",
]
__dir__ = __all__.copy
