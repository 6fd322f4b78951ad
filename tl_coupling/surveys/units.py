"""Units of work whose results are files: finished units are kept, missing or damaged ones are done again."""

import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from tl_coupling.files import output_folder, remove_left_overs, write_atomically
from tl_coupling.progress import Progress, with_progress
from tl_coupling.surveys.executors import Executor, submitted

if TYPE_CHECKING:
    import xarray

PLAN = "plan.json"
# The format of plans, records and results.
VERSION = 2
# How many units of one error, and how many errors, a message lists.
_LISTED = 5
# The netCDF library is not thread-safe.
_netcdf = threading.Lock()


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        key: the name of its files.
        what: what is measured, JSON-able; kept in the unit's record.
        given: what else is needed to measure it; goes to the worker and is not recorded.
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


Measure = Callable[[Unit], "xarray.Dataset"]


class Folder:
    """A folder of results: checks that they are of one plan, runs what is missing, loads what is finished.

    It holds `plan.json`, which says what is measured, and two files for each unit: `KEY.nc`, its result, and
    `KEY.json`, its record: finished, with the result's checksum, or failed, with the error. A result counts only if its
    record has its checksum. The record is written last, so the folder is consistent whenever work is interrupted.

    Args:
        path: an existing folder.
        plan: what is measured, JSON-able; written unless the folder has results. `None` opens a folder with a plan.
        temporary: the folder will soon be gone, so an interrupt need not mention it.

    Raises:
        ValueError: the folder holds results of another plan, without a plan, or in another version of this format.
    """

    def __init__(
        self, path: str | os.PathLike[str], plan: Mapping[str, Any] | None = None, temporary: bool = False
    ) -> None:
        self.path, self.temporary = Path(path), temporary
        wanted = None if plan is None else json.loads(json.dumps({"version": VERSION, **plan}))
        if wanted is None or any(self.path.glob("*.nc")):
            self.plan = self._plan_of_results()
            self._check_same(wanted or self.plan)
        else:
            self.plan = wanted
            if _read_json(self.path / PLAN) != wanted:
                remove_left_overs(self.path, Path(PLAN).stem)
                _write_json(self.path / PLAN, wanted)

    def _plan_of_results(self) -> dict[str, Any]:
        path = self.path / PLAN
        if not path.exists():
            if any(self.path.glob("*.nc")):
                raise ValueError(f"{self.path} holds results, but no {PLAN}: put it back, or choose another folder")
            raise ValueError(f"{self.path} is not a folder of results: there is no {PLAN} in it")
        if (plan := _read_json(path)) is None:
            raise ValueError(f"{path} is damaged: restore it, or choose another folder")
        if (version := plan.get("version", 1)) != VERSION:
            which = f"{'an older' if version == 1 else 'another'} version of tl_coupling (format {version})"
            raise ValueError(f"{self.path} was written by {which}: choose another folder and measure again")
        return plan

    def _check_same(self, wanted: dict[str, Any]) -> None:
        differing = sorted(key for key in {*self.plan, *wanted} if self.plan.get(key) != wanted.get(key))
        if differing:
            asked, found = (_short({key: plan.get(key) for key in differing}) for plan in (wanted, self.plan))
            raise ValueError(
                f"{self.path} holds results of another plan ({', '.join(differing)}): wanted {asked}, found {found}; "
                "choose another folder, or ask for the same"
            )

    def run(
        self,
        units: Sequence[Unit],
        measure: Measure,
        progress: Progress | None = None,
        executor: Executor | None = None,
    ) -> list[Outcome]:
        """Measure every unit that is not finished; each is written as soon as it is done.

        One after the other in this process, or by an executor; then `measure` must be picklable and every worker must
        see the folder. `progress` wraps the loop: over all units, or over those that come back from the executor.

        A unit that fails is recorded, and the others go on. An error in writing (a full disk) ends the run, and so does
        Ctrl-C, with a message that says what is kept.

        Raises:
            ValueError: another run is using the folder.
            OSError: a result cannot be written.
        """
        try:
            with self._locked():
                if executor is None:
                    return [run_unit(self.path, unit, measure) for unit in with_progress(units, progress, "units")]
                found = {unit: Outcome(unit, "kept") for unit in units if is_finished(self.path, unit)}
                work = {unit: (self.path.resolve(), unit, measure) for unit in units if unit not in found}
                with submitted(executor, _run_elsewhere, work) as finished:
                    for unit in with_progress(finished, progress, "units"):
                        found[unit] = _outcome(self.path, unit, finished.futures[unit])
                return [found[unit] for unit in units]
        except KeyboardInterrupt as error:
            if not self.temporary:
                n = sum((record(self.path, unit) or {}).get("status") == "finished" for unit in units)
                said = f"interrupted: {self.path} keeps {n} of {len(units)} finished; the same again does the rest"
                error.args = (said,)
            raise

    def records(self) -> dict[str, dict[str, Any]]:
        """What is known of every unit, by key; records that cannot be read are left out."""
        keys = sorted(path.stem for path in self.path.glob("[!.]*.json") if path.name != PLAN)
        found = {key: record(self.path, Unit(key, {})) for key in keys}
        return {key: one for key, one in found.items() if one is not None and isinstance(one.get("what"), dict)}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two runs would write the same units and remove each other's unfinished files. The lock ends with its process.

        Where there are no such locks (Windows, some network drives), nothing is checked.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    said = f"another run, or one of its workers, is using {self.path}"
                    raise ValueError(f"{said}: wait for it, or choose another folder") from None
            yield
        finally:
            os.close(handle)


