"""Depth coupling of a model that is read from disk block by block: time, what bounds
it, and peak memory.

    python -m benchmarks.streaming --shape small --compare --accelerate
    python -m benchmarks.streaming --shape 1b --accelerate

A random Llama is written to a folder block by block, and measured in a process of its
own. With --compare it is measured in memory as well, and the largest difference between
the two results is printed: rounding, as blocks that are in memory are shared out to
processes of one thread each. With --accelerate it is also measured as a HuggingFace model that
accelerate leaves on disk (`device_map={"": "disk"}`). Memory is counted above what the
interpreter has taken with all its libraries loaded and the code warm on a tiny model.
Files may be in the system's cache: how often each weight is read says what a slow disk
would add.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.table import Table
from torch import nn

import tl_coupling as tlc
from benchmarks.options import add_k, add_out
from benchmarks.timing import BenchmarkError, Memory, console, environment, write
from tl_coupling.jacobians import coupled, decomposed
from tl_coupling.models.weights import streaming

ROOT = Path(__file__).resolve().parents[1]
SIZES = (
    "n_layers",
    "d_model",
    "d_mlp",
    "n_heads",
    "n_key_value_heads",
    "d_vocab",
    "dtype",
)
SHAPES: dict[str, tuple[int, int, int, int, int, int, str]] = {
    "tiny": (2, 64, 128, 4, 2, 100, "float32"),
    "small": (24, 768, 2048, 12, 12, 1000, "float32"),
    "1b": (16, 2048, 8192, 32, 8, 128256, "bfloat16"),
    "8b": (32, 4096, 14336, 32, 8, 128256, "bfloat16"),
}


def write_model(folder: Path, shape: str) -> int:
    """Write a random Llama of this shape in HuggingFace format, each block in its own
    file; return its weights' bytes.
    """
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    n_layers, d, d_mlp, n_heads, n_kv, vocabulary, kind = SHAPES[shape]
    dtype = getattr(torch, kind)
    d_kv = d // n_heads * n_kv
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=d,
        intermediate_size=d_mlp,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype=kind,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokenizer = Tokenizer(
        WordLevel({"<s>": 0} | {f"w{i}": i for i in range(1, 100)}, unk_token="<s>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<s>"
    )
    fast.save_pretrained(folder)
    sizes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d_kv, d),
        "self_attn.v_proj": (d_kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (d_mlp, d),
        "mlp.up_proj": (d_mlp, d),
        "mlp.down_proj": (d, d_mlp),
    }
    generator = torch.Generator().manual_seed(0)
    of_file = {}
    total = 0
    for part in range(-1, n_layers):
        if part < 0:
            embedding = torch.randn(vocabulary, d, generator=generator)
            weights = {
                "model.embed_tokens.weight": embedding,
                "model.norm.weight": torch.ones(d),
            }
        else:
            at = f"model.layers.{part}"
            weights = {
                f"{at}.{name}.weight": torch.randn(size, generator=generator)
                * size[1] ** -0.5
                for name, size in sizes.items()
            }
            weights |= {
                f"{at}.{name}_layernorm.weight": torch.ones(d)
                for name in ("input", "post_attention")
            }
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        file = f"model-{part + 2:05}-of-{n_layers + 1:05}.safetensors"
        save_file(weights, folder / file, {"format": "pt"})
        of_file |= dict.fromkeys(weights, file)
        total += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def loaded(folder: str, way: str, device: torch.device, offload: str) -> nn.Module:
    """Load the model in one of the three ways; accelerate may write to `offload`."""
    if way != "accelerate":
        return tlc.load_model(folder, memory=way, device=device)
    from transformers import AutoModelForCausalLM

    # In the dtype in which `load_model` loads.
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map={"": "disk"},
        offload_folder=offload,
    )


class Reads:
    """The bytes of tensors that are read whole from safetensors files."""

    def __init__(self) -> None:
        self.n_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is read in this context."""
        import safetensors
        from accelerate.utils import offload

        opened = safetensors.safe_open
        reads = self

        # A class of its own, because that of safetensors cannot be patched.
        class Counting:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._file = opened(*args, **kwargs)

            def __enter__(self) -> "Counting":
                self._file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self._file.__exit__(*error)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

            def get_tensor(self, name: str) -> torch.Tensor:
                tensor = self._file.get_tensor(name)
                reads.n_bytes += tensor.nbytes
                return tensor

        with (
            patch.object(safetensors, "safe_open", Counting),
            patch.object(offload, "safe_open", Counting),
        ):
            yield


