"""Does coupling go with the loss? A ladder of small models trained here, and a real
model on real prompts.

    python demos/studies/ladder.py --out out/ladder
    python demos/studies/ladder.py --out out/ladder --prompts prompts.jsonl --per-task 20

Small Pythias of several widths, depths, amounts of text and seeds learn the standard
library's own source; each is scored by its loss on text it has not seen, and a survey
measures the coupling of its layers on held-out passages. Then coupling is compared with
the loss, and blocks are dropped, swapped and merged to see whether coupled ones are
redundant. The paper's Table 1 is regressed on its own columns: what size alone says
about the score there. Last, SmolLM2-135M-Instruct is surveyed on benchmark prompts:
those of `--prompts`, whose blocks are then changed as well, or six test sets from the
hub where it can be reached.

This is no test of the paper's claim: all models are past the early surge of coupling,
the longest training sees half of one batch of Pythia's, and models differ in their loss
because they differ in size and amount of text. `capacity.py` and `gap.py` compare
models where their losses are equal.

Models and surveys that are finished are kept: a second run does what is missing of
them, and the comparisons anew. All that is printed is kept in `report.txt`, and the
table of the models in `measured.csv`; those that the findings cite are in
`demos/studies/results/ladder`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import xarray
from matplotlib.axes import Axes
from scipy import stats
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from tl_coupling.files import output_folder, write_atomically
from tl_coupling.generalization import (
    generalization_study,
    linear_fit,
    paper_table1,
    task_means,
)
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.studies.redundancy import change_and_predictors

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from loss_marks import mean_loss, windows_of
from small_models import (
    Corpus,
    TrainingConfig,
    build_corpus,
    parser_of,
    passages,
    read_documents,
    train,
)

# Lower is better.
SCORE = "held_out_loss"
CONTROLS = ["log10(n_parameters)", "n_layers", "d_model", "log10(training_tokens)"]
# Windows of held-out text that a model is scored on.
EVALUATED = 64
# Prompts on which the blocks of one model are dropped, swapped and merged.
CHANGED = 8
K_SMOLLM2 = (10, 30)
# With fewer a partial correlation over layers says nothing.
FEWEST_LAYERS = 10


OPTIONS: list[tuple[str, Any, str]] = [
    ("out", Path("out/ladder"), "models, surveys, statistics, figures"),
    ("widths", [32, 64, 128], "of the models"),
    ("depths", [3, 6], "numbers of blocks"),
    ("steps", [128, 512], "of training"),
    ("seeds", 2, "models of each kind"),
    ("vocabulary", 2048, "entries of the tokenizer"),
    ("n-ctx", 128, "tokens in a window and a passage"),
    ("passages", 8, "held-out passages of the survey"),
    ("k", [5, 10, 20], "singular vectors; figures: the first"),
    ("jobs", os.cpu_count() or 1, "processes"),
    ("per-task", 5, "prompts of each task for SmolLM2; 0: none"),
]


@dataclass(frozen=True)
class Rung:
    """A trained model of the ladder: its name, where it is, and its score."""

    name: str
    path: str
    config: TrainingConfig
    loss: float


def ladder(arguments: argparse.Namespace) -> list[TrainingConfig]:
    """All widths by depths by numbers of steps by seeds; a seed of its own for each, so
    that none share their text.
    """
    shape = product(
        arguments.widths, arguments.depths, arguments.steps, range(arguments.seeds)
    )
    base = TrainingConfig(vocabulary=arguments.vocabulary, n_ctx=arguments.n_ctx)
    return [
        replace(
            base,
            width=width,
            n_heads=max(1, width // 32),
            n_layers=depth,
            steps=steps,
            seed=seed,
        )
        for seed, (width, depth, steps, _) in enumerate(shape)
    ]


def climb(config: TrainingConfig, corpus: Corpus, out: Path) -> Rung:
    """Train one model and score it, on one thread: other models have the other
    cores.
    """
    torch.set_num_threads(1)
    # Again: this may be a process of its own.
    disable_progress_bar()
    path = (
        train(config, corpus, out / "models", checkpoints=[config.steps])
        / f"step{config.steps}"
    )
    name = f"w{config.width}-d{config.n_layers}-s{config.steps}-{config.seed}"
    return Rung(
        name,
        str(path),
        config,
        held_out_loss(AutoModelForCausalLM.from_pretrained(path), corpus, config),
    )


def held_out_loss(model: nn.Module, corpus: Corpus, config: TrainingConfig) -> float:
    """Mean negative log-likelihood of held-out tokens given those before, in nats; the
    same windows for all models.
    """
    return mean_loss(
        model.eval(), windows_of(corpus.held_out_tokens, config.n_ctx, EVALUATED)
    )


def climbed(arguments: argparse.Namespace, corpus: Corpus) -> list[Rung]:
    """Return the whole ladder, `jobs` models at a time, the longest first."""
    configs = sorted(ladder(arguments), key=lambda c: -c.steps * c.n_layers * c.width)
    with (
        tlc.surveys.process_pool(arguments.jobs) as pool,
        tqdm(total=len(configs), desc="ladder") as bar,
    ):
        futures = [
            pool.submit(climb, config, corpus, arguments.out) for config in configs
        ]
        for future in futures:
            future.add_done_callback(lambda _: bar.update())
        return sorted(
            (future.result() for future in futures), key=lambda rung: rung.name
        )


def survey(planned: tlc.Survey, folder: Path, jobs: int) -> xarray.Dataset:
    """Return what the survey finds; finished units of an earlier run are kept."""
    with tlc.surveys.process_pool(jobs) as pool:
        return tlc.run_survey(planned, folder, pool, partial(tqdm, desc=folder.name))


@tlc.plots.off_screen()
def compare(
    data: xarray.Dataset, rungs: Sequence[Rung], arguments: argparse.Namespace
) -> str:
    """Return what coupling against the held-out loss gives, with subsets of equal width,
    depth and amount of text; keep tables and figures.
    """
    tokens = {
        rung.config.steps: rung.config.steps * rung.config.batch * rung.config.n_ctx
        for rung in rungs
    }
    rows = [(rung.name, rung.loss, tokens[rung.config.steps]) for rung in rungs]
    scores = pandas.DataFrame(rows, columns=["model", SCORE, "training_tokens"])
    write_atomically(
        arguments.out / "scores.csv", lambda path: scores.to_csv(path, index=False)
    )
    subsets = {f"width {width}": f"d_model == {width}" for width in arguments.widths}
    subsets |= {f"{depth} blocks": f"n_layers == {depth}" for depth in arguments.depths}
    subsets |= {
        f"{steps} steps": f"training_tokens == {n}" for steps, n in tokens.items()
    }
    result = generalization_study(
        data, scores, k=arguments.k[0], score=SCORE, controls=CONTROLS, subsets=subsets
    )
    table = result.table.round(5)
    write_atomically(
        arguments.out / "measured.csv", lambda path: table.to_csv(path, index=False)
    )
    text = json.dumps(result.to_dict(), indent=1)
    write_atomically(
        arguments.out / "generalization.json", lambda path: path.write_text(text)
    )
    for plot in (
        tlc.plots.plot_generalization,
        tlc.plots.plot_forest,
        tlc.plots.plot_k_sweep,
    ):
        keep(plot(result), arguments.out / f"{plot.__name__.removeprefix('plot_')}.png")
    # One of a kind says it: what is left out of one model is so of all.
    left_out = {
        name.partition(",")[0]: f"left out: {name}: {why}"
        for name, why in reversed(result.left_out.items())
    }
    return "\n".join(
        [
            str(result),
            result.slopes.to_string(float_format="{:.3g}".format, na_rep=""),
            *left_out.values(),
            *result.remarks,
        ]
    )


@tlc.plots.off_screen()
def redundancy(
    name: str, source: str, prompts: Sequence[Any], k: Sequence[int], out: Path
) -> str:
    """Drop, swap and merge the blocks of a model; return the rank correlations; keep the
    data and a figure.
    """
    data = tlc.redundancy.layer_redundancy(
        tlc.load_model(source, device="cpu"), prompts, k=k
    )
    write_atomically(out / f"redundancy-{name}.nc", data.to_netcdf)
    correlations = tlc.redundancy.redundancy_correlations(data)
    table = correlations[["n", "coupling", "block_influence"]].to_dataframe()
    for predictor in ("coupling", "block_influence"):
        table = table.join(
            correlations[f"{predictor}_interval"]
            .to_series()
            .unstack("bound")
            .add_prefix(f"{predictor} ")
        )
    keep(
        tlc.plots.plot_redundancy(data, correlations, k=k[0]),
        out / f"redundancy-{name}.png",
    )
    said = (
        f"{name}: Spearman's ρ of the change in loss over layers, 95 % intervals over "
        f"prompts\n{table.to_string(float_format='{:+.2f}'.format)}"
    )
    if data.sizes["layer"] < FEWEST_LAYERS:
        return said
    left = given_depth(data, k[0]).to_string(float_format="{:+.3f}".format)
    return (
        f"{said}\n{name}: what is left of ρ with coupling, k = {k[0]}, given the distance "
        f"from the middle, or block influence\n{left}"
    )


def given_depth(data: xarray.Dataset, k: int) -> pandas.DataFrame:
    """Return how far coupling goes with the change in loss beyond depth and influence.

    Cost and coupling may both follow depth, and neighbouring layers are alike, so that
    n layers are fewer than n independent ones.

    Columns, for each change: Spearman's `rho` of means over prompts with coupling;
    `p_shift`, the share of circular shifts of coupling along the layers, the unshifted
    one among them, whose |ρ| is as large; and partial ρ with its p, given the distance
    from the middle of the model, and given block influence.
    """
    rows = []
    for change in ("dropped", "swapped", "merged"):
        costs, couplings, influences = change_and_predictors(data, change)
        cost = costs.mean(0)
        coupling = couplings[data["k"].values.tolist().index(k)].mean(0)
        shifted = [
            rank_correlation_given(np.roll(coupling, shift), cost)[0]
            for shift in range(len(cost))
        ]
        # Rounding may part the unshifted one from itself.
        is_as_large = np.abs(shifted) >= abs(shifted[0]) - 1e-12
        row = {"change": change, "rho": shifted[0], "p_shift": is_as_large.mean()}
        controls = {
            "middle": np.abs(np.arange(len(cost)) - (len(cost) - 1) / 2),
            "influence": influences.mean(0),
        }
        for name, control in controls.items():
            rho, p = rank_correlation_given(coupling, cost, control)
            row |= {f"given_{name}": rho, f"p_{name}": p}
        rows.append(row)
    return pandas.DataFrame(rows).set_index("change")


def rank_correlation_given(
    x: np.ndarray, y: np.ndarray, *controls: np.ndarray
) -> tuple[float, float]:
    """Return Spearman's ρ of x and y, partial given the controls, and its p by t."""
    ranks = stats.rankdata(np.stack([x, y]), axis=1).T
    columns = [np.ones(len(x)), *(stats.rankdata(control) for control in controls)]
    others = np.stack(columns, 1)
    left = ranks - others @ np.linalg.lstsq(others, ranks)[0]
    rho = float(np.corrcoef(left.T)[0, 1])
    freedom = len(x) - 2 - len(controls)
    t = rho * np.sqrt(freedom / max(1 - rho**2, np.finfo(float).tiny))
    return rho, float(2 * stats.t.sf(abs(t), freedom))


