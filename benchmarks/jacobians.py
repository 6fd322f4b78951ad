"""Jacobians of all blocks against the bare matrix products that any way to them must
do, in the same run.

    python -m benchmarks.jacobians --tokens 10 64 256 --widths 576 1024 2048 4096 --out
    benchmarks/results

The bare products are one MLP product, attention's output projection, two small products
for each head and the product of both halves, of contiguous float32 matrices in the
shapes of the model's weights, repeated for each block. They and the stages of a depth
coupling are measured in turns, and the fewest seconds of each count. "jacobians"
includes the comparison with the reference, "gate" is the making of that reference.

Measured are an embedded model at several prompt lengths and cut off at several depths,
and random models in Llama's proportions of several widths.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

import tl_coupling as tlc
from benchmarks.options import add_k, add_model, add_out
from benchmarks.stages import (
    STAGES,
    bare_products,
    by_stage,
    random_ids,
    random_llama,
    seconds_of,
)
from benchmarks.timing import (
    BenchmarkError,
    chosen_device,
    console,
    environment,
    stop,
    token_ids,
    write,
)
from tl_coupling.models import ModelError


def measure(
    model: nn.Module, ids: Sequence[int], device: torch.device, k: int, repeats: int
) -> dict[str, Any]:
    """Seconds of the stages and of the bare products, in turns, and their ratio."""
    cfg: Any = model.cfg
    products = bare_products(cfg, len(ids))
    n_layers = int(cfg.n_layers)
    by_stage(model, ids[:3], device, min(k, 2))
    rounds = [
        (seconds_of(products, device, n_layers), by_stage(model, ids, device, k)[0])
        for _ in range(repeats)
    ]
    bare, stages = (
        {name: min(seconds[name] for seconds in of_rounds) for name in of_rounds[0]}
        for of_rounds in zip(*rounds, strict=True)
    )
    products_alone = sum(bare.values())
    return {
        "shapes": {
            "n_pos": len(ids),
            "n_layers": n_layers,
            "d_model": cfg.d_model,
            "d_mlp": cfg.d_mlp,
            "k": k,
        },
        "seconds": stages,
        "bare_products": bare,
        "gflop": {
            name: n_layers * product.flops / 1e9 for name, product in products.items()
        },
        "jacobians_over_bare": stages["jacobians"] / products_alone,
        "jacobians_and_gate_over_bare": (stages["jacobians"] + stages["gate"])
        / products_alone,
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the figures for reading."""
    machine = (
        f"{results['environment']['device_name']}, "
        f"{results['environment']['cpu_threads']} threads"
    )
    drawn = Table(
        "",
        title=f"Seconds of all blocks' Jacobians, and of their bare matrix products\n{machine}",
    )
    for header in ("L", "d", "T", *STAGES, "bare", "J / bare", "with gate"):
        drawn.add_column(
            {"jacobians": "J"}.get(header, header), justify="right", no_wrap=True
        )
    for run in results["runs"]:
        shapes = run["shapes"]
        drawn.add_row(
            run["model"],
            *(str(shapes[name]) for name in ("n_layers", "d_model", "n_pos")),
            *(f"{run['seconds'][stage]:.2f}" for stage in STAGES),
            f"{sum(run['bare_products'].values()):.2f}",
            f"{run['jacobians_over_bare']:.1f} ×",
            f"{run['jacobians_and_gate_over_bare']:.1f} ×",
        )
    return [drawn]


def cut_off(model: Any, n_layers: int) -> nn.Module:
    """Return the model with its first blocks alone."""
    model.blocks = model.blocks[:n_layers]
    model.original_model.model.layers = model.original_model.model.layers[:n_layers]
    model.cfg.n_layers = n_layers
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jacobians", description=__doc__.splitlines()[0]
    )
    add_model(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="*",
        default=[10, 64, 256],
        metavar="T",
        help="prompt lengths",
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="*",
        default=[7, 15],
        metavar="L",
        help="first blocks alone, at the middle length",
    )
    parser.add_argument(
        "--widths", type=int, nargs="*", default=[576, 1024, 2048, 4096], metavar="D"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=1,
        help="of the random models (default: %(default)s)",
    )
    add_k(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="the fewest seconds count (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_out(parser)
    options = parser.parse_args(arguments)
    out = console()
    try:
        device = chosen_device(options.device)
        results: dict[str, Any] = {
            "environment": environment(device),
            "repeats": options.repeats,
            "runs": [],
        }

        def add(name: str, model: nn.Module, ids: Sequence[int]) -> None:
            out.print(f"{name}: {model.cfg.n_layers} blocks, {len(ids)} tokens …")
            run = measure(model, ids, device, options.k, options.repeats)
            results["runs"].append({"model": name} | run)
            out.print(
                f"  {run['seconds']['jacobians']:.2f} s, "
                f"{run['jacobians_over_bare']:.2f} × bare products"
            )

        usual = (
            sorted(options.tokens)[len(options.tokens) // 2] if options.tokens else 64
        )
        model = tlc.load_model(options.model, device=device) if options.tokens else None
        for n_tokens in options.tokens:
            add(options.model, model, token_ids(options.model, n_tokens))
        for depth in sorted(options.depths if options.tokens else (), reverse=True):
            add(options.model, cut_off(model, depth), token_ids(options.model, usual))
        for width in options.widths:
            add(
                "random", random_llama(width, options.blocks, device), random_ids(usual)
            )
    except (BenchmarkError, ModelError, ValueError, OSError) as error:
        stop(error)
    for table in tables(results):
        out.print(table)
    out.print(f"wrote {write(options.out, 'jacobians', results)}")


if __name__ == "__main__":
    main()
