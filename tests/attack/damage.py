"""Folders of results whose files somebody, or a failing disk, has damaged."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attack.child import DONE, REFUSED, Child
from attack.subject import Subject, finished

_VALUES = (None, [], {}, "text", 7, -1.5, True, [[None]], {"a": {"b": []}}, "\udcff")


def damaged_folders(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Finished folders with one to three damages: opened and resumed, or refused in one
    line.
    """
    for _ in range(n):
        folder = subject.new_folder()
        shutil.copytree(subject.calm, folder)
        done = [rng.choice(_DAMAGES)(folder, rng) for _ in range(rng.randint(1, 3))]
        event = f"{', '.join(done)} in {folder.name}"
        # What says what the results are of may be refused; a damaged result never is.
        expected = (
            (DONE, REFUSED)
            if any("json" in damage or "folder" in damage for damage in done)
            else (DONE,)
        )
        # A record that was changed counts for nothing, whatever it says.
        undamaged = [
            path.name
            for path in subject.calm.iterdir()
            if _content(folder / path.name) == path.read_bytes()
        ]
        contents = finished(folder).items()
        finished_before = {
            name: content
            for name, content in contents
            if {name, f"{name[:-3]}.json"} <= {*undamaged}
        }
        faults = Child(lambda folder=folder: subject.check_opened(folder)).faults(
            f"opening after {event}", expected
        )
        faults += subject.completed(folder, event, expected)
        yield faults + subject.faults(folder, finished_before, event)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _any_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def _cut_short(folder: Path, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(len(content), 1))])
    return f"{path.name} cut short"


def _one_bit_flipped(folder: Path, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"a bit flipped in {path.name}"


def _removed(folder: Path, rng: random.Random) -> str:
    (path := _any_file(folder, rng)).unlink()
    return f"{path.name} removed"


def _a_folder_of_its_name(folder: Path, rng: random.Random) -> str:
    (path := _any_file(folder, rng)).unlink()
    path.mkdir()
    return f"a folder in place of {path.name}"


def _swapped(folder: Path, rng: random.Random) -> str:
    one, other = rng.sample(
        sorted(path for path in folder.iterdir() if path.is_file()), 2
    )
    shutil.copy(one, spare := folder / ".spare")
    shutil.copy(other, one)
    os.replace(spare, other)
    return f"{one.name} and {other.name} swapped"


def _other_content(folder: Path, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    path.write_bytes(
        rng.choice(
            [
                b"",
                b"[" * 100_000,
                b"\xff\xfe{",
                b"null",
                b"1e999",
                b'{"version": 2}',
                b"NaN",
            ]
        )
    )
    return f"{path.name} overwritten"


def _another_value(folder: Path, rng: random.Random) -> str:
    """Somewhere in the JSON of a record or of the plan."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.is_file()]
    if not paths:
        return "nothing"
    path = rng.choice(paths)
    try:
        content: Any = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return "nothing"
    place, keys = content, []
    while isinstance(place, dict | list) and place:
        keys.append(
            rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[keys[-1]], dict | list) or rng.random() < 0.3:
            place[keys[-1]] = rng.choice(_VALUES)
            break
        place = place[keys[-1]]
    path.write_text(json.dumps(content))
    return f"{'.'.join(map(str, keys))} of {path.name} changed"


_DAMAGES: list[Callable[[Path, random.Random], str]] = [
    _cut_short,
    _one_bit_flipped,
    _removed,
    _a_folder_of_its_name,
    _swapped,
    _other_content,
    _another_value,
    _another_value,
]
