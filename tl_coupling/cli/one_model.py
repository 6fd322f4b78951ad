"""The commands that measure one model, and its untrained twin: depth, tokens,
trajectory and report.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import (
    Run,
    at_work,
    coupling_table,
    every_choice,
    table_of,
    with_suffix,
)
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    AcrossTokens,
    Choosing,
    Comparing,
    OneModel,
    OnePrompt,
    Out,
    Prompts,
    Untrained,
    own_position,
)
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.files import file_name, write_table
from tl_coupling.influence import INFLUENCE_MEASURES
from tl_coupling.portraits import Portrait, TokenPortrait, token_portrait
from tl_coupling.prompts import Prompt
from tl_coupling.surveys.measurements import of_maps
from tl_coupling.surveys.readings import in_words, joined
from tl_coupling.trajectories import TrajectoryResult, measure_trajectory

_PER_TOKEN = {
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "equidistance": "equidistance",
}


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
    """Coupling across depth: one token's block Jacobians against each other, for every
    pair of layers.

    Prints the mean coupling at every k beside what random subspaces would give (the
    null) and, with --untrained, what the same architecture gives at its initialisation;
    writes netCDF, JSON and pictures. For several prompts, the map is the mean, with its
    standard deviation. Means are over pairs of different layers; the paper's are over
    all pairs, --diagonal. With --all-measures a second table has every measure, in both
    orientations, over both choices of pairs.

    Examples:

      tl-coupling depth --prompt "The capital of France is" --untrained --out out

      tl-coupling depth --model gpt2 --prompts prompts.jsonl --k 10 --k 50 --out gpt2

      tl-coupling depth --model smollm2-135m --untrained --all-measures --out choices

      tl-coupling depth --model google/vit-base-patch16-224 --image cat.jpg --out vit
    """
    chosen, off = prompts.chosen(), not choosing.diagonal
    means: dict[str, dict[str, dict[int, float]]] = {}
    every: dict[str, list[Any]] = {}

    def measure_one(run: Run, prompt: Prompt) -> CouplingMap:
        try:
            traced, bar = run.trace(prompt), partial(run.bar, "layers")
            at = own_position(prompt, position)
            how = choosing.settings_for(tlc.Settings(orientation=comparing.orientation))
            maps = tlc.comparisons.depth_couplings(
                traced, comparing.largest, at, how.orientations, progress=bar
            )
        except ValueError as error:
            raise ValueError(
                f"prompt {prompt.id!r}: {error}" if len(chosen) > 1 else str(error)
            ) from error
        result = maps[comparing.orientation]
        ks = comparing.up_to(result.k)
        if choosing.all_measures:
            every.setdefault(run.role, []).append(
                of_maps(list(maps.values()), replace(how, k=tuple(ks)))
            )
        if save_maps and len(chosen) > 1:
            (out / "maps" / run.role).mkdir(parents=True, exist_ok=True)
            result.save(out / "maps" / run.role / f"{file_name(prompt.id)}.nc")
        means.setdefault(run.role, {})[prompt.id] = {
            k: result.mean(k, off_diagonal=off) for k in ks
        }
        return result

    def measure(run: Run) -> CouplingMap:
        if len(chosen) == 1:
            return measure_one(run, chosen[0])
        return MeanCouplingMap.over(
            measure_one(run, prompt) for prompt in run.bar("prompts", chosen)
        )

    with at_work(out) as work:
        results: dict[str, Any] = work.measured(setup, untrained, measure)
        maps = {run: {"depth": result} for run, result in results.items()}
        work.save(maps)
        work.written += [out / "maps"] if save_maps and len(chosen) > 1 else []
        trained: CouplingMap = results["trained"]
        n, ks, pairs = (
            trained.n_prompts,
            comparing.up_to(trained.k),
            in_words(choosing.diagonal),
        )
        spreads: dict[str, dict[int, float]] = {}
        # A single layer leaves nothing to chance.
        intervals = {
            k: trained.null_interval(k, off_diagonal=off)
            for k in ks
            if len(trained.row_layers) > 1
        }
        summary: dict[str, Any] = {
            "measure": f"coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over {pairs}",
            "n_prompts": n,
            "null": {k: trained.null(k, off_diagonal=off) for k in ks},
            "null_interval": intervals,
            "mean": means,
            "mean_over_prompts": {
                run: {k: result.mean(k, off_diagonal=off) for k in ks}
                for run, result in results.items()
            },
            "provenance": {run: result.provenance for run, result in results.items()},
        }
        pictures: dict[str, Any] = {
            f"coupling-k{k}.png": partial(tlc.plot_coupling, trained, k=k) for k in ks
        }
        if isinstance(trained, MeanCouplingMap):
            pictures |= {
                f"spread-k{k}.png": partial(tlc.plots.plot_spread, trained, k=k)
                for k in ks
            }
            spreads = {
                run: {k: stdev(one[k] for one in of.values()) for k in ks}
                for run, of in means.items()
            }
            summary["standard_deviation_over_prompts"] = spreads
        pictures |= {
            "matrices.png": partial(
                tlc.plot_coupling_matrices, trained, untrained=results.get("untrained")
            ),
            "adjacency.png": partial(tlc.plot_adjacency, trained),
            "locality.png": partial(tlc.plots.plot_locality, results),
            "singular_values.png": partial(tlc.plots.plot_singular_values, results),
        }
        work.finish(summary, pictures)
        caption = f"{len(trained.row_layers)} layers, {n} prompt{'s (mean ± standard deviation)' if n > 1 else ''}"
        said = ", ".join(
            f"{low:.3f} to {high:.3f} (k = {k})" for k, (low, high) in intervals.items()
        )
        caption += f"\n95 % of random subspaces: {said}" if said else ""
        title = f"depth coupling 1 − m̃, mean over {pairs}"
        work.shown.append(
            coupling_table(title, caption, maps, ks, choosing.diagonal, spreads)
        )
        if every:
            rows = tlc.surveys.measure_table(joined(every))
            work.write("measures.csv", partial(write_table, rows))
            work.shown.append(
                every_choice(f"{trained.provenance['model']}: every choice", rows)
            )


@command
def tokens(
    setup: OneModel,
    comparing: Comparing,
    across: AcrossTokens,
    prompt: OnePrompt,
    positions: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens to compare; may be repeated. In context maps those that causality allows. [all]"
        ),
    ] = None,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Coupling across tokens: one pair of layers, every pair of tokens.

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

    chosen = prompt.one()

    def measure(run: Run) -> TokenPortrait:
        traced, bar = run.trace(chosen), partial(run.bar, "Jacobians")
        how = across.arguments(chosen) | {
            "positions": positions,
            "orientation": comparing.orientation,
        }
        with run.timed("measuring"):
            return token_portrait(traced, k=comparing.largest, progress=bar, **how)

    with at_work(out) as work:
        runs = work.measured(setup, untrained, measure)
        influences = {run: measured.influence for run, measured in runs.items()}
        maps = {
            run: {name.replace(" ", "-"): of for name, of in one.maps.items()}
            for run, one in runs.items()
        }
        work.save({run: maps[run] | {"influence": influences[run]} for run in runs})
        own, influence = maps["trained"]["self"], influences["trained"]
        ks = comparing.up_to(own.k)
        pictures: dict[str, Any] = {}
        for name, result in maps["trained"].items():
            twin = maps["untrained"][name] if untrained else None
            pictures |= {
                f"{name}-k{k}.png": partial(tlc.plot_coupling, result, k=k) for k in ks
            }
            pictures[f"{name}-matrices.png"] = partial(
                tlc.plot_coupling_matrices, result, untrained=twin
            )
        pictures["influence.png"] = partial(tlc.plots.plot_influence, influences)

        def means(measure: Any) -> dict[str, Any]:
            return {
                run: {
                    name: {k: result.mean(k, measure) for k in ks}
                    for name, result in of_run.items()
                }
                for run, of_run in maps.items()
            }

        summary = {
            "measure": "coupling: 1 − ‖A − Diag(A)‖_F / ‖A‖_F, mean over pairs of different connections",
            "layers": {"J_1": own.row_layers[0], "singular_vectors": own.col_layers[0]},
            "null": {
                name: {k: result.null(k) for k in ks}
                for name, result in maps["trained"].items()
            },
            "mean": means("coupling"),
            # How much of J_1 lies in those subspaces at all, which coupling does not
            # say.
            "captured_energy": means("captured_energy"),
            "influence": {
                "mean over": "layers, for each source position",
                "output_position": influence.output_position,
                "source_positions": influence.source_positions,
                **{
                    run: {
                        name: getattr(one, name).mean(0).tolist()
                        for name in INFLUENCE_MEASURES
                    }
                    for run, one in influences.items()
                },
            },
            "provenance": {
                run: of_run["self"].provenance for run, of_run in maps.items()
            },
            "seconds": work.seconds,
        }
        work.finish(summary, pictures)
        caption = f"mean over pairs; J_1 of layer {own.row_layers[0]}, singular vectors of layer {own.col_layers[0]}"
        described = {
            run: {_described(name, of): of for name, of in one.maps.items()}
            for run, one in runs.items()
        }
        work.shown.append(
            coupling_table("coupling 1 − m̃ across tokens", caption, described, ks)
        )


def _described(name: str, result: CouplingMap) -> str:
    fixed = f" {result.provenance['position']}" if result.kind == "context" else ""
    return f"{name}{fixed}, {len(result.row_positions)} tokens"


@command
def trajectory(
    setup: OneModel,
    prompt: OnePrompt,
    position: Annotated[
        int | None,
        typer.Option(
            help=f"The token that is linearised and perturbed. {OWN_POSITION}"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Steps of the windowed score, odd. [11, or the most that the model has]"
        ),
    ] = None,
    perturbation: Annotated[
        bool, typer.Option(help="Follow noise in the embedding: 48 forward passes.")
    ] = True,
    absolute_noise: Annotated[
        bool,
        typer.Option(
            "--absolute-noise",
            help="Of these standard deviations, not relative to its length.",
        ),
    ] = False,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Trajectories of a prompt's tokens through the residual stream.

    For every token its line-shape score (1 is a straight line), expodistance (0 is
    exact exponential growth) and equidistance (0 is equal steps); against depth, its
    norm, step lengths, line-shape scores and logit-lens entropy. For one token, how
    well its linearised blocks predict its path, their largest singular values with a
    line through 1/σ, and how noise added to its embedding propagates.

    Prints the means over tokens, with --untrained beside those of the same architecture
    at its initialisation; writes netCDF, JSON and pictures.

    Examples:

      tl-coupling trajectory --prompt "The capital of France is" --untrained --out out

      tl-coupling trajectory --model gpt2 --final-norm --window 7 --no-perturbation
      --out gpt2
    """
    pictures: dict[str, Callable[[], Any]] = {}
    chosen = prompt.one()
    at = own_position(chosen, position)

    def measure(run: Run) -> TrajectoryResult:
        traced, bar = run.trace(chosen), partial(run.bar, "trajectory")
        pictures[f"{with_suffix('trajectories', run.role)}.png"] = partial(
            tlc.plot_trajectories, traced, black=at
        )
        with run.timed("measures"):
            noise = {"noise": perturbation, "relative_noise": not absolute_noise}
            return measure_trajectory(
                traced, position=at, window=window, progress=bar, **noise
            )

    with at_work(out) as work:
        results = work.measured(setup, untrained, measure)
        work.save({run: {"trajectory": result} for run, result in results.items()})
        pictures["metrics.png"] = partial(tlc.plots.plot_trajectory_metrics, results)
        pictures["linearisation.png"] = partial(tlc.plots.plot_linearisation, results)
        pictures["inverse_singular_values.png"] = partial(
            tlc.plots.plot_inverse_singular_values, results
        )
        if perturbation:
            pictures["perturbation.png"] = partial(tlc.plots.plot_perturbation, results)
        work.finish(_trajectory_summary(results) | {"seconds": work.seconds}, pictures)
        work.shown.append(_trajectory_table(results))


