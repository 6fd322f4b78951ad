"""`tl-coupling survey`: many models on many prompts, here, in processes, or on a cluster."""

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, over_units
from tl_coupling.cli.options import Comparing, Machine, Out, Position, Tracing, training_step
from tl_coupling.cli.results import show, write_pictures, write_summary

if TYPE_CHECKING:
    import pandas
    import xarray

    from tl_coupling.surveys.executors import Executor

_SURVEY_HELP = """Many models on many prompts: coupling, singular values, shapes of trajectories, loss; means by task.

Each finished unit (one model and checkpoint, some prompts) is written at once; the same command again keeps what is
finished and does the rest, and models may be added. A unit that fails is left out, with its error, and the exit status
is then 1. `tl-coupling generalization` goes on from here.

Examples:

  tl-coupling survey --model gpt2 --model EleutherAI/pythia-160m --prompts open_llm_leaderboard --n 1200 --out survey

  tl-coupling survey --model smollm2-135m --prompts prompts.jsonl --per-task 20 --prompts-per-unit 30 --workers 2

  tl-coupling survey --model EleutherAI/pythia-6.9b --prompts gsm8k --slurm partition=gpu,gpus_per_node=1,mem_gb=64
"""


@command(_SURVEY_HELP)
def survey(
    model: Annotated[
        list[str],
        typer.Option(
            help="Hub name, local folder, or folder of checkpoints (all are measured); NAME=that calls it so; may be "
            "repeated."
        ),
    ],
    machine: Machine,
    tracing: Tracing,
    comparing: Comparing,
    prompts: Annotated[
        str, typer.Option(help='JSONL file; or gsm8k, mmlu, …; or "open_llm_leaderboard", six of them.')
    ],
    n: Annotated[int | None, typer.Option(help="Prompts, drawn at random. [all of a file, 200 of a set, 1200]")] = None,
    per_task: Annotated[int | None, typer.Option(help="Prompts of each task, instead of --n.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.", min=0)] = 0,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Training step or hub revision, of all models; may be repeated.")
    ] = None,
    untrained: Annotated[bool, typer.Option("--untrained", help="Measure untrained twins as well.")] = False,
    position: Position = -1,
    prompts_per_unit: Annotated[int | None, typer.Option(help="Prompts in a unit of work. [all]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of this machine that share the units.", min=1)] = None,
    slurm: Annotated[
        str | None, typer.Option(help="Units as SLURM jobs: partition=…,gpus_per_node=1,timeout_min=240,…")
    ] = None,
    out: Out = Path("out"),
) -> None:
    """See `_SURVEY_HELP`."""
    from tl_coupling.generalization import task_means
    from tl_coupling.surveys.measurements import Settings
    from tl_coupling.surveys.survey import UNITS, Survey, run

    asked = Survey(
        models=_named(model),
        prompts=_chosen(prompts, n, per_task, seed),
        checkpoints=None if checkpoint is None else [training_step(one) for one in checkpoint],  # type: ignore[misc]
        untrained=untrained,
        settings=Settings(
            k=tuple(comparing.ks),
            position=position,
            orientation=comparing.orientation,
            final_norm=tracing.final_norm,
            prepend_bos=tracing.prepend_bos,
        ),
        prompts_per_unit=prompts_per_unit,
        backend=machine.backend,
        device=machine.device,
        dtype=machine.torch_dtype,
    )
    with at_work(out) as (folder, progress), _executor(workers, slurm, folder / "jobs") as executor:
        units = folder / UNITS
        data = run(asked, units, executor, over_units(progress, "survey", lambda unit: unit.key))
        tables = {one: task_means(data, k=one) for one in data["k"].values.tolist()}
        written = [
            units,
            write_summary(folder, _summary(data, tables)),
            *write_pictures(folder, {f"tasks-k{one}.png": partial(_picture, table) for one, table in tables.items()}),
        ]
    for one, table in tables.items():
        Console().print(_table(one, table))
    show(written, _costs(data))
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def _named(models: list[str]) -> dict[str, str]:
    pairs = [
        (name, source) if equals else (one, one) for one in models for name, equals, source in [one.partition("=")]
    ]
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"`--model` must name each model once, got {models}; NAME=MODEL tells two of them apart")
    return dict(pairs)