def keep(drawn: Axes | Any, path: Path) -> None:
    """Save a figure, or the one that these Axes are in."""
    figure = getattr(drawn, "figure", drawn)
    print(
        "wrote", write_atomically(path, partial(figure.savefig, dpi=120, format="png"))
    )


def report_of_table1() -> str:
    """Return what the columns of the paper's Table 1 say about its scores: coupling
    itself is not in it.
    """
    paper = paper_table1()
    lines = ["the paper's Table 1: score on one column at a time"]
    for column in (
        "params_billion",
        "log10(params_billion)",
        "n_layers",
        "d_model",
        "training_tokens",
    ):
        fit = linear_fit(paper, column, "score")
        lines.append(
            f"  {column}: slope {fit.slope:.3g}, R² = "
            f"{fit.r_squared:.3f}, p = {fit.p:.2g}, n = {fit.n}"
        )
    controlled = linear_fit(
        paper, "log10(params_billion)", "score", controls=["n_layers", "d_model"]
    )
    numbers = (
        f"partial R² = {controlled.r_squared:.3f}, p = {controlled.p:.2g}, VIF = "
        f"{controlled.vif:.1f}"
    )
    lines.append(f"  log10(params_billion) with depth and width held fixed: {numbers}")
    return "\n".join(lines)


