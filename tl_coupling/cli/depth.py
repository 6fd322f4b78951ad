"""`tl-coupling depth`: coupling across depth, of one prompt or many."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work
from tl_coupling.cli.options import Comparing, Loading, Out, Position, Prompts, Tracing, Untrained
from tl_coupling.cli.results import show, with_suffix, write_pictures, write_summary
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.comparisons import CouplingMap, depth_coupling
from tl_coupling.files import file_name
from tl_coupling.prompts import Prompt

_DEPTH_HELP = """Coupling across depth: one token's block Jacobians against each other, for every pair of layers.

Prints the mean coupling at every k beside what random subspaces would give (the null) and, with --untrained, what the
same architecture gives at its initialisation; writes netCDF, JSON and pictures.

Examples:

  tl-coupling depth --prompt "The capital of France is" --untrained --out out

  tl-coupling depth --model gpt2 --prompts prompts.jsonl --k 10 --k 50 --out gpt2
"""


@command(_DEPTH_HELP)
def depth(
    loading: Loading,
    tracing: Tracing,
    comparing: Comparing,
    prompts: Prompts,
    position: Position = -1,
    untrained: Untrained = False,
    out: Out = Path("out"),
) -> None:
    """See `_DEPTH_HELP`."""
    chosen = prompts.chosen()
    ks = comparing.ks
    measure = partial(_measure, prompts=chosen, k=ks[-1], position=position, orientation=comparing.orientation)
    with at_work(out) as (folder, progress):
        runs = measured_runs(loading, tracing, measure, progress, untrained)
        progress.console.print("drawing …")
        written = _write(folder, runs, chosen, ks)
    show(written, _table(runs, ks))


def _measure(run: Run, prompts: list[Prompt], **comparing: Any) -> list[CouplingMap]:
    """One coupling map for each prompt."""
    results = []
    for prompt in run.bar("prompts")(prompts):
        try:
            results.append(depth_coupling(run.trace(prompt.prompt), **comparing, progress=run.bar("layers")))
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}" if len(prompts) > 1 else str(error)) from error
    return results


def _write(folder: Path, runs: dict[str, list[CouplingMap]], prompts: list[Prompt], ks: list[int]) -> list[Path]:
    """Everything that goes into the output folder. Pictures show the first prompt."""
    from tl_coupling import plots

    written = []
    for run, results in runs.items():
        for prompt, result in zip(prompts, results, strict=True):
            name = "depth" if len(prompts) == 1 else f"depth-{file_name(prompt.id)}"
            written.append(result.save(folder / f"{with_suffix(name, run)}.nc"))
    first = {run: results[0] for run, results in runs.items()}
    trained, twin = first["trained"], first.get("untrained")
    k = ks[-1]
    pictures: dict[str, Callable[[], Any]] = {
        **{f"coupling-k{n}.png": partial(plots.plot_coupling, trained, k=n) for n in ks},
        "matrices.png": partial(plots.plot_coupling_matrices, trained, k=k, untrained=twin),
        "adjacency.png": partial(plots.plot_adjacency, trained, k=k),
        "locality.png": partial(plots.plot_locality, first, k=k),
        "singular_values.png": partial(plots.plot_singular_values, first),
    }
    return [*written, *write_pictures(folder, pictures), write_summary(folder, _summary(runs, prompts, ks))]


def _summary(runs: dict[str, list[CouplingMap]], prompts: list[Prompt], ks: list[int]) -> dict[str, Any]:
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different layers",
        "null": {k: runs["trained"][0].null(k) for k in ks},
        "mean": {
            run: {prompt.id: {k: result.mean(k) for k in ks} for prompt, result in zip(prompts, results, strict=True)}
            for run, results in runs.items()
        },
        "provenance": {run: results[0].provenance for run, results in runs.items()},
    }


def _table(runs: dict[str, list[CouplingMap]], ks: list[int]) -> Table:
    results = runs["trained"]
    n_layers, n_prompts = results[0].matrices.shape[0], len(results)
    table = Table(
        title=f"{results[0].provenance['model']}: depth coupling 1 − m̃, mean over pairs of different layers",
        caption=f"{n_layers} layers, {n_prompts} prompt{'s (mean ± standard deviation)' if n_prompts > 1 else ''}; "
        "null: random subspaces",
    )
    for heading in ("k", *runs, "null"):
        table.add_column(heading, justify="right")
    for k in ks:
        cells = []
        for run in runs.values():
            means = [result.mean(k) for result in run]
            spread = f" ± {statistics.stdev(means):.3f}" if n_prompts > 1 else ""
            cells.append(f"{statistics.fmean(means):.3f}{spread}")
        table.add_row(str(k), *cells, f"{results[0].null(k):.3f}")
    return table
