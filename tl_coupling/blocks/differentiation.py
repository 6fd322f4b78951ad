"""Reverse mode through anything a block is made of, in chunks that fit into memory."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks.evaluation import hear_interrupts

PullBack = Callable[[Any], tuple[Tensor, ...]]

# torch's messages on the CPU, where it raises a plain RuntimeError; CUDA and MPS have a class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, PullBack]:
    """`torch.func.vjp`, or plain autograd where a custom autograd Function rules out torch.func (BLOOM's GELU)."""
    return vjp_and_more(lambda *x: (function(*x), ()), *inputs)[:2]


def vjp_and_more(function: Callable[..., tuple[Any, Any]], *inputs: Tensor) -> tuple[Any, PullBack, Any]:
    """`vjp` of the first thing that the function returns, and the second, a tuple of tensors, as it is."""
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
    """Whether the error means that memory ran out."""
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in said for text in _OUT_OF_MEMORY)


def over_seeds(pull: Callable[[slice, Tensor], None], y: Tensor, chunk_size: int) -> None:
    """`pull(rows, seeds)` for the rows of the identity, `chunk_size` at a time; half as many when memory runs out.

    Raises:
        MemoryError, RuntimeError: torch's own, where not even one row fits.
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


def for_seeds(pull_back: PullBack, seeds: Any) -> tuple[Tensor, ...]:
    """`pull_back` of every seed (rows of a tensor, or of a tuple of them), stacked; a loop where vmap fails."""
    try:
        return torch.func.vmap(pull_back)(seeds)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        each = seeds if isinstance(seeds, Tensor) else zip(*seeds, strict=True)
        return tuple(torch.stack(parts) for parts in zip(*(pull_back(seed) for seed in each), strict=True))


def times_constant(left: Float[Tensor, "... 1 n"], right: Float[Tensor, "... n m"]) -> Tensor:
    """`left @ right` for a constant `right`, which the backward pass does not copy for every seed.

    PyTorch's own rule for a batched matmul expands the factor without a batch; here the seeds become rows of `left`.
    Seeds that are rows of the identity select rows of `right` without a product.
    """
    return _TimesConstant.apply(left, right)


class _TimesConstant(torch.autograd.Function):
    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (right,) = ctx.saved_tensors
        return _TimesConstant.apply(grad, right.mT), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], left: Tensor, right: Tensor) -> tuple[Tensor, int]:
        rows = left.movedim(in_dims[0], -2).squeeze(-3)
        picked = _rows_of_identity(rows[0]) if right.ndim == 2 else None
        product = rows @ right if picked is None else right[None, picked]
        return product.unsqueeze(-3), -2


def _rows_of_identity(seeds: Tensor) -> slice | None:
    """Which consecutive rows of the identity these are, if they are."""
    start = int(seeds[0].argmax())
    diagonal = seeds.diagonal(start)
    if len(diagonal) == len(seeds) == int(seeds.count_nonzero()) and bool((diagonal == 1).all()):
        return slice(start, start + len(seeds))
    return None
