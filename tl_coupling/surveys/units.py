"""Units of work whose results are files: finished units are kept, missing or damaged
ones are done again.
"""

import json
import os
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal
from urllib.parse import unquote

from tl_coupling.arguments import AnyPath
from tl_coupling.files import WRITING_SECONDS, remove_left_overs, write_atomically
from tl_coupling.interrupts import interrupts_held
from tl_coupling.progress import Progress, with_progress
from tl_coupling.surveys.executors import Executor, submitted

PLAN = "plan.json"
# The format of plans, records and results.
VERSION = 2
Status = Literal["computed", "kept", "failed"]
# A unit's result is an xarray.Dataset, or what else has `to_netcdf`.
Measure = Callable[["Unit"], Any]
_OTHER_PLAN = (
    "the folder is now of another plan than this unit, which writes nothing there: "
    "end the jobs of the earlier plan, and run again"
)
# The netCDF library is not thread-safe.
_netcdf = threading.Lock()


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        key: the name of its files.
        what: what is measured, JSON-able; it is recorded, and a result of something
            else does not count.
        given: what else the measurement needs.
        facts: what its record is to say beside `what`, JSON-able; a result does not
            depend on it.
    """

    key: str
    what: dict[str, Any] = field(hash=False)
    given: Any = field(default=None, compare=False, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a unit: computed now, kept from an earlier run, or failed, with
    the error in one line.
    """

    unit: Unit
    status: Status
    error: str | None = None


