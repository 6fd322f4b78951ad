"""`tl-coupling report`: everything about one prompt on one HTML page."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from tl_coupling.cli.app import app
from tl_coupling.cli.console import progress_bars, quiet
from tl_coupling.cli.options import (
    PAPER_PROMPT,
    Backend,
    Checkpoint,
    Device,
    FinalNorm,
    Model,
    OnePrompt,
    Orientation,
    Position,
    PrependBos,
    training_step,
)
from tl_coupling.files import output_folder
from tl_coupling.models import EMBEDDED_MODEL

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
    k: Annotated[list[int] | None, typer.Option(help="Top singular vectors; may be repeated. [10, 30, 50]")] = None,
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
    ks = sorted(set(k or (10, 30, 50)))
    if ks[0] < 1:
        raise ValueError(f"`--k` must be at least 1, got {ks[0]}")
    console = Console(stderr=True)
    tracing = {"prepend_bos": prepend_bos, "final_norm": final_norm}
    measuring = {"k": ks, "position": position, "layer": layer, "other_layer": other_layer}
    measuring |= {"input_position": input_position, "orientation": orientation}
    loading = {"backend": backend, "device": device}
    with output_folder(out.parent), quiet(console), progress_bars(console) as progress:
        from tl_coupling.report import write_report

        runs = {"trained": _measure(model, prompt, tracing, measuring, progress, **loading, **_at(checkpoint))}
        if untrained:
            runs["untrained"] = _measure(model, prompt, tracing, measuring, progress, **loading, untrained=True)
        progress.add_task("drawing", total=None)
        written = write_report(out, runs)
    Console().print(f"wrote {written}", highlight=False, soft_wrap=True)


def _at(checkpoint: str | None) -> dict[str, Any]:
    return {"checkpoint": training_step(checkpoint)}


def _measure(
    name: str,
    prompt: str,
    tracing: dict[str, Any],
    measuring: dict[str, Any],
    progress: Progress,
    **loading: Any,
) -> Any:
    from tl_coupling.blocks import trace
    from tl_coupling.models import load_model
    from tl_coupling.report import measure_prompt

    twin = "untrained " if loading.get("untrained") else ""
    task = progress.add_task(f"loading {twin}{name}", total=None)
    model = load_model(name, **loading)
    progress.update(task, description=f"measuring {twin}{name}")

    def bar(items: Iterable[int]) -> Iterable[int]:
        progress.reset(task)
        return progress.track(list(items), task_id=task)

    wrapped: Callable[[Iterable[int]], Iterable[int]] = bar
    measured = measure_prompt(trace(model, prompt, **tracing), **measuring, progress=wrapped)
    progress.remove_task(task)
    return measured
