"""Gradients of the stream, pulled back through a block at neighbouring tokens together.

A gradient `[n_rows d_model]` at what leaves a block becomes one at what enters it:
`g_s + Σ_t J_{st}ᵀ g_t`, of all tokens t of the span that s acts on. Many are pulled
back at a time, and no `J_{st}` is ever built. The ways, the cheapest first:

* **span_linearised**: the block on the span's rows, with the keys and values of earlier
  ones as constants, and the Jacobian of its MLP at each token, one matrix, in place of
  its three products and its activation;
* **span_local**: the same with the MLP's own backward pass;
* **full_sequence**: reverse mode through the block on all rows.

Each must give the values and the product of the gate's references.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import forwards_replaced, is_out_of_memory
from tl_coupling.blocks.contexts import BlockError, Context
from tl_coupling.blocks.evaluation import PullBack, vjp
from tl_coupling.blocks.function import BlockFunction, Path
from tl_coupling.blocks.records import Record, Recorded

# Gradients that are pulled back at a time: enough for fast products of matrices, few
# enough for what lies between those to stay in the cache.
_CHUNK = 64
# `f(X)` of the span's rows, and from gradients there to those at its input.
_Evaluated = tuple[Float[Tensor, "n_rows d_model"], PullBack]


def pull_back_span(
    block: BlockFunction, gradients: Float[Tensor, "n n_rows d_model"], start: int
) -> Path:
    """Turn gradients of what leaves a block, in place, into those of what enters it.

    Both are of the rows from `start` on; other rows have none.

    Returns:
        the name of the way.

    Raises:
        StepError: the block is not the function that was traced.
        DerivativeError: its derivative is not the function's.
    """
    stop = start + gradients.shape[1]
    # Before `evaluation()`: the recorded call is made with the model as it is.
    reference = block.span_reference(range(start, stop))
    with block.evaluation():
        for path, evaluate in _ways(block, start, stop):
            try:
                y, pull_back = evaluate()
                (product,) = pull_back(reference.u)
            except BlockError:
                continue
            except Exception as error:
                # A foreign block may raise anything.
                if path == "full_sequence" or is_out_of_memory(error):
                    raise
                block.remark_on_failure(path, error)
                continue
            if block.span_agrees(reference, y, product):
                for chunk in gradients.split(_CHUNK):
                    chunk += pull_back.batched(chunk)[0]
                return path
    raise block.changed()


def _ways(
    block: BlockFunction, start: int, stop: int
) -> Iterator[tuple[Path, Callable[[], _Evaluated]]]:
    """Yield every way to the span's values and their pull-back, the cheapest first."""
    yield "span_linearised", partial(_span_linearised, block, start, stop)
    yield "span_local", partial(_span_local, block, start, stop)
    yield "full_sequence", partial(_full_sequence, block, start, stop)


def _full_sequence(block: BlockFunction, start: int, stop: int) -> _Evaluated:
    X = block.X

    def function(rows: Tensor) -> Tensor:
        return block.added(torch.cat([X[:start], rows, X[stop:]]))[start:stop]

    return vjp(function, X[start:stop])


def _span_local(block: BlockFunction, start: int, stop: int) -> _Evaluated:
    """Evaluate the span's rows alone: no later row acts on them."""

    def function(rows: Tensor) -> Tensor:
        return block.added_to_following(rows, _earlier_rows(block, start))

    return vjp(function, block.X[start:stop])


def _span_linearised(block: BlockFunction, start: int, stop: int) -> _Evaluated:
    """Evaluate the span's rows alone, with the MLP as one matrix at each token."""
    mlp = getattr(block.call.module, "mlp", None)
    if not isinstance(mlp, nn.Module):
        raise BlockError("there is no MLP")
    values, J = _mlp_jacobians(block, mlp, start, stop)

    def replaced(rows: Tensor) -> Tensor:
        image: Tensor = _KnownFunction.apply(rows.reshape(len(J), -1), values, J)
        return image.reshape(*rows.shape[:-1], -1)

    def function(rows: Tensor) -> Tensor:
        with forwards_replaced({mlp: replaced}):
            return block.added_to_following(rows, _earlier_rows(block, start))

    return vjp(function, block.X[start:stop])


def _earlier_rows(block: BlockFunction, start: int) -> Context:
    """Return the keys and values of the rows before the span."""
    dim = block.call.position_dim
    rows = tuple(rows.narrow(dim, 0, start) for rows in block.keys_and_values())
    return block.call.context(start, rows)


def _mlp_jacobians(
    block: BlockFunction, mlp: nn.Module, start: int, stop: int
) -> tuple[Float[Tensor, "n_rows d_model"], Float[Tensor, "n_rows d_model d_model"]]:
    """Return the MLP's values at the span's rows, and its Jacobian at each."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        match args, output:
            case (Tensor() as rows,), Tensor() as values:
                seen.append((rows, values))

    with shared_changes(mlp.register_forward_hook(note)):
        block.added_to_following(block.X[start:stop], _earlier_rows(block, start))
    n_rows = stop - start
    if len(seen) != 1 or any(x.ndim != 3 or len(x[0]) != n_rows for x in seen[0]):
        raise BlockError("the MLP does not map rows to rows, once")
    rows, values = seen[0]

    def of_row(x: Tensor, _: Record) -> Tensor:
        output: Tensor = mlp(x[None, None])
        return output.reshape(-1)

    jacobians = [Recorded(of_row, [x]).jacobians()[0] for x in rows[0]]
    return values[0], torch.stack(jacobians)


class _KnownFunction(torch.autograd.Function):
    """A function of each row whose values and Jacobians are known."""

    @staticmethod
    def forward(rows: Tensor, values: Tensor, J: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (J,) = ctx.saved_tensors
        return _times_each(gradient, J), None, None


class _TimesEach(torch.autograd.Function):
    """`g_t J_t` for each row t; with many gradients, one product for each row.

    PyTorch's own rule for a batched matmul would copy J for every gradient.
    """

    @staticmethod
    def forward(gradient: Tensor, J: Tensor) -> Tensor:
        return torch.bmm(gradient[:, None], J)[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        _info: object, in_dims: tuple[int, None], gradients: Tensor, J: Tensor
    ) -> tuple[Tensor, int]:
        of_rows = gradients.movedim(in_dims[0], 1)
        return torch.bmm(of_rows, J), 1


_times_each = _TimesEach.apply
