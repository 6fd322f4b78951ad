"""Files are written completely or not at all."""

import hashlib
import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

from tl_coupling.interrupts import interrupts_held

# How long an interrupt waits for a file.
WRITING_SECONDS = 2.0


def file_name(text: str) -> str:
    """Text as part of a file name: characters that could clash, hide the file or leave the folder are escaped."""
    name = quote(text, safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    # File systems allow 255 bytes, and callers add to the name.
    return name if len(name) <= 150 else f"{name[:150]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it; on any failure `path` is unchanged.

    Raises:
        OSError: it cannot be written, as on a full disk, where netCDF raises RuntimeError.
    """
    path = Path(path)
    # The suffix stays, because writers choose the format by it.
    unfinished = path.with_name(f".{path.stem}.{_here()}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        unfinished.touch(exist_ok=False)
        # An interrupt amid netCDF's calls can leave xarray's lock taken, and closing the file then waits for ever.
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

    The file of a living writer stays. Whether a writer on another machine, in another container or before a reboot
    lives is unknown here: its file is removed a day after it was last written to.
    """
    name = re.compile(rf"\.{re.escape(stem)}\.(?:(?P<where>[0-9a-f]{{12}})-(?P<pid>[0-9]{{1,9}})-)?[^.]+\.[^.]+")
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
    """A folder for results, created if it does not exist, and removed again if it stays empty.

    Raises:
        OSError: it cannot be created or written to; raised before any work is done.
    """
    folder = Path(path)
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to the output folder {folder}: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        # Those that hold something are refused.
        for p in made:
            with suppress(OSError):
                p.rmdir()
