"""Time of token-by-token maps against the Jacobians that they are made of, one at a
time.

    python -m benchmarks.across_tokens --tokens 64 --out benchmarks/results

Two baselines. For a self-coupling map: n calls of `block_jacobian`, one token each. For
a map of contexts with a fixed output: n Jacobians `J_{t1 t2}` through the whole block
on all rows, which is how they are taken without a key/value cache. Every map starts
from a fresh trace and includes SVDs and the matrices A. All in one process, one after
the other, so that a ratio compares like with like; the largest difference of the
Jacobians is part of the result.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

import tl_coupling as tlc
from benchmarks.options import add_k, add_model, add_out, add_tokens
from benchmarks.timing import (
    BenchmarkError,
    Memory,
    chosen_device,
    console,
    environment,
    stop,
    timed,
    token_ids,
    write,
)
from tl_coupling.models import ModelError

LAYERS = 8, 9
LONG = 128


def measure(name: str, n_tokens: int, device: torch.device, k: int) -> dict[str, Any]:
    """Seconds of the maps and of their baselines."""
    ids = token_ids(name, n_tokens)
    model = tlc.load_model(name, device=device)
    warm_up = tlc.trace(model, ids[:3])
    tlc.self_coupling(warm_up, *LAYERS, k=2)
    tlc.context_coupling(warm_up, *LAYERS, k=2)

    def single_tokens() -> None:
        trace = tlc.trace(model, ids)
        for position in range(n_tokens):
            tlc.block_jacobian(trace, LAYERS[0], position=position)

    block = tlc.trace(model, ids).blocks[LAYERS[0]]

    def full_sequence(t1: int) -> torch.Tensor:
        # Not our own fallback: plain torch.func on all rows.
        function = block.full_sequence(t1, n_tokens - 1)
        with block.evaluation():
            return torch.func.jacrev(function, chunk_size=64)(block.X[t1])

    ours, _ = block.jacobians(range(n_tokens), n_tokens - 1)
    largest = 0.0

    def full_sequences() -> None:
        nonlocal largest
        for t1 in range(n_tokens):
            J = full_sequence(t1)
            largest = max(largest, float((ours[t1] - J).norm() / J.norm()))

    seconds = {}
    for stage, work in {
        "n single-token Jacobians": single_tokens,
        "self-coupling, two layers": lambda: tlc.self_coupling(
            tlc.trace(model, ids), *LAYERS, k=k
        ),
        "self-coupling, one layer": lambda: tlc.self_coupling(
            tlc.trace(model, ids), LAYERS[0], k=k
        ),
        "context, input fixed": lambda: tlc.context_coupling(
            tlc.trace(model, ids), *LAYERS, fixed="input", k=k
        ),
        "context, output fixed": lambda: tlc.context_coupling(
            tlc.trace(model, ids), *LAYERS, fixed="output", k=k
        ),
        "n full-sequence Jacobians": full_sequences,
    }.items():
        _, seconds[stage] = timed(device, work)
    return {
        "tokens": ids,
        "shapes": {
            "n_pos": n_tokens,
            "d_model": warm_up.d_model,
            "k": k,
            "layers": list(LAYERS),
        },
        "seconds": seconds,
        "largest_relative_difference_of_jacobians": largest,
        "self_coupling_over_single_tokens": seconds["self-coupling, two layers"]
        / seconds["n single-token Jacobians"],
        "full_sequences_over_context": seconds["n full-sequence Jacobians"]
        / seconds["context, output fixed"],
    }


def memory(name: str, device: torch.device, k: int) -> dict[str, Any]:
    """Peak memory of a self-coupling map of 128 tokens."""
    ids = token_ids(name, LONG)
    model = tlc.load_model(name, device=device)
    recorded = Memory(device)
    tlc.self_coupling(tlc.trace(model, ids[:3]), *LAYERS, k=2)
    recorded.start()
    tlc.self_coupling(tlc.trace(model, ids), *LAYERS, k=k)
    return {"n_pos": LONG, "memory_mib": recorded.stop()}


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the figures for reading."""
    run = results["run"]
    long = results["long"]
    machine = f"{results['model']} on {results['environment']['device_name']}"
    drawn = Table(
        "",
        f"T = {run['shapes']['n_pos']}",
        title=f"{machine}, {results['environment']['cpu_threads']} threads",
    )
    drawn.columns[1].justify = "right"
    for stage, seconds in run["seconds"].items():
        drawn.add_row(stage, f"{seconds:.2f} s")
    drawn.add_section()
    drawn.add_row(
        "self-coupling / single-token Jacobians",
        f"{run['self_coupling_over_single_tokens']:.2f} ×",
    )
    drawn.add_row(
        "full-sequence Jacobians / context map",
        f"{run['full_sequences_over_context']:.1f} ×",
    )
    drawn.add_row(
        "largest relative difference of J",
        f"{run['largest_relative_difference_of_jacobians']:.1e}",
    )
    memory_row = f"self-coupling of {long['n_pos']} tokens"
    memory = long["memory_mib"]
    drawn.add_row(f"{memory_row}: memory at its peak", f"{memory['peak']:.0f} MiB")
    drawn.add_row(f"{memory_row}: memory before", f"{memory['after_warm_up']:.0f} MiB")
    return [drawn]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.across_tokens", description=__doc__.splitlines()[0]
    )
    add_tokens(parser)
    add_k(parser)
    add_model(parser)
    add_out(parser)
    options = parser.parse_args(arguments)
    device = chosen_device("auto")
    results = {"model": options.model, "environment": environment(device)}
    try:
        results["long"] = memory(options.model, device, options.k)
        results["run"] = measure(options.model, options.tokens, device, options.k)
    except (BenchmarkError, ModelError, ValueError, OSError) as error:
        stop(error)
    out = console()
    for table in tables(results):
        out.print(table)
    out.print(f"wrote {write(options.out, 'across_tokens', results)}")


if __name__ == "__main__":
    main()
