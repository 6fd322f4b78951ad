"""Coupling in a training loop, measured without disturbing it, and as an objective.

>>> Layer = torch.nn.TransformerEncoderLayer
>>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
>>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
>>> tlc.training.measure(blocks, lambda: network(x), k=4).coupling > 0
True
"""

from tl_coupling.training.callback import CouplingCallback
from tl_coupling.training.measuring import CouplingOfStep, measure
from tl_coupling.training.objective import (
    coupling,
    coupling_of_jacobians,
    jacobians,
)

__all__ = [
    "CouplingCallback",
    "CouplingOfStep",
    "coupling",
    "coupling_of_jacobians",
    "jacobians",
    "measure",
]
__dir__ = __all__.copy
