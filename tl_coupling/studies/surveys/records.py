"""What a folder of results holds on disk: its plan, and a result and a record for each
unit of work.

`plan.json` says what is measured. Of each unit, `KEY.nc` is the result and `KEY.json`
the record: finished, with the result's checksum, or failed, with the error. Plan and
records hold a digest of their own content, so that one that was damaged is not
believed. Records of earlier versions, which hold no plan, are taken to be of the plan
beside them. `planned.json` lists the units of all runs, so that one without files is
known to be missing.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from tl_coupling.arguments import fork_safe_lock
from tl_coupling.files import remove_left_overs, write_atomically
from tl_coupling.interrupts import interrupts_held

if TYPE_CHECKING:
    import xarray

PLAN = "plan.json"
PLANNED = "planned.json"
# The format of plans, records and results.
VERSION = 2
# The netCDF library is not thread-safe.
_netcdf = fork_safe_lock()
# The key of a record under which the description of its model's files is.
FILES = "files"


class Record(TypedDict, total=False):
    """What is known of a unit, as its file holds it."""

    what: dict[str, Any]
    files: dict[str, list[str | int]]
    plan: str | None
    status: Literal["finished", "failed"]
    sha256: str
    seconds: float
    peak_memory: int | None
    error: str


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        key: the name of its files.
        subject: what is measured, JSON-able; it is recorded as `what`, and a result of
            something else does not count.
        inputs: what else the measurement needs.
        facts: what its record is to say beside `what`, JSON-able; a result does not
            depend on it.
    """

    key: str
    subject: dict[str, Any] = field(hash=False)
    inputs: Any = field(default=None, compare=False, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def result_path(folder: Path, unit: Unit) -> Path:
    """Return where the result of a unit is, or will be."""
    return folder / f"{unit.key}.nc"


def record(folder: Path, unit: Unit) -> Record | None:
    """Return what is known of a unit; `None` for nothing, or what cannot be read."""
    return cast(Record | None, _read_json(folder / f"{unit.key}.json"))


def write_record(folder: Path, unit: Unit, content: Record) -> None:
    """Write what is known of a unit: what it measures, its facts, and `content`."""
    whole_record = {"what": unit.subject, **unit.facts, **content}
    _write_json(folder / f"{unit.key}.json", whole_record)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan in a folder; `None` for none, or a damaged one."""
    return _read_json(folder / PLAN)


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a folder."""
    _write_json(folder / PLAN, plan)


def plan_digest(folder: Path) -> str | None:
    """Return what tells the plan in a folder from others.

    `None` where there is no plan, or it was damaged.
    """
    with suppress(OSError):
        state = (folder / PLAN).stat()
        # A plan that was replaced has another inode or time, and so another place in
        # the cache.
        return _digest_of_plan(folder, state.st_ino, state.st_size, state.st_mtime_ns)
    return None


# A plan may hold thousands of prompts, and is asked for at every unit.
@lru_cache(maxsize=8)
def _digest_of_plan(folder: Path, *_state: int) -> str | None:
    plan = read_plan(folder)
    return None if plan is None else _digest(plan)


def planned_keys(folder: Path) -> list[str]:
    """Return the keys of the units that runs of the folder's plan were to measure.

    There are none where the list is missing or damaged: earlier versions wrote none.
    """
    content = _read_json(folder / PLANNED) or {}
    is_of_plan = content.get("plan") == plan_digest(folder)
    keys = content.get("units")
    return keys if is_of_plan and isinstance(keys, list) else []


def write_planned(folder: Path, units: Iterable[Unit]) -> None:
    """Add units to the list of those that runs were to measure."""
    known_keys = planned_keys(folder)
    keys = list(dict.fromkeys([*known_keys, *(unit.key for unit in units)]))
    # A run that adds none leaves the file as it is.
    if keys != known_keys:
        remove_left_overs(folder, Path(PLANNED).stem)
        _write_json(folder / PLANNED, {"plan": plan_digest(folder), "units": keys})


def is_finished(folder: Path, unit: Unit) -> bool:
    """Say whether a unit's result counts.

    It must be there, undamaged, of this unit and of the folder's plan.
    """
    content = record(folder, unit) or {}
    path = result_path(folder, unit)
    if not path.is_file() or not is_of_its_plan(folder, content):
        return False
    if content.get("status") != "finished":
        return False
    # As JSON, which makes lists of tuples: that is what the record holds.
    if content.get("what") != json.loads(json.dumps(unit.subject)):
        return False
    return content.get("sha256") == checksum(path)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    return sha256(path.read_bytes()).hexdigest()


def is_of_its_plan(folder: Path, content: Record) -> bool:
    """Say whether a record is of the plan beside it, or does not say."""
    return content.get("plan") in (None, plan_digest(folder))


def why_unfinished(folder: Path, unit: Unit) -> str:
    """Say what became of a result that was written and no longer counts."""
    if is_of_its_plan(folder, record(folder, unit) or {}):
        return "its result is missing or damaged: run again"
    return (
        "its result was replaced by a job of another plan: end that job, and run again"
    )


def load_unit(folder: Path, unit: Unit, lazily: bool = False) -> "xarray.Dataset":
    """Return the result of a finished unit.

    `lazily`, with dask, values are read when they are used.
    """
    from xarray import load_dataset, open_dataset

    path = result_path(folder, unit)
    with interrupts_held():
        if lazily:
            return open_dataset(path, engine="netcdf4", chunks={})
        return load_dataset(path, engine="netcdf4")


@contextmanager
def netcdf_lock() -> Iterator[None]:
    """Hold the lock on netCDF, which is not safe in threads: no other one writes."""
    with ExitStack() as stack:
        stack.enter_context(_netcdf)
        # Where a client of dask was made in this process, xarray asks its scheduler for
        # a lock on every file, though it may have died long ago.
        if "dask" in sys.modules:
            import dask.threaded

            # Where it is given by its name, dask 2024.8 warns that a client is active.
            stack.enter_context(dask.config.set(scheduler=dask.threaded.get))
        yield


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; `None` for none, or one that was changed since."""
    # A damaged file may hold anything, thousands of open brackets among it.
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            digest = content.pop("digest", None)
            # Older plans have none.
            if digest in (None, _digest(content)):
                return content
    return None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    # The digest is that of what will be read again: JSON makes lists of tuples, and
    # texts of keys.
    digest = _digest(json.loads(json.dumps(content)))
    text = json.dumps({**content, "digest": digest}, indent=1)
    write_atomically(path, lambda unfinished: unfinished.write_text(text))


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
