"""Writing results: whole or not at all."""

import hashlib
import os
import platform
import re
import secrets
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

_LONGEST = 150
_ABANDONED_SECONDS = 24 * 3600


def file_name(text: str) -> str:
    """Text as part of a file name; what could clash, be hidden or leave the folder is escaped."""
    name = quote(text, safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    # File systems end at 255; what is added to a name needs room as well.
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it; whatever goes wrong, `path` is as it was."""
    path = Path(path)
    # The ending stays: writers choose the format by it.
    unfinished = path.with_name(f".{path.stem}.{_here()}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        unfinished.touch(exist_ok=False)
        write(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def remove_left_overs(folder: Path, stem: str) -> None:
    """Remove what writers of `stem` with any ending left unfinished when they were killed.

    A file whose writer is alive stays. Of a writer on another machine, in another container or before a reboot, nobody
    here can say: its file goes a day after it was last written to.
    """
    name = re.compile(rf"\.{re.escape(stem)}\.(?:(?P<where>[0-9a-f]{{12}})-(?P<pid>[0-9]{{1,9}})-)?[^.]+\.[^.]+")
    for path in folder.glob(f".{stem}.*"):
        if not (found := name.fullmatch(path.name)):
            continue
        with suppress(FileNotFoundError):
            known = found["where"] == _here()
            if (known and not _is_alive(int(found["pid"]))) or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@cache
def _here() -> str:
    """Where a number of a process means the same one: a machine since its boot, and a container on it."""
    try:
        where = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        where = f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(where.encode()).hexdigest()[:12]


@contextmanager
def output_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder that results can be written to, made if need be; removed again if nothing came to stand in it.

    Raises:
        OSError: it cannot be made or written to; raised at once, before any work is done.
    """
    folder = Path(path)
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to the output folder {folder}: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        for p in made:
            if p.exists() and not any(p.iterdir()):
                p.rmdir()
