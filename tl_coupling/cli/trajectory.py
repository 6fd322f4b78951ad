"""`tl-coupling trajectory`: the shape of every token's path, and how far linear blocks and noise explain it."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
import typer
from rich.table import Table
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work
from tl_coupling.cli.options import Loading, OnePrompt, Out, Tracing, Untrained
from tl_coupling.cli.results import show, with_suffix, write_pictures, write_summary
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.comparisons import CouplingMap, depth_coupling
from tl_coupling.files import write_atomically
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.surveys.measurements import PAPER_PROMPT
from tl_coupling.trajectories import (
    Linearisation,
    Perturbation,
    entropy_by_depth,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    linearisation,
    norms,
    perturbation,
    step_lengths,
)
from tl_coupling.trajectories.predictions import Prediction

if TYPE_CHECKING:
    import xarray

_TRAJECTORY_HELP = """Trajectories of a prompt's tokens through the residual stream.

For every token its line-shape score (1 is a straight line), expodistance (0 is exact exponential growth) and
equidistance (0 is equal steps); against depth norms, step lengths, line-shape scores and the entropy of the logit lens.
For one token how well its linearised blocks predict its path, their largest singular values and a line through 1/σ, and
what becomes of noise in its embedding.

Prints the means over tokens, with --untrained beside those of the same architecture at its initialisation; writes one
netCDF file, JSON and pictures.

Examples:

  tl-coupling trajectory --prompt "The capital of France is" --untrained --out out

  tl-coupling trajectory --model gpt2 --final-norm --window 7 --no-perturbation --out gpt2
