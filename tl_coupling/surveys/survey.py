"""Surveys: many models, checkpoints and prompts, in units that survive a crash and run on any executor."""

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tl_coupling.border import AnyPath, Count, Device, FloatDtype, checked, warn_caller
from tl_coupling.files import file_name
from tl_coupling.models import Backend, ModelError, load_model
from tl_coupling.progress import Progress
from tl_coupling.prompts import Prompt
from tl_coupling.surveys.checkpoints import Checkpoint, Source, check_checkpoints, checkpoint_sources, is_cached
from tl_coupling.surveys.executors import Executor
from tl_coupling.surveys.measurements import PAPER_PROMPT, Settings, as_prompts, measure_prompts
from tl_coupling.surveys.opening import COSTS, FACTS, all_finished, joined, survey_records
from tl_coupling.surveys.units import Folder, Unit, folder_of_results, one_line

if TYPE_CHECKING:
    import xarray

MAIN, UNTRAINED = "main", "untrained"


@checked
@dataclass(frozen=True)
class Survey:
    """What is measured on what: every model, at every checkpoint, on every prompt.

    Attributes:
        models: hub names, local folders in HuggingFace format or folders of checkpoints; or a mapping to these from the
            names used in the results.
        prompts: what every model is measured on.
        checkpoints: training steps or hub revisions, of all models; or a mapping from models to theirs. By default the
            model itself ("main"), or all of a local folder of checkpoints.
        untrained: also measure each model's untrained twin, as checkpoint "untrained"; not with checkpoints.
        settings: how; see `Settings`.
        prompts_per_unit: a unit of work is one model and checkpoint with this many prompts, all by default. Small units
            lose less when cut off and can run in parallel, but each loads its model anew.
        backend, device, dtype: as in `load_model`.

    Raises:
        ValueError: no models or prompts, one twice, no such folder, checkpoints of a model that is not surveyed.

    Example:
        >>> survey = tlc.Survey(["gpt2", "distilgpt2"], ["One and one is", "The capital of France is"])
        >>> [unit.key for unit in survey.units()]
        ['gpt2@main', 'distilgpt2@main']
    """

    models: AnyPath | Mapping[str, AnyPath] | Sequence[AnyPath]
    prompts: str | Prompt | Sequence[str | Prompt]
    checkpoints: Sequence[Checkpoint] | Mapping[str, Sequence[Checkpoint]] | None = None
    untrained: bool = False
    settings: Settings = field(default_factory=Settings)
    prompts_per_unit: Count | None = None
    backend: Backend = "auto"
    device: Device | None = None
    dtype: FloatDtype = torch.float32

    def __post_init__(self) -> None:
        """Raise on what cannot be measured; keep paths as they are meant now, and prompts as a list."""
        one = [self.models] if isinstance(self.models, str | os.PathLike) else self.models
        given = list(one.items()) if isinstance(one, Mapping) else [(os.fspath(source), source) for source in one]
        names = [name for name, _ in given]
        if not names or "" in names or len(set(names)) < len(names):
            raise ValueError(f"`models` must be one or more names, each once, got {names}")
        # A folder is the same however its path is written and wherever a worker starts.
        models = {name: str(Path(s).resolve()) if Path(s).is_dir() else os.fspath(s) for name, s in given}
        if missing := [s for s in models.values() if s.startswith(("/", "./", "../", "~")) and not Path(s).is_dir()]:
            raise ValueError(f"there is no such folder: {', '.join(missing)}")
        by_model = self.checkpoints if isinstance(self.checkpoints, Mapping) else dict.fromkeys(names, self.checkpoints)
        if unknown := set(by_model) - set(names):
            raise ValueError(f"`checkpoints` names models that are not surveyed: {sorted(unknown)}; there are {names}")
        for chosen in by_model.values():
            if chosen is not None:
                check_checkpoints(chosen)
        if self.untrained and self.checkpoints is not None and not isinstance(self.checkpoints, Mapping):
            raise ValueError("`untrained` does not go with `checkpoints` of all models: leave one out, or name models")
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "prompts", as_prompts(self.prompts))

    def units(self) -> list[Unit]:
        """The pieces of work, in the order of models, checkpoints and prompts."""
        prompts = as_prompts(self.prompts)
        size = self.prompts_per_unit or len(prompts)
        found = []
        models: dict[str, str] = dict(self.models)  # type: ignore[arg-type]
        for model, name in models.items():
            for checkpoint, source in self._sources(model, name).items():
                what = {"model": model, "checkpoint": checkpoint, "source": source}
                for first in range(0, len(prompts), size):
                    key = f"{file_name(model)}@{file_name(str(checkpoint))}" + f"+{first}" * (size < len(prompts))
                    some = prompts[first : first + size]
                    found.append(Unit(key, what | {"prompts": [first, first + len(some)]}, (source, some)))
        return found

    def _sources(self, model: str, name: str) -> dict[Checkpoint, Source]:
        chosen = self.checkpoints.get(model) if isinstance(self.checkpoints, Mapping) else self.checkpoints
        if chosen is not None or (Path(name).is_dir() and not (Path(name) / "config.json").exists()):
            return checkpoint_sources(name, chosen)
        twin: dict[Checkpoint, Source] = {UNTRAINED: {"name": name, "untrained": True}} if self.untrained else {}
        return {MAIN: {"name": name}} | twin

    def plan(self) -> dict[str, Any]:
        """What the results depend on beside the models, JSON-able."""
        return {
            "kind": "survey",
            "prompts_per_unit": self.prompts_per_unit,
            "backend": self.backend,
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.settings.as_plan(),
            "prompts": [[p.id, p.task, p.prompt] for p in as_prompts(self.prompts)],
        }


