"""Blocks in the shapes of large models, one at a time: seconds, memory, and the share
of the machine's peak.

    python -m benchmarks.gpu --out benchmarks/results
    python -m benchmarks.gpu --device cpu --shapes llama-3-70b --out benchmarks/results
    python -m benchmarks.gpu --device cpu --shapes tiny --k 4 --peak-size 64

Weights are random and held in float32 on a CPU, in bfloat16, as they are published, on
a GPU; each block is computed in float32. A model of one block is built, measured and
freed, so that no shape needs more memory than its block. The peak is what one large
float32 product reaches in the same run (TF32 is off, as in all that tl_coupling
computes); the share of it counts the products that no way to a Jacobian of attention
and an MLP can do without. What `plan` says of the block stands beside the seconds: its
flops at the measured peak, which is a bound from below, and of the whole model.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from torch import nn

import tl_coupling as tlc
from benchmarks.options import add_k, add_out, add_tokens
from benchmarks.stages import (
    bare_products,
    best_flops_per_second,
    random_huggingface_model,
    random_ids,
    random_model,
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

# Family, width, MLP, heads, heads of keys, blocks. Mixtral has 8 experts, of which 2 see
# a token.
SHAPES: dict[str, tuple[str, int, int, int, int, int]] = {
    "tiny": ("Llama", 64, 224, 4, 2, 2),
    "tiny-experts": ("Mixtral", 64, 96, 4, 2, 2),
    "pythia-160m": ("GPTNeoX", 768, 3072, 12, 12, 12),
    "pythia-410m": ("GPTNeoX", 1024, 4096, 16, 16, 24),
    "pythia-1.4b": ("GPTNeoX", 2048, 8192, 16, 16, 24),
    "llama-3-8b": ("Llama", 4096, 14336, 32, 8, 32),
    "qwen3-32b": ("Qwen3", 5120, 25600, 64, 8, 64),
    "llama-3-70b": ("Llama", 8192, 28672, 64, 8, 80),
    "mixtral-8x7b": ("Mixtral", 4096, 14336, 32, 8, 32),
}
STAGES = ("gate", "jacobian", "svd", "triplets", "largest")
# Triplets that are taken from products, beside σ_1 alone.
K_OF_PRODUCTS = 10


def configuration(shape: str, n_layers: int, n_ctx: int) -> Any:
    """Return the transformers configuration of blocks in a shape."""
    import transformers

    family, width, d_mlp, n_heads, n_key_heads, _ = SHAPES[shape]
    d_head = 128 if width >= 2048 else width // n_heads
    config = getattr(transformers, f"{family}Config")(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=d_mlp,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_key_heads,
        head_dim=d_head,
        max_position_embeddings=n_ctx,
    )
    config.architectures = [f"{family}ForCausalLM"]
    return config


def measure(
    shape: str, options: argparse.Namespace, device: torch.device, peak: float
) -> dict[str, Any]:
    """Seconds of each stage of one block, memory, and what was planned."""
    _, width, _, _, _, n_layers = SHAPES[shape]
    dtype = _dtype(options, device)
    config = configuration(shape, 1, options.tokens)
    model = random_model(config, shape, device, dtype)
    trace = tlc.trace(model, random_ids(options.tokens))
    k = min(options.k, width - 1)
    few = min(K_OF_PRODUCTS, k)
    by_jacobians = tlc.plan(trace, k)
    by_products = tlc.plan(trace, few, method="products")
    memory = Memory(device)
    memory.start()
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(options.repeats):
        (block,) = trace.blocks
        block.references.clear()
        gate = timed(device, lambda block=block: block.reference(options.tokens - 1))
        seconds["gate"].append(gate[1])
        # Products first: their memory is seen before that of J.
        largest, one = timed(device, lambda: tlc.block_spectrum(trace, 0))
        top, triplets = timed(device, lambda: tlc.block_spectrum(trace, 0, few))
        seconds["largest"].append(one)
        seconds["triplets"].append(triplets)
        of_products = memory.stop()
        J, jacobian = timed(device, lambda: tlc.block_jacobian(trace, 0))
        seconds["jacobian"].append(jacobian)
        exact, svd = timed(device, lambda J=J: tlc.svd(J, k + 1))
        seconds["svd"].append(svd)
    differences = (top.S - exact.S[:few]).abs().max() / exact.S[0]
    flops = sum(one.flops for one in bare_products(model.cfg, options.tokens).values())
    is_standard = "experts" not in shape and "mixtral" not in shape
    typical = {stage: median(values) for stage, values in seconds.items()}
    return {
        "shape": shape,
        "d_model": width,
        "n_layers": n_layers,
        "n_pos": options.tokens,
        "k": k,
        "k_of_products": few,
        "weights_of_block": sum(
            p.numel() for p in trace.blocks[0].call.module.parameters()
        ),
        "dtype_of_weights": str(next(model.parameters()).dtype).removeprefix("torch."),
        "seconds": typical,
        "largest_difference_of_sigma": float(differences),
        "difference_of_largest": float((largest.S[0] - exact.S[0]).abs() / exact.S[0]),
        "steps": {"largest": int(largest.steps), "triplets": int(top.steps)},
        "memory_mib": memory.stop(),
        "memory_mib_of_products": of_products,
        "planned_tflop": {
            stage: by_jacobians.flops[stage] / 1e12
            for stage in ("gate", "jacobians", "svd")
        },
        "planned_tflop_of_triplets": by_products.flops["triplets"] / 1e12,
        "planned_peak_mib": by_jacobians.peak / 2**20,
        "planned_tflop_of_model": {
            str(size): _planned_of_model(trace, n_layers, size) for size in (few, k)
        },
        # Of experts no way can do without their rows.
        "share_of_peak": flops / typical["jacobian"] / peak if is_standard else None,
    }


def measure_whole(
    shape: str,
    modules: str,
    options: argparse.Namespace,
    device: torch.device,
    peak: float,
) -> dict[str, Any]:
    """Seconds and memory of a depth coupling of all blocks, from the prompt on, computed
    together and one after the other; and seconds a prompt of a mean. The blocks are
    HuggingFace's own `modules`, or a bridge's.
    """
    _, width, d_mlp, n_heads, _, n_layers = SHAPES[shape]
    config = configuration(shape, n_layers, options.tokens)
    dtype = _dtype(options, device)
    model: Any
    if modules == "huggingface":
        model = random_huggingface_model(config, device, dtype)
    else:
        model = random_model(config, shape, device, dtype)
    ids = random_ids(options.tokens)
    # The first call loads kernels.
    tlc.depth_coupling(tlc.trace(model, ids), 4, layers=[0, 1], progress=False)
    memory = Memory(device)
    memory.start()
    trace, tracing = timed(device, lambda: tlc.trace(model, ids))
    k = min(options.k, width)
    together, coupling = timed(
        device, lambda: tlc.depth_coupling(trace, k, progress=False)
    )
    of_together = memory.stop()
    again = tlc.trace(model, ids)
    alone, singly = timed(
        device, lambda: tlc.depth_coupling(again, k, batch=1, progress=False)
    )
    prompts = [random_ids(options.tokens, seed) for seed in range(options.prompts)]
    _, mean = timed(
        device,
        lambda: tlc.mean_depth_coupling(
            (tlc.trace(model, prompt) for prompt in prompts), k, progress=False
        ),
    )
    sizes = SimpleNamespace(
        d_model=width, d_mlp=d_mlp, n_heads=n_heads, d_head=config.head_dim
    )
    flops = sum(one.flops for one in bare_products(sizes, options.tokens).values())
    difference = (together.coupling() - alone.coupling()).abs().max()
    return {
        "shape": shape,
        "modules": modules,
        "n_layers": n_layers,
        "k": k,
        "trace": tracing,
        "depth_coupling": coupling,
        "depth_coupling_one_by_one": singly,
        "largest_difference": float(difference),
        "n_prompts": len(prompts),
        "mean_of_prompts": mean,
        "share_of_peak": n_layers * flops / coupling / peak,
        "memory_mib": of_together,
    }


def _dtype(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    name = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return getattr(torch, name)


def _planned_of_model(trace: tlc.Trace, n_layers: int, k: int) -> dict[str, float]:
    """Return the TFLOP of a depth coupling of so many such blocks, by method."""
    model = nn.Module()
    model.blocks = nn.ModuleList([trace.blocks[0].call.module] * n_layers)
    model.cfg = trace.model.cfg
    return {
        method: sum(tlc.plan(model, k, trace.n_pos, method=method).flops.values())
        / 1e12
        for method in ("jacobians", "products")
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the figures for reading: what was measured, and what follows."""
    device = results["environment"]["device_name"]
    peak = results["peak_tflop_per_second"]
    runs = results["runs"]
    few, k = runs[0]["k_of_products"], runs[0]["k"]
    measured = Table(
        *("shape", "weights", "gate", "J", "SVD", "of the peak"),
        *("σ₁ by products", "ten triplets", "memory", "that of products"),
        title=f"One block, {runs[0]['n_pos']} tokens, k = {runs[0]['k']}, {device}, "
        f"{peak:.3g} TFLOP/s",
        caption="Seconds, and GiB at the peak with the weights. Products form no "
        "Jacobian. σ of products and of J differ by at most "
        f"{max(run['largest_difference_of_sigma'] for run in runs):.0e} σ₁.",
    )
    planned = Table(
        *("shape", "planned", "measured", "blocks", "all, measured"),
        *(f"J, k = {few}", "products", f"J, k = {k}", "products"),
        title=f"What `plan` says beside it, {device}",
        caption="Seconds. Of a block: gate, J and SVD, planned at the measured peak, "
        "and measured. Of the whole model: those measured, times its blocks; then a "
        "depth coupling with all its pairs, planned at the peak, by both methods.",
    )
    for table in (measured, planned):
        for column in table.columns[1:]:
            column.justify = "right"
    for run in runs:
        seconds = run["seconds"]
        share = run["share_of_peak"]
        measured.add_row(
            run["shape"],
            f"{run['weights_of_block'] / 1e6:.0f} M",
            *(f"{seconds[stage]:.2f}" for stage in ("gate", "jacobian", "svd")),
            "" if share is None else f"{share:.0%}",
            *(f"{seconds[stage]:.2f}" for stage in ("largest", "triplets")),
            *(
                f"{_peak_mib(run[name]) / 2**10:.1f}"
                for name in ("memory_mib", "memory_mib_of_products")
            ),
        )
        of_block = seconds["gate"] + seconds["jacobian"] + seconds["svd"]
        planned.add_row(
            run["shape"],
            f"{sum(run['planned_tflop'].values()) / peak:.2f}",
            f"{of_block:.2f}",
            str(run["n_layers"]),
            f"{of_block * run['n_layers']:.0f}",
            *(
                f"{run['planned_tflop_of_model'][str(size)][method] / peak:.0f}"
                for size in (few, k)
                for method in ("jacobians", "products")
            ),
        )
    whole = Table(
        *(
            "shape",
            "modules",
            "blocks",
            "trace",
            "depth coupling",
            "one by one",
            "of the peak",
        ),
        *("memory", "a prompt of a mean"),
        title=f"A whole model in memory, all pairs, k = {k}, {device}",
        caption="Seconds, and GiB at the peak with the weights. Blocks, and prompts of a "
        "mean, are computed together, but for one by one; traces are in the mean's.",
    )
    for run in results["whole"]:
        whole.add_row(
            run["shape"],
            run["modules"],
            str(run["n_layers"]),
            f"{run['trace']:.2f}",
            f"{run['depth_coupling']:.2f}",
            f"{run['depth_coupling_one_by_one']:.2f}",
            f"{run['share_of_peak']:.1%}",
            f"{_peak_mib(run['memory_mib']) / 2**10:.1f}",
            f"{run['mean_of_prompts'] / run['n_prompts']:.2f} ({run['n_prompts']})",
        )
    return [measured, planned, whole] if results["whole"] else [measured, planned]


