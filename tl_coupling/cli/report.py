"""The command that writes the page on one model and prompt: report."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.bars import WholeBar
from tl_coupling.cli.console import Run, work_in
from tl_coupling.cli.options import (
    AcrossTokens,
    Comparing,
    OneModel,
    OnePrompt,
    Untrained,
)
from tl_coupling.portraits import Portrait

# About a minute of one core, for a stream of 576 dimensions.
_MANY_INFLUENCES = 1000
# About what the figures of one model of 30 layers take on one core: 5 s with 11 tokens,
# 9 s with 67.
_DRAWING_SECONDS = 7.0


@command
def report(
    setup: OneModel,
    comparing: Comparing,
    token_choices: AcrossTokens,
    prompt: OnePrompt,
    carriers: Annotated[
        bool, typer.Option(help="Also show which heads and MLPs carry coupling.")
    ] = False,
    products: Annotated[
        bool, typer.Option(help="Also show what the blocks amplify together.")
    ] = False,
    directions: Annotated[
        int | None,
        typer.Option(
            help="Also show the tokens that this block's singular vectors promote; "
            "negative: from the end.",
            metavar="LAYER",
        ),
    ] = None,
    untrained: Untrained = True,
    out: Annotated[
        Path, typer.Option(help="The page to write.", dir_okay=False)
    ] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page on a model and a prompt, or an image.

    Coupling across depth and across tokens, singular values, the influence of tokens on
    each other, and trajectories; each figure with a caption that says what to read off
    it and how it was made. The page needs no network. For a vision model it shows
    what each patch does over the picture. The same architecture at its initialisation
    stands beside the model, unless --no-untrained is given.

    Examples:

      tl-coupling report --prompt "The capital of France is" --out report.html

      tl-coupling report --model gpt2 --k 10 --k 50 --layer 5 --other-layer 8
      --no-untrained --out gpt2.html

      tl-coupling report --prompt "The capital of France is" --carriers --products
      --directions -2 --out report.html

      tl-coupling report --model google/vit-base-patch16-224 --image cat.jpg --out
      cat.html
    """
    single_prompt = prompt.single_prompt()
    ks = comparing.ks if comparing.k else None

    def measure(run: Run) -> Portrait:
        trace = run.trace(single_prompt)
        n_influences = trace.n_pos * trace.n_layers
        # Said beforehand, while it can still be interrupted without loss.
        if n_influences > _MANY_INFLUENCES:
            run.bars.console.print(
                f"{run.name}: the influence of {trace.n_pos} tokens at "
                f"{trace.n_layers} layers takes longest: up to {n_influences:,} Jacobians",
                soft_wrap=True,
            )
        return tlc.portrait(
            trace,
            k=ks,
            orientation=comparing.orientation,
            with_carriers=carriers,
            with_products=products,
            decoded_layer=directions,
            progress=partial(run.bar, "measuring"),
            **token_choices.arguments(single_prompt),
        )

    # `out` is a page here, not a folder.
    with work_in(out.parent) as work:
        n_models = 2 if untrained else 1
        drawing_seconds = _DRAWING_SECONDS * n_models
        with WholeBar(work.console, "report", n_models, drawing_seconds) as bar:
            portraits = work.measured(setup, untrained, measure, bar)
            with bar.stage("drawing …"):
                page = tlc.write_report(out, portraits)
        work.written.append(page)
