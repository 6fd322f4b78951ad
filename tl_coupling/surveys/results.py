"""The results of a survey: its finished units as one dataset, with what they share and
where they differ.
"""

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_coupling.arguments import AnyPath, checked, warn_caller
from tl_coupling.surveys.checkpoints import Checkpoint, step_order
from tl_coupling.surveys.units import (
    PLAN,
    Folder,
    Unit,
    is_finished,
    is_of_its_plan,
    load_unit,
    record,
    why_unfinished,
)

if TYPE_CHECKING:
    import xarray

# Where `tl-coupling survey` puts a survey, beside its tables and pictures.
UNITS = "units"
# What every unit cost, and what is known of its model, by the names in the provenance.
COSTS = ("seconds", "peak_memory")
FACTS = {"n_layers": "n_layers", "d_model": "d_model", "n_parameters": "n_params"}
# The same for all units, unless they were measured in different runs.
_SAME_FOR_ALL = {"device", "versions"}


@checked
def open_survey(folder: AnyPath) -> "xarray.Dataset":
    """The results in a folder of `run` or `checkpoint_sweep`, in memory unless they are
    larger than half of it.

    Returns:
        what `measure_prompts` gives, `[model checkpoint prompt …]`, and `[model
        checkpoint]`: `n_layers`, `d_model`, `n_parameters`, `seconds` of work,
        `peak_memory` of the processes that did it in MiB. Coordinates of `prompt`:
        `task`, `text`. NaN where something was not measured, or where a model has fewer
        layers than another. Checkpoints are numbers if all are training steps, else
        text. `attrs["failed"]`: errors of units, a JSON object; `attrs["provenance"]`:
        what holds for all; `attrs["provenance_by_unit"]`: what differs between units
        though it should not, such as versions after an upgrade between two runs, with a
        warning.

    ValueError where it is no folder of a survey, or one of an older version, or nothing
    in it is finished, or dask is missing and the results are larger than memory. Cost:
    the checksums of all files.

    Example:
        >>> data = tlc.open_survey("survey")  # of `tlc.run(survey, "survey")`
        >>> data.d_model.sel(model="width12").item(), data.attrs["failed"]
        (12, '{}')
    """
    places = Path(folder), Path(folder, UNITS)
    results = Folder(
        next((place for place in places if (place / PLAN).exists()), places[0])
    )
    if results.plan.get("kind") != "survey":
        raise ValueError(
            f"{results.path} holds results of something else than a survey"
        )
    if not (finished := finished_units(results)):
        raise ValueError(
            f"{results.path} holds no finished results: run the survey first"
        )
    known, keys = records_of(results), {unit.key for unit in finished}
    failed = {key: one.get("error") for key, one in known.items() if key not in keys}
    failed |= dict.fromkeys(
        path.stem for path in results.path.glob("[!.]*.nc") if path.stem not in known
    )
    failed = {
        key: error or why_unfinished(results.path, Unit(key, {}))
        for key, error in sorted(failed.items())
    }
    return joined_units(results, finished).assign_attrs(failed=json.dumps(failed))


def records_of(folder: Folder) -> dict[str, dict[str, Any]]:
    """What is known of every unit, by key.

    Records that cannot be read, are of another plan, or are not of a survey's unit are
    left out.
    """
    keys = sorted(
        path.stem for path in folder.path.glob("[!.]*.json") if path.name != PLAN
    )
    found = {key: record(folder.path, Unit(key, {})) or {} for key in keys}
    wanted = {"model", "checkpoint", "source", "prompts"}
    return {
        key: content
        for key, content in found.items()
        if isinstance(unit := content.get("what"), dict)
        and unit.keys() >= wanted
        and is_of_its_plan(folder.path, content)
    }


def finished_units(folder: Folder) -> list[Unit]:
    """All units whose results are there and undamaged."""
    units = [Unit(key, one["what"]) for key, one in records_of(folder).items()]
    return [unit for unit in units if is_finished(folder.path, unit)]


