"""One forward pass of a model: its residual stream, and its blocks as functions of
it.
"""

from tl_coupling.traces.trace import Trace
from tl_coupling.traces.tracing import trace, trace_modules

__all__ = ["Trace", "trace", "trace_modules"]
