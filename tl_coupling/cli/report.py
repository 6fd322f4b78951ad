"""`tl-coupling report`: everything about one prompt on one HTML page."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, show
from tl_coupling.cli.options import AcrossTokens, Comparing, Loading, OnePrompt, Tracing
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.portraits import Portrait, portrait
from tl_coupling.surveys.measurements import PAPER_PROMPT

_REPORT_HELP = """One self-contained HTML page on a model and a prompt.

Coupling across depth and across tokens, singular values, the influence of tokens on each other, and trajectories; each
figure with a caption that says what to read off it and how it was made. The page loads nothing from anywhere. The same
architecture at its initialisation stands beside the model, unless --no-untrained.

Examples:

  tl-coupling report --prompt "The capital of France is" --out report.html

  tl-coupling report --model gpt2 --k 10 --k 50 --layer 5 --other-layer 8 --no-untrained --out gpt2.html
"""


@command(_REPORT_HELP)
def report(
    loading: Loading,
    tracing: Tracing,
    comparing: Comparing,
    across: AcrossTokens,
    prompt: OnePrompt = PAPER_PROMPT,
    untrained: Annotated[bool, typer.Option(help="Measure the untrained twin as well.")] = True,
    out: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("report.html"),
) -> None:
    """See `_REPORT_HELP`."""
    ks = comparing.ks if comparing.k else None

    def measure(run: Run) -> Portrait:
        bar = run.bar("measuring")
        return portrait(run.trace(prompt), k=ks, orientation=comparing.orientation, progress=bar, **asdict(across))

    with at_work(out.parent) as (_, progress):
        from tl_coupling.report import write_report

        runs = measured_runs(loading, tracing, measure, progress, untrained)
        progress.add_task("drawing", total=None)
        written = write_report(out, runs)
    show([written])
