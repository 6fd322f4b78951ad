"""Reverse mode through a function, with as many seeds at a time as fit into memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tl_coupling.blocks import is_out_of_memory, map_tensors
from tl_coupling.interrupts import hear_interrupts

PullBack = Callable[[Any], tuple[Tensor, ...]]

# Entries of the widest activation for one chunk of seeds (float32: 64 MiB); it sets the
# default chunk size.
_CHUNK_BUDGET = 2**24


def vjp(
    function: Callable[..., Any], *inputs: Tensor, has_aux: bool = False
) -> tuple[Any, ...]:
    """`torch.func.vjp`, or plain autograd where a custom autograd Function rules out
    torch.func (BLOOM's GELU).
    """
    try:
        return torch.func.vjp(function, *inputs, has_aux=has_aux)
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y, *more = function(*leaves) if has_aux else (function(*leaves),)

    def pull_back(u: Any) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(
            y, leaves, u, retain_graph=True, allow_unused=True
        )
        return tuple(
            torch.zeros_like(x) if g is None else g
            for x, g in zip(leaves, gradients, strict=True)
        )

    values, *auxiliary = map_tensors([y, *more], Tensor.detach)
    return values, pull_back, *auxiliary


def over_seeds(
    pull: Callable[[slice, Tensor], None], y: Tensor, chunk_size: int
) -> None:
    """`pull(rows, seeds)` for the rows of the identity, `chunk_size` at a time; half as
    many when memory runs out.
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
    """How many rows of J are computed at a time, if `width * d_model` is the widest
    activation for one of them.
    """
    return max(1, _CHUNK_BUDGET // (width * d_model))


def reverse_mode(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    of_each_input: Callable[..., Iterable[Tensor]],
    width: int,
    chunk_size: int | None = None,
    seeds: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Value, `[d_out]`, and Jacobians, each `[d_seeds d]`, of a function.

    `of_each_input` turns the gradients of its inputs, for a chunk of seeds, into the
    rows of each Jacobian. The widest activation has `width * d_out` entries for each
    seed. The seeds are rows of the identity by default.
    """
    y, pull_back = vjp(function, *inputs)
    of_rows = y if seeds is None else seeds[:, 0]
    J: list[Tensor] = []

    def pull(rows: slice, eye: Tensor) -> None:
        for i, found in enumerate(
            of_each_input(*for_seeds(pull_back, eye if seeds is None else seeds[rows]))
        ):
            if i == len(J):
                J.append(found.new_empty(len(of_rows), found.shape[1]))
            J[i][rows] = found

    over_seeds(pull, of_rows, chunk_size or chunk_that_fits(width, len(y)))
    return y, J


def for_seeds(pull_back: PullBack, seeds: Any) -> tuple[Tensor, ...]:
    """`pull_back` of every seed (rows of a tensor, or of a tuple of them), stacked; a
    loop where vmap fails.
    """
    try:
        return torch.func.vmap(pull_back)(seeds)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        each = seeds if isinstance(seeds, Tensor) else zip(*seeds, strict=True)
        return tuple(
            map(torch.stack, zip(*(pull_back(seed) for seed in each), strict=True))
        )
