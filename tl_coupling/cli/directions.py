"""The command that reads, adds and removes directions: directions."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, work_in
from tl_coupling.cli.options import OUT, OneModel, Out, Position, Prompts
from tl_coupling.directions import Ablation, Decoded, Steering, Subspace
from tl_coupling.prompts import Prompt

_SCALES = (0.03, 0.1, 0.3)


@command
def directions(
    setup: OneModel,
    prompts: Prompts,
    layer: Annotated[
        int,
        typer.Option(
            help="The block whose directions are read; negative: from the end."
        ),
    ] = -2,
    k: Annotated[int, typer.Option(help="Number of top singular vectors.")] = 5,
    position: Position = -1,
    steer: Annotated[
        bool, typer.Option(help="Steer the other prompts along what the block reads.")
    ] = False,
    ablate: Annotated[
        bool,
        typer.Option(
            help="Find what all blocks share on the first half of the prompts, and "
            "remove it on the second."
        ),
    ] = False,
    rank: Annotated[
        int, typer.Option(help="Number of shared directions that are removed.")
    ] = 10,
    draws: Annotated[int, typer.Option(help="Number of draws of each control.")] = 20,
    out: Out = OUT,
) -> None:
    """Say what a block's singular vectors read and write, and what they do.

    Prints, for each of the top k singular vectors of one block's Jacobian, the tokens
    that its write direction promotes through the rest of the network, at both ends, and
    the components that its read direction responds to. Prints beside them the excess
    kurtosis of its logits, with the share of random directions that have at least as
    much: any list of tokens can be given a meaning. Other prompts of a file are a
    control, and are steered with --steer; --ablate removes what blocks share.

    Examples:

      tl-coupling directions --prompt "The capital of France is" --layer 28 --out out

      tl-coupling directions --model gpt2 --prompts prompts.jsonl --steer --ablate
    """
    selected = prompts.selected()
    if (steer or ablate) and len(selected) < 2:
        raise ValueError(
            "--steer and --ablate need several prompts, other than those the directions "
            "come from: give --prompts"
        )
    measurement = _Measurement(selected, layer, k, position, steer, ablate, rank, draws)
    with work_in(out) as work:
        results = work.measured_as("trained", setup, measurement.measure)
        work.save({"trained": results.named()})
        work.finish(_summary(results), _pictures(results))
        for result in (results.decoded, results.steering, results.ablation):
            if result is not None:
                work.shown.append(result.table())


class _Results(NamedTuple):
    """What was asked for."""

    decoded: Decoded
    steering: Steering | None
    subspace: Subspace | None
    ablation: Ablation | None

    def named(self) -> dict[str, Decoded | Steering | Subspace | Ablation]:
        """Return those that there are, by name."""
        named = self._asdict().items()
        return {name: result for name, result in named if result is not None}


@dataclass(frozen=True)
class _Measurement:
    """Reads, and changes, one model as the options say."""

    prompts: list[Prompt]
    layer: int
    k: int
    position: int
    steer: bool
    ablate: bool
    rank: int
    draws: int

    def measure(self, run: Run) -> _Results:
        """Return everything that was asked for."""
        # Directions come from the first prompt; the others are a control.
        first, *others = (run.trace(prompt) for prompt in self.prompts)
        with run.timed("decode"):
            decoded = tlc.directions.decode(
                first,
                self.layer,
                self.k,
                position=self.position,
                others=others,
                n_draws=self.draws,
            )
        steering = None
        if self.steer:
            steered = tlc.directions.directions_of(
                first, self.layer, self.k, position=self.position
            )
            with run.timed("steer"):
                steering = tlc.directions.steer(
                    run.model,
                    # Steered prompts must not be the one that the directions were read
                    # from.
                    self.prompts[1:],
                    steered,
                    _SCALES,
                    position=self.position,
                    n_draws=self.draws,
                    progress=partial(run.bar, "steering"),
                )
        subspace = ablation = None
        if self.ablate:
            # The shared subspace is found on one half of the prompts and removed on the
            # other, so that a fit to the prompts does not count as an effect.
            middle = len(self.prompts) // 2
            traces = [first, *others][:middle]
            subspace = tlc.directions.shared_subspace(
                traces,
                min(self.rank, first.d_model),
                self.k,
                position=self.position,
                progress=partial(run.bar, "shared directions"),
            )
            with run.timed("ablate"):
                ablation = tlc.directions.ablate(
                    run.model,
                    self.prompts[middle:],
                    subspace,
                    n_draws=self.draws,
                    progress=partial(run.bar, "ablation"),
                )
        return _Results(decoded, steering, subspace, ablation)


def _summary(results: _Results) -> dict[str, object]:
    """Return what `summary.json` holds."""
    decoded = results.decoded
    tables: dict[str, object] = {}
    for name, result in (
        ("steering", results.steering),
        ("ablation", results.ablation),
    ):
        if result is not None:
            tables[name] = result.to_dataframe().to_dict("records")
    return {
        "layer": decoded.layer,
        "position": decoded.position,
        "gains": decoded.gains.tolist(),
        "groups": decoded.groups.tolist(),
        "kurtosis": dict(zip(decoded.ways, decoded.kurtosis.tolist(), strict=True)),
        "decoded": decoded.to_dataframe().to_dict("records"),
        **tables,
        "provenance": decoded.provenance,
    }


def _pictures(results: _Results) -> Pictures:
    """Return the pictures by file name."""
    pictures: Pictures = {}
    if results.steering is not None:
        pictures["steering.png"] = partial(tlc.plots.plot_steering, results.steering)
    if results.subspace is not None:
        pictures["subspace.png"] = partial(tlc.plots.plot_subspace, results.subspace)
    if results.ablation is not None:
        pictures["ablation.png"] = partial(tlc.plots.plot_ablation, results.ablation)
    return pictures
