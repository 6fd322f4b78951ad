"""What the blocks of a model are given whose weights are on disk: it runs without them,
because they are too large to be read for that.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from tl_coupling.blocks.arithmetic import forwards_replaced
from tl_coupling.blocks.calls import argument_that_differs, stand_in
from tl_coupling.blocks.forward_passes import ForwardPass
from tl_coupling.models import facts_of

# Blocks return a tensor (0), or tuples of up to three.
_POSSIBLE_LENGTHS = [0, 1, 2, 3]


def streamed_passage(
    model: Any, run: Callable[[], object], n_pos: int | None
) -> ForwardPass:
    """Return what a model does while `run` runs it, but for its blocks: each is given
    what the one before is said to return.

    It runs twice, with other values in place of what the blocks return: what else they
    are given must be the same.

    Raises:
        ValueError: as `ForwardPass.record`; or a block's arguments depend on what earlier
            blocks computed.
    """
    facts = facts_of(model)
    lengths = _POSSIBLE_LENGTHS
    if facts.output_length is not None:
        lengths = [facts.output_length]
    errors: list[Exception] = []
    # Whether blocks return a tensor or a tuple shows in whether the next one gets the
    # stream.
    for length in lengths:
        try:
            forward_pass = _pass_of_stand_ins(model, run, n_pos, length, torch.clone)
            varied = _pass_of_stand_ins(model, run, n_pos, length, _noise)
        # A model that expects a tuple may fail in many ways on a tensor.
        except (ValueError, TypeError, LookupError) as error:
            errors.append(error)
            continue
        facts.output_length = length
        _check_arguments(forward_pass, varied)
        return forward_pass
    raise errors[0]


def _pass_of_stand_ins(
    model: Any,
    run: Callable[[], object],
    n_pos: int | None,
    length: int,
    output_of: Callable[[Tensor], Tensor],
) -> ForwardPass:
    """Return the forward pass with stand-ins for the blocks, which return tuples of a
    length.
    """
    # Wrapped, so that they name their arguments as the blocks do.
    forwards = {
        block: update_wrapper(stand_in(output_of, length), block.forward)
        for block in model.blocks
    }
    with forwards_replaced(forwards):
        return ForwardPass.record(model, list(model.blocks), run, n_pos)


def _noise(X: Tensor) -> Tensor:
    return torch.randn(X.shape, generator=torch.Generator().manual_seed(0)).to(X)


def _check_arguments(forward_pass: ForwardPass, varied: ForwardPass) -> None:
    pairs = zip(forward_pass.calls, varied.calls, strict=True)
    for layer, (recorded, other_values) in enumerate(pairs):
        name = argument_that_differs(recorded.call, other_values.call)
        if name:
            raise ValueError(
                f"{name} of block {layer} depends on what earlier blocks computed: such "
                "a model must be loaded as a whole, in floating point"
            )
