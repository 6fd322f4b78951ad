"""`tl-coupling tokens`: coupling across tokens at one pair of layers, and the influence of tokens on each other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work
from tl_coupling.cli.options import Comparing, Loading, OnePrompt, Out, Tracing, Untrained
from tl_coupling.cli.results import show, with_suffix, write_pictures, write_summary
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.comparisons import CouplingMap, context_coupling, neighbours, self_coupling
from tl_coupling.influence import INFLUENCE_MEASURES, Influence, cross_token_influence
from tl_coupling.surveys.measurements import PAPER_PROMPT

_TOKENS_HELP = """Coupling across tokens: one pair of layers, every pair of tokens.

Self coupling (what a block does to one token against what another does to another token), context coupling with the
input or the output token fixed (what one token gives to later ones, or takes from earlier ones), and how much every
token influences one token, at every layer.

Prints the mean coupling at every k beside what random subspaces would give (the null) and, with --untrained, what the
same architecture gives at its initialisation; writes netCDF, JSON and pictures. For n tokens about 3 n Jacobians and
n² matrices of k² numbers a map: choose --positions in a long prompt.

Examples:

  tl-coupling tokens --prompt "The capital of France is" --untrained --out out

  tl-coupling tokens --model gpt2 --layer 5 --other-layer 8 --k 10 --positions 0 --positions 3 --positions 4 --out gpt2
