"""Jacobians of block functions, products with them that never build the matrix, and
what they take.
"""

# ruff: noqa: F401
from tl_coupling.jacobians.connections import Connection, Function
from tl_coupling.jacobians.jacobians import (
    block_jacobian,
    block_jacobians,
    jacobian_and_path,
    jacobians_of,
    jacobians_of_output,
)
from tl_coupling.jacobians.plan import Plan, plan
from tl_coupling.jacobians.products import block_jvp, block_vjp

__all__ = [
    "Plan",
    "block_jacobian",
    "block_jacobians",
    "block_jvp",
    "block_vjp",
    "plan",
]
