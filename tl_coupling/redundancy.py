"""What a model loses without a block, its order, its own directions, or its end:
public names of `tl_coupling.studies.redundancy`.
"""

from tl_coupling.studies.redundancy import layer_redundancy, redundancy_correlations

__all__ = ["layer_redundancy", "redundancy_correlations"]