"""

_MAPS = ("self", "fixed-input", "fixed-output")


@dataclass(frozen=True, eq=False)
class _Measured:
    """What one model gave: maps by name, and how long everything took."""

    maps: dict[str, CouplingMap]
    influence: Influence
    seconds: dict[str, float]


@command(_TOKENS_HELP)
def tokens(
    loading: Loading,
    tracing: Tracing,
    comparing: Comparing,
    prompt: OnePrompt = PAPER_PROMPT,
    layer: Annotated[int | None, typer.Option(help="Layer of J_1. [in the middle]")] = None,
    other_layer: Annotated[int | None, typer.Option(help="Layer of the singular vectors. [the one after]")] = None,
    position: Annotated[int, typer.Option(help="The fixed output, and the token that is influenced.")] = -1,
    input_position: Annotated[int, typer.Option(help="The fixed input.")] = 0,
    positions: Annotated[
        list[int] | None,
        typer.Option(help="Tokens to compare; may be repeated. In context maps those that causality allows. [all]"),
    ] = None,
    untrained: Untrained = False,
    out: Out = Path("out"),
) -> None:
    """See `_TOKENS_HELP`."""
    ks = comparing.ks
    measure = partial(
        _measure,
        prompt=prompt,
        layer=layer,
        other_layer=other_layer,
        position=position,
        input_position=input_position,
        positions=positions,
        k=ks[-1],
        orientation=comparing.orientation,
    )
    with at_work(out) as (folder, progress):
        runs = measured_runs(loading, tracing, measure, progress, untrained)
        progress.console.print("drawing …")
        written = _write(folder, runs, ks)
    show(written, _table(runs, ks))


def _measure(
    run: Run,
    prompt: str,
    layer: int | None,
    other_layer: int | None,
    position: int,
    input_position: int,
    positions: list[int] | None,
    **comparing: Any,
) -> _Measured:
    traced = run.trace(prompt)
    first, second = neighbours(traced, layer, other_layer)
    held_input = traced.position_index(input_position, "input_position")
    held_output = traced.position_index(position)
    chosen = None if positions is None else [traced.position_index(t, "positions") for t in positions]

    def allowed(by_causality: range) -> list[int] | None:
        return None if chosen is None else [t for t in chosen if t in by_causality]

    fixed = partial(context_coupling, traced, first, second, **comparing)
    maps: dict[str, Callable[..., CouplingMap]] = {
        "self": partial(self_coupling, traced, first, second, positions=chosen, **comparing),
        "fixed-input": partial(
            fixed, fixed="input", position=held_input, positions=allowed(range(held_input, traced.n_pos))
        ),
        "fixed-output": partial(fixed, fixed="output", position=held_output, positions=allowed(range(held_output + 1))),
    }
    found = {}
    # The cheap ones first: what is wrong with the arguments is said before the long work.
    for name in reversed(_MAPS):
        with run.timed(name):
            found[name] = maps[name](progress=run.bar(f"{name} coupling"))
    with run.timed("influence"):
        influence = cross_token_influence(traced, held_output, progress=run.bar("influence"))
    return _Measured({name: found[name] for name in _MAPS}, influence, run.seconds)


def _write(folder: Path, runs: dict[str, _Measured], ks: list[int]) -> list[Path]:
    """Everything that goes into the output folder."""
    from tl_coupling import plots

    written = []
    for run, measured in runs.items():
        results: dict[str, CouplingMap | Influence] = {**measured.maps, "influence": measured.influence}
        written += [result.save(folder / f"{with_suffix(name, run)}.nc") for name, result in results.items()]
    twin = runs["untrained"].maps if "untrained" in runs else {}
    pictures: dict[str, Callable[[], Any]] = {}
    for name, result in runs["trained"].maps.items():
        pictures |= {f"{name}-k{n}.png": partial(plots.plot_coupling, result, k=n) for n in ks}
        pictures[f"{name}-matrices.png"] = partial(
            plots.plot_coupling_matrices, result, k=ks[-1], untrained=twin.get(name)
        )
    influences = {run: measured.influence for run, measured in runs.items()}
    pictures["influence.png"] = partial(plots.plot_influence, influences)
    return [*written, *write_pictures(folder, pictures), write_summary(folder, _summary(runs, ks))]


def _summary(runs: dict[str, _Measured], ks: list[int]) -> dict[str, Any]:
    trained = runs["trained"]
    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different connections",
        "layers": {"J_1": trained.maps["self"].row_layers[0], "singular_vectors": trained.maps["self"].col_layers[0]},
        "null": {name: {k: result.null(k) for k in ks} for name, result in trained.maps.items()},
        "mean": _means(runs, ks, "coupling"),
        # How much of J_1 lies in those subspaces at all, which coupling does not say.
        "captured_energy": _means(runs, ks, "captured_energy"),
        "influence": {
            "mean over": "layers, for each source position",
            "output_position": trained.influence.output_position,
            "source_positions": trained.influence.source_positions,
            **{
                run: {name: getattr(measured.influence, name).mean(0).tolist() for name in INFLUENCE_MEASURES}
                for run, measured in runs.items()
            },
        },
        "seconds": {run: measured.seconds for run, measured in runs.items()},
        "provenance": {run: measured.maps["self"].provenance for run, measured in runs.items()},
    }


def _means(runs: dict[str, _Measured], ks: list[int], measure: Any) -> dict[str, Any]:
    return {
        run: {name: {k: result.mean(k, measure) for k in ks} for name, result in measured.maps.items()}
        for run, measured in runs.items()
    }


def _table(runs: dict[str, _Measured], ks: list[int]) -> Table:
    maps = runs["trained"].maps
    own = maps["self"]
    table = Table(
        title=f"{own.provenance['model']}: coupling 1 − m̃ across tokens",
        caption=f"mean over pairs; J_1 of layer {own.row_layers[0]}, singular vectors of layer {own.col_layers[0]}\n"
        "null: random subspaces",
    )
    table.add_column("map")
    for heading in ("k", *runs, "null"):
        table.add_column(heading, justify="right")
    for name, result in maps.items():
        words = _words(name, result)
        for k in ks:
            cells = [f"{measured.maps[name].mean(k):.3f}" for measured in runs.values()]
            table.add_row(words if k == ks[0] else "", str(k), *cells, f"{result.null(k):.3f}", end_section=k == ks[-1])
    return table


def _words(name: str, result: CouplingMap) -> str:
    n = f"{result.matrices.shape[0]} tokens"
    if name == "self":
        return f"self, {n}"
    return f"{name.replace('-', ' ')} {result.provenance['position']}, {n}"
