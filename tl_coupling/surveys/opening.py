"""The results of surveys: opened, and joined into one dataset."""

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_coupling.border import AnyPath, checked, warn_caller
from tl_coupling.surveys.checkpoints import Checkpoint, step_order
from tl_coupling.surveys.units import PLAN, Folder, Unit, is_finished, load_unit

if TYPE_CHECKING:
    import xarray

# Where `tl-coupling survey` puts a survey, beside its tables and pictures.
UNITS = "units"
COSTS = ("seconds", "peak_memory")
FACTS = {"n_layers": "n_layers", "d_model": "d_model", "n_parameters": "n_params"}
# The same for all units, unless they were measured in different runs.
_SAME_FOR_ALL = {"device", "versions"}


@checked
def open_survey(folder: AnyPath) -> "xarray.Dataset":
    """The results in a survey's folder as one dataset, in memory unless they are larger than half of it.

    Args:
        folder: that `run` or `checkpoint_sweep` filled, or that `tl-coupling survey` wrote.

    Returns:
        what `measure_prompts` gives, `[model checkpoint prompt …]`, and `[model checkpoint]`: `n_layers`, `d_model`,
        `n_parameters`, `seconds` of work, `peak_memory` of the processes that did it in MiB. Coordinates of `prompt`:
        `task`, `text`. NaN where something was not measured, or where a model has fewer layers than another.
        Checkpoints are numbers if all are training steps, else text. `attrs["failed"]`: errors of units, a JSON object;
        `attrs["provenance"]`: what holds for all; `attrs["provenance_by_unit"]`: what differs between units though it
        should not, such as versions after an upgrade between two runs, with a warning.

    Raises:
        ValueError: not a folder of a survey, or of an older version; nothing in it is finished; dask is missing where
            the results are larger than memory.

    Cost: the checksums of all files.
    """
    folder = Path(folder)
    if not (folder / PLAN).exists() and (folder / UNITS / PLAN).exists():
        folder = folder / UNITS
    return all_finished(Folder(folder))


def all_finished(folder: Folder, _: Sequence[Unit] = ()) -> "xarray.Dataset":
    """`open_survey` of a folder whose plan is known."""
    if folder.plan.get("kind") != "survey":
        raise ValueError(f"{folder.path} holds results of something else than a survey")
    records = survey_records(folder)
    units = [Unit(key, one["what"]) for key, one in records.items() if one.get("status") == "finished"]
    done = [unit for unit in units if is_finished(folder.path, unit)]
    if not done:
        raise ValueError(f"{folder.path} holds no finished results: run the survey first")
    failed = {key: one.get("error") for key, one in records.items() if one.get("status") == "failed"}
    failed |= {unit.key: "its result is missing or damaged: run again" for unit in units if unit not in done}
    return joined(folder, done).assign_attrs(failed=json.dumps(failed))


