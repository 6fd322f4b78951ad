"""The command that draws trajectories through several models: compare-trajectories."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import (
    OUT,
    OnePrompt,
    Out,
    Setup,
    model_option,
    own_position,
    training_step,
)
from tl_coupling.cli.trajectory import MeasuredTrajectory, drop_model
from tl_coupling.prompts import Prompt
from tl_coupling.results import ShortTable
from tl_coupling.studies.surveys import Source, checkpoint_sources
from tl_coupling.trajectories import SHAPES, measure_trajectory


@command
def compare_trajectories(
    setup: Setup,
    prompt: OnePrompt,
    model: Annotated[
        list[str],
        model_option(
            help="Hub name, local folder, GGUF file or folder of checkpoints; may be "
            "repeated."
        ),
    ],
    checkpoint: Annotated[
        list[str] | None,
        model_option(
            help="Training step or hub revision, of every model; may be repeated."
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Draw the paths of a prompt's tokens in several models, or checkpoints of one.

    Writes the paths in two principal components, a column for each model; norms, steps,
    line-shape scores and entropy by depth in one picture, if all read the same tokens;
    and JSON. Prints the means over tokens of line-shape score (1 is a straight line),
    expodistance (0 is exact exponential growth) and equidistance (0 is equal steps).

    Examples:

      tl-coupling compare-trajectories --model runs/my-model --checkpoint 1
      --checkpoint 4000 --checkpoint 143000 --out paths

      tl-coupling compare-trajectories --model gpt2 --model EleutherAI/pythia-160m
      --prompt "The capital of France is" --out two
    """
    single_prompt = prompt.single_prompt()
    with work_in(out) as work:
        measured_models: dict[str, MeasuredTrajectory] = {}
        for name, source in _sources(model, checkpoint):
            with work.console.stage(f"measuring {name} …"):
                measured_models[name] = _measured(source, setup, single_prompt)
        black = own_position(single_prompt, None)
        means = {
            name: {
                shape: float(getattr(measured.result, shape).nanmean())
                for shape in SHAPES
            }
            for name, measured in measured_models.items()
        }
        depths = {name: m.result.n_layers for name, m in measured_models.items()}
        provenance = {name: m.result.provenance for name, m in measured_models.items()}
        summary = {"mean": means, "n_layers": depths, "provenance": provenance}
        work.finish(summary, _pictures(measured_models, black))
        rows = []
        for name, shape_means in means.items():
            # Random steps score √n: models of different depths have different ones.
            cells = [f"{mean:.3f}" for mean in shape_means.values()]
            rows.append([name, depths[name], *cells, f"{depths[name] ** 0.5:.3f}"])
        numbers = ["layers", *SHAPES.values(), "score of random steps"]
        table = ShortTable.of(
            "trajectories", ["model"], numbers, rows, "mean over tokens"
        )
        work.shown.append(table)


def _sources(
    models: list[str], checkpoints: list[str] | None
) -> Iterator[tuple[str, Source]]:
    """Yield names and arguments of `load_model`.

    Where there is one model, its checkpoints are named by their steps alone.
    """
    for model in models:
        if checkpoints is None:
            yield model, {"name": model}
            continue
        steps = [training_step(checkpoint) for checkpoint in checkpoints]
        for step, source in checkpoint_sources(model, steps).items():
            name = f"step {step}" if len(models) == 1 else f"{model} at {step}"
            yield name, source


# A function of its own, so that one model is freed before the next is loaded.
def _measured(source: Source, setup: Setup, prompt: Prompt) -> MeasuredTrajectory:
    """Return the paths and their shapes in one model."""
    model = tlc.load_model(**source, **setup.loading)
    traced = tlc.trace(
        model, prompt, prepend_bos=setup.prepend_bos, final_norm=setup.final_norm
    )
    # Without Jacobians and noise, which no picture of several models shows.
    result = measure_trajectory(traced, linear=False, noise=False)
    return MeasuredTrajectory(drop_model(traced), result)


def _pictures(measured_models: dict[str, MeasuredTrajectory], black: int) -> Pictures:
    """Return the pictures by file name; curves share a picture if the tokens agree."""
    traces = {name: measured.trace for name, measured in measured_models.items()}
    pictures: Pictures = {
        "trajectories.png": partial(tlc.plot_trajectories, traces, black=black)
    }
    # Curves are of single tokens: other tokenizers cut the prompt otherwise.
    token_sequences = {tuple(traced.str_tokens) for traced in traces.values()}
    if len(token_sequences) == 1:
        results = {name: measured.result for name, measured in measured_models.items()}
        pictures["metrics.png"] = partial(tlc.plots.plot_trajectory_metrics, results)
    return pictures
