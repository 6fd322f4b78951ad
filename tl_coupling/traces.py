"""One forward pass of a model: public names of `tl_coupling.blocks`."""

from tl_coupling.blocks import Trace, trace, trace_modules

__all__ = ["Trace", "trace", "trace_modules"]
__dir__ = __all__.copy
