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
    """Where copies are kept; it may not exist yet."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tl_coupling"
    )


def write_copy(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder beside `folder`, in the cache, then rename it; a
    damaged one is replaced.

    Raises:
        OSError: the cache cannot be written.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    # What a killed conversion left (half a gigabyte) and nobody touched for an hour.
    for left_over in root.glob("tmp*/"):
        with suppress(FileNotFoundError):
            if (
                max(path.stat().st_mtime for path in (left_over, *left_over.rglob("*")))
                < time.time() - 3600
            ):
                shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=root) as room:
        write(new := Path(room, "new"))
        for file in new.iterdir():
            _write_through(file)
        # Where this fails, another process was faster.
        with suppress(OSError):
            if folder.exists():
                os.rename(folder, Path(room, "damaged"))
            os.rename(new, folder)


def is_whole(folder: Path) -> bool:
    """Whether every file is complete. Opening the weights compares their length with
    their table of contents.
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
    """The files of weights, one or several."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return [folder / shard for shard in sorted(set(shards))]


def _is_whole_object(file: Path, key: str) -> bool:
    """Whether a file holds a JSON object to its end. Parsing it is slow: a tokenizer
    may have 33 MB.
    """
    text = file.read_text("utf-8").strip()
    return text.startswith("{") and text.endswith("}") and f'"{key}"' in text


def _write_through(file: Path) -> None:
    """Have the system write a file to the disk, so that after a crash it is not of the
    right length, and empty.
    """
    with file.open("rb+") as written:
        os.fsync(written.fileno())
