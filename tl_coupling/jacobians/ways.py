"""The cheapest way to a Jacobian that agrees with the full sequence."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count
from tl_coupling.blocks import BlockError, is_out_of_memory
from tl_coupling.gradients import BlockFunction, Evaluation, Path


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
