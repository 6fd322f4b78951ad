"""Work in units whose results are files: what is finished stays, what is missing or damaged is done again.

A folder of units holds `plan.json`, which says what is measured, and for each unit `KEY.nc`, its result, and
`KEY.json`, its record: finished, with the result's checksum, or failed, with the error. A result counts only with a
record that names its checksum, and the record is written last: whenever the work is interrupted, the folder is right.
"""

import hashlib
import json
import os
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from tl_coupling.files import remove_left_overs, write_atomically
from tl_coupling.surveys.executors import Executor, Future, submitted

if TYPE_CHECKING:
    import xarray

PLAN = "plan.json"
# Units and errors that a warning names.
_NAMED = 5
_netcdf = threading.Lock()


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        key: names its files.
        what: says what it is, JSON-able; stands in its record.
        given: what it takes to do it beyond that; travels with it and is not recorded.
    """

    key: str
    what: dict[str, Any] = field(hash=False)
    given: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a unit: computed now, kept from an earlier run, or failed, with the error in one line."""

    unit: Unit
    status: Literal["computed", "kept", "failed"]
    error: str | None = None


Progress = Callable[[Iterable[Unit]], Iterable[Unit]]


def check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new folder of units; in an old one, see that it is the same.

    Raises:
        ValueError: the folder holds results of another plan, or results without one.
    """
    path = folder / PLAN
    plan = json.loads(json.dumps(plan))
    if not path.exists():
        if any(folder.glob("*.nc")):
            raise ValueError(
                f"{folder} holds results, but no {PLAN} that says of what: put it back, or choose another folder"
            )
        remove_left_overs(folder, path.stem)
        _write_json(path, plan)
        return
    there = read_plan(folder)
    differing = sorted(key for key in {*there, *plan} if there.get(key) != plan.get(key))
    if differing:
        wanted, got = ({key: one.get(key) for key in differing} for one in (plan, there))
        raise ValueError(
            f"{folder} holds results of another plan ({', '.join(differing)}): wanted {_short(wanted)}, found "
            f"{_short(got)}; choose another folder, or ask for the same"
        )


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan of a folder of units.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no folder of results: there is no {PLAN} in it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: put it back as it was, or choose another folder") from error
    if not isinstance(plan, dict):
        raise ValueError(f"{path} is damaged: put it back as it was, or choose another folder")
    return plan


def run_units(
    folder: str | os.PathLike[str],
    units: Sequence[Unit],
    measure: Callable[[Unit], "xarray.Dataset"],
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> list[Outcome]:
    """Measure every unit that is not finished, each written as soon as it is done.

    One after the other in this process; or by an executor, anything with `submit(function, *arguments)` that returns
    futures: of concurrent.futures, a Client of dask.distributed, submitit. `measure` must be picklable then, and the
    folder lie where every worker sees it. submitit's jobs become one array.

    `progress` wraps the loop: over the units to come in this process, over those that came back from an executor.

    An error in a unit is recorded and the others go on; so is a worker that was killed: with `process_pool` the unit
    that kills its worker, alone as well, with other pools all that had not ended. Not so where nothing more can be
    written (OSError: a full disk): that is raised, and what is finished stays.

    Raises:
        ValueError: another run is at work in the folder.
        OSError: a result cannot be written.
    """
    folder = Path(folder)
    with _only_one(folder):
        if executor is None:
            return [run_unit(folder, unit, measure) for unit in (progress(units) if progress else units)]
        found = {unit.key: Outcome(unit, "kept") for unit in units if is_finished(folder, unit)}
        to_do = [unit for unit in units if unit.key not in found]
        work = {unit: (folder.resolve(), unit, measure) for unit in to_do}
        with submitted(executor, _run_elsewhere, work) as finished:
            for unit in progress(finished) if progress else finished:
                found[unit.key] = _outcome(folder, unit, finished.futures[unit])
        return [found[unit.key] for unit in units]


def run_unit(folder: Path, unit: Unit, measure: Callable[[Unit], "xarray.Dataset"]) -> Outcome:
    """Measure one unit, unless it is finished."""
    if is_finished(folder, unit):
        return Outcome(unit, "kept")
    remove_left_overs(folder, unit.key)
    start = time.perf_counter()
    try:
        data = measure(unit)
    # A model may fail in any way; the other units do not depend on it.
    except Exception as error:
        # Another process at the same unit, a killed driver's, may have finished it.
        return Outcome(unit, "kept") if is_finished(folder, unit) else _failed(folder, unit, error)
    # netCDF's library is not made for threads.
    with _netcdf:
        path = _write(result_path(folder, unit), lambda unfinished: data.to_netcdf(unfinished, engine="netcdf4"))
    seconds = round(time.perf_counter() - start, 3)
    effort = {"seconds": seconds, "peak_memory": _peak_memory()}
    checksum = None
    # Another process at the same unit may have put its result in place meanwhile: the record is of what stands there.
    while checksum != (checksum := _checksum(path)):
        _record(folder, unit, {"status": "finished", "sha256": checksum} | effort)
    return Outcome(unit, "computed")


def _run_elsewhere(folder: Path, unit: Unit, measure: Callable[[Unit], "xarray.Dataset"]) -> Outcome:
    """As `run_unit`, without what was given: a pipe takes a short answer whole, even from a worker that is killed."""
    outcome = run_unit(folder, unit, measure)
    return replace(outcome, unit=replace(unit, given=None))


def _outcome(folder: Path, unit: Unit, future: Future) -> Outcome:
    try:
        outcome: Outcome = replace(future.result(), unit=unit)
    except OSError:
        raise
    # dask's and asyncio's CancelledError is no Exception.
    except (Exception, CancelledError) as error:
        # The worker is gone, perhaps after its last write.
        return Outcome(unit, "computed") if is_finished(folder, unit) else _failed(folder, unit, error)
    return outcome


def _peak_memory() -> int | None:
    """The most memory that this process has held since it began, in MiB; `None` where that is not known."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)


