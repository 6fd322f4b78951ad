"""Reverse mode over whatever a block is made of, in pieces that fit into memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tl_coupling.blocks.evaluation import hear_interrupts

PullBack = Callable[[Any], tuple[Tensor, ...]]

# What torch says on the CPU, where it raises a plain RuntimeError; on CUDA and MPS it has a class of its own.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, PullBack]:
    """`torch.func.vjp`, by plain autograd where a custom autograd Function keeps torch.func out (BLOOM's GELU)."""
    y, pull_back, _ = vjp_and_more(lambda *x: (function(*x), ()), *inputs)
    return y, pull_back


def vjp_and_more(function: Callable[..., tuple[Any, Any]], *inputs: Tensor) -> tuple[Any, PullBack, Any]:
    """`vjp` of the first thing that the function returns; and the second, tensors met on the way."""
    try:
        return torch.func.vjp(function, *inputs, has_aux=True)  # type: ignore[return-value]
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y, more = function(*leaves)

    def by_autograd(u: Any) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(y, leaves, u, retain_graph=True, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))

    values = y.detach() if isinstance(y, Tensor) else tuple(part.detach() for part in y)
    return values, by_autograd, tuple(part.detach() for part in more)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, which no other way to compute the same would mend."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def over_seeds(pull: Callable[[slice, Tensor], None], y: Tensor, chunk_size: int) -> None:
    """`pull(rows, seeds)` for the rows of the identity, `chunk_size` at a time, or half where memory runs out.

    Raises:
        MemoryError, RuntimeError: as torch does, where not even one row fits.
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
            continue
        start = rows.stop


def for_seeds(pull_back: PullBack, seeds: Any) -> tuple[Tensor, ...]:
    """`pull_back` of every seed (a tensor, or a tuple of them), stacked; a loop where vmap cannot."""
    try:
        return torch.func.vmap(pull_back)(seeds)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        each = seeds if isinstance(seeds, Tensor) else zip(*seeds, strict=True)
        return tuple(torch.stack(parts) for parts in zip(*(pull_back(seed) for seed in each), strict=True))
