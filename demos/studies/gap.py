"""Does coupling go with generalization? One architecture, little text, compared where
training losses are equal.

    python demos/studies/gap.py --out out/study-generalization
    python demos/studies/gap.py --out out/study-generalization-small --small

Models of one size learn subsets of a text (the standard library's source) again and
again. Generalization means here how far the held-out loss stays above the training
loss, taken in eval mode. This gap grows as the training loss falls, so that models are
compared where their training loss falls to a mark; what is measured is interpolated to
it. A model that never gets there is named.

What moves the gap must differ between models of one text, or its effect is one of the
text. So each subset is learned alone and mixed with shares of other text, which narrows
the gap on the same subset. Each share is learned at each of several rates, constant
after a short warm-up, so that the number of steps to a mark is not the gap by another
name. There are several subsets for each amount of text; none shares a token with
another, and they are the clusters. Every slope is within subsets (a constant for each).
The step is a covariate, in octaves, and how much it inflates the variance is printed.

Before the other subsets are learned, the first of each amount say what slope the whole
study could see. If coupling went with the gap, the share would move both, and the gap
would have a slope on coupling beside the step and the rate; if not, the share would
move the gap alone. What else differs with the share: the steps to a mark, and how
varied the text is.

Models and measurements that are finished are kept: a second run does what is missing,
and the statistics anew. `--table` prints them from a folder's `measured.csv` alone.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import torch

from tl_coupling.files import output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from gap_report import draw, effects, models_of, power_of, report_of
from loss_marks import LossMarks, counting_losses, windows_of
from matched_losses import Run, Study, all_runs, sizes_of, table_of, write

# How often a subset comes for the other text beside it to come once.
REPEATS = 8
OPTIONS: list[tuple[str, Any, str]] = [
    (
        "out",
        Path("out/study-generalization"),
        "folder for models, measurements, statistics, figures",
    ),
    ("tokens", [4096, 8192, 16384], "of the subsets"),
    ("subsets", 4, "of each amount, which share no text"),
    ("other-text", [0.0, 0.3, 0.6], "shares of what is learned beside the subset"),
    ("learning-rates", [2e-3, 4e-3], "each with each share"),
    ("width", 48, "of the models"),
    ("n-layers", 4, "blocks"),
    ("steps", 1000, "of training at most: it is over when the last mark is reached"),
    ("warmup", 20, "steps"),
    ("weight-decay", 0.1, "AdamW's"),
    ("vocabulary", 300, "entries of the tokenizer"),
    ("n-ctx", 64, "tokens in a window and a passage"),
    ("batch", 8, "windows in a step"),
    (
        "windows",
        24,
        "windows of each subset that the training loss is taken on, and as many "
        "held-out ones",
    ),
    ("passages", 6, "held-out passages that are measured"),
    (
        "below",
        [-0.2, 0.0],
        "marks of the training loss, in nats below the held-out loss of counting pairs",
    ),
    ("k", [8], "singular vectors"),
    ("draws", 500, "of the simulated power"),
    ("jobs", os.cpu_count() or 1, "models at a time, with one thread each"),
]
# Marks that are reached soon.
SMALL = {
    "tokens": [1024, 2048],
    "subsets": 2,
    "other_text": [0.0, 0.5],
    "learning_rates": [5e-3, 1e-2],
    "width": 16,
    "n_layers": 2,
    "steps": 100,
    "below": [-0.9],
    "windows": 8,
    "passages": 2,
    "k": [4],
    "draws": 50,
}


@dataclass(frozen=True)
class Cell:
    """A kind of model: the subset, by its amount and number, and how it is learned."""

    n_tokens: int
    subset: int
    other_text: float
    config: small.TrainingConfig

    @property
    def known(self) -> dict[str, float | str]:
        """What the model's rows say of it."""
        return {
            "n_tokens": self.n_tokens,
            "subset": f"{self.n_tokens} tokens, {self.subset}",
            "other_text": self.other_text,
            "learning_rate": self.config.learning_rate,
        }


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    parser = small.parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, SMALL)


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Every subset with every share of other text and every rate; no seed twice, so
    that models are independent. The first subset of each amount comes first.

    Raises:
        ValueError: an option out of range.
    """
    if min(arguments.subsets, arguments.jobs, arguments.steps) < 1:
        raise ValueError("`--subsets`, `--jobs` and `--steps` must be at least 1")
    if arguments.n_layers < 2:
        raise ValueError(
            "`--n-layers` must be at least 2: coupling is between blocks, got "
            f"{arguments.n_layers}"
        )
    if not all(0 <= share < 1 for share in arguments.other_text):
        raise ValueError(
            f"`--other-text` must lie in [0, 1), got {arguments.other_text}"
        )
    names = ("width", "n_layers", "steps", "warmup", "weight_decay")
    names += ("vocabulary", "n_ctx", "batch")
    base = {name: getattr(arguments, name) for name in names}
    base["n_heads"] = max(1, arguments.width // 32)
    grid = product(
        range(arguments.subsets),
        arguments.tokens,
        arguments.other_text,
        arguments.learning_rates,
    )
    return [
        Cell(
            n_tokens,
            subset,
            share,
            small.TrainingConfig(**base, learning_rate=rate, seed=seed),
        )
        for seed, (subset, n_tokens, share, rate) in enumerate(grid)
    ]


def subsets_of(
    corpus: small.Corpus, amounts: Sequence[int], n_subsets: int
) -> tuple[dict[tuple[int, int], small.Corpus], int]:
    """Subsets by amount and number, one after the other in the text's random order, and
    the first piece after them.
    """
    subsets = {}
    first = 0
    for n_tokens, i in product(amounts, range(n_subsets)):
        subsets[n_tokens, i] = corpus.subset(n_tokens, first)
        first += n_tokens // small.PIECE
    return subsets, first


def mixed(
    subset: small.Corpus, corpus: small.Corpus, first: int, share: float
) -> small.Corpus:
    """Return a subset, repeated, with other text from the piece `first` on, which is
    `share` of the whole.
    """
    if not share:
        return subset
    n_other = round(REPEATS * len(subset.tokens) * share / (1 - share))
    other = corpus.subset(n_other, first)
    return replace(
        subset,
        tokens=torch.cat([subset.tokens.repeat(REPEATS), other.tokens]),
        digest=f"{subset.digest}+{other.digest}",
    )


def runs_of(
    cells: Sequence[Cell],
    corpus: small.Corpus,
    marks: Sequence[float],
    arguments: argparse.Namespace,
) -> list[Run]:
    """Return what is trained in each cell; training losses are on the subset alone."""
    held_out = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.windows)
    subsets, first = subsets_of(corpus, arguments.tokens, arguments.subsets)
    runs = []
    for cell in cells:
        subset = subsets[cell.n_tokens, cell.subset]
        learned = windows_of(subset.tokens, arguments.n_ctx, arguments.windows)
        at = LossMarks(
            tuple(marks),
            {"training": learned, "held_out": held_out},
            "training",
            stops=True,
        )
        text = mixed(subset, corpus, first, cell.other_text)
        runs.append(Run(cell.config, text, at, cell.known))
    return runs


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    cells = cells_of(arguments)
    sizes = sizes_of(arguments.k, [], [arguments.width])
    corpus = small.build_corpus(
        small.read_documents(arguments.text), arguments.vocabulary
    )
    held_out = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.windows)
    bigram = counting_losses(corpus.tokens, held_out, arguments.vocabulary)["bigram"]
    losses = [bigram - nats for nats in sorted(arguments.below)]
    marks = [f"training loss {loss:.2f}" for loss in losses]
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    runs = runs_of(cells, corpus, losses, arguments)
    with output_folder(arguments.out) as out:
        shared = Study(tuple(marks), sizes, tuple(prompts), out)
        n_first = len(runs) // arguments.subsets
        first = all_runs(runs[:n_first], shared, arguments.jobs)
        models_of_first = models_of(table_of(first))
        print(power_of(models_of_first, arguments.subsets, arguments.draws), flush=True)
        others = all_runs(runs[n_first:], shared, arguments.jobs)
        measurements = [*first, *others]
        table = models_of(table_of(measurements))
        report = report_of(table, arguments.draws)
        print(report)
        tables = {"measured": table, "effects": effects(table)}
        paths = write(out, measurements, tables)
        paths.append(
            write_atomically(
                out / "report.txt", lambda path: path.write_text(report + "\n")
            )
        )
        save = partial(draw(table).savefig, dpi=90, format="png")
        paths.append(write_atomically(out / "gap.png", save))
    print(*paths, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        table = pandas.read_csv(arguments.table / "measured.csv")
        return small.status_of(lambda: print(report_of(table, arguments.draws)))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
