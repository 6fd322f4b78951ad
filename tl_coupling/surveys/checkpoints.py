"""One model across its training: every checkpoint measured on the same prompts."""

import gc
import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tl_coupling.border import AnyPath, Device, FloatDtype, checked, warn_caller
from tl_coupling.files import file_name, output_folder
from tl_coupling.models import Backend, ModelError, load_model
from tl_coupling.prompts import Prompt
from tl_coupling.surveys.executors import Executor
from tl_coupling.surveys.measurements import PAPER_PROMPT, Settings, as_prompts, measure_prompts
from tl_coupling.surveys.units import (
    Outcome,
    Progress,
    Unit,
    check_plan,
    load_unit,
    one_line,
    run_units,
    saying_what_is_kept,
)

if TYPE_CHECKING:
    import xarray

Checkpoint = int | str
# What `load_model` takes: a name, and a checkpoint where the name alone does not say it.
Source = dict[str, Any]


@dataclass(frozen=True)
class MeasureModel:
    """What is done for a unit, in this process or another: load a model, measure it on prompts.

    The unit's `given` is the model's source and the prompts. Attributes as in `checkpoint_sweep`.
    """

    settings: Settings
    backend: Backend
    device: str | torch.device | None
    dtype: torch.dtype

    def __call__(self, unit: Unit) -> "xarray.Dataset":
        """All measures."""
        # A bridge and its hook points refer to each other, and an error keeps its model until it was recorded.
        gc.collect()
        source, prompts = unit.given
        model = load_model(**source, backend=self.backend, device=self.device, dtype=self.dtype)
        return measure_prompts(model, prompts, self.settings)

    def as_plan(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the results depend on beside the model, JSON-able."""
        return {
            "backend": self.backend,
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.settings.as_plan(),
            "prompts": [[p.id, p.task, p.prompt] for p in prompts],
        }


@checked
def pythia_steps(first: int = 1) -> tuple[int, ...]:
    """Log-spaced training steps of the Pythia suite, from `first` on, as the paper takes them.

    1, 2, 4, …, 512, then 1000, 2000, 4000, …, 128000, and the last, 143000 (Aubry et al. 2025, figures 1 and 16).
    Pythia also published step 0 and every 1000th step.

    Example:
        >>> tlc.surveys.pythia_steps(first=512)
        (512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
    """
    steps = [*(2**i for i in range(10)), *(1000 * 2**i for i in range(8)), 143_000]
    return tuple(step for step in steps if step >= first)


def step_order(checkpoint: Checkpoint) -> list[tuple[bool, int, str]]:
    """Sorts checkpoints: training steps by number, also within names, and before other names."""
    parts = re.split(r"(\d+)", str(checkpoint))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


@checked
def local_checkpoints(folder: AnyPath) -> dict[int, Path]:
    """Checkpoints in a local folder: subfolders in HuggingFace format whose names end in their training step.

    `step1000`, `checkpoint-1000`, `step_0001000` and their like; in the order of their steps.

    Raises:
        ValueError: there are none, or two of the same step.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (0, 100, 20):
        ...         Path(folder, f"step{step}").mkdir()
        ...         _ = Path(folder, f"step{step}", "config.json").write_text("{}")
        ...     list(tlc.surveys.local_checkpoints(folder))
        [0, 20, 100]
    """
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("*/config.json")):
        number = re.search(r"(\d+)$", path.parent.name)
        if number is None:
            continue
        step = int(number[1])
        if step in found:
            raise ValueError(f"{folder}: {found[step].name} and {path.parent.name} are both of step {step}")
        found[step] = path.parent
    if not found:
        raise ValueError(
            f"{folder}: no checkpoints in it; wanted subfolders in HuggingFace format whose names end in a step, like "
            "step1000 or checkpoint-1000"
        )
    return dict(sorted(found.items()))


@checked
def checkpoint_sweep(
    name: AnyPath,
    checkpoints: Sequence[Checkpoint] | None = None,
    prompts: str | Prompt | Sequence[str | Prompt] = PAPER_PROMPT,
    *,
    settings: Settings | None = None,
    folder: AnyPath | None = None,
    backend: Backend = "auto",
    device: Device | None = None,
    dtype: FloatDtype = torch.float32,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> "xarray.Dataset":
    """Measure a model at every checkpoint: coupling, singular values, shapes of trajectories, loss.

    Args:
        name: a hub name whose checkpoints were published (`"EleutherAI/pythia-160m"`), or a local folder of checkpoints
            in HuggingFace format (see `local_checkpoints`).
        checkpoints: training steps (`int`) or hub revisions (`str`). By default all of a local folder, or
            `pythia_steps()`.
        prompts: what every checkpoint is measured on.
        settings: how; see `Settings`.
        folder: where each finished checkpoint is written at once. A rerun there keeps what is finished, and measures
            what is missing, failed or damaged. Without it nothing is kept.
        backend, device, dtype: as in `load_model`.
        progress: wraps the loop over checkpoints.
        executor: measures checkpoints elsewhere, many at a time; see `run_units`. The folder must lie where its workers
            see it.

    Returns:
        what `measure_prompts` gives, along a further dim `checkpoint`. A checkpoint that failed is left out, with a
        warning; the errors are in `attrs["failed"]`, a JSON object.

    Raises:
        ValueError: no checkpoints or prompts; a folder that holds other results; checkpoints of different shapes.
        ModelError: not one checkpoint could be measured.
        OSError: the folder cannot be written to; what is finished stays.

    One model is in memory at a time. The results do not depend on whether a sweep was interrupted.
    """
    chosen = as_prompts(prompts)
    measure = MeasureModel(settings or Settings(), backend, device, dtype)
    units = [
        Unit(f"checkpoint-{file_name(str(checkpoint))}", {"checkpoint": checkpoint}, (source, chosen))
        for checkpoint, source in checkpoint_sources(name, checkpoints).items()
    ]
    # However the path of a local folder was written.
    model = str(Path(name).resolve()) if Path(name).is_dir() else str(name)
    temporary = tempfile.TemporaryDirectory() if folder is None else nullcontext(os.fspath(folder))
    telling = nullcontext() if folder is None else saying_what_is_kept(Path(folder), units)
    with temporary as path, output_folder(path) as results, telling:
        check_plan(results, {"model": model} | measure.as_plan(chosen))
        outcomes = run_units(results, units, measure, progress, executor)
        gc.collect()
        return _together(results, outcomes, str(name))


def checkpoint_sources(name: AnyPath, checkpoints: Sequence[Checkpoint] | None) -> dict[Checkpoint, Source]:
    """What `load_model` takes for each checkpoint of a hub model or a local folder.

    Raises:
        ValueError: none, one twice, steps and revisions mixed, or one that the folder does not have.
    """
    sources: dict[Checkpoint, Source]
    if Path(name).is_dir():
        there = local_checkpoints(name)
        wanted = list(there) if checkpoints is None else list(checkpoints)
        if unknown := [c for c in wanted if c not in there]:
            raise ValueError(f"{name} has no checkpoints {unknown}; there are {list(there)}")
        sources = {c: {"name": str(there[c])} for c in wanted if isinstance(c, int)}
    else:
        wanted = list(pythia_steps() if checkpoints is None else checkpoints)
        sources = {c: {"name": os.fspath(name), "checkpoint": c} for c in wanted}
    check_checkpoints(wanted)
    return sources


def check_checkpoints(wanted: Sequence[Checkpoint]) -> None:
    """Raise unless there is one or more, all steps or all revisions, each once."""
    if not wanted:
        raise ValueError("`checkpoints` is empty: wanted at least one")
    if len(set(wanted)) < len(wanted) or len({type(c) for c in wanted}) > 1:
        raise ValueError(f"`checkpoints` must be all steps or all revisions, each once, got {list(wanted)}")


def _together(folder: Path, outcomes: Sequence[Outcome], name: str) -> "xarray.Dataset":
    import xarray

    failed = {str(o.unit.what["checkpoint"]): o.error for o in outcomes if o.status == "failed"}
    done = [o.unit for o in outcomes if o.status != "failed"]
    if not done:
        first = next(iter(failed.items()))
        raise ModelError(f"none of the {len(failed)} checkpoints of {name} could be measured; {first[0]}: {first[1]}")
    if failed:
        warn_caller(f"{len(failed)} of {len(outcomes)} checkpoints failed and are left out: " + one_line(failed))
    results = [load_unit(folder, unit) for unit in done]
    checkpoints = [unit.what["checkpoint"] for unit in done]
    provenance = common_provenance([json.loads(result.attrs["provenance"]) for result in results])
    try:
        # Joined otherwise, a model with fewer layers is filled up with NaN.
        data = xarray.concat(results, "checkpoint", combine_attrs="drop_conflicts", join="exact")
    except ValueError as error:
        depths = {c: result.sizes["layer"] for c, result in zip(checkpoints, results, strict=True)}
        raise ValueError(
            f"the checkpoints of {name} are not of one architecture and do not fit into one dataset; layers: {depths}"
        ) from error
    return data.assign_coords(checkpoint=checkpoints).assign_attrs(
        model=name, failed=json.dumps(failed), provenance=json.dumps(provenance)
    )


def common_provenance(provenances: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What holds for all; which checkpoint it was is a coordinate."""
    first, *others = ({k: v for k, v in p.items() if k != "checkpoint"} for p in provenances)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
