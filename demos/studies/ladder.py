"""Does coupling go with generalization? A ladder of small models trained here, and a real model on real prompts.

    python demos/studies/ladder.py --out out/ladder
    python demos/studies/ladder.py --out out/ladder --prompts prompts.jsonl --per-task 20

Small Pythias of several widths, depths, amounts of text and seeds learn the standard library's own source; each is
scored by its loss on text it has not seen, and a survey measures the coupling of its layers on held-out passages. Then
coupling is held against the loss in every way that `tl-coupling generalization` knows, and blocks are dropped, swapped
and merged to see whether coupled ones are redundant. The paper's Table 1 is regressed on its own columns: what size
alone says about the score there. Last, SmolLM2 is surveyed on benchmark prompts: those of `--prompts`, or six test sets
from the hub where it can be reached; with a file, its blocks are changed too.

Models and surveys that are finished are kept: a second run does what is missing of them, and the comparisons anew.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import torch
import xarray
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from small_models import Corpus, TrainingConfig, build_corpus, passages, read_documents, train
from tl_coupling.cli import app
from tl_coupling.files import output_folder, write_atomically
from tl_coupling.generalization import linear_fit
from tl_coupling.models import EMBEDDED_MODEL

# Lower is better.
SCORE = "held_out_loss"
# Windows of held-out text that a model is scored on.
EVALUATED = 64
# Prompts on which the blocks of one model are dropped, swapped and merged.
CHANGED = 8


@dataclass(frozen=True)
class Rung:
    """A trained model of the ladder: its name, where it is, and its score."""

    name: str
    path: str
    config: TrainingConfig
    loss: float


def ladder(arguments: argparse.Namespace) -> list[TrainingConfig]:
    """All widths by depths by numbers of steps by seeds; a seed of its own for each, so that none share their text."""
    shape = product(arguments.widths, arguments.depths, arguments.steps, range(arguments.seeds))
    base = TrainingConfig(vocabulary=arguments.vocabulary, n_ctx=arguments.n_ctx)
    return [
        replace(base, width=width, n_heads=max(1, width // 32), n_layers=depth, steps=steps, seed=seed)
        for seed, (width, depth, steps, _) in enumerate(shape)
    ]


def climb(config: TrainingConfig, corpus: Corpus, out: Path) -> Rung:
    """Train one model, score it. One thread: other models have the other cores."""
    torch.set_num_threads(1)
    # Once more: this may be a process of its own.
    disable_progress_bar()
    path = train(config, corpus, out / "models", checkpoints=[config.steps]) / f"step{config.steps}"
    name = f"w{config.width}-d{config.n_layers}-s{config.steps}-{config.seed}"
    return Rung(name, str(path), config, held_out_loss(AutoModelForCausalLM.from_pretrained(path), corpus, config))


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, config: TrainingConfig) -> float:
    """Mean negative log-likelihood of held-out tokens given those before, in nats; the same windows for all models."""
    ids = [i for text in corpus.held_out for i in corpus.tokenizer(text, add_special_tokens=False)["input_ids"]]
    n_windows = len(ids) // config.n_ctx
    windows = torch.tensor(ids[: n_windows * config.n_ctx]).view(n_windows, config.n_ctx)
    chosen = windows[torch.linspace(0, n_windows - 1, min(EVALUATED, n_windows)).long()]
    logits = model.eval()(chosen).logits[:, :-1]
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten()))


def climbed(arguments: argparse.Namespace, corpus: Corpus) -> list[Rung]:
    """The whole ladder, `jobs` models at a time, the longest first."""
    configs = sorted(ladder(arguments), key=lambda c: -c.steps * c.n_layers * c.width)
    bar: dict[str, Any] = {"total": len(configs), "desc": "ladder", "dynamic_ncols": True}
    with tlc.surveys.process_pool(arguments.jobs) as pool, tqdm(**bar) as work:
        futures = [pool.submit(climb, config, corpus, arguments.out) for config in configs]
        for future in futures:
            future.add_done_callback(lambda _: work.update())
        return sorted((future.result() for future in futures), key=lambda rung: rung.name)


def survey(rungs: Sequence[Rung], prompts: list[str], arguments: argparse.Namespace) -> Path:
    """Measure the coupling of every rung; the folder of the survey."""
    folder = arguments.out / "survey"
    settings = tlc.Settings(k=tuple(arguments.k), window=3)
    asked = tlc.Survey({rung.name: rung.path for rung in rungs}, prompts, settings=settings, device="cpu")
    with tlc.surveys.process_pool(arguments.jobs) as pool:
        tlc.run(asked, folder, pool, partial(tqdm, desc="survey", dynamic_ncols=True))
    return folder


def write_scores(rungs: Sequence[Rung], out: Path) -> Path:
    """The CSV file that `tl-coupling generalization` takes."""
    rows = [
        {
            "model": rung.name,
            SCORE: rung.loss,
            "training_tokens": rung.config.steps * rung.config.batch * rung.config.n_ctx,
        }
        for rung in rungs
    ]
    return write_atomically(out / "scores.csv", lambda path: pandas.DataFrame(rows).to_csv(path, index=False))


def generalization_command(folder: Path, scores: Path, arguments: argparse.Namespace) -> list[str]:
    """The command that compares coupling with the held-out loss, with subsets of equal size and equal text."""
    command = ["generalization", "--survey", folder, "--scores", scores, "--k", arguments.k[0]]
    command += ["--score-column", SCORE, "--out", arguments.out / "generalization"]
    tokens = {steps: steps * TrainingConfig().batch * arguments.n_ctx for steps in arguments.steps}
    subsets = [f"width {width}=d_model == {width}" for width in arguments.widths]
    subsets += [f"{depth} blocks=n_layers == {depth}" for depth in arguments.depths]
    subsets += [f"{steps} steps=training_tokens == {n}" for steps, n in tokens.items()]
    for subset in subsets:
        command += ["--subset", subset]
    for control in ("log10(n_parameters)", "n_layers", "d_model", "log10(training_tokens)"):
        command += ["--control", control]
    return [str(one) for one in command]


def redundancy(name: str, source: str, prompts: Sequence[Any], k: Sequence[int], out: Path, console: Console) -> None:
    """Drop, swap and merge the blocks of a model; print the rank correlations; keep the data and a figure."""
    model = tlc.load_model(source, device="cpu")
    bar = partial(tqdm, desc=f"redundancy of {name}", dynamic_ncols=True)
    data = tlc.redundancy.layer_redundancy(model, prompts, k=k, progress=bar)
    written = [write_atomically(out / f"redundancy-{name}.nc", data.to_netcdf)]
    table = Table(title=f"{name}: Spearman's ρ of the change in loss over layers, 95 % intervals over prompts")
    for column in ("change", "blocks", "n", *(f"with coupling, k = {one}" for one in k), "with block influence"):
        table.add_column(column)
    found = tlc.redundancy.redundancy_correlations(data)
    for change, blocks in product(found["change"].values, found["blocks"].values):
        here = found.sel(change=change, blocks=blocks)
        cells = [_with_interval(here.sel(k=one), "coupling") for one in k]
        table.add_row(change, blocks, str(int(here["n"])), *cells, _with_interval(here, "block_influence"))
    console.print(table)
    figure = tlc.plots.plot_redundancy(data, k=k[0])
    written.append(write_atomically(out / f"redundancy-{name}.png", partial(figure.savefig, dpi=120, format="png")))
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def _with_interval(found: xarray.Dataset, name: str) -> str:
    low, high = found[f"{name}_interval"].values
    return f"{float(found[name]):+.2f} ({low:+.2f} to {high:+.2f})"


def report_table1(console: Console) -> None:
    """What the columns of the paper's Table 1 say about its scores: coupling itself is not in it."""
    paper = tlc.generalization.paper_table1()
    columns = ["params_billion", "log10(params_billion)", "n_layers", "d_model", "training_tokens"]
    table = Table(title="the paper's Table 1: score on one column at a time")
    for heading in ("column", "models", "slope", "R²", "p"):
        table.add_column(heading, justify="left" if heading == "column" else "right")
    for column in columns:
        fit = linear_fit(paper, column, "score")
        table.add_row(column, str(fit.n), f"{fit.slope:.3g}", f"{fit.r_squared:.3f}", f"{fit.p:.2g}")
    held = tlc.generalization.partial_regression(paper, "score", "log10(params_billion)", ["n_layers", "d_model"])
    console.print(table)
    console.print(
        f"log10(params_billion) with depth and width held fixed: partial R² = {held.partial_r_squared:.3f}, "
        f"p = {held.p:.2g}, VIF = {held.vif:.1f}",
        highlight=False,
        soft_wrap=True,
    )


