"""The commands behind single figures of the paper: trajectories of several models, and
redundancy.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer
from torch import nn

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, table_of
from tl_coupling.cli.options import (
    OUT,
    Comparing,
    OneModel,
    OnePrompt,
    Out,
    Prompts,
    Setup,
    own_position,
    training_step,
)
from tl_coupling.redundancy import CHANGES, layer_redundancy, redundancy_correlations
from tl_coupling.surveys.checkpoints import checkpoint_sources
from tl_coupling.trajectories import measure_trajectory

_SHAPES = {
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "equidistance": "equidistance",
}


@command
def trajectories(
    setup: Setup,
    prompt: OnePrompt,
    model: Annotated[
        list[str],
        typer.Option(
            help="Hub name, local folder, GGUF file or folder of checkpoints; may be repeated."
        ),
    ],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Training step or hub revision, of every model; may be repeated."
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Several models, or checkpoints of one, on one prompt: their tokens' paths side by
    side.

    Writes the paths in two principal components, a column for each model; norms, steps,
    line-shape scores and entropy by depth in one picture, if all read the same tokens;
    and JSON. Prints the means over tokens of line-shape score (1 is a straight line),
    expodistance (0 is exact exponential growth) and equidistance (0 is equal steps).

    Examples:

      tl-coupling trajectories --model runs/my-model --checkpoint 1 --checkpoint 4000
      --checkpoint 143000 --out paths

      tl-coupling trajectories --model gpt2 --model EleutherAI/pythia-160m --prompt "The
      capital of France is" --out two
    """
    chosen = prompt.one()
    with at_work(out) as work:
        traces: dict[str, tlc.Trace] = {}
        results: dict[str, Any] = {}
        for name, source in _sources(model, checkpoint):
            with work.console.status(f"measuring {name} …"):
                traced = tlc.trace(
                    tlc.load_model(**source, **setup.loading),
                    chosen,
                    prepend_bos=setup.prepend_bos,
                    final_norm=setup.final_norm,
                )
                results[name] = measure_trajectory(traced, linear=False, noise=False)
            # The model is freed before the next is loaded.
            traces[name] = replace(traced, model=nn.Identity(), blocks=())
            del traced
        black = own_position(chosen, None)
        pictures = {
            "trajectories.png": partial(tlc.plot_trajectories, traces, black=black)
        }
        if len({tuple(one.str_tokens) for one in traces.values()}) == 1:
            pictures["metrics.png"] = partial(
                tlc.plots.plot_trajectory_metrics, results
            )
        means = {
            name: {of: float(getattr(one, of).nanmean()) for of in _SHAPES}
            for name, one in results.items()
        }
        depths = {name: one.n_layers for name, one in results.items()}
        provenance = {name: one.provenance for name, one in results.items()}
        work.finish(
            {"mean": means, "n_layers": depths, "provenance": provenance}, pictures
        )
        rows = [
            [
                name,
                depths[name],
                *(f"{x:.3f}" for x in of.values()),
                f"{depths[name] ** 0.5:.3f}",
            ]
            for name, of in means.items()
        ]
        numbers = ["layers", *_SHAPES.values(), "score of random steps"]
        work.shown.append(
            table_of("trajectories", ["model"], numbers, rows, "mean over tokens")
        )


def _sources(
    models: list[str], checkpoints: list[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and arguments of `load_model`; of checkpoints of one model, the step alone
    is the name.
    """
    for model in models:
        if checkpoints is None:
            yield model, {"name": model}
            continue
        steps: list[Any] = [training_step(one) for one in checkpoints]
        for step, source in checkpoint_sources(model, steps).items():
            yield (f"step {step}" if len(models) == 1 else f"{model} at {step}"), source


@command
def redundancy(
    setup: OneModel, comparing: Comparing, prompts: Prompts, out: Out = OUT
) -> None:
    """What the model can do without: blocks dropped, swapped, merged and projected, and
    an early exit.

    Prints the change in loss that each costs, layer by layer, beside the coupling of
    the block with all others; and whether coupling or block influence predicts it
    (Spearman's ρ over layers). Prompts need two tokens.

    Examples:

      tl-coupling redundancy --model gpt2 --prompts prompts.jsonl --k 10 --out
      redundancy
    """
    with at_work(out) as work:
        loaded: Any = setup.load(untrained=False)
        how: dict[str, Any] = {
            "prepend_bos": setup.prepend_bos,
            "orientation": comparing.orientation,
        }
        ks = comparing.ks if comparing.k else comparing.up_to(loaded.cfg.d_model)
        data = layer_redundancy(loaded, prompts.chosen(), k=ks, **how)
        correlations = redundancy_correlations(data)
        work.write("redundancy.nc", partial(data.to_netcdf, engine="netcdf4"))
        work.write("correlations.nc", partial(correlations.to_netcdf, engine="netcdf4"))
        k = ks[-1]
        mean, rho = data.sel(k=k).mean("prompt"), correlations.sel(k=k, blocks="all")
        costs = {
            name: (mean[f"loss_{name}"] - mean["loss"]).values.tolist()
            for name in (*CHANGES, "projected", "exited")
        }
        predicted = {
            of: dict(zip(CHANGES, rho[of].values.tolist(), strict=True))
            for of in ("coupling", "block_influence")
        }
        summary = {
            "k": k,
            "n_prompts": data.sizes["prompt"],
            "loss": float(mean["loss"]),
            "change_in_loss": costs,
        }
        pictures = {
            f"redundancy-k{one}.png": partial(
                tlc.plots.plot_redundancy, data, correlations, k=one
            )
            for one in ks
        }
        work.finish(summary | {"spearman": predicted, "attrs": data.attrs}, pictures)
        of_layers = [*costs.values(), mean["coupling_with_others"].values.tolist()]
        rows = [
            [
                layer,
                *(f"{of[layer]:+.3f}" if layer < len(of) else "" for of in of_layers),
            ]
            for layer in range(data.sizes["layer"])
        ]
        said = [
            f"{change} {predicted['coupling'][change]:+.2f} ({predicted['block_influence'][change]:+.2f})"
            for change in CHANGES
        ]
        caption = f"mean over {data.sizes['prompt']} prompts, k = {k}\nρ with coupling (block influence): {', '.join(said)}"
        title = f"{data.attrs['model']}: change in loss from {float(mean['loss']):.3f} nats per token"
        work.shown.append(
            table_of(title, ["layer"], [*costs, "coupling"], rows, caption)
        )
