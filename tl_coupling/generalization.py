"""Coupling against generalization across models: tables, fits, bootstrap, and what else
could explain the score: public names of `tl_coupling.studies.generalization`.
"""
# ruff: noqa: F403

from tl_coupling.studies.generalization import *
from tl_coupling.studies.generalization import __all__ as __all__

__dir__ = __all__.copy
