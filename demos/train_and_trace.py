"""A small language model trained here, and what its coupling does while it learns.

    python demos/train_and_trace.py --out out/training

A small Pythia (GPT-NeoX) learns the standard library's own source from scratch, on the
CPU, from several seeds; checkpoints are saved at log-spaced steps. Then every
checkpoint is measured on the same held-out passages: coupling of layers next to its
null, loss, shapes of trajectories. With a network, the same command traces a model
whose checkpoints were published:

    python demos/train_and_trace.py --model EleutherAI/pythia-160m --out out/pythia-160m

Finished work is kept: a second run trains and measures only what is missing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xarray
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import small_models as small
import tl_coupling as tlc
from tl_coupling.files import output_folder, write_atomically
from tl_coupling.models import ModelError
from tl_coupling.surveys import Settings, local_checkpoints, pythia_steps


@dataclass(frozen=True)
class Run:
    """A model's checkpoints, what they were measured on, and what came of it."""

    name: str
    prompts: tuple[str, ...]
    data: xarray.Dataset


def one_run(
    config: small.TrainingConfig,
    corpus: small.Corpus,
    prompts: list[str],
    settings: Settings,
    out: Path,
) -> Run:
    """Train from one seed, then measure every checkpoint."""
    torch.set_num_threads(1)
    # Again, because this may be a process of its own.
    disable_progress_bar()
    bar: dict[str, Any] = {
        "position": config.seed,
        "leave": False,
        "dynamic_ncols": True,
    }
    learning = partial(
        tqdm, desc=f"seed {config.seed}: train", total=config.steps, **bar
    )
    folder = small.train(config, corpus, out / "runs", learning)
    measuring = partial(tqdm, desc=f"seed {config.seed}: measure", **bar)
    options: dict[str, Any] = {
        "settings": settings,
        "folder": out / "sweeps" / folder.name,
    }
    data = tlc.checkpoint_sweep(
        folder, prompts=prompts, **options, device="cpu", progress=measuring
    )
    return Run(str(folder), tuple(prompts), data)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Short windows for the line-shape score, because a model of 6 blocks has few
    steps.
    """
    return Settings(k=tuple(arguments.k), window=3)


def runs_here(config: small.TrainingConfig, arguments: argparse.Namespace) -> list[Run]:
    """Return a run for each seed, `jobs` at a time."""
    corpus = small.build_corpus(small.read_documents(arguments.text), config.vocabulary)
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.prompts, config.n_ctx
    )
    configs = [replace(config, seed=config.seed + i) for i in range(arguments.seeds)]
    work = partial(
        one_run,
        corpus=corpus,
        prompts=prompts,
        settings=settings_of(arguments),
        out=arguments.out,
    )
    with small.parallel_map(arguments.jobs) as mapped:
        return list(mapped(work, configs))


def runs_published(arguments: argparse.Namespace) -> list[Run]:
    """Return the checkpoints of a hub model or of a local folder, on the same kind of
    passages.
    """
    from transformers import AutoTokenizer

    name = arguments.model
    is_local = Path(arguments.model).is_dir()
    source = next(iter(local_checkpoints(name).values())) if is_local else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"could not load the tokenizer of {name!r}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    prompts = small.passages(
        small.read_documents(arguments.text)[:: small.HELD_OUT],
        tokenizer,
        arguments.prompts,
        arguments.n_ctx,
    )
    steps = None if is_local else (0, *pythia_steps())
    options: dict[str, Any] = {
        "settings": settings_of(arguments),
        "folder": arguments.out / "sweep",
    }
    return [
        Run(
            name,
            tuple(prompts),
            tlc.checkpoint_sweep(name, steps, prompts, **options, progress=tqdm),
        )
    ]


def together(
    runs: Sequence[Run], config: small.TrainingConfig | None
) -> xarray.Dataset:
    """Return the runs along `seed`; a checkpoint that failed in one run is left out of
    all.
    """
    data = xarray.concat(
        [run.data for run in runs], "seed", join="inner", combine_attrs="drop_conflicts"
    )
    data = data.assign_coords(text=("prompt", list(runs[0].prompts)))
    if config is None:
        return data.assign_attrs(model=runs[0].name)
    model = (
        f"GPT-NeoX trained here: {config.n_layers} blocks of width "
        f"{config.width}, rate {config.learning_rate:g}"
    )
    data = data.assign_coords(seed=[config.seed + i for i in range(len(runs))])
    return data.assign_attrs(model=model, training=json.dumps(asdict(config)))


def rank_correlations(data: xarray.Dataset, k: int) -> dict[str, list[float]]:
    """Spearman's ρ of coupling and loss over checkpoints, for each seed: over all, up
    to the peak, and from it on.

    NaN where fewer than three checkpoints are left.
    """
    correlations: dict[str, list[float]] = {
        "all": [],
        "up to the peak": [],
        "from the peak on": [],
    }
    for seed in range(data.sizes["seed"]):
        means = data.isel(seed=seed).sel(k=k).mean("prompt").sortby("checkpoint")
        coupling = means["mean_coupling"].values
        loss = means["loss"].values
        peak = int(coupling.argmax())
        for name, part in zip(
            correlations, (slice(None), slice(peak + 1), slice(peak, None)), strict=True
        ):
            many = len(coupling[part]) > 2
            correlations[name].append(
                float(spearmanr(coupling[part], loss[part])[0])
                if many
                else float("nan")
            )
    return correlations


def report(data: xarray.Dataset, k: int, console: Console) -> None:
    """Coupling beside its null, loss and shape at every checkpoint; then the rank
    correlations.
    """
    means = data.sel(k=k).mean("prompt")
    null = float(means["null_coupling"].mean())
    table = Table(title=f"{data.attrs['model']}, k = {k}")
    for column in (
        "step",
        "loss",
        "coupling [range over seeds]",
        "null",
        "× null",
        "line-shape score",
    ):
        table.add_column(column, justify="right")
    for step in data["checkpoint"].values.tolist():
        here = means.sel(checkpoint=step)
        values = here["mean_coupling"].values
        loss = float(here["loss"].mean())
        shape = float(here["line_shape_score_all_tokens"].mean())
        coupling = f"{values.mean():.3f} [{values.min():.3f}, {values.max():.3f}]"
        table.add_row(
            str(step),
            f"{loss:.3f}",
            coupling,
            f"{null:.3f}",
            f"{values.mean() / null:.1f}",
            f"{shape:.2f}",
        )
    console.print(table)
    for name, of_seeds in rank_correlations(data, k).items():
        numbers = ", ".join(f"{rho:+.2f}" for rho in of_seeds)
        text = (
            f"rank correlation of coupling with loss, {name}, for each seed: {numbers}"
        )
        console.print(text, highlight=False, soft_wrap=True)


@tlc.plots.off_screen()
def draw(data: xarray.Dataset, run: Run, k: int, out: Path) -> list[Path]:
    """All figures; arcs between layers and trajectories are of the first run and passage,
    at four steps at most.
    """
    figures = {
        "emergence": tlc.plots.plot_emergence(data, k=k),
        "strip": tlc.plots.plot_coupling_strip(data, k=k),
    }
    figures["shapes"] = tlc.plots.plot_shapes(data)
    steps = data["checkpoint"].values.tolist()
    highest = data["mean_coupling"].sel(k=k).mean(["seed", "prompt"]).idxmax()
    drawn_steps = sorted({steps[0], steps[len(steps) // 2], int(highest), steps[-1]})
    arcs = Figure(figsize=(4.6, 3 * len(drawn_steps)), layout="constrained")
    for ax, step in zip(
        arcs.subplots(len(drawn_steps), 1, squeeze=False)[:, 0],
        drawn_steps,
        strict=True,
    ):
        local = Path(run.name).is_dir()
        source = (
            {"name": str(local_checkpoints(run.name)[step])}
            if local
            else {"name": run.name, "checkpoint": step}
        )
        traced = tlc.trace(tlc.load_model(**source, device="cpu"), run.prompts[0])
        tlc.plot_adjacency(tlc.depth_coupling(traced, k), ax=ax).set_title(
            f"step {step}"
        )
        figures[f"trajectories-step{step}"] = tlc.plot_trajectories(traced)
    figures["adjacency"] = arcs
    paths = [out / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        write_atomically(path, partial(figure.savefig, dpi=120, format="png"))
    return paths


def study(arguments: argparse.Namespace) -> None:
    """Train or load, measure, report, draw."""
    config = None if arguments.model else small.config_of(arguments)
    runs = runs_here(config, arguments) if config else runs_published(arguments)
    data = together(runs, config)
    console = Console()
    with output_folder(arguments.out) as out:
        path = write_atomically(
            out / "training.nc", partial(data.to_netcdf, engine="netcdf4")
        )
        report(data, arguments.k[0], console)
        written = [path, *draw(data, runs[0], arguments.k[0], out)]
    console.print("\n".join(map(str, written)), highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = small.training_parser(str(__doc__), "out/training", seeds=4, prompts=8)
    parser.add_argument(
        "--model",
        help="a hub name, or a folder of checkpoints, to trace instead of training",
    )
    parser.add_argument(
        "--k",
        type=int,
        nargs="+",
        default=[5, 10, 20],
        help="singular vectors; figures: the first",
    )
    arguments = parser.parse_args(argv)
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
