"""A depth coupling of an 8B-shaped random model on a GPU: seconds, memory, and the
share of the GPU's peak.

    python -m benchmarks.gpu --out benchmarks/results                       # 32 blocks
    × 4096, 64 tokens, k = 50 python -m benchmarks.gpu --device cpu --layers 1 --width
    512 --k 10     # does it run?

Weights are random, in the proportions of Llama-3-8B, bfloat16 as they are published;
each block is computed in float32. The peak is what one large float32 product reaches in
the same run (TF32 is off, as in all that tl_coupling computes); the share of it counts
the products that no way to these Jacobians can do without. Where the weights do not
fit, `--one-at-a-time` builds, measures and frees one block after the other: the same
work, on other streams.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.table import Table

import tl_coupling as tlc
from benchmarks.options import add_k, add_out, add_tokens
from benchmarks.stages import (
    STAGES,
    bare_products,
    best_flops_per_second,
    fill_both,
    random_ids,
    random_llama,
)
from benchmarks.timing import (
    BenchmarkError,
    Memory,
    chosen_device,
    console,
    environment,
    stop,
    timed,
    write,
)


def traces(
    options: argparse.Namespace, device: torch.device, seconds: dict[str, float]
) -> Iterator[tlc.Trace]:
    """Yield the whole model traced, or one block after the other as a model of its own."""
    n_models, n_blocks = (
        (options.layers, 1) if options.one_at_a_time else (1, options.layers)
    )
    for seed in range(n_models):
        model = random_llama(
            options.width,
            n_blocks,
            device,
            getattr(torch, options.dtype),
            options.tokens,
            seed,
        )
        if seed == 0:
            tlc.depth_coupling(
                tlc.trace(model, random_ids(3)), k=2, layers=[0], progress=False
            )
        traced, forward = timed(
            device, lambda model=model: tlc.trace(model, random_ids(options.tokens))
        )
        seconds["forward"] += forward
        yield traced


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of each stage over all blocks, memory, and FLOP/s of the Jacobians as a
    share of the peak.
    """
    peak = best_flops_per_second(device, options.peak_size)
    seconds = dict.fromkeys(STAGES, 0.0)
    memory = Memory(device)
    memory.start()
    matrices = []
    products = {}
    for traced in traces(options, device, seconds):
        products = bare_products(traced.model.cfg, options.tokens)
        for layer, block in enumerate(traced.blocks):
            _, gate = timed(
                device, lambda block=block: block.reference(options.tokens - 1)
            )
            J, jacobian = timed(
                device,
                lambda layer=layer, traced=traced: tlc.block_jacobian(traced, layer),
            )
            seconds["gate"] += gate
            seconds["jacobians"] += jacobian
            matrices.append(J)
        del traced, block
    J = torch.stack(matrices)
    del matrices
    spectrum, seconds["svd"] = timed(
        device, lambda: tlc.svd(J, min(options.k + 1, options.width))
    )
    _, seconds["pairs"] = timed(device, lambda: fill_both(J, spectrum.top(options.k)))
    flops = options.layers * sum(product.flops for product in products.values())
    return {
        "shapes": {
            "n_pos": options.tokens,
            "n_layers": options.layers,
            "d_model": options.width,
            "k": options.k,
        },
        "dtype_of_weights": options.dtype,
        "one_block_at_a_time": options.one_at_a_time,
        "seconds": seconds,
        "memory_mib": memory.stop(),
        "peak_tflop_per_second": peak / 1e12,
        "tflop_of_bare_products": flops / 1e12,
        "share_of_peak": flops / seconds["jacobians"] / peak,
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the figures for reading."""
    run = results["run"]
    drawn = Table(
        "",
        run["dtype_of_weights"],
        title=f"{results['environment']['device_name']}\n{run['shapes']}",
    )
    drawn.columns[1].justify = "right"
    for stage in STAGES:
        drawn.add_row(
            stage, f"{run['seconds'][stage]:.3f} s", end_section=stage == STAGES[-1]
        )
    drawn.add_row(
        "largest float32 product", f"{run['peak_tflop_per_second']:.2f} TFLOP/s"
    )
    drawn.add_row(
        "bare products of the Jacobians", f"{run['tflop_of_bare_products']:.2f} TFLOP"
    )
    drawn.add_row("share of the peak", f"{run['share_of_peak']:.0%}")
    memory = run["memory_mib"]
    drawn.add_row(
        "memory at its peak", f"{memory.get('gpu_peak', memory['peak']):.0f} MiB"
    )
    return [drawn]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="cuda",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=32, help="blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--width", type=int, default=4096, help="of the stream (default: %(default)s)"
    )
    add_tokens(parser)
    add_k(parser)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the weights",
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="one block in memory; the other blocks' are freed",
    )
    parser.add_argument(
        "--peak-size",
        type=int,
        help="of the large product (default: 8192 on a GPU, else 2048)",
    )
    add_out(parser)
    options = parser.parse_args(arguments)
    try:
        device = chosen_device(options.device)
        results = {"environment": environment(device), "run": measure(options, device)}
    except (BenchmarkError, ValueError) as error:
        stop(error)
    except torch.OutOfMemoryError:
        stop("the GPU has too little memory for these blocks: use --one-at-a-time")
    out = console()
    for table in tables(results):
        out.print(table)
    out.print(f"wrote {write(options.out, 'gpu', results)}")


if __name__ == "__main__":
    main()
