"""The command that measures coupling across depth: depth."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tl_coupling as tlc
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
from tl_coupling.cli.tables import choices_table
from tl_coupling.comparisons import (
    Chance,
    CouplingMap,
    MeanCouplingMap,
    describe_pairs,
    p_in_words,
)
from tl_coupling.files import file_name, write_table
from tl_coupling.measures import Metric
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.prompts import Prompt
from tl_coupling.results import ShortTable
from tl_coupling.studies.surveys import joined_runs, measures_of_maps

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
            "--prompt-key": prompts.prompt_key != "prompt",
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
            files = _map_files(maps)
            coupling_map = _saved_map(files, comparing)
            provenance = coupling_map.provenance
            role = "untrained" if provenance.get("untrained") else "trained"
            measured = _Measured(coupling_map, list(map(str, files)), [])
            _finish(work, {role: measured}, comparing, choosing)
        return
    selected_prompts = prompts.selected()
    # The map of a single prompt is the result, and saved as such.
    has_maps_of_prompts = save_maps and len(selected_prompts) > 1
    maps_folder = out / "maps" if has_maps_of_prompts else None
    measurement = _Measurement(
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
    measured: dict[str, "_Measured"],
    comparing: Comparing,
    choosing: Choosing,
) -> None:
    """Write and show what was measured."""
    maps = {role: result.coupling_map for role, result in measured.items()}
    # A model may be narrower than the k that were asked for.
    ks = comparing.up_to(next(iter(maps.values())).k)
    work.save({role: {"depth": result} for role, result in maps.items()})
    off_diagonal = not choosing.diagonal
    # A single layer leaves nothing to chance.
    chances: dict[str, dict[int, Chance]] = {role: {} for role in maps}
    first_role, first = next(iter(maps.items()))
    if len(first.row_layers) > 1:
        chances = {
            role: {k: result.chance(k, off_diagonal=off_diagonal) for k in ks}
            for role, result in maps.items()
        }
    summary = _summary(measured, ks, choosing.diagonal) | {
        # What random subspaces give depends on k alone: one null stands for all runs.
        "null_interval": {
            k: chance.interval for k, chance in chances[first_role].items()
        },
        "null_p": {
            role: {k: chance.p for k, chance in by_k.items()}
            for role, by_k in chances.items()
        },
    }
    work.finish(summary, _pictures(maps, ks))
    tables = {
        role: ShortTable.stacked(
            {
                "depth": result.table(
                    ks, off_diagonal=off_diagonal, chances=chances[role]
                )
            },
            "map",
        )
        for role, result in maps.items()
    }
    table = ShortTable.beside(tables, "coupling")
    # The caption has the p of the first run.
    lines = [
        f"p of the mean of {role}: {p_in_words(by_k)}"
        for role, by_k in chances.items()
        if role != first_role and by_k
    ]
    work.shown.append(replace(table, caption="\n".join([table.caption, *lines])))


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


def _saved_map(files: list[Path], comparing: Comparing) -> CouplingMap:
    """Return the only map, or the mean of several, which are read one at a time."""

    def read(file: Path) -> CouplingMap:
        coupling_map = CouplingMap.load(file)
        # The default does not say that it was asked for.
        asked = comparing.orientation
        if asked not in ("ujv", coupling_map.orientation):
            raise ValueError(
                f"the map {file} is of orientation {coupling_map.orientation!r}, got "
                f"--orientation {asked}: leave it out, or measure again"
            )
        # A k that the map does not hold is refused.
        comparing.up_to(coupling_map.k)
        return coupling_map

    return _only_or_mean(len(files), map(read, files))


def _only_or_mean(n_maps: int, maps: Iterable[CouplingMap]) -> CouplingMap:
    """Return the only map, or the mean of several: one at a time is in memory."""
    if n_maps > 1:
        return MeanCouplingMap.over(maps)
    (only_map,) = maps
    return only_map


@dataclass(frozen=True)
class _Measured:
    """Coupling across depth in one model.

    Attributes:
        coupling_map: of the prompt, or the mean over prompts.
        prompt_ids: of the prompts, in the order of `by_map`; of a saved mean its file.
        choices: with `--all-measures`, every measure of each prompt.
    """

    coupling_map: CouplingMap
    prompt_ids: list[str]
    choices: "list[xarray.Dataset]"

    def means(self, ks: list[int], diagonal: bool) -> dict[str, dict[int, float]]:
        """Return the mean coupling of each prompt, by its id and k."""
        coupling_map = self.coupling_map
        off_diagonal = not diagonal
        if len(self.prompt_ids) == 1:
            means = {k: coupling_map.mean(k, off_diagonal=off_diagonal) for k in ks}
            return {self.prompt_ids[0]: means}
        assert isinstance(coupling_map, MeanCouplingMap)
        by_prompt = {
            k: coupling_map.by_map(k, off_diagonal=off_diagonal).tolist() for k in ks
        }
        return {
            prompt_id: {k: by_prompt[k][i] for k in ks}
            for i, prompt_id in enumerate(self.prompt_ids)
        }


@dataclass(frozen=True)
class _Measurement:
    """Measures coupling across depth, prompt by prompt, as the options say.

    With `maps_folder` the map of each prompt is saved there.
    """

    prompts: list[Prompt]
    comparing: Comparing
    changing: Changing
    choosing: Choosing
    position: int | None
    maps_folder: Path | None

    def measure(self, run: Run) -> _Measured:
        """Return the map of one model, and every measure of each prompt."""
        metric = None
        if self.changing.metric is not None:
            # Each prompt is traced once more for it: only its stream is needed.
            traces = (self._traced(run, prompt) for prompt in self.prompts)
            metric = tlc.measures.stream_metric(traces)
        n = len(self.prompts)
        # The bar of a single prompt counts its layers.
        prompts = self.prompts if n == 1 else run.bar("prompts", self.prompts)
        choices: list[xarray.Dataset] = []

        def maps() -> Iterator[CouplingMap]:
            for prompt in prompts:
                with self._naming(prompt):
                    maps_of_prompt = self._maps(run, prompt, metric)
                coupling_map = maps_of_prompt[0]
                if self.choosing.all_measures:
                    ks = self.comparing.up_to(coupling_map.k)
                    settings = replace(self._settings, k=tuple(ks))
                    choices.append(measures_of_maps(maps_of_prompt, settings))
                self._save_map(run, prompt, coupling_map)
                yield coupling_map

        # It takes all maps, and so fills `choices`.
        coupling_map = _only_or_mean(n, maps())
        prompt_ids = [prompt.id for prompt in self.prompts]
        return _Measured(coupling_map, prompt_ids, choices)

    def _save_map(self, run: Run, prompt: Prompt, coupling_map: CouplingMap) -> None:
        if self.maps_folder is not None:
            # The twin's maps have the same names.
            folder = self.maps_folder / run.role
            folder.mkdir(parents=True, exist_ok=True)
            coupling_map.save(folder / f"{file_name(prompt.id)}.nc")

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


def _summary(
    measured: Mapping[str, _Measured], ks: list[int], diagonal: bool
) -> dict[str, object]:
    """Return what `summary.json` holds, without the intervals of the null."""
    maps = {role: result.coupling_map for role, result in measured.items()}
    first = next(iter(maps.values()))
    off_diagonal = not diagonal
    summary: dict[str, object] = {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over "
        f"{describe_pairs(diagonal)}",
        "n_prompts": first.n_prompts,
        # The null depends on k alone, so that one stands for all runs.
        "null": {k: first.null(k, off_diagonal=off_diagonal) for k in ks},
        "mean": {role: result.means(ks, diagonal) for role, result in measured.items()},
        "mean_over_prompts": {
            role: {k: result.mean(k, off_diagonal=off_diagonal) for k in ks}
            for role, result in maps.items()
        },
        "provenance": {role: result.provenance for role, result in maps.items()},
    }
    means = {
        role: result
        for role, result in maps.items()
        # Tokens of one prompt are not independent.
        if isinstance(result, MeanCouplingMap) and result.n_prompts > 1
    }
    if means:
        summary["standard_deviation_over_prompts"] = {
            role: {k: result.spread_of_mean(k, off_diagonal=off_diagonal) for k in ks}
            for role, result in means.items()
        }
        summary["interval_over_prompts"] = {
            role: {k: result.interval(k, off_diagonal=off_diagonal) for k in ks}
            for role, result in means.items()
        }
    return summary


def _pictures(maps: dict[str, CouplingMap], ks: list[int]) -> Pictures:
    """Return the pictures by file name."""
    # The map of the trained model, or of the only one.
    trained = next(iter(maps.values()))
    # Saved maps may be of the twin alone.
    untrained = maps.get("untrained") if len(maps) > 1 else None
    pictures: Pictures = {}
    for k in ks:
        pictures[f"coupling-k{k}.png"] = partial(
            tlc.plot_coupling, trained, untrained=untrained, k=k
        )
    if isinstance(trained, MeanCouplingMap):
        for k in ks:
            pictures[f"spread-k{k}.png"] = partial(tlc.plots.plot_spread, trained, k=k)
    pictures["matrices.png"] = partial(
        tlc.plot_coupling_matrices, trained, untrained=untrained
    )
    # Coupling stands out most where k is small.
    pictures["locality.png"] = partial(tlc.plots.plot_locality, maps, k=min(ks))
    pictures["singular_values.png"] = partial(tlc.plots.plot_singular_values, maps)
    return pictures


def _write_choices(work: Work, runs: Mapping[str, _Measured]) -> None:
    """Write and show every measure, in both orientations, over both kinds of pairs."""
    choices = {role: run.choices for role, run in runs.items()}
    rows = tlc.surveys.measure_table(joined_runs(choices))
    work.write("measures.csv", partial(write_table, rows))
    model = runs["trained"].coupling_map.provenance["model"]
    work.shown.append(choices_table(f"{model}: every choice", rows))
