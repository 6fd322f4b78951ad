"""The command that measures one model with its weights at several precisions:
precision.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, table_of
from tl_coupling.cli.options import OUT, Measuring, Out, Prompts, training_step
from tl_coupling.cli.surveys import stop_if_any_failed
from tl_coupling.files import write_rows
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.surveys import MOVING, PRECISIONS, movements, precision_sweep
from tl_coupling.surveys.precision import Moved


@command
def precision(
    measuring: Measuring,
    prompts: Prompts,
    model: Annotated[
        str, typer.Option(help="Embedded model, hub name, or local HuggingFace folder.")
    ] = EMBEDDED_MODEL,
    checkpoint: Annotated[
        str | None, typer.Option(help="Training step, or hub revision.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, bfloat16, int8, nf4, or NAME=MODEL for other weights of the same model (a GGUF file, a "
            "folder, a hub name); may be repeated. Changes are from the first. [default: all four]"
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """How far each measure moves when weights are rounded: the same prompts at float32,
    bfloat16, int8 and nf4.

    Compared are weights: rounded to bfloat16, or as bitsandbytes quantises the linear
    layers to int8 or to 4 bits (nf4), dequantised. Not compared are kernels: at every
    precision activations, Jacobians and SVDs are in float32, so that what half
    precision or integers do to activations is left out.

    Prints the mean over prompts of each measure at the first precision, and of its
    change at the others, with the standard deviation; writes these and the values of
    every prompt as netCDF, CSV and JSON, and a picture. Each finished precision is
    written at once; run the same command again to do the rest, or to add precisions.

    Examples:

      tl-coupling precision --prompts prompts.jsonl --k 10 --k 50 --out precision

      tl-coupling precision --model gpt2 --precision float32 --precision nf4 --precision
      q4=gpt2.Q4_K_M.gguf --out gpt2
    """
    chosen, settings, wanted = (
        prompts.chosen(),
        measuring.settings,
        precision or list(PRECISIONS),
    )
    where: dict[str, Any] = {
        "checkpoint": training_step(checkpoint),
        "backend": measuring.backend,
        "device": measuring.device,
    }
    with at_work(out) as work:
        data = precision_sweep(
            model, wanted, chosen, settings=settings, folder=out / "precisions", **where
        )
        work.write("precision.nc", partial(data.to_netcdf, engine="netcdf4"))
        rows = movements(data)
        work.write("table.csv", lambda path: write_rows(path, Moved._fields, rows))
        summary = {
            "compared": "weights; activations, Jacobians and SVDs are in float32",
            "first": data["precision"].values.tolist()[0],
            "prompts": data["prompt"].values.tolist(),
            "measures": MOVING,
            "movements": [row._asdict() for row in rows],
            "provenance": json.loads(data.attrs["provenance"]),
            "failed": json.loads(data.attrs["failed"]),
        }
        picture = partial(tlc.plots.plot_precision, data)
        work.finish(summary, {"precision.png": picture, "precision.svg": picture})
        work.shown.append(_table(rows, model, data.sizes["prompt"]))
    stop_if_any_failed(data)


def _table(rows: Sequence[Moved], model: str, n_prompts: int) -> Table:
    """A row for each measure and k: its value at the first precision, its change at the
    others.
    """
    lines, shown = [], ""
    for (measure, k), of_measure in groupby(rows, lambda row: (row.measure, row.k)):
        first, *others = of_measure
        spreads = (
            "" if math.isnan(row.spread) else f" ± {row.spread:.2g}" for row in others
        )
        changes = (
            f"{row.change:+.2g}{spread}"
            for row, spread in zip(others, spreads, strict=True)
        )
        lines.append(
            [
                MOVING[measure] if measure != shown else "",
                "" if k is None else k,
                f"{first.value:.4g}",
                *changes,
            ]
        )
        shown = measure
    precisions = list(dict.fromkeys(row.precision for row in rows))
    caption = (
        f"{precisions[0]}: mean over {n_prompts} prompt{'s' if n_prompts > 1 else ''}; others: change from it"
        f"{' ± standard deviation over prompts' if n_prompts > 1 else ''}\nweights are rounded, activations are not"
    )
    return table_of(
        f"{model}: what rounding the weights changes",
        ["measure"],
        ["k", *precisions],
        lines,
        caption,
    )
