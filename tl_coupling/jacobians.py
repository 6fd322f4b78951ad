"""Jacobians of block functions with torch.func, and products with them that never build the matrix."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import BlockError, BlockFunction, Path, Trace
from tl_coupling.blocks.evaluation import is_out_of_memory, vjp
from tl_coupling.blocks.functions import Evaluation, RowFunction
from tl_coupling.border import Count, checked
from tl_coupling.progress import Progress, with_progress

__all__ = ["block_jacobian", "block_jacobians", "block_jvp", "block_vjp"]

# Entries in a batch of Jacobians (float32: 256 MiB), and the largest number of Jacobians that share work.
BATCH_BUDGET = 2**26
_MOST_SHARING = 32


# Of a block that normalises the stream: block(X) − X, or what its residual branches add before the norms.
Function = Literal["block", "branches"]


class Connection(NamedTuple):
    """Names one `J^l_{t1 t2}`: a block, from one token to another; `position` is the token that labels a result."""

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
    function: Function = "block",
) -> Float[Tensor, "d_model d_model"]:
    r"""Jacobian of what one block adds to the residual stream, without the skip connection.

    .. math:: J^l_{t_1 t_2} = \frac{\partial f^l(X)_{t_2}}{\partial x_{t_1}}

    Rows index outputs, columns inputs; an entry is a dimensionless gain. Aubry et al. 2025, eq. 8. In a causal model
    `J_{t1 t2}` is exactly zero for `t1 > t2`. Layers and positions count from 0, negative ones from the end.

    Args:
        trace: a traced prompt.
        layer: the block.
        position: `t1` and `t2`, unless given by themselves. The last token by default, as in the paper.
        input_position: `t1`, the token that is moved.
        output_position: `t2`, the token that is read.
        chunk_size: rows of J to compute at a time. By default as many as keep the widest activation below about 64 MiB.
        function: of a block that normalises the stream itself (post-norm: BERT), "block" is `f(X) = block(X) − X`,
            whose J holds `−I`: `I + J` is the block's derivative. "branches" is what its residual branches add before
            their norms, which `depth_coupling` and all other comparisons take. Of any other block both are the same.

    Raises ValueError for a layer or position out of range, `chunk_size < 1`, or "branches" of a block that normalises
    the stream by something else than a module that is called on it.

    Cost: `d_model` backward passes of one block on one token, or on the whole prompt where the block does not allow
    token-local evaluation (decided by a comparison with the full sequence).

    Example:
        >>> tlc.block_jacobian(trace, layer=1).shape
        torch.Size([32, 32])
        >>> tlc.block_jacobian(trace, layer=1, input_position=5, output_position=2).any()
        tensor(False)
    """
    block, t1, t2 = _connection(trace, layer, position, input_position, output_position)
    return jacobian_and_path(_measured(block, function), t1, t2, chunk_size)[0]


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
    """Jacobians `J^l_{tt}` of several layers at one token, stacked; see `block_jacobian`.

    Args:
        trace: a traced prompt.
        layers: which layers, in this order; all by default.
        position, chunk_size, function: as in `block_jacobian`, with the same errors.
        progress: wraps the loop over layers, such as `tqdm.tqdm`; by default a bar in a terminal or notebook, `False`
            for none.

    Raises ValueError for no layers.

    Cost: as `block_jacobian` for each layer; memory for all of them, `n_chosen d_model²` numbers.

    Example:
        >>> tlc.block_jacobians(trace, layers=[1, 0]).shape
        torch.Size([2, 32, 32])
    """
    chosen = range(trace.n_layers) if layers is None else layers
    if not len(chosen):
        raise ValueError("`layers` is empty: wanted at least one layer")
    J = trace.blocks[0].X.new_empty(len(chosen), trace.d_model, trace.d_model)
    t = trace.position_index(position)
    connections = [Connection(trace.layer_index(layer), t, t, t) for layer in chosen]
    computed = jacobians_of(trace, connections, chunk_size, progress, {}, function=function)
    for row, J_1 in zip(J, computed, strict=True):
        row[:] = J_1
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
    """Vector–Jacobian product `(J^l_{t1 t2})ᵀ v` by one backward pass, without forming J.

    What moving token t1 along each axis does to the output at t2 in the direction v. Arguments and errors as in
    `block_jacobian`; v is `vector`, which must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> torch.allclose(tlc.block_vjp(trace, 1, v), tlc.block_jacobian(trace, 1).mT @ v, atol=1e-4)
        True
    """
    block, _, v, _, pull_back = _differentiated(trace, layer, vector, position, input_position, output_position)
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

    What the output at t2 does when token t1 moves in the direction v. By forward mode, or by differentiating the
    backward pass where a block does not support it. Arguments and errors as in `block_jacobian`; v is `vector`, which
    must be finite.

    Example:
        >>> v = torch.ones(trace.d_model)
        >>> torch.allclose(tlc.block_jvp(trace, 1, v), tlc.block_jacobian(trace, 1) @ v, atol=1e-4)
        True
    """
    block, x, v, function, _ = _differentiated(trace, layer, vector, position, input_position, output_position)
    with block.evaluation():
        try:
            return torch.func.jvp(function, (x,), (v,))[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, x, v)[1]


