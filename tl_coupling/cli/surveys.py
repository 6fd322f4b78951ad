"""The commands that measure and compare many models or checkpoints: checkpoints, survey
and generalization.
"""

import fnmatch
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Work, at_work, every_choice, table_of
from tl_coupling.cli.options import OUT, Out, Prompts, Sweep, Untrained
from tl_coupling.files import write_table
from tl_coupling.measures import MeasureName, Orientation, mean_name, null_name
from tl_coupling.prompts import Prompt, load_prompts, prompts_per_task
from tl_coupling.surveys import process_pool, slurm_executor
from tl_coupling.surveys.executors import Executor
from tl_coupling.surveys.readings import pairs_of_layers
from tl_coupling.surveys.results import UNITS

if TYPE_CHECKING:
    import pandas
    import xarray

# Lines about what was left out.
_MOST_LEFT_OUT = 10
# Columns of the table of every choice; the file has all.
_MOST_CHECKPOINTS = 3


@command
def checkpoints(
    model: Annotated[
        str,
        typer.Option(
            help="Hub name, or local folder of checkpoints in HuggingFace format."
        ),
    ],
    sweep: Sweep,
    prompts: Prompts,
    out: Out = OUT,
) -> None:
    """A model at every checkpoint: coupling, singular values, shapes and growth of
    trajectories, loss.

    Each finished checkpoint is written at once; run the same command again to do the
    rest. A checkpoint that fails is left out, with its error, and the exit status is 1.
    Without --checkpoint: all of a local folder, or 1, 2, 4, …, 512, 1000, 2000, …,
    128000, 143000.

    Examples:

      tl-coupling checkpoints --model EleutherAI/pythia-160m --prompts prompts.jsonl --k
      10 --k 50 --out pythia

      tl-coupling checkpoints --model runs/my-model --checkpoint 0 --checkpoint 1000
      --out sweep
    """
    chosen, how = (
        prompts.chosen(),
        {"settings": sweep.settings, "folder": out / "checkpoints", **sweep.loading},
    )
    with at_work(out) as work:
        data = tlc.checkpoint_sweep(model, sweep.checkpoints, chosen, **how)
        work.write("sweep.nc", partial(data.to_netcdf, engine="netcdf4"))
        data = _first_choice(work, data, sweep.all_measures)
        mean, ks = data.mean("prompt"), data["k"].values.tolist()
        of_ks = {
            "coupling": mean[mean_name("coupling")],
            "null": mean[null_name("coupling")],
        }
        of_checkpoints = {
            "loss": mean["loss"],
            "line_shape_score": mean["line_shape_score_all_tokens"],
        }
        summary = {
            "checkpoints": data["checkpoint"].values.tolist(),
            "prompts": data["prompt"].values.tolist(),
            **{
                name: {k: x.sel(k=k).values.tolist() for k in ks}
                for name, x in of_ks.items()
            },
            **{name: x.values.tolist() for name, x in of_checkpoints.items()},
        }
        pictures = {
            f"{of}.png": partial(getattr(tlc.plots, f"plot_{of}"), data)
            for of in ("shapes", "growth")
        }
        for k in ks:
            pictures[f"adjacency-k{k}.png"] = partial(
                tlc.plots.plot_adjacency_strip, data, k=k
            )
            pictures[f"emergence-k{k}.png"] = partial(
                tlc.plots.plot_emergence, data, k=k
            )
            pictures[f"strip-k{k}.png"] = partial(
                tlc.plots.plot_coupling_strip, data, k=k
            )
        work.finish(_facts(data) | {"model": data.attrs["model"]} | summary, pictures)
        variables = (
            "mean_coupling",
            "null_coupling",
            "line_shape_score_all_tokens",
            "loss",
        )
        rows = []
        for checkpoint in data["checkpoint"].values.tolist():
            here = mean.sel(checkpoint=checkpoint)
            rows.append(
                [
                    checkpoint,
                    *(
                        f"{x:.3f}"
                        for name in variables
                        for x in here[name].values.ravel()
                    ),
                ]
            )
        numbers = [
            *(f"k = {k}" for k in ks),
            *(f"null {k}" for k in ks),
            "line-shape score",
            "loss",
        ]
        n_prompts = data.sizes["prompt"]
        caption = f"mean over {pairs_of_layers(data)} and {n_prompts} prompt{'s' if n_prompts > 1 else ''}"
        title = f"{data.attrs['model']}: depth coupling 1 − m̃ across training"
        work.shown.append(table_of(title, [], ["checkpoint", *numbers], rows, caption))
    stop_if_any_failed(data)


