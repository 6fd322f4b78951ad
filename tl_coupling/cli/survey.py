"""`tl-coupling survey`: many models on many prompts, here, in processes, or on a cluster."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, show, table_of, write_pictures, write_summary
from tl_coupling.cli.options import OUT, Comparing, Machine, Out, Position, Tracing, training_step

if TYPE_CHECKING:
    import pandas
    import xarray

    from tl_coupling.prompts import Prompt
    from tl_coupling.surveys.executors import Executor
    from tl_coupling.surveys.measurements import Settings

MEASURE = "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different layers, then over prompts"

_SURVEY_HELP = """Many models on many prompts: coupling, singular values, shapes of trajectories, loss; means by task.

Each finished unit (one model and checkpoint, some prompts) is written at once; run the same command again to do the
rest, or to add models. A unit that fails is left out, with its error, and the exit status is 1. Analyse the results
with `tl-coupling generalization`.

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
            help="Hub name, local folder, or folder of checkpoints (all are measured); NAME=MODEL sets the name used "
            "in the results; may be repeated."
        ),
    ],
    machine: Machine,
    tracing: Tracing,
    comparing: Comparing,
    prompts: Annotated[
        str, typer.Option(help='JSONL file; or gsm8k, mmlu, …; or "open_llm_leaderboard" for six of these combined.')
    ],
    n: Annotated[
        int | None,
        typer.Option(help="How many, drawn at random. [all of a file, 200 of a set, 1200 of the leaderboard]"),
    ] = None,
    per_task: Annotated[int | None, typer.Option(help="How many of each task, instead of --n.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draw.", min=0)] = 0,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Training step or hub revision, for all models; may be repeated.")
    ] = None,
    untrained: Annotated[bool, typer.Option("--untrained", help="Also measure untrained twins.")] = False,
    position: Position = -1,
    prompts_per_unit: Annotated[int | None, typer.Option(help="Prompts per unit of work. [all]")] = None,
    workers: Annotated[int | None, typer.Option(help="Run units in this many processes.", min=1)] = None,
    slurm: Annotated[
        str | None, typer.Option(help="Run units as SLURM jobs: partition=…,gpus_per_node=1,timeout_min=240,…")
    ] = None,
    out: Out = OUT,
) -> None:
    """See `_SURVEY_HELP`."""
    from tl_coupling.generalization import task_means
    from tl_coupling.plots import plot_task_means
    from tl_coupling.surveys import Survey, run
    from tl_coupling.surveys.survey import UNITS

    asked = Survey(
        models=_models_by_name(model),
        prompts=_drawn_prompts(prompts, n, per_task, seed),
        checkpoints=training_steps(checkpoint),
        untrained=untrained,
        settings=settings_of(comparing, tracing, position),
        prompts_per_unit=prompts_per_unit,
        backend=machine.backend,
        device=machine.device,
        dtype=machine.torch_dtype,
    )
    with at_work(out) as (folder, _), _executor(workers, slurm, folder / "jobs") as executor:
        data = run(asked, folder / UNITS, executor)
        tables = {k: task_means(data, k=k) for k in data["k"].values.tolist()}
        pictures = {f"tasks-k{k}.png": partial(plot_task_means, table) for k, table in tables.items()}
        written = [folder / UNITS, write_summary(folder, _summary(data, tables)), *write_pictures(folder, pictures)]
    show(written, *(_task_table(k, table) for k, table in tables.items()), _cost_table(data))
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def settings_of(comparing: Comparing, tracing: Tracing, position: int) -> "Settings":
    """How prompts are measured, from the options."""
    from tl_coupling.surveys.measurements import Settings

    bos, norm = tracing.prepend_bos, tracing.final_norm
    return Settings(tuple(comparing.ks), position, comparing.orientation, final_norm=norm, prepend_bos=bos)


def training_steps(checkpoints: Sequence[str] | None) -> Any:
    """Checkpoints as the library takes them: numbers where they are training steps."""
    return None if checkpoints is None else [training_step(one) for one in checkpoints]


