"""Local models that must stay what they are: from a run's first unit to its last, and
from one run to the next.
"""

from collections.abc import Sequence
from dataclasses import replace

from tl_coupling.models import ModelError, changed_file, described_files
from tl_coupling.studies.surveys.checkpoints import is_local
from tl_coupling.studies.surveys.records import (
    FILES,
    Record,
    Unit,
    is_of_its_plan,
    record,
)
from tl_coupling.studies.surveys.units import Folder

# A model's files by name, with their sizes, states and checksums.
Files = dict[str, list[str | int]]


def attach_files(results: Folder, units: Sequence[Unit]) -> list[Unit]:
    """Return units with a description of the files that their model is read from.

    Hub models have none.

    Raises:
        ValueError: results of the same units were measured on files of other content.
            Results of earlier versions do not say which.

    Cost: the files of models that are to be measured are read once, and those whose
    state (inode, size, time) is not that of the last run.
    """
    measured_files: dict[str, Files] = {}
    names_to_measure: set[str] = set()
    for unit in units:
        name = _model_name(unit)
        if not is_local(name):
            continue
        content = record(results.path, unit) or {}
        if not _is_measured(results, content):
            names_to_measure.add(name)
        # A description of the last run spares reading files whose state is the same.
        elif FILES in content:
            _check_unchanged(results, name, content["files"])
            measured_files[name] = content["files"]
    descriptions = {
        name: described_files(name, measured_files.get(name, {}))
        for name in names_to_measure | measured_files.keys()
    }
    return [_described(unit, descriptions) for unit in units]


def _model_name(unit: Unit) -> str:
    name: str = unit.subject["source"]["name"]
    return name


def _is_measured(results: Folder, content: Record) -> bool:
    """Say whether a record is of a finished unit of the folder's plan."""
    is_finished = content.get("status") == "finished"
    return is_finished and is_of_its_plan(results.path, content)


def _check_unchanged(results: Folder, name: str, files: Files) -> None:
    """Raise ValueError where a model's files are not those that were measured."""
    if file := changed_file(name, files):
        raise ValueError(
            f"{results.path} holds results of {name}, where {file!r} is another file "
            "now: restore it, or measure the new model in another folder of results"
        )


def _described(unit: Unit, descriptions: dict[str, Files]) -> Unit:
    """Return the unit with the description of its files as a fact, if there is one."""
    name = _model_name(unit)
    if name not in descriptions:
        return unit
    return replace(unit, facts={**unit.facts, FILES: descriptions[name]})


def check_files(unit: Unit) -> None:
    """Raise ModelError where a model's files changed since its run began."""
    name = _model_name(unit)
    files = unit.facts.get(FILES)
    if files is not None and (file := changed_file(name, files)):
        raise ModelError(
            f"{file!r} in {name} was changed, replaced or removed after this run "
            "began: restore it and run again, or measure the new model in another "
            "folder of results"
        )
