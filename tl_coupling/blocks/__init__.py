"""What a model did in one forward pass: every call of a block, and the residual stream
between them.
"""
# ruff: noqa: F401

from tl_coupling.blocks.arithmetic import (
    attributes_set,
    exact_arithmetic,
    forwards_replaced,
    is_out_of_memory,
    map_tensors,
    mean_weights,
    own_arithmetic,
)
from tl_coupling.blocks.calls import BlockCall, RecordedCall, differ_in, hidden_states
from tl_coupling.blocks.contexts import PRODUCTS, BlockError, Context
from tl_coupling.blocks.hooks import (
    backward_hooks_of_user,
    hooks_of_user,
    spliced_modules,
)
from tl_coupling.blocks.passages import Passage
from tl_coupling.blocks.streamed import passage_of

__all__ = ["BlockCall", "BlockError"]
