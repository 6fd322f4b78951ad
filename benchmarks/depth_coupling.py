"""Time and memory of one prompt's depth coupling: the paper's released algorithm
against tl_coupling.

    python -m benchmarks.depth_coupling --tokens 10 64 --out benchmarks/results

Both get the same token ids and the same float32 weights, each in a process of its own,
so that a peak of memory belongs to one of them. Loading and one small warm-up are not
timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import tl_coupling as tlc
from benchmarks import released_algorithm as released
from benchmarks.stages import by_stage
from benchmarks.timing import (
    BenchmarkError,
    Memory,
    chosen_device,
    console,
    environment,
    source_of,
    timed,
    token_ids,
    write,
)
from tl_coupling.models import EMBEDDED_MODEL, ModelError

Maps = dict[int, dict[str, Tensor]]
ROOT = Path(__file__).resolve().parents[1]


def run_released(
    name: str, n_tokens: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Return times, memory and values of the transcription."""
    from transformers import AutoModelForCausalLM

    ids = token_ids(name, n_tokens)
    model = AutoModelForCausalLM.from_pretrained(
        source_of(name), dtype=torch.float32, attn_implementation="eager"
    )
    model.to(device).eval().requires_grad_(False)
    memory = Memory(device)

    def staged(states: Sequence[Tensor]) -> tuple[Maps, dict[str, float]]:
        seconds = {}
        Js, seconds["jacobians"] = timed(device, lambda: released.jacobians(states))
        svds, seconds["svd"] = timed(device, lambda: released.decompositions(Js))
        maps, seconds["matrices and measures"] = timed(
            device, lambda: released.couplings(Js, svds)
        )
        return maps, seconds

    staged(released.hidden_states(model, ids[:3])[:2])
    memory.start()
    runs = []
    for _ in range(repeats):
        states, forward = timed(device, lambda: released.hidden_states(model, ids))
        maps, seconds = staged(states)
        runs.append({"forward": forward, **seconds})
    for run in runs:
        run["end to end"] = sum(run.values())
    shapes = {
        "n_pos": n_tokens,
        "n_layers": len(states) - 1,
        "d_model": states[0].shape[-1],
        "k": list(released.KS),
    }
    return report(ids, shapes, runs, memory.stop(), maps)


def ours_end_to_end(model: Any, ids: Sequence[int]) -> Maps:
    """Token ids to every measure of both orientations, by public calls."""
    trace = tlc.trace(model, ids, final_norm=True)
    both = tlc.comparisons.depth_coupling_by_orientation(
        trace, k=max(released.KS), orientations=("ujv", "vju")
    )
    return released_measures(both["ujv"], both["vju"])


def released_measures(ujv: tlc.CouplingMap, vju: tlc.CouplingMap) -> Maps:
    """Return the released algorithm's measures of two maps, by the names that it gives
    them.
    """
    return {
        K: {
            "ujv_norm": ujv.spectral_miscoupling(K, p=2, absolute=True),
            "ujv_trace": ujv.spectral_miscoupling(K, p=1, absolute=True),
            "vju_norm": vju.spectral_miscoupling(K, p=2, absolute=True),
            "vju_trace": vju.spectral_miscoupling(K, p=1, absolute=True),
            "m": ujv.miscoupling(K),
            "m_normalized": ujv.normalized_miscoupling(K),
        }
        for K in released.KS
    }