def jacobians_of(
    trace: Trace,
    wanted: Sequence[Connection],
    chunk_size: int | None,
    progress: Progress | None,
    paths: dict[str, str],
    at_once: int = _MOST_SHARING,
    function: Function = "branches",
) -> Iterator[Float[Tensor, "d_model d_model"]]:
    """`J` of each connection, in order, and in `paths` the way in which it was evaluated.

    Of a block that normalises the stream, J of its residual branches: block(X) − X cannot be compared with others.
    Neighbours with a layer or an output in common share work, up to `at_once`. Computed when they are asked for.
    """

    most = max(1, min(at_once, _MOST_SHARING, BATCH_BUDGET // trace.d_model**2))

    def in_order() -> Iterator[Tensor]:
        for layer, same_layer in groupby(wanted, lambda one: one.layer):
            block = _measured(trace.blocks[layer], function)
            while sharing := list(islice(same_layer, most)):
                if len(sharing) > 1:
                    block.refer_to([one.output_position for one in sharing])
                for t2, same_output in groupby(sharing, lambda one: one.output_position):
                    some = list(same_output)
                    J, path = jacobians_of_output(block, [one.input_position for one in some], t2, chunk_size)
                    paths.update(dict.fromkeys(map(str, some), path))
                    yield from J
                    del J  # Not kept while the next is computed.

    computed = in_order()
    for _ in with_progress(range(len(wanted)), progress, "Jacobians"):
        yield next(computed)


def jacobian_and_path(
    block: BlockFunction, input_position: int, output_position: int, chunk_size: Count | None = None
) -> tuple[Float[Tensor, "d_model d_model"], Path]:
    """One Jacobian, by the cheapest way that agrees with the full sequence; and the name of that way."""
    J, path = jacobians_of_output(block, [input_position], output_position, chunk_size)
    return J[0], path


def jacobians_of_output(
    block: BlockFunction, input_positions: Sequence[int], output_position: int, chunk_size: Count | None = None
) -> tuple[Sequence[Float[Tensor, "d_model d_model"]], Path]:
    """`J_{t1 t2}` for several t1 ≤ t2, or any one t1, at little more than the cost of one; and the name of the way."""

    def compute(evaluate: Evaluation) -> tuple[Any, ...]:
        y, J = evaluate(chunk_size)
        return y, [expected.u @ one for one in J], J

    # Once for all: entering it looks through all modules.
    with block.evaluation() if block.recorded is None else nullcontext():
        expected = block.reference(output_position)
        # In a causal model no later row moves an earlier one: these products with J are exact zeros.
        if min(input_positions) > output_position and not bool(expected.rows[list(input_positions)].any()):
            return [expected.u.new_zeros(len(expected.u), len(expected.u)) for _ in input_positions], "full_sequence"
        ways = block.ways(input_positions, output_position)
        return _cheapest(block, ways, input_positions, output_position, compute)


def _cheapest(
    block: BlockFunction,
    ways: Iterable[tuple[Path, Callable[..., Any]]],
    t1: Sequence[int],
    t2: int,
    compute: Callable[[Callable[..., Any]], tuple[Any, ...]],
) -> tuple[Any, Path]:
    """The result of the first way that agrees with the full sequence, and its name.

    `compute` gives f(X)[t2], the products `uᵀ J_{t1 t2}` with the reference's u, and the result. A way that the block
    does not allow (`BlockError`) is skipped; so is one that fails otherwise, with a remark, because a foreign block may
    raise anything when it is called with our cache.
    """
    with block.evaluation():
        for path, way in ways:
            try:
                y, products, result = compute(way)
            except BlockError:
                continue
            except Exception as error:
                if path == "full_sequence" or is_out_of_memory(error):
                    raise
                kind, said = type(error).__name__, " ".join(str(error).split())[:200]
                text = f"{path} failed ({kind}: {said}), so a more expensive way was used"
                block.remarks.add(f"{path}: {kind}", f"layer {block.layer}: {text}")
                continue
            if block.agrees(y, products, t1, t2):
                return result, path
    raise block.changed()


def _differentiated(trace: Trace, layer: int, vector: Tensor, *positions: Any) -> tuple[Any, ...]:
    """The block, its input row, the vector in its dtype; the token-local or else full function, and its pull-back."""
    block, t1, t2 = _connection(trace, layer, *positions)
    if vector.shape != block.X.shape[1:]:
        raise ValueError(f"`vector` must have shape {list(block.X.shape[1:])}, got {list(vector.shape)}")
    v = vector.to(block.X)
    if not bool(v.isfinite().all()):
        raise ValueError(f"`vector` must be finite in {v.dtype}, got NaN or infinite entries")
    u = block.reference(t2).u

    def compute(make: Callable[[], RowFunction]) -> tuple[Any, ...]:
        y, pull_back = vjp(function := make(), block.X[t1])
        return y, [pull_back(u)[0]], (function, pull_back)

    ways: list[tuple[Path, Callable[[], RowFunction]]] = [("token_local", partial(block.token_local, t1, t2))]
    ways.append(("full_sequence", partial(block.full_sequence, t1, t2)))
    (function, pull_back), _ = _cheapest(block, ways, [t1], t2, compute)
    return block, block.X[t1], v, function, pull_back


def _measured(block: BlockFunction, function: Function) -> BlockFunction:
    return block.branches() if function == "branches" else block


def _connection(
    trace: Trace, layer: int, position: int, input_position: int | None, output_position: int | None
) -> tuple[BlockFunction, int, int]:
    t1 = trace.position_index(position if input_position is None else input_position, "input_position")
    t2 = trace.position_index(position if output_position is None else output_position, "output_position")
    return trace.blocks[trace.layer_index(layer)], t1, t2
