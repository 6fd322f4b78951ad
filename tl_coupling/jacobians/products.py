"""Products of Jacobians with vectors, which never build the matrix."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.gradients import Path, RowFunction, vjp
from tl_coupling.jacobians.connections import connected
from tl_coupling.jacobians.ways import cheapest
from tl_coupling.traces import Trace


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
    """Vector–Jacobian product `(J^l_{t1 t2})ᵀ v` by one backward pass, without forming
    J.

    What moving token t1 along each axis does to the output at t2 in the direction v.
    Arguments and errors as in `block_jacobian`; v is `vector`, which must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> torch.allclose(tlc.block_vjp(trace, 1, v), tlc.block_jacobian(trace, 1).mT @ v, atol=1e-4)
        True
    """
    block, _, v, _, pull_back = _differentiated(
        trace, layer, vector, position, input_position, output_position
    )
    with block.evaluation():
        return pull_back(v)[0]


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
    """Jacobian–vector product `J^l_{t1 t2} v`, without forming J.

    What the output at t2 does when token t1 moves in the direction v. By forward mode,
    or by differentiating the backward pass where a block does not support it. Arguments
    and errors as in `block_jacobian`; v is `vector`, which must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> torch.allclose(tlc.block_jvp(trace, 1, v), tlc.block_jacobian(trace, 1) @ v, atol=1e-4)
        True
    """
    block, x, v, function, _ = _differentiated(
        trace, layer, vector, position, input_position, output_position
    )
    with block.evaluation():
        try:
            return torch.func.jvp(function, (x,), (v,))[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, x, v)[1]


def _differentiated(
    trace: Trace, layer: int, vector: Tensor, *positions: Any
) -> tuple[Any, ...]:
    """The block, its input row, the vector in its dtype; the token-local or else full
    function, and its pull-back.
    """
    block, t1, t2 = connected(trace, layer, *positions)
    if vector.shape != block.X.shape[1:]:
        raise ValueError(
            f"`vector` must have shape {list(block.X.shape[1:])}, got {list(vector.shape)}"
        )
    v = vector.to(block.X)
    if not bool(v.isfinite().all()):
        raise ValueError(
            f"`vector` must be finite in {v.dtype}, got NaN or infinite entries"
        )
    u = block.reference(t2).u

    def compute(make: Callable[[], RowFunction]) -> tuple[Any, ...]:
        y, pull_back = vjp(function := make(), block.X[t1])
        return y, [pull_back(u)[0]], (function, pull_back)

    ways: list[tuple[Path, Callable[[], RowFunction]]] = [
        ("token_local", partial(block.token_local, t1, t2))
    ]
    ways.append(("full_sequence", partial(block.full_sequence, t1, t2)))
    (function, pull_back), _ = cheapest(block, ways, [t1], t2, compute)
    return block, block.X[t1], v, function, pull_back