def ours_by_stage(
    model: Any, ids: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Seconds of what `ours_end_to_end` is made of; "jacobians" includes the gate, as
    the released ones have none.
    """
    seconds, (A, B, S) = by_stage(model, ids, device, max(released.KS), final_norm=True)

    def measures() -> None:
        for K in released.KS:
            for M in (A[..., :K, :K], B[..., :K, :K]):
                for p in (1, 2):
                    tlc.spectral_miscoupling(M, S[:, None], p=p, absolute=True)
            tlc.miscoupling(A[..., :K, :K])
            tlc.normalized_miscoupling(A[..., :K, :K])

    _, seconds["measures"] = timed(device, measures)
    seconds["jacobians"] += seconds["gate"]
    seconds["matrices and measures"] = seconds["pairs"] + seconds["measures"]
    return seconds


def run_ours(
    name: str, n_tokens: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Return times, memory and values of tl_coupling. Memory is that of the end-to-end calls,
    which come first.
    """
    ids = token_ids(name, n_tokens)
    model = tlc.load_model(name, device=device)
    memory = Memory(device)
    warm_up = tlc.trace(model, ids[:3], final_norm=True)
    tlc.depth_coupling(warm_up, k=max(released.KS), layers=[0])
    memory.start()
    ends = []
    for _ in range(repeats):
        maps, seconds = timed(device, lambda: ours_end_to_end(model, ids))
        ends.append(seconds)
    peaks = memory.stop()
    runs = [ours_by_stage(model, ids, device) | {"end to end": end} for end in ends]
    shapes = {
        "n_pos": n_tokens,
        "n_layers": warm_up.n_layers,
        "d_model": warm_up.d_model,
        "k": list(released.KS),
    }
    return report(ids, shapes, runs, peaks, maps)


def report(
    ids: list[int],
    shapes: dict[str, Any],
    runs: list[dict[str, float]],
    memory: dict[str, Any],
    maps: Maps,
) -> dict[str, Any]:
    """Return what a worker hands back; the seconds of each stage are the fewest that it
    took in any run.
    """
    return {
        "tokens": ids,
        "shapes": shapes,
        "seconds": {stage: min(run[stage] for run in runs) for stage in runs[0]},
        "seconds_of_all_runs": runs,
        "memory_mib": memory,
        "maps": {
            str(K): {name: values.tolist() for name, values in of_k.items()}
            for K, of_k in maps.items()
        },
    }


WORKERS = {"released": run_released, "ours": run_ours}


def in_own_process(
    worker: str, options: argparse.Namespace, n_tokens: int
) -> dict[str, Any]:
    """Run a worker in a fresh interpreter and return its report."""
    # More than a fraction here means that others were using the cores: the seconds are
    # then too many.
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.depth_coupling",
            "--worker",
            worker,
            "--tokens",
            n_tokens,
        ]
        command += [
            "--repeats",
            options.repeats,
            "--device",
            options.device,
            "--model",
            options.model,
            "--out",
            path,
        ]
        done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
        if done.returncode < 0:
            raise BenchmarkError(
                f"the process that measured {worker!r} was killed by signal "
                f"{-done.returncode}"
            )
        if done.returncode:
            # The worker has said what was wrong.
            raise SystemExit(done.returncode)
        return {"load_average_before": load} | json.loads(path.read_text())


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Largest absolute difference of each measure, over K and all pairs."""
    largest = {}
    for name in released.MEASURES:
        pairs = [
            (torch.tensor(theirs[K][name]), torch.tensor(ours[K][name])) for K in theirs
        ]
        # Not max() of floats, which can lose a NaN.
        largest[name] = float(
            torch.stack([(a - b).abs().amax() for a, b in pairs]).amax()
        )
    return largest


def compare(options: argparse.Namespace, n_tokens: int) -> dict[str, Any]:
    """Both workers on one prompt; ours alone where the other takes too long."""
    if n_tokens in options.ours_alone:
        ours = in_own_process("ours", options, n_tokens)
        del ours["maps"]
        return {key: ours.pop(key) for key in ("tokens", "shapes")} | {"ours": ours}
    theirs, ours = (in_own_process(worker, options, n_tokens) for worker in WORKERS)
    if theirs["tokens"] != ours["tokens"] or theirs["shapes"] != ours["shapes"]:
        raise BenchmarkError("the two did not measure the same prompt and model")
    maps = theirs.pop("maps"), ours.pop("maps")
    shared = {key: theirs.pop(key) for key in ("tokens", "shapes")}
    by_measure = differences(*maps)
    stages = [stage for stage in theirs["seconds"] if stage in ours["seconds"]]
    return shared | {
        "released": theirs,
        "ours": {key: value for key, value in ours.items() if key not in shared},
        "ratio": {
            stage: theirs["seconds"][stage] / ours["seconds"][stage] for stage in stages
        },
        "memory_of_ours_over_released": {
            name: ours["memory_mib"][name] / theirs["memory_mib"][name]
            for name in ("peak", "above_warm_up")
            if theirs["memory_mib"][name] > 0
        },
        "max_abs_difference": by_measure,
        "largest_difference": float(torch.tensor(list(by_measure.values())).amax()),
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """End to end by prompt length, and every prompt's stages."""
    machine = f"{results['model']} on {results['environment']['device_name']}"
    machine = f"{machine}, {results['environment']['cpu_threads']} threads"
    summary = Table(title=f"{machine}: seconds end to end, and MiB at the peak")
    for header in (
        "T",
        "released",
        "tl_coupling",
        "ratio",
        "× first",
        "released MiB",
        "tl_coupling MiB",
        "share",
    ):
        summary.add_column(header, justify="right")
    first = results["runs"][0]["ours"]["seconds"]["end to end"]
    for run in results["runs"]:
        cells = {
            side: [f"{run[side]['seconds']['end to end']:.2f}"] if side in run else [""]
            for side in WORKERS
        }
        for side in cells:
            cells[side].append(
                f"{run[side]['memory_mib']['peak']:.0f}" if side in run else ""
            )
        summary.add_row(
            str(run["shapes"]["n_pos"]),
            cells["released"][0],
            cells["ours"][0],
            f"{run['ratio']['end to end']:.1f} ×" if "ratio" in run else "",
            f"{run['ours']['seconds']['end to end'] / first:.2f}",
            cells["released"][1],
            cells["ours"][1],
            f"{run['memory_of_ours_over_released']['peak']:.0%}"
            if "ratio" in run
            else "",
        )
    return [summary, *(_table(run, machine) for run in results["runs"])]


