"""Does coupling rise with capacity? Models of eight sizes, compared where their losses
are equal.

    python demos/studies/capacity.py --out out/study-capacity
    python demos/studies/capacity.py --out out/study-capacity-small --small

The paper finds more coupling in models that generalize better, which are also larger
and trained longer. Here coupling surges in the first steps of training and falls
afterwards; where a model is on that curve says more about its coupling than its size.
So models of several widths and depths learn one text (the standard library's source),
with a warm-up and a cosine, and each is measured when its held-out loss first falls to
a landmark: to that of counting tokens (unigram), on the way from there to that of
counting pairs (bigram), and below. With K singular vectors, and with as many for each
dimension of the stream. A model that never gets there is named.

Models and measurements that are finished are kept: a second run does what is missing,
and the statistics anew.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tl_coupling.files import output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from capacity_report import draw, print_report, tables_of
from loss_marks import LossMarks, counting_losses, windows_of
from matched_losses import Run, Study, all_runs, sizes_of, table_of, write

# Of which `--learning-rate` is; others learn at a rate that falls with the square root
# of the width.
WIDTH = 128
OPTIONS: list[tuple[str, Any, str]] = [
    (
        "out",
        Path("out/study-capacity"),
        "folder for models, measurements, statistics, figures",
    ),
    ("widths", [32, 64, 128, 256], "of the models"),
    (
        "steps",
        [3000, 2400, 1600, 1000],
        "of training, for each width; wide models learn from fewer",
    ),
    ("depths", [4, 12], "numbers of blocks"),
    ("seeds", 2, "models of each size"),
    (
        "learning-rate",
        3e-3,
        f"at width {WIDTH}; others: by one over the square root of the width",
    ),
    ("warmup", 50, "steps"),
    ("final-rate", 0.1, "where the cosine ends, as a share"),
    ("weight-decay", 0.1, "AdamW's"),
    ("vocabulary", 300, "entries of the tokenizer"),
    ("n-ctx", 64, "tokens in a window and a passage"),
    ("batch", 8, "windows in a step"),
    ("windows", 32, "held-out windows that the loss is taken on"),
    ("passages", 8, "held-out passages that are measured"),
    (
        "between",
        [0.25, 0.5, 0.75],
        "marks on the way from the unigram's to the bigram's loss",
    ),
    ("below", [0.2, 0.4], "marks below the bigram's loss, in nats"),
    ("k", [8], "singular vectors"),
    ("share", [0.125], "singular vectors as a share of the width"),
    ("jobs", os.cpu_count() or 1, "models at a time, with one thread each"),
]
# The landmarks are reached, little below them.
SMALL = {
    "widths": [16, 32, 64],
    "steps": [800, 600, 400],
    "depths": [2, 4],
    "seeds": 1,
    "passages": 3,
    "k": [4],
}


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    return small.parsed(small.parser_of(str(__doc__), OPTIONS), argv, SMALL)


def configs_of(arguments: argparse.Namespace) -> list[small.TrainingConfig]:
    """Every width with every depth; no seed twice, so that models are independent.

    Raises:
        ValueError: an option out of range.
    """
    if min(arguments.seeds, arguments.jobs, *arguments.steps) < 1:
        raise ValueError("`--seeds`, `--jobs` and `--steps` must be at least 1")
    if len(arguments.steps) != len(arguments.widths) or len(set(arguments.widths)) < 2:
        got = f"widths {arguments.widths} and steps {arguments.steps}"
        raise ValueError(
            f"wanted at least two widths and one number of steps for each, got {got}"
        )
    if min(arguments.depths) < 2:
        raise ValueError(
            f"`--depths` must be at least 2: coupling is between blocks, "
            f"got {min(arguments.depths)}"
        )
    shared = ("warmup", "final_rate", "weight_decay", "vocabulary", "n_ctx", "batch")
    base = {name: getattr(arguments, name) for name in shared}
    shapes = product(
        zip(arguments.widths, arguments.steps, strict=True),
        arguments.depths,
        range(arguments.seeds),
    )
    return [
        small.TrainingConfig(
            **base,
            width=width,
            n_layers=n_layers,
            n_heads=max(1, width // 32),
            steps=steps,
            learning_rate=arguments.learning_rate * (WIDTH / width) ** 0.5,
            seed=seed,
        )
        for seed, ((width, steps), n_layers, _) in enumerate(shapes)
    ]


def marks_of(
    counting: dict[str, float], between: Sequence[float], below: Sequence[float]
) -> dict[str, float]:
    """Losses by name, from high to low.

    Raises:
        ValueError: a mark between that is not, or one below that is not.
    """
    if not all(0 < share < 1 for share in between) or min(below, default=1) <= 0:
        raise ValueError(
            f"`--between` must lie in (0, 1) and `--below` above 0, got {between} and "
            f"{below}"
        )
    unigram = counting["unigram"]
    bigram = counting["bigram"]
    on_the_way = {
        f"{share:.0%} of the way": unigram + share * (bigram - unigram)
        for share in sorted(between)
    }
    return {"unigram": unigram, **on_the_way, "bigram": bigram} | {
        f"bigram − {nats:g}": bigram - nats for nats in sorted(below)
    }


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
    with output_folder(arguments.out) as out:
        shared = Study(tuple(marks), sizes, tuple(prompts), out)
        at = LossMarks(tuple(marks.values()), {"held_out": windows}, "held_out")
        measurements = all_runs(
            [Run(config, corpus, at, {}) for config in configs], shared, arguments.jobs
        )
        table = table_of(measurements)
        tables = tables_of(table, marks)
        print_report(tables, marks)
        paths = write(out, measurements, {"measured": table, **tables})
        save = partial(draw(table, marks).savefig, dpi=120, format="png")
        paths.append(write_atomically(out / "capacity.png", save))
    print(*paths, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
