"""The cheapest way to a Jacobian that agrees with the full sequence."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count
from tl_coupling.blocks import BlockError, is_out_of_memory
from tl_coupling.gradients import BlockFunction, Evaluation, Path

Way = TypeVar("Way")
Result = TypeVar("Result")
Jacobians = Sequence[Float[Tensor, "d_model d_model"]]
# What a way gave: f(X)[t2], the products with the reference's u, and the result.
Tried = tuple[Tensor, Sequence[Tensor], Result]


def jacobian_and_path(
    block: BlockFunction,
    input_position: int,
    output_position: int,
    chunk_size: Count | None = None,
) -> tuple[Float[Tensor, "d_model d_model"], Path]:
    """Return one Jacobian, and the way in which it was evaluated.

    It is the cheapest way that agrees with the full sequence.
    """
    J, path = jacobians_of_output(block, [input_position], output_position, chunk_size)
    return J[0], path


def jacobians_of_output(
    block: BlockFunction,
    input_positions: Sequence[int],
    output_position: int,
    chunk_size: Count | None = None,
) -> tuple[Jacobians, Path]:
    """Return `J_{t1 t2}` for several t1 ≤ t2, or any one t1, and the way to them.

    They cost little more than one.
    """

    def compute(evaluate: Evaluation) -> Tried[Jacobians]:
        y, jacobians = evaluate(chunk_size)
        return y, [expected.u @ J for J in jacobians], jacobians

    # Once for all: entering it looks through all modules.
    with block.evaluation() if block.recorded is None else nullcontext():
        expected = block.reference(output_position)
        if min(input_positions) > output_position:
            moves_earlier_rows = expected.rows[list(input_positions)].any()
            # In a causal model no later row moves an earlier one: these products with J
            # are exact zeros.
            if not bool(moves_earlier_rows):
                d_model = len(expected.u)
                zeros = [
                    expected.u.new_zeros(d_model, d_model) for _ in input_positions
                ]
                return zeros, "full_sequence"
        ways = block.ways(input_positions, output_position)
        return cheapest(block, ways, input_positions, output_position, compute)


def cheapest(
    block: BlockFunction,
    ways: Iterable[tuple[Path, Way]],
    t1: Sequence[int],
    t2: int,
    compute: Callable[[Way], Tried[Result]],
    refusal: Callable[[], Exception] | None = None,
) -> tuple[Result, Path]:
    """Return the result of the first way that agrees with the full sequence.

    A way that the block does not allow (`BlockError`) is skipped; so is one that fails
    otherwise, with a remark, because a foreign block may raise anything when it is
    called with our cache.

    Args:
        block: the block.
        ways: the ways by name, cheapest first, the full sequence last.
        t1: the input positions.
        t2: the output position.
        compute: gives f(X)[t2], the products `uᵀ J_{t1 t2}` with the reference's u, and
            the result.
        refusal: makes the error where no way agrees; by default it says that the block
            changed.

    Returns:
        the result, and the name of the way.
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
                _remark_on_failure(block, path, error)
                continue
            if block.agrees(y, products, t1, t2):
                return result, path
    raise block.changed() if refusal is None else refusal()


def _remark_on_failure(block: BlockFunction, path: Path, error: Exception) -> None:
    kind = type(error).__name__
    message = " ".join(str(error).split())[:200]
    text = f"{path} failed ({kind}: {message}), so a more expensive way was used"
    block.remarks.add(f"{path}: {kind}", f"layer {block.layer}: {text}")
