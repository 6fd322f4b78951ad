"""Surveys: many models, checkpoints and prompts, in units that survive a crash and run on whatever can run them."""

import gc
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tl_coupling.border import AnyPath, Count, Device, FloatDtype, checked, warn_caller
from tl_coupling.files import file_name, output_folder
from tl_coupling.models import Backend, ModelError
from tl_coupling.prompts import Prompt
from tl_coupling.surveys.checkpoints import (
    Checkpoint,
    MeasureModel,
    Source,
    check_checkpoints,
    checkpoint_sources,
    common_provenance,
    step_order,
)
from tl_coupling.surveys.executors import Executor
from tl_coupling.surveys.measurements import Settings, as_prompts
from tl_coupling.surveys.units import (
    PLAN,
    Progress,
    Unit,
    all_records,
    check_plan,
    is_finished,
    one_line,
    read_plan,
    result_path,
    run_units,
    saying_what_is_kept,
)

if TYPE_CHECKING:
    import xarray

MAIN, UNTRAINED = "main", "untrained"
_PATH_BEGINNINGS = ("/", "./", "../", "~")
# What says which unit a record is of.
_UNIT_KEYS = {"model", "checkpoint", "source", "prompts"}
# What is the same for all models, unless they were measured in different runs.
_SAME_FOR_ALL = ("device", "versions")
# Where `tl-coupling survey` puts a survey, beside its tables and pictures.
UNITS = "units"


@checked
@dataclass(frozen=True)
class Survey:
    """What is measured on what: every model, at every checkpoint, on every prompt.

    Attributes:
        models: hub names, local folders in HuggingFace format or folders of checkpoints; or a mapping from the names
            they go by in the results.
        prompts: what every model is measured on.
        checkpoints: training steps or hub revisions, of all models; or a mapping from models to theirs. Without any a
            model is taken as it is ("main"), a local folder of checkpoints whole.
        untrained: measure each model's untrained twin as well, as checkpoint "untrained"; only of models that are
            taken as they are.
        settings: how; see `Settings`.
        prompts_per_unit: a unit of work is one model and checkpoint with so many prompts, all of them by default. Fewer
            lose less when a unit is cut off and can run side by side; each unit loads its model anew.
        backend, device, dtype: as in `load_model`.

    Raises:
        ValueError: no models or prompts, one twice, checkpoints of a model that is not among them.

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
        """Raise on what could not be measured."""
        named = self._named()
        names = [model for model, _ in named]
        if not names or "" in names or len(set(names)) < len(names):
            raise ValueError(f"`models` must be one or more names, each once, got {names}")
        if isinstance(self.checkpoints, Mapping) and (unknown := set(self.checkpoints) - set(names)):
            raise ValueError(f"`checkpoints` names models that are not surveyed: {sorted(unknown)}; there are {names}")
        for chosen in self.checkpoints.values() if isinstance(self.checkpoints, Mapping) else [self.checkpoints]:
            if chosen is not None:
                check_checkpoints(chosen)
        if self.untrained and self.checkpoints is not None and not isinstance(self.checkpoints, Mapping):
            raise ValueError(
                "`untrained` is of models that are taken as they are: leave out `checkpoints`, or name models"
            )
        # Once: paths as they are meant now, and what can be walked through only once.
        object.__setattr__(self, "models", dict(named))
        object.__setattr__(self, "prompts", as_prompts(self.prompts))

    def units(self) -> list[Unit]:
        """The pieces of work, in the order of models, checkpoints and prompts."""
        prompts = as_prompts(self.prompts)
        size = self.prompts_per_unit or len(prompts)
        found = []
        for model, name in self._named():
            for checkpoint, source in self._checkpoints_of(model, name).items():
                what = {"model": model, "checkpoint": checkpoint, "source": source}
                for first in range(0, len(prompts), size):
                    key = f"{file_name(model)}@{file_name(str(checkpoint))}"
                    key += f"+{first}" if size < len(prompts) else ""
                    some = prompts[first : first + size]
                    found.append(Unit(key, what | {"prompts": [first, first + len(some)]}, (source, some)))
        return found

    def _named(self) -> list[tuple[str, str]]:
        """Each model's name in the results, and where it is."""
        if isinstance(self.models, Mapping):
            named = [(model, os.fspath(source)) for model, source in self.models.items()]
        else:
            sources = [self.models] if isinstance(self.models, str | os.PathLike) else self.models
            named = [(os.fspath(source), os.fspath(source)) for source in sources]
        if missing := [name for _, name in named if name.startswith(_PATH_BEGINNINGS) and not Path(name).is_dir()]:
            raise ValueError(f"there is no such folder: {', '.join(missing)}")
        # A folder is the same however its path is written, and wherever a worker starts.
        return [(model, str(Path(name).resolve()) if Path(name).is_dir() else name) for model, name in named]

    def _checkpoints_of(self, model: str, name: str) -> dict[Checkpoint, Source]:
        chosen = self.checkpoints.get(model) if isinstance(self.checkpoints, Mapping) else self.checkpoints
        if chosen is not None or (Path(name).is_dir() and not (Path(name) / "config.json").exists()):
            return checkpoint_sources(name, chosen)
        twin: dict[Checkpoint, Source] = {UNTRAINED: {"name": name, "untrained": True}} if self.untrained else {}
        return {MAIN: {"name": name}} | twin


