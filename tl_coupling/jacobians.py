"""Jacobians of block functions with torch.func, and products with them that never form one."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import BlockFunction, Path, Trace
from tl_coupling.blocks.functions import RowFunction, vjp

# Entries in the widest activation that one chunk of seeds may carry (float32: 64 MiB); it sets the default chunk size.
_CHUNK_BUDGET = 2**24


def block_jacobian(
    trace: Trace,
    layer: int,
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
    chunk_size: int | None = None,
) -> Float[Tensor, "d_model d_model"]:
    """Jacobian of one block function: `J^l_{t1 t2} = ∂ f^l(X)_{t2} / ∂ x_{t1}`, the skip left out.

    Rows index outputs, columns inputs; an entry is a gain without dimension. Aubry et al. 2025, eq. 8. In a causal
    model `J_{t1 t2}` is exactly zero for `t1 > t2`.

    Args:
        trace: a traced prompt.
        layer: the block, from 0; negative counts from the end.
        position: input and output token where neither is named on its own. The last by default, as in the paper.
        input_position: `t1`, the token that is moved. Defaults to `position`.
        output_position: `t2`, the token that is read. Defaults to `position`.
        chunk_size: rows of J that are computed at a time; bounds memory. By default as many as keep the widest
            activation under about 64 MiB.

    Raises:
        ValueError: a layer or position out of range, or `chunk_size < 1`.

    Cost: `d_model` backward passes of one block, on one token; on the whole prompt where the block does not allow
    token-local evaluation (a comparison with the full sequence decides).

    Example:
        >>> tlc.block_jacobian(trace, layer=1).shape
        torch.Size([32, 32])
        >>> tlc.block_jacobian(trace, layer=1, input_position=5, output_position=2).any()
        tensor(False)
    """
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    return jacobian_and_path(block, t1, t2, chunk_size)[0]


def block_jacobians(
    trace: Trace, layers: Sequence[int] | None = None, *, position: int = -1, chunk_size: int | None = None
) -> Float[Tensor, "n_chosen d_model d_model"]:
    """`J^l_{tt}` of several layers (`None`: all), stacked; see `block_jacobian`."""
    chosen = range(trace.n_layers) if layers is None else layers
    if not len(chosen):
        raise ValueError("`layers` is empty: wanted at least one layer")
    J = trace.residual.new_empty(len(chosen), trace.d_model, trace.d_model)
    for row, layer in enumerate(chosen):
        J[row] = block_jacobian(trace, layer, position=position, chunk_size=chunk_size)
    return J


def block_vjp(
    trace: Trace,
    layer: int,
    vector: Float[Tensor, " d_model"],
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
) -> Float[Tensor, " d_model"]:
    """`(J^l_{t1 t2})ᵀ v`, one backward pass, J never formed. Arguments and errors as in `block_jacobian`."""
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    with block.evaluation():
        return vjp(_row_function(block, t1, t2), block.X[t1])[1](_vector(vector, block))


def block_jvp(
    trace: Trace,
    layer: int,
    vector: Float[Tensor, " d_model"],
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
) -> Float[Tensor, " d_model"]:
    """`J^l_{t1 t2} v`, J never formed. Arguments and errors as in `block_jacobian`.

    Forward mode; where a block has no forward derivative, its backward pass is differentiated once more.
    """
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    with block.evaluation():
        function, x, v = _row_function(block, t1, t2), block.X[t1], _vector(vector, block)
        try:
            return torch.func.jvp(function, (x,), (v,))[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, x, v)[1]


def jacobian_and_path(
    block: BlockFunction, input_position: int, output_position: int, chunk_size: int | None = None
) -> tuple[Float[Tensor, "d_model d_model"], Path]:
    """One Jacobian, by the cheapest of the block's ways that agrees with the full sequence; and which way that was."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}")
    x = block.X[input_position]
    with block.evaluation():
        if input_position > output_position and not block.reaches_back(input_position, output_position):
            return x.new_zeros(len(x), len(x)), "full_sequence"
        u = block.reference(output_position)[1]
        for path, make, context in block.ways(input_position, output_position):
            n_rows = block.X.shape[0] if path == "full_sequence" else 1
            chunk = chunk_size or max(1, _CHUNK_BUDGET // (4 * len(x) * n_rows))
            try:
                with context:
                    y, J = _all_rows(make(), x, chunk)
            # A foreign block may raise anything when it is called with our cache; the full sequence remains.
            except Exception:
                if path == "full_sequence":
                    raise
                continue
            if path == "full_sequence" or block.agrees(y, u @ J, input_position, output_position):
                return J, path
    raise AssertionError("the last way always returns")


def _all_rows(function: RowFunction, x: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """`(f(x), ∂f/∂x)`, reverse mode, `chunk_size` rows at a time."""
    y, pull_back = vjp(function, x)
    seeds = torch.eye(len(y), dtype=y.dtype, device=y.device)
    try:
        return y, torch.func.vmap(pull_back, chunk_size=chunk_size)(seeds)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return y, torch.stack([pull_back(seed) for seed in seeds])


def _row_function(block: BlockFunction, input_position: int, output_position: int) -> RowFunction:
    """The token-local row function if it passes the gate by one backward pass, else the full-sequence one."""
    _, u, _ = block.reference(output_position)
    try:
        function = block.token_local(input_position, output_position)
        y, pull_back = vjp(function, block.X[input_position])
        if block.agrees(y, pull_back(u), input_position, output_position):
            return function
    # As above: whatever the block makes of a foreign cache.
    except Exception:
        pass
    return block.full_sequence(input_position, output_position)


def _connection(
    trace: Trace, layer: int, position: int, input_position: int | None, output_position: int | None
) -> tuple[BlockFunction, int, int]:
    t1 = trace.position_index(position if input_position is None else input_position, "input_position")
    t2 = trace.position_index(position if output_position is None else output_position, "output_position")
    return trace.blocks[trace.layer_index(layer)], t1, t2


def _vector(vector: Tensor, block: BlockFunction) -> Tensor:
    d_model = block.X.shape[1]
    if vector.shape != (d_model,):
        raise ValueError(f"`vector` must have shape [{d_model}], got {list(vector.shape)}")
    return vector.to(block.X)
