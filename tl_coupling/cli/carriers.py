"""The command that measures which heads and MLPs carry coupling: carriers."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

import tl_coupling as tlc
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
from tl_coupling.comparisons import Carriers, HeadCoupling, Share
from tl_coupling.measures import Orientation
from tl_coupling.prompts import Prompt
from tl_coupling.results import Saved

_SHARES: tuple[Share, ...] = (
    "diagonal_share",
    "jacobian_share",
    "excess",
    "energy_share",
)


@command
def carriers(
    setup: OneModel,
    prompt: OnePrompt,
    k: Annotated[int, typer.Option(help="Number of top singular vectors.")] = 10,
    orientation: Annotated[
        Orientation, typer.Option(help="A = U' J V of the paper, or V' J U.")
    ] = "ujv",
    position: Annotated[
        int | None,
        typer.Option(
            help=f"Token position; negative counts from the end. {OWN_POSITION}"
        ),
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            help="Layers to compare, each with its own --layer; a hybrid model has "
            "some without attention. [all]"
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads",
            help="Also couple every head with every head of other layers.",
        ),
    ] = False,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Measure which heads and MLPs carry the coupling of blocks across depth.

    The Jacobian of a block is a sum: its heads, its MLP, and the MLP acting on what
    attention adds. So are the coupling matrices A, and each of these components has a
    share of the diagonal of A, beside its share of the Jacobian J itself, which random
    singular vectors would give. Prints both, and the excess of the first over the second,
    as means over pairs of different layers; writes the shares of every head and pair as
    netCDF, JSON and pictures. With --untrained, those of the untrained twin as well.
    With --heads, which heads of different layers share axes: the coupling of every pair
    of heads, beside that of random axes.

    Examples:

      tl-coupling carriers --prompt "The capital of France is" --untrained --out out

      tl-coupling carriers --model gpt2 --k 30 --position 3 --out gpt2

      tl-coupling carriers --model smollm2-135m --heads --untrained --out heads
    """
    # Said before a model is loaded.
    if layer and len(set(layer)) < 2:
        raise ValueError(
            "means over pairs of different layers need two: give --layer twice or more"
        )
    measurement = _Measurement(
        prompt.single_prompt(), k, orientation, position, layer or None, heads
    )
    with work_in(out) as work:
        runs = work.measured(setup, untrained, measurement.measure)
        work.save({role: measured.to_save() for role, measured in runs.items()})
        results = {role: measured.carriers for role, measured in runs.items()}
        # The runs' results in the form that pictures and tables take: empty without
        # --heads.
        pairs = {
            role: measured.heads
            for role, measured in runs.items()
            if measured.heads is not None
        }
        summary = _summary(results)
        pictures = _pictures(results)
        if pairs:
            summary["heads"] = {
                role: _pair_summary(result) for role, result in pairs.items()
            }
            pictures["head_pairs.png"] = partial(tlc.plots.plot_head_coupling, pairs)
        work.finish(summary, pictures)
        work.show_runs(results)
        if pairs:
            work.show_runs(pairs)


@dataclass(frozen=True)
class _Measured:
    """What carries coupling in one model, and the coupling of its heads if asked for."""

    carriers: Carriers
    heads: HeadCoupling | None

    def to_save(self) -> dict[str, Saved]:
        """Return what is written as netCDF, by name."""
        files: dict[str, Saved] = {"carriers": self.carriers}
        if self.heads is not None:
            files["head_coupling"] = self.heads
        return files


@dataclass(frozen=True)
class _Measurement:
    """Measures what carries coupling in one model, as the options say."""

    prompt: Prompt
    k: int
    orientation: Orientation
    position: int | None
    layers: list[int] | None
    couples_heads: bool

    def measure(self, run: Run) -> _Measured:
        """Return the shares of every component, and the coupling of heads."""
        traced = run.trace(self.prompt)
        position = own_position(self.prompt, self.position)
        shares = tlc.carriers(
            traced,
            self.k,
            position,
            self.orientation,
            layers=self.layers,
            progress=partial(run.bar, "layers"),
        )
        heads = None
        if self.couples_heads:
            heads = tlc.comparisons.head_coupling(
                traced,
                self.k,
                position,
                self.orientation,
                layers=self.layers,
                progress=partial(run.bar, "heads"),
            )
        return _Measured(shares, heads)


def _summary(results: dict[str, Carriers]) -> dict[str, object]:
    """Return what `summary.json` holds."""
    return {
        "measure": "share of the diagonal of A − share of J, mean over pairs of different layers",
        "k": results["trained"].k,
        "mean": {role: _means(result) for role, result in results.items()},
        "branches": {
            role: _means(result.by_branch()) for role, result in results.items()
        },
        "null_interval": {
            role: {
                label: result.by_branch().null_interval(label)
                for label in result.by_branch().labels
            }
            for role, result in results.items()
        },
        "provenance": {role: result.provenance for role, result in results.items()},
    }


def _means(result: Carriers) -> dict[str, dict[str, float]]:
    """Return each share by component, a mean over pairs of layers."""
    return {
        share: dict(zip(result.labels, result.mean(share).tolist(), strict=True))
        for share in _SHARES
    }


def _pictures(results: dict[str, Carriers]) -> Pictures:
    """Return the pictures by file name."""
    pictures: Pictures = {
        "heads.png": partial(
            tlc.plots.plot_carriers,
            results["trained"],
            untrained=results.get("untrained"),
        )
    }
    for role, result in results.items():
        suffix = "" if role == "trained" else f"-{role}"
        pictures[f"by_depth{suffix}.png"] = partial(
            tlc.plots.plot_carriers_by_depth, result
        )
    return pictures


def _pair_summary(result: HeadCoupling) -> dict[str, object]:
    """Return what `summary.json` holds of pairs of heads."""
    return {
        "mean": float(result.of_different_layers.nanmean()),
        "null": result.null,
        "largest_of_null": result.largest_of_null,
        "share_above_null": result.share_above_null,
        "strongest": [pair._asdict() for pair in result.strongest()],
    }
