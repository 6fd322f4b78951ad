"""Prompts of a unit that are kept while the unit is measured: one that is interrupted
goes on after them.

They lie in a folder beside the unit's result, each with a record of its own, and are
gone when the result is there.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tl_coupling.files import file_name, write_atomically
from tl_coupling.prompts import Prompt
from tl_coupling.studies.surveys.records import (
    Record,
    Unit,
    checksum,
    is_finished,
    load_unit,
    netcdf_lock,
    plan_digest,
    result_path,
    write_record,
)

if TYPE_CHECKING:
    import xarray

# So much work may be lost; writing more often would take longer than tiny models do.
_SECONDS_BETWEEN = 2.0


class KeptPrompts:
    """The measured prompts of one unit, on disk.

    A prompt counts if its file is whole, and of the same plan, model, files of the
    model, and text.
    """

    def __init__(self, folder: Path, unit: Unit) -> None:
        self.folder = kept_folder(folder, unit)
        self._unit_subject = {
            "plan": plan_digest(folder),
            "what": unit.subject,
            "facts": unit.facts,
        }
        # Measured, and not yet written.
        self._waiting: list[tuple[Prompt, xarray.Dataset]] = []
        self._written_at = time.monotonic()

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that are to be measured."""
        return [p for p in prompts if not is_finished(self.folder, self._unit_of(p))]

    def joined(
        self,
        prompts: Sequence[Prompt],
        missing: Sequence[Prompt],
        measured: "Iterator[xarray.Dataset]",
    ) -> "Iterator[xarray.Dataset]":
        """Yield the results of all prompts, in order, and keep those that are new.

        Args:
            prompts: of the unit.
            missing: those of them that `measured` is of.
            measured: results, in this order.
        """
        ids = {prompt.id for prompt in missing}
        for prompt in prompts:
            if prompt.id not in ids:
                kept = load_unit(self.folder, self._unit_of(prompt))
                # How it lay in its file says nothing of the next one.
                yield kept.drop_encoding()
                continue
            data = next(measured)
            self._waiting.append((prompt, data))
            if time.monotonic() - self._written_at >= _SECONDS_BETWEEN:
                self._write()
            yield data

    def _write(self) -> None:
        """Write what waits; a disk without room for it is one for the result too."""
        with suppress(OSError), netcdf_lock():
            self.folder.mkdir(exist_ok=True)
            for prompt, data in self._waiting:
                self._write_prompt(self._unit_of(prompt), data)
        self._waiting.clear()
        self._written_at = time.monotonic()

    def _write_prompt(self, unit: Unit, data: "xarray.Dataset") -> None:
        path = write_atomically(
            result_path(self.folder, unit),
            lambda unfinished: data.to_netcdf(unfinished, engine="netcdf4"),
        )
        content: Record = {"status": "finished", "sha256": checksum(path)}
        write_record(self.folder, unit, content)

    def _unit_of(self, prompt: Prompt) -> Unit:
        """Return a prompt as a unit of work of its own."""
        subject = {**self._unit_subject, "prompt": [prompt.id, prompt.text]}
        return Unit(file_name(prompt.id), subject)


def kept_folder(folder: Path, unit: Unit) -> Path:
    """Return where the measured prompts of a unit are, while it is unfinished."""
    return folder / f"{unit.key}.prompts"


def n_kept(folder: Path, unit: Unit) -> int:
    """Return how many prompts of an unfinished unit are kept."""
    return len(list(kept_folder(folder, unit).glob("*.json")))


def forget(folder: Path, unit: Unit) -> None:
    """Remove the prompts of a unit that is finished."""
    # Files that cannot be removed do no harm: the result counts from now on.
    shutil.rmtree(kept_folder(folder, unit), ignore_errors=True)
