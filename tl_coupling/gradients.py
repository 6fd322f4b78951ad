"""Blocks as functions of the residual stream, and what refuses to differentiate them:
public names of `tl_coupling.blocks`.
"""

from tl_coupling.blocks import BlockFunction, DerivativeError, StepError

__all__ = ["BlockFunction", "DerivativeError", "StepError"]
__dir__ = __all__.copy