@checked
def run(
    survey: Survey,
    folder: AnyPath | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Measure what a survey asks for, and open the results.

    A unit that kills its worker fails; with other executors than `process_pool` others may fail with it. The next run
    does them again. Ctrl-C ends a `process_pool` at once, and says how many units are kept.

    Args:
        survey: what.
        folder: where each unit's result is written when it is done. A run there keeps what is finished and measures
            what is missing, failed or damaged; models may be added later. A local model that changed in place since is
            not noticed. Without a folder the results are in memory only.
        executor: `None` measures one unit after the other, here. Otherwise anything with `submit`: a pool of
            concurrent.futures, a Client of dask.distributed, submitit on a SLURM cluster (one job array; preempted jobs
            are queued again). It gets names and paths, never models; the folder must lie where its workers see it.
        progress: wraps the loop over units.

    Returns:
        as `open_survey`. Units that failed are missing (NaN), with a warning; their errors are in `attrs["failed"]`.

    Raises:
        ValueError: a folder with results of another survey, or in which another run is at work.
        ModelError: not one unit could be measured.
        OSError: the folder cannot be written to; what is finished stays.

    The values do not depend on the executor, on what was interrupted or on how prompts are shared out, as long as
    torch runs with the same number of threads.

    Example:
        >>> survey = tlc.Survey(["gpt2"], tlc.load_prompts("gsm8k", n=20))  # doctest: +SKIP
        >>> with tlc.surveys.process_pool(4) as pool:  # doctest: +SKIP
        ...     data = tlc.run(survey, "out/gpt2", executor=pool)
    """
    _check_dask()
    units = survey.units()
    measure = MeasureModel(survey.settings, survey.backend, survey.device, survey.dtype)
    plan = {
        "kind": "survey",
        "prompts_per_unit": survey.prompts_per_unit,
        **measure.as_plan(as_prompts(survey.prompts)),
    }
    temporary = tempfile.TemporaryDirectory() if folder is None else nullcontext(os.fspath(folder))
    telling = nullcontext() if folder is None else saying_what_is_kept(Path(folder), units)
    with temporary as path, output_folder(path) as results, telling:
        check_plan(results, plan)
        _check_sources(results, units)
        outcomes = run_units(results, units, measure, progress, executor)
        gc.collect()
        failed = {outcome.unit.key: outcome.error for outcome in outcomes if outcome.status == "failed"}
        if len(failed) == len(outcomes):
            first = next(iter(failed.items()))
            raise ModelError(f"none of the {len(failed)} units could be measured; {first[0]}: {first[1]}")
        if failed:
            warn_caller(f"{len(failed)} of {len(outcomes)} units failed and are left out: {one_line(failed)}")
        # Of what was asked for now: other models may have failed in earlier runs.
        data = open_survey(results).assign_attrs(failed=json.dumps(failed))
        return data.load() if folder is None else data


@checked
def open_survey(folder: AnyPath) -> "xarray.Dataset":
    """What stands in a survey's folder, as one dataset; values are read when they are used.

    Args:
        folder: what `run` filled, or what `tl-coupling survey` wrote.

    Returns:
        what `measure_prompts` gives, `[model checkpoint prompt …]`, and `[model checkpoint]`: `n_layers`, `d_model`,
        `n_parameters`, `seconds` of work, `peak_memory` of the processes that did it in MiB. Coordinates of `prompt`:
        `task`, `text`. NaN where something was not measured, or where a model has fewer layers than another.
        Checkpoints are numbers if all are training steps, else text. `attrs["failed"]`: errors of units, a JSON object;
        `attrs["provenance"]`: what holds for all; `attrs["provenance_by_unit"]`: what does not though it might have
        been expected to, such as versions after an upgrade between two runs, with a warning.

    Raises:
        ValueError: no folder of a survey, or nothing in it is finished; dask is not installed.

    Cost: the checksums of all files; memory for coordinates only.
    """
    _check_dask()
    folder = Path(folder)
    if not (folder / PLAN).exists() and (folder / UNITS / PLAN).exists():
        folder = folder / UNITS
    plan = read_plan(folder)
    if plan.get("kind") != "survey" or "prompts" not in plan:
        raise ValueError(f"{folder} holds results of something else than a survey: wanted a folder that `run` filled")
    found = _records(folder)
    units = [Unit(key, record["what"]) for key, record in found.items() if record.get("status") == "finished"]
    done = [unit for unit in units if is_finished(folder, unit)]
    failed = {key: record.get("error") for key, record in found.items() if record.get("status") == "failed"}
    failed |= {unit.key: "its result is missing or damaged: run again" for unit in units if unit not in done}
    if not done:
        raise ValueError(f"{folder} holds no finished results: run the survey first")
    pieces = {unit: _opened(folder, unit) for unit in done}
    by_unit = _differing({unit: json.loads(piece.attrs["provenance"]) for unit, piece in pieces.items()})
    if by_unit:
        keys = ", ".join(next(iter(by_unit.values())))
        warnings.warn(
            f"the units in {folder} were not all measured alike: {keys} differ, attrs['provenance_by_unit'] says how",
            stacklevel=2,
        )
    by_model = {}
    for model, of_model in _grouped(done, "model").items():
        of_checkpoints = {
            c: _one_checkpoint({unit: pieces[unit] for unit in units}, found)
            for c, units in _grouped(of_model, "checkpoint").items()
        }
        by_model[model] = _concat(of_checkpoints, "checkpoint")
    labels = {label for data in by_model.values() for label in data["checkpoint"].values.tolist()}
    if len({type(label) for label in labels}) > 1:
        by_model = {m: data.assign_coords(checkpoint=data["checkpoint"].astype(str)) for m, data in by_model.items()}
        labels = {str(label) for label in labels}
    ids, tasks, texts = zip(*plan["prompts"], strict=True)
    data = _concat(by_model, "model").reindex(prompt=list(ids), checkpoint=_sorted(labels))
    data = data.assign_coords(task=("prompt", [task or "" for task in tasks]), text=("prompt", list(texts)))
    provenances = [json.loads(one.attrs["provenance"]) for one in by_model.values()]
    return data.assign_attrs(
        failed=json.dumps(failed),
        models=json.dumps({unit.what["model"]: unit.what["source"]["name"] for unit in done}),
        provenance=json.dumps(common_provenance(provenances)),
        **({"provenance_by_unit": json.dumps(by_unit)} if by_unit else {}),
    )


def _differing(provenances: Mapping[Unit, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By unit, what differs between units of one model and checkpoint, or is the same for all models as a rule."""
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for unit, one in provenances.items():
        groups.setdefault((unit.what["model"], unit.what["checkpoint"]), []).append(one)
    keys = {key for group in groups.values() for key in _unequal(group)}
    keys |= _unequal(list(provenances.values())) & set(_SAME_FOR_ALL)
    return {unit.key: {key: one.get(key) for key in sorted(keys)} for unit, one in provenances.items()} if keys else {}


def _unequal(provenances: Sequence[dict[str, Any]]) -> set[str]:
    keys = {key for one in provenances for key in one}
    return {key for key in keys if any(one.get(key) != provenances[0].get(key) for one in provenances)}


def _opened(folder: Path, unit: Unit) -> "xarray.Dataset":
    import xarray

    return xarray.open_dataset(result_path(folder, unit), engine="netcdf4", chunks={})


def _one_checkpoint(pieces: "Mapping[Unit, xarray.Dataset]", records: Mapping[str, dict[str, Any]]) -> "xarray.Dataset":
    """All prompts of one model at one checkpoint, and what is known of that model."""
    import xarray

    data = xarray.concat(pieces.values(), "prompt", join="exact", combine_attrs="drop_conflicts", data_vars="minimal")
    provenances = [json.loads(piece.attrs["provenance"]) for piece in pieces.values()]
    data = data.assign_attrs(provenance=json.dumps(common_provenance(provenances)))
    facts = provenances[0]
    return data.drop_vars("task").assign(
        n_layers=facts["n_layers"],
        d_model=facts["d_model"],
        n_parameters=facts["n_params"],
        seconds=sum(records[unit.key].get("seconds", float("nan")) for unit in pieces),
        peak_memory=max(records[unit.key].get("peak_memory") or float("nan") for unit in pieces),
    )


def _concat(pieces: "Mapping[Any, xarray.Dataset]", dim: str) -> "xarray.Dataset":
    """Datasets along a new dimension; those of other sizes are filled up with NaN."""
    import xarray
    from dask.array import PerformanceWarning

    provenances = [json.loads(piece.attrs["provenance"]) for piece in pieces.values()]
    with warnings.catch_warnings():
        # That filling up makes more chunks.
        warnings.simplefilter("ignore", PerformanceWarning)
        data = xarray.concat(pieces.values(), dim, join="outer", combine_attrs="drop_conflicts", data_vars="all")
    return data.assign_coords({dim: list(pieces)}).assign_attrs(provenance=json.dumps(common_provenance(provenances)))


def _grouped(units: Sequence[Unit], what: str) -> dict[Any, list[Unit]]:
    """Units by model or checkpoint, in order."""
    groups: dict[Any, list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: unit.what["prompts"]):
        groups.setdefault(unit.what[what], []).append(unit)
    return {label: groups[label] for label in _sorted(groups)}


def _sorted(labels: Iterable[Any]) -> list[Any]:
    """Models by name, training steps by number."""
    return sorted(labels, key=step_order)


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of every unit; records that are not of units of a survey are as if they were not there."""
    found = all_records(folder)
    return {key: one for key, one in found.items() if one["what"].keys() >= _UNIT_KEYS}


def _check_dask() -> None:
    if importlib.util.find_spec("dask") is None:
        raise ValueError('a survey needs dask to be opened: pip install "tl-coupling[survey]"')


def _check_sources(folder: Path, units: Sequence[Unit]) -> None:
    """Raise where a name stands for another model than before: its results would be overwritten."""
    there = _records(folder)
    for unit in units:
        before = there.get(unit.key, {}).get("what", unit.what)
        if before["source"]["name"] != unit.what["source"]["name"]:
            raise ValueError(
                f"{folder} holds results of {before['source']['name']!r} as {unit.what['model']!r}, asked for is "
                f"{unit.what['source']['name']!r}: give it another name, or choose another folder"
            )
