"""A residual block as a pure function of the residual stream, `f(X) = block(X) − X`,
and how it is differentiated.

A block is called on its own, on any residual stream, with the arguments that a forward
pass recorded: TransformerLens' `hook_resid_pre → hook_resid_post` without the skip.
Every derivative is checked against the function itself.
"""

# ruff: noqa: F401
from tl_coupling.gradients.components import Components
from tl_coupling.gradients.errors import DerivativeError, StepError
from tl_coupling.gradients.evaluation import chunk_that_fits, reverse_mode, vjp
from tl_coupling.gradients.frozen import FrozenFunction
from tl_coupling.gradients.function import BlockFunction
from tl_coupling.gradients.remarks import Remarks
from tl_coupling.gradients.ways import (
    ComponentsEvaluation,
    Evaluation,
    Path,
    RowFunction,
    Tried,
)

__all__ = ["BlockFunction", "DerivativeError", "StepError"]
