"""Does coupling rise with width, or with the learning rate? Widths and rates crossed,
compared where losses are equal.

    python demos/studies/capacity.py --out out/study-capacity
    python demos/studies/capacity.py --out out/study-capacity-small --small

The paper finds more coupling in models that generalize better, which are also larger
and trained longer. Here coupling surges in the first steps of training and falls
afterwards; where a model is on that curve says more about its coupling than its size.
So models of several widths learn one text (the standard library's source), and each is
measured where its held-out loss falls to a mark: on the way from the loss of counting
tokens (unigram) to that of counting pairs (bigram), there, and below, interpolated
between the checkpoints around it. Wide models are usually trained at a lower rate, so
that width and rate are one variable. Here every width is trained at every rate, held
constant after a warm-up, from several seeds, and two questions have an answer each:
what does width do at one rate, and how far does coupling move with the rate while the
loss stands still? A model that never gets to a mark is named.

What else differs between the groups: at a higher rate a mark comes after fewer steps,
which is printed; wide models have more parameters in the embedding too. If width did
nothing, its slopes would hold 0; if loss alone fixed coupling, those of the rate would.

Models and measurements that are finished are kept: a second run does what is missing,
and the statistics anew. `--table` prints them from a folder's `measured.csv` alone.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas

from tl_coupling.files import output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from capacity_report import draw, print_report, tables_of
from loss_marks import LossMarks, counting_losses, windows_of
from matched_losses import Run, Study, all_runs, sizes_of, table_of, write

OPTIONS: list[tuple[str, Any, str]] = [
    (
        "out",
        Path("out/study-capacity"),
        "folder for models, measurements, statistics, figures",
    ),
    ("widths", [32, 64, 128], "of the models"),
    ("learning-rates", [1e-3, 2e-3, 4e-3, 8e-3], "constant after the warm-up"),
    ("n-layers", 4, "blocks"),
    ("seeds", 5, "models of each width and rate"),
    ("steps", 2500, "of training at most: it is over when the last mark is reached"),
    ("warmup", 50, "steps"),
    ("weight-decay", 0.1, "AdamW's"),
    ("vocabulary", 300, "entries of the tokenizer"),
    ("n-ctx", 64, "tokens in a window and a passage"),
    ("batch", 8, "windows in a step"),
    ("windows", 32, "held-out windows that the loss is taken on"),
    ("passages", 8, "held-out passages that are measured"),
    (
        "between",
        [0.5, 0.75],
        "marks on the way from the unigram's to the bigram's loss",
    ),
    ("below", [0.2], "marks below the bigram's loss, in nats"),
    ("k", [8], "singular vectors"),
    ("share", [0.125], "singular vectors as a share of the width"),
    ("jobs", os.cpu_count() or 1, "models at a time, with one thread each"),
]
# The marks are reached soon.
SMALL = {
    "widths": [16, 32],
    "learning_rates": [4e-3, 1e-2],
    "n_layers": 2,
    "seeds": 2,
    "steps": 200,
    "passages": 2,
    "between": [0.5],
    "below": [-0.1],
    "k": [4],
}


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    parser = small.parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, SMALL)


def configs_of(arguments: argparse.Namespace) -> list[small.TrainingConfig]:
    """Every width with every rate; no seed twice, so that models are independent.

    Raises:
        ValueError: an option out of range.
    """
    if min(arguments.seeds, arguments.jobs, arguments.steps) < 1:
        raise ValueError("`--seeds`, `--jobs` and `--steps` must be at least 1")
    for name in ("widths", "learning_rates"):
        values = getattr(arguments, name)
        if len(set(values)) < 2:
            option = name.replace("_", "-")
            raise ValueError(f"`--{option}` wants at least two, got {values}")
    if arguments.n_layers < 2:
        raise ValueError(
            "`--n-layers` must be at least 2: coupling is between blocks, got "
            f"{arguments.n_layers}"
        )
    shared = ("n_layers", "steps", "warmup", "weight_decay", "vocabulary", "n_ctx")
    base = {name: getattr(arguments, name) for name in (*shared, "batch")}
    grid = product(arguments.widths, arguments.learning_rates, range(arguments.seeds))
    return [
        small.TrainingConfig(
            **base,
            width=width,
            n_heads=max(1, width // 32),
            learning_rate=rate,
            seed=seed,
        )
        for seed, (width, rate, _) in enumerate(grid)
    ]


def marks_of(
    counting: dict[str, float], between: Sequence[float], below: Sequence[float]
) -> dict[str, float]:
    """Losses by name, from high to low.

    Raises:
        ValueError: a mark between that is not.
    """
    if not all(0 < share < 1 for share in between):
        raise ValueError(f"`--between` must lie in (0, 1), got {between}")
    unigram = counting["unigram"]
    bigram = counting["bigram"]
    marks = {
        f"{share:.0%} of the way": unigram + share * (bigram - unigram)
        for share in between
    }
    marks |= {"bigram": bigram} | {
        f"bigram {'−' if nats > 0 else '+'} {abs(nats):g}": bigram - nats
        for nats in below
    }
    return dict(sorted(marks.items(), key=lambda mark: -mark[1]))


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    configs = configs_of(arguments)
    sizes = sizes_of(arguments.k, arguments.share, arguments.widths)
    corpus = small.build_corpus(
        small.read_documents(arguments.text), arguments.vocabulary
    )
    windows = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.windows)
    marks = marks_of(
        counting_losses(corpus.tokens, windows, arguments.vocabulary),
        arguments.between,
        arguments.below,
    )
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    at = LossMarks(tuple(marks.values()), {"held_out": windows}, "held_out", stops=True)
    runs = [
        Run(config, corpus, at, {"learning_rate": config.learning_rate})
        for config in configs
    ]
    with output_folder(arguments.out) as out:
        shared = Study(tuple(marks), sizes, tuple(prompts), out)
        measurements = all_runs(runs, shared, arguments.jobs)
        table = table_of(measurements)
        tables = tables_of(table)
        print_report(tables)
        paths = write(out, measurements, {"measured": table, **tables})
        save = partial(draw(table).savefig, dpi=90, format="png")
        paths.append(write_atomically(out / "capacity.png", save))
    print(*paths, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        table = pandas.read_csv(arguments.table / "measured.csv")
        return small.status_of(lambda: print_report(tables_of(table)))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
