"""A residual block as a pure function of the residual stream, `f(X) = block(X) − X`.

One forward pass of the model (`trace`) records, for every block, the residual stream that enters it and every other
argument of the call. The block can then be called on its own, on any residual stream: TransformerLens'
`hook_resid_pre → hook_resid_post` without the skip.
"""
# ruff: noqa: F401

from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.checks import DerivativeError, StepError
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.functions import BlockFunction, Path
from tl_coupling.blocks.tracing import Trace, trace, trace_modules

__all__ = [
    "BlockCall",
    "BlockError",
    "BlockFunction",
    "DerivativeError",
    "StepError",
    "Trace",
    "trace",
    "trace_modules",
]
