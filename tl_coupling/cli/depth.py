"""The command that measures coupling across depth: depth."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import tl_coupling as tlc
from tl_coupling.arguments import cached_property
from tl_coupling.blocks import Trace
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, Work, work_in
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    Changing,
    Choosing,
    Comparing,
    OneModel,
    Out,
    Prompts,
    Untrained,
    own_position,
)
from tl_coupling.cli.tables import choices_table, coupling_table, plural
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.files import file_name, write_table
from tl_coupling.measures import Metric
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.prompts import Prompt
from tl_coupling.results import RANDOM_SUBSPACES, changes_in_words
from tl_coupling.statistics import Interval, t_interval
from tl_coupling.studies.surveys import describe_pairs, joined, measures_of_maps

if TYPE_CHECKING:
    import xarray


@command
def depth(
    setup: OneModel,
    comparing: Comparing,
    changing: Changing,
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
    maps: Annotated[
        list[Path] | None,
        typer.Option(
            help="Saved maps, or folders of them, to average in place of measuring; may "
            "be repeated."
        ),
    ] = None,
    out: Out = OUT,
) -> None:
    """Measure coupling across depth: one token's blocks, for every pair of layers.

    Compares the Jacobians of every two blocks. Prints the mean coupling at every k
    beside what random subspaces would give (the null) and, with --untrained, what the
    same architecture gives at its initialisation; writes netCDF, JSON and pictures. For
    several prompts, the map is the mean, with its standard deviation and 95 % t interval
    over prompts; --maps takes maps that --save-maps, or `save` in Python, wrote, and
    loads no model. Means are over pairs of different layers; the paper's are over all
    pairs, --diagonal. With --all-measures a second table has every measure, in both
    orientations, over both choices of pairs.

    On two cores a prompt of 64 tokens takes about 2 s with GPT-2 or Pythia-160M, 8 s with
    Pythia-410M and 27 s with Pythia-1B; `tl_coupling.plan` says what any model takes.

    Examples:

      tl-coupling depth --prompt "The capital of France is" --untrained --out out

      tl-coupling depth --model gpt2 --prompts prompts.jsonl --k 10 --k 50 --save-maps
      --out gpt2

      tl-coupling depth --maps gpt2/maps/trained --maps more/maps/trained --out mean

      tl-coupling depth --model smollm2-135m --untrained --all-measures --out choices

      tl-coupling depth --without identity --untrained --out rest

      tl-coupling depth --model gpt2 --k 4 --method products --out few

      tl-coupling depth --model google/vit-base-patch16-224 --image cat.jpg --out vit
    """
    if maps:
        refused = {
            "--model": setup.model != EMBEDDED_MODEL,
            "--prompt": prompts.prompt is not None,
            "--prompts": prompts.prompts is not None,
            "--image": prompts.image is not None,
            "--position": position is not None,
            "--without": changing.without is not None,
            "--metric": changing.metric is not None,
            "--method": changing.method != "jacobians",
            "--batch": changing.batch is not None,
            "--untrained": untrained,
            "--save-maps": save_maps,
            "--all-measures": choosing.all_measures,
        }
        for option, is_given in refused.items():
            if is_given:
                raise ValueError(f"give --maps or {option}, not both")
        with work_in(out) as work:
            run = _saved_run(_map_files(maps), comparing, choosing)
            provenance = run.coupling_map.provenance
            role = "untrained" if provenance.get("untrained") else "trained"
            _finish(work, {role: run}, comparing, choosing)
        return
    selected_prompts = prompts.selected()
    # The map of a single prompt is the result, and saved as such.
    has_maps_of_prompts = save_maps and len(selected_prompts) > 1
    maps_folder = out / "maps" if has_maps_of_prompts else None
    measurement = DepthMeasurement(
        selected_prompts, comparing, changing, choosing, position, maps_folder
    )
    with work_in(out) as work:
        runs = work.measured(setup, untrained, measurement.measure)
        if maps_folder is not None:
            work.written.append(maps_folder)
        _finish(work, runs, comparing, choosing)
        if choosing.all_measures:
            _write_choices(work, runs)


def _finish(
    work: Work,
    runs: dict[str, "DepthOfRun"],
    comparing: Comparing,
    choosing: Choosing,
) -> None:
    """Write and show what was measured."""
    # A model may be narrower than the k that were asked for.
    ks = comparing.up_to(next(iter(runs.values())).coupling_map.k)
    results = DepthResults(runs, ks, choosing.diagonal)
    work.save(results.named_maps)
    work.finish(results.summary(), results.pictures())
    work.shown.append(results.table())


def _map_files(paths: list[Path]) -> list[Path]:
    """Return the files, and those of folders; ValueError for one twice, or none."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.nc")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"the folder {path} has no maps, files that end in .nc")
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("give each map once with --maps, or it would count as two")
    return files