def _peak_mib(memory: dict[str, float]) -> float:
    return memory.get("gpu_peak", memory["peak"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="cuda",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=[shape for shape in SHAPES if "tiny" not in shape],
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--whole",
        nargs="*",
        choices=SHAPES,
        help="all blocks at once (default: the Pythias and llama-3-8b on a GPU, else "
        "none)",
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        choices=("huggingface", "bridge"),
        default=["huggingface", "bridge"],
        help="of whole models (default: both)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
        help="of the mean of a whole model (default: %(default)s)",
    )
    add_tokens(parser)
    add_k(parser)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the weights (default: bfloat16 on a GPU, else float32)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="of each block; medians are kept (default: %(default)s)",
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
        if device.type == "cuda":
            # The first call of each kernel loads it.
            measure("tiny", options, device, 1.0)
        peak = best_flops_per_second(device, options.peak_size)
        runs = []
        for shape in options.shapes:
            runs.append(measure(shape, options, device, peak))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        whole = options.whole
        if whole is None:
            whole = []
            if device.type == "cuda":
                whole = ["pythia-160m", "pythia-410m", "pythia-1.4b", "llama-3-8b"]
        results = {
            "benchmark": "gpu",
            "environment": environment(device),
            "peak_tflop_per_second": peak / 1e12,
            "runs": runs,
            "whole": [
                measure_whole(one, modules, options, device, peak)
                for one in whole
                for modules in options.modules
            ],
        }
    except (BenchmarkError, ValueError) as error:
        stop(error)
    except torch.OutOfMemoryError:
        stop("the GPU has too little memory for such a block: leave its shape out")
    out = console()
    for table in tables(results):
        out.print(table)
    name = "gpu" if device.type == "cuda" else "large_shapes"
    out.print(f"wrote {write(options.out, name, results)}")


if __name__ == "__main__":
    main()
