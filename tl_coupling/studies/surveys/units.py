"""Units of work whose results are files: finished units are kept, missing or damaged
ones are done again.
"""

import json
import os
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from tl_coupling.arguments import AnyPath, others_measuring, warn_caller
from tl_coupling.files import remove_left_overs, write_atomically
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import plural
from tl_coupling.studies.surveys.executors import Executor, submitted
from tl_coupling.studies.surveys.kept import forget, n_kept
from tl_coupling.studies.surveys.records import (
    PLAN,
    VERSION,
    Record,
    Unit,
    checksum,
    is_finished,
    is_of_its_plan,
    load_unit,
    netcdf_lock,
    plan_digest,
    read_plan,
    record,
    result_path,
    why_unfinished,
    write_plan,
    write_record,
)

__all__ = [
    "PLAN",
    "VERSION",
    "Folder",
    "Outcome",
    "Unit",
    "is_finished",
    "is_of_its_plan",
    "load_unit",
    "one_line",
    "plan_digest",
    "read_plan",
    "record",
    "run_unit",
    "why_unfinished",
]

Status = Literal["computed", "kept", "failed"]
_OTHER_PLAN = (
    "the folder is now of another plan than this unit, which writes nothing there: "
    "end the jobs of the earlier plan, and run again"
)
# Characters of an error in its record, and of plans in an error.
_MOST_OF_AN_ERROR = 500
_MOST_OF_A_PLAN = 120
# Units with the same error, and errors, that one line names.
_MOST_NAMED = 5


class UnitResult(Protocol):
    """What a measurement gives: an xarray.Dataset, or what else can be written so."""

    def to_netcdf(self, path: Any, *, engine: Any) -> Any:
        """Write it to a file."""