def joined_units(folder: Folder, units: Sequence[Unit]) -> "xarray.Dataset":
    """Finished units as one dataset, with the provenance that they share and a warning
    about what differs.
    """
    mixed = len({type(unit.what["checkpoint"]) for unit in units}) > 1
    cells: dict[tuple[str, Checkpoint], list[Unit]] = {}
    for unit in sorted(
        units, key=lambda unit: (step_order(unit.what["model"]), unit.what["prompts"])
    ):
        checkpoint = str(unit.what["checkpoint"]) if mixed else unit.what["checkpoint"]
        cells.setdefault((unit.what["model"], checkpoint), []).append(unit)
    models = list(dict.fromkeys(model for model, _ in cells))
    labels = sorted({checkpoint for _, checkpoint in cells}, key=step_order)
    lazily = _larger_than_memory(folder.path, len(models) * len(labels), cells.values())
    pieces = {unit: load_unit(folder.path, unit, lazily) for unit in units}
    provenances = {
        unit: json.loads(piece.attrs.pop("provenance"))
        for unit, piece in pieces.items()
    }
    common, records = _common(provenances.values()), records_of(folder)
    # Between units of one model and checkpoint, or what usually is the same for all.
    differing, of_cells = _SAME_FOR_ALL - common.keys(), {}
    for cell, some in cells.items():
        of_some = [provenances[unit] for unit in some]
        differing |= {key for one in of_some for key in one.keys() - _common(of_some)}
        seconds, memory = (
            [records[unit.key].get(cost) or float("nan") for unit in some]
            for cost in COSTS
        )
        facts = {name: of_some[0][key] for name, key in FACTS.items()}
        data = _concat([pieces[unit].drop_vars("task") for unit in some], "prompt")
        of_cells[cell] = data.assign(
            facts | {"seconds": sum(seconds), "peak_memory": max(memory)}
        )
    of_models = []
    for model in models:
        there = [checkpoint for checkpoint in labels if (model, checkpoint) in cells]
        of_model = _concat(
            [of_cells[model, checkpoint] for checkpoint in there], "checkpoint"
        )
        of_models.append(of_model.assign_coords(checkpoint=there))
    ids, tasks, texts = zip(*folder.plan["prompts"], strict=True)
    data = (
        _concat(of_models, "model")
        .assign_coords(model=models)
        .reindex(prompt=list(ids), checkpoint=labels)
    )
    data = data.assign_coords(
        task=("prompt", [task or "" for task in tasks]), text=("prompt", list(texts))
    )
    # Which checkpoint it was is a coordinate.
    common.pop("checkpoint", None)
    sources = {unit.what["model"]: unit.what["source"]["name"] for unit in units}
    data = data.assign_attrs(models=json.dumps(sources), provenance=json.dumps(common))
    if differing:
        warn_caller(
            f"the units in {folder.path} were not all measured alike: {', '.join(sorted(differing))} differ, "
            "attrs['provenance_by_unit'] says how"
        )
        by_unit = {
            unit.key: {key: one.get(key) for key in sorted(differing)}
            for unit, one in provenances.items()
        }
        data = data.assign_attrs(provenance_by_unit=json.dumps(by_unit))
    return data


def _concat(pieces: "list[xarray.Dataset]", dim: str) -> "xarray.Dataset":
    """Datasets along a dimension; those of other sizes are filled up with NaN."""
    import xarray

    which: Any = "minimal" if dim == "prompt" else "all"
    with warnings.catch_warnings():
        # dask's, that filling up makes more chunks.
        warnings.simplefilter("ignore")
        return xarray.concat(
            pieces, dim, join="outer", combine_attrs="drop_conflicts", data_vars=which
        )


def _larger_than_memory(
    folder: Path, n_cells: int, cells: Iterable[Sequence[Unit]]
) -> bool:
    """Whether the results, filled up to equal sizes, take more than half of this
    machine's memory.
    """
    n_bytes = n_cells * max(
        sum((folder / f"{unit.key}.nc").stat().st_size for unit in units)
        for units in cells
    )
    if (is_larger := 2 * n_bytes > _memory()) and importlib.util.find_spec(
        "dask"
    ) is None:
        raise ValueError(
            f"the results in {folder} take {n_bytes / 2**30:.1f} GiB, over half of this machine's memory; to read "
            'them piece by piece install dask: pip install "tl-coupling[survey]"'
        )
    return is_larger


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not on Windows.
    except (AttributeError, ValueError):
        return 8 << 30


def _common(provenances: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What is the same in all."""
    first, *others = provenances
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
