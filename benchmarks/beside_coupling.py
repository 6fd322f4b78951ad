"""What else is measured of one prompt's blocks, in times of its depth coupling.

    python -m benchmarks.beside_coupling --tokens 10

Coupling, carriers, products of blocks with their draws, frozen coupling and eigenvalues
are measured in turn in one process, each with its default settings; and 50 directions of
the middle layer are steered along, at five lengths on eight prompts.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

import tl_coupling as tlc
from benchmarks.options import add_k, add_model, add_out
from benchmarks.timing import console, environment, timed, token_ids, write
from tl_coupling.blocks import Trace

CPU = torch.device("cpu")
N_DIRECTIONS = 50
SCALES = (0.01, 0.03, 0.1, 0.2, 0.3)
STEERED = (
    "What is the capital of France? The capital is",
    "The mitochondria is the powerhouse of the",
    "In 1969, astronauts landed for the first time on the",
    "If Anna has three apples and eats one, she has",
    "The opposite of hot is",
    "Water boils at one hundred degrees",
    "The largest planet in the solar system is",
    "def fibonacci(n): return fibonacci(n - 1) + fibonacci(n -",
)
Measure = Callable[[Trace], object]


def measures(k: int) -> dict[str, Measure]:
    """Return what is timed, by name; the first is what the others are compared with."""
    return {
        "depth_coupling": partial(tlc.depth_coupling, k=k, progress=False),
        "carriers": partial(tlc.carriers, k=min(k, 10), progress=False),
        "dynamics.products": partial(tlc.dynamics.products, progress=False),
        "frozen_coupling": partial(
            tlc.comparisons.frozen_coupling, k=k, progress=False
        ),
        "dynamics.eigenvalues": partial(tlc.dynamics.eigenvalues, progress=False),
        "directions.steer": steer,
    }


def steer(trace: Trace) -> tlc.directions.Steering:
    """Steer the traced model along the top directions of its middle layer."""
    k = min(N_DIRECTIONS, trace.d_model)
    directions = tlc.directions.directions_of(trace, trace.n_layers // 2, k)
    return tlc.directions.steer(
        trace.model, STEERED, directions, SCALES, progress=False
    )


def seconds_of_each(
    model: str, n_tokens: int, k: int, repeats: int
) -> dict[str, float]:
    """Return the fewest seconds of each measure; each run traces the prompt anew."""
    loaded = tlc.load_model(model)
    ids = token_ids(model, n_tokens)
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, measure in measures(k).items():
            trace = tlc.trace(loaded, ids)
            _, taken = timed(CPU, partial(measure, trace))
            # The first run warms up.
            if repeat:
                seconds.setdefault(name, []).append(taken)
    return {name: min(of_runs) for name, of_runs in seconds.items()}


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each measure."""
    seconds = results["seconds"]
    coupling = seconds["depth_coupling"]
    shown = Table(title=f"{results['model']}, T = {results['n_pos']}")
    shown.add_column("")
    shown.add_column("seconds", justify="right")
    shown.add_column("times depth_coupling", justify="right")
    for name, taken in seconds.items():
        shown.add_row(name, f"{taken:.2f}", f"{taken / coupling:.1f}")
    return [shown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside_coupling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_k(parser)
    add_out(parser)
    parser.add_argument(
        "--tokens", type=int, default=10, help="of the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="runs of each; the fewest seconds count (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    results = {
        "model": options.model,
        "n_pos": options.tokens,
        "k": options.k,
        "environment": environment(CPU),
        "seconds": seconds_of_each(
            options.model, options.tokens, options.k, options.repeats
        ),
    }
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, 'beside_coupling', results)}")


if __name__ == "__main__":
    main()