class Folder:
    """A folder of results: checks that they are of one plan, runs what is missing,
    loads what is finished.

    It holds `plan.json`, which says what is measured, and two files for each unit:
    `KEY.nc`, its result, and `KEY.json`, its record: finished, with the result's
    checksum, or failed, with the error. A result counts only if its record has its
    checksum. The record is written last, so the folder is consistent whenever work is
    interrupted. Plan and records hold a digest of their own content, so that one that
    was damaged is not believed.

    A record also holds the digest of its plan. What a job of another plan writes into
    the folder counts for nothing, and such a job writes nothing once the plan has
    changed. Records of earlier versions, which hold no plan, are taken to be of the
    plan beside them.

    The plan, JSON-able, is written unless there are results; `None` opens a folder that
    has one. What it lacks because it was written before that could be chosen is
    `implied`. ValueError where there are results of another plan, of none, or in
    another version of this format, or where the plan would change under another run. An
    interrupt does not mention a `temporary` folder, which will soon be gone.
    """

    def __init__(
        self,
        path: AnyPath,
        plan: Mapping[str, Any] | None = None,
        temporary: bool = False,
        implied: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.temporary = Path(path), temporary
        self._implied = dict(implied or {})
        self._wanted = (
            None
            if plan is None
            else json.loads(json.dumps({"version": VERSION, **plan}))
        )
        self._is_held = False
        if self._has_to_write_its_plan():
            with self.held():
                pass
        self.plan: dict[str, Any] = self._implied | (read_plan(self.path) or {})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which this folder is of this run alone, and of its plan;
        ValueError where another run has it.
        """
        # `run` may be called within a block that checks what is there.
        if self._is_held:
            yield
            return
        with _locked(self.path):
            self._is_held = True
            try:
                # Another run may have come first.
                if self._has_to_write_its_plan() and self._wanted is not None:
                    remove_left_overs(self.path, Path(PLAN).stem)
                    _write_json(self.path / PLAN, self._wanted)
                yield
            finally:
                self._is_held = False

    def _has_to_write_its_plan(self) -> bool:
        """Whether the folder holds no results, and not this plan; ValueError where it
        cannot be used.
        """
        file = self.path / PLAN
        has_results = any(self.path.glob("*.nc"))
        found = read_plan(self.path)
        wanted = self._wanted
        if found is not None:
            found = {**self._implied, **found}
        if wanted is not None and not has_results:
            return bool(found != wanted)
        if has_results and not file.exists():
            raise ValueError(
                f"{self.path} holds results, but no {PLAN}: put it back, or choose another folder"
            )
        if not file.exists():
            raise ValueError(
                f"{self.path} is not a folder of results: there is no {PLAN} in it"
            )
        if found is None:
            raise ValueError(f"{file} is damaged: restore it, or choose another folder")
        if (version := found.get("version", 1)) != VERSION:
            which = f"{'an older' if version == 1 else 'another'} version of tl_coupling (format {version})"
            raise ValueError(
                f"{self.path} was written by {which}: choose another folder and measure again"
            )
        if wanted and (
            differing := sorted(
                k for k in {*found, *wanted} if found.get(k) != wanted.get(k)
            )
        ):
            asked, kept = (
                shorten(
                    json.dumps(
                        {key: plan.get(key) for key in differing}, ensure_ascii=False
                    ),
                    120,
                    placeholder="…",
                )
                for plan in (wanted, found)
            )
            raise ValueError(
                f"{self.path} holds results of another plan ({', '.join(differing)}): wanted {asked}, found {kept}; "
                "choose another folder, or ask for the same"
            )
        return False

    def run(
        self,
        units: list[Unit],
        measure: Measure,
        progress: Progress | None = None,
        executor: Executor | None = None,
    ) -> list[Outcome]:
        """Measure every unit that is not finished; each is written as soon as it is
        done.

        One after the other in this process, or by an executor; then `measure` must be
        picklable and every worker must see the folder. `progress` wraps the loop: over
        all units, or over those that come back from the executor. A unit that fails is
        recorded, and the others go on. OSError (a full disk) ends the run, and so does
        Ctrl-C, with a message that says what is kept. ValueError where another run is
        using the folder.
        """
        try:
            with self.held():
                plan = plan_digest(self.path)
                if executor is None:
                    steps = with_progress(units, progress, "units")
                    return self._checked(
                        [run_unit(self.path, unit, measure, plan) for unit in steps]
                    )
                found = {
                    unit: Outcome(unit, "kept")
                    for unit in units
                    if is_finished(self.path, unit)
                }
                work = {
                    unit: (self.path.resolve(), unit, measure, plan)
                    for unit in units
                    if unit not in found
                }
                with submitted(executor, _run_elsewhere, work) as finished:
                    for unit in with_progress(finished, progress, "units"):
                        try:
                            found[unit] = Outcome(
                                unit, *finished.futures[unit].result()
                            )
                        except OSError:
                            raise
                        # The CancelledError of dask and asyncio is not an Exception.
                        except (Exception, CancelledError) as error:
                            # The worker is gone, perhaps after its last write.
                            found[unit] = _after_error(
                                self.path, unit, error, "computed", plan
                            )
                return self._checked([found[unit] for unit in units])
        except KeyboardInterrupt as error:
            if not self.temporary:
                n = sum(
                    (record(self.path, unit) or {}).get("status") == "finished"
                    for unit in units
                )
                said = f"interrupted: {self.path} keeps {n} of {len(units)} finished; the same again does the rest"
                error.args = (said,)
            raise

    def _checked(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes; those have failed whose results somebody else has replaced
        since they were written.
        """
        return [
            outcome
            if outcome.status == "failed" or is_finished(self.path, outcome.unit)
            else Outcome(
                outcome.unit, "failed", why_unfinished(self.path, outcome.unit)
            )
            for outcome in outcomes
        ]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two runs would write the same units and remove each other's unfinished files."""
    with ExitStack() as at_end:
        # A lock ends with its process. Where there are none (Windows, some network
        # drives), nothing is checked.
        with suppress(ImportError, OSError):
            import fcntl

            at_end.callback(os.close, handle := os.open(folder, os.O_RDONLY))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = f"another run, or one of its workers, is using {folder}"
                raise ValueError(
                    f"{said}: wait for it, or choose another folder"
                ) from None
        yield


def run_unit(
    folder: Path, unit: Unit, measure: Measure, plan: str | None = None
) -> Outcome:
    """Measure one unit, unless it is finished; of a plan by its digest, or of that in
    the folder.

    A job may outlive its run, and the folder may be of another plan by then: it fails,
    and writes nothing.
    """
    plan = plan or plan_digest(folder)
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    if is_finished(folder, unit):
        return Outcome(unit, "kept")
    remove_left_overs(folder, unit.key)
    start = time.perf_counter()
    try:
        data = measure(unit)
    # A model may fail in any way; the other units do not depend on it.
    except Exception as error:
        # Another process may have finished it, such as a worker whose driver was
        # killed.
        return _after_error(folder, unit, error, "kept", plan)
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    with _writes_alone():
        path = write_atomically(
            folder / f"{unit.key}.nc",
            lambda unfinished: data.to_netcdf(unfinished, engine="netcdf4"),
        )
    effort = {"seconds": round(time.perf_counter() - start, 3), "peak_memory": None}
    # Not on Windows.
    with suppress(ImportError):
        import resource

        unit_of_memory = 20 if sys.platform == "darwin" else 10
        effort["peak_memory"] = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> unit_of_memory
        )
    checksum = None
    # Another process may have replaced the result meanwhile: the record must be of what
    # is there.
    while checksum != (checksum := sha256(path.read_bytes()).hexdigest()):
        _record(
            folder,
            unit,
            {"plan": plan, "status": "finished", "sha256": checksum} | effort,
        )
    return Outcome(unit, "computed")


