"""The control of `capacity.py`: coupling at one held-out loss of models whose learning
rate was annealed to 0 when they got there, beside those that were at the full rate.

    python demos/studies/capacity_annealed.py --out out/study-capacity
    python demos/studies/capacity_annealed.py --table demos/studies/results/capacity

In `capacity.py` all models are at their full rate where they are measured, and coupling
differs by the rate. A model at a high rate is noisier: were it annealed, both its loss
and its coupling might be those of a model of a low rate. So models of one width are
trained again from the same weights, on the same windows in the same order, at the
lowest and the highest rate, with a cosine to 0. It ends after shares of the steps that
the model took to the bigram's loss at the full rate, and coupling at the end is
interpolated between the two ends whose losses lie around that loss.

If the rate at the moment of measuring made the difference, annealed models of both rates
would have the same coupling. It needs `measured.csv` of `capacity.py` in its folder,
and writes `annealed.csv` beside it. Runs that are finished are kept. Ten minutes of one
core.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas

from tl_coupling.files import output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from capacity import OPTIONS, SMALL, configs_of
from loss_marks import LossMarks, counting_losses, windows_of
from matched_losses import END, Run, Study, all_runs, sizes_of, table_of
from paths import interval

MARK = "bigram"
WIDTH = 64
# A cosine is at half the rate on average, and takes up to twice the steps.
SHARES = (0.5, 0.65, 0.8, 1.1, 1.5, 2.0)
N_SEEDS = 3
MODEL = ["learning_rate", "seed", "size"]
# In nats, by which the bigram's loss may differ from that of the first study.
SAME_LOSS = 0.005


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of `capacity.py`, and those of this control."""
    options = [
        *OPTIONS,
        ("width", WIDTH, "of the models that are annealed"),
        ("shares", list(SHARES), "of the steps, after which the rate is 0"),
        ("n-annealed", N_SEEDS, "models of each rate"),
    ]
    parser = small.parser_of(str(__doc__), options)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, {**SMALL, "width": 16, "n_annealed": 1})


def runs_of(
    arguments: argparse.Namespace, constant: pandas.DataFrame, corpus: small.Corpus
) -> list[Run]:
    """Return the annealed runs: the lowest and the highest rate, several ends each.

    Raises:
        ValueError: the bigram's loss is not that of the results that are there.
    """
    windows = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.windows)
    counted = counting_losses(corpus.tokens, windows, arguments.vocabulary)[MARK]
    at_mark = constant[constant["mark"] == MARK].drop_duplicates("run")
    there = at_mark["loss_held_out"].mean()
    if not abs(counted - there) < SAME_LOSS:
        raise ValueError(
            f"wanted the text of `measured.csv`, whose loss at the mark is {there:.3f}, "
            f"got a text with {counted:.3f}: run `capacity.py` on this text first"
        )
    steps = at_mark.set_index("seed")["step"]
    configs = {
        config.seed: config
        for config in configs_of(arguments)
        if config.width == arguments.width
    }
    # No mark on the way: only the end is measured.
    at_end = LossMarks((), {"held_out": windows}, "held_out")
    return [
        Run(
            replace(configs[seed], steps=round(share * steps[seed]), final_rate=0.0),
            corpus,
            at_end,
            {"learning_rate": configs[seed].learning_rate, "share": share},
        )
        for seed in compared_seeds(constant, arguments.width, arguments.n_annealed)
        for share in arguments.shares
    ]


def compared_seeds(constant: pandas.DataFrame, width: int, n: int) -> list[int]:
    """Return the first n seeds of the lowest and of the highest rate."""
    of_width = constant[constant["width"] == width]
    rates = of_width["learning_rate"]
    return [
        int(seed)
        for rate in (rates.min(), rates.max())
        for seed in sorted(of_width.loc[rates == rate, "seed"].unique())[:n]
    ]


def at_the_mark(annealed: pandas.DataFrame, loss: float) -> pandas.DataFrame:
    """Return each model's coupling where the annealed loss is that of the mark, linearly
    between the ends around it; NaN where it lies outside of them.

    Args:
        annealed: a row for each end of each model and size.
        loss: in nats.
    """
    rows = []
    for known, ends in annealed.groupby(MODEL):
        ends = ends.sort_values("loss_held_out")
        row = dict(zip(MODEL, known, strict=True))
        for column in ("value", "above_chance"):
            row[column] = np.interp(
                loss, ends["loss_held_out"], ends[column], left=np.nan, right=np.nan
            )
        rows.append(row)
    return pandas.DataFrame(rows)


def compared(
    constant: pandas.DataFrame, annealed: pandas.DataFrame
) -> pandas.DataFrame:
    """Return coupling of the same models at the mark, at the full rate and annealed."""
    of_coupling = constant[constant["measure"] == "coupling"]
    at_full_rate = of_coupling[of_coupling["mark"] == MARK]
    loss = float(at_full_rate["loss_held_out"].mean())
    ends = annealed[annealed["measure"] == "coupling"]
    return at_the_mark(ends, loss).merge(
        at_full_rate[[*MODEL, "value", "above_chance"]],
        on=MODEL,
        suffixes=("_annealed", "_full_rate"),
    )


def print_report(constant: pandas.DataFrame, annealed: pandas.DataFrame) -> None:
    """Print both, paired by model."""
    table = compared(constant, annealed)
    print(f"coupling at the loss of the {MARK}, means over models [95 % t]")
    for (size, rate), models in table.groupby(["size", "learning_rate"]):
        print(f"\n{size}, learning rate {rate:g}: {len(models)} models")
        reached = models.dropna()
        if len(reached) < len(models):
            print(f"  {len(models) - len(reached)} have no ends on both sides of it")
        for column in ("value", "above_chance"):
            full, cooled = (
                reached[f"{column}_{how}"] for how in ("full_rate", "annealed")
            )
            said = ", ".join(
                f"{name} {interval(values)}"
                for name, values in (
                    ("full rate", full),
                    ("annealed", cooled),
                    ("difference", cooled - full),
                )
            )
            print(f"  {column.replace('_', ' ')}: {said}")


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report."""
    constant = pandas.read_csv(arguments.out / "measured.csv")
    corpus = small.build_corpus(
        small.read_documents(arguments.text), arguments.vocabulary
    )
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    runs = runs_of(arguments, constant, corpus)
    sizes = sizes_of(arguments.k, arguments.share, [arguments.width])
    with output_folder(arguments.out) as out:
        shared = Study((), sizes, tuple(prompts), out)
        table = table_of(all_runs(runs, shared, arguments.jobs))
        annealed = table[table["mark"] == END]
        print_report(constant, annealed)
        save = partial(annealed.to_csv, index=False)
        print(write_atomically(out / "annealed.csv", save))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        tables = [
            pandas.read_csv(arguments.table / f"{name}.csv")
            for name in ("measured", "annealed")
        ]
        return small.status_of(lambda: print_report(*tables))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
