"""The command that rotates what blocks read or write: rotate."""

from functools import partial
from typing import Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, work_in
from tl_coupling.cli.options import OUT, OneModel, Out, Prompts
from tl_coupling.directions import RotatedSide, Rotation


@command
def rotate(
    setup: OneModel,
    prompts: Prompts,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            help="Layers to rotate in one pass, each with its own --layer. [all]"
        ),
    ] = None,
    side: Annotated[
        RotatedSide, typer.Option(help="What is rotated of each block.")
    ] = "write",
    angle: Annotated[float, typer.Option(help="Angle of rotation in degrees.")] = 90.0,
    first_position: Annotated[
        int,
        typer.Option(
            help="Leave earlier tokens as they are: 1 spares a first token that is an "
            "attention sink.",
            min=0,
        ),
    ] = 0,
    draws: Annotated[
        int, typer.Option(help="Number of rotations of each kind.", min=1)
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0)] = 0,
    out: Out = OUT,
) -> None:
    """Rotate what blocks read or write, and measure what the model loses.

    All layers together, by one rotation, which keeps the coupling of given Jacobians;
    apart, each by its own, which destroys it; and shrunk, multiplied by the cosine of
    the angle, which loses as much and adds nothing. One layer is rotated alone. Prints
    the change in loss of each with its interval over prompts, and the first minus the
    others, paired.

    Examples:

      tl-coupling rotate --prompts prompts.jsonl --side both --angle 30 --out out

      tl-coupling rotate --model gpt2 --layer 3 --first-position 1 --draws 5
    """
    selected = prompts.selected()

    def measure(run: Run) -> Rotation:
        with run.timed("rotate"):
            return tlc.directions.rotate(
                run.model,
                selected,
                layer or None,
                side,
                angle=angle,
                first_position=first_position,
                n_draws=draws,
                seed=seed,
                prepend_bos=setup.prepend_bos,
                progress=partial(run.bar, "rotations"),
            )

    with work_in(out) as work:
        result = work.measured_as("trained", setup, measure)
        work.save({"trained": {"rotation": result}})
        summary = {
            "measure": "change in loss with blocks rotated, nats per token",
            "loss": result.loss.tolist(),
            "side": result.side,
            "angle": result.angle,
            "layers": list(result.layers),
            "rotations": result.to_dataframe().to_dict("records"),
            "provenance": result.provenance,
        }
        pictures: Pictures = {"rotation.png": partial(tlc.plots.plot_rotation, result)}
        work.finish(summary, pictures)
        work.shown.append(result.table())
