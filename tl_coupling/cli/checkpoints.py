"""The command that measures one model across training: checkpoints."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from matplotlib.animation import PillowWriter

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import OUT, Out, Prompts, Sweep, model_option
from tl_coupling.cli.sweeps import facts, stop_if_any_failed, write_choices
from tl_coupling.measures import mean_name, null_name
from tl_coupling.results import ShortTable, plural
from tl_coupling.studies.surveys import pairs_of_layers

if TYPE_CHECKING:
    import xarray


@command
def checkpoints(
    model: Annotated[
        str,
        model_option(
            help="Hub name, or local folder of checkpoints in HuggingFace format."
        ),
    ],
    sweep: Sweep,
    prompts: Prompts,
    out: Out = OUT,
) -> None:
    """Measure a model at every checkpoint: coupling, spectra, trajectories and loss.

    Each finished checkpoint is written at once; run the same command again to do the
    rest. A checkpoint that fails is left out, with its error, and the exit status is 1.
    Without --checkpoint: all of a local folder, or 1, 2, 4, …, 512, 1000, 2000, …,
    128000, 143000.

    Examples:

      tl-coupling checkpoints --model EleutherAI/pythia-160m --prompts prompts.jsonl --k
      10 --k 50 --out pythia

      tl-coupling checkpoints --model runs/my-model --checkpoint 0 --checkpoint 1000
      --out sweep
    """
    selected_prompts = prompts.selected()
    settings = sweep.settings
    with work_in(out) as work:
        data = tlc.checkpoint_sweep(
            model,
            sweep.checkpoints,
            selected_prompts,
            settings=settings,
            folder=out / "checkpoints",
            progress=True,
            **sweep.loading,
        )
        work.write("sweep.nc", partial(data.to_netcdf, engine="netcdf4"))
        if sweep.all_measures:
            write_choices(work, data)
        # The summary, pictures and table are of the orientation that was asked for; the
        # file and the table of choices have both.
        data = tlc.surveys.select_orientation(data)
        work.finish(_summary(data), _pictures(data))
        # Each frame takes as long as a picture.
        with work.console.stage("drawing the animation …"):
            for k in data["k"].values.tolist():
                work.write(f"emergence-k{k}.gif", partial(_animate, data, k))
        work.shown.append(_table(data))
    # After all is written: the results of the others stay.
    stop_if_any_failed(data)


def _summary(data: "xarray.Dataset") -> dict[str, object]:
    """Return what `summary.json` holds: means over prompts, by checkpoint."""
    mean = data.mean("prompt")
    ks = data["k"].values.tolist()
    coupling = mean[mean_name("coupling")]
    null = mean[null_name("coupling")]
    return {
        **facts(data),
        "model": data.attrs["model"],
        "checkpoints": data["checkpoint"].values.tolist(),
        "prompts": data["prompt"].values.tolist(),
        "coupling": {k: coupling.sel(k=k).values.tolist() for k in ks},
        "null": {k: null.sel(k=k).values.tolist() for k in ks},
        "loss": mean["loss"].values.tolist(),
        "line_shape_score": mean["line_shape_score_all_tokens"].values.tolist(),
    }


def _pictures(data: "xarray.Dataset") -> Pictures:
    """Return the pictures by file name."""
    plots = tlc.plots
    pictures: Pictures = {
        "shapes.png": partial(plots.plot_shapes, data),
        "growth.png": partial(plots.plot_growth, data),
    }
    for k in data["k"].values.tolist():
        pictures |= {
            f"emergence-k{k}.png": partial(plots.plot_emergence, data, k=k),
            f"strip-k{k}.png": partial(plots.plot_coupling_strip, data, k=k),
        }
    return pictures


def _animate(data: "xarray.Dataset", k: int, path: Path) -> None:
    """Write coupling at every checkpoint as a GIF."""
    animation = tlc.plots.animate_coupling(data, k=k)
    animation.save(path, writer=PillowWriter(fps=2), dpi=90)


def _table(data: "xarray.Dataset") -> ShortTable:
    """Return the table of means over prompts: a row for each checkpoint."""
    mean = data.mean("prompt")
    rows = []
    for checkpoint in data["checkpoint"].values.tolist():
        checkpoint_means = mean.sel(checkpoint=checkpoint)
        numbers = [
            *checkpoint_means[mean_name("coupling")].values,
            *checkpoint_means[null_name("coupling")].values,
            checkpoint_means["line_shape_score_all_tokens"].item(),
            checkpoint_means["loss"].item(),
        ]
        rows.append([checkpoint, *(f"{number:.3f}" for number in numbers)])
    ks = data["k"].values.tolist()
    columns = [
        "checkpoint",
        *(f"k = {k}" for k in ks),
        *(f"null {k}" for k in ks),
        "line-shape score",
        "loss",
    ]
    n_prompts = plural(data.sizes["prompt"], "prompt")
    caption = f"mean over {pairs_of_layers(data)} and {n_prompts}"
    title = f"{data.attrs['model']}: depth coupling 1 − m̃ across training"
    return ShortTable.of(title, [], columns, rows, caption)