def joined(folder: Folder, units: Sequence[Unit]) -> "xarray.Dataset":
    """Finished units as one dataset, with the provenance that they share and a warning about what differs."""
    mixed = len({type(unit.what["checkpoint"]) for unit in units}) > 1
    tree: dict[str, dict[Checkpoint, list[Unit]]] = {}
    for unit in sorted(units, key=lambda unit: unit.what["prompts"]):
        checkpoint = str(unit.what["checkpoint"]) if mixed else unit.what["checkpoint"]
        tree.setdefault(unit.what["model"], {}).setdefault(checkpoint, []).append(unit)
    labels = _in_order({checkpoint for of_model in tree.values() for checkpoint in of_model})
    lazily = _larger_than_memory(
        folder.path, len(tree) * len(labels), [u for one in tree.values() for u in one.values()]
    )
    pieces = {unit: load_unit(folder.path, unit, lazily) for unit in units}
    provenances = {unit: json.loads(piece.attrs.pop("provenance")) for unit, piece in pieces.items()}
    records = survey_records(folder)

    def of_one(units: Sequence[Unit]) -> "xarray.Dataset":
        seconds, memory = ([records[unit.key].get(cost) or float("nan") for unit in units] for cost in COSTS)
        facts = {name: provenances[units[0]][key] for name, key in FACTS.items()}
        data = _concat([pieces[unit].drop_vars("task") for unit in units], "prompt")
        return data.assign(facts | {"seconds": sum(seconds), "peak_memory": max(memory)})

    by_model = {}
    for model in _in_order(tree):
        of_model = {checkpoint: of_one(tree[model][checkpoint]) for checkpoint in _in_order(tree[model])}
        by_model[model] = _concat(of_model.values(), "checkpoint").assign_coords(checkpoint=list(of_model))
    ids, tasks, texts = zip(*folder.plan["prompts"], strict=True)
    data = _concat(by_model.values(), "model").assign_coords(model=list(by_model))
    data = data.reindex(prompt=list(ids), checkpoint=labels)
    data = data.assign_coords(task=("prompt", [task or "" for task in tasks]), text=("prompt", list(texts)))
    # Which checkpoint it was is a coordinate.
    common = {key: value for key, value in _common(list(provenances.values())).items() if key != "checkpoint"}
    models = {unit.what["model"]: unit.what["source"]["name"] for unit in units}
    attrs = {"models": json.dumps(models), "provenance": json.dumps(common)}
    if differing := _differing(provenances):
        attrs["provenance_by_unit"] = json.dumps(
            {unit.key: {key: one.get(key) for key in differing} for unit, one in provenances.items()}
        )
        warn_caller(
            f"the units in {folder.path} were not all measured alike: {', '.join(differing)} differ, "
            "attrs['provenance_by_unit'] says how"
        )
    return data.assign_attrs(attrs)


def _concat(pieces: "Iterable[xarray.Dataset]", dim: str) -> "xarray.Dataset":
    """Datasets along a dimension; those of other sizes are filled up with NaN."""
    import xarray

    which: Any = "minimal" if dim == "prompt" else "all"
    with warnings.catch_warnings():
        # dask's, that filling up makes more chunks.
        warnings.simplefilter("ignore")
        return xarray.concat(list(pieces), dim, join="outer", combine_attrs="drop_conflicts", data_vars=which)


def _larger_than_memory(folder: Path, n_cells: int, cells: Sequence[Sequence[Unit]]) -> bool:
    """Whether the results, filled up to equal sizes, take more than half of this machine's memory."""
    n_bytes = n_cells * max(sum((folder / f"{unit.key}.nc").stat().st_size for unit in units) for units in cells)
    if 2 * n_bytes <= _memory():
        return False
    if importlib.util.find_spec("dask") is None:
        raise ValueError(
            f"the results in {folder} take {n_bytes / 2**30:.1f} GiB, over half of this machine's memory; to read "
            'them piece by piece install dask: pip install "tl-coupling[survey]"'
        )
    return True


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not on Windows.
    except (AttributeError, ValueError):
        return 8 << 30


def _differing(provenances: Mapping[Unit, dict[str, Any]]) -> list[str]:
    """What differs between units of one model and checkpoint, or usually is the same for all."""
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for unit, one in provenances.items():
        groups.setdefault((unit.what["model"], unit.what["checkpoint"]), []).append(one)
    everywhere = _SAME_FOR_ALL - _common(list(provenances.values())).keys()
    return sorted(
        {key for group in groups.values() for one in group for key in one.keys() - _common(group)} | everywhere
    )


def _common(provenances: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is the same in all."""
    first, *others = provenances
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _in_order(labels: Iterable[Any]) -> list[Any]:
    return sorted(labels, key=step_order)


def survey_records(folder: Folder) -> dict[str, dict[str, Any]]:
    """Records of units of surveys; any others are ignored."""
    return {
        key: one
        for key, one in folder.records().items()
        if one["what"].keys() >= {"model", "checkpoint", "source", "prompts"}
    }