def _models_by_name(models: list[str]) -> dict[str, str]:
    pairs = [
        (name, source) if equals else (one, one) for one in models for name, equals, source in [one.partition("=")]
    ]
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"`--model` must name each model once, got {models}; NAME=MODEL tells two of them apart")
    return dict(pairs)


def _drawn_prompts(prompts: str, n: int | None, per_task: int | None, seed: int) -> "list[Prompt]":
    from tl_coupling.prompts import load_prompts, prompts_per_task

    if n is not None and per_task is not None:
        raise ValueError("give --n or --per-task, not both")
    if per_task is not None:
        return prompts_per_task(load_prompts(prompts), per_task, seed)
    if n is None and not Path(prompts).is_file():
        n = 1200 if prompts == "open_llm_leaderboard" else 200
    return load_prompts(prompts, n, seed)


def _executor(workers: int | None, slurm: str | None, jobs: Path) -> "AbstractContextManager[Executor | None]":
    from tl_coupling.surveys.executors import process_pool, slurm_executor

    if workers is not None and slurm is not None:
        raise ValueError("give --workers or --slurm, not both")
    if slurm is not None:
        return nullcontext(slurm_executor(jobs, **_slurm_parameters(slurm)))
    return nullcontext() if workers is None else process_pool(workers)


def _slurm_parameters(text: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for one in text.split(","):
        name, equals, value = (part.strip() for part in one.partition("="))
        if not (name and equals and value):
            raise ValueError(f"`--slurm` must be like partition=gpu,gpus_per_node=1,timeout_min=240, got {text!r}")
        found[name] = int(value) if value.isdigit() else value
    return found


def _summary(data: "xarray.Dataset", tables: "dict[int, pandas.DataFrame]") -> dict[str, Any]:
    costs = data[["seconds", "peak_memory"]].to_dataframe().dropna().reset_index()
    return {
        "measure": MEASURE,
        "intervals": "95 % percentiles of a bootstrap over prompts",
        "by_task": {str(k): table.to_dict("records") for k, table in tables.items()},
        "cost": costs.to_dict("records"),
        "failed": json.loads(data.attrs["failed"]),
        "provenance": json.loads(data.attrs["provenance"]),
        "provenance_by_unit": json.loads(data.attrs.get("provenance_by_unit", "{}")),
    }


def _task_table(k: int, rows: "pandas.DataFrame") -> Table:
    # What is the same in every row goes above them.
    shared = [name for name in ("model", "checkpoint") if rows[name].nunique() == 1]
    names = [name for name in ("model", "checkpoint", "task") if name not in shared]

    def cells(row: Any) -> list[str]:
        interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["n_prompts"] > 1 else ""
        return [row["n_prompts"], f"{row['mean']:.3f}{interval}", f"{row['null']:.3f}", f"{row['loss']:.3f}"]

    return table_of(
        f"depth coupling 1 − m̃ (k = {k})" + (f", {rows['model'].iloc[0]}" if "model" in shared else ""),
        names,
        ("prompts", "coupling", "null", "loss"),
        ([*(row[name] for name in names), *cells(row)] for _, row in rows.iterrows()),
        "95 % intervals: bootstrap over prompts",
    )


def _cost_table(data: "xarray.Dataset") -> Table:
    names = ["n_layers", "d_model", "n_parameters", "seconds", "peak_memory"]
    costs = data[names].assign(n_prompts=data["n_pos"].notnull().sum("prompt")).to_dataframe().dropna()
    rows = []
    for of, row in costs.iterrows():
        facts = (f"{int(row[name]):,}" for name in names[:3])
        rows.append([*of, *facts, f"{row['seconds'] / row['n_prompts']:.2f}", f"{row['peak_memory']:.0f} MiB"])
    numbers = ("layers", "width", "parameters", "seconds per prompt", "peak memory")
    caption = "loading included; peak memory of the processes that did it"
    return table_of("cost", ("model", "checkpoint"), numbers, rows, caption)
