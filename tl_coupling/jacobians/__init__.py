"""Jacobians of block functions: computed and decomposed once, read by all.

Products with them never build the matrix; a plan says what they take.
"""

# ruff: noqa: F401
from tl_coupling.jacobians.budget import (
    DEFAULT_OPTIONS,
    AnyMethod,
    JacobianOptions,
    MemoryLimit,
    Method,
    check_method,
)
from tl_coupling.jacobians.chains import PulledBack, pulled_back
from tl_coupling.jacobians.connections import (
    AnyFunction,
    Connection,
    Function,
    chosen_layers,
    connected,
    named_layers,
)
from tl_coupling.jacobians.coupled import Coupled, couple, fill_pairs
from tl_coupling.jacobians.decomposed import (
    Decomposed,
    Rows,
    Wanted,
    decompose,
    decompose_each,
    decompose_sides,
    jacobians_in_turns,
)
from tl_coupling.jacobians.directions import BlockDirections, block_directions
from tl_coupling.jacobians.jacobian_cache import caching_trace
from tl_coupling.jacobians.jacobians import (
    Jacobian,
    block_jacobian,
    block_jacobians,
    jacobians_of,
)
from tl_coupling.jacobians.matrix_free import block_spectrum
from tl_coupling.jacobians.parts import (
    BlockParts,
    block_parts,
    components_and_path,
)
from tl_coupling.jacobians.plan import Plan, plan
from tl_coupling.jacobians.products import block_jvp, block_vjp

__all__ = [
    "BlockDirections",
    "BlockParts",
    "Plan",
    "block_directions",
    "block_jacobian",
    "block_jacobians",
    "block_jvp",
    "block_parts",
    "block_spectrum",
    "block_vjp",
    "plan",
]
__dir__ = __all__.copy
