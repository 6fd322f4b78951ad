"""What a model did in one forward pass, and its blocks: what each was called with, its
function of the residual stream, `f(X) = block(X) − X`, and that function's derivative.

A block is called on its own, on any residual stream, with the arguments that the forward
pass recorded: TransformerLens' `hook_resid_pre → hook_resid_post` without the skip.
Every derivative is checked against the function itself.
"""
# ruff: noqa: F401

from tl_coupling.blocks.arithmetic import (
    autocast_off_within,
    exact_arithmetic,
    forwards_replaced,
    is_out_of_memory,
    map_tensors,
    mean_weights,
    own_arithmetic,
)
from tl_coupling.blocks.batches import TOGETHER, jacobians_together
from tl_coupling.blocks.calls import BlockCall, RecordedCall, differ_in, hidden_states
from tl_coupling.blocks.components import Components
from tl_coupling.blocks.contexts import PRODUCTS, BlockError, Context
from tl_coupling.blocks.errors import DerivativeError, StepError
from tl_coupling.blocks.evaluation import PullBack, chunk_that_fits, reverse_mode, vjp
from tl_coupling.blocks.forward_passes import ForwardPass, calls_on_one_stream
from tl_coupling.blocks.frozen import FrozenFunction
from tl_coupling.blocks.function import BlockFunction, Evaluated, Path, RowFunction, Way
from tl_coupling.blocks.hooks import (
    backward_hooks_of_user,
    hooks_of_user,
    spliced_modules,
)
from tl_coupling.blocks.remarks import Remarks
from tl_coupling.blocks.spans import pull_back_span
from tl_coupling.blocks.trace import Trace
from tl_coupling.blocks.tracing import trace, trace_modules

__all__ = ["BlockCall", "BlockError"]
__dir__ = __all__.copy
