"""Files of a model that change while it is measured: in place, by another file, or for
good.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import tiny
import tl_coupling as tlc
from attack.child import DONE, REFUSED, Child
from attack.subject import PROMPTS, Subject, check_run, finished, without_costs

_WEIGHTS = "model.safetensors"


def changes_under_streamed_models(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of a model whose weights are read as they are needed."""
    yield from _changes(subject, rng, n, "stream")


def changes_under_resident_models(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of a model that every unit loads anew."""
    yield from _changes(subject, rng, n, "resident")


def _changes(
    subject: Subject, rng: random.Random, n: int, memory: str
) -> Iterator[list[str]]:
    """Every result must be of one model; with its files back the run goes on, and with
    others it is refused.
    """
    folders = [subject.root / f"{name}-{memory}" for name in ("before", "after")]
    for seed, folder in enumerate(folders):
        tiny.huggingface_model("llama", seed).save_pretrained(folder)
        tiny.save_tokenizer(folder)
    calm = [_calm(_survey(folder, memory), subject.new_folder()) for folder in folders]
    for _ in range(n):
        model = subject.root / f"changing-{memory}"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(folders[0], model)
        survey = _survey(model, memory)
        results = subject.new_folder()
        child = Child(partial(tlc.run_survey, survey, results, progress=False))
        child.wait(rng.uniform(0, 0.7) * subject.seconds)
        change = rng.choice(_CHANGES)
        change(model / _WEIGHTS, (folders[1] / _WEIGHTS).read_bytes())
        event = f"{change.__name__} under a {memory} model in {results.name}"
        faults = child.faults(event, (DONE, REFUSED))
        values = {name: _values(results / name) for name in finished(results)}
        # The run may not have begun when the files changed.
        sources = [
            i
            for i in (0, 1)
            if values and all(calm[i][1][name] == values[name] for name in values)
        ]
        if values and not sources:
            faults.append(
                f"wrong value: {', '.join(values)} are not of one model after {event}"
            )
        for i in sources[:1]:
            shutil.copy(folders[1 - i] / _WEIGHTS, model)
            refused = Child(partial(check_run, survey, results, calm[1 - i][0]))
            faults += refused.faults(
                f"run again with other weights after {event}", (REFUSED,)
            )
            shutil.copy(folders[i] / _WEIGHTS, model)
            again = Child(partial(check_run, survey, results, calm[i][0]))
            faults += again.faults(f"run again with its own weights after {event}")
        yield faults


def _survey(folder: Path, memory: str) -> tlc.Survey:
    settings = tlc.Settings(k=(2, 4), n_singular_values=4)
    return tlc.Survey(
        {"model": folder}, PROMPTS, settings=settings, prompts_per_unit=1, memory=memory
    )


def _calm(survey: tlc.Survey, folder: Path) -> tuple[object, dict[str, bytes]]:
    """Return what an undisturbed run gives: the whole, and the values of each unit."""
    undisturbed = without_costs(tlc.run_survey(survey, folder, progress=False))
    return undisturbed, {name: _values(folder / name) for name in finished(folder)}


def _values(path: Path) -> bytes:
    """Return the numbers of a unit's result, without what it says of where they are
    from.
    """
    import xarray

    data = xarray.load_dataset(path)
    return b"".join(
        data[name].values.tobytes()
        for name in sorted(data.data_vars)
        if data[name].dtype.kind == "f"
    )


def _in_place(shard: Path, content: bytes) -> None:
    shard.write_bytes(content)


def _replaced(shard: Path, content: bytes) -> None:
    replacement = shard.with_suffix(".new")
    replacement.write_bytes(content)
    os.replace(replacement, shard)


def _removed(shard: Path, content: bytes) -> None:
    shard.unlink()


_CHANGES: list[Callable[[Path, bytes], None]] = [_in_place, _replaced, _removed]