"""

_PAPER_WINDOW = 11
_N_SINGULAR_VALUES = 3
_PER_TOKEN = {
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "equidistance": "equidistance",
}


@dataclass(frozen=True, eq=False)
class _Measured:
    """What one model gave, and how long everything took."""

    trace: Trace
    window: int
    per_token: dict[str, Tensor]
    windowed: Tensor
    entropy: Tensor
    linearisation: Linearisation
    depth: CouplingMap
    perturbation: Perturbation | None
    seconds: dict[str, float]


@command(_TRAJECTORY_HELP)
def trajectory(
    loading: Loading,
    tracing: Tracing,
    prompt: OnePrompt = PAPER_PROMPT,
    position: Annotated[int, typer.Option(help="The token that is linearised and perturbed.")] = -1,
    window: Annotated[
        int | None, typer.Option(help=f"Steps of the windowed score, odd. [{_PAPER_WINDOW}, or what the model has]")
    ] = None,
    perturbation: Annotated[bool, typer.Option(help="Follow noise in the embedding: 48 forward passes.")] = True,
    untrained: Untrained = False,
    out: Out = Path("out"),
) -> None:
    """See `_TRAJECTORY_HELP`."""
    measure = partial(_measure, prompt=prompt, position=position, window=window, noise=perturbation)
    with at_work(out) as (folder, progress):
        runs = measured_runs(loading, tracing, measure, progress, untrained)
        progress.console.print("drawing …")
        written = _write(folder, runs)
    show(written, _table(runs))


def _measure(run: Run, prompt: str, position: int, window: int | None, noise: bool) -> _Measured:
    traced = run.trace(prompt)
    position = traced.position_index(position)
    if window is None:
        # The largest odd number of steps that a shallow model has.
        window = min(_PAPER_WINDOW, traced.n_layers - 1 + traced.n_layers % 2)
    x = traced.residual
    with run.timed("shapes"):
        windowed = line_shape_score(x, window)
        shapes = {
            "line_shape_score": line_shape_score(x),
            "expodistance": expodistance(x),
            "equidistance": equidistance(x),
        }
    with run.timed("logit lens"):
        entropy = entropy_by_depth(traced)
    with run.timed("linearisation"):
        linear = linearisation(traced, position, progress=run.bar("linearisation"))
    with run.timed("singular values"):
        k = min(_N_SINGULAR_VALUES, traced.d_model)
        depth = depth_coupling(traced, k, position, progress=run.bar("singular values"))
    noisy = None
    if noise:
        with run.timed("perturbation"):
            noisy = perturbation(traced, position=position, progress=run.bar("perturbation"))
    return _Measured(traced, window, shapes, windowed, entropy, linear, depth, noisy, run.seconds)


def _write(folder: Path, runs: dict[str, _Measured]) -> list[Path]:
    """Everything that goes into the output folder."""
    from tl_coupling import plots

    data = _dataset(runs)
    written = [write_atomically(folder / "trajectory.nc", lambda path: data.to_netcdf(path, engine="netcdf4"))]
    traces = {run: measured.trace for run, measured in runs.items()}
    entropies = {run: measured.entropy for run, measured in runs.items()}
    linear = {run: measured.linearisation for run, measured in runs.items()}
    depth = {run: measured.depth for run, measured in runs.items()}
    noisy = {run: measured.perturbation for run, measured in runs.items() if measured.perturbation is not None}
    window = runs["trained"].window
    pictures: dict[str, Callable[[], Any]] = {
        f"{with_suffix('trajectories', run)}.png": partial(plots.plot_trajectories, traced)
        for run, traced in traces.items()
    }
    pictures["metrics.png"] = partial(plots.plot_trajectory_metrics, traces, window=window, entropies=entropies)
    pictures["linearisation.png"] = partial(plots.plot_linearisation, linear)
    pictures["inverse_singular_values.png"] = partial(plots.plot_inverse_singular_values, depth)
    if noisy:
        pictures["perturbation.png"] = partial(plots.plot_perturbation, noisy)
    return [*written, *write_pictures(folder, pictures), write_summary(folder, _summary(runs))]


def _dataset(runs: dict[str, _Measured]) -> "xarray.Dataset":
    import xarray

    first = runs["trained"]
    attrs: dict[str, Any] = {
        "position": first.linearisation.position,
        "final_norm": int(first.trace.final_norm),
        "linearisation_reference_layer": first.linearisation.reference_layer,
    }
    if first.perturbation is not None:
        attrs["perturbation_seed"] = first.perturbation.seed
    attrs["provenance"] = json.dumps({run: measured.trace.provenance for run, measured in runs.items()})
    data = xarray.concat([_of_run(measured) for measured in runs.values()], "run")
    return data.assign_coords(run=list(runs)).assign_attrs(attrs)


def _of_run(measured: _Measured) -> "xarray.Dataset":
    """One model's results as arrays with names, axes and units."""
    import xarray

    x, linear = measured.trace.residual, measured.linearisation
    predictions = get_args(Prediction)
    fit = inverse_singular_value_fit(measured.depth.singular_values)
    line = "least-squares line through 1 / singular value against layer"
    # Name, axes, values, what it is where the name does not say it, and units other than none.
    entries: list[tuple[str, tuple[str, ...], Tensor, str, str]] = [
        *((name, ("token",), values, "", "1") for name, values in measured.per_token.items()),
        ("norm", ("depth", "token"), norms(x), "", "residual stream"),
        ("step_length", ("layer", "token"), step_lengths(x), "", "residual stream"),
        (
            "line_shape_score_windowed",
            ("middle_layer", "token"),
            measured.windowed,
            f"line-shape score of {measured.window} steps around a layer",
            "1",
        ),
        (
            "line_shape_score_by_depth",
            ("layer", "token"),
            line_shape_score_by_depth(x),
            "line-shape score of the steps up to a layer",
            "1",
        ),
        ("logit_lens_entropy", ("depth", "token"), measured.entropy, "", "nat"),
        (
            "linearisation_relative_error",
            ("prediction", "layer"),
            torch.stack([linear.relative_error(name) for name in predictions]),
            "relative error of x after a layer, as predicted",
            "1",
        ),
        (
            "linearisation_cosine_similarity",
            ("prediction", "layer"),
            torch.stack([linear.cosine_similarity(name) for name in predictions]),
            "cosine similarity of x after a layer, as predicted",
            "1",
        ),
        ("singular_value", ("layer", "i"), measured.depth.singular_values, "", "1"),
        ("inverse_singular_value_slope", ("i",), fit.slope, line, "1"),
        ("inverse_singular_value_intercept", ("i",), fit.intercept, line, "1"),
        ("inverse_singular_value_r_squared", ("i",), fit.r_squared, line, "1"),
    ]
    coords: dict[str, Any] = {
        "depth": range(len(x)),
        "layer": range(len(x) - 1),
        "middle_layer": [i + measured.window // 2 for i in range(len(measured.windowed))],
        "token": range(x.shape[1]),
        "token_text": ("token", list(measured.trace.str_tokens)),
        "prediction": list(predictions),
    }
    if measured.perturbation is not None:
        cosines = measured.perturbation.cosine_similarity
        what = "cosine of the noisy to the clean token"
        entries.append(("perturbation_cosine_similarity", ("scale", "sample", "depth"), cosines, what, "1"))
        coords["scale"] = list(measured.perturbation.scales)
    return xarray.Dataset(
        {
            name: (axes, values.cpu().numpy(), {"units": units} | ({"long_name": what} if what else {}))
            for name, axes, values, what, units in entries
        },
        coords,
    )


def _summary(runs: dict[str, _Measured]) -> dict[str, Any]:
    first = runs["trained"]
    summary: dict[str, Any] = {
        "measure": "line-shape score, expodistance and equidistance of every token, and their means over tokens where "
        "they are defined",
        "random_steps_line_shape_score": math.sqrt(first.trace.n_layers),
        "window": first.window,
        "mean": {run: {name: _mean(m.per_token[name]) for name in _PER_TOKEN} for run, m in runs.items()},
        "tokens": {run: {name: m.per_token[name].tolist() for name in _PER_TOKEN} for run, m in runs.items()},
        "undefined_tokens": {
            run: {name: m.per_token[name].isnan().nonzero().flatten().tolist() for name in _PER_TOKEN}
            for run, m in runs.items()
        },
        "position": first.linearisation.position,
        "linearisation_mean_relative_error": {
            run: {
                "one_step": float(m.linearisation.relative_error("one_step").mean()),
                "previous": float(m.linearisation.relative_error("previous").mean()),
            }
            for run, m in runs.items()
        },
    }
    if first.perturbation is not None:
        summary["perturbation"] = {
            run: {
                "scales": m.perturbation.scales,
                "cosine_similarity_before": m.perturbation.mean[:, 0].tolist(),
                "cosine_similarity_after": m.perturbation.mean[:, -1].tolist(),
            }
            for run, m in runs.items()
            if m.perturbation is not None
        }
    summary["seconds"] = {run: m.seconds for run, m in runs.items()}
    summary["provenance"] = {run: m.trace.provenance for run, m in runs.items()}
    return summary


def _table(runs: dict[str, _Measured]) -> Table:
    first = runs["trained"]
    n_layers, n_pos = first.trace.n_layers, first.trace.n_pos
    table = Table(
        title=f"{first.trace.provenance['model']}: trajectories",
        caption=f"mean over {n_pos} token{'s' if n_pos > 1 else ''}\nscore of a straight line: 1\n"
        f"of random steps: √{n_layers} = {math.sqrt(n_layers):.2f}",
    )
    table.add_column("measure")
    for run in runs:
        table.add_column(run, justify="right")
    for name, words in _PER_TOKEN.items():
        table.add_row(words, *(_cell(measured.per_token[name]) for measured in runs.values()))
    return table


def _cell(values: Tensor) -> str:
    """The mean over tokens where it is defined, and how many tokens have none."""
    n_undefined = int(values.isnan().sum())
    if n_undefined == len(values):
        return "undefined"
    said = f" ({n_undefined} undefined)" if n_undefined else ""
    return f"{_mean(values):.3f}{said}"


def _mean(values: Tensor) -> float:
    """Mean over the tokens where it is defined; NaN where there is none."""
    return float(values.nanmean())
