"""`tl-coupling depth`: coupling across depth, of one prompt or the mean over many."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, coupling_table, show, with_suffix, write_pictures, write_summary
from tl_coupling.cli.options import OUT, Comparing, Loading, Out, Position, Prompts, Tracing, Untrained
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap, depth_coupling
from tl_coupling.files import file_name
from tl_coupling.prompts import Prompt

_DEPTH_HELP = """Coupling across depth: one token's block Jacobians against each other, for every pair of layers.

Prints the mean coupling at every k beside what random subspaces would give (the null) and, with --untrained, what the
same architecture gives at its initialisation; writes netCDF, JSON and pictures. For several
prompts, the map is the mean, with its standard deviation.

Examples:

  tl-coupling depth --prompt "The capital of France is" --untrained --out out

  tl-coupling depth --model gpt2 --prompts prompts.jsonl --k 10 --k 50 --out gpt2
"""


@dataclass(frozen=True, eq=False)
class _Measured:
    result: CouplingMap
    means: dict[str, dict[int, float]]


@command(_DEPTH_HELP)
def depth(
    loading: Loading,
    tracing: Tracing,
    comparing: Comparing,
    prompts: Prompts,
    position: Position = -1,
    untrained: Untrained = False,
    save_maps: Annotated[bool, typer.Option("--save-maps", help="Also write the map of each prompt.")] = False,
    out: Out = OUT,
) -> None:
    """See `_DEPTH_HELP`."""
    measure = partial(_measure, prompts=prompts.chosen(), comparing=comparing, position=position)
    with at_work(out) as (folder, progress):
        maps = folder / "maps" if save_maps else None
        runs = measured_runs(loading, tracing, partial(measure, folder=maps), progress, untrained)
        progress.console.print("drawing …")
        written = _write(folder, runs, comparing) + ([maps] if maps and maps.exists() else [])
    first = runs["trained"].result
    n, what = first.n_prompts, "depth coupling 1 − m̃, mean over pairs of different layers"
    caption = f"{len(first.row_layers)} layers, {n} prompt{'s (mean ± standard deviation)' if n > 1 else ''}"
    maps_by_name = {run: {"depth": measured.result} for run, measured in runs.items()}
    show(written, coupling_table(what, caption, maps_by_name, comparing.up_to(first.k)))


def _measure(run: Run, prompts: list[Prompt], comparing: Comparing, position: int, folder: Path | None) -> _Measured:
    """The map of one prompt, or the mean over many; with the mean coupling of each prompt at each k."""
    means: dict[str, dict[int, float]] = {}

    def coupling_of(prompt: Prompt) -> CouplingMap:
        try:
            traced = run.trace(prompt.prompt)
            k, bar = comparing.largest, run.bar("layers")
            result = depth_coupling(traced, k, position, comparing.orientation, progress=bar)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}" if len(prompts) > 1 else str(error)) from error
        if len(prompts) > 1 and folder is not None:
            (folder / run.role).mkdir(parents=True, exist_ok=True)
            result.save(folder / run.role / f"{file_name(prompt.id)}.nc")
        means[prompt.id] = {k: result.mean(k) for k in comparing.up_to(result.k)}
        return result

    if len(prompts) == 1:
        return _Measured(coupling_of(prompts[0]), means)
    return _Measured(MeanCouplingMap.over(map(coupling_of, run.bar("prompts")(prompts))), means)


def _write(folder: Path, runs: dict[str, _Measured], comparing: Comparing) -> list[Path]:
    """Everything that goes into the output folder."""
    from tl_coupling import plots

    results = {run: measured.result for run, measured in runs.items()}
    written = [result.save(folder / f"{with_suffix('depth', run)}.nc") for run, result in results.items()]
    trained, twin = results["trained"], results.get("untrained")
    pictures: dict[str, Any] = {}
    for k in comparing.up_to(trained.k):
        pictures[f"coupling-k{k}.png"] = partial(plots.plot_coupling, trained, k=k)
        if isinstance(trained, MeanCouplingMap):
            pictures[f"spread-k{k}.png"] = partial(plots.plot_spread, trained, k=k)
    pictures |= {
        "matrices.png": partial(plots.plot_coupling_matrices, trained, untrained=twin),
        "adjacency.png": partial(plots.plot_adjacency, trained),
        "locality.png": partial(plots.plot_locality, results),
        "singular_values.png": partial(plots.plot_singular_values, results),
    }
    return [*written, *write_pictures(folder, pictures), write_summary(folder, _summary(runs, comparing))]


def _summary(runs: dict[str, _Measured], comparing: Comparing) -> dict[str, Any]:
    results = {run: measured.result for run, measured in runs.items()}
    ks = comparing.up_to(results["trained"].k)
    spreads = {
        run: {k: result.spread_of_mean(k) for k in ks}
        for run, result in results.items()
        if isinstance(result, MeanCouplingMap)
    }
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different layers",
        "n_prompts": results["trained"].n_prompts,
        "null": {k: results["trained"].null(k) for k in ks},
        "mean": {run: measured.means for run, measured in runs.items()},
        "mean_over_prompts": {run: {k: result.mean(k) for k in ks} for run, result in results.items()},
        **({"standard_deviation_over_prompts": spreads} if spreads else {}),
        "provenance": {run: result.provenance for run, result in results.items()},
    }
