"""The command that measures coupling across depth: depth."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, Work, work_in
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    Choosing,
    Comparing,
    OneModel,
    Out,
    Prompts,
    Untrained,
    own_position,
)
from tl_coupling.cli.tables import choices_table, coupling_table
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.files import file_name, write_table
from tl_coupling.prompts import Prompt
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.studies.surveys import describe_pairs, joined, measures_of_maps

if TYPE_CHECKING:
    import xarray


@command
def depth(
    setup: OneModel,
    comparing: Comparing,
    prompts: Prompts,
    choosing: Choosing,
    position: Annotated[
        int | None,
        typer.Option(
            help=f"Token position; negative counts from the end. {OWN_POSITION}"
        ),
    ] = None,
    untrained: Untrained = False,
    save_maps: Annotated[
        bool, typer.Option("--save-maps", help="Also write the map of each prompt.")
    ] = False,
    out: Out = OUT,
) -> None:
    """Measure coupling across depth: one token's blocks, for every pair of layers.

    Compares the Jacobians of every two blocks. Prints the mean coupling at every k
    beside what random subspaces would give (the null) and, with --untrained, what the
    same architecture gives at its initialisation; writes netCDF, JSON and pictures. For
    several prompts, the map is the mean, with its standard deviation. Means are over
    pairs of different layers; the paper's are over all pairs, --diagonal. With
    --all-measures a second table has every measure, in both orientations, over both
    choices of pairs.

    On two cores a prompt of 64 tokens takes about 2 s with GPT-2 or Pythia-160M, 8 s with
    Pythia-410M and 27 s with Pythia-1B; `tl_coupling.plan` says what any model takes.

    Examples:

      tl-coupling depth --prompt "The capital of France is" --untrained --out out

      tl-coupling depth --model gpt2 --prompts prompts.jsonl --k 10 --k 50 --out gpt2

      tl-coupling depth --model smollm2-135m --untrained --all-measures --out choices

      tl-coupling depth --model google/vit-base-patch16-224 --image cat.jpg --out vit
    """
    selected_prompts = prompts.selected()
    # The map of a single prompt is the result, and saved as such.
    has_maps_of_prompts = save_maps and len(selected_prompts) > 1
    maps_folder = out / "maps" if has_maps_of_prompts else None
    measurement = DepthMeasurement(
        selected_prompts, comparing, choosing, position, maps_folder
    )
    with work_in(out) as work:
        runs = work.measured(setup, untrained, measurement.measure)
        # A model may be narrower than the k that were asked for.
        ks = comparing.up_to(runs["trained"].coupling_map.k)
        results = DepthResults(runs, ks, choosing.diagonal)
        work.save(results.named_maps)
        if maps_folder is not None:
            work.written.append(maps_folder)
        work.finish(results.summary(), results.pictures())
        work.shown.append(results.table())
        if choosing.all_measures:
            _write_choices(work, runs)


@dataclass(frozen=True)
class PromptReadings:
    """What stays of one prompt when its map is gone.

    Attributes:
        prompt_id: of the prompt.
        means: mean coupling over pairs of layers, by k.
        choices: with `--all-measures`, every measure of the prompt.
    """

    prompt_id: str
    means: dict[int, float]
    choices: "xarray.Dataset | None"


@dataclass(frozen=True)
class DepthOfRun:
    """Coupling across depth in one model: the map of its prompt, or the mean map."""

    coupling_map: CouplingMap
    readings: list[PromptReadings]

    @property
    def means(self) -> dict[str, dict[int, float]]:
        """Mean coupling of each prompt, by its id and k."""
        return {reading.prompt_id: reading.means for reading in self.readings}

    @property
    def spreads(self) -> dict[int, float]:
        """Standard deviation over prompts of the mean coupling, by k."""
        ks = self.readings[0].means
        return {k: stdev([reading.means[k] for reading in self.readings]) for k in ks}


@dataclass(frozen=True)
class DepthMeasurement:
    """Measures coupling across depth, prompt by prompt, as the options say.

    With `maps_folder` the map of each prompt is saved there.
    """

    prompts: list[Prompt]
    comparing: Comparing
    choosing: Choosing
    position: int | None
    maps_folder: Path | None

    def measure(self, run: Run) -> DepthOfRun:
        """Return the map and the readings of every prompt in one model."""
        if len(self.prompts) == 1:
            coupling_map, reading = self.measure_prompt(run, self.prompts[0])
            return DepthOfRun(coupling_map, [reading])
        readings: list[PromptReadings] = []

        # Maps are large: one at a time is in memory, and only its readings stay.
        def maps() -> Iterator[CouplingMap]:
            for prompt in run.bar("prompts", self.prompts):
                coupling_map, reading = self.measure_prompt(run, prompt)
                readings.append(reading)
                yield coupling_map

        # Exhausts the generator, which fills `readings` on its way.
        mean_map = MeanCouplingMap.over(maps())
        return DepthOfRun(mean_map, readings)

    def measure_prompt(
        self, run: Run, prompt: Prompt
    ) -> tuple[CouplingMap, PromptReadings]:
        """Return the map of one prompt and what is read off it."""
        try:
            maps = self._maps(run, prompt)
        except ValueError as error:
            if len(self.prompts) == 1:
                raise
            # Of many prompts, the message must say which.
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error
        coupling_map = maps[0]
        ks = self.comparing.up_to(coupling_map.k)
        off_diagonal = not self.choosing.diagonal
        choices = None
        if self.choosing.all_measures:
            choices = measures_of_maps(maps, replace(self._settings, k=tuple(ks)))
        if self.maps_folder is not None:
            # The twin's maps have the same names.
            folder = self.maps_folder / run.role
            folder.mkdir(parents=True, exist_ok=True)
            coupling_map.save(folder / f"{file_name(prompt.id)}.nc")
        means = {k: coupling_map.mean(k, off_diagonal=off_diagonal) for k in ks}
        return coupling_map, PromptReadings(prompt.id, means, choices)

    def _maps(self, run: Run, prompt: Prompt) -> list[CouplingMap]:
        """Return the map in each orientation; that which was asked for comes first."""
        maps = tlc.comparisons.depth_couplings(
            run.trace(prompt),
            self.comparing.largest,
            own_position(prompt, self.position),
            self._settings.orientations,
            progress=partial(run.bar, "layers"),
        )
        return list(maps.values())

    @property
    def _settings(self) -> tlc.Settings:
        settings = tlc.Settings(orientation=self.comparing.orientation)
        return self.choosing.settings_for(settings)


@dataclass(frozen=True)
class DepthResults:
    """What the command says of its runs: a summary, pictures and a table."""

    runs: dict[str, DepthOfRun]
    ks: list[int]
    diagonal: bool

    @property
    def maps(self) -> dict[str, CouplingMap]:
        """The map of each run."""
        return {role: run.coupling_map for role, run in self.runs.items()}

    @property
    def named_maps(self) -> dict[str, dict[str, CouplingMap]]:
        """The map of each run under the name of its file."""
        return {role: {"depth": result} for role, result in self.maps.items()}

    @property
    def trained(self) -> CouplingMap:
        """The map of the trained model."""
        return self.runs["trained"].coupling_map

    @property
    def pairs(self) -> str:
        """Which pairs of layers the means are over, in words."""
        return describe_pairs(self.diagonal)

    @cached_property
    def null_intervals(self) -> dict[int, tuple[float, float]]:
        """Where 95 % of the means over random subspaces lie, by k."""
        # A single layer leaves nothing to chance.
        if len(self.trained.row_layers) == 1:
            return {}
        return {
            k: self.trained.null_interval(k, off_diagonal=not self.diagonal)
            for k in self.ks
        }

    @cached_property
    def spreads(self) -> dict[str, dict[int, float]]:
        """Standard deviation over prompts by run and k; empty for one prompt."""
        if not isinstance(self.trained, MeanCouplingMap):
            return {}
        return {role: run.spreads for role, run in self.runs.items()}

    def summary(self) -> dict[str, object]:
        """Return what `summary.json` holds."""
        off_diagonal = not self.diagonal
        # What random subspaces give depends on k alone, so that one null stands for all
        # runs.
        null = {k: self.trained.null(k, off_diagonal=off_diagonal) for k in self.ks}
        mean_over_prompts = {
            role: {k: result.mean(k, off_diagonal=off_diagonal) for k in self.ks}
            for role, result in self.maps.items()
        }
        provenance = {role: result.provenance for role, result in self.maps.items()}
        summary: dict[str, object] = {
            "measure": f"coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over {self.pairs}",
            "n_prompts": self.trained.n_prompts,
            "null": null,
            "null_interval": self.null_intervals,
            "mean": {role: run.means for role, run in self.runs.items()},
            "mean_over_prompts": mean_over_prompts,
            "provenance": provenance,
        }
        if self.spreads:
            summary["standard_deviation_over_prompts"] = self.spreads
        return summary

    def pictures(self) -> Pictures:
        """Return the pictures by file name."""
        trained = self.trained
        untrained = self.maps.get("untrained")
        pictures: Pictures = {}
        for k in self.ks:
            pictures[f"coupling-k{k}.png"] = partial(
                tlc.plot_coupling, trained, untrained=untrained, k=k
            )
        if isinstance(trained, MeanCouplingMap):
            for k in self.ks:
                pictures[f"spread-k{k}.png"] = partial(
                    tlc.plots.plot_spread, trained, k=k
                )
        pictures["matrices.png"] = partial(
            tlc.plot_coupling_matrices, trained, untrained=untrained
        )
        # Coupling stands out most where k is small.
        pictures["locality.png"] = partial(
            tlc.plots.plot_locality, self.maps, k=min(self.ks)
        )
        pictures["singular_values.png"] = partial(
            tlc.plots.plot_singular_values, self.maps
        )
        return pictures

    def table(self) -> Table:
        """Return the table of mean couplings."""
        n_prompts = self.trained.n_prompts
        n_layers = len(self.trained.row_layers)
        caption = f"{n_layers} layers, {n_prompts} prompt"
        if n_prompts > 1:
            caption += "s (mean ± standard deviation)"
        if self.null_intervals:
            intervals = ", ".join(
                f"{low:.3f} to {high:.3f} (k = {k})"
                for k, (low, high) in self.null_intervals.items()
            )
            caption += f"\n95 % of {RANDOM_SUBSPACES}: {intervals}"
        title = f"depth coupling 1 − m̃, mean over {self.pairs}"
        return coupling_table(
            title, caption, self.named_maps, self.ks, self.diagonal, self.spreads
        )


def _write_choices(work: Work, runs: dict[str, DepthOfRun]) -> None:
    """Write and show every measure, in both orientations, over both kinds of pairs."""
    choices = {
        role: [
            reading.choices for reading in run.readings if reading.choices is not None
        ]
        for role, run in runs.items()
    }
    rows = tlc.surveys.measure_table(joined(choices))
    work.write("measures.csv", partial(write_table, rows))
    model = runs["trained"].coupling_map.provenance["model"]
    work.shown.append(choices_table(f"{model}: every choice", rows))
