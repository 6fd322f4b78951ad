"""The command that measures many models on many prompts: survey."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import (
    OUT,
    Out,
    PromptKey,
    Sweep,
    Untrained,
    model_option,
)
from tl_coupling.cli.sweeps import (
    executor_for,
    facts,
    stop_if_any_failed,
    write_choices,
)
from tl_coupling.prompts import Prompt, load_prompts, prompts_per_task
from tl_coupling.results import ShortTable
from tl_coupling.studies.surveys import UNITS, pairs_of_layers

if TYPE_CHECKING:
    import pandas
    import xarray

# How many prompts are drawn unless another number is asked for.
_N_LEADERBOARD_PROMPTS = 1200
_N_SET_PROMPTS = 200
# A picture of coupling against the prompts' length says nothing of two.
_FEWEST_FOR_A_PICTURE = 3


@command
def survey(
    model: Annotated[
        list[str],
        model_option(
            help="Hub name, local folder, GGUF file, or folder of checkpoints (all are "
            "measured); NAME=MODEL sets the name used in the results; may be repeated."
        ),
    ],
    sweep: Sweep,
    prompts: Annotated[
        str,
        typer.Option(
            help='JSONL file; or gsm8k, mmlu, …; or "open_llm_leaderboard" for six of '
            'these combined; or "easy2hard", four sets with difficulties.'
        ),
    ],
    n: Annotated[
        int | None,
        typer.Option(
            help="Number of prompts, drawn at random. [all of a file, 200 of a set, 1200 of the "
            "leaderboard]"
        ),
    ] = None,
    per_task: Annotated[
        int | None, typer.Option(help="Number of prompts of each task, instead of --n.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draw.", min=0)] = 0,
    prompt_key: PromptKey = "prompt",
    untrained: Untrained = False,
    prompts_per_unit: Annotated[
        int | None, typer.Option(help="Prompts per unit of work. [all]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Run units in this many processes.", min=1)
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            help="Run units as SLURM jobs, with parameters of sbatch: "
            "partition=gpu,mem_gb=64,…"
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Measure many models on many prompts: coupling, spectra, trajectories and loss.

    Prints means by task. Draws the spread of every model over prompts, its stream by
    depth, and coupling against the prompts' length, and against their difficulty if
    they have one. Each finished unit (one model and checkpoint, some prompts) is
    written at once; run the same command again to do the rest, or to add models. A unit
    that fails is left out, with its error, and the exit status is 1. A prompt takes a
    little longer than `tl-coupling depth` says. Analyse the results with `tl-coupling
    generalization`.

    Examples:

      tl-coupling survey --model gpt2 --model EleutherAI/pythia-160m --prompts
      open_llm_leaderboard --out survey

      tl-coupling survey --model smollm2-135m --prompts prompts.jsonl --per-task 20
      --prompts-per-unit 30 --workers 2 --out smollm2

      tl-coupling survey --model EleutherAI/pythia-6.9b --prompts gsm8k --slurm
      partition=gpu,gpus_per_node=1,mem_gb=64 --out gsm8k
    """
    models = _named_models(model)
    drawn_prompts = _drawn_prompts(prompts, prompt_key, n, per_task, seed)
    survey_of_models = tlc.Survey(
        models=models,
        prompts=drawn_prompts,
        checkpoints=sweep.checkpoints,
        untrained=untrained,
        settings=sweep.settings,
        prompts_per_unit=prompts_per_unit,
        **sweep.loading,
    )
    with work_in(out) as work, executor_for(workers, slurm, out / "jobs") as executor:
        data = tlc.run_survey(survey_of_models, out / UNITS, executor, progress=True)
        # The folder as a whole, with a file for each unit.
        work.written.append(out / UNITS)
        if sweep.all_measures:
            write_choices(work, data)
        data = tlc.surveys.select_orientation(data)
        tables = {
            k: tlc.generalization.task_means(data, k=k)
            for k in data["k"].values.tolist()
        }
        work.finish(_summary(data, tables), _pictures(data, tables, drawn_prompts))
        pairs = pairs_of_layers(data)
        task_tables = [_task_table(k, table, pairs) for k, table in tables.items()]
        # The tables of choices, which are long, come last.
        work.shown = [*task_tables, _cost_table(data), *work.shown]
    # After all is written: the results of the others stay.
    stop_if_any_failed(data)


