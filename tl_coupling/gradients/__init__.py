"""A residual block as a pure function of the residual stream, `f(X) = block(X) − X`,
and how it is differentiated.

A block is called on its own, on any residual stream, with the arguments that a forward
pass recorded: TransformerLens' `hook_resid_pre → hook_resid_post` without the skip.
Every derivative is checked against the function itself.
"""

# ruff: noqa: F401
from tl_coupling.gradients.function import BlockFunction, Path
from tl_coupling.gradients.gate import DerivativeError, StepError

__all__ = ["BlockFunction", "DerivativeError", "StepError"]