def _trajectory_summary(results: dict[str, TrajectoryResult]) -> dict[str, Any]:
    trained = results["trained"]
    linear = {
        run: result.linearisation
        for run, result in results.items()
        if result.linearisation is not None
    }
    noisy = {
        run: result.perturbation
        for run, result in results.items()
        if result.perturbation is not None
    }

    def of_tokens(what: Callable[[Tensor], Any]) -> dict[str, Any]:
        return {
            run: {name: what(getattr(result, name)) for name in _PER_TOKEN}
            for run, result in results.items()
        }

    return {
        "measure": "line-shape score, expodistance and equidistance of every token, and their means over tokens where "
        "they are defined",
        "random_steps_line_shape_score": math.sqrt(trained.n_layers),
        "window": trained.window,
        "position": linear["trained"].position,
        "mean": of_tokens(lambda values: float(values.nanmean())),
        "tokens": of_tokens(lambda values: values.tolist()),
        "undefined_tokens": of_tokens(
            lambda values: values.isnan().nonzero().flatten().tolist()
        ),
        "linearisation_mean_relative_error": {
            run: {
                of: float(one.relative_error(of).mean())
                for of in ("one_step", "previous")
            }
            for run, one in linear.items()
        },
        "perturbation": {
            run: {
                "relative": one.relative,
                "scales": one.scales,
                "cosine_similarity_before": one.mean[:, 0].tolist(),
                "cosine_similarity_after": one.mean[:, -1].tolist(),
            }
            for run, one in noisy.items()
        },
        "provenance": {run: result.provenance for run, result in results.items()},
    }


