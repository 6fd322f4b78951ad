"""Checkpoints of models: which there are, their order, and how to load them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tl_coupling.arguments import AnyPath, checked
from tl_coupling.models import Quantization, is_gguf

Checkpoint = int | str


class _Named(TypedDict):
    name: str


class Source(_Named, total=False):
    """Arguments of `load_model` that say which model is meant."""

    checkpoint: Checkpoint
    untrained: bool


class QuantizedSource(Source, total=False):
    """The same, and how the model is quantised."""

    quantization: Quantization


@checked
def pythia_steps(first: int = 1) -> tuple[int, ...]:
    """Return log-spaced training steps of the Pythia suite, from `first` on.

    1, 2, 4, …, 512, then 1000, 2000, 4000, …, 128000, and the last, 143000. The steps
    of the paper's emergence figure are those of `first=128`; it shows step 1 as an
    adjacency picture and as trajectories only, beside 4000 and 143000 (Aubry et al.
    2025, figures 1b, 1c–e and 16). Coupling may peak before step 128: hence the
    default. Pythia also published step 0 and every 1000th step.

    Example:
        >>> tlc.surveys.pythia_steps(first=128)
        (128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
    """
    powers_of_two = [2**i for i in range(10)]
    thousands = [1000 * 2**i for i in range(8)]
    # Log-spaced ones of those published: multiples of 1000 lie between the later ones.
    steps = [*powers_of_two, *thousands, 143_000]
    return tuple(step for step in steps if step >= first)


def step_order(checkpoint: Checkpoint) -> list[tuple[bool, int, str]]:
    """Return a sort key of checkpoints and names: numbers in them by value."""
    # Parentheses keep the digits: "step10" gives "step", "10" and "".
    parts = re.split(r"(\d+)", str(checkpoint))
    return [_part_order(part) for part in parts]


def _part_order(part: str) -> tuple[bool, int, str]:
    """Return the sort key of digits, or of what stands between them."""
    if part.isdecimal():
        # The text last: "01" and "1" have one value, and still an order.
        return True, int(part), part
    return False, 0, part


@checked
def local_checkpoints(folder: AnyPath) -> dict[int, Path]:
    """Return the checkpoints in a local folder, by training step and in that order.

    They are subfolders in HuggingFace format whose names end in the step: `step1000`,
    `checkpoint-1000`, `step_0001000`. Raises ValueError where there are none, or two of
    the same step.

    Example:
        >>> list(tlc.surveys.local_checkpoints("models/width16"))
        [0, 2]
    """
    path_of_step: dict[int, Path] = {}
    # Sorted, so that an error names the same two folders on every machine.
    for path in sorted(file.parent for file in Path(folder).glob("*/config.json")):
        digits = re.search(r"\d+$", path.name)
        if digits is None:
            continue
        step = int(digits[0])
        if step in path_of_step:
            raise ValueError(
                f"{folder}: {path_of_step[step].name} and {path.name} are both of step "
                f"{step}"
            )
        path_of_step[step] = path
    if not path_of_step:
        raise ValueError(
            f"{folder}: no checkpoints in it; wanted subfolders in HuggingFace format "
            "whose names end in a step, like step1000 or checkpoint-1000"
        )
    return dict(sorted(path_of_step.items()))


def checkpoint_sources(
    name: AnyPath, checkpoints: Sequence[Checkpoint] | None
) -> dict[Checkpoint, Source]:
    """Return what `load_model` takes for each checkpoint of a hub model or a folder.

    By default the checkpoints are all of the folder, or Pythia's.
    """
    if Path(name).is_dir():
        return _local_sources(name, checkpoints)
    if checkpoints is None:
        checkpoints = pythia_steps()
    return {
        checkpoint: {"name": os.fspath(name), "checkpoint": checkpoint}
        for checkpoint in checkpoints
    }


def _local_sources(
    folder: AnyPath, checkpoints: Sequence[Checkpoint] | None
) -> dict[Checkpoint, Source]:
    """Return what `load_model` takes for each checkpoint of a folder."""
    paths: dict[Checkpoint, Path] = {
        step: path for step, path in local_checkpoints(folder).items()
    }
    if checkpoints is None:
        checkpoints = list(paths)
    unknown = [checkpoint for checkpoint in checkpoints if checkpoint not in paths]
    if unknown:
        raise ValueError(
            f"{folder} has no checkpoints {unknown}; there are {list(paths)}"
        )
    return {checkpoint: {"name": str(paths[checkpoint])} for checkpoint in checkpoints}


def is_cached(source: QuantizedSource) -> bool:
    """Say whether a model can be loaded without a network.

    It is local, or its config is in the hub's cache, under any of the usual revisions.
    """
    from huggingface_hub import try_to_load_from_cache

    name = source["name"]
    if is_local(name):
        return True
    checkpoint = source.get("checkpoint")
    revisions: list[str | None] = [None]
    if checkpoint is not None:
        # The names under which hub models publish their steps.
        revisions = [str(checkpoint), f"step{checkpoint}", f"checkpoint-{checkpoint}"]
    return any(
        isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        for revision in revisions
    )


def is_local(name: AnyPath) -> bool:
    """Say whether this is a folder, or a GGUF file."""
    path = Path(name)
    return path.is_dir() or (is_gguf(os.fspath(name)) and path.is_file())
