"""What coupling in a training loop takes, in times of a training step.

    python -m benchmarks.training --widths 64 128

A random Llama of six blocks is trained on batches of 8 × 64 tokens. In turn are timed: a
step alone; a measurement at one prompt of 16 tokens (`training.measure`); and a step with
coupling as an objective at the last of 16 tokens (`training.coupling`), with the streams
that enter the blocks as constants, and differentiated.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tl_coupling as tlc
from benchmarks.options import add_out
from benchmarks.timing import console, environment, timed, write

CPU = torch.device("cpu")
N_LAYERS = 6
K = 10
N_TOKENS = 16


def small_llama(width: int) -> nn.Module:
    """Return a random Llama of six blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    objective: Callable[[], Tensor] | None = None,
) -> None:
    """Take one training step, with an objective added to the loss."""
    loss = model(ids, labels=ids).loss
    if objective is not None:
        loss = loss - objective()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def seconds_of_each(width: int, repeats: int) -> dict[str, float]:
    """Return the fewest seconds of each, measured in turn in one process."""
    model: Any = small_llama(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    blocks = model.model.layers

    def run() -> object:
        return model(ids[:1, :N_TOKENS])

    objective = partial(tlc.training.coupling, blocks, run, K)
    timed_parts: dict[str, Callable[[], object]] = {
        "step": partial(step, model, optimizer, ids),
        "measure": partial(tlc.training.measure, blocks, run, K),
        "step with coupling, constant streams": partial(
            step, model, optimizer, ids, partial(objective, activations="detached")
        ),
        "step with coupling": partial(step, model, optimizer, ids, objective),
    }
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, part in timed_parts.items():
            _, taken = timed(CPU, part)
            # The first run warms up.
            if repeat:
                seconds.setdefault(name, []).append(taken)
    return {name: min(runs) for name, runs in seconds.items()}


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each part, with columns for each width."""
    shown = Table(title=f"{N_LAYERS} blocks, k = {K}, {N_TOKENS} tokens")
    shown.add_column("")
    for width in results["seconds"]:
        shown.add_column(f"d = {width}", justify="right")
        shown.add_column("times a step", justify="right")
    for name in next(iter(results["seconds"].values())):
        cells = []
        for seconds in results["seconds"].values():
            cells.append(f"{seconds[name]:.3f}")
            cells.append(f"{seconds[name] / seconds['step']:.1f}")
        shown.add_row(name, *cells)
    return [shown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_out(parser)
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128],
        help="of the streams (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="runs of each; the fewest seconds count (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    results = {
        "environment": environment(CPU),
        "seconds": {
            str(width): seconds_of_each(width, options.repeats)
            for width in options.widths
        },
    }
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, 'training', results)}")


if __name__ == "__main__":
    main()
