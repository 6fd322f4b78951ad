"""`tl-coupling checkpoints`: a model across its training."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, over_units
from tl_coupling.cli.options import Checkpoints, Comparing, Machine, Out, Position, Prompts, Tracing, training_step
from tl_coupling.cli.results import show, write_pictures, write_summary
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    import xarray

_CHECKPOINTS_HELP = """A model at every checkpoint: coupling, singular values, shapes of trajectories, loss.

Each finished checkpoint is written at once; the same command again keeps what is finished and does the rest. A
checkpoint that fails is left out, with its error, and the exit status is then 1. Without --checkpoint: all of a local
folder, or 1, 2, 4, …, 512, 1000, 2000, …, 128000, 143000.

Examples:

  tl-coupling checkpoints --model EleutherAI/pythia-160m --prompts prompts.jsonl --k 10 --k 50 --out pythia

  tl-coupling checkpoints --model runs/my-model --checkpoint 0 --checkpoint 1000 --out sweep
"""


@command(_CHECKPOINTS_HELP)
def checkpoints(
    model: Annotated[str, typer.Option(help="Hub name, or local folder of checkpoints in HuggingFace format.")],
    machine: Machine,
    tracing: Tracing,
    comparing: Comparing,
    prompts: Prompts,
    checkpoint: Checkpoints = None,
    position: Position = -1,
    out: Out = Path("out"),
) -> None:
    """See `_CHECKPOINTS_HELP`."""
    from tl_coupling.surveys.checkpoints import checkpoint_sweep
    from tl_coupling.surveys.measurements import Settings

    chosen = prompts.chosen()
    settings = Settings(
        k=tuple(comparing.ks),
        position=position,
        orientation=comparing.orientation,
        final_norm=tracing.final_norm,
        prepend_bos=tracing.prepend_bos,
    )
    steps = None if checkpoint is None else [training_step(one) for one in checkpoint]
    with at_work(out) as (folder, progress):
        data = checkpoint_sweep(
            model,
            steps,  # type: ignore[arg-type]
            chosen,
            settings=settings,
            folder=folder / "checkpoints",
            backend=machine.backend,
            device=machine.device,
            dtype=machine.torch_dtype,
            progress=over_units(progress, model, lambda unit: f"at {unit.what['checkpoint']}"),
        )
        sweep = write_atomically(folder / "sweep.nc", lambda path: data.to_netcdf(path, engine="netcdf4"))
        written = [sweep, write_summary(folder, _summary(data)), *write_pictures(folder, _pictures(data))]
    show(written, _table(data))
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def _pictures(data: "xarray.Dataset") -> dict[str, Callable[[], Any]]:
    from tl_coupling.plots import plot_coupling_strip, plot_emergence, plot_shapes

    pictures: dict[str, Callable[[], Any]] = {"shapes.png": partial(plot_shapes, data)}
    for k in data["k"].values.tolist():
        pictures[f"emergence-k{k}.png"] = partial(plot_emergence, data, k=k)
        pictures[f"strip-k{k}.png"] = partial(plot_coupling_strip, data, k=k)
    return pictures


def _summary(data: "xarray.Dataset") -> dict[str, Any]:
    mean = data.mean("prompt")
    per_k = {
        name: {str(k): mean[variable].sel(k=k).values.tolist() for k in data["k"].values.tolist()}
        for name, variable in (("coupling", "mean_coupling"), ("null", "null_coupling"))
    }
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different layers, then over prompts",
        "model": data.attrs["model"],
        "checkpoints": data["checkpoint"].values.tolist(),
        "prompts": data["prompt"].values.tolist(),
        **per_k,
        "loss": mean["loss"].values.tolist(),
        "line_shape_score": mean["line_shape_score_all_tokens"].values.tolist(),
        "failed": json.loads(data.attrs["failed"]),
    }


def _table(data: "xarray.Dataset") -> Table:
    ks, mean = data["k"].values.tolist(), data.mean("prompt")
    n_prompts = data.sizes["prompt"]
    table = Table(
        title=f"{data.attrs['model']}: depth coupling 1 − m̃ across training",
        caption=f"mean over pairs of different layers and {n_prompts} prompt{'s' if n_prompts > 1 else ''}",
    )
    table.add_column("checkpoint", justify="right")
    for heading in (*(f"k = {k}" for k in ks), *(f"null {k}" for k in ks), "line-shape score", "loss"):
        table.add_column(heading, justify="right")
    for i, checkpoint in enumerate(data["checkpoint"].values.tolist()):
        here = mean.isel(checkpoint=i)
        cells = [*here["mean_coupling"].values, *here["null_coupling"].values]
        cells += [here["line_shape_score_all_tokens"].item(), here["loss"].item()]
        table.add_row(str(checkpoint), *(f"{cell:.3f}" for cell in cells))
    return table
