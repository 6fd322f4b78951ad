"""Which connections are compared, and the result of comparing them."""

from tl_coupling.comparisons.choices import neighbours
from tl_coupling.comparisons.maps import CouplingMap, MeanCouplingMap
from tl_coupling.comparisons.matrices import jacobian_coupling
from tl_coupling.comparisons.pairs import (
    context_coupling,
    depth_coupling,
    depth_couplings,
    self_coupling,
)

__all__ = [
    "CouplingMap",
    "MeanCouplingMap",
    "context_coupling",
    "depth_coupling",
    "depth_couplings",
    "jacobian_coupling",
    "neighbours",
    "self_coupling",
]