@contextmanager
def _writes_alone() -> Iterator[None]:
    """Context in which no other thread of this process writes netCDF."""
    with ExitStack() as at_end:
        at_end.enter_context(_netcdf)
        # Where a client of dask was made in this process, xarray asks its scheduler for
        # a lock on every file, though it may have died long ago.
        if "dask" in sys.modules:
            import dask

            at_end.enter_context(dask.config.set(scheduler="threads"))
        yield


def _run_elsewhere(*of_unit: Any) -> tuple[Status, str | None]:
    """`run_unit`, returning little: a pipe takes a short answer whole, even from a
    worker that is then killed.
    """
    outcome = run_unit(*of_unit)
    return outcome.status, outcome.error


def _after_error(
    folder: Path,
    unit: Unit,
    error: BaseException,
    if_finished: Status,
    plan: str | None,
) -> Outcome:
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    if is_finished(folder, unit):
        return Outcome(unit, if_finished)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    _record(folder, unit, {"plan": plan, "status": "failed", "error": text})
    return Outcome(unit, "failed", text)


def one_line(errors: Mapping[str, str | None]) -> str:
    """Errors by unit in one line: units with the same error together, long lists cut
    short.
    """
    alike: dict[str | None, list[str]] = {}
    for key, error in errors.items():
        alike.setdefault(error, []).append(unquote(key))
    more = {
        error: f" and {len(keys) - 5} more" * (len(keys) > 5)
        for error, keys in alike.items()
    }
    parts = [
        f"{', '.join(keys[:5])}{more[error]}: {error}" for error, keys in alike.items()
    ]
    return "; ".join(parts[:5]) + "; …" * (len(parts) > 5)


def is_finished(folder: Path, unit: Unit) -> bool:
    """Whether the unit's result is there, undamaged, of this unit and of the folder's
    plan.
    """
    found, path = record(folder, unit) or {}, folder / f"{unit.key}.nc"
    if not path.is_file() or not is_of_its_plan(folder, found):
        return False
    wanted = {"status": "finished", "what": json.loads(json.dumps(unit.what))}
    return (
        wanted | {"sha256": sha256(path.read_bytes()).hexdigest()}
    ).items() <= found.items()


def is_of_its_plan(folder: Path, content: Mapping[str, Any]) -> bool:
    """Whether a record is of the plan beside it, or of an earlier version, which did
    not say.
    """
    return content.get("plan") in (None, plan_digest(folder))


def why_unfinished(folder: Path, unit: Unit) -> str:
    """What became of a result that was written and no longer counts, in one line."""
    if is_of_its_plan(folder, record(folder, unit) or {}):
        return "its result is missing or damaged: run again"
    return (
        "its result was replaced by a job of another plan: end that job, and run again"
    )


def load_unit(folder: Path, unit: Unit, lazily: bool = False) -> Any:
    """The result of a finished unit, a Dataset; `lazily`, with dask, values are read
    when they are used.
    """
    from xarray import load_dataset, open_dataset

    path = folder / f"{unit.key}.nc"
    with interrupts_held(WRITING_SECONDS):
        return (
            open_dataset(path, engine="netcdf4", chunks={})
            if lazily
            else load_dataset(path, engine="netcdf4")
        )


def record(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """What is known of a unit; `None` where nothing is, or it cannot be read."""
    return _read_json(folder / f"{unit.key}.json")


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan in a folder; `None` where there is none, or it was damaged."""
    return _read_json(folder / PLAN)


def plan_digest(folder: Path) -> str | None:
    """What tells the plan in a folder from others; `None` where there is none, or it
    was damaged.
    """
    with suppress(OSError):
        state = (folder / PLAN).stat()
        return _digest_of_plan(folder, state.st_ino, state.st_size, state.st_mtime_ns)
    return None


# A plan may hold thousands of prompts, and is asked for at every unit.
@lru_cache(maxsize=8)
def _digest_of_plan(folder: Path, *state: int) -> str | None:
    plan = read_plan(folder)
    return None if plan is None else _digest(plan)


def _record(folder: Path, unit: Unit, content: dict[str, Any]) -> None:
    _write_json(folder / f"{unit.key}.json", {"what": unit.what} | unit.facts | content)


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; `None` where there is none, or it was changed since it was
    written.
    """
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(content := json.loads(path.read_text()), dict):
            digest = content.pop("digest", None)
            # Older plans have none.
            return content if digest in (None, _digest(content)) else None
    return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    whole = json.dumps(
        content | {"digest": _digest(json.loads(json.dumps(content)))}, indent=1
    )
    write_atomically(path, lambda unfinished: unfinished.write_text(whole))


def _digest(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
