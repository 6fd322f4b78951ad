"""What a model loses without a block, its order, its own directions, or its end:
public names of `tl_coupling.studies.redundancy`.
"""
# ruff: noqa: F403

from tl_coupling.studies.redundancy import *
from tl_coupling.studies.redundancy import __all__ as __all__

__dir__ = __all__.copy
