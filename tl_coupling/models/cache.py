"""Copies of models in HuggingFace format, in the user's cache: whole or not there,
whoever writes them at once.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def cache_root() -> Path:
    """Return where copies are kept; it may not exist yet."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "tl_coupling"


def write_copy(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder beside `folder`, in the cache, then rename it; replace
    a damaged one.

    Raises:
        OSError: the cache cannot be written.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(root)
    # In the same folder: a rename does not cross file systems.
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        copy = Path(temporary, "new")
        write(copy)
        for file in copy.iterdir():
            _write_through(file)
        # Where this fails, another process was faster.
        with suppress(OSError):
            # A folder that is not empty cannot be renamed over.
            if folder.exists():
                os.rename(folder, Path(temporary, "damaged"))
            os.rename(copy, folder)


def _remove_left_overs(root: Path) -> None:
    """Remove what a killed conversion left (half a gigabyte) and nobody touched for an
    hour.
    """
    an_hour_ago = time.time() - 3600
    for left_over in root.glob("tmp*/"):
        with suppress(FileNotFoundError):
            # A file that is being written is younger than its folder.
            paths = (left_over, *left_over.rglob("*"))
            if max(path.stat().st_mtime for path in paths) < an_hour_ago:
                shutil.rmtree(left_over, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Say whether every file is complete.

    Opening the weights compares their length with their table of contents.
    """
    from safetensors import SafetensorError, safe_open

    keys = {
        "config.json": "model_type",
        "tokenizer.json": "model",
        "tokenizer_config.json": "tokenizer_class",
    }
    try:
        for file in _weights(folder):
            with safe_open(file, "pt") as weights:
                if not weights.keys():
                    return False
        return all(_is_whole_object(folder / name, key) for name, key in keys.items())
    except (OSError, ValueError, KeyError, SafetensorError):
        return False


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights, one or several."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return [folder / shard for shard in sorted(set(shards))]


def _is_whole_object(file: Path, key: str) -> bool:
    """Say whether a file holds a JSON object to its end.

    Parsing it would be slow: a tokenizer may have 33 MB.
    """
    text = file.read_text("utf-8").strip()
    return text.startswith("{") and text.endswith("}") and f'"{key}"' in text


def _write_through(file: Path) -> None:
    """Have the system write a file to the disk, so that after a crash it is not of the
    right length, and empty.
    """
    with file.open("rb+") as written:
        os.fsync(written.fileno())
