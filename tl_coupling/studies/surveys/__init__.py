"""Many measurements: surveys of models, sweeps over checkpoints, and what runs them."""
# ruff: noqa: F401

from tl_coupling.arguments import renamed
from tl_coupling.prompts import as_prompts
from tl_coupling.studies.surveys.checkpoints import (
    Checkpoint,
    Source,
    checkpoint_sources,
    local_checkpoints,
    pythia_steps,
    step_order,
)
from tl_coupling.studies.surveys.executors import Executor, process_pool, slurm_executor
from tl_coupling.studies.surveys.measurements import measure_prompts
from tl_coupling.studies.surveys.precision import (
    COMPARED_MEASURES,
    PRECISIONS,
    PrecisionChange,
    precision_changes,
    precision_sweep,
)
from tl_coupling.studies.surveys.readings import (
    joined_runs,
    measure_table,
    null_interval_of_coupling,
    pairs_of_layers,
    select_orientation,
    with_diagonal,
)
from tl_coupling.studies.surveys.records import PLAN
from tl_coupling.studies.surveys.results import UNITS, open_survey
from tl_coupling.studies.surveys.settings import PAPER_PROMPT, Settings
from tl_coupling.studies.surveys.survey import (
    UNTRAINED,
    Survey,
    checkpoint_sweep,
    run_survey,
)
from tl_coupling.studies.surveys.variables import loss, measures, measures_of_maps

__all__ = [
    "Settings",
    "Survey",
    "checkpoint_sweep",
    "local_checkpoints",
    "measure_prompts",
    "measure_table",
    "open_survey",
    "precision_changes",
    "precision_sweep",
    "process_pool",
    "pythia_steps",
    "run_survey",
    "select_orientation",
    "slurm_executor",
    "with_diagonal",
]

# Names of earlier versions.
movements = renamed(precision_changes, "surveys.movements")
one_orientation = renamed(select_orientation, "surveys.one_orientation")
run = renamed(run_survey, "surveys.run")