def _saved_run(
    files: list[Path], comparing: Comparing, choosing: Choosing
) -> "DepthOfRun":
    """Return the mean of saved maps, which are read one at a time."""

    def read(file: Path) -> tuple[CouplingMap, PromptReadings]:
        coupling_map = CouplingMap.load(file)
        # The default does not say that it was asked for.
        asked = comparing.orientation
        if asked not in ("ujv", coupling_map.orientation):
            raise ValueError(
                f"the map {file} is of orientation {coupling_map.orientation!r}, got "
                f"--orientation {asked}: leave it out, or measure again"
            )
        ks = comparing.up_to(coupling_map.k)
        off_diagonal = not choosing.diagonal
        means = {k: coupling_map.mean(k, off_diagonal=off_diagonal) for k in ks}
        return coupling_map, PromptReadings(str(file), means, None)

    return DepthOfRun.from_maps(len(files), map(read, files))


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

    @classmethod
    def from_maps(
        cls, n_maps: int, measured: Iterable[tuple[CouplingMap, PromptReadings]]
    ) -> "DepthOfRun":
        """Return the only map, or the mean of several.

        Maps are large: one at a time is in memory, and only its readings stay.
        """
        if n_maps == 1:
            ((coupling_map, reading),) = measured
            return cls(coupling_map, [reading])
        readings: list[PromptReadings] = []

        def maps() -> Iterator[CouplingMap]:
            for coupling_map, reading in measured:
                readings.append(reading)
                yield coupling_map

        # Exhausts the generator, which fills `readings` on its way.
        mean_map = MeanCouplingMap.over(maps())
        return cls(mean_map, readings)

    @property
    def means(self) -> dict[str, dict[int, float]]:
        """Mean coupling of each prompt, by its id and k."""
        return {reading.prompt_id: reading.means for reading in self.readings}

    @property
    def spreads(self) -> dict[int, float]:
        """Standard deviation over prompts of the mean coupling, by k."""
        ks = self.readings[0].means
        return {k: stdev([reading.means[k] for reading in self.readings]) for k in ks}

    @property
    def intervals(self) -> dict[int, Interval]:
        """The 95 % t interval over prompts of the mean coupling, by k."""
        n = len(self.readings)
        return {
            k: t_interval(
                fmean([reading.means[k] for reading in self.readings]),
                spread / n**0.5,
                n - 1,
            )
            for k, spread in self.spreads.items()
        }


