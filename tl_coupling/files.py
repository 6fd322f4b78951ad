"""Writing results: whole or not at all."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

_LONGEST = 150


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
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(unfinished))
        # mkstemp is private; results are as readable as any new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(unfinished, 0o666 & ~umask)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


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
