"""The command that measures coupling and influence across tokens: tokens."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, work_in
from tl_coupling.cli.options import (
    OUT,
    AcrossTokens,
    Comparing,
    OneModel,
    OnePrompt,
    Out,
    Untrained,
)
from tl_coupling.comparisons import CouplingMap
from tl_coupling.influence import INFLUENCE_MEASURES, Influence
from tl_coupling.measures import MeasureName
from tl_coupling.portraits import TokenPortrait, token_portrait
from tl_coupling.results import RANDOM_SUBSPACES, Saved, ShortTable


@command
def tokens(
    setup: OneModel,
    comparing: Comparing,
    token_choices: AcrossTokens,
    prompt: OnePrompt,
    positions: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens to compare; may be repeated. In context maps those that "
            "causality allows. [all]"
        ),
    ] = None,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Measure coupling across tokens: one pair of layers, every pair of tokens.

    Self coupling (what a block does to one token against what another does to another
    token), context coupling with the input or the output token fixed (how one token
    acts on later ones, or earlier ones act on it), and how much every token influences
    one token, at every layer.

    Prints and writes as `depth` does. For n tokens it takes about 3 n Jacobians, and n²
    matrices of k² numbers for each map: choose --positions in a long prompt.

    Examples:

      tl-coupling tokens --prompt "The capital of France is" --untrained --out out

      tl-coupling tokens --model gpt2 --layer 5 --other-layer 8 --k 10 --positions 0
      --positions 3 --out gpt2
    """
    single_prompt = prompt.single_prompt()

    def measure(run: Run) -> TokenPortrait:
        traced = run.trace(single_prompt)
        with run.timed("measuring"):
            return token_portrait(
                traced,
                k=comparing.largest,
                positions=positions,
                orientation=comparing.orientation,
                progress=partial(run.bar, "Jacobians"),
                **token_choices.arguments(single_prompt),
            )

    with work_in(out) as work:
        portraits = work.measured(setup, untrained, measure)
        # A model may be narrower than the k that were asked for.
        ks = comparing.up_to(portraits["trained"].maps["self"].k)
        results = TokenResults(portraits, ks)
        work.save(results.to_save())
        # Known only after the last measurement, and no part of the results.
        summary = results.summary() | {"seconds": work.seconds}
        work.finish(summary, results.pictures())
        work.shown.append(results.table())


@dataclass(frozen=True)
class TokenResults:
    """What the command says of its runs: a summary, pictures and a table."""

    portraits: dict[str, TokenPortrait]
    ks: list[int]

    @property
    def maps(self) -> dict[str, dict[str, CouplingMap]]:
        """The maps of each run under the names of their files."""
        return {
            role: {
                # "fixed input" as part of a file's name.
                name.replace(" ", "-"): result
                for name, result in portrait.maps.items()
            }
            for role, portrait in self.portraits.items()
        }

    @property
    def influences(self) -> dict[str, Influence]:
        """How much every token influences one, in each run."""
        return {role: portrait.influence for role, portrait in self.portraits.items()}

    @property
    def trained_self(self) -> CouplingMap:
        """The map of self coupling in the trained model."""
        return self.portraits["trained"].maps["self"]

    def to_save(self) -> dict[str, dict[str, Saved]]:
        """Return what is written as netCDF, by run and name."""
        influences = self.influences
        return {
            role: {**maps, "influence": influences[role]}
            for role, maps in self.maps.items()
        }

    def pictures(self) -> Pictures:
        """Return the pictures by file name."""
        untrained_maps = self.maps.get("untrained", {})
        pictures: Pictures = {}
        for name, result in self.maps["trained"].items():
            untrained = untrained_maps.get(name)
            for k in self.ks:
                pictures[f"{name}-k{k}.png"] = partial(
                    tlc.plot_coupling, result, untrained=untrained, k=k
                )
        # The diagonals of context maps are too faint to be seen in their matrices.
        pictures["self-matrices.png"] = partial(
            tlc.plot_coupling_matrices,
            self.trained_self,
            untrained=untrained_maps.get("self"),
        )
        pictures["influence.png"] = partial(tlc.plots.plot_influence, self.influences)
        return pictures

    def summary(self) -> dict[str, object]:
        """Return what `summary.json` holds, without the seconds."""
        own = self.trained_self
        null = {
            name: {k: result.null(k) for k in self.ks}
            for name, result in self.maps["trained"].items()
        }
        provenance = {role: maps["self"].provenance for role, maps in self.maps.items()}
        return {
            "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, "
            "mean over pairs of different connections",
            "layers": {"J_1": own.row_layers[0], "singular_vectors": own.col_layers[0]},
            "null": null,
            "mean": self._means("coupling"),
            # How much of J_1 lies in those subspaces at all, which coupling does not
            # say.
            "captured_energy": self._means("captured_energy"),
            "influence": self._influence_summary(),
            "provenance": provenance,
        }

    def _means(self, measure: MeasureName) -> dict[str, dict[str, dict[int, float]]]:
        """Return the means of a measure, by run, map and k."""
        return {
            role: {
                name: {k: result.mean(k, measure) for k in self.ks}
                for name, result in maps.items()
            }
            for role, maps in self.maps.items()
        }

    def _influence_summary(self) -> dict[str, object]:
        """Return the influence of each source token, a mean over layers."""
        influence = self.influences["trained"]
        means = {
            role: {
                name: getattr(result, name).mean(0).tolist()
                for name in INFLUENCE_MEASURES
            }
            for role, result in self.influences.items()
        }
        return {
            "mean over": "layers, for each source position",
            "output_position": influence.output_position,
            "source_positions": influence.source_positions,
            **means,
        }

    def table(self) -> ShortTable:
        """Return the table of mean couplings."""
        own = self.trained_self
        tables = {
            role: ShortTable.stacked(
                {
                    # Random subspaces of many maps would take longer than the maps.
                    _described(name, result): result.table(self.ks, chances={})
                    for name, result in portrait.maps.items()
                },
                "map",
            )
            for role, portrait in self.portraits.items()
        }
        caption = (
            f"mean over pairs; J_1 of layer {own.row_layers[0]}, "
            f"singular vectors of layer {own.col_layers[0]}\n"
            f"null: {RANDOM_SUBSPACES}"
        )
        title = f"{own.provenance['model']}: coupling 1 − m̃ across tokens"
        table = ShortTable.beside(tables, "coupling")
        return replace(table, title=title, caption=caption)


def _described(name: str, result: CouplingMap) -> str:
    """Return a map's name with its fixed position and the number of its tokens."""
    fixed = f" {result.provenance['position']}" if result.kind == "context" else ""
    return f"{name}{fixed}, {len(result.row_positions)} tokens"
