"""Many measurements: surveys of models, sweeps over checkpoints, and what runs them."""

from tl_coupling.surveys.checkpoints import checkpoint_sweep, local_checkpoints, pythia_steps
from tl_coupling.surveys.executors import process_pool, slurm_executor
from tl_coupling.surveys.measurements import Settings, measure_prompts
from tl_coupling.surveys.survey import Survey, open_survey, run

__all__ = [
    "Settings",
    "Survey",
    "checkpoint_sweep",
    "local_checkpoints",
    "measure_prompts",
    "open_survey",
    "process_pool",
    "pythia_steps",
    "run",
    "slurm_executor",
]