@command
def survey(
    model: Annotated[
        list[str],
        typer.Option(
            help="Hub name, local folder, GGUF file, or folder of checkpoints (all are measured); NAME=MODEL sets the "
            "name used in the results; may be repeated."
        ),
    ],
    sweep: Sweep,
    prompts: Annotated[
        str,
        typer.Option(
            help='JSONL file; or gsm8k, mmlu, …; or "open_llm_leaderboard" for six of these combined; or "easy2hard", '
            "four sets with difficulties."
        ),
    ],
    n: Annotated[
        int | None,
        typer.Option(
            help="How many, drawn at random. [all of a file, 200 of a set, 1200 of the leaderboard]"
        ),
    ] = None,
    per_task: Annotated[
        int | None, typer.Option(help="How many of each task, instead of --n.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draw.", min=0)] = 0,
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
            help="Run units as SLURM jobs: partition=…,gpus_per_node=1,timeout_min=240,…"
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Many models on many prompts: coupling, singular values, shapes of trajectories,
    loss; means by task.

    Draws the spread of every model over prompts, its stream by depth, and coupling
    against the prompts' length, and against their difficulty if they have one. Each
    finished unit (one model and checkpoint, some prompts) is written at once; run the
    same command again to do the rest, or to add models. A unit that fails is left out,
    with its error, and the exit status is 1. Analyse the results with `tl-coupling
    generalization`.

    Examples:

      tl-coupling survey --model gpt2 --model EleutherAI/pythia-160m --prompts
      open_llm_leaderboard --out survey

      tl-coupling survey --model smollm2-135m --prompts prompts.jsonl --per-task 20
      --prompts-per-unit 30 --workers 2

      tl-coupling survey --model EleutherAI/pythia-6.9b --prompts gsm8k --slurm
      partition=gpu,gpus_per_node=1,mem_gb=64
    """
    named = [one.partition("=") for one in model]
    models = {name: source if equals else name for name, equals, source in named}
    if len(models) < len(model):
        raise ValueError(
            f"`--model` must name each model once, got {model}; NAME=MODEL tells two of them apart"
        )
    chosen = _drawn_prompts(prompts, n, per_task, seed)
    difficulty = {
        prompt.id: prompt.difficulty
        for prompt in chosen
        if prompt.difficulty is not None
    }
    asked = tlc.Survey(
        models=models,
        prompts=chosen,
        checkpoints=sweep.checkpoints,
        untrained=untrained,
        settings=sweep.settings,
        prompts_per_unit=prompts_per_unit,
        **sweep.loading,
    )
    with at_work(out) as work, _executor(workers, slurm, out / "jobs") as executor:
        data = tlc.run(asked, out / UNITS, executor)
        work.written.append(out / UNITS)
        data = _first_choice(work, data, sweep.all_measures)
        tables = {
            k: tlc.generalization.task_means(data, k=k)
            for k in data["k"].values.tolist()
        }
        costs = data[["seconds", "peak_memory"]].to_dataframe().dropna().reset_index()
        summary = {
            "intervals": "95 % percentiles of a bootstrap over prompts",
            "by_task": {k: table.to_dict("records") for k, table in tables.items()},
            "cost": costs.to_dict("records"),
        }
        pictures: dict[str, Any] = {
            f"tasks-k{k}.png": partial(tlc.plots.plot_task_means, table)
            for k, table in tables.items()
        }
        pictures |= {
            f"{of}.png": partial(getattr(tlc.plots, f"plot_{of}"), data)
            for of in ("quartiles", "profiles")
        }
        against = {"length": None} | ({"difficulty": difficulty} if difficulty else {})
        if len(chosen) > 2:
            pictures |= {
                f"{of}.png": partial(tlc.plots.plot_prompts, data, x)
                for of, x in against.items()
            }
        work.finish(_facts(data) | summary, pictures)
        shown = [
            _task_table(k, table, pairs_of_layers(data)) for k, table in tables.items()
        ]
        work.shown = [*shown, _cost_table(data), *work.shown]
    stop_if_any_failed(data)


def _first_choice(work: Work, data: "xarray.Dataset", every: bool) -> "xarray.Dataset":
    """The data in the orientation that was asked for; before, if wanted, tables of
    every choice there is.
    """
    if every:
        rows = tlc.surveys.measure_table(data)
        work.write("measures.csv", partial(write_table, rows))
        by_model = (
            rows.groupby("model", sort=False)
            if "model" in rows
            else [(data.attrs["model"], rows)]
        )
        tables = {
            name: of_model
            for name, of_model in by_model
            if of_model["checkpoint"].nunique() <= _MOST_CHECKPOINTS
        }
        work.shown += [
            every_choice(f"{name}: every choice", of_model)
            for name, of_model in tables.items()
        ]
    return tlc.surveys.one_orientation(data)


def _facts(data: "xarray.Dataset") -> dict[str, Any]:
    measure = f"coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over {pairs_of_layers(data)}, then over prompts"
    names = ("failed", "provenance", "provenance_by_unit")
    return {"measure": measure} | {
        name: json.loads(data.attrs.get(name, "{}")) for name in names
    }


def stop_if_any_failed(data: "xarray.Dataset") -> None:
    """Exit with status 1 where something is missing from the data."""
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def _drawn_prompts(
    prompts: str, n: int | None, per_task: int | None, seed: int
) -> list[Prompt]:
    if n is not None and per_task is not None:
        raise ValueError("give --n or --per-task, not both")
    if per_task is not None:
        return prompts_per_task(load_prompts(prompts), per_task, seed)
    if n is None and not Path(prompts).is_file():
        n = 1200 if prompts == "open_llm_leaderboard" else 200
    return load_prompts(prompts, n, seed)


def _executor(
    workers: int | None, slurm: str | None, jobs: Path
) -> AbstractContextManager[Executor | None]:
    if workers is not None and slurm is not None:
        raise ValueError("give --workers or --slurm, not both")
    if slurm is not None:
        given = _by_name(
            "--slurm",
            slurm.split(","),
            "like partition=gpu,gpus_per_node=1,timeout_min=240",
        )
        return nullcontext(
            slurm_executor(
                jobs,
                **{name: int(x) if x.isdigit() else x for name, x in given.items()},
            )
        )
    return nullcontext() if workers is None else process_pool(workers)


def _by_name(option: str, texts: Iterable[str], wanted: str) -> dict[str, str]:
    """What texts like "name=value" say."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value or value.startswith("="):
            raise ValueError(f"`{option}` must be {wanted}, got {text!r}")
        if name in found:
            raise ValueError(f"`{option}` must have each name once, got {name!r} twice")
        found[name] = value
    return found


def _task_table(k: int, rows: "pandas.DataFrame", pairs: str) -> Table:
    # What is the same in every row goes above them.
    names = [
        name
        for name in ("model", "checkpoint", "task")
        if name == "task" or rows[name].nunique() > 1
    ]

    def cells(row: Any) -> list[str]:
        interval = (
            f" [{row['low']:.3f}, {row['high']:.3f}]" if row["n_prompts"] > 1 else ""
        )
        return [
            row["n_prompts"],
            f"{row['mean']:.3f}{interval}",
            f"{row['null']:.3f}",
            f"{row['loss']:.3f}",
        ]

    title = f"depth coupling 1 − m̃ (k = {k})" + (
        "" if "model" in names else f", {rows['model'].iloc[0]}"
    )
    cells_of_rows = (
        [*(row[name] for name in names), *cells(row)] for _, row in rows.iterrows()
    )
    numbers = ("prompts", "coupling", "null", "loss")
    return table_of(
        title,
        names,
        numbers,
        cells_of_rows,
        f"mean over {pairs}\n95 % intervals: bootstrap over prompts",
    )


def _cost_table(data: "xarray.Dataset") -> Table:
    names = ["n_layers", "d_model", "n_parameters", "seconds", "peak_memory"]
    costs = (
        data[names]
        .assign(n_prompts=data["n_pos"].notnull().sum("prompt"))
        .to_dataframe()
        .dropna()
    )
    rows = []
    for of, row in costs.iterrows():
        facts = (f"{int(row[name]):,}" for name in names[:3])
        rows.append(
            [
                *of,
                *facts,
                f"{row['seconds'] / row['n_prompts']:.2f}",
                f"{row['peak_memory']:.0f} MiB",
            ]
        )
    numbers = ("layers", "width", "parameters", "seconds per prompt", "peak memory")
    caption = "loading included; peak memory of the processes that did it"
    return table_of("cost", ("model", "checkpoint"), numbers, rows, caption)


@command
def generalization(
    survey: Annotated[
        Path, typer.Option(help="Folder of a survey, or its netCDF file.")
    ],
    scores: Annotated[
        str,
        typer.Option(
            help='CSV file of scores; "table1" for those of the paper; "loss" for the loss in the survey.'
        ),
    ] = "loss",
    score_column: Annotated[
        str, typer.Option(help="Which column of the CSV file is the score.")
    ] = "score",
    k: Annotated[
        int | None,
        typer.Option("--k", help="Top singular vectors. [the most that were measured]"),
    ] = None,
    measure: Annotated[
        MeasureName, typer.Option(help="What was measured between layers.")
    ] = "coupling",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help='Of every model, or "untrained"; "last": each model\'s own last. [the last of the survey]'
        ),
    ] = None,
    orientation: Annotated[
        Orientation | None, typer.Option(help="Of those measured. [the first]")
    ] = None,
    diagonal: Annotated[
        bool | None,
        typer.Option(
            help="Means over all pairs of layers, l = l' too, or over different ones. [as measured]"
        ),
    ] = None,
    subset: Annotated[
        list[str] | None,
        typer.Option(help="NAME=QUERY over the table; may be repeated."),
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Covariate to hold fixed; may be repeated.")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATTERN of related models, like Pythia=*pythia*; may be repeated. [column `family`]"
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Draws of the bootstrap.", min=1)
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    out: Out = OUT,
) -> None:
    """Coupling against a score across models: fits, bootstrap, covariates, influential
    models.

    Takes a survey, and a CSV file with the columns `model` and `score`. Without
    --scores, the survey's own loss is the score: lower is better, and models with
    different tokenizers cannot be compared by it. Coupling is each model's mean over
    pairs of layers (different ones, or all with --diagonal), then over prompts, at the
    last checkpoint. Models of one family (the column `family`, or --family) are not
    independent: intervals are then cluster-robust, and families are resampled whole.

    Examples:

      tl-coupling generalization --survey survey --scores scores.csv --k 30 --subset
      "above 45=score > 45" --out out

      tl-coupling generalization --survey survey --control "log10(n_parameters)"
      --family "Pythia=*pythia*" --out out
    """
    subsets = _by_name(
        "--subset", subset or [], 'NAME=QUERY, like "above 45=score > 45"'
    )
    patterns = _by_name(
        "--family", family or [], 'NAME=PATTERN, like "Pythia=*pythia*"'
    )
    if scores == "loss" and score_column != "score":
        raise ValueError(
            f"`--score-column` {score_column!r} is of a CSV file: give --scores as well"
        )
    with at_work(out) as work, _opened(survey) as opened:
        data = tlc.surveys.one_orientation(opened, orientation)
        data = data if diagonal is None else tlc.surveys.with_diagonal(data, diagonal)
        with work.console.status("resampling models and prompts …"):
            result = tlc.generalization.generalization_study(
                data,
                _scores(scores, score_column, data),
                k=k,
                measure=measure,
                score=score_column,
                checkpoint=checkpoint,
                controls=control,
                subsets=subsets,
                families=_families(patterns, data) if patterns else None,
                n_resamples=resamples,
                seed=seed,
            )
        work.write("table.csv", partial(write_table, result.table))
        pictures: dict[str, Any] = {
            "generalization.png": partial(tlc.plots.plot_generalization, result),
            "forest.png": partial(tlc.plots.plot_forest, result),
            "covariates.png": partial(
                tlc.plots.plot_covariates, result.table, result.score
            ),
        }
        pictures |= (
            {"k_sweep.png": partial(tlc.plots.plot_k_sweep, result)}
            if len(result.by_k) > 1
            else {}
        )
        by = dict(zip(result.table["model"], result.table[result.score], strict=True))
        pictures["quartiles.png"] = partial(
            tlc.plots.plot_quartiles, data, by=by, k=result.k, measure=measure
        )
        work.finish(result.to_dict(), pictures)
        work.shown += [*_remarks(result), _slopes(result)]