def _named_models(texts: list[str]) -> dict[str, str]:
    """Return sources of models by name, from texts like NAME=MODEL or MODEL."""
    models = {}
    for text in texts:
        name, equals, source = text.partition("=")
        models[name] = source if equals else name
    if len(models) < len(texts):
        raise ValueError(
            f"`--model` must name each model once, got {texts}; "
            "NAME=MODEL tells two of them apart"
        )
    return models


def _drawn_prompts(
    prompts: str, key: str, n: int | None, per_task: int | None, seed: int
) -> list[Prompt]:
    """Return the prompts of a file or a set, as many as were asked for."""
    if n is not None and per_task is not None:
        raise ValueError("give --n or --per-task, not both")
    if per_task is not None:
        return prompts_per_task(load_prompts(prompts, key=key), per_task, seed)
    # A file is measured whole; a public set holds thousands of prompts.
    if n is None and not Path(prompts).is_file():
        is_leaderboard = prompts == "open_llm_leaderboard"
        n = _N_LEADERBOARD_PROMPTS if is_leaderboard else _N_SET_PROMPTS
    return load_prompts(prompts, n, seed, key=key)


def _summary(
    data: "xarray.Dataset", tables: "dict[int, pandas.DataFrame]"
) -> dict[str, object]:
    """Return what `summary.json` holds: means by task and k, and what units cost."""
    costs = data[["seconds", "peak_memory"]].to_dataframe().dropna().reset_index()
    return {
        **facts(data),
        "intervals": "95 % percentiles of a bootstrap over prompts",
        "by_task": {k: table.to_dict("records") for k, table in tables.items()},
        "cost": costs.to_dict("records"),
    }


def _pictures(
    data: "xarray.Dataset",
    tables: "dict[int, pandas.DataFrame]",
    prompts: list[Prompt],
) -> Pictures:
    """Return the pictures by file name."""
    plots = tlc.plots
    pictures: Pictures = {
        f"tasks-k{k}.png": partial(plots.plot_task_means, table)
        for k, table in tables.items()
    }
    pictures["quartiles.png"] = partial(plots.plot_quartiles, data)
    pictures["profiles.png"] = partial(plots.plot_profiles, data)
    if len(prompts) < _FEWEST_FOR_A_PICTURE:
        return pictures
    pictures["length.png"] = partial(plots.plot_prompts, data, None)
    difficulty = {
        prompt.id: prompt.difficulty
        for prompt in prompts
        if prompt.difficulty is not None
    }
    if difficulty:
        pictures["difficulty.png"] = partial(plots.plot_prompts, data, difficulty)
    return pictures


def _task_table(k: int, means: "pandas.DataFrame", pairs: str) -> ShortTable:
    """Return the table of mean coupling by task, and by what else differs."""
    names = [name for name in ("model", "checkpoint") if means[name].nunique() > 1]
    names.append("task")
    rows = []
    for row in means.to_dict("records"):
        coupling = f"{row['mean']:.3f}"
        # One prompt has no interval.
        if row["n_prompts"] > 1:
            coupling += f" [{row['low']:.3f}, {row['high']:.3f}]"
        null = f"{row['null']:.3f}"
        loss = f"{row['loss']:.3f}"
        labels = [row[name] for name in names]
        rows.append([*labels, row["n_prompts"], coupling, null, loss])
    title = f"depth coupling 1 − m̃ (k = {k})"
    # A model that is the same in every row is named above them.
    if "model" not in names:
        title += f", {means['model'].iloc[0]}"
    numbers = ("prompts", "coupling", "null", "loss")
    caption = f"mean over {pairs}\n95 % intervals: bootstrap over prompts"
    return ShortTable.of(title, names, numbers, rows, caption)


def _cost_table(data: "xarray.Dataset") -> ShortTable:
    """Return the table of models' sizes and what they cost."""
    sizes = ["n_layers", "d_model", "n_parameters"]
    # Prompts that were measured, model by model.
    n_prompts = data["n_pos"].notnull().sum("prompt")
    measured = data[[*sizes, "seconds", "peak_memory"]].assign(n_prompts=n_prompts)
    rows = []
    for labels, row in measured.to_dataframe().dropna().iterrows():
        size_cells = [f"{int(row[name]):,}" for name in sizes]
        seconds_per_prompt = f"{row['seconds'] / row['n_prompts']:.2f}"
        peak_memory = f"{row['peak_memory']:.0f} MiB"
        rows.append([*labels, *size_cells, seconds_per_prompt, peak_memory])
    numbers = ("layers", "width", "parameters", "seconds per prompt", "peak memory")
    caption = "loading included; peak memory of the processes that did it"
    return ShortTable.of("cost", ("model", "checkpoint"), numbers, rows, caption)
