"""The results of a survey: its finished units as one dataset, with what they share and
where they differ.
"""

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tl_coupling.arguments import AnyPath, checked, warn_caller
from tl_coupling.results import common_facts, differing_facts
from tl_coupling.studies.surveys.checkpoints import Checkpoint, step_order
from tl_coupling.studies.surveys.joined_folders import joined_folders
from tl_coupling.studies.surveys.records import (
    FILES,
    PLAN,
    Record,
    Unit,
    is_finished,
    is_of_its_plan,
    load_unit,
    planned_keys,
    record,
    result_path,
    why_unfinished,
)
from tl_coupling.studies.surveys.units import Folder

if TYPE_CHECKING:
    import xarray

# Where `tl-coupling survey` puts a survey, beside its tables and pictures.
UNITS = "units"
# The costs of every unit, and the facts about its model with their names in the
# provenance.
COSTS = ("seconds", "peak_memory")
FACTS = {"n_layers": "n_layers", "d_model": "d_model", "n_parameters": "n_params"}
# The same for all units, unless they were measured in different runs.
_SAME_FOR_ALL = {"device", "versions"}
# Units of earlier versions and of streamed models lack the digest of the weights.
_WEIGHTS = "weights_digest"
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
# The keys by which a record describes a survey's unit.
_SURVEY_KEYS = {"model", "checkpoint", "source", "prompts"}
# A model and a checkpoint: the units of its prompts make one piece of data.
Cell = tuple[str, Checkpoint]
Provenance = dict[str, Any]


@checked
def open_survey(folder: AnyPath | Sequence[AnyPath]) -> "xarray.Dataset":
    """Return the results in a folder of `run_survey` or `checkpoint_sweep`.

    They are in memory unless they are larger than half of it. Several folders, the
    shards of a job array, are joined: surveys with the same settings, each of other
    models, checkpoints or prompts, which have ids of their own. Units are then named
    with their folder. Warnings count models and prompts that no folder has together, and
    folders with nothing finished, which are left out.

    Returns:
        what `measure_prompts` gives, `[model checkpoint prompt …]`, and `[model
        checkpoint]`: `n_layers`, `d_model`, `n_parameters`, `seconds` of work,
        `peak_memory` of the processes that did it in MiB. Coordinates of `prompt`:
        `task`, `text`. NaN where something was not measured, or where a model has fewer
        layers than another. Checkpoints are numbers if all are training steps, else
        text. `attrs["failed"]`: errors of units, a JSON object; `attrs["missing"]`: all
        units of the survey that are not finished, a JSON list, with a warning where
        there are any, as in a survey that is still running; `attrs["provenance"]`: what
        holds for all; `attrs["provenance_by_unit"]`: what differs between units
        though it should not, such as versions after an upgrade between two runs, with a
        warning; `attrs["weights_digests"]`: what tells the weights of each model and
        checkpoint from others, a JSON object, with a warning where two have the same.

    ValueError where it is no folder of a survey, or one of an older version, or nothing
    in it is finished, or dask is missing and the results are larger than memory; of
    several folders, where settings differ, something was measured in two of them, one
    id stands for two prompts, or one name for two models. Cost: the checksums of all
    files.

    Example:
        >>> data = tlc.open_survey("survey")  # of `tlc.run_survey(survey, "survey")`
        >>> data.d_model.sel(model="width12").item(), data.attrs["failed"]
        (12, '{}')
    """
    if not isinstance(folder, str | os.PathLike):
        folders = {str(path): _folder_of_units(path) for path in folder}
        if len(folders) < len(folder) or not folders:
            raise ValueError(
                f"`folder` must be different folders of surveys, got {list(folder)}"
            )
        if len(folders) > 1:
            return _joined(folders)
        [folder] = folders
    return _opened(_folder_of_units(folder))


