"""Products of Jacobians with vectors, which never build the matrix."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import (
    BlockFunction,
    Evaluated,
    Path,
    PullBack,
    RowFunction,
    Trace,
    Way,
    is_out_of_memory,
    reverse_mode,
    vjp,
)
from tl_coupling.jacobians.connections import connected


@checked
def block_vjp(
    trace: Trace,
    layer: int,
    vector: Float[Tensor, " d_model"],
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
) -> Float[Tensor, " d_model"]:
    """Return the product `(J^l_{t1 t2})ᵀ v` by one backward pass, without forming J.

    What moving token t1 along each axis does to the output at t2 in the direction v.
    Arguments and errors as in `block_jacobian`; v is `vector`, which must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> expected = tlc.block_jacobian(trace, 1).mT @ v
        >>> torch.allclose(tlc.block_vjp(trace, 1, v), expected, atol=1e-4)
        True
    """
    t1_to_t2 = differentiated(
        *connected(trace, layer, position, input_position, output_position)
    )
    v = _checked_vector(vector, t1_to_t2.x)
    with t1_to_t2.block.evaluation():
        return t1_to_t2.pull_back(v)[0]


@checked
def block_jvp(
    trace: Trace,
    layer: int,
    vector: Float[Tensor, " d_model"],
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
) -> Float[Tensor, " d_model"]:
    """Return the product `J^l_{t1 t2} v`, without forming J.

    What the output at t2 does when token t1 moves in the direction v. By forward mode,
    or by differentiating the backward pass where a block does not support it; from J
    where it supports neither. Arguments and errors as in `block_jacobian`; v is
    `vector`, which must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> expected = tlc.block_jacobian(trace, 1) @ v
        >>> torch.allclose(tlc.block_jvp(trace, 1, v), expected, atol=1e-4)
        True
    """
    t1_to_t2 = differentiated(
        *connected(trace, layer, position, input_position, output_position)
    )
    x = t1_to_t2.x
    v = _checked_vector(vector, x)
    with t1_to_t2.block.evaluation():
        # Forward mode lacks rules for some operations; a second backward pass has them.
        for jvp in (forward_mode, twice_backward):
            try:
                return jvp(t1_to_t2.function, x, v)
            except Exception as error:
                # A foreign block may raise anything.
                if is_out_of_memory(error):
                    raise
        # Custom Functions that can be differentiated only once are left.
        _, (J,) = reverse_mode(t1_to_t2.function, (x,), lambda J: [J], 4)
        return J @ v


def forward_mode(function: RowFunction, x: Tensor, v: Tensor) -> Tensor:
    """Return `J v` by forward mode."""
    tangent: Tensor = torch.func.jvp(function, (x,), (v,))[1]
    return tangent


def twice_backward(function: RowFunction, x: Tensor, v: Tensor) -> Tensor:
    """Return `J v` by differentiating the backward pass, without torch.func."""
    tangent: Tensor = torch.autograd.functional.jvp(function, x, v)[1]
    return tangent


class Differentiated(NamedTuple):
    """A block as a function of one row of its input, at the row that was traced.

    Attributes:
        block: the block.
        x: the input row.
        function: from the row to the output row.
        pull_back: gives vector–Jacobian products.
        path: the way in which the block is evaluated.
    """

    block: BlockFunction
    x: Tensor
    function: RowFunction
    pull_back: PullBack
    path: Path


def _checked_vector(vector: Tensor, x: Tensor) -> Tensor:
    """Return a vector in the row's dtype; ValueError for one of another kind."""
    if vector.shape != x.shape:
        raise ValueError(
            f"`vector` must have shape {list(x.shape)}, got {list(vector.shape)}"
        )
    v = vector.to(x)
    if not bool(v.isfinite().all()):
        raise ValueError(
            f"`vector` must be finite in {v.dtype}, got NaN or infinite entries"
        )
    return v


def differentiated(block: BlockFunction, t1: int, t2: int) -> Differentiated:
    """Return the token-local function of a block, or else that of the full sequence."""
    x = block.X[t1]
    # The product that decides is the one that the reference holds.
    u = block.reference(t2).u

    def evaluate(
        make_function: Callable[[int, int], RowFunction],
    ) -> Evaluated[tuple[RowFunction, PullBack]]:
        function = make_function(t1, t2)
        y, pull_back = vjp(function, x)
        return y, (function, pull_back)

    ways: list[Way[tuple[RowFunction, PullBack]]] = [
        ("token_local", partial(evaluate, block.token_local)),
        ("full_sequence", partial(evaluate, block.full_sequence)),
    ]
    (function, pull_back), path = block.cheapest(
        ways, [t1], t2, lambda result: [result[1](u)[0]]
    )
    return Differentiated(block, x, function, pull_back, path)
