"""Many measurements: surveys of models, sweeps over checkpoints, and what runs them:
public names of `tl_coupling.studies.surveys`.
"""
# ruff: noqa: F403

from tl_coupling.arguments import renamed
from tl_coupling.studies.surveys import *
from tl_coupling.studies.surveys import __all__ as __all__
from tl_coupling.studies.surveys import (
    precision_changes,
    run_survey,
    select_orientation,
)

__dir__ = __all__.copy

# Names of earlier versions.
movements = renamed(precision_changes, "surveys.movements")
one_orientation = renamed(select_orientation, "surveys.one_orientation")
run = renamed(run_survey, "surveys.run")