def _failed(folder: Path, unit: Unit, error: BaseException) -> Outcome:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    _record(folder, unit, {"status": "failed", "error": text})
    return Outcome(unit, "failed", text)


@contextmanager
def saying_what_is_kept(folder: Path, units: Sequence[Unit]) -> Iterator[None]:
    """Ctrl-C inside says how far the units are, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        records = [record(folder, unit) or {} for unit in units]
        n = sum(one.get("status") == "finished" for one in records)
        error.args = (f"interrupted: {folder} keeps {n} of {len(units)} finished; the same again does the rest",)
        raise


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two runs would write the same units and remove each other's unfinished files; a lock that ends with its process.

    Where there are no such locks (Windows, some network drives), nothing is checked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is at work in {folder}, or its workers are: wait for it, or choose another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def one_line(errors: Mapping[str, str | None]) -> str:
    """Errors of units in a few words: units with the same one together, the longest lists cut short."""
    alike: dict[str, list[str]] = {}
    for key, error in errors.items():
        alike.setdefault(str(error), []).append(unquote(key))
    parts = []
    for error, keys in alike.items():
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        parts.append(f"{', '.join(keys[:_NAMED])}{more}: {error}")
    return "; ".join(parts[:_NAMED]) + ("; …" if len(parts) > _NAMED else "")


def is_finished(folder: Path, unit: Unit) -> bool:
    """Whether the unit's result is there, whole, and of this unit."""
    found = record(folder, unit)
    path = result_path(folder, unit)
    return (
        found is not None
        and found.get("status") == "finished"
        and found.get("what") == json.loads(json.dumps(unit.what))
        and path.exists()
        and found.get("sha256") == _checksum(path)
    )


def load_unit(folder: Path, unit: Unit) -> "xarray.Dataset":
    """The result of a finished unit."""
    import xarray

    return xarray.load_dataset(result_path(folder, unit), engine="netcdf4")


def record(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """What is known of a unit; `None` where nothing is, or it cannot be read."""
    try:
        found = json.loads((folder / f"{unit.key}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def all_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of every unit in the folder, by key; records that cannot be read are left out."""
    keys = sorted(path.stem for path in folder.glob("[!.]*.json") if path.name != PLAN)
    found = {key: record(folder, Unit(key, {})) for key in keys}
    return {key: one for key, one in found.items() if one is not None and isinstance(one.get("what"), dict)}


def result_path(folder: Path, unit: Unit) -> Path:
    """Where the unit's result stands."""
    return folder / f"{unit.key}.nc"


def _record(folder: Path, unit: Unit, content: dict[str, Any]) -> None:
    _write_json(folder / f"{unit.key}.json", {"what": unit.what} | content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    _write(path, lambda unfinished: unfinished.write_text(text))


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    try:
        return write_atomically(path, write)
    # On a full disk netCDF says RuntimeError, or PermissionError where not even the file's head can be written.
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write {path}: {reason}; is the disk full, or the folder read-only?") from error


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _short(what: dict[str, Any]) -> str:
    text = json.dumps(what, ensure_ascii=False)
    return text if len(text) <= 120 else text[:119] + "…"
