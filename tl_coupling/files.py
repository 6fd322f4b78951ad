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

# File systems allow 255 bytes, and callers add to the name.
_LONGEST_NAME = 150
_DAY_SECONDS = 24 * 3600
# Characters that spreadsheets take for a formula at the start of a cell (OWASP, CSV
# injection), behind any number of marks.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
# Spreadsheets show no mark in front of a text.
_MARK = "'"


def file_name(text: str) -> str:
    """Return text as part of a file name.

    Characters that could clash, hide the file or leave the folder are escaped.
    """
    name = quote(text, safe="")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) <= _LONGEST_NAME:
        return name
    # Long names that begin alike still differ.
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{name[:_LONGEST_NAME]}~{digest}"


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Path], object]
) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it.

    On any failure `path` is unchanged.

    Raises:
        OSError: it cannot be written, as on a full disk, where netCDF raises
            RuntimeError.
    """
    path = Path(path)
    # The suffix stays, because writers choose the format by it.
    writer = f"{_process_home()}-{os.getpid()}-{secrets.token_hex(4)}"
    unfinished = path.with_name(f".{path.stem}.{writer}{path.suffix}")
    try:
        # Made empty first, so that the umask decides who may read it.
        unfinished.touch(exist_ok=False)
        # An interrupt amid netCDF's calls can leave xarray's lock taken, and closing
        # the file then waits for ever.
        with interrupts_held():
            write(unfinished)
            # Readers see the old file or the new one, never a part.
            os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        # netCDF raises RuntimeError for what the system refused.
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
    process = r"(?P<home>[0-9a-f]{12})-(?P<pid>[0-9]{1,9})"
    pattern = re.compile(rf"\.{re.escape(stem)}\.(?:{process}-)?[^.]+\.[^.]+")
    for path in folder.glob(f".{stem}.*"):
        name = pattern.fullmatch(path.name)
        if name is None:
            continue
        # Process ids mean something only where they were given.
        is_dead = name["home"] == _process_home() and not _is_alive(int(name["pid"]))
        with suppress(FileNotFoundError):
            if is_dead or time.time() - path.stat().st_mtime > _DAY_SECONDS:
                path.unlink()


def _is_alive(pid: int) -> bool:
    """Say whether a process of this machine and container runs."""
    try:
        # On Windows signal 0 is Ctrl+C.
        if os.name == "posix":
            os.kill(pid, 0)
    except OSError as error:
        # PermissionError: it runs, and is somebody else's.
        return not isinstance(error, ProcessLookupError)
    return True


@cache
def _process_home() -> str:
    """Return a name for where a process id is unique.

    That is the machine, its boot and the container.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        container = os.readlink("/proc/self/ns/pid")
        home = f"{boot} {container}"
    except OSError:
        # No Linux: the machine's name is what there is.
        home = platform.node()
    return hashlib.sha256(home.encode()).hexdigest()[:12]


@contextmanager
def output_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder for results if there is none; remove it again if it stays empty.

    Raises:
        OSError: it cannot be created or written to; raised before any work is done.
    """
    folder = Path(path)
    # From the innermost out, the order in which they can be removed.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Whether one may write is known only by writing: permissions do not tell of
        # full or read-only disks.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"cannot write to the output folder {folder}: {error.strerror or error}"
        ) from None
    try:
        yield folder
    finally:
        # Those that hold something are refused.
        for created in missing:
            with suppress(OSError):
                created.rmdir()


def plain(text: object) -> str:
    r"""Return the text with escapes for what a terminal would act on or could not show.

    These are control characters, which move the cursor or clear the screen, marks that
    turn the text after them around, and halves of characters. Lines are kept.

    Example:
        >>> from tl_coupling.files import plain
        >>> print(plain("\x1b[2Jgpt2"))
        \x1b[2Jgpt2
    """
    return "".join(map(_visible, str(text)))


def _visible(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()


def as_cell(value: Any) -> Any:
    """Return a value for a CSV file.

    Text that a spreadsheet would take for a formula gets a mark, numbers stay.

    Example:
        >>> from tl_coupling.files import as_cell, of_cell
        >>> as_cell("=1+1"), as_cell("-0.3"), of_cell(as_cell("=1+1"))
        ("'=1+1", '-0.3', '=1+1')
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _is_number(value):
        return f"{_MARK}{value}"
    return value


def of_cell(value: Any) -> Any:
    """Return what `as_cell` was given."""
    if isinstance(value, str) and _FORMULA.match(value):
        return value.removeprefix(_MARK)
    return value


def _is_number(text: str) -> bool:
    """Say whether text is a finite number."""
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