def _trajectory_table(results: dict[str, TrajectoryResult]) -> Table:
    n_layers, n_pos = (
        results["trained"].n_layers,
        len(results["trained"].line_shape_score),
    )

    def cell(values: Tensor) -> str:
        n_undefined = int(values.isnan().sum())
        said = f" ({n_undefined} undefined)" if n_undefined else ""
        return (
            "undefined"
            if n_undefined == n_pos
            else f"{float(values.nanmean()):.3f}{said}"
        )

    return table_of(
        f"{results['trained'].provenance['model']}: trajectories",
        ["measure"],
        results,
        (
            [what, *(cell(getattr(result, name)) for result in results.values())]
            for name, what in _PER_TOKEN.items()
        ),
        f"mean over {n_pos} token{'s' if n_pos > 1 else ''}\nscore of a straight line: 1\n"
        f"of random steps: √{n_layers} = {math.sqrt(n_layers):.2f}",
    )


@command
def report(
    setup: OneModel,
    comparing: Comparing,
    across: AcrossTokens,
    prompt: OnePrompt,
    untrained: Untrained = True,
    out: Annotated[
        Path, typer.Option(help="The page to write.", dir_okay=False)
    ] = Path("report.html"),
) -> None:
    """One self-contained HTML page on a model and a prompt, or a vision model and an
    image.

    Coupling across depth and across tokens, singular values, the influence of tokens on
    each other, and trajectories; each figure with a caption that says what to read off
    it and how it was made. The page loads nothing from anywhere. Of an image, what each
    patch does is shown over the picture. The same architecture at its initialisation
    stands beside the model, unless --no-untrained.

    Examples:

      tl-coupling report --prompt "The capital of France is" --out report.html

      tl-coupling report --model gpt2 --k 10 --k 50 --layer 5 --other-layer 8
      --no-untrained --out gpt2.html

      tl-coupling report --model google/vit-base-patch16-224 --image cat.jpg --out
      cat.html
    """
    chosen = prompt.one()
    how = across.arguments(chosen) | {
        "k": comparing.ks if comparing.k else None,
        "orientation": comparing.orientation,
    }

    def measure(run: Run) -> Portrait:
        return tlc.portrait(
            run.trace(chosen), progress=partial(run.bar, "measuring"), **how
        )

    with at_work(out.parent) as work:
        runs = work.measured(setup, untrained, measure)
        with work.console.status("drawing …"):
            work.written.append(tlc.write_report(out, runs))
