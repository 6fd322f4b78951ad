"""The command that measures what a model can do without: redundancy."""

from functools import partial
from typing import TYPE_CHECKING, Any

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import OUT, Comparing, OneModel, Out, Prompts
from tl_coupling.results import ShortTable
from tl_coupling.studies.redundancy import (
    CHANGES,
    layer_redundancy,
    redundancy_correlations,
)

if TYPE_CHECKING:
    import xarray

# Variables that may predict how much a block is missed.
_PREDICTORS = ("coupling", "block_influence")


@command
def redundancy(
    setup: OneModel, comparing: Comparing, prompts: Prompts, out: Out = OUT
) -> None:
    """Measure what the model can do without: the loss as its blocks are changed.

    Drops, swaps, merges and projects blocks, and ends the model early.
    Prints the change in loss that each costs, layer by layer, beside the coupling of
    the block with all others; and whether coupling or block influence predicts it
    (Spearman's ρ over layers). Prompts need at least two tokens.

    Examples:

      tl-coupling redundancy --model gpt2 --prompts prompts.jsonl --k 10 --out
      redundancy
    """
    with work_in(out) as work:
        model = setup.load(untrained=False)
        config: Any = model.cfg
        # The defaults give way to a narrow model; a k that was asked for is refused
        # instead.
        ks = comparing.ks if comparing.k else comparing.up_to(config.d_model)
        data = layer_redundancy(
            model,
            prompts.selected(),
            k=ks,
            prepend_bos=setup.prepend_bos,
            orientation=comparing.orientation,
            progress=True,
        )
        correlations = redundancy_correlations(data)
        work.write("redundancy.nc", partial(data.to_netcdf, engine="netcdf4"))
        work.write("correlations.nc", partial(correlations.to_netcdf, engine="netcdf4"))
        pictures: Pictures = {
            f"redundancy-k{k}.png": partial(
                tlc.plots.plot_redundancy, data, correlations, k=k
            )
            for k in ks
        }
        # The table is of the largest k; pictures and files have all.
        costs = _costs(data, k=ks[-1])
        rhos = _rhos(correlations, k=ks[-1])
        work.finish(_summary(data, ks[-1], costs, rhos), pictures)
        work.shown.append(_table(data, ks[-1], costs, rhos))


def _costs(data: "xarray.Dataset", k: int) -> dict[str, list[float]]:
    """Return the mean change in loss by kind of change, then layer."""
    mean = data.sel(k=k).mean("prompt")
    return {
        name: (mean[f"loss_{name}"] - mean["loss"]).values.tolist()
        for name in (*CHANGES, "projected", "exited")
    }


def _rhos(correlations: "xarray.Dataset", k: int) -> dict[str, dict[str, float]]:
    """Return Spearman's ρ by predictor and kind of change, with p and n."""
    rho = correlations.sel(k=k, blocks="all")
    columns = [column for name in _PREDICTORS for column in (name, f"{name}_p")] + ["n"]
    return {
        column: dict(zip(CHANGES, rho[column].values.tolist(), strict=True))
        for column in columns
    }


def _summary(
    data: "xarray.Dataset",
    k: int,
    costs: dict[str, list[float]],
    rhos: dict[str, dict[str, float]],
) -> dict[str, object]:
    """Return what `summary.json` holds."""
    return {
        "k": k,
        "n_prompts": data.sizes["prompt"],
        "loss": float(data["loss"].mean("prompt")),
        "change_in_loss": costs,
        "spearman": rhos,
        "attrs": data.attrs,
    }


def _table(
    data: "xarray.Dataset",
    k: int,
    costs: dict[str, list[float]],
    rhos: dict[str, dict[str, float]],
) -> ShortTable:
    """Return the table of what each change costs, layer by layer."""
    mean = data.sel(k=k).mean("prompt")
    coupling = mean["coupling_with_others"].values.tolist()
    columns = [*costs.values(), coupling]
    rows = []
    for layer in range(data.sizes["layer"]):
        # Some changes have fewer layers: the last block has none after it to swap with.
        cells = [
            f"{column[layer]:+.3f}" if layer < len(column) else "" for column in columns
        ]
        rows.append([layer, *cells])
    lines = [f"mean over {data.sizes['prompt']} prompts, k = {k}"]
    for name in _PREDICTORS:
        texts = [
            f"{change} {rhos[name][change]:+.2f} "
            f"(p {rhos[f'{name}_p'][change]:.2g}, n {rhos['n'][change]})"
            for change in CHANGES
        ]
        lines.append(f"ρ with {name.replace('_', ' ')}: {', '.join(texts)}")
    caption = "\n".join(lines)
    loss = float(mean["loss"])
    title = f"{data.attrs['model']}: change in loss from {loss:.3f} nats per token"
    return ShortTable.of(title, ["layer"], [*costs, "coupling"], rows, caption)
