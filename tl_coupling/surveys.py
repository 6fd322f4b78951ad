"""Many measurements: surveys of models, sweeps over checkpoints, and what runs them:
public names of `tl_coupling.studies.surveys`.
"""
# ruff: noqa: F403

from tl_coupling.studies.surveys import *
from tl_coupling.studies.surveys import __all__ as __all__

# Names of earlier versions.
from tl_coupling.studies.surveys import movements as movements
from tl_coupling.studies.surveys import one_orientation as one_orientation
from tl_coupling.studies.surveys import run as run

__dir__ = __all__.copy
