"""The command that measures one model with its weights rounded: precision."""

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import (
    OUT,
    Measuring,
    Out,
    Prompts,
    model_option,
    training_step,
)
from tl_coupling.cli.sweeps import stop_if_any_failed
from tl_coupling.files import write_rows
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.results import ShortTable, plural
from tl_coupling.studies.surveys import (
    COMPARED_MEASURES,
    PRECISIONS,
    PrecisionChange,
    precision_changes,
    precision_sweep,
)

if TYPE_CHECKING:
    import xarray


@command
def precision(
    measuring: Measuring,
    prompts: Prompts,
    model: Annotated[
        str, model_option(help="Embedded model, hub name, or local HuggingFace folder.")
    ] = EMBEDDED_MODEL,
    checkpoint: Annotated[
        str | None, model_option(help="Training step, or hub revision.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, bfloat16, int8, nf4, or NAME=MODEL for other weights of the "
            "same model (a GGUF file, a folder, a hub name); may be repeated. Changes "
            "are from the first. [default: all four]"
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Measure how far each measure moves when weights are rounded.

    The same prompts are measured at float32, bfloat16, int8 and nf4. It
    compares weights: rounded to bfloat16, or quantised by bitsandbytes in the linear
    layers to int8 or to 4 bits (nf4) and dequantised. It does not compare kernels:
    activations, Jacobians and SVDs are in float32 at every precision, so the effect of
    half precision or integers on activations is left out.

    Prints the mean over prompts of each measure at the first precision, and of its
    change at the others, with the standard deviation; writes these and the values of
    every prompt as netCDF, CSV and JSON, and a picture. Each finished precision is
    written at once; run the same command again to do the rest, or to add precisions.

    Examples:

      tl-coupling precision --prompts prompts.jsonl --k 10 --k 50 --out precision

      tl-coupling precision --model gpt2 --precision float32 --precision nf4 --precision
      q4=gpt2.Q4_K_M.gguf --out gpt2
    """
    selected_prompts = prompts.selected()
    settings = measuring.settings
    with work_in(out) as work:
        data = precision_sweep(
            model,
            precision or list(PRECISIONS),
            selected_prompts,
            settings=settings,
            checkpoint=None if checkpoint is None else training_step(checkpoint),
            folder=out / "precisions",
            progress=True,
            backend=measuring.backend,
            device=measuring.device,
        )
        work.write("precision.nc", partial(data.to_netcdf, engine="netcdf4"))
        rows = precision_changes(data)
        work.write(
            "table.csv", lambda path: write_rows(path, PrecisionChange._fields, rows)
        )
        picture = partial(tlc.plots.plot_precision, data)
        pictures: Pictures = {"precision.png": picture, "precision.svg": picture}
        work.finish(_summary(data, rows), pictures)
        work.shown.append(_table(rows, model, data.sizes["prompt"]))
    # After all is written: the results of the others stay.
    stop_if_any_failed(data)


def _summary(
    data: "xarray.Dataset", rows: Sequence[PrecisionChange]
) -> dict[str, object]:
    """Return what `summary.json` holds."""
    return {
        "compared": "weights; activations, Jacobians and SVDs are in float32",
        "first": data["precision"].values.tolist()[0],
        "prompts": data["prompt"].values.tolist(),
        "measures": COMPARED_MEASURES,
        "movements": [row._asdict() for row in rows],
        "provenance": json.loads(data.attrs["provenance"]),
        "failed": json.loads(data.attrs["failed"]),
    }


def _table(
    changes: Sequence[PrecisionChange], model: str, n_prompts: int
) -> ShortTable:
    """Return a table with a row for each measure and k.

    It has the value at the first precision, and the change at the others.
    """
    rows = []
    last_measure = ""
    # `groupby` joins neighbours only: rows come measure by measure, then k by k.
    choices = groupby(changes, lambda row: (row.measure, row.k))
    for (measure, k), choice_rows in choices:
        first, *rounded = choice_rows
        # A measure is named in the first of its rows alone.
        name = COMPARED_MEASURES[measure] if measure != last_measure else ""
        k_cell = "" if k is None else k
        change_cells = [_change_cell(row) for row in rounded]
        rows.append([name, k_cell, f"{first.value:.4g}", *change_cells])
        last_measure = measure
    precisions = list(dict.fromkeys(row.precision for row in changes))
    spread = " ± standard deviation over prompts" if n_prompts > 1 else ""
    caption = (
        f"{precisions[0]}: mean over {plural(n_prompts, 'prompt')}; "
        f"others: change from it{spread}\n"
        "weights are rounded, activations are not"
    )
    title = f"{model}: what rounding the weights changes"
    return ShortTable.of(title, ["measure"], ["k", *precisions], rows, caption)


def _change_cell(row: PrecisionChange) -> str:
    """Return the change of a measure and, over several prompts, its spread."""
    change = f"{row.change:+.2g}"
    # One prompt has no spread.
    if math.isnan(row.spread):
        return change
    return f"{change} ± {row.spread:.2g}"
