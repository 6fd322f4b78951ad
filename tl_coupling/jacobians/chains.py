"""Gradients of the stream after the last block, pulled back through one block after the
other: the derivative of the whole model, between all tokens, without a product of
Jacobians.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import FrozenFunction, Path, Trace, pull_back_span
from tl_coupling.jacobians.connections import AnyFunction


class PulledBack(NamedTuple):
    """Gradients at what enters a block, `[n n_rows d_model]`, and the way to them.

    The tensor is the next block's too, which changes it.
    """

    layer: int
    gradients: Float[Tensor, "n n_rows d_model"]
    path: Path


def pulled_back(
    trace: Trace,
    gradients: Float[Tensor, "n n_rows d_model"],
    start: int,
    first_layer: int,
    function: AnyFunction = "block",
) -> Iterator[PulledBack]:
    """Yield gradients at what enters each block, from the last one down to a layer.

    Args:
        trace: a traced prompt.
        gradients: at what leaves the last block, of the rows from `start` on; changed
            in place.
        start: the first of the rows.
        first_layer: the block where it ends.
        function: "block", or "frozen" for blocks with norms, attention patterns and
            gates held constant.
    """
    for layer in reversed(range(first_layer, trace.n_layers)):
        block = trace.blocks[layer]
        if function == "frozen":
            block = FrozenFunction.from_block(block)
        path = pull_back_span(block, gradients, start)
        yield PulledBack(layer, gradients, path)
