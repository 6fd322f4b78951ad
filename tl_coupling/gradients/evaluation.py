"""Reverse mode through a function, with as many seeds at a time as fit into memory."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import BlockError, is_out_of_memory, map_tensors
from tl_coupling.interrupts import hear_interrupts

_Output = TypeVar("_Output", bound=Tensor | tuple[Tensor, ...])
# From a vector in the space of a function's output, or a tuple of them, to the
# gradients of the inputs.
PullBack = Callable[[Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]

# Entries of the widest activation for one chunk of seeds (float32: 64 MiB); it sets the
# default chunk size.
_CHUNK_BUDGET = 2**24


def vjp(function: Callable[..., _Output], *inputs: Tensor) -> tuple[_Output, PullBack]:
    """Return a function's output and its pull-back, as `torch.func.vjp` does.

    Where a custom autograd Function rules out torch.func (BLOOM's GELU), plain autograd
    takes its place.
    """
    try:
        return torch.func.vjp(function, *inputs)  # type: ignore[return-value]
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = function(*leaves)

    def pull_back(u: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(
            output, leaves, u, retain_graph=True, allow_unused=True
        )
        return tuple(
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(leaves, gradients, strict=True)
        )

    return map_tensors(output, Tensor.detach), pull_back


def vjp_with_aux(
    function: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], *inputs: Tensor
) -> tuple[Tensor, PullBack, tuple[Tensor, ...]]:
    """Return a function's output, its pull-back, and what else it returns.

    Raises:
        BlockError: a custom autograd Function forbids torch.func.
    """
    try:
        result: Any = torch.func.vjp(function, *inputs, has_aux=True)
    except RuntimeError as error:
        if "setup_context" in str(error):
            raise BlockError("a custom autograd Function forbids torch.func") from None
        raise
    output, pull_back, aux = result
    return output, pull_back, aux


def over_seeds(
    pull: Callable[[slice, Tensor], None], y: Float[Tensor, " d"], chunk_size: int
) -> None:
    """Call `pull(rows, seeds)` for the rows of the identity, `chunk_size` at a time.

    When memory runs out, it is tried again with half as many. The seeds are like `y`.
    """
    start = 0
    while start < len(y):
        hear_interrupts()
        rows = slice(start, min(start + chunk_size, len(y)))
        seeds = y.new_zeros(rows.stop - start, len(y))
        seeds[:, rows].fill_diagonal_(1)
        try:
            pull(rows, seeds)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or chunk_size == 1:
                raise
            chunk_size = max(1, min(chunk_size, len(y)) // 2)
        else:
            start = rows.stop


def chunk_that_fits(width: int, d_model: int) -> int:
    """Return how many rows of J are computed at a time by default.

    `width * d_model` is the size of the widest activation for one of them.
    """
    return max(1, _CHUNK_BUDGET // (width * d_model))


def reverse_mode(
    function: Callable[..., Float[Tensor, " d_out"]],
    inputs: tuple[Tensor, ...],
    of_each_input: Callable[..., Iterable[Tensor]],
    width: int,
    chunk_size: int | None = None,
    seeds: Float[Tensor, "n_seeds d_out"] | None = None,
) -> tuple[Float[Tensor, " d_out"], list[Tensor]]:
    """Return a function's value, and Jacobians `[n_seeds d]`.

    Args:
        function: of the inputs.
        inputs: where it is differentiated.
        of_each_input: turns the gradients of the inputs, for a chunk of seeds, into the
            rows of each Jacobian.
        width: the widest activation has `width * d_out` entries for each seed.
        chunk_size: seeds at a time; by default as many as fit into memory.
        seeds: by default the rows of the identity.
    """
    y, pull_back = vjp(function, *inputs)
    of_rows = y if seeds is None else seeds[:, 0]
    jacobians: list[Tensor] = []

    def pull(rows: slice, identity: Tensor) -> None:
        chunk = identity if seeds is None else seeds[rows]
        gradients = for_seeds(pull_back, chunk)
        for i, rows_of_J in enumerate(of_each_input(*gradients)):
            if i == len(jacobians):
                # Its width is known when its first rows are.
                J = rows_of_J.new_empty(len(of_rows), rows_of_J.shape[1])
                jacobians.append(J)
            jacobians[i][rows] = rows_of_J

    over_seeds(pull, of_rows, chunk_size or chunk_that_fits(width, len(y)))
    return y, jacobians


def for_seeds(
    pull_back: PullBack, seeds: Tensor | tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients of every seed, stacked.

    The seeds are rows of a tensor, or of a tuple of them. Where vmap fails, they are
    pulled back one after the other.
    """
    try:
        return torch.func.vmap(pull_back)(seeds)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        rows = seeds if isinstance(seeds, Tensor) else zip(*seeds, strict=True)
        gradients = [pull_back(row) for row in rows]
        return tuple(map(torch.stack, zip(*gradients, strict=True)))
