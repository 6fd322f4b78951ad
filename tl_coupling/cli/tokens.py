"""`tl-coupling tokens`: coupling across tokens at one pair of layers, and the influence of tokens on each other."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, coupling_table, show, with_suffix, write_pictures, write_summary
from tl_coupling.cli.options import OUT, AcrossTokens, Comparing, Loading, OnePrompt, Out, Positions, Tracing, Untrained
from tl_coupling.cli.runs import Run, measured_runs
from tl_coupling.comparisons import CouplingMap
from tl_coupling.influence import INFLUENCE_MEASURES
from tl_coupling.portraits import TokenPortrait, token_portrait
from tl_coupling.surveys.measurements import PAPER_PROMPT

_TOKENS_HELP = """Coupling across tokens: one pair of layers, every pair of tokens.

Self coupling (what a block does to one token against what another does to another token), context coupling with the
input or the output token fixed (how one token acts on later ones, or earlier ones act on it), and how much every token
influences one token, at every layer.

Prints the mean coupling at every k beside what random subspaces would give (the null) and, with --untrained, what the
same architecture gives at its initialisation; writes netCDF, JSON and pictures. For n tokens it takes about 3 n
Jacobians, and n² matrices of k² numbers for each map: choose --positions in a long prompt.

Examples:

  tl-coupling tokens --prompt "The capital of France is" --untrained --out out

  tl-coupling tokens --model gpt2 --layer 5 --other-layer 8 --k 10 --positions 0 --positions 3 --positions 4 --out gpt2
"""


@command(_TOKENS_HELP)
def tokens(
    loading: Loading,
    tracing: Tracing,
    comparing: Comparing,
    across: AcrossTokens,
    prompt: OnePrompt = PAPER_PROMPT,
    positions: Positions = None,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """See `_TOKENS_HELP`."""
    how: dict[str, Any] = asdict(across) | {"positions": positions, "orientation": comparing.orientation}
    seconds = {}

    def measure(run: Run) -> TokenPortrait:
        traced = run.trace(prompt)
        with run.timed("measuring"):
            result = token_portrait(traced, k=comparing.largest, progress=run.bar("Jacobians"), **how)
        seconds[run.role] = run.seconds
        return result

    with at_work(out) as (folder, progress):
        runs = measured_runs(loading, tracing, measure, progress, untrained)
        progress.console.print("drawing …")
        own = runs["trained"].maps["self"]
        ks = comparing.up_to(own.k)
        written = _write(folder, runs, ks)
        written.append(write_summary(folder, _summary(runs, ks) | {"seconds": seconds}))
    J_1, singular_vectors = (layers[0] for layers in (own.row_layers, own.col_layers))
    caption = f"mean over pairs; J_1 of layer {J_1}, singular vectors of layer {singular_vectors}"
    maps = {run: {_described(*one): one[1] for one in measured.maps.items()} for run, measured in runs.items()}
    show(written, coupling_table("coupling 1 − m̃ across tokens", caption, maps, ks))


def _write(folder: Path, runs: dict[str, TokenPortrait], ks: list[int]) -> list[Path]:
    """Results and pictures."""
    from tl_coupling import plots

    written = []
    for run, measured in runs.items():
        results: dict[Any, Any] = {**measured.maps, "influence": measured.influence}
        written += [result.save(folder / f"{with_suffix(_dashed(name), run)}.nc") for name, result in results.items()]
    pictures: dict[str, Any] = {}
    for name, result in runs["trained"].maps.items():
        twin = runs["untrained"].maps[name] if "untrained" in runs else None
        pictures |= {f"{_dashed(name)}-k{k}.png": partial(plots.plot_coupling, result, k=k) for k in ks}
        pictures[f"{_dashed(name)}-matrices.png"] = partial(plots.plot_coupling_matrices, result, untrained=twin)
    influences = {run: measured.influence for run, measured in runs.items()}
    pictures["influence.png"] = partial(plots.plot_influence, influences)
    return [*written, *write_pictures(folder, pictures)]


def _summary(runs: dict[str, TokenPortrait], ks: list[int]) -> dict[str, Any]:
    trained = runs["trained"]

    def means(measure: Any) -> dict[str, Any]:
        return {
            run: {_dashed(name): {k: result.mean(k, measure) for k in ks} for name, result in measured.maps.items()}
            for run, measured in runs.items()
        }

    return {
        "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different connections",
        "layers": {"J_1": trained.maps["self"].row_layers[0], "singular_vectors": trained.maps["self"].col_layers[0]},
        "null": {_dashed(name): {k: result.null(k) for k in ks} for name, result in trained.maps.items()},
        "mean": means("coupling"),
        # How much of J_1 lies in those subspaces at all, which coupling does not say.
        "captured_energy": means("captured_energy"),
        "influence": {
            "mean over": "layers, for each source position",
            "output_position": trained.influence.output_position,
            "source_positions": trained.influence.source_positions,
            **{
                run: {name: getattr(measured.influence, name).mean(0).tolist() for name in INFLUENCE_MEASURES}
                for run, measured in runs.items()
            },
        },
        "provenance": {run: measured.maps["self"].provenance for run, measured in runs.items()},
    }


def _described(name: str, result: CouplingMap) -> str:
    fixed = f" {result.provenance['position']}" if result.kind == "context" else ""
    return f"{name}{fixed}, {len(result.row_positions)} tokens"


def _dashed(name: str) -> str:
    return name.replace(" ", "-")