def _scores(
    scores: str, column: str, data: "xarray.Dataset"
) -> "pandas.DataFrame | str":
    if scores == "loss":
        return scores
    if scores != "table1":
        return tlc.generalization.read_scores(scores, score=column)
    # Depth and width are the survey's own.
    own = ["n_layers", "d_model"]
    table = tlc.generalization.paper_table1().drop(
        columns=[name for name in own if name in data]
    )
    # Most of its models are in no survey, which is not worth a warning.
    return (
        table[table["model"].isin(data["model"].values)]
        if "model" in data.dims
        else table
    )


def _opened(survey: Path) -> "xarray.Dataset":
    import xarray

    if survey.is_dir():
        return tlc.open_survey(survey)
    if not survey.exists():
        raise FileNotFoundError(
            f"no survey at {survey}: give the folder of a survey, or a netCDF file"
        )
    try:
        return xarray.open_dataset(survey, engine="netcdf4")
    except OSError as error:
        raise OSError(
            f"{survey} is not a netCDF file that can be read: {error}"
        ) from None


def _families(patterns: dict[str, str], data: "xarray.Dataset") -> dict[str, str]:
    """The family of each model of which a pattern holds."""
    found: dict[str, str] = {}
    models = (
        np.atleast_1d(data["model"].values).astype(str).tolist()
        if "model" in data.coords
        else []
    )
    for name, pattern in patterns.items():
        own = fnmatch.filter(models, pattern)
        if not own:
            raise ValueError(
                f"`--family` {name}: no model is like {pattern!r}; there are {', '.join(models)}"
            )
        if twice := found.keys() & own:
            raise ValueError(
                f"`--family` {name}: {min(twice)} is of the family {found[min(twice)]} already"
            )
        found |= dict.fromkeys(own, name)
    return found