@tlc.plots.off_screen()
def survey_smollm2(arguments: argparse.Namespace) -> str:
    """Return the coupling of SmolLM2 on benchmark prompts by task; with a file of
    prompts, its blocks are changed as well.
    """
    said = []
    if arguments.prompts is not None:
        of_file = tlc.load_prompts(arguments.prompts)
        prompts = tlc.prompts.prompts_per_task(of_file, arguments.per_task)
        changed = tlc.prompts.prompts_per_task(of_file, 2)
        said.append(
            redundancy(
                EMBEDDED_MODEL, EMBEDDED_MODEL, changed, K_SMOLLM2, arguments.out
            )
        )
    else:
        try:
            prompts = tlc.load_prompts("open_llm_leaderboard", 6 * arguments.per_task)
        except OSError as error:
            return f"SmolLM2 is left out: {error}"
    planned = tlc.Survey(
        [EMBEDDED_MODEL],
        prompts,
        settings=tlc.Settings(k=K_SMOLLM2),
        prompts_per_unit=30,
    )
    means = task_means(survey(planned, arguments.out / "smollm2", arguments.jobs))
    keep(tlc.plots.plot_task_means(means), arguments.out / "smollm2-tasks.png")
    said.append(means.to_string(float_format="{:.3f}".format))
    return "\n".join(said)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--text",
        type=Path,
        help="what to learn; the standard library's source by default",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSONL file for SmolLM2; six test sets of the hub by default",
    )
    return parser.parse_args(argv)


def study(arguments: argparse.Namespace) -> None:
    """Train, score, survey, compare."""
    corpus = build_corpus(read_documents(arguments.text), arguments.vocabulary)
    prompts = passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    rungs = climbed(arguments, corpus)
    settings = tlc.Settings(k=tuple(arguments.k), window=3)
    planned = tlc.Survey(
        {rung.name: rung.path for rung in rungs},
        prompts,
        settings=settings,
        device="cpu",
    )
    data = survey(planned, arguments.out / "survey", arguments.jobs)
    best = min(rungs, key=lambda rung: (-rung.config.n_layers, rung.loss))
    changed = prompts[:CHANGED]
    parts = [
        partial(compare, data, rungs, arguments),
        partial(redundancy, best.name, best.path, changed, arguments.k, arguments.out),
        report_of_table1,
    ]
    if arguments.per_task:
        parts.append(partial(survey_smollm2, arguments))
    report = ""
    for part in parts:
        said = part()
        print(said, flush=True)
        report += said + "\n"
    write_atomically(arguments.out / "report.txt", lambda path: path.write_text(report))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; bad input is one line and exit status 2."""
    arguments = arguments_of(argv)
    disable_progress_bar()
    try:
        with output_folder(arguments.out):
            study(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
