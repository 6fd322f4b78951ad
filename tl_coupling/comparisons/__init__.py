"""Which connections are compared, and the result of comparing them."""

from tl_coupling.comparisons.depth import depth_coupling, depth_couplings
from tl_coupling.comparisons.maps import CouplingMap

__all__ = ["CouplingMap", "depth_coupling", "depth_couplings"]
