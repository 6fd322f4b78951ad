"""Which connections are compared, and the result of comparing them."""

# ruff: noqa: F401
from tl_coupling.arguments import renamed
from tl_coupling.comparisons.across_prompts import (
    PromptCoupling,
    PromptMeasure,
    prompt_coupling,
)
from tl_coupling.comparisons.carrying import Carriers, Share, carriers, strongest_heads
from tl_coupling.comparisons.choices import free_end, layer_pair
from tl_coupling.comparisons.differences import Comparison, compare
from tl_coupling.comparisons.frozen_coupling import FrozenCoupling, frozen_coupling
from tl_coupling.comparisons.heads import HeadCoupling, HeadPair, head_coupling
from tl_coupling.comparisons.jacobian_coupling import jacobian_coupling
from tl_coupling.comparisons.maps import CouplingMap, describe_pairs, p_in_words
from tl_coupling.comparisons.means import MeanCouplingMap, mean_of_maps
from tl_coupling.comparisons.null_means import Chance, null_interval_of_spectra
from tl_coupling.comparisons.pairs import (
    SeveralTraces,
    as_trace,
    context_coupling,
    decomposed_layers,
    depth_coupling,
    depth_coupling_by_orientation,
    depth_maps,
    maps_of,
    mean_depth_coupling,
    self_coupling,
)
from tl_coupling.comparisons.same_parts import part_coupling

__all__ = [
    "Carriers",
    "Chance",
    "Comparison",
    "CouplingMap",
    "FrozenCoupling",
    "HeadCoupling",
    "MeanCouplingMap",
    "PromptCoupling",
    "carriers",
    "compare",
    "context_coupling",
    "depth_coupling",
    "depth_coupling_by_orientation",
    "frozen_coupling",
    "head_coupling",
    "jacobian_coupling",
    "layer_pair",
    "mean_depth_coupling",
    "mean_of_maps",
    "part_coupling",
    "prompt_coupling",
    "self_coupling",
]
__dir__ = __all__.copy

# Names of earlier versions.
neighbours = renamed(layer_pair, "comparisons.neighbours")
depth_couplings = renamed(depth_coupling_by_orientation, "comparisons.depth_couplings")