def _joined(folders: Mapping[str, Folder]) -> "xarray.Dataset":
    """Return the results in several folders, and warn of those that have none."""
    finished = {name: finished_units(results) for name, results in folders.items()}
    unfinished = [name for name, units in finished.items() if not units]
    if len(unfinished) == len(folders):
        raise ValueError(
            f"none of {len(folders)} folders, the first is {unfinished[0]}, holds "
            "finished results: run the surveys first"
        )
    surveys = {
        name: _opened(results, finished[name])
        for name, results in folders.items()
        if finished[name]
    }
    plans = {name: results.plan for name, results in folders.items()}
    data = joined_folders(surveys, plans)
    if not unfinished:
        return data
    warn_caller(
        f"{len(unfinished)} of {len(folders)} folders hold no finished results, the "
        f"first is {unfinished[0]}, and means leave them out: run their surveys again "
        "(attrs['failed'] has their errors)"
    )
    failed = json.loads(data.attrs["failed"])
    missing = json.loads(data.attrs["missing"])
    for name in unfinished:
        errors = _errors(folders[name], set())
        failed |= {f"{name}: {unit}": error for unit, error in errors.items()}
        units = missing_units(folders[name], [], errors)
        missing += [f"{name}: {unit}" for unit in units]
    return data.assign_attrs(failed=json.dumps(failed), missing=json.dumps(missing))


def _folder_of_units(folder: AnyPath) -> Folder:
    """Return the folder of a survey, which may be in that of a command."""
    path = Path(folder)
    # The folder of a command may be given as well as that of its units.
    is_of_a_command = not (path / PLAN).exists() and (path / UNITS / PLAN).exists()
    results = Folder(path / UNITS if is_of_a_command else path)
    if results.plan.get("kind") != "survey":
        raise ValueError(
            f"{results.path} holds results of something other than a survey"
        )
    return results


def _opened(
    results: Folder, finished: Sequence[Unit] | None = None
) -> "xarray.Dataset":
    """Return the results in one folder, and warn where units are missing."""
    finished = finished_units(results) if finished is None else finished
    if not finished:
        raise ValueError(
            f"{results.path} holds no finished results: run the survey first"
        )
    failed = _errors(results, {unit.key for unit in finished})
    missing = missing_units(results, finished, failed)
    if missing:
        n_units = len(finished) + len(missing)
        warn_caller(
            f"{len(missing)} of {n_units} units in {results.path} are missing, the "
            f"first is {missing[0]!r}, and means leave them out: run the survey again, "
            "which keeps finished units (attrs['missing'] lists the others)"
        )
    data = joined_units(results, finished)
    return data.assign_attrs(failed=json.dumps(failed), missing=json.dumps(missing))


def missing_units(
    folder: Folder, finished: Sequence[Unit], failed: Iterable[str]
) -> list[str]:
    """Return the keys of units that were planned or failed and are not finished."""
    finished_keys = {unit.key for unit in finished}
    keys = dict.fromkeys([*planned_keys(folder.path), *failed])
    return [key for key in keys if key not in finished_keys]


def _errors(folder: Folder, finished_keys: set[str]) -> dict[str, str]:
    """Return why units are not finished, by key."""
    records = records_of(folder)
    # A dot in front is that of a file which is being written.
    result_keys = {path.stem for path in folder.path.glob("[!.]*.nc")}
    unfinished_keys = records.keys() - finished_keys
    # A result without a record may be incomplete.
    unrecorded_keys = result_keys - records.keys()
    errors = {}
    for key in sorted(unfinished_keys | unrecorded_keys):
        recorded = records[key].get("error") if key in records else None
        errors[key] = recorded or why_unfinished(folder.path, Unit(key, {}))
    return errors


def records_of(folder: Folder) -> dict[str, Record]:
    """Return what is known of every unit, by key.

    Records that cannot be read, are of another plan, or are not of a survey's unit are
    left out.
    """
    paths = folder.path.glob("[!.]*.json")
    records = {}
    for key in sorted(path.stem for path in paths if path.name != PLAN):
        content = record(folder.path, Unit(key, {})) or {}
        if _is_of_a_survey(content) and is_of_its_plan(folder.path, content):
            records[key] = content
    return records


def _is_of_a_survey(content: Record) -> bool:
    subject = content.get("what")
    return isinstance(subject, dict) and subject.keys() >= _SURVEY_KEYS


