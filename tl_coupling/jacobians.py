"""Jacobians of block functions with torch.func, and products with them that never form one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import BlockError, BlockFunction, Path, Trace
from tl_coupling.blocks.differentiation import PullBack, for_seeds, is_out_of_memory, over_seeds, vjp
from tl_coupling.blocks.functions import RowFunction
from tl_coupling.border import Count, checked
from tl_coupling.progress import Progress, with_progress

# A way, the context it needs, and what computes f(X)[t2] and what is wanted.
Attempt = tuple[Path, AbstractContextManager[None], Callable[[], tuple[Tensor, Any]]]

# Entries in the widest activation that one chunk of seeds may carry (float32: 64 MiB); it sets the default chunk size.
_CHUNK_BUDGET = 2**24
# Entries in a batch of Jacobians (float32: 256 MiB), and how many at most share what they have in common.
BATCH_BUDGET = 2**26
_MOST_SHARING = 32


class Connection(NamedTuple):
    """A block, from one token to one token: `J^l_{t1 t2}` by name; `position` is the token that labels a result."""

    layer: int
    input_position: int
    output_position: int
    position: int

    def __str__(self) -> str:
        if self.input_position == self.output_position:
            return f"layer {self.layer}, token {self.position}"
        return f"layer {self.layer}, tokens {self.input_position}→{self.output_position}"


@checked
def block_jacobian(
    trace: Trace,
    layer: int,
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
    chunk_size: Count | None = None,
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


@checked
def block_jacobians(
    trace: Trace,
    layers: Sequence[int] | None = None,
    *,
    position: int = -1,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> Float[Tensor, "n_chosen d_model d_model"]:
    """`J^l_{tt}` of several layers (`None`: all), stacked; see `block_jacobian`. `progress` wraps the loop."""
    chosen = range(trace.n_layers) if layers is None else layers
    if not len(chosen):
        raise ValueError("`layers` is empty: wanted at least one layer")
    J = trace.residual.new_empty(len(chosen), trace.d_model, trace.d_model)
    for row, layer in enumerate(with_progress(chosen, progress, "Jacobians")):
        J[row] = block_jacobian(trace, layer, position=position, chunk_size=chunk_size)
    return J


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
    """`(J^l_{t1 t2})ᵀ v`, one backward pass, J never formed. Arguments and errors as in `block_jacobian`."""
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    v = _vector(vector, block)
    _, pull_back = _differentiated(block, t1, t2)
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
    """`J^l_{t1 t2} v`, J never formed. Arguments and errors as in `block_jacobian`.

    Forward mode; where a block has no forward derivative, its backward pass is differentiated once more.
    """
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    x, v = block.X[t1], _vector(vector, block)
    function, _ = _differentiated(block, t1, t2)
    with block.evaluation():
        try:
            return torch.func.jvp(function, (x,), (v,))[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, x, v)[1]


def jacobians_of(
    trace: Trace,
    connections: Sequence[Connection],
    chunk_size: int | None,
    progress: Progress | None,
    paths: dict[str, str],
) -> Iterator[Float[Tensor, "d_model d_model"]]:
    """`J` of each connection, in order; neighbours with a layer or an output in common share that work.

    Which way each was evaluated is noted in `paths`.
    """
    computed = _in_order(trace, connections, chunk_size, paths)
    for _ in with_progress(range(len(connections)), progress, "Jacobians"):
        yield next(computed)


def _in_order(
    trace: Trace, connections: Sequence[Connection], chunk_size: int | None, paths: dict[str, str]
) -> Iterator[Tensor]:
    at_once = max(1, min(_MOST_SHARING, BATCH_BUDGET // trace.d_model**2))
    for layer, same_layer in groupby(connections, lambda connection: connection.layer):
        block, rest = trace.blocks[layer], list(same_layer)
        while rest:
            sharing, rest = rest[:at_once], rest[at_once:]
            block.gate.refer_to([connection.output_position for connection in sharing])
            for t2, same_output in groupby(sharing, lambda connection: connection.output_position):
                some = list(same_output)
                J, path = jacobians_of_output(block, [connection.input_position for connection in some], t2, chunk_size)
                paths |= dict.fromkeys(map(str, some), path)
                yield from J


def jacobian_and_path(
    block: BlockFunction, input_position: int, output_position: int, chunk_size: Count | None = None
) -> tuple[Float[Tensor, "d_model d_model"], Path]:
    """One Jacobian, by the cheapest of the block's ways that agrees with the full sequence; and which way that was."""
    x = block.X[input_position]
    u = block.gate.reference(output_position).u
    if input_position > output_position and not block.gate.reaches_back(input_position, output_position):
        return x.new_zeros(len(x), len(x)), "full_sequence"

    def attempts() -> Iterator[Attempt]:
        for path, make, context in block.ways(input_position, output_position):
            n_rows = block.X.shape[0] if path == "full_sequence" else 1
            chunk = chunk_size or max(1, _CHUNK_BUDGET // (4 * len(x) * n_rows))
            yield path, context, partial(_all_rows, make, x, chunk)

    def agrees(y: Tensor, J: Tensor) -> bool:
        return block.gate.agrees(y, u @ J, input_position, output_position)

    return _cheapest(block, attempts(), agrees)


def jacobians_of_output(
    block: BlockFunction, input_positions: Sequence[int], output_position: int, chunk_size: Count | None = None
) -> tuple[Float[Tensor, "n_inputs d_model d_model"], Path]:
    """`J_{t1 t2}` for several t1 ≤ t2 and one t2, for little more than the cost of one; and which way that was."""
    if len(input_positions) == 1:
        J, path = jacobian_and_path(block, input_positions[0], output_position, chunk_size)
        return J[None], path
    n_pos, d_model = block.X.shape
    u = block.gate.reference(output_position).u
    chunk = chunk_size or max(1, _CHUNK_BUDGET // (max(4, 2 * n_pos) * d_model))

    def attempts() -> Iterator[Attempt]:
        for path, context in block.query_ways(output_position):
            fill = _pull_back_everything if path == "full_sequence" else _pull_back_once
            yield path, context, partial(fill, block, input_positions, output_position, chunk)

    def agrees(y: Tensor, J: Tensor) -> bool:
        pairs = zip(J, input_positions, strict=True)
        return all(block.gate.agrees(y, u @ J_1, t1, output_position) for J_1, t1 in pairs)

    return _cheapest(block, attempts(), agrees)


def _cheapest(
    block: BlockFunction, attempts: Iterator[Attempt], agrees: Callable[[Tensor, Any], bool]
) -> tuple[Any, Path]:
    """The result of the first attempt that agrees with the full sequence, and its way.

    A way that the block does not allow (`BlockError`) is passed over; so is one that fails in another way, with a
    remark, because a foreign block may raise anything when it is called with our cache.

    Raises:
        StepError: the full sequence does not agree with itself.
        MemoryError, RuntimeError: memory ran out. A dearer way would need more of it.
    """
    with block.evaluation():
        for path, context, compute in attempts:
            try:
                with context:
                    y, result = compute()
            except BlockError:
                continue
            except Exception as error:
                if path == "full_sequence" or is_out_of_memory(error):
                    raise
                block.remarks.add(
                    f"{path}: {type(error).__name__}",
                    f"layer {block.layer}: the way {path} failed ({type(error).__name__}: "
                    f"{' '.join(str(error).split())[:200]}), a dearer one was taken",
                )
                continue
            if agrees(y, result):
                return result, path
    raise block.gate.changed()


def _pull_back_once(
    block: BlockFunction, input_positions: Sequence[int], output_position: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """f(X)[t2], and `[n_inputs d d]` from one output row and every input row's keys and values."""
    function, inputs = block.query_local(output_position)
    y, pull_back = vjp(function, *inputs)
    feeding = {t: vjp(block.keys_and_values(t), block.X[t])[1] for t in input_positions if t != output_position}
    dim = block.call.position_dim
    # The seeds stand in front: a position axis counted from the front moves up by one.
    axis = dim if dim < 0 else dim + 1
    J = y.new_empty(len(input_positions), len(y), len(y))

    def pull(rows: slice, seeds: Tensor) -> None:
        own, *context = for_seeds(pull_back, seeds)
        for J_1, t in zip(J, input_positions, strict=True):
            if t == output_position:
                J_1[rows] = own
            else:
                (J_1[rows],) = for_seeds(feeding[t], tuple(g.narrow(axis, t, 1) for g in context))

    over_seeds(pull, y, chunk_size)
    return y, J


def _pull_back_everything(
    block: BlockFunction, input_positions: Sequence[int], output_position: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """As `_pull_back_once`, through the block on all rows."""
    y, pull_back = vjp(lambda X: block.of_all_rows(X)[output_position], block.X)
    J = y.new_empty(len(input_positions), len(y), len(y))

    def pull(rows: slice, seeds: Tensor) -> None:
        (gradient,) = for_seeds(pull_back, seeds)
        J[:, rows] = gradient[:, list(input_positions)].transpose(0, 1)

    over_seeds(pull, y, chunk_size)
    return y, J


def _all_rows(make: Callable[[], RowFunction], x: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """`(f(x), ∂f/∂x)`, reverse mode, `chunk_size` rows at a time."""
    y, pull_back = vjp(make(), x)
    J = y.new_empty(len(y), len(x))

    def pull(rows: slice, seeds: Tensor) -> None:
        (J[rows],) = for_seeds(pull_back, seeds)

    over_seeds(pull, y, chunk_size)
    return y, J


def _differentiated(block: BlockFunction, input_position: int, output_position: int) -> tuple[RowFunction, PullBack]:
    """The token-local row function and its pull-back if they pass the gate, else the full sequence's."""
    expected = block.gate.reference(output_position)
    x, pair = block.X[input_position], (input_position, output_position)

    def attempts() -> Iterator[Attempt]:
        for path, make, context in block.ways(*pair):
            if path in ("token_local", "full_sequence"):
                yield path, context, partial(_with_pull_back, make, x)

    def agrees(y: Tensor, made: tuple[RowFunction, PullBack]) -> bool:
        return block.gate.agrees(y, made[1](expected.u)[0], *pair)

    return _cheapest(block, attempts(), agrees)[0]


def _with_pull_back(make: Callable[[], RowFunction], x: Tensor) -> tuple[Tensor, tuple[RowFunction, PullBack]]:
    function = make()
    y, pull_back = vjp(function, x)
    return y, (function, pull_back)


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
