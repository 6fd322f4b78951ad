"""The command that compares two models, or one with itself: compare."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, work_in
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    Batch,
    Comparing,
    Method,
    OneModel,
    Out,
    Prompts,
    own_position,
)
from tl_coupling.comparisons import Comparison, CouplingMap
from tl_coupling.jacobians import AnyMethod
from tl_coupling.prompts import Prompt


@command
def compare(
    setup: OneModel,
    comparing: Comparing,
    prompts: Prompts,
    other_model: Annotated[
        str | None, typer.Option(help="The second model. [the same as --model]")
    ] = None,
    other_checkpoint: Annotated[
        str | None,
        typer.Option(help="Training step, or hub revision, of the second model."),
    ] = None,
    other_untrained: Annotated[
        bool,
        typer.Option("--other-untrained", help="The second is the untrained twin."),
    ] = False,
    other_prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts of the second, a JSONL file. [the same]", dir_okay=False
        ),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(
            help=f"Token position; negative counts from the end. {OWN_POSITION}"
        ),
    ] = None,
    method: Method = "jacobians",
    batch: Batch = None,
    out: Out = OUT,
) -> None:
    """Compare the coupling of two models, revisions or prompt sets.

    Measures both, and prints the mean coupling of each at every k, the difference
    (second − first) with its 95 % interval over prompts, and what random subspaces
    give. Over the same prompts differences are paired; over different prompts the
    interval is Welch's. Writes netCDF, JSON, and a picture of both maps and of the
    difference.

    Examples:

      tl-coupling compare --prompts prompts.jsonl --other-untrained --out compared

      tl-coupling compare --model EleutherAI/pythia-70m --other-model EleutherAI/pythia-70m-deduped

      tl-coupling compare --model EleutherAI/pythia-160m --checkpoint 1000 --other-checkpoint 143000

      tl-coupling compare --prompts capitals.jsonl --other-prompts sums.jsonl
    """
    first = _Measured(setup, "trained", prompts.selected())
    selected_others = None
    if other_prompts is not None:
        selected_others = prompts.in_file(other_prompts)
    second = first.other_side(
        other_model, other_checkpoint, other_untrained, selected_others
    )
    with work_in(out) as work:
        measured = []
        for side in (first, second):
            measure = partial(
                side.maps,
                comparing=comparing,
                position=position,
                method=method,
                batch=batch,
            )
            measured.append(work.measured_as(side.role, side.setup, measure))
        a, b = measured
        # A narrow model has fewer singular vectors than its neighbour.
        largest = min(result.k for result in (*a, *b))
        comparisons = {k: tlc.compare(a, b, k) for k in comparing.up_to(largest)}
        pictures: Pictures = {}
        for k, comparison in comparisons.items():
            # As the trained run's, whose files have no suffix: a comparison is of both.
            work.save({"trained": {f"comparison-k{k}": comparison}})
            pictures[f"comparison-k{k}.png"] = partial(tlc.plot_comparison, comparison)
        work.finish(_summary(comparisons), pictures)
        # A row for each k, under one title.
        tables = [comparison.table() for comparison in comparisons.values()]
        rows = tuple(row for table in tables for row in table.rows)
        work.shown.append(replace(tables[0], rows=rows))


@dataclass(frozen=True)
class _Measured:
    """One side of the comparison: a model in its role, and prompts."""

    setup: OneModel
    role: str
    prompts: list[Prompt]

    def other_side(
        self,
        model: str | None,
        checkpoint: str | None,
        untrained: bool,
        prompts: list[Prompt] | None,
    ) -> "_Measured":
        """Return the other side. Raises ValueError where it would be this one."""
        if model is None and checkpoint is None and not untrained and prompts is None:
            raise ValueError(
                "say what to compare with: --other-model, --other-checkpoint, "
                "--other-untrained or --other-prompts"
            )
        setup = self.setup
        if model is not None:
            # A step or revision of the first model is none of another's.
            setup = replace(setup, model=model, checkpoint=None)
        if checkpoint is not None:
            setup = replace(setup, checkpoint=checkpoint)
        other_prompts = self.prompts if prompts is None else prompts
        role = "untrained" if untrained else "trained"
        return _Measured(setup, role, other_prompts)

    def maps(
        self,
        run: Run,
        comparing: Comparing,
        position: int | None,
        method: AnyMethod,
        batch: int | None,
    ) -> list[CouplingMap]:
        """Return the map of each prompt."""
        return [
            tlc.depth_coupling(
                run.trace(prompt),
                comparing.largest,
                own_position(prompt, position),
                comparing.orientation,
                method=method,
                batch=batch,
                progress=partial(run.bar, "layers"),
            )
            for prompt in run.bar("prompts", self.prompts)
        ]


def _summary(comparisons: dict[int, Comparison]) -> dict[str, object]:
    """Return what `summary.json` holds."""
    first = next(iter(comparisons.values()))
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of "
        "different layers",
        "names": list(first.names),
        "paired": first.paired,
        "n_prompts": list(first.n_prompts),
        "by_k": {
            k: {
                "means": comparison.means.tolist(),
                "difference": comparison.mean_difference,
                "interval": list(comparison.interval),
                "p": comparison.mean_p,
                "degrees_of_freedom": comparison.degrees_of_freedom,
                "nulls": comparison.nulls.tolist(),
                "pairs_that_differ": int(comparison.differing().sum()),
            }
            for k, comparison in comparisons.items()
        },
        "provenance": first.provenance,
    }