@dataclass(frozen=True)
class DepthMeasurement:
    """Measures coupling across depth, prompt by prompt, as the options say.

    With `maps_folder` the map of each prompt is saved there.
    """

    prompts: list[Prompt]
    comparing: Comparing
    changing: Changing
    choosing: Choosing
    position: int | None
    maps_folder: Path | None

    def measure(self, run: Run) -> DepthOfRun:
        """Return the map and the readings of every prompt in one model."""
        metric = None
        if self.changing.metric is not None:
            # Each prompt is traced once more for it: only its stream is needed.
            traces = (self._traced(run, prompt) for prompt in self.prompts)
            metric = tlc.measures.stream_metric(traces)
        n = len(self.prompts)
        # The bar of a single prompt counts its layers.
        prompts = self.prompts if n == 1 else run.bar("prompts", self.prompts)
        measured = (self.measure_prompt(run, prompt, metric) for prompt in prompts)
        return DepthOfRun.from_maps(n, measured)

    def measure_prompt(
        self, run: Run, prompt: Prompt, metric: Metric | None
    ) -> tuple[CouplingMap, PromptReadings]:
        """Return the map of one prompt and what is read off it."""
        with self._naming(prompt):
            maps = self._maps(run, prompt, metric)
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

    def _traced(self, run: Run, prompt: Prompt) -> Trace:
        with self._naming(prompt):
            return run.trace(prompt)

    @contextmanager
    def _naming(self, prompt: Prompt) -> Iterator[None]:
        """Say in an error which of many prompts it is about."""
        try:
            yield
        except ValueError as error:
            if len(self.prompts) == 1:
                raise
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error

    def _maps(
        self, run: Run, prompt: Prompt, metric: Metric | None
    ) -> list[CouplingMap]:
        """Return the map in each orientation; that which was asked for comes first."""
        maps = tlc.comparisons.depth_coupling_by_orientation(
            run.trace(prompt),
            self.comparing.largest,
            own_position(prompt, self.position),
            self._settings.orientations,
            without=self.changing.without,
            metric=metric,
            method=self.changing.method,
            batch=self.changing.batch,
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
    def first(self) -> CouplingMap:
        """The map of the trained model, or of the only one."""
        return next(iter(self.runs.values())).coupling_map

    @property
    def pairs(self) -> str:
        """Which pairs of layers the means are over, in words."""
        return describe_pairs(self.diagonal)

    @cached_property
    def null_intervals(self) -> dict[int, tuple[float, float]]:
        """Where 95 % of the means over random subspaces lie, by k."""
        # A single layer leaves nothing to chance.
        if len(self.first.row_layers) == 1:
            return {}
        return {
            k: self.first.null_interval(k, off_diagonal=not self.diagonal)
            for k in self.ks
        }

    @cached_property
    def spreads(self) -> dict[str, dict[int, float]]:
        """Standard deviation over prompts by run and k; empty for one prompt."""
        if len(next(iter(self.runs.values())).readings) == 1:
            return {}
        return {role: run.spreads for role, run in self.runs.items()}

    @cached_property
    def intervals(self) -> dict[str, dict[int, Interval]]:
        """95 % t intervals over prompts by run and k; empty for one prompt."""
        if not self.spreads:
            return {}
        return {role: run.intervals for role, run in self.runs.items()}

    def summary(self) -> dict[str, object]:
        """Return what `summary.json` holds."""
        off_diagonal = not self.diagonal
        # What random subspaces give depends on k alone, so that one null stands for all
        # runs.
        null = {k: self.first.null(k, off_diagonal=off_diagonal) for k in self.ks}
        mean_over_prompts = {
            role: {k: result.mean(k, off_diagonal=off_diagonal) for k in self.ks}
            for role, result in self.maps.items()
        }
        provenance = {role: result.provenance for role, result in self.maps.items()}
        summary: dict[str, object] = {
            "measure": f"coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over {self.pairs}",
            "n_prompts": self.first.n_prompts,
            "null": null,
            "null_interval": self.null_intervals,
            "mean": {role: run.means for role, run in self.runs.items()},
            "mean_over_prompts": mean_over_prompts,
            "provenance": provenance,
        }
        if self.spreads:
            summary["standard_deviation_over_prompts"] = self.spreads
            summary["interval_over_prompts"] = self.intervals
        return summary

    def pictures(self) -> Pictures:
        """Return the pictures by file name."""
        trained = self.first
        # Saved maps may be of the twin alone.
        untrained = self.maps.get("untrained") if len(self.maps) > 1 else None
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
        n_prompts = self.first.n_prompts
        n_layers = len(self.first.row_layers)
        caption = f"{n_layers} layers, {plural(n_prompts, 'prompt')}"
        if self.spreads:
            caption += " (mean ± standard deviation [95 % t interval])"
        if self.null_intervals:
            intervals = ", ".join(
                f"{low:.3f} to {high:.3f} (k = {k})"
                for k, (low, high) in self.null_intervals.items()
            )
            caption += f"\n95 % of {RANDOM_SUBSPACES}: {intervals}"
        subject = " ".join(["depth coupling", *changes_in_words(self.first.provenance)])
        title = f"{subject} 1 − m̃, mean over {self.pairs}"
        return coupling_table(
            title,
            caption,
            self.named_maps,
            self.ks,
            self.diagonal,
            self.spreads,
            self.intervals,
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
