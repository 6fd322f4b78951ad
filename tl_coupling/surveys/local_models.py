"""Local models that must stay what they are: from a run's first unit to its last, and
from one run to the next.
"""

from collections.abc import Sequence
from dataclasses import replace

from tl_coupling.models import ModelError, changed_file, described_files
from tl_coupling.surveys.checkpoints import is_local
from tl_coupling.surveys.units import Folder, Unit, is_of_its_plan, record

# What records call the description of a model's files.
FILES = "files"


def with_files(results: Folder, units: Sequence[Unit]) -> list[Unit]:
    """Units with a description of the files that their model is read from now, where it
    is a local one.

    Raises ValueError where results of the same units were measured on files of other
    content. Results of earlier versions do not say which.

    Cost: the files of models that are to be measured are read once, and those whose
    state (inode, size, time) is not that of the last run.
    """
    measured_files: dict[str, dict[str, list[str | int]]] = {}
    names_to_measure: set[str] = set()
    for unit in units:
        name = unit.what["source"]["name"]
        if not is_local(name):
            continue
        content = record(results.path, unit) or {}
        if content.get("status") != "finished" or not is_of_its_plan(
            results.path, content
        ):
            names_to_measure.add(name)
        elif FILES in content:
            if changed := changed_file(name, content[FILES]):
                raise ValueError(
                    f"{results.path} holds results of {name}, where {changed!r} is another file now: restore it, or "
                    "measure the new model in another folder of results"
                )
            measured_files[name] = content[FILES]
    described = {
        name: described_files(name, measured_files.get(name, {}))
        for name in names_to_measure | measured_files.keys()
    }
    return [
        replace(unit, facts={**unit.facts, FILES: described[name]})
        if (name := unit.what["source"]["name"]) in described
        else unit
        for unit in units
    ]


def check_files(unit: Unit) -> None:
    """Raise ModelError where the files of a unit's model are no longer what they were
    when its run began.
    """
    name = unit.what["source"]["name"]
    files = unit.facts.get(FILES)
    if files is not None and (changed := changed_file(name, files)):
        raise ModelError(
            f"{changed!r} in {name} was changed, replaced or removed after this run began: restore it and run "
            "again, or measure the new model in another folder of results"
        )