def _table(run: dict[str, Any], title: str) -> Table:
    sides = [run[side] for side in ("released", "ours") if side in run]
    shapes = run["shapes"]
    alone = len(sides) == 1
    drawn = Table(
        "",
        title=(
            f"{title}\nT = {shapes['n_pos']}, L = {shapes['n_layers']}, d "
            f"= {shapes['d_model']}, K = {shapes['k']}"
        ),
        caption=None
        if alone
        else f"largest difference in any measure: {run['largest_difference']:.1e}",
    )
    for header in ("tl_coupling",) if alone else ("released", "tl_coupling", "ratio"):
        drawn.add_column(header, justify="right")
    for stage in (
        "forward",
        "jacobians",
        "gate",
        "svd",
        "pairs",
        "measures",
        "matrices and measures",
        "end to end",
    ):
        cells = [
            f"{side['seconds'][stage]:.3f} s" if stage in side["seconds"] else ""
            for side in sides
        ]
        ratio = (
            []
            if alone
            else [f"{run['ratio'][stage]:.1f} ×" if stage in run["ratio"] else ""]
        )
        name = {"gate": "of these gate", "pairs": "matrices"}.get(stage, stage)
        drawn.add_row(
            name,
            *cells,
            *ratio,
            end_section=stage in ("matrices and measures", "end to end"),
        )
    for name in ("after_loading", "after_warm_up", "peak", "above_warm_up"):
        cells = [f"{side['memory_mib'][name]:.0f} MiB" for side in sides]
        shares = {} if alone else run["memory_of_ours_over_released"]
        of_released = [f"{shares[name]:.0%}" if name in shares else ""]
        drawn.add_row(
            f"memory {name.replace('_', ' ')}", *cells, *([] if alone else of_released)
        )
    return drawn


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        number = int(text)
        if number < 1:
            raise argparse.ArgumentTypeError(f"wanted a positive number, got {text}")
        return number

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.depth_coupling",
        description="Time and peak memory of one prompt's depth coupling (last "
        "token, all pairs of layers,\n"
        "K = 10, 30, 50, both orientations): a transcription of the paper's released "
        "algorithm\n"
        "against tl_coupling. Prints a table for each prompt length "
        "and writes\nOUT/depth_coupling.json.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "example:\n  python -m benchmarks.depth_coupling --tokens 10 "
            "64 --repeats 3 --out benchmarks/results"
        ),
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[10, 64, 256],
        metavar="T",
        help=(
            "prompt lengths; one that fits the paper's prompt (10 for "
            "SmolLM2-135M-Instruct) takes that prompt (default: 10 64 256)"
        ),
    )
    parser.add_argument(
        "--ours-alone",
        type=positive,
        nargs="*",
        default=[256],
        metavar="T",
        help=(
            "lengths of --tokens at which the transcription, which takes "
            "minutes there, is left out (default: 256)"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder for the JSON (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=1,
        help="runs of each; the fewest seconds count (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is a GPU if there is one (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default=EMBEDDED_MODEL,
        help="smollm2-135m, a HuggingFace hub name or a local folder (default: %(default)s)",
    )
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        device = chosen_device(options.device)
        if options.worker:
            figures = WORKERS[options.worker](
                options.model, options.tokens[0], device, options.repeats
            )
            options.out.write_text(json.dumps(figures))
            return
        out = console()
        results: dict[str, Any] = {"model": options.model, "repeats": options.repeats}
        results |= {"environment": environment(device), "runs": []}
        for n_tokens in options.tokens:
            token_ids(options.model, n_tokens)
        for n_tokens in options.tokens:
            out.print(f"{n_tokens} tokens …")
            results["runs"].append(compare(options, n_tokens))
            out.print(tables(results)[-1])
    # What HuggingFace and tl_coupling raise for a model that is not there.
    except (BenchmarkError, ModelError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
    out.print(tables(results)[0])
    out.print(f"wrote {write(options.out, 'depth_coupling', results)}")


if __name__ == "__main__":
    main()
