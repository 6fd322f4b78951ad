"""Reverse mode through a function, with as many seeds at a time as fit into memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.arithmetic import is_out_of_memory, map_tensors
from tl_coupling.blocks.contexts import BlockError

Output = TypeVar("Output", bound=Tensor | tuple[Tensor, ...])

# Entries of the widest activation for one chunk of seeds (float32: 64 MiB); it sets the
# default chunk size.
_CHUNK_BUDGET = 2**24


class PullBack:
    """From a vector in the space of a function's output, or a tuple of them, to the
    gradients of its inputs.

    By torch.func. Where that fails, by plain autograd from then on: torch.func knows no
    numpy, no buffers changed in place, no saved-tensor hooks (gradient checkpointing)
    and no custom autograd Functions without `setup_context` (BLOOM's GELU).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        pull: Callable[..., tuple[Tensor, ...]],
        is_plain: bool = False,
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._pull = pull
        self._is_plain = is_plain

    def __call__(self, u: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs."""
        try:
            return self._pull(u)
        # A foreign block may raise anything within torch.func.
        except Exception as error:
            if self._is_plain or _is_final(error):
                raise
        self._is_plain = True
        self._pull = _plain_vjp(self._function, self._inputs)[1]
        return self._pull(u)

    def batched(self, seeds: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of every seed, stacked.

        The seeds are rows of a tensor, or of a tuple of them. Where vmap fails, they
        are pulled back one after the other.
        """
        try:
            return torch.func.vmap(self._pull)(seeds)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        rows: Iterable[Any] = (
            seeds if isinstance(seeds, Tensor) else zip(*seeds, strict=True)
        )
        gradients = [self(row) for row in rows]
        return tuple(map(torch.stack, zip(*gradients, strict=True)))


def vjp(function: Callable[..., Output], *inputs: Tensor) -> tuple[Output, PullBack]:
    """Return a function's output and its pull-back, as `torch.func.vjp` does."""
    try:
        output, pull = torch.func.vjp(function, *inputs)  # type: ignore[misc]
    except Exception as error:
        # A foreign block may raise anything.
        if _is_final(error):
            raise
        output, pull = _plain_vjp(function, inputs)
        return output, PullBack(function, inputs, pull, is_plain=True)
    return output, PullBack(function, inputs, pull)


def vjp_with_aux(
    function: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], *inputs: Tensor
) -> tuple[Tensor, PullBack, tuple[Tensor, ...]]:
    """Return a function's output, its pull-back, and what else it returns.

    Raises:
        BlockError: torch.func fails.
    """
    try:
        result: Any = torch.func.vjp(function, *inputs, has_aux=True)
    except Exception as error:
        if _is_final(error):
            raise
        raise BlockError("torch.func fails on the block") from None
    output, pull, aux = result
    return output, PullBack(lambda *x: function(*x)[0], inputs, pull), aux


def custom_functions(output: Tensor) -> list[str]:
    """Return the names of the functions with backward passes of their own by which a
    tensor was made.
    """
    names: set[str] = set()
    seen: set[Any] = set()
    unread = [output.grad_fn]
    while unread:
        node = unread.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.add(type(node).__name__.removesuffix("Backward"))
        unread += [following for following, _ in node.next_functions]
    return sorted(names)


def _is_final(error: Exception) -> bool:
    """Say whether an error would come again, whatever differentiates."""
    return isinstance(error, BlockError) or is_out_of_memory(error)


def _plain_vjp(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[Any, Callable[..., tuple[Tensor, ...]]]:
    """Return a function's output and its pull-back by plain autograd.

    What is needed for the gradients is copied: a block may change it in place.
    """
    saved = torch.autograd.graph.saved_tensors_hooks(_copied, _as_it_is)
    with torch.enable_grad(), saved:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = function(*leaves)

    def pull_back(u: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                output, leaves, u, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            # Checkpoints that re-enter autograd refuse `autograd.grad` by this name.
            if "use_reentrant" not in str(error):
                raise
            gradients = _accumulated_gradients(output, leaves, u)
        return tuple(
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(leaves, gradients, strict=True)
        )

    return map_tensors(output, Tensor.detach), pull_back


def _copied(saved: Tensor) -> Tensor:
    """Return a copy of what autograd keeps, unless it is a weight."""
    owner = saved if saved._base is None else saved._base
    return saved if isinstance(owner, nn.Parameter) else saved.detach().clone()


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _accumulated_gradients(
    output: Any, leaves: Sequence[Tensor], u: Tensor | tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves as `backward` leaves them there, which checkpoints
    that re-enter autograd demand.
    """
    torch.autograd.backward(output, u, retain_graph=True)
    gradients = tuple(x.grad for x in leaves)
    for x in leaves:
        x.grad = None
    return gradients


def pull_back_identity(
    pull: Callable[[slice, Tensor], None], y: Float[Tensor, " d"], chunk_size: int
) -> None:
    """Call `pull(rows, seeds)` for the rows of the identity, `chunk_size` at a time.

    When memory runs out, it is tried again with half as many. The seeds are like `y`.
    """
    start = 0
    while start < len(y):
        rows = slice(start, min(start + chunk_size, len(y)))
        seeds = y.new_zeros(rows.stop - start, len(y))
        seeds[:, rows].fill_diagonal_(1)
        try:
            pull(rows, seeds)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or chunk_size == 1:
                raise
            # Rows that are done stay; only the failed chunk is split.
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
    jacobian_rows: Callable[..., Iterable[Tensor]],
    width: int,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " d_out"], list[Tensor]]:
    """Return a function's value, and Jacobians `[d_out d]`.

    Args:
        function: of the inputs.
        inputs: where it is differentiated.
        jacobian_rows: turns the gradients of the inputs, for a chunk of seeds, into the
            rows of each Jacobian.
        width: the widest activation has `width * d_out` entries for each seed.
        chunk_size: seeds at a time; by default as many as fit into memory.
    """
    y, pull_back = vjp(function, *inputs)
    jacobians: list[Tensor] = []

    def pull(rows: slice, identity: Tensor) -> None:
        gradients = pull_back.batched(identity)
        for i, rows_of_J in enumerate(jacobian_rows(*gradients)):
            if i == len(jacobians):
                # Its width is known when its first rows are.
                J = rows_of_J.new_empty(len(y), rows_of_J.shape[1])
                jacobians.append(J)
            jacobians[i][rows] = rows_of_J

    pull_back_identity(pull, y, chunk_size or chunk_that_fits(width, len(y)))
    return y, jacobians
