"""Files are written completely or not at all, and text that others wrote is only text,
here and in a terminal.
"""

import csv
import hashlib
import math
import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tl_coupling.interrupts import interrupts_held

if TYPE_CHECKING:
    import pandas

# How long an interrupt waits for a file.
WRITING_SECONDS = 2.0
# What spreadsheets take for a formula at the start of a cell (OWASP, CSV injection),
# behind any number of marks.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
# Spreadsheets show no mark in front of a text.
_MARK = "'"


def file_name(text: str) -> str:
    """Text as part of a file name: characters that could clash, hide the file or leave
    the folder are escaped.
    """
    name = quote(text, safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    # File systems allow 255 bytes, and callers add to the name.
    return (
        name
        if len(name) <= 150
        else f"{name[:150]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    )


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Path], object]
) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it; on any failure
    `path` is unchanged.

    Raises:
        OSError: it cannot be written, as on a full disk, where netCDF raises
            RuntimeError.
    """
    path = Path(path)
    # The suffix stays, because writers choose the format by it.
    unfinished = path.with_name(
        f".{path.stem}.{_here()}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}"
    )
    try:
        unfinished.touch(exist_ok=False)
        # An interrupt amid netCDF's calls can leave xarray's lock taken, and closing
        # the file then waits for ever.
        with interrupts_held(WRITING_SECONDS):
            write(unfinished)
            os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError) and not str(error).startswith("NetCDF: "):
            raise
        reason = getattr(error, "strerror", None) or error
        hint = "" if path.is_dir() else "; is the disk full, or the folder read-only?"
        raise OSError(f"cannot write {path}: {reason}{hint}") from error
    return path


def remove_left_overs(folder: Path, stem: str) -> None:
    """Remove the unfinished files of killed writers of `stem`, with any suffix.

    The file of a living writer stays. Whether a writer on another machine, in another
    container or before a reboot lives is unknown here: its file is removed a day after
    it was last written to.
    """
    name = re.compile(
        rf"\.{re.escape(stem)}\.(?:(?P<where>[0-9a-f]{{12}})-(?P<pid>[0-9]{{1,9}})-)?[^.]+\.[^.]+"
    )
    for path in folder.glob(f".{stem}.*"):
        if found := name.fullmatch(path.name):
            with suppress(FileNotFoundError):
                is_dead = found["where"] == _here() and not _is_alive(int(found["pid"]))
                if is_dead or time.time() - path.stat().st_mtime > 24 * 3600:
                    path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        # On Windows signal 0 is Ctrl+C.
        if os.name == "posix":
            os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


@cache
def _here() -> str:
    """Names the machine, its boot and the container: where a process id is unique."""
    try:
        where = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        where = platform.node()
    return hashlib.sha256(where.encode()).hexdigest()[:12]


@contextmanager
def output_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for results, created if it does not exist, and removed again if it stays
    empty.

    Raises:
        OSError: it cannot be created or written to; raised before any work is done.
    """
    folder = Path(path)
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"cannot write to the output folder {folder}: {error.strerror or error}"
        ) from None
    try:
        yield folder
    finally:
        # Those that hold something are refused.
        for p in made:
            with suppress(OSError):
                p.rmdir()


def plain(text: object) -> str:
    r"""The text, lines kept, with escapes for what a terminal would act on or could not
    show.

    These are control characters, which move the cursor or clear the screen, marks that
    turn the text after them around, and halves of characters.

    Example:
        >>> from tl_coupling.files import plain
        >>> print(plain("\x1b[2Jgpt2"))
        \x1b[2Jgpt2
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def as_cell(value: Any) -> Any:
    """A value for a CSV file; text that a spreadsheet would take for a formula gets a
    mark, numbers stay.

    Example:
        >>> from tl_coupling.files import as_cell, of_cell
        >>> as_cell("=1+1"), as_cell("-0.3"), of_cell(as_cell("=1+1"))
        ("'=1+1", '-0.3', '=1+1')
    """
    is_formula = (
        isinstance(value, str) and _FORMULA.match(value) and not _is_number(value)
    )
    return f"{_MARK}{value}" if is_formula else value


def of_cell(value: Any) -> Any:
    """What `as_cell` was given."""
    is_marked = (
        isinstance(value, str) and value.startswith(_MARK) and _FORMULA.match(value)
    )
    return value.removeprefix(_MARK) if is_marked else value


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def write_rows(
    path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]
) -> None:
    """Write a CSV file in UTF-8; no cell of it is a formula."""
    with path.open("w", newline="", encoding="utf-8") as file:
        # Lines end as RFC 4180 says; then carriage returns in cells are quoted too.
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(map(as_cell, header))
        writer.writerows(map(as_cell, row) for row in rows)


def write_table(table: "pandas.DataFrame", path: Path) -> None:
    """Write a table as a CSV file without its index; no cell of it is a formula."""
    texts = table.rename(columns=as_cell).map(as_cell)
    texts.to_csv(path, index=False, lineterminator="\r\n")
