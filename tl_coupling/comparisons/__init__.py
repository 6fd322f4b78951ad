"""Which connections are compared, and the result of comparing them."""

from tl_coupling.comparisons.depth import depth_coupling, depth_couplings
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.means import MeanCouplingMap
from tl_coupling.comparisons.tokens import context_coupling, neighbours, self_coupling

__all__ = [
    "CouplingMap",
    "MeanCouplingMap",
    "context_coupling",
    "depth_coupling",
    "depth_couplings",
    "neighbours",
    "self_coupling",
]
