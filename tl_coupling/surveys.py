"""Many measurements: surveys of models, sweeps over checkpoints, and what runs them:
public names of `tl_coupling.studies.surveys`.
"""

from tl_coupling.studies.surveys import (
    Settings,
    Survey,
    checkpoint_sweep,
    local_checkpoints,
    measure_prompts,
    measure_table,
    movements,
    one_orientation,
    open_survey,
    precision_sweep,
    process_pool,
    pythia_steps,
    run,
    slurm_executor,
    with_diagonal,
)

__all__ = [
    "Settings",
    "Survey",
    "checkpoint_sweep",
    "local_checkpoints",
    "measure_prompts",
    "measure_table",
    "movements",
    "one_orientation",
    "open_survey",
    "precision_sweep",
    "process_pool",
    "pythia_steps",
    "run",
    "slurm_executor",
    "with_diagonal",
]