Measure = Callable[[Unit], UnitResult]


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

    Its files are those of `records`. A result counts only if its record has its
    checksum. The record is written last, so the folder is consistent whenever work is
    interrupted. A record also holds the digest of its plan: what a job of another plan
    writes into the folder counts for nothing, and such a job writes nothing once the
    plan has changed.

    Args:
        path: of the folder.
        plan: what the results depend on, JSON-able. It is written unless there are
            results; `None` opens a folder that has one.
        temporary: an interrupt does not mention a folder which will soon be gone.
        implied: what a plan lacks because it was written before that could be chosen.

    Raises ValueError where there are results of another plan, of none, or in another
    version of this format, or where the plan would change under another run.
    """

    def __init__(
        self,
        path: AnyPath,
        plan: Mapping[str, Any] | None = None,
        temporary: bool = False,
        implied: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.temporary = temporary
        self._implied = dict(implied or {})
        self._requested_plan: dict[str, Any] | None = None
        if plan is not None:
            # The plan as JSON gives it back is compared with the one that was written.
            text = json.dumps({"version": VERSION, **plan})
            self._requested_plan = json.loads(text)
        self._is_held = False
        if self._has_to_write_its_plan():
            with self.held():
                pass
        self.plan: dict[str, Any] = self._implied | (read_plan(self.path) or {})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this run alone, and keep it of its plan.

        Raises ValueError where another run has it.
        """
        # `run` may be called within a block that checks what is there.
        if self._is_held:
            yield
            return
        with _locked(self.path):
            self._is_held = True
            try:
                # Another run may have come first.
                has_to_write = self._has_to_write_its_plan()
                if has_to_write and self._requested_plan is not None:
                    remove_left_overs(self.path, Path(PLAN).stem)
                    write_plan(self.path, self._requested_plan)
                yield
            finally:
                self._is_held = False

    def _has_to_write_its_plan(self) -> bool:
        """Say whether the folder holds no results, and not this plan.

        Raises ValueError where it cannot be used.
        """
        has_results = any(self.path.glob("*.nc"))
        plan = read_plan(self.path)
        if plan is not None:
            plan = {**self._implied, **plan}
        # Without results a plan binds nobody, and a new one may replace it.
        if self._requested_plan is not None and not has_results:
            return plan != self._requested_plan
        self._check_plan(plan, has_results)
        return False

    def _check_plan(self, plan: dict[str, Any] | None, has_results: bool) -> None:
        """Raise ValueError unless the plan in the folder is the requested one."""
        file = self.path / PLAN
        if has_results and not file.exists():
            raise ValueError(
                f"{self.path} holds results, but no {PLAN}: put it back, or choose "
                "another folder"
            )
        if not file.exists():
            raise ValueError(
                f"{self.path} is not a folder of results: there is no {PLAN} in it"
            )
        if plan is None:
            raise ValueError(f"{file} is damaged: restore it, or choose another folder")
        version = plan.get("version", 1)
        if version != VERSION:
            age = "an older" if version == 1 else "another"
            raise ValueError(
                f"{self.path} was written by {age} version of tl_coupling "
                f"(format {version}): choose another folder and measure again"
            )
        if self._requested_plan:
            self._check_same(plan, self._requested_plan)

    def _check_same(self, plan: dict[str, Any], requested: dict[str, Any]) -> None:
        keys = {*plan, *requested}
        differing = sorted(key for key in keys if plan.get(key) != requested.get(key))
        if differing:
            raise ValueError(
                f"{self.path} holds results of another plan ({', '.join(differing)}): "
                f"wanted {_shortened(requested, plan, differing)}, "
                f"found {_shortened(plan, requested, differing)}; "
                "choose another folder, or ask for the same"
            )

    def run(
        self,
        units: list[Unit],
        measure: Measure,
        progress: Progress | None = None,
        executor: Executor | None = None,
    ) -> list[Outcome]:
        """Measure every unit that is not finished; each is written when it is done.

        Units are measured one after the other in this process, or by an executor; then
        `measure` must be picklable and every worker must see the folder. `progress`
        wraps the loop: over all units, or over those that come back from the executor.
        A unit that fails is recorded, and the others go on. OSError (a full disk) ends
        the run, and so does Ctrl-C, with a message that says what is kept. ValueError
        where another run is using the folder. A warning names results that no longer
        counted, and were measured anew.
        """
        try:
            with self.held():
                recorded_units = self._recorded_as_finished(units)
                n_prompts = sum(n_kept(self.path, unit) for unit in units)
                label = _label_of_bar(len(recorded_units), n_prompts)
                if executor is None:
                    outcomes = self._run_here(units, measure, progress, label)
                else:
                    outcomes = self._run_by(executor, units, measure, progress, label)
                replaced = [
                    outcome.unit.key
                    for outcome in outcomes
                    if outcome.unit in recorded_units and outcome.status == "computed"
                ]
                if replaced:
                    warn_caller(
                        f"{plural(len(replaced), 'result')} in {self.path} no longer "
                        "counted (missing, damaged or of something else) and "
                        f"{'was' if len(replaced) == 1 else 'were'} measured anew: "
                        f"{', '.join(replaced[:_MOST_NAMED])}"
                    )
                return [self._checked(outcome) for outcome in outcomes]
        except KeyboardInterrupt as error:
            if not self.temporary:
                error.args = (self._kept_of(units),)
            raise

    def _run_here(
        self,
        units: list[Unit],
        measure: Measure,
        progress: Progress | None,
        label: str,
    ) -> list[Outcome]:
        """Measure units one after the other in this process."""
        plan = plan_digest(self.path)
        steps = with_progress(units, progress, label)
        return [run_unit(self.path, unit, measure, plan) for unit in steps]

    def _run_by(
        self,
        executor: Executor,
        units: list[Unit],
        measure: Measure,
        progress: Progress | None,
        label: str,
    ) -> list[Outcome]:
        """Let an executor measure the units that are not finished."""
        plan = plan_digest(self.path)
        outcomes = {
            unit: Outcome(unit, "kept")
            for unit in units
            if is_finished(self.path, unit)
        }
        # Workers may have another working directory.
        folder = self.path.resolve()
        work = {
            unit: (folder, unit, measure, plan)
            for unit in units
            if unit not in outcomes
        }
        # Workers may be threads of this process.
        with (
            others_measuring(),
            submitted(executor, _run_elsewhere, work) as ended,
        ):
            for unit in with_progress(ended, progress, label):
                try:
                    status, error_text = ended.futures[unit].result()
                    outcomes[unit] = Outcome(unit, status, error_text)
                # A full disk or a lost drive is no fault of one unit: the run ends.
                except OSError:
                    raise
                # The CancelledError of dask and asyncio is not an Exception.
                except (Exception, CancelledError) as error:
                    # The worker is gone, perhaps after its last write.
                    outcomes[unit] = _record_error(
                        self.path, unit, error, "computed", plan
                    )
        return [outcomes[unit] for unit in units]

    def _checked(self, outcome: Outcome) -> Outcome:
        """Return the outcome, failed if somebody else has replaced its result since."""
        unit = outcome.unit
        if outcome.status == "failed" or is_finished(self.path, unit):
            return outcome
        return Outcome(unit, "failed", why_unfinished(self.path, unit))

    def _recorded_as_finished(self, units: list[Unit]) -> set[Unit]:
        """Return the units that a record says are finished; files are not read."""
        return {
            unit
            for unit in units
            if (record(self.path, unit) or {}).get("status") == "finished"
        }

    def _kept_of(self, units: list[Unit]) -> str:
        """Say after an interrupt how many units are finished."""
        n_finished = len(self._recorded_as_finished(units))
        n_prompts = sum(n_kept(self.path, unit) for unit in units)
        and_prompts = ""
        if n_prompts:
            and_prompts = f", and {plural(n_prompts, 'prompt')} of others"
        return (
            f"interrupted: {self.path} keeps {n_finished} of {len(units)} finished"
            f"{and_prompts}; run the same again to do the rest"
        )


def _label_of_bar(n_units: int, n_prompts: int) -> str:
    """Return what a bar says: units, and how much of them an earlier run has done."""
    kept = []
    if n_units:
        kept.append(f"{n_units} kept")
    if n_prompts:
        kept.append(f"{plural(n_prompts, 'prompt')} of others kept")
    return f"units ({', '.join(kept)})" if kept else "units"


