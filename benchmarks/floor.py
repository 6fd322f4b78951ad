"""How far a depth coupling, and a survey's prompt, are from what no way to them can do
without.

    python -m benchmarks.floor --tokens 10 64 --against 5c3ec58

The floor of a prompt is the model's forward pass, a forward pass and a pull-back of
each block, the matrix products of its Jacobians, their SVDs, and the matrices A of all
pairs. All of it, and what it is compared with, is measured in turn in one process;
the same of another commit in a process of its own, after it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

import tl_coupling as tlc
from benchmarks.options import add_k, add_model, add_out
from benchmarks.stages import bare_products, seconds_of
from benchmarks.timing import (
    LONG_TEXT,
    console,
    environment,
    timed,
    token_ids,
    write,
)
from tl_coupling.jacobians import fill_pairs

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# Runs in a checkout of another commit: how long its depth couplings, the fastest of each,
# and its survey of the same prompts take.
OTHER = """
import json, sys, time
import tl_coupling as tlc
name, texts, prompts, k, repeats = json.loads(sys.stdin.read())
model = tlc.load_model(name)
def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
def coupled(ids):
    return lambda: tlc.depth_coupling(tlc.trace(model, ids), k, progress=False)
runs = []
for ids in prompts:
    seconds(coupled(ids))
    runs.append(min(seconds(coupled(ids)) for _ in range(repeats)))
tlc.surveys.measure_prompts(model, texts[:1], progress=False)
survey = seconds(lambda: tlc.surveys.measure_prompts(model, texts, progress=False))
print(json.dumps({"runs": runs, "survey": survey / len(texts)}))
"""


def floor(model: nn.Module, ids: Sequence[int], k: int) -> dict[str, float]:
    """Return the seconds of each part of one prompt's floor."""
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        _, forward = timed(CPU, lambda: model(tokens))
    trace = tlc.trace(model, ids)

    def pass_and_pull_back() -> None:
        for block in trace.blocks:
            Y, pull_back = torch.func.vjp(block.call, block.X)
            pull_back(torch.ones_like(Y))

    _, passes = timed(CPU, pass_and_pull_back)
    J = tlc.block_jacobians(trace, progress=False)
    spectrum, svd = timed(CPU, lambda: tlc.svd(J, min(k + 1, trace.d_model)))
    A = J.new_empty(len(J), len(J), k, k)
    _, pairs = timed(CPU, lambda: fill_pairs(A, J, spectrum.top(k), "ujv"))
    products = seconds_of(bare_products(model.cfg, len(ids)), CPU, len(J))
    return {
        "forward": forward,
        "passes of blocks": passes,
        "products of J": sum(products.values()),
        "SVDs": svd,
        "pairs": pairs,
    }


def coupled(model: nn.Module, ids: Sequence[int], k: int) -> None:
    tlc.depth_coupling(tlc.trace(model, ids), k, progress=False)


def of_one_prompt(
    model: nn.Module, ids: Sequence[int], k: int, repeats: int
) -> dict[str, Any]:
    """Return the fewest seconds of each part of the floor, and of `depth_coupling`."""
    coupled(model, ids, k)
    floors = []
    wholes = []
    for _ in range(repeats):
        floors.append(floor(model, ids, k))
        wholes.append(timed(CPU, partial(coupled, model, ids, k))[1])
    parts = {name: min(of_run[name] for of_run in floors) for name in floors[0]}
    return compared(parts, min(wholes)) | {"n_pos": len(ids)}


def compared(parts: dict[str, float], seconds: float) -> dict[str, Any]:
    total = sum(parts.values())
    return {"floor": parts, "seconds": seconds, "ratio": seconds / total}


def texts_of(n: int) -> list[str]:
    """Return n prompts of 6 to 13 words."""
    words = LONG_TEXT.split()
    starts = [7 * i % (len(words) - 13) for i in range(n)]
    return [
        " ".join(words[start : start + 6 + i % 8]) for i, start in enumerate(starts)
    ]


