"""The largest singular values of blocks from products alone, and by every way to J.

    python -m benchmarks.largest --out benchmarks/results
    python -m benchmarks.largest --model path/to/model.gguf --layers 2 12 20 --k 1

Seconds of one prompt, over the blocks that were chosen: `block_spectrum`, which forms
no Jacobian, and for each way that a block's function allows, J and `svd(J, k)` together.
"linearised" takes the block's parts in closed form, "token_local" pulls the output row
back, `d_model` times, and "full_sequence" the whole prompt. The fewest seconds of
`--repeats` count; references are made beforehand, as they are the same for all.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

import tl_coupling as tlc
from benchmarks.options import add_model, add_out, add_tokens
from benchmarks.timing import (
    TEXT,
    BenchmarkError,
    console,
    environment,
    stop,
    timed,
    token_ids,
    write,
)
from tl_coupling.models import ModelError

PRODUCTS = "products"
WAYS = (
    PRODUCTS,
    "token_local_recorded",
    "token_local",
    "full_sequence",
)


def measure(trace: tlc.Trace, layers: Sequence[int], k: int, repeats: int) -> Any:
    """Seconds of each way over the layers, and how far its σ lie from those of J."""
    device = trace.residual.device
    seconds = dict.fromkeys(WAYS, 0.0)
    difference = 0.0
    last = trace.n_pos - 1
    for layer in layers:
        block = trace.blocks[layer]
        block.reference(last)
        runs = [
            timed(device, lambda layer=layer: tlc.block_spectrum(trace, layer, k))
            for _ in range(repeats)
        ]
        found = runs[0][0]
        seconds[PRODUCTS] += min(elapsed for _, elapsed in runs)
        # Of two that have one name the first is taken where it agrees.
        ways = dict(reversed(list(block.ways([last], last))))
        for name, evaluate in ways.items():
            with block.evaluation():
                runs = [
                    timed(
                        device, lambda evaluate=evaluate: tlc.svd(evaluate()[1][0], k)
                    )
                    for _ in range(repeats)
                ]
            seconds[name] += min(elapsed for _, elapsed in runs)
            exact = runs[0][0]
            largest = float((found.S - exact.S).abs().max() / exact.S[0])
            difference = max(difference, largest)
    return {
        "seconds": seconds,
        "largest_difference": difference,
        "ratios": {name: seconds[name] / seconds[PRODUCTS] for name in WAYS},
    }


def table(run: dict[str, Any]) -> Table:
    """Return the seconds of one model for reading."""
    drawn = Table(
        *("", "seconds", "over products"),
        title=f"{run['model']}: {run['k']} largest of {len(run['layers'])} blocks of "
        f"width {run['d_model']}, {run['n_pos']} tokens",
        caption=f"σ differ by at most {run['largest_difference']:.0e} σ₁.",
    )
    for name, seconds in run["seconds"].items():
        drawn.add_row(name, f"{seconds:.2f}", f"{run['ratios'][name]:.1f} ×")
    for column in drawn.columns[1:]:
        column.justify = "right"
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.largest", description=__doc__.splitlines()[0]
    )
    add_model(parser)
    parser.add_argument(
        "--layers", type=int, nargs="*", help="blocks (default: all of them)"
    )
    parser.add_argument(
        "--k", type=int, default=1, help="singular values (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="(default: %(default)s)")
    add_tokens(parser)
    add_out(parser)
    options = parser.parse_args(arguments)
    try:
        model = tlc.load_model(options.model)
        name = options.model.rpartition("/")[2]
        trace = tlc.trace(model, prompt_of(model, options))
        layers = options.layers or list(range(trace.n_layers))
        run = measure(trace, layers, options.k, options.repeats)
    except (BenchmarkError, ModelError, ValueError, OSError) as error:
        stop(error)
    run |= {
        "model": name,
        "layers": layers,
        "k": options.k,
        "d_model": trace.d_model,
        "n_pos": trace.n_pos,
    }
    results = {"environment": environment(torch.device("cpu")), "runs": [run]}
    out = console()
    out.print(table(run))
    out.print(f"wrote {write(options.out, 'largest', results)}")


def prompt_of(model: Any, options: argparse.Namespace) -> Any:
    """Return as many tokens of the fixed text as were asked for."""
    if options.model.endswith(".gguf"):
        return model.tokenizer(TEXT)["input_ids"][: options.tokens]
    return token_ids(options.model, options.tokens)


if __name__ == "__main__":
    main()