def _shortened(
    plan: Mapping[str, Any], other: Mapping[str, Any], keys: list[str]
) -> str:
    """Return some entries of a plan in one short line; of lists, what the other lacks."""
    entries = {}
    for key in keys:
        value, other_value = plan.get(key), other.get(key)
        if isinstance(value, list) and isinstance(other_value, list):
            # Lists of the same in another order differ as a whole.
            value = [item for item in value if item not in other_value] or value
        entries[key] = value
    text = json.dumps(entries, ensure_ascii=False)
    return shorten(text, _MOST_OF_A_PLAN, placeholder="…")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; ValueError where another has it.

    Two runs would write the same units and remove each other's unfinished files.
    """
    with ExitStack() as stack:
        # A lock ends with its process. Where there are none (Windows, some network
        # drives), nothing is checked.
        with suppress(ImportError, OSError):
            import fcntl

            # The folder itself is locked, so that no lock file is left over.
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another run, or one of its workers, is using {folder}: "
                    "wait for it, or choose another folder"
                ) from None
        yield


def run_unit(
    folder: Path, unit: Unit, measure: Measure, plan: str | None = None
) -> Outcome:
    """Measure one unit, unless it is finished.

    `plan` is the digest of the plan that the unit is of, by default the folder's. A job
    may outlive its run, and the folder may have another plan by then: the unit fails,
    and nothing is written.
    """
    plan = plan or plan_digest(folder)
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    if is_finished(folder, unit):
        return Outcome(unit, "kept")
    # Unfinished files of a run that was killed.
    remove_left_overs(folder, unit.key)
    start = time.perf_counter()
    try:
        result = measure(unit)
    # A model may fail in any way; the other units do not depend on it.
    except Exception as error:
        # Another process may have finished the unit meanwhile, such as a worker whose
        # driver was killed: then it is kept.
        return _record_error(folder, unit, error, "kept", plan)
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    with netcdf_lock():
        path = write_atomically(
            result_path(folder, unit),
            lambda unfinished: result.to_netcdf(unfinished, engine="netcdf4"),
        )
    # After writing, which is part of the cost.
    seconds = round(time.perf_counter() - start, 3)
    _record_finished(folder, unit, plan, path, seconds)
    # Only now that the record makes the result count.
    forget(folder, unit)
    return Outcome(unit, "computed")


def _record_finished(
    folder: Path, unit: Unit, plan: str | None, path: Path, seconds: float
) -> None:
    """Record the result in `path` with its checksum, and what it cost."""
    peak_memory = _peak_memory()
    recorded_checksum = None
    # Another process may have replaced the result meanwhile: the record must be of what
    # is there.
    while recorded_checksum != (present_checksum := checksum(path)):
        content: Record = {
            "plan": plan,
            "status": "finished",
            "sha256": present_checksum,
            "seconds": seconds,
            "peak_memory": peak_memory,
        }
        write_record(folder, unit, content)
        recorded_checksum = present_checksum


def _peak_memory() -> int | None:
    """Return the peak memory of this process in MiB; None on Windows."""
    with suppress(ImportError):
        import resource

        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Bytes on a Mac, KiB elsewhere.
        return peak >> (20 if sys.platform == "darwin" else 10)
    return None


def _run_elsewhere(
    folder: Path, unit: Unit, measure: Measure, plan: str | None
) -> tuple[Status, str | None]:
    """Run a unit, and return little of its outcome.

    A pipe takes a short answer whole, even from a worker that is then killed.
    """
    outcome = run_unit(folder, unit, measure, plan)
    return outcome.status, outcome.error


def _record_error(
    folder: Path,
    unit: Unit,
    error: BaseException,
    if_finished: Status,
    plan: str | None,
) -> Outcome:
    """Record a unit's error, unless its result is there all the same."""
    if plan_digest(folder) != plan:
        return Outcome(unit, "failed", _OTHER_PLAN)
    if is_finished(folder, unit):
        return Outcome(unit, if_finished)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = text[:_MOST_OF_AN_ERROR]
    write_record(folder, unit, {"plan": plan, "status": "failed", "error": text})
    return Outcome(unit, "failed", text)


def one_line(errors: Mapping[str, str | None]) -> str:
    """Return errors by unit in one line.

    Units with the same error stand together, and long lists are cut short.
    """
    names_by_error: dict[str | None, list[str]] = {}
    for key, error in errors.items():
        names_by_error.setdefault(error, []).append(unquote(key))
    parts = []
    for error, names in names_by_error.items():
        n_more = len(names) - _MOST_NAMED
        more = f" and {n_more} more" if n_more > 0 else ""
        parts.append(f"{', '.join(names[:_MOST_NAMED])}{more}: {error}")
    line = "; ".join(parts[:_MOST_NAMED])
    return f"{line}; …" if len(parts) > _MOST_NAMED else line