def finished_units(folder: Folder) -> list[Unit]:
    """Return all units whose results are there and undamaged."""
    units = [Unit(key, content["what"]) for key, content in records_of(folder).items()]
    return [unit for unit in units if is_finished(folder.path, unit)]


def joined_units(folder: Folder, units: Sequence[Unit]) -> "xarray.Dataset":
    """Return finished units as one dataset, with the provenance that they share.

    Warns about what differs though it should not.
    """
    cells = _cells(units)
    models = list(dict.fromkeys(model for model, _ in cells))
    labels = sorted({checkpoint for _, checkpoint in cells}, key=step_order)
    n_cells = len(models) * len(labels)
    lazily = _larger_than_memory(folder.path, n_cells, cells.values())
    pieces = {unit: load_unit(folder.path, unit, lazily) for unit in units}
    provenances: dict[Unit, Provenance] = {
        unit: json.loads(piece.attrs.pop("provenance"))
        for unit, piece in pieces.items()
    }
    records = records_of(folder)
    model_datasets = []
    for model in models:
        checkpoint_data = {
            label: _joined_prompts(cells[model, label], pieces, provenances, records)
            for label in labels
            if (model, label) in cells
        }
        model_data = _concat(list(checkpoint_data.values()), "checkpoint")
        model_datasets.append(
            model_data.assign_coords(checkpoint=list(checkpoint_data))
        )
    ids, tasks, texts = zip(*folder.plan["prompts"], strict=True)
    task_names = [task or "" for task in tasks]
    data = _concat(model_datasets, "model").assign_coords(model=models)
    # Joined in the order in which they appear: all prompts of the plan, measured or
    # not, in its order.
    data = data.reindex(prompt=list(ids), checkpoint=labels)
    data = data.assign_coords(task=("prompt", task_names), text=("prompt", list(texts)))
    sources = {unit.subject["model"]: unit.subject["source"]["name"] for unit in units}
    common = common_facts(*provenances.values())
    # Which checkpoint it was is a coordinate.
    common.pop("checkpoint", None)
    data = data.assign_attrs(models=json.dumps(sources), provenance=json.dumps(common))
    digests = {
        f"{model}@{label}": provenances[cells[model, label][0]].get(_WEIGHTS)
        for model in models
        for label in labels
        if (model, label) in cells
    }
    data = data.assign_attrs(weights_digests=json.dumps(digests))
    _warn_of_same_weights(cells, provenances, records)
    return _attach_differences(data, folder, cells, provenances)


def _cells(units: Sequence[Unit]) -> dict[Cell, list[Unit]]:
    """Return the units of each model and checkpoint, in the order of their prompts."""
    # Steps beside "main" or "untrained" are text, as these are.
    checkpoint_types = {type(unit.subject["checkpoint"]) for unit in units}
    is_mixed = len(checkpoint_types) > 1
    sorted_units = sorted(
        units,
        key=lambda unit: (step_order(unit.subject["model"]), unit.subject["prompts"]),
    )
    cells: dict[Cell, list[Unit]] = {}
    for unit in sorted_units:
        checkpoint = unit.subject["checkpoint"]
        label = str(checkpoint) if is_mixed else checkpoint
        cells.setdefault((unit.subject["model"], label), []).append(unit)
    return cells


def _joined_prompts(
    units: Sequence[Unit],
    pieces: "Mapping[Unit, xarray.Dataset]",
    provenances: Mapping[Unit, Provenance],
    records: Mapping[str, Record],
) -> "xarray.Dataset":
    """Return the prompts of one model and checkpoint, its size, and what they cost."""
    data = _concat([pieces[unit].drop_vars("task") for unit in units], "prompt")
    provenance = provenances[units[0]]
    facts = {name: provenance[key] for name, key in FACTS.items()}
    # Not every system says how much memory was used.
    seconds = [records[unit.key].get("seconds") or float("nan") for unit in units]
    memory = [records[unit.key].get("peak_memory") or float("nan") for unit in units]
    # Units of one model add up in time; in memory only if they run at once, which
    # nobody knows.
    return data.assign({**facts, "seconds": sum(seconds), "peak_memory": max(memory)})


