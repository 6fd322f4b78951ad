"""`tl-coupling trajectory`: the shape of every token's path, and how far linear blocks and noise explain it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, show, table_of, with_suffix, write_pictures, write_summary
from tl_coupling.cli.options import OUT, Loading, OnePrompt, Out, Tracing, Untrained
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.surveys.measurements import PAPER_PROMPT
from tl_coupling.trajectories import TrajectoryResult, measure_trajectory

_TRAJECTORY_HELP = """Trajectories of a prompt's tokens through the residual stream.

For every token its line-shape score (1 is a straight line), expodistance (0 is exact exponential growth) and
equidistance (0 is equal steps); against depth, its norm, step lengths, line-shape scores and logit-lens entropy. For
one token, how well its linearised blocks predict its path, their largest singular values with a line through 1/σ, and
how noise added to its embedding propagates.

Prints the means over tokens, with --untrained beside those of the same architecture at its initialisation; writes
netCDF, JSON and pictures.

Examples:

  tl-coupling trajectory --prompt "The capital of France is" --untrained --out out

  tl-coupling trajectory --model gpt2 --final-norm --window 7 --no-perturbation --out gpt2
"""

_PER_TOKEN = {"line_shape_score": "line-shape score", "expodistance": "expodistance", "equidistance": "equidistance"}


@command(_TRAJECTORY_HELP)
def trajectory(
    loading: Loading,
    tracing: Tracing,
    prompt: OnePrompt = PAPER_PROMPT,
    position: Annotated[int, typer.Option(help="The token that is linearised and perturbed.")] = -1,
    window: Annotated[
        int | None, typer.Option(help="Steps of the windowed score, odd. [11, or the most that the model has]")
    ] = None,
    perturbation: Annotated[bool, typer.Option(help="Follow noise in the embedding: 48 forward passes.")] = True,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """See `_TRAJECTORY_HELP`."""

    def measured(run: Run) -> tuple[TrajectoryResult, Callable[[], Any], dict[str, float]]:
        traced = run.trace(prompt)
        with run.timed("measures"):
            result = measure_trajectory(
                traced, position=position, window=window, noise=perturbation, progress=run.bar("trajectory")
            )
        return result, partial(plots.plot_trajectories, traced), run.seconds

    from tl_coupling import plots

    with at_work(out) as (folder, progress):
        runs = measured_runs(loading, tracing, measured, progress, untrained)
        progress.console.print("drawing …")
        results = {run: result for run, (result, *_) in runs.items()}
        written = [result.save(folder / f"{with_suffix('trajectory', run)}.nc") for run, result in results.items()]
        pictures = {f"{with_suffix('trajectories', run)}.png": draw for run, (_, draw, _) in runs.items()}
        pictures["metrics.png"] = partial(plots.plot_trajectory_metrics, results)
        pictures["linearisation.png"] = partial(plots.plot_linearisation, results)
        pictures["inverse_singular_values.png"] = partial(plots.plot_inverse_singular_values, results)
        if perturbation:
            pictures["perturbation.png"] = partial(plots.plot_perturbation, results)
        written += write_pictures(folder, pictures)
        seconds = {run: seconds for run, (*_, seconds) in runs.items()}
        written.append(write_summary(folder, _summary(results) | {"seconds": seconds}))
    show(written, _table(results))


def _summary(results: dict[str, TrajectoryResult]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "measure": "line-shape score, expodistance and equidistance of every token, and their means over tokens where "
        "they are defined",
        "random_steps_line_shape_score": math.sqrt(results["trained"].n_layers),
        "window": results["trained"].window,
    }
    names = ("mean", "tokens", "undefined_tokens", "linearisation_mean_relative_error", "perturbation")
    summary |= {name: {} for name in names}
    for run, result in results.items():
        tokens = {name: getattr(result, name) for name in _PER_TOKEN}
        summary["mean"][run] = {name: float(values.nanmean()) for name, values in tokens.items()}
        summary["tokens"][run] = {name: values.tolist() for name, values in tokens.items()}
        summary["undefined_tokens"][run] = {
            name: values.isnan().nonzero().flatten().tolist() for name, values in tokens.items()
        }
        if (linear := result.linearisation) is not None:
            summary["position"] = linear.position
            summary["linearisation_mean_relative_error"][run] = {
                "one_step": float(linear.relative_error("one_step").mean()),
                "previous": float(linear.relative_error("previous").mean()),
            }
        if (noisy := result.perturbation) is not None:
            summary["perturbation"][run] = {
                "scales": noisy.scales,
                "cosine_similarity_before": noisy.mean[:, 0].tolist(),
                "cosine_similarity_after": noisy.mean[:, -1].tolist(),
            }
    return summary | {"provenance": {run: result.provenance for run, result in results.items()}}


def _table(results: dict[str, TrajectoryResult]) -> Table:
    n_layers, n_pos = results["trained"].n_layers, len(results["trained"].line_shape_score)

    def cell(values: Tensor) -> str:
        n_undefined = int(values.isnan().sum())
        said = f" ({n_undefined} undefined)" if n_undefined else ""
        return "undefined" if n_undefined == n_pos else f"{float(values.nanmean()):.3f}{said}"

    return table_of(
        f"{results['trained'].provenance['model']}: trajectories",
        ["measure"],
        results,
        ([what, *(cell(getattr(result, name)) for result in results.values())] for name, what in _PER_TOKEN.items()),
        f"mean over {n_pos} token{'s' if n_pos > 1 else ''}\nscore of a straight line: 1\n"
        f"of random steps: √{n_layers} = {math.sqrt(n_layers):.2f}",
    )
