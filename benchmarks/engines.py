"""One survey by every engine: whether the values are the same, and how long each takes.

    python -m benchmarks.engines --prompts prompts.jsonl --per-task 2 --out
    benchmarks/results python tests/support/slurm_cluster.py .venv/bin/python -m
    benchmarks.engines --engines here slurm

The second starts a SLURM of one node on this machine for the while. torch has one
thread everywhere: values depend on the number of threads, and engines that share the
cores evenly can be compared. Seconds include starting the engine and, in each unit,
loading the model; the baseline is one unit after the other in this process.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import xarray
from rich.table import Table

import tl_coupling as tlc
from benchmarks.timing import TEXT, console, environment, write
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.studies.surveys.executors import Executor

ENGINES = ("here", "processes", "dask", "slurm")
COSTS = ["seconds", "peak_memory"]


@contextmanager
def dask_client(workers: int) -> Iterator[Any]:
    """Provide a cluster of this machine's processes, on loopback."""
    from distributed import Client, LocalCluster

    options = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
    }
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def engine(
    name: str, workers: int, jobs: Path
) -> AbstractContextManager[Executor | None]:
    """Return what `run` takes as its executor."""
    if name == "here":
        return nullcontext()
    if name == "processes":
        return tlc.surveys.process_pool(workers)
    if name == "dask":
        return dask_client(workers)
    return nullcontext(
        tlc.surveys.slurm_executor(jobs, cpus_per_task=1, array_parallelism=workers)
    )


def measure(survey: tlc.Survey, engines: list[str], workers: int) -> dict[str, Any]:
    """Seconds of each engine, and whether its values are the first one's, bit for
    bit.
    """
    by_engine: dict[str, Any] = {}
    first: xarray.Dataset | None = None
    for name in engines:
        with tempfile.TemporaryDirectory() as folder:
            start = perf_counter()
            with engine(name, workers, Path(folder, "jobs")) as executor:
                data = tlc.run_survey(survey, Path(folder, "units"), executor).load()
            by_engine[name] = {
                "seconds": perf_counter() - start,
                "seconds_in_units": float(data["seconds"].sum()),
            }
            values = data.drop_vars(COSTS)
            data.close()
        first = values if first is None else first
        by_engine[name]["identical"] = values.identical(first)
    return by_engine


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the figures for reading."""
    by_engine = results["engines"]
    first = next(iter(by_engine))
    title = f"{results['units']} units, {results['prompts']} prompts, one thread each"
    table = Table(
        "engine", "seconds", f"× {first}", "seconds in units", "identical", title=title
    )
    for name, figures in by_engine.items():
        ratio = f"{by_engine[first]['seconds'] / figures['seconds']:.2f}"
        table.add_row(
            name,
            f"{figures['seconds']:.1f}",
            ratio,
            f"{figures['seconds_in_units']:.1f}",
            str(figures["identical"]),
        )
    return [table]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=EMBEDDED_MODEL, help=f"(default {EMBEDDED_MODEL})"
    )
    parser.add_argument(
        "--prompts", help="JSONL file; sentences of a fixed text by default"
    )
    parser.add_argument(
        "--per-task",
        type=int,
        default=2,
        help="prompts of each task of the file (default 2)",
    )
    parser.add_argument("--prompts-per-unit", type=int, default=3, help="(default 3)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="(default: all cores)"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES[:3]),
        help="the first is the base",
    )
    parser.add_argument(
        "--k",
        type=int,
        nargs="+",
        default=[10, 30, 50],
        help="singular vectors (default 10 30 50)",
    )
    parser.add_argument("--out", type=Path, help="folder for engines.json")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, got {arguments.workers}")
    torch.set_num_threads(1)
    machine = environment(torch.device("cpu"))
    # For every process that is started from here.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        if arguments.prompts is None:
            prompts: list[Any] = [f"{sentence}." for sentence in TEXT.split(". ")]
        else:
            prompts = tlc.prompts.prompts_per_task(
                tlc.load_prompts(arguments.prompts), arguments.per_task
            )
        execution: dict[str, Any] = {
            "prompts_per_unit": arguments.prompts_per_unit,
            "device": "cpu",
        }
        survey = tlc.Survey(
            [arguments.model],
            prompts,
            settings=tlc.Settings(k=tuple(arguments.k)),
            **execution,
        )
        by_engine = measure(survey, arguments.engines, arguments.workers)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    results = {
        "environment": machine,
        "units": len(survey.units()),
        "prompts": len(prompts),
        "engines": by_engine,
    }
    console().print(*tables(results))
    if arguments.out is not None:
        write(arguments.out, "engines", results)
    return 0 if all(figures["identical"] for figures in by_engine.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