def _attach_differences(
    data: "xarray.Dataset",
    folder: Folder,
    cells: Mapping[Cell, Sequence[Unit]],
    provenances: Mapping[Unit, Provenance],
) -> "xarray.Dataset":
    """Return the data with what differs between units though it should not.

    That is what differs between units of one model and checkpoint, or what usually is
    the same for all. Warns where there is any.
    """
    differing = set(differing_facts(list(provenances.values()), _SAME_FOR_ALL))
    for units in cells.values():
        cell_provenances = [provenances[unit] for unit in units]
        differing.update(
            differing_facts(cell_provenances, set().union(*cell_provenances))
        )
    if not differing:
        return data
    names = sorted(differing)
    warn_caller(
        f"the units in {folder.path} were not all measured alike: {', '.join(names)} "
        "differ; attrs['provenance_by_unit'] says how"
    )
    values_by_unit = {
        unit.key: {name: provenance.get(name) for name in names}
        for unit, provenance in provenances.items()
    }
    return data.assign_attrs(provenance_by_unit=json.dumps(values_by_unit))


def _warn_of_same_weights(
    cells: Mapping[Cell, Sequence[Unit]],
    provenances: Mapping[Unit, Provenance],
    records: Mapping[str, Record],
) -> None:
    """Warn where models or checkpoints from different sources have the same weights.

    A model that was given several names on purpose has one source.
    """
    names_by_weights: dict[object, list[str]] = {}
    sources_by_weights: dict[object, set[str]] = {}
    for (model, checkpoint), (first, *_) in cells.items():
        weights = provenances[first].get(_WEIGHTS) or _weight_files(records[first.key])
        if not weights:
            continue
        names_by_weights.setdefault(weights, []).append(f"{model}@{checkpoint}")
        source = json.dumps(first.subject["source"], sort_keys=True)
        sources_by_weights.setdefault(weights, set()).add(source)
    for weights, names in names_by_weights.items():
        if len(sources_by_weights[weights]) > 1:
            warn_caller(
                f"{', '.join(names)} have the same weights: one model was measured "
                f"{len(names)} times; see whether each of these folders or revisions "
                "holds weights of its own"
            )


def _weight_files(content: Record) -> tuple[str | int, ...]:
    """Return the checksums of the files of a local model's weights, if known."""
    files: Any = content.get(FILES) or {}
    return tuple(
        files[name][0] for name in sorted(files) if name.endswith(_WEIGHT_FILES)
    )


def _concat(pieces: "list[xarray.Dataset]", dim: str) -> "xarray.Dataset":
    """Join datasets along a dimension; fill up those of other sizes with NaN."""
    import xarray

    # Variables without prompts, such as a model's layers, stay without them.
    joined_vars: Literal["minimal", "all"] = "minimal" if dim == "prompt" else "all"
    with warnings.catch_warnings():
        # dask's, that filling up makes more chunks.
        warnings.simplefilter("ignore")
        return xarray.concat(
            pieces,
            dim,
            join="outer",
            combine_attrs="drop_conflicts",
            data_vars=joined_vars,
        )


def _larger_than_memory(
    folder: Path, n_cells: int, cells: Iterable[Sequence[Unit]]
) -> bool:
    """Say whether the results take more than half of this machine's memory.

    They are filled up to equal sizes. Raises ValueError where they do and dask, which
    would read them piece by piece, is missing.
    """
    largest = max(
        sum(result_path(folder, unit).stat().st_size for unit in units)
        for units in cells
    )
    n_bytes = n_cells * largest
    if 2 * n_bytes <= _memory():
        return False
    if importlib.util.find_spec("dask") is None:
        raise ValueError(
            f"the results in {folder} take {n_bytes / 2**30:.1f} GiB, over half of "
            "this machine's memory; to read them piece by piece install dask: "
            'pip install "tl-coupling[survey]"'
        )
    return True


def _memory() -> int:
    """Return this machine's memory in bytes, 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not on Windows.
    except (AttributeError, ValueError):
        return 8 << 30
