"""The command that measures trajectories through one model: trajectory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer
from torch import Tensor, nn

import tl_coupling as tlc
from tl_coupling.blocks import Trace
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, work_in
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    OneModel,
    OnePrompt,
    Out,
    Untrained,
    own_position,
)
from tl_coupling.results import ShortTable
from tl_coupling.trajectories import SHAPES, TrajectoryResult, measure_trajectory


@command
def trajectory(
    setup: OneModel,
    prompt: OnePrompt,
    position: Annotated[
        int | None,
        typer.Option(
            help=f"The token that is linearised and perturbed. {OWN_POSITION}"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Steps of the windowed score, odd. [11, or the most that the model "
            "has]"
        ),
    ] = None,
    perturbation: Annotated[
        bool, typer.Option(help="Follow noise in the embedding: 48 forward passes.")
    ] = True,
    absolute_noise: Annotated[
        bool,
        typer.Option(
            "--absolute-noise",
            help="Take the standard deviations as they are, not relative to the "
            "length of the embedding.",
        ),
    ] = False,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Measure the trajectories of a prompt's tokens through the residual stream.

    For every token its line-shape score (1 is a straight line), expodistance (0 is
    exact exponential growth) and equidistance (0 is equal steps); against depth, its
    norm, step lengths, line-shape scores and logit-lens entropy. For one token, how
    well its linearised blocks predict its path, their largest singular values with a
    line through 1/σ, and how noise added to its embedding propagates.

    Prints the means over tokens, with --untrained beside those of the same architecture
    at its initialisation; writes netCDF, JSON and pictures.

    Examples:

      tl-coupling trajectory --prompt "The capital of France is" --untrained --out out

      tl-coupling trajectory --model gpt2 --final-norm --window 7 --no-perturbation
      --out gpt2
    """
    single_prompt = prompt.single_prompt()
    measured_position = own_position(single_prompt, position)

    def measure(run: Run) -> MeasuredTrajectory:
        traced = run.trace(single_prompt)
        with run.timed("measures"):
            result = measure_trajectory(
                traced,
                position=measured_position,
                window=window,
                noise=perturbation,
                relative_noise=not absolute_noise,
                progress=partial(run.bar, "trajectory"),
            )
        return MeasuredTrajectory(drop_model(traced), result)

    with work_in(out) as work:
        runs = work.measured(setup, untrained, measure)
        results = {role: measured.result for role, measured in runs.items()}
        work.save({role: {"trajectory": result} for role, result in results.items()})
        # Known only after the last measurement, and no part of the results.
        summary = _summary(results) | {"seconds": work.seconds}
        work.finish(summary, _pictures(runs, measured_position))
        tables = {role: result.table() for role, result in results.items()}
        work.shown.append(ShortTable.beside(tables, "mean"))


@dataclass(frozen=True)
class MeasuredTrajectory:
    """The paths of a prompt's tokens, and what was measured of them."""

    trace: Trace
    result: TrajectoryResult


def drop_model(traced: Trace) -> Trace:
    """Return a trace that can be drawn, while its model can be freed."""
    # A picture needs the stream and the names of tokens alone.
    return replace(traced, model=nn.Identity(), blocks=())


def _pictures(runs: dict[str, MeasuredTrajectory], black: int) -> Pictures:
    """Return the pictures by file name; the token `black` stands out in the paths."""
    traces = {role: measured.trace for role, measured in runs.items()}
    # One trace alone has its views side by side, instead of one below the other.
    drawn = traces if len(traces) > 1 else traces["trained"]
    pictures: Pictures = {
        "trajectories.png": partial(tlc.plot_trajectories, drawn, black=black)
    }
    results = {role: measured.result for role, measured in runs.items()}
    plots = tlc.plots
    pictures["metrics.png"] = partial(plots.plot_trajectory_metrics, results)
    pictures["linearisation.png"] = partial(plots.plot_linearisation, results)
    pictures["inverse_singular_values.png"] = partial(
        plots.plot_inverse_singular_values, results
    )
    # Left out with --no-perturbation.
    if results["trained"].perturbation is not None:
        pictures["perturbation.png"] = partial(plots.plot_perturbation, results)
    return pictures


def _summary(results: dict[str, TrajectoryResult]) -> dict[str, object]:
    """Return what `summary.json` holds, without the seconds."""
    trained = results["trained"]
    linearisation = trained.linearisation
    return {
        "measure": "line-shape score, expodistance and equidistance of every token, "
        "and their means over tokens where they are defined",
        "random_steps_line_shape_score": math.sqrt(trained.n_layers),
        "window": trained.window,
        "position": None if linearisation is None else linearisation.position,
        "mean": _read_shapes(results, lambda values: float(values.nanmean())),
        "tokens": _read_shapes(results, lambda values: values.tolist()),
        "undefined_tokens": _read_shapes(results, _undefined_tokens),
        "linearisation_mean_relative_error": _linear_errors(results),
        "perturbation": _noise_summary(results),
        "provenance": {role: result.provenance for role, result in results.items()},
    }


def _read_shapes(
    results: dict[str, TrajectoryResult], read: Callable[[Tensor], object]
) -> dict[str, dict[str, object]]:
    """Return what `read` gives of the tokens' shapes, by run and measure."""
    return {
        role: {name: read(getattr(result, name)) for name in SHAPES}
        for role, result in results.items()
    }


def _undefined_tokens(values: Tensor) -> list[int]:
    """Return the positions of tokens whose value is undefined."""
    positions: list[int] = values.isnan().nonzero().flatten().tolist()
    return positions


def _linear_errors(
    results: dict[str, TrajectoryResult],
) -> dict[str, dict[str, float]]:
    """Return the mean relative error of both linear predictions, by run."""
    errors = {}
    for role, result in results.items():
        linearisation = result.linearisation
        if linearisation is not None:
            one_step = linearisation.relative_error("one_step")
            previous = linearisation.relative_error("previous")
            errors[role] = {
                "one_step": float(one_step.mean()),
                "previous": float(previous.mean()),
            }
    return errors


def _noise_summary(
    results: dict[str, TrajectoryResult],
) -> dict[str, dict[str, object]]:
    """Return how similar the noise is before the first block and after the last."""
    summaries: dict[str, dict[str, object]] = {}
    for role, result in results.items():
        noise = result.perturbation
        if noise is not None:
            summaries[role] = {
                "relative": noise.relative,
                "scales": noise.scales,
                "cosine_similarity_before": noise.mean[:, 0].tolist(),
                "cosine_similarity_after": noise.mean[:, -1].tolist(),
            }
    return summaries
