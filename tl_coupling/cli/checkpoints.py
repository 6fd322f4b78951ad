"""`tl-coupling checkpoints`: a model across its training."""

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, show, table_of, write_pictures, write_summary
from tl_coupling.cli.options import OUT, Checkpoints, Comparing, Machine, Out, Position, Prompts, Tracing
from tl_coupling.cli.survey import MEASURE, settings_of, training_steps
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    import xarray

_CHECKPOINTS_HELP = """A model at every checkpoint: coupling, singular values, shapes of trajectories, loss.

Each finished checkpoint is written at once; run the same command again to do the rest. A checkpoint that fails is left
out, with its error, and the exit status is 1. Without --checkpoint: all of a local folder, or 1, 2, 4, …, 512, 1000,
2000, …, 128000, 143000.

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
    out: Out = OUT,
) -> None:
    """See `_CHECKPOINTS_HELP`."""
    from tl_coupling import plots
    from tl_coupling.surveys import checkpoint_sweep

    chosen, settings = prompts.chosen(), settings_of(comparing, tracing, position)
    where: dict[str, Any] = {"backend": machine.backend, "device": machine.device, "dtype": machine.torch_dtype}
    with at_work(out) as (folder, _):
        results = folder / "checkpoints"
        data = checkpoint_sweep(model, training_steps(checkpoint), chosen, settings=settings, folder=results, **where)
        pictures = {"shapes.png": partial(plots.plot_shapes, data)}
        for k in settings.k:
            pictures[f"emergence-k{k}.png"] = partial(plots.plot_emergence, data, k=k)
            pictures[f"strip-k{k}.png"] = partial(plots.plot_coupling_strip, data, k=k)
        sweep = write_atomically(folder / "sweep.nc", lambda path: data.to_netcdf(path, engine="netcdf4"))
        written = [sweep, write_summary(folder, _summary(data)), *write_pictures(folder, pictures)]
    show(written, _table(data))
    if json.loads(data.attrs["failed"]):
        raise typer.Exit(1)


def _summary(data: "xarray.Dataset") -> dict[str, Any]:
    mean = data.mean("prompt")
    of_ks = {"coupling": mean["mean_coupling"], "null": mean["null_coupling"]}
    return {
        "measure": MEASURE,
        "model": data.attrs["model"],
        "checkpoints": data["checkpoint"].values.tolist(),
        "prompts": data["prompt"].values.tolist(),
        **{name: {str(k): x.sel(k=k).values.tolist() for k in data["k"].values} for name, x in of_ks.items()},
        "loss": mean["loss"].values.tolist(),
        "line_shape_score": mean["line_shape_score_all_tokens"].values.tolist(),
        "failed": json.loads(data.attrs["failed"]),
        "provenance": json.loads(data.attrs["provenance"]),
        "provenance_by_unit": json.loads(data.attrs.get("provenance_by_unit", "{}")),
    }


def _table(data: "xarray.Dataset") -> Table:
    ks, n_prompts = data["k"].values.tolist(), data.sizes["prompt"]
    variables = ("mean_coupling", "null_coupling", "line_shape_score_all_tokens", "loss")
    rows = []
    for checkpoint in data["checkpoint"].values.tolist():
        here = data.sel(checkpoint=checkpoint).mean("prompt")
        rows.append([checkpoint, *(f"{number:.3f}" for name in variables for number in here[name].values.ravel())])
    return table_of(
        f"{data.attrs['model']}: depth coupling 1 − m̃ across training",
        [],
        ["checkpoint", *(f"k = {k}" for k in ks), *(f"null {k}" for k in ks), "line-shape score", "loss"],
        rows,
        f"mean over pairs of different layers and {n_prompts} prompt{'s' if n_prompts > 1 else ''}",
    )