def embedded_command(arguments: argparse.Namespace) -> list[str]:
    """The command that surveys SmolLM2 on benchmark prompts."""
    command: list[Any] = ["survey", "--model", EMBEDDED_MODEL, "--prompts-per-unit", 30, "--workers", arguments.jobs]
    if arguments.prompts is None:
        command += ["--prompts", "open_llm_leaderboard", "--n", 6 * arguments.per_task]
    else:
        command += ["--prompts", arguments.prompts, "--per-task", arguments.per_task]
    return [str(one) for one in [*command, "--out", arguments.out / "smollm2"]]


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/ladder"), help="models, surveys, statistics, figures")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128], help="(default 32 64 128)")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 6], help="numbers of blocks (default 3 6)")
    parser.add_argument("--steps", type=int, nargs="+", default=[128, 512], help="of training (default 128 512)")
    parser.add_argument("--seeds", type=int, default=2, help="models of each kind (default 2)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="(default 2048)")
    parser.add_argument("--n-ctx", type=int, default=128, help="tokens in a window and a passage (default 128)")
    parser.add_argument("--passages", type=int, default=8, help="held-out passages of the survey (default 8)")
    parser.add_argument("--k", type=int, nargs="+", default=[5, 10, 20], help="singular vectors; figures: the first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--text", type=Path, help="what to learn; the standard library's source by default")
    parser.add_argument("--prompts", type=Path, help="JSONL file for SmolLM2; six test sets of the hub by default")
    parser.add_argument("--per-task", type=int, default=5, help="of these prompts for SmolLM2; 0: none (default 5)")
    return parser.parse_args(argv)


def commands(arguments: argparse.Namespace, console: Console) -> Iterator[list[str]]:
    """The study; what a command can do is yielded as one."""
    corpus = build_corpus(read_documents(arguments.text), arguments.vocabulary)
    prompts = passages(corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx)
    rungs = climbed(arguments, corpus)
    folder = survey(rungs, prompts, arguments)
    yield generalization_command(folder, write_scores(rungs, arguments.out), arguments)
    best = min(rungs, key=lambda rung: (-rung.config.n_layers, rung.loss))
    redundancy(best.name, best.path, prompts[:CHANGED], arguments.k, arguments.out, console)
    report_table1(console)
    if arguments.per_task:
        yield embedded_command(arguments)
    if arguments.per_task and arguments.prompts is not None:
        some = tlc.prompts.prompts_per_task(tlc.load_prompts(arguments.prompts), 2)
        redundancy(EMBEDDED_MODEL, EMBEDDED_MODEL, some, (10, 30), arguments.out, console)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, score, survey, compare."""
    arguments = arguments_of(argv)
    console = Console()
    disable_progress_bar()
    try:
        with output_folder(arguments.out):
            for command in commands(arguments, console):
                console.print(f"$ tl-coupling {' '.join(command)}", highlight=False, soft_wrap=True)
                try:
                    app(command, standalone_mode=False)
                except OSError as error:
                    if "--n" not in command or arguments.prompts is not None:
                        raise
                    # No hub: everything else is there.
                    console.print(f"SmolLM2 is left out: {error}", style="yellow", highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
