"""Saved results whose files a failing disk, or somebody with an editor, has changed."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tl_coupling as tlc
from attack.child import DONE, REFUSED, Child
from attack.subject import PROMPTS, Subject

_BLOCK = 512
_SAVED: dict[str, Callable[[tlc.Trace], Any]] = {
    "a map": lambda trace: tlc.depth_coupling(trace, k=3),
    "a mean": lambda trace: tlc.mean_depth_coupling(
        [trace, tlc.trace(trace.model, trace.tokens[:-1])], k=3
    ),
    "a trajectory": lambda trace: tlc.trajectories.measure_trajectory(
        trace, linear=False, noise=False, progress=False
    ),
    "influence": tlc.cross_token_influence,
    "products": lambda trace: tlc.dynamics.products(trace, n_draws=2),
    "directions": lambda trace: tlc.directions.directions_of(trace, 1, k=2),
}


def damaged_results(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Files that `save` wrote, damaged: loaded as they were, or refused in one line; and
    edited by hand: refused.
    """
    model = tlc.load_model(str(subject.root / "b"))
    trace = tlc.trace(model, PROMPTS[0])
    results = {name: make(trace) for name, make in _SAVED.items()}
    folder = subject.new_folder()
    folder.mkdir()
    for i in range(n):
        name = rng.choice(sorted(results))
        result, path = results[name], folder / f"{i}.nc"
        result.save(path)
        damage = rng.choice(_DAMAGES)
        event = f"loading {name} with {damage(path, rng)}"
        expected = (REFUSED,) if damage is _a_number_edited else (DONE, REFUSED)
        child = Child(lambda path=path, result=result: _check_loaded(path, result))
        yield child.faults(event, expected)


def _check_loaded(path: Path, result: Any) -> None:
    """Load a file: what is loaded must be what was saved."""
    loaded = type(result).load(path)
    if not loaded.to_dataset().identical(result.to_dataset()):
        raise AssertionError("wrong value")


def _bits_flipped(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = [rng.randrange(len(content)) for _ in range(rng.randint(1, 3))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"bits flipped at {places}"


def _a_block_of_zeros(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    size = min(_BLOCK, len(content) - start)
    content[start : start + size] = bytes(size)
    path.write_bytes(content)
    return f"{size} zeros from {start} on"


def _cut_short(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    length = rng.randrange(len(content))
    path.write_bytes(content[:length])
    return f"{length} of {len(content)} bytes"


def _a_number_edited(path: Path, rng: random.Random) -> str:
    """By another program that reads netCDF, to a value that could be one."""
    import netCDF4

    with netCDF4.Dataset(path, "r+") as file:
        numbers = [
            name
            for name, variable in file.variables.items()
            if variable.size and np.dtype(variable.dtype).kind == "f"
        ]
        name = rng.choice(sorted(numbers))
        values = np.ma.getdata(file[name][...])
        place = rng.randrange(values.size)
        values.reshape(-1)[place] = rng.random()
        file[name][...] = values
    return f"{name} edited at {place}"


# Whole blocks in each other's place are left out: HDF5 itself may then read for ever.
_DAMAGES: list[Callable[[Path, random.Random], str]] = [
    _bits_flipped,
    _bits_flipped,
    _bits_flipped,
    _a_block_of_zeros,
    _cut_short,
    _a_number_edited,
]
