"""What a model did in one forward pass: every call of a block, and the residual stream
between them.
"""

from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.contexts import BlockError

__all__ = ["BlockCall", "BlockError"]
