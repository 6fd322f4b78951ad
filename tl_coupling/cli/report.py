"""`tl-coupling report`: everything about one prompt on one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from tl_coupling.cli.app import app
from tl_coupling.cli.console import at_work
from tl_coupling.cli.options import (
    Backend,
    Checkpoint,
    Device,
    FinalNorm,
    Ks,
    Model,
    OnePrompt,
    Orientation,
    Position,
    PrependBos,
    checked_ks,
    training_step,
)
from tl_coupling.cli.results import show
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.portraits import Portrait, portrait
from tl_coupling.surveys.measurements import PAPER_PROMPT

_REPORT_HELP = """One self-contained HTML page on a model and a prompt.

Coupling across depth and across tokens, singular values, the influence of tokens on each other, and trajectories; each
figure with a caption that says what to read off it, maps and tokens to hover over, and how it was made. The page loads
nothing from anywhere. The same architecture at its initialisation stands beside it, unless --no-untrained.

Examples:

  tl-coupling report --prompt "The capital of France is" --out report.html

  tl-coupling report --model gpt2 --k 10 --k 50 --layer 5 --other-layer 8 --no-untrained --out gpt2.html
"""


@app.command(help=_REPORT_HELP)
def report(
    model: Model = EMBEDDED_MODEL,
    prompt: OnePrompt = PAPER_PROMPT,
    k: Ks = None,
    position: Position = -1,
    layer: Annotated[int | None, typer.Option(help="Token maps: layer of J_1. By default in the middle.")] = None,
    other_layer: Annotated[
        int | None, typer.Option(help="Token maps: layer of the singular vectors. By default the one after.")
    ] = None,
    input_position: Annotated[int, typer.Option(help="Token maps: position of the fixed input.")] = 0,
    untrained: Annotated[bool, typer.Option(help="Measure the untrained twin as well.")] = True,
    prepend_bos: PrependBos = None,
    final_norm: FinalNorm = False,
    orientation: Orientation = "ujv",
    checkpoint: Checkpoint = None,
    backend: Backend = "auto",
    device: Device = None,
    out: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("report.html"),
) -> None:
    """See `_REPORT_HELP`."""
    ks = checked_ks(k)
    tracing = {"prepend_bos": prepend_bos, "final_norm": final_norm}
    loading = {"checkpoint": training_step(checkpoint), "backend": backend, "device": device}

    def measure(run: Run) -> Portrait:
        return portrait(
            run.trace(prompt),
            k=ks,
            position=position,
            layer=layer,
            other_layer=other_layer,
            input_position=input_position,
            orientation=orientation,  # type: ignore[arg-type]
            progress=run.bar("measuring"),
        )

    with at_work(out.parent) as (_, progress):
        from tl_coupling.report import write_report

        runs = measured_runs(model, measure, progress, untrained, tracing, **loading)
        progress.add_task("drawing", total=None)
        written = write_report(out, runs)
    show([written])