@contextmanager
def stages() -> Iterator[dict[str, float]]:
    """Seconds that are spent in each stage within the context; what is read is part of
    no other stage.
    """
    from accelerate.utils.offload import OffloadedWeightsLoader

    seconds = dict.fromkeys(("reading", "svd", "pairs"), 0.0)

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def with_time(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[stage] += time.perf_counter() - start

        return with_time

    with ExitStack() as stack:
        for stage, owner, name in (
            ("reading", streaming, "_read"),
            ("reading", OffloadedWeightsLoader, "__getitem__"),
            ("svd", decomposed, "svd"),
            ("pairs", coupled, "fill_pairs"),
        ):
            stack.enter_context(
                patch.object(owner, name, timed(stage, getattr(owner, name)))
            )
        yield seconds


def measured(folder: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model's depth coupling, in this process."""
    with tempfile.TemporaryDirectory() as offload:
        return _measured(folder, way, options, offload)


def _measured(
    folder: str, way: str, options: argparse.Namespace, offload: str
) -> dict[str, Any]:
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as tiny:
        write_model(Path(tiny), "tiny")
        warm = loaded(tiny, way, device, offload)
        tlc.depth_coupling(tlc.trace(warm, [1, 2, 3]), k=4)
        del warm
    ids = [(37 * i) % 99 + 1 for i in range(options.tokens)]
    taken = Memory(device)
    taken.start()
    start = time.perf_counter()
    model = loaded(folder, way, device, offload)
    after_loading = time.perf_counter()
    reads = Reads()
    with stages() as seconds, reads.counted():
        trace = tlc.trace(model, ids)
        result = tlc.depth_coupling(
            trace, k=options.k, max_memory=options.max_memory, progress=False
        )
        end = time.perf_counter()
    mib = taken.stop()
    np.save(_map_of(folder, way), result.coupling(options.k).cpu().numpy())
    seconds["trace and jacobians"] = end - after_loading - sum(seconds.values())
    return {
        "memory": way,
        "seconds": {"loading": after_loading - start, **seconds, "all": end - start},
        "read_bytes": reads.n_bytes,
        "peak_above_interpreter_mib": float(mib["peak"]) - float(mib["after_warm_up"]),
        "memory_mib": mib,
        "mean_coupling": result.mean(options.k),
        "paths": sorted(set(result.provenance["paths"].values())),
    }


def _map_of(folder: str | Path, way: str) -> Path:
    return Path(folder, f"{way}.npy")


def largest_difference(folder: str | Path, way: str, other_way: str) -> float:
    """Return the largest difference between two ways of the coupling of a pair."""
    first, second = (np.load(_map_of(folder, name)) for name in (way, other_way))
    return float(np.nanmax(np.abs(first - second)))


def in_own_process(
    folder: str, way: str, options: argparse.Namespace
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.streaming",
        "--worker",
        way,
        "--folder",
        folder,
    ]
    for name in ("tokens", "k", "device", "max_memory"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    load = os.getloadavg()[0]
    done = subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise BenchmarkError(
            f"measuring in the way {way!r} failed with status {done.returncode}"
        )
    return {"load_average_before": load} | json.loads(done.stdout.splitlines()[-1])


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each way: its seconds by stage, and its memory."""
    shape = results["shape"]
    shown = Table(
        title=f"{shape['n_layers']} layers of width {shape['d_model']} in "
        f"{shape['dtype']}, T = {results['tokens']}, k = {results['k']}: seconds"
    )
    stages = list(results["runs"][0]["seconds"])
    headers = ("weights", *stages, "times read", "MiB", "of weights")
    for header in headers:
        shown.add_column(header, justify="left" if header == "weights" else "right")
    for run in results["runs"]:
        mebibytes = run["peak_above_interpreter_mib"]
        share = mebibytes * 2**20 / results["weights_bytes"]
        seconds = [f"{run['seconds'][stage]:.1f}" for stage in stages]
        times = "" if "read_bytes" not in run else f"{_times_read(run, results):.1f}"
        shown.add_row(
            run["memory"], *seconds, times, f"{mebibytes:.0f}", f"{share:.0%}"
        )
    captions = []
    if "largest_difference" in results:
        difference = results["largest_difference"]
        captions.append(f"largest difference of a pair's coupling {difference:.1e}")
    if "difference_of_accelerate" in results:
        difference = results["difference_of_accelerate"]
        captions.append(f"of accelerate's way from ours {difference:.1e}")
    shown.caption = "; ".join(captions) or None
    return [shown]


def _times_read(run: dict[str, Any], results: dict[str, Any]) -> float:
    return run["read_bytes"] / results["weights_bytes"]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="small",
        help="of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="of the prompt (default: %(default)s)"
    )
    add_k(parser)
    parser.add_argument(
        "--device",
        default="cpu",
        help="where blocks are computed (default: %(default)s)",
    )
    parser.add_argument(
        "--max-memory",
        help='of the coupling, such as "1GiB" (default: half of what is free)',
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="measure in memory too; the numbers must be the same",
    )
    parser.add_argument(
        "--accelerate",
        action="store_true",
        help="measure it on accelerate's disk map too; the numbers must be the same",
    )
    parser.add_argument(
        "--folder",
        help="where the model is, or is to be written (default: a temporary folder)",
    )
    add_out(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.worker:
        print(json.dumps(measured(options.folder, options.worker, options)))
        return
    with tempfile.TemporaryDirectory(prefix="tl_coupling_") as room:
        folder = options.folder or room
        if not Path(folder, "config.json").exists():
            Path(folder).mkdir(exist_ok=True)
            write_model(Path(folder), options.shape)
        weights = sum(
            path.stat().st_size for path in Path(folder).glob("*.safetensors")
        )
        ways = ["stream"]
        if options.accelerate:
            ways.append("accelerate")
        if options.compare:
            ways.append("resident")
        runs = [in_own_process(folder, way, options) for way in ways]
        compared = {}
        if options.compare:
            compared["largest_difference"] = largest_difference(
                folder, "stream", "resident"
            )
        if options.accelerate:
            compared["difference_of_accelerate"] = largest_difference(
                folder, "accelerate", "stream"
            )
    results: dict[str, Any] = {
        "benchmark": "streaming",
        "shape": dict(
            zip(
                ("n_layers", "d_model", "d_mlp", "heads", "kv", "vocabulary", "dtype"),
                SHAPES[options.shape],
                strict=True,
            )
        ),
        "tokens": options.tokens,
        "k": options.k,
        "weights_bytes": weights,
        "environment": environment(torch.device(options.device)),
        "runs": runs,
        **compared,
    }
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, f'streaming_{options.shape}', results)}")


if __name__ == "__main__":
    main()
