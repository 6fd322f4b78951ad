"""Ctrl-C at any moment: of a run, of a command, and inside a measurement, which must
leave the model as it was.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import tiny
import tl_coupling as tlc
from attack.child import DONE, INTERRUPTED, Child
from attack.kills import left_over
from attack.subject import PROMPTS, Finished, Subject, finished


def interrupts_of_measurements(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of traces and couplings in this process; the next result must be the same to the
    bit.
    """
    models = [
        _model(architecture, dtype, subject)
        for architecture in ("gpt2", "llama")
        for dtype in _DTYPES
    ]
    expected = [_measured(model) for model in models]
    _measured(models[0])
    seconds = max(_seconds_of(model) for model in models)
    n_done = 0
    while n_done < n:
        i = rng.randrange(len(models))
        state_before = state_of(models[i])
        after = rng.uniform(1e-4, seconds)
        if not _interrupted(models[i], after):
            continue
        n_done += 1
        event = f"an interrupt after {after:.4f} s in a measurement"
        faults = [
            f"left behind: {key} by {event}"
            for key, value in state_of(models[i]).items()
            if value != state_before[key]
        ]
        if not torch.equal(_measured(models[i]), expected[i]):
            faults.append(f"wrong value: after {event}")
        yield faults


def interrupts_of_runs(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of a run in one process, which says in one line what it keeps."""
    folder, finished_before, n_done = subject.new_folder(), Finished(), 0
    while n_done < n:
        child = subject.start(folder)
        ended = child.wait(rng.uniform(0.05, 1) * subject.seconds)
        child.signal(signal.SIGINT)
        event = f"an interrupt in {folder.name}"
        faults = child.faults(event, (DONE,) if ended else (DONE, INTERRUPTED))
        if child.status == INTERRUPTED:
            n_done += 1
            n_finished = len(finished(folder))
            message = (
                f"interrupted: {folder} keeps {n_finished} of "
                f"{subject.n_units} finished; run the same again to do the rest"
            )
            # Before it has begun there is nothing to say.
            faults += (
                [f"said {child.said()!r}: {event}"]
                if child.said().strip() not in (message, "")
                else []
            )
            faults += subject.faults(folder, finished_before, event)
            finished_before = finished(folder)
        if child.status != INTERRUPTED or rng.random() < 0.3:
            faults += subject.completed(folder, event) + subject.faults(
                folder, finished_before, event
            )
            folder, finished_before = subject.new_folder(), Finished()
        if faults or child.status == INTERRUPTED:
            yield faults


def interrupts_of_commands(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of `tl-coupling survey --workers 2`, by SIGINT or SIGTERM, once or more; no
    process may be left.
    """
    prompts = subject.root / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": str(i), "prompt": p}) + "\n"
            for i, p in enumerate(PROMPTS)
        )
    )
    for _ in range(n):
        out = subject.new_folder()
        options = [
            "survey",
            "--model",
            f"a={subject.root / 'a'}",
            "--model",
            f"b={subject.root / 'b'}",
            "--k",
            "2",
        ]
        options += [
            "--prompts",
            str(prompts),
            "--prompts-per-unit",
            "1",
            "--workers",
            "2",
            "--out",
            str(out),
        ]
        child = Child(lambda options=options: command(options))
        child.wait(rng.uniform(0.5, 10))
        family, number = child.family(), rng.choice([signal.SIGINT, signal.SIGTERM])
        for _ in range(rng.choice([1, 1, 2, 3])):
            child.signal(number)
            child.wait(rng.uniform(0, 0.3))
        event = f"{number.name} of a command in {out.name}"
        faults = child.faults(event, (DONE, 128 + number)) + left_over(family, event)
        if child.status == 128 + number and len(child.said().strip().splitlines()) != 1:
            faults.append(f"said {child.said()[-500:]!r}: {event}")
        units = out / "units"
        finished_before = finished(units)
        again = Child(lambda options=options: command(options))
        faults += again.faults(f"the command again after {event}")
        finished_after = finished(units)
        faults += [
            f"recomputed or lost: {name} after {event}"
            for name in finished_before
            if finished_after.get(name) != finished_before[name]
        ]
        yield faults


def command(arguments: list[str]) -> None:
    """Run the command line, in this process."""
    from tl_coupling.cli import main

    sys.argv = ["tl-coupling", *arguments]
    main()


_DTYPES = (torch.float32, torch.bfloat16)


def _model(architecture: str, dtype: torch.dtype, subject: Subject) -> nn.Module:
    return tiny.bridge(
        tiny.huggingface_model(architecture, dtype=dtype), subject.root / "a"
    )


def _measured(model: nn.Module) -> torch.Tensor:
    return tlc.depth_coupling(tlc.trace(model, tiny.TOKENS), k=4).matrices


def _seconds_of(model: nn.Module) -> float:
    start = time.perf_counter()
    _measured(model)
    return time.perf_counter() - start


def _interrupted(model: nn.Module, after: float) -> bool:
    """Whether a measurement was cut off by Ctrl-C that long after its start."""
    handler_before = signal.signal(
        signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT)
    )
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        _measured(model)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)
    return False


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a measurement touches: weights, dtypes, hooks, forwards, switches
    of the process.
    """
    modules = list(model.modules())
    return {
        "weights": [(p.data_ptr(), p.dtype) for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
        "forwards": ["forward" in vars(m) for m in modules],
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.allow_tf32,
        "sdpa": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "handler": signal.getsignal(signal.SIGINT),
    }