@dataclass
class MeasureModel:
    """Measures a unit of a survey, in this process or another: loads the model, measures the prompts.

    After the first model that is not there without a network, only cached ones are tried.
    """

    survey: Survey
    progress: Progress | None = None
    no_network: str | None = None

    def __call__(self, unit: Unit) -> "xarray.Dataset":
        """All measures."""
        # A bridge and its hook points refer to each other, and an error holds its model until it is recorded.
        gc.collect()
        (source, prompts), asked = unit.given, self.survey
        if self.no_network and not is_cached(source):
            raise ModelError(f"not tried: {self.no_network}")
        try:
            model = load_model(**source, backend=asked.backend, device=asked.device, dtype=asked.dtype)
        except ModelError as error:
            self.no_network = self.no_network or (str(error) if "no network" in str(error) else None)
            raise
        return measure_prompts(model, prompts, asked.settings, self.progress)


@checked
def run(
    survey: Survey,
    folder: AnyPath | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Measure what a survey asks for, and open the results.

    Args:
        survey: what is measured.
        folder: where each unit's result is written when it is done. A run there keeps what is finished and measures
            what is missing, failed or damaged; models may be added. A local model changed in place is not noticed. By
            default the results are in memory only.
        executor: by default units run one after the other in this process. Otherwise anything with `submit`: a pool of
            concurrent.futures, a Client of dask.distributed, submitit on a SLURM cluster (one job array; preempted jobs
            are queued again). It gets names and paths, never models; its workers must see the folder.
        progress: wraps the loop over units, `tqdm.tqdm` for one. By default bars for units and for the prompts of each,
            in a terminal or notebook; False for none.

    Returns:
        as `open_survey`. Units that failed are missing (NaN), with a warning; their errors are in `attrs["failed"]`.

    Raises:
        ValueError: a folder with results of another survey, or in use by another run.
        ModelError: not one unit could be measured.
        OSError: the folder cannot be written to; what is finished is kept.

    The values do not depend on the executor, on interruptions or on `prompts_per_unit`, as long as torch runs with the
    same number of threads. A unit that kills its worker fails; with executors other than `process_pool`, others may
    fail with it. Without a network, only cached models are tried after the first that is not.

    Example:
        >>> survey = tlc.Survey(["gpt2"], tlc.load_prompts("gsm8k", n=20))  # doctest: +SKIP
        >>> with tlc.surveys.process_pool(4) as pool:  # doctest: +SKIP
        ...     data = tlc.run(survey, "out/gpt2", executor=pool)
    """
    return _run(survey, folder, executor, progress, "units", lambda unit: unit.key, all_finished)


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
    """Survey one model at every checkpoint: coupling, singular values, shapes of trajectories, loss.

    Args:
        name: a hub name whose checkpoints are published (`"EleutherAI/pythia-160m"`), or a local folder of checkpoints
            in HuggingFace format (see `local_checkpoints`).
        checkpoints: training steps (`int`) or hub revisions (`str`). By default all of a local folder, or
            `pythia_steps()`.
        prompts: what every checkpoint is measured on.
        settings, backend, device, dtype: as in `Survey`.
        folder, progress, executor: as in `run`; a unit is a checkpoint.

    Returns:
        what `open_survey` gives for this model without its size and cost, `[checkpoint prompt …]`, in the order asked
        for. Checkpoints that failed are left out, with a warning; their errors are in `attrs["failed"]`.

    Raises:
        ValueError: no checkpoints or prompts; a folder that holds other results; checkpoints of different shapes.
        ModelError, OSError: as `run`.

    One model is in memory at a time.
    """
    label = Path(name).resolve().name if Path(name).is_dir() else os.fspath(name)
    steps = {label: list(checkpoint_sources(name, checkpoints))}
    survey = Survey({label: name}, prompts, steps, False, settings or Settings(), None, backend, device, dtype)

    def of_this_model(folder: Folder, units: list[Unit]) -> "xarray.Dataset":
        data = joined(folder, units).sel(model=label, checkpoint=[u.what["checkpoint"] for u in units], drop=True)
        # Joined with a deeper model, one with fewer layers is filled up with NaN.
        if len(set(data["n_layers"].values)) > 1:
            depths = dict(zip(data["checkpoint"].values.tolist(), data["n_layers"].values.tolist(), strict=True))
            raise ValueError(f"the checkpoints of {name} are not of one architecture; layers: {depths}")
        return data.drop_vars([*FACTS, *COSTS]).assign_attrs(model=os.fspath(name))

    what = f"checkpoints of {name}"
    return _run(survey, folder, executor, progress, what, lambda unit: str(unit.what["checkpoint"]), of_this_model)


def _run(
    survey: Survey,
    folder: AnyPath | None,
    executor: Executor | None,
    progress: Progress | None,
    what: str,
    label: Callable[[Unit], str],
    load: Callable[[Folder, list[Unit]], "xarray.Dataset"],
) -> "xarray.Dataset":
    units = survey.units()
    with folder_of_results(folder, survey.plan()) as results:
        _check_sources(results, units)
        # Bars of several workers would overwrite each other.
        within: Progress | None = None if executor is None and progress is None else False
        outcomes = results.run(units, MeasureModel(survey, within), progress, executor)
        gc.collect()
        failed = {label(o.unit): o.error for o in outcomes if o.status == "failed"}
        if len(failed) == len(outcomes):
            first, error = next(iter(failed.items()))
            raise ModelError(f"none of the {len(failed)} {what} could be measured; {first}: {error}")
        if failed:
            warn_caller(f"{len(failed)} of {len(outcomes)} {what} failed and are left out: {one_line(failed)}")
        data = load(results, [o.unit for o in outcomes if o.status != "failed"])
        # Of this run: other models may have failed in earlier ones.
        data = data.assign_attrs(failed=json.dumps(failed))
        return data.load() if folder is None else data


def _check_sources(folder: Folder, units: Sequence[Unit]) -> None:
    """Raise where a name stood for another model before: its results would be overwritten."""
    there = survey_records(folder)
    for unit in units:
        before, now = (what["source"]["name"] for what in (there.get(unit.key, {}).get("what", unit.what), unit.what))
        if before != now:
            raise ValueError(
                f"{folder.path} holds results of {before!r} as {unit.what['model']!r}, asked for is {now!r}: give it "
                "another name, or choose another folder"
            )
