"""Jacobians of block functions with torch.func, and products with them that never build
the matrix.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, islice
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks import BlockError
from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.gradients import BlockFunction, Path
from tl_coupling.gradients.function import Evaluation
from tl_coupling.jacobians.connections import Connection, Function, connected
from tl_coupling.progress import Progress, with_progress
from tl_coupling.traces import Trace

# Entries in a batch of Jacobians (float32: 256 MiB), and the largest number of
# Jacobians that share work.
BATCH_BUDGET = 2**26
_MOST_SHARING = 32


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
        chunk_size: rows of J to compute at a time. By default as many as keep the
            widest activation below about 64 MiB.
        function: of a block that normalises the stream itself (post-norm: BERT),
            "block" is `f(X) = block(X) − X`, whose J holds `−I`: `I + J` is the block's
            derivative. "branches" is what its residual branches add before their norms,
            which `depth_coupling` and all other comparisons take. Of any other block
            both are the same.

    Raises ValueError for a layer or position out of range, `chunk_size < 1`, or
    "branches" of a block that normalises the stream by something else than a module
    that is called on it.

    Cost: `d_model` backward passes of one block on one token, or on the whole prompt
    where the block does not allow token-local evaluation (decided by a comparison with
    the full sequence).

    Example:
        >>> tlc.block_jacobian(trace, layer=1).shape
        torch.Size([32, 32])
        >>> tlc.block_jacobian(trace, layer=1, input_position=5, output_position=2).any()
        tensor(False)
    """
    block, t1, t2 = connected(trace, layer, position, input_position, output_position)
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
    """Jacobians `J^l_{tt}` of several layers at one token, stacked; see
    `block_jacobian`.

    Args:
        trace: a traced prompt.
        layers: which layers, in this order; all by default.
        position, chunk_size, function: as in `block_jacobian`, with the same errors.
        progress: wraps the loop over layers, such as `tqdm.tqdm`; by default a bar in a
            terminal or notebook, `False` for none.

    Raises ValueError for no layers.

    Cost: as `block_jacobian` for each layer; memory for all of them, `n_chosen
    d_model²` numbers.

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
    computed = jacobians_of(
        trace, connections, chunk_size, progress, {}, function=function
    )
    for row, J_1 in zip(J, computed, strict=True):
        row[:] = J_1
    return J


def jacobians_of(
    trace: Trace,
    wanted: Sequence[Connection],
    chunk_size: int | None,
    progress: Progress | None,
    paths: dict[str, str],
    at_once: int = _MOST_SHARING,
    function: Function = "branches",
) -> Iterator[Float[Tensor, "d_model d_model"]]:
    """`J` of each connection, in order, and in `paths` the way in which it was
    evaluated.

    Of a block that normalises the stream, J of its residual branches: block(X) − X
    cannot be compared with others. Neighbours with a layer or an output in common share
    work, up to `at_once`. Computed when they are asked for.
    """

    most = max(1, min(at_once, _MOST_SHARING, BATCH_BUDGET // trace.d_model**2))

    def in_order() -> Iterator[Tensor]:
        for layer, same_layer in groupby(wanted, lambda one: one.layer):
            block = _measured(trace.blocks[layer], function)
            while sharing := list(islice(same_layer, most)):
                if len(sharing) > 1:
                    block.refer_to([one.output_position for one in sharing])
                for t2, same_output in groupby(
                    sharing, lambda one: one.output_position
                ):
                    some = list(same_output)
                    J, path = jacobians_of_output(
                        block, [one.input_position for one in some], t2, chunk_size
                    )
                    paths.update(dict.fromkeys(map(str, some), path))
                    yield from J
                    del J  # Not kept while the next is computed.

    computed = in_order()
    for _ in with_progress(range(len(wanted)), progress, "Jacobians"):
        yield next(computed)


def jacobian_and_path(
    block: BlockFunction,
    input_position: int,
    output_position: int,
    chunk_size: Count | None = None,
) -> tuple[Float[Tensor, "d_model d_model"], Path]:
    """One Jacobian, by the cheapest way that agrees with the full sequence; and the
    name of that way.
    """
    J, path = jacobians_of_output(block, [input_position], output_position, chunk_size)
    return J[0], path


def jacobians_of_output(
    block: BlockFunction,
    input_positions: Sequence[int],
    output_position: int,
    chunk_size: Count | None = None,
) -> tuple[Sequence[Float[Tensor, "d_model d_model"]], Path]:
    """`J_{t1 t2}` for several t1 ≤ t2, or any one t1, at little more than the cost of
    one; and the name of the way.
    """

    def compute(evaluate: Evaluation) -> tuple[Any, ...]:
        y, J = evaluate(chunk_size)
        return y, [expected.u @ one for one in J], J

    # Once for all: entering it looks through all modules.
    with block.evaluation() if block.recorded is None else nullcontext():
        expected = block.reference(output_position)
        # In a causal model no later row moves an earlier one: these products with J are
        # exact zeros.
        if min(input_positions) > output_position and not bool(
            expected.rows[list(input_positions)].any()
        ):
            return [
                expected.u.new_zeros(len(expected.u), len(expected.u))
                for _ in input_positions
            ], "full_sequence"
        ways = block.ways(input_positions, output_position)
        return cheapest(block, ways, input_positions, output_position, compute)


def cheapest(
    block: BlockFunction,
    ways: Iterable[tuple[Path, Callable[..., Any]]],
    t1: Sequence[int],
    t2: int,
    compute: Callable[[Callable[..., Any]], tuple[Any, ...]],
) -> tuple[Any, Path]:
    """The result of the first way that agrees with the full sequence, and its name.

    `compute` gives f(X)[t2], the products `uᵀ J_{t1 t2}` with the reference's u, and
    the result. A way that the block does not allow (`BlockError`) is skipped; so is one
    that fails otherwise, with a remark, because a foreign block may raise anything when
    it is called with our cache.
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
                text = (
                    f"{path} failed ({kind}: {said}), so a more expensive way was used"
                )
                block.remarks.add(f"{path}: {kind}", f"layer {block.layer}: {text}")
                continue
            if block.agrees(y, products, t1, t2):
                return result, path
    raise block.changed()


def _measured(block: BlockFunction, function: Function) -> BlockFunction:
    return block.branches() if function == "branches" else block