def _chosen(prompts: str, n: int | None, per_task: int | None, seed: int) -> list[Any]:
    from tl_coupling.prompts import load_prompts, open_llm_leaderboard_prompts, prompts_per_task

    if n is not None and per_task is not None:
        raise ValueError("give --n or --per-task, not both")
    if prompts == "open_llm_leaderboard":
        wanted = 1200 if per_task is None else 6 * per_task
        return open_llm_leaderboard_prompts(wanted if n is None else n, seed)
    if per_task is not None:
        return prompts_per_task(load_prompts(prompts, None), per_task, seed)
    return load_prompts(prompts, 200 if n is None and not Path(prompts).is_file() else n, seed)


def _executor(workers: int | None, slurm: str | None, jobs: Path) -> "AbstractContextManager[Executor | None]":
    from tl_coupling.surveys.executors import process_pool, slurm_executor

    if workers is not None and slurm is not None:
        raise ValueError("give --workers or --slurm, not both")
    if slurm is not None:
        return nullcontext(slurm_executor(jobs, **_parameters(slurm)))
    return nullcontext() if workers is None else process_pool(workers)


def _parameters(text: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for one in text.split(","):
        name, equals, value = (part.strip() for part in one.partition("="))
        if not (name and equals and value):
            raise ValueError(f"`--slurm` must be like partition=gpu,gpus_per_node=1,timeout_min=240, got {text!r}")
        found[name] = int(value) if value.isdigit() else value
    return found


def _picture(table: "pandas.DataFrame") -> Any:
    from tl_coupling.plots import plot_task_means

    return plot_task_means(table)


def _summary(data: "xarray.Dataset", tables: "dict[int, pandas.DataFrame]") -> dict[str, Any]:
    costs = data[["seconds", "peak_memory"]].to_dataframe().dropna().reset_index()
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different layers, then over prompts",
        "intervals": "95 % percentiles of a bootstrap over prompts",
        "by_task": {str(k): table.to_dict("records") for k, table in tables.items()},
        "cost": costs.to_dict("records"),
        "failed": json.loads(data.attrs["failed"]),
        "provenance": json.loads(data.attrs["provenance"]),
        "provenance_by_unit": json.loads(data.attrs.get("provenance_by_unit", "{}")),
    }


def _table(k: int, rows: "pandas.DataFrame") -> Table:
    # What is the same in every row goes above them.
    shared = [name for name in ("model", "checkpoint") if rows[name].nunique() == 1]
    title = f"depth coupling 1 − m̃ (k = {k})" + (f", {rows['model'].iloc[0]}" if "model" in shared else "")
    table = Table(title=escape(title), caption="95 % intervals: bootstrap over prompts")
    names = [name for name in ("model", "checkpoint", "task") if name not in shared]
    for heading in (*names, "prompts", "coupling", "null", "loss"):
        table.add_column(heading, justify="left" if heading in names else "right")
    for _, row in rows.iterrows():
        interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["n_prompts"] > 1 else ""
        cells = (str(row["n_prompts"]), f"{row['mean']:.3f}{interval}", f"{row['null']:.3f}", f"{row['loss']:.3f}")
        table.add_row(*(escape(str(row[name])) for name in names), *(escape(cell) for cell in cells))
    return table


def _costs(data: "xarray.Dataset") -> Table:
    n_prompts = data["n_pos"].notnull().sum("prompt")
    table = Table(title="what it took", caption="loading included; peak memory of the processes that did it")
    for heading in ("model", "checkpoint", "layers", "width", "parameters", "seconds a prompt", "peak memory"):
        table.add_column(heading, justify="left" if heading in ("model", "checkpoint") else "right")
    for model in data["model"].values.tolist():
        for checkpoint in data["checkpoint"].values.tolist():
            here = data.sel(model=model, checkpoint=checkpoint)
            if not (n := int(n_prompts.sel(model=model, checkpoint=checkpoint))):
                continue
            facts = (f"{int(here[name]):,}" for name in ("n_layers", "d_model", "n_parameters"))
            seconds, memory = float(here["seconds"]) / n, float(here["peak_memory"])
            table.add_row(escape(model), escape(str(checkpoint)), *facts, f"{seconds:.2f}", f"{memory:.0f} MiB")
    return table
