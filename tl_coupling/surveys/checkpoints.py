"""Checkpoints of models: which there are, in what order, and where to load them
from.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tl_coupling.arguments import AnyPath, checked
from tl_coupling.models import is_gguf

Checkpoint = int | str
# Arguments of `load_model`: a name, and a checkpoint unless the name says it.
Source = dict[str, Any]


@checked
def pythia_steps(first: int = 1) -> tuple[int, ...]:
    """Log-spaced training steps of the Pythia suite, from `first` on.

    1, 2, 4, …, 512, then 1000, 2000, 4000, …, 128000, and the last, 143000. The steps
    of the paper's emergence figure are those of `first=128`; it shows step 1 as an
    adjacency picture and as trajectories only, beside 4000 and 143000 (Aubry et al.
    2025, figures 1b, 1c–e and 16). Coupling may peak before step 128: hence the
    default. Pythia also published step 0 and every 1000th step.

    Example:
        >>> tlc.surveys.pythia_steps(first=128)
        (128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
    """
    steps = [*(2**i for i in range(10)), *(1000 * 2**i for i in range(8)), 143_000]
    return tuple(step for step in steps if step >= first)


def step_order(checkpoint: Checkpoint) -> list[tuple[bool, int, str]]:
    """Sort key of checkpoints and names: numbers in them by value."""
    parts = re.split(r"(\d+)", str(checkpoint))
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts
    ]


@checked
def local_checkpoints(folder: AnyPath) -> dict[int, Path]:
    """Checkpoints in a local folder, by training step and in that order: subfolders in
    HuggingFace format.

    Their names end in the step: `step1000`, `checkpoint-1000`, `step_0001000`.
    ValueError where there are none, or two of the same step.

    Example:
        >>> list(tlc.surveys.local_checkpoints("models/width16"))
        [0, 2]
    """
    found: dict[int, Path] = {}
    for path in sorted(file.parent for file in Path(folder).glob("*/config.json")):
        number = re.search(r"\d+$", path.name)
        if number and (there := found.setdefault(step := int(number[0]), path)) != path:
            raise ValueError(
                f"{folder}: {there.name} and {path.name} are both of step {step}"
            )
    if not found:
        wanted = "subfolders in HuggingFace format whose names end in a step, like step1000 or checkpoint-1000"
        raise ValueError(f"{folder}: no checkpoints in it; wanted {wanted}")
    return dict(sorted(found.items()))


def checkpoint_sources(
    name: AnyPath, checkpoints: Sequence[Checkpoint] | None
) -> dict[Checkpoint, Source]:
    """What `load_model` takes for each checkpoint of a hub model or local folder; by
    default all there, or Pythia's.
    """
    there = local_checkpoints(name) if Path(name).is_dir() else None
    wanted = list(checkpoints if checkpoints is not None else there or pythia_steps())
    if there is None:
        return {c: {"name": os.fspath(name), "checkpoint": c} for c in wanted}
    if unknown := [c for c in wanted if c not in there]:
        raise ValueError(
            f"{name} has no checkpoints {unknown}; there are {list(there)}"
        )
    return {c: {"name": str(there[c])} for c in wanted if isinstance(c, int)}


def is_cached(source: Source) -> bool:
    """Whether a checkpoint is local, or its config is in the hub's cache, under any of
    the usual revisions.
    """
    from huggingface_hub import try_to_load_from_cache

    name, checkpoint = source["name"], source.get("checkpoint")
    revisions = (
        [None]
        if checkpoint is None
        else [str(checkpoint), f"step{checkpoint}", f"checkpoint-{checkpoint}"]
    )
    return is_local(name) or any(
        isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        for revision in revisions
    )


def is_local(name: AnyPath) -> bool:
    """Whether this is a folder, or a GGUF file."""
    return Path(name).is_dir() or (is_gguf(os.fspath(name)) and Path(name).is_file())
