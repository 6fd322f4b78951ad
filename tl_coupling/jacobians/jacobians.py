"""Jacobians of block functions: one, those of several layers, those of any connections."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks import (
    TOGETHER,
    BlockFunction,
    FrozenFunction,
    Path,
    Trace,
    is_out_of_memory,
    jacobians_together,
)
from tl_coupling.jacobians.connections import (
    AnyFunction,
    Connection,
    Function,
    connected,
)
from tl_coupling.jacobians.jacobian_cache import Group, JacobianCache
from tl_coupling.progress import Progress, with_progress

# Entries in a batch of Jacobians (float32: 256 MiB), and the largest number of
# Jacobians that share work.
BATCH_BUDGET = 2**26
MOST_SHARING = 32


@checked
def block_jacobian(
    trace: Trace,
    layer: int,
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
    chunk_size: Count | None = None,
    function: Function = "block",
) -> Float[Tensor, "d_model d_model"]:
    r"""Jacobian of what one block adds to the residual stream, without the skip
    connection.

    .. math:: J^l_{t_1 t_2} = \frac{\partial f^l(X)_{t_2}}{\partial x_{t_1}}

    Rows index outputs, columns inputs; an entry is a dimensionless gain. Aubry et al.
    2025, eq. 8. In a causal model `J_{t1 t2}` is exactly zero for `t1 > t2`. Layers and
    positions count from 0, negative ones from the end.

    Args:
        trace: a traced prompt.
        layer: the block.
        position: `t1` and `t2`, unless given by themselves. The last token by default,
            as in the paper.
        input_position: `t1`, the token that is moved.
        output_position: `t2`, the token that is read.
        chunk_size: rows of J to compute at a time, where they are pulled back. By
            default as many as keep the widest activation below about 64 MiB. A record
            of the block's operations gives all at once.
        function: of a block that normalises the stream itself (post-norm: BERT),
            "block" is `f(X) = block(X) − X`, whose J holds `−I`: `I + J` is the block's
            derivative. "branches" is what its residual branches add before their norms,
            which `depth_coupling` and all other comparisons take. Of any other block
            both are the same.

    Raises:
        ValueError: a layer or position out of range, `chunk_size < 1`, or "branches" of
            a block that normalises the stream by something else than a module that is
            called on it.

    Cost: the products of one block's matrices on `d_model` tangents of one token, or
    `d_model` backward passes on the whole prompt where the block does not allow
    token-local evaluation (decided by a comparison with the full sequence).

    Example:
        >>> tlc.block_jacobian(trace, layer=1).shape
        torch.Size([32, 32])
        >>> tlc.block_jacobian(trace, layer=1, input_position=5, output_position=2).any()
        tensor(False)
    """
    block, t1, t2 = connected(trace, layer, position, input_position, output_position)
    J, _ = measured(block, function).jacobian(t1, t2, chunk_size)
    return J


@checked
def block_jacobians(
    trace: Trace,
    layers: Sequence[int] | None = None,
    *,
    position: int = -1,
    chunk_size: Count | None = None,
    function: Function = "block",
    progress: Progress | None = None,
) -> Float[Tensor, "n_chosen d_model d_model"]:
    """Jacobians `J^l_{tt}` of several layers at one token, stacked.

    Each is that of `block_jacobian`.

    Args:
        trace: a traced prompt.
        layers: which layers, in this order; all by default.
        position: as in `block_jacobian`, with the same errors.
        chunk_size: as there.
        function: as there.
        progress: wraps the loop over layers, such as `tqdm.tqdm`; by default a bar in a
            terminal or notebook, `False` for none.

    Raises:
        ValueError: no layers.

    Cost: as `block_jacobian` for each layer; memory for all of them, `n_chosen
    d_model²` numbers.

    Example:
        >>> tlc.block_jacobians(trace, layers=[1, 0]).shape
        torch.Size([2, 32, 32])
    """
    selected_layers = range(trace.n_layers) if layers is None else layers
    if not len(selected_layers):
        raise ValueError("`layers` is empty: wanted at least one layer")
    n_layers = len(selected_layers)
    # Filled row by row: a list of all and their stack would take twice the memory.
    J = trace.blocks[0].X.new_empty(n_layers, trace.d_model, trace.d_model)
    t = trace.position_index(position)
    connections = [
        Connection(trace.layer_index(layer), t, t, t) for layer in selected_layers
    ]
    jacobians = jacobians_of(
        trace, connections, chunk_size=chunk_size, function=function
    )
    for row in with_progress(J, progress, "Jacobians"):
        row[:] = next(jacobians).J
    return J


class Jacobian(NamedTuple):
    """The Jacobian of a connection, and the way in which it was evaluated."""

    connection: Connection
    J: Float[Tensor, "d_model d_model"]
    path: Path


def jacobians_of(
    trace: Trace,
    connections: Sequence[Connection],
    *,
    chunk_size: int | None = None,
    n_sharing: int = MOST_SHARING,
    function: AnyFunction = "branches",
) -> Iterator[Jacobian]:
    """Yield the Jacobian of each connection, in order, computed when it is asked for.

    `function` as in `block_jacobian`, but "branches" by default, the one that can be
    compared with other blocks', or "frozen", what those are with norms, attention
    patterns and gates held constant. Neighbouring connections of one layer share a
    reference, those of one output more: up to `n_sharing` together, fewer where their
    Jacobians would exceed `BATCH_BUDGET`.
    """
    cache: JacobianCache = trace.jacobian_cache or JacobianCache()
    # A prompt of many tokens has more connections to one output than fit in memory.
    n_together = max(1, min(n_sharing, MOST_SHARING, BATCH_BUDGET // trace.d_model**2))
    for layer, layer_connections in groupby(connections, attrgetter("layer")):
        while sharing := list(islice(layer_connections, n_together)):
            by_output = groupby(sharing, attrgetter("output_position"))
            groups = [
                Group(tuple(connected_to), chunk_size, function)
                for _, connected_to in by_output
            ]
            outputs = [group.connections[0].output_position for group in groups]
            are_kept = cache.kept.keys() >= set(groups)
            block = trace.blocks[layer]
            if not are_kept:
                # Before its branches are asked for: it shows whether it has others.
                block.refer_to(outputs)
            # The branches of a block have a step and a slope of their own.
            block = measured(block, function)
            if not are_kept:
                block.refer_to(outputs)
            for group, output in zip(groups, outputs, strict=True):
                if group in cache.kept:
                    stored, path = cache.kept[group]
                    matrices: Sequence[Tensor] = [
                        stored[i] for i in range(len(group.connections))
                    ]
                else:
                    inputs = [c.input_position for c in group.connections]
                    matrices, path = block.jacobians(inputs, output, chunk_size)
                    cache.keep(group, matrices, path, trace.blocks[layer].call.module)
                for connection, J in zip(group.connections, matrices, strict=True):
                    yield Jacobian(connection, J, path)
                # Not kept while the next are computed.
                del matrices, J


def jacobians_together_of(
    traces: Sequence[Trace],
    connections: Sequence[Connection],
    n_together: int,
    *,
    chunk_size: int | None = None,
    function: Function = "branches",
) -> Iterator[Jacobian]:
    """Yield the Jacobian of each connection of every prompt, prompts in turns, computed
    for `n_together` connections of all prompts at once.

    Those that cannot be computed together are computed as by `jacobians_of`.

    Args:
        traces: prompts of one length, of one model.
        connections: each from a token to itself, the same for all.
        n_together: how many connections are computed together.
        chunk_size, function: as in `block_jacobian`.
    """
    for start in range(0, len(connections), n_together):
        neighbours = connections[start : start + n_together]
        blocks = [[trace.blocks[c.layer] for trace in traces] for c in neighbours]
        jacobians = _together_in_memory(blocks, neighbours[0].output_position)
        for connection, of_prompts in zip(neighbours, jacobians, strict=True):
            for trace, J in zip(traces, of_prompts, strict=True):
                if J is None:
                    yield from jacobians_of(
                        trace, [connection], chunk_size=chunk_size, function=function
                    )
                else:
                    yield Jacobian(connection, J, TOGETHER)


def _together_in_memory(
    blocks: Sequence[Sequence[BlockFunction]], t: int
) -> list[list[Tensor | None]]:
    """Return `jacobians_together` of blocks; of half of them at a time where memory runs
    out, and of a single one none.
    """
    try:
        return jacobians_together(blocks, t)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Here nothing holds the tensors that filled the memory.
    if len(blocks) == 1:
        return [[None] * len(row) for row in blocks]
    half = len(blocks) // 2
    return [
        *_together_in_memory(blocks[:half], t),
        *_together_in_memory(blocks[half:], t),
    ]


def measured(block: BlockFunction, function: AnyFunction) -> BlockFunction:
    """Return the function of a block whose Jacobians are measured."""
    if function == "branches":
        return block.branches()
    if function == "frozen":
        return FrozenFunction.from_block(block.branches())
    return block