@contextmanager
def folder_of_results(path: str | os.PathLike[str] | None, plan: Mapping[str, Any]) -> Iterator[Folder]:
    """The folder for a plan's results, made if need be and removed if it stays empty; without a path a temporary one.

    Raises:
        ValueError: as `Folder`.
        OSError: it cannot be made or written to.
    """
    place = tempfile.TemporaryDirectory() if path is None else nullcontext(os.fspath(path))
    with place as where, output_folder(where) as folder:
        yield Folder(folder, plan, temporary=path is None)


def run_unit(folder: Path, unit: Unit, measure: Measure) -> Outcome:
    """Measure one unit, unless it is finished."""
    if is_finished(folder, unit):
        return Outcome(unit, "kept")
    remove_left_overs(folder, unit.key)
    start = time.perf_counter()
    try:
        data = measure(unit)
    # A model may fail in any way; the other units do not depend on it.
    except Exception as error:
        # Another process may have finished it, such as a worker whose driver was killed.
        return Outcome(unit, "kept") if is_finished(folder, unit) else _failed(folder, unit, error)
    with _netcdf:
        path = _write(folder / f"{unit.key}.nc", lambda unfinished: data.to_netcdf(unfinished, engine="netcdf4"))
    effort = {"seconds": round(time.perf_counter() - start, 3), "peak_memory": _peak_memory()}
    checksum = None
    # Another process may have replaced the result meanwhile: the record must be of what is there.
    while checksum != (checksum := _checksum(path)):
        _record(folder, unit, {"status": "finished", "sha256": checksum} | effort)
    return Outcome(unit, "computed")


def _run_elsewhere(folder: Path, unit: Unit, measure: Measure) -> Outcome:
    """`run_unit`, returning little: a pipe takes a short answer whole, even from a worker that is then killed."""
    outcome = run_unit(folder, unit, measure)
    return replace(outcome, unit=replace(unit, given=None))


def _outcome(folder: Path, unit: Unit, future: Any) -> Outcome:
    try:
        outcome: Outcome = replace(future.result(), unit=unit)
    except OSError:
        raise
    # The CancelledError of dask and asyncio is not an Exception.
    except (Exception, CancelledError) as error:
        # The worker is gone, perhaps after its last write.
        return Outcome(unit, "computed") if is_finished(folder, unit) else _failed(folder, unit, error)
    return outcome


def _peak_memory() -> int | None:
    """The most memory that this process has held so far, in MiB; `None` where that is not known."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)


def _failed(folder: Path, unit: Unit, error: BaseException) -> Outcome:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    _record(folder, unit, {"status": "failed", "error": text})
    return Outcome(unit, "failed", text)


def one_line(errors: Mapping[str, str | None]) -> str:
    """Errors by unit in one line: units with the same error together, long lists cut short."""
    alike: dict[str, list[str]] = {}
    for key, error in errors.items():
        alike.setdefault(str(error), []).append(unquote(key))
    parts = []
    for error, keys in alike.items():
        more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
        parts.append(f"{', '.join(keys[:_LISTED])}{more}: {error}")
    return "; ".join(parts[:_LISTED]) + ("; …" if len(parts) > _LISTED else "")


def is_finished(folder: Path, unit: Unit) -> bool:
    """Whether the unit's result is there, undamaged, and of this unit."""
    found, path = record(folder, unit) or {}, folder / f"{unit.key}.nc"
    return (
        found.get("status") == "finished"
        and found.get("what") == json.loads(json.dumps(unit.what))
        and path.exists()
        and found.get("sha256") == _checksum(path)
    )


def load_unit(folder: Path, unit: Unit, lazily: bool = False) -> "xarray.Dataset":
    """The result of a finished unit; `lazily`, with dask, values are read when they are used."""
    import xarray

    path = folder / f"{unit.key}.nc"
    if lazily:
        return xarray.open_dataset(path, engine="netcdf4", chunks={})
    return xarray.load_dataset(path, engine="netcdf4")


def record(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """What is known of a unit; `None` where nothing is, or it cannot be read."""
    return _read_json(folder / f"{unit.key}.json")


def _record(folder: Path, unit: Unit, content: dict[str, Any]) -> None:
    _write_json(folder / f"{unit.key}.json", {"what": unit.what} | content)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, lambda unfinished: unfinished.write_text(json.dumps(content, indent=1)))


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    try:
        return write_atomically(path, write)
    # On a full disk netCDF raises RuntimeError, or PermissionError if not even the file's header can be written.
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write {path}: {reason}; is the disk full, or the folder read-only?") from error


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _short(plan: dict[str, Any]) -> str:
    text = json.dumps(plan, ensure_ascii=False)
    return text if len(text) <= 120 else text[:119] + "…"
