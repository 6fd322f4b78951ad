"""A model whose weights are elsewhere, run without its blocks: what each block is given
beside the stream.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from tl_coupling.blocks.arithmetic import forwards_replaced
from tl_coupling.blocks.calls import argument_that_differs
from tl_coupling.blocks.passages import Passage
from tl_coupling.models import facts_of


def without_blocks(model: Any, run: Callable[[], Any], n_pos: int | None) -> Passage:
    """What a model does while `run` runs it, but for its blocks: each is given what the
    one before is said to return.

    It runs twice, with other values in place of what the blocks return: what else they
    are given must be the same.

    Raises ValueError as `Passage.of`, or where a block's arguments depend on what
    earlier blocks computed.
    """
    blocks, errors = list(model.blocks), []

    def passage(length: int, output: Callable[[Tensor], Tensor]) -> Passage:
        # Wrapped, so that they name their arguments as the blocks do.
        stand_ins = {
            block: update_wrapper(partial(_returned, length, output), block.forward)
            for block in blocks
        }
        with forwards_replaced(stand_ins):
            return Passage.of(model, blocks, run, n_pos)

    # Whether blocks return a tensor or a tuple shows in whether the next one gets the
    # stream.
    facts = facts_of(model)
    known = facts.output_length
    for length in range(4) if known is None else [known]:
        try:
            found, other = passage(length, torch.clone), passage(length, _noise)
        # A model that expects a tuple may fail in many ways on a tensor.
        except (ValueError, TypeError, LookupError) as error:
            errors.append(error)
            continue
        facts.output_length = length
        for i, (one, another) in enumerate(zip(found.calls, other.calls, strict=True)):
            if name := argument_that_differs(one.call, another.call):
                depends = f"{name} of block {i} depends on what earlier blocks computed"
                raise ValueError(
                    f"{depends}: such a model must be loaded as a whole, in floating point"
                )
        return found
    raise errors[0]


def _returned(
    length: int,
    output: Callable[[Tensor], Tensor],
    first: Tensor | None = None,
    *_: Any,
    **named: Any,
) -> Any:
    stream = output(named["hidden_states"] if first is None else first)
    return (stream, *[None] * (length - 1)) if length else stream


def _noise(X: Tensor) -> Tensor:
    return torch.randn(X.shape, generator=torch.Generator().manual_seed(0)).to(X)