def _slopes(result: "tlc.generalization.Generalization") -> Table:
    rows = []
    for fit in result.slopes.itertuples():
        numbers = [
            "" if number != number else f"{number:.3g}"
            for number in (fit.r_squared, fit.p)
        ]
        rows.append(
            [
                fit.Index,
                fit.n,
                f"{fit.slope:.4g}",
                f"{fit.low:.4g} to {fit.high:.4g}",
                *numbers,
            ]
        )
    for name, alone in result.covariates.iterrows():
        numbers = [f"{alone.slope:.4g}", "", f"{alone.r_squared:.3g}", f"{alone.p:.3g}"]
        rows.append([f"{name} alone", f"{alone.n:.0f}", *numbers])
    drawn, n_families = (
        result.association.bootstrap,
        result.association.linear.n_families,
    )
    families = (
        "" if n_families is None else f" in {n_families} families, cluster-robust"
    )
    caption = (
        f"{drawn.n_models} models{families}, {drawn.n_prompts} prompts; {drawn.level:.0%} intervals, t unless "
        "“bootstrap”; “corrected”: for few prompts; “given”: R² is partial"
    )
    title = f"{result.score} against {result.measure} (k = {result.k})"
    return table_of(title, [""], ["n", "slope", "interval", "R²", "p"], rows, caption)


def _remarks(result: "tlc.generalization.Generalization") -> list[str]:
    left_out = [f"left out: {name}: {why}" for name, why in result.left_out.items()]
    more = len(left_out) - _MOST_LEFT_OUT
    more_left_out = [f"left out: {more} more, see summary.json"] if more > 0 else []
    return result.remarks + left_out[:_MOST_LEFT_OUT] + more_left_out
