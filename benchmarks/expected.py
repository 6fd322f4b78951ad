"""What to expect of a model: seconds and memory of one prompt's depth coupling.

    python -m benchmarks.expected --tokens 64

Each model has random weights in the shape of the one that it is named after, in
float32, and its own process. Time is that of `depth_coupling` with default settings,
the tracing of the prompt included and loading not; memory is the peak, weights
included. Matrix products are what `tl_coupling.plan` counts: by the rate of a GPU they
say what that would take at the least.
"""

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

import tl_coupling as tlc
from benchmarks.options import add_k, add_out
from benchmarks.stages import random_ids, random_model
from benchmarks.timing import Memory, console, environment, timed, write

CPU = torch.device("cpu")
TOKENS = 64
# Of GPT-NeoX: layers, width, heads.
_PYTHIA = {
    "pythia-160m": (12, 768, 12),
    "pythia-410m": (24, 1024, 16),
    "pythia-1b": (16, 2048, 8),
}
MODELS = ("gpt2", *_PYTHIA)


def configuration(name: str) -> Any:
    """Return the transformers configuration of a model's shape."""
    from transformers import GPT2Config, GPTNeoXConfig

    if name == "gpt2":
        config: Any = GPT2Config()
        config.architectures = ["GPT2LMHeadModel"]
        return config
    n_layers, width, n_heads = _PYTHIA[name]
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
    )
    config.architectures = ["GPTNeoXForCausalLM"]
    return config


def measured(name: str, n_tokens: int, k: int, repeats: int) -> dict[str, Any]:
    """Return the fewest seconds, the peak and the planned products of one model."""
    model = random_model(configuration(name), name, CPU)
    cfg: Any = model.cfg
    ids = random_ids(n_tokens)
    memory = Memory(CPU)

    def coupling() -> object:
        return tlc.depth_coupling(tlc.trace(model, ids), k=k, progress=False)

    coupling()
    memory.start()
    seconds = min(timed(CPU, coupling)[1] for _ in range(repeats))
    plan = tlc.plan(model, k=k, tokens=n_tokens)
    return {
        "model": name,
        "n_layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "seconds": seconds,
        "peak_mib": memory.stop()["peak"],
        "planned_tflop": sum(plan.flops.values()) / 1e12,
    }


def file_name(n_tokens: int) -> str:
    """Return the name of a file for each length: one does not replace another."""
    if n_tokens == TOKENS:
        return "expected"
    return f"expected_{n_tokens}"


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each model."""
    machine = results["environment"]
    shown = Table(
        title=f"Depth coupling of one prompt, T = {results['n_pos']}, k = {results['k']}, "
        f"{machine['device_name']}, {machine['cpu_threads']} threads",
    )
    for header in ("", "L", "d", "seconds", "GiB at the peak", "planned Tflop"):
        shown.add_column(header, justify="right" if header else "left")
    for run in results["runs"]:
        shown.add_row(
            run["model"],
            str(run["n_layers"]),
            str(run["d_model"]),
            f"{run['seconds']:.1f}",
            f"{run['peak_mib'] / 2**10:.1f}",
            f"{run['planned_tflop']:.2f}",
        )
    return [shown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expected",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help="of the prompt (default: %(default)s)",
    )
    add_k(parser)
    add_out(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="runs of each; the fewest seconds count (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    runs = []
    for name in options.models:
        # A process of its own: the peak is that of one model.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            given = (name, options.tokens, options.k, options.repeats)
            runs.append(pool.apply(measured, given))
    results = {
        "benchmark": "expected",
        "n_pos": options.tokens,
        "k": options.k,
        "environment": environment(CPU),
        "runs": runs,
    }
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, file_name(options.tokens), results)}")


if __name__ == "__main__":
    main()
