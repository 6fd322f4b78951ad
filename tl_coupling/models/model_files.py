"""The files of a local model, and whether they are still those that were loaded."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tl_coupling.arguments import AnyPath

# Files that transformers reads beside the weights: configurations, tokenizers, code.
_READ = (
    "*config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.py",
)
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
# Bytes read at a time.
_CHUNK = 2**22


class FileState(NamedTuple):
    """What changes with a file's content, and costs nothing to know."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def from_path(cls, path: AnyPath) -> "FileState":
        """Return the state of a file, or of what a link leads to."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def model_files(source: AnyPath) -> dict[str, Path]:
    """Return what a local model is read from, by name: a GGUF file itself, or of a
    folder weights, configuration, tokenizer.

    What else lies beside them, such as a README or the state of an optimizer, is left
    out.
    """
    folder = Path(source)
    if not folder.is_dir():
        return {folder.name: folder}
    # Where a folder has both, transformers reads safetensors.
    weights = _SAFETENSORS if any(folder.glob("*.safetensors")) else _PICKLES
    paths = {path for pattern in (*weights, *_READ) for path in folder.glob(pattern)}
    return {path.name: path for path in sorted(paths) if path.is_file()}


def described_files(
    source: AnyPath, known_files: dict[str, list[str | int]] | None = None
) -> dict[str, list[str | int]]:
    """Return the SHA-256 and the state of each file of a local model, JSON-able.

    Cost: every file is read, unless it is in a state that this process has read or that
    is `known_files`.
    """
    described: dict[str, list[str | int]] = {}
    for name, path in model_files(source).items():
        state = FileState.from_path(path)
        earlier = (known_files or {}).get(name)
        if earlier and earlier[1:] == list(state):
            described[name] = earlier
        else:
            described[name] = [_sha256(path, state), *state]
    return described


def changed_file(source: AnyPath, described: dict[str, list[str | int]]) -> str | None:
    """Return the name of a file of a local model that is not as described: of other
    content, new or gone; `None` if none is.

    A file that was copied, moved or touched is the same file. Cost: those in another
    state are read.
    """
    files = model_files(source)
    # Known from names alone, before any file is read.
    new_or_gone = sorted(files.keys() ^ described.keys())
    if new_or_gone:
        return new_or_gone[0]
    for name, (digest, *state) in described.items():
        path = files[name]
        try:
            current = FileState.from_path(path)
            is_as_described = list(current) == state or _sha256(path, current) == digest
        except FileNotFoundError:
            return name
        if not is_as_described:
            return name
    return None


# The state is for the cache: a file in the same state need not be read again.
@lru_cache(maxsize=1024)
def _sha256(path: Path, _state: FileState) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
