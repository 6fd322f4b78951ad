"""What the commands share that measure many models: tables, what failed, executors."""

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import tl_coupling as tlc
from tl_coupling.cli.console import Work
from tl_coupling.cli.tables import choices_table
from tl_coupling.files import write_table
from tl_coupling.studies.surveys import (
    Executor,
    pairs_of_layers,
    process_pool,
    slurm_executor,
)

if TYPE_CHECKING:
    import pandas
    import xarray

# Checkpoints in the printed table of every choice, each with two columns; the file has
# all.
_MOST_CHECKPOINTS = 3


def write_choices(work: Work, data: "xarray.Dataset") -> None:
    """Write every measure, orientation and choice of pairs, and show them by model."""
    rows = tlc.surveys.measure_table(data)
    work.write("measures.csv", partial(write_table, rows))
    for model, model_rows in _rows_by_model(rows, data):
        if model_rows["checkpoint"].nunique() <= _MOST_CHECKPOINTS:
            title = f"{model}: every choice"
            work.shown.append(choices_table(title, model_rows))


def _rows_by_model(
    rows: "pandas.DataFrame", data: "xarray.Dataset"
) -> "Iterable[tuple[str, pandas.DataFrame]]":
    """Return the rows of each model with its name."""
    if "model" not in rows:
        return [(data.attrs["model"], rows)]
    return rows.groupby("model", sort=False)


def facts(data: "xarray.Dataset") -> dict[str, object]:
    """Return what every summary says: the measure, what failed, and the provenance."""
    measure = (
        "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, "
        f"mean over {pairs_of_layers(data)}, then over prompts"
    )
    attrs = {
        name: json.loads(data.attrs.get(name, "{}"))
        for name in ("failed", "provenance", "provenance_by_unit")
    }
    return {"measure": measure, **attrs}


def stop_if_any_failed(data: "xarray.Dataset") -> None:
    """Exit with status 1 where something is missing from the data."""
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def executor_for(
    workers: int | None, slurm: str | None, jobs: Path
) -> AbstractContextManager[Executor | None]:
    """Return a pool of processes, a SLURM cluster with its `jobs` folder, or None."""
    if workers is not None and slurm is not None:
        raise ValueError("give --workers or --slurm, not both")
    if workers is not None:
        return process_pool(workers)
    if slurm is None:
        # Without an executor, units are measured in this process.
        return nullcontext()
    texts = values_by_name(
        "--slurm",
        slurm.split(","),
        "like partition=gpu,gpus_per_node=1,timeout_min=240",
    )
    parameters = {
        # submitit wants numbers as numbers.
        name: int(text) if text.isdigit() else text
        for name, text in texts.items()
    }
    return nullcontext(slurm_executor(jobs, **parameters))


def values_by_name(option: str, texts: Iterable[str], syntax: str) -> dict[str, str]:
    """Return what texts like "name=value" say; `syntax` is what they must look like."""
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        # A query without a name, such as "score == 45", would be split inside its sign.
        if not name or not value or value.startswith("="):
            raise ValueError(f"`{option}` must be {syntax}, got {text!r}")
        if name in values:
            raise ValueError(f"`{option}` must have each name once, got {name!r} twice")
        values[name] = value
    return values