def settings_for(model: nn.Module, k: int) -> tlc.Settings:
    """Return default settings; this k alone for a model that is too narrow for them."""
    settings = tlc.Settings()
    if max(settings.k) > model.cfg.d_model:
        return tlc.Settings(k=(k,))
    return settings


def of_survey(
    model: nn.Module, settings: tlc.Settings, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the floor and the seconds of a prompt of a survey."""
    n = len(texts)
    k = settings.largest(model.cfg.d_model)
    survey = partial(
        tlc.surveys.measure_prompts, model, settings=settings, progress=False
    )
    survey(texts[:1])
    of_prompts = [
        floor(model, tlc.trace(model, text).tokens.tolist(), k) for text in texts
    ]
    _, seconds = timed(CPU, partial(survey, texts))
    parts = {
        part: sum(of_prompt[part] for of_prompt in of_prompts) / n
        for part in of_prompts[0]
    }
    return compared(parts, seconds / n) | {"n_prompts": n}


def seconds_at(commit: str, measured: Sequence[object]) -> dict[str, Any]:
    """Return how long the same takes at another commit: the depth coupling of each
    prompt, and a prompt of the survey.

    `measured` are the name of the model, the texts of the survey, the token ids of the
    prompts, k and how often each is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder) / "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", tree, commit], check=True)
        try:
            done = subprocess.run(
                [sys.executable, "-c", OTHER],
                cwd=tree,
                # Its own package, whatever is installed or on the path here.
                env=os.environ | {"PYTHONPATH": tree},
                input=json.dumps(measured),
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    seconds: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each part of the floor, and one for what is compared with it."""
    measured = {f"T = {run['n_pos']}": run for run in results["runs"]}
    measured["a survey's prompt"] = results["survey"]
    shown = Table(title=f"{results['model']}: seconds")
    shown.add_column("")
    for name in measured:
        shown.add_column(name, justify="right")
    of_each = list(measured.values())
    for part in of_each[0]["floor"]:
        shown.add_row(part, *(f"{run['floor'][part]:.3f}" for run in of_each))
    shown.add_section()
    totals = [sum(run["floor"].values()) for run in of_each]
    shown.add_row("floor", *(f"{total:.3f}" for total in totals))
    shown.add_row("tl_coupling", *(f"{run['seconds']:.3f}" for run in of_each))
    shown.add_row("ratio", *(f"{run['ratio']:.2f}" for run in of_each))
    if other := results.get("other"):
        seconds_there = [*other["seconds"]["runs"], other["seconds"]["survey"]]
        cells = [
            f"{there:.3f} ({there / run['seconds']:.2f} ×)"
            for there, run in zip(seconds_there, of_each, strict=True)
        ]
        shown.add_row(f"at {other['commit']}", *cells)
    return [shown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_k(parser)
    add_out(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[10, 64],
        help="lengths of single prompts (default: 10 64)",
    )
    parser.add_argument(
        "--prompts", type=int, default=24, help="of the survey (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="runs of single prompts; the fewest seconds count (default: %(default)s)",
    )
    parser.add_argument("--against", metavar="COMMIT", help="another commit, timed too")
    options = parser.parse_args(arguments)
    model = tlc.load_model(options.model)
    prompts = [token_ids(options.model, n) for n in options.tokens]
    texts = texts_of(options.prompts)
    results = {
        "model": options.model,
        "environment": environment(CPU),
        "runs": [
            of_one_prompt(model, ids, options.k, options.repeats) for ids in prompts
        ],
        "survey": of_survey(model, settings_for(model, options.k), texts),
    }
    if options.against is not None:
        measured = (options.model, texts, prompts, options.k, options.repeats)
        seconds = seconds_at(options.against, measured)
        results["other"] = {"commit": options.against, "seconds": seconds}
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, 'floor', results)}")


if __name__ == "__main__":
    main()
