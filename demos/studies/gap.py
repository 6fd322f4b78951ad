"""Does coupling go with generalization? One architecture, little text, compared where
training losses are equal.

    python demos/studies/gap.py --out out/study-generalization
    python demos/studies/gap.py --out out/study-generalization-small --small

Models of one size learn subsets of a text (the standard library's source) again and
again, with every weight decay and every rate of stochastic depth. The less text, and
the less regularised, the further held-out loss stays above training loss: this gap is
what generalization means here. It grows as the training loss falls, and so do models at
one step differ for a reason that is not how they generalize. Each is therefore measured
when its training loss, in eval mode, first falls to a mark; a model that never gets
there is named. The training loss is that on text which all models learn, so that the
gap holds the same difference in difficulty for all, and one mark is one stage of
learning.

Models and measurements that are finished are kept: a second run does what is missing,
and the statistics anew.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import tl_coupling as tlc
from tl_coupling.files import output_folder

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from gap_report import report
from loss_marks import LossMarks, counting_losses, windows_of
from matched_losses import Run, Study, all_runs, sizes_of

OPTIONS: list[tuple[str, Any, str]] = [
    (
        "out",
        Path("out/study-generalization"),
        "folder for models, measurements, statistics, figures",
    ),
    ("tokens", [16384, 65536, 262144], "of the subsets"),
    ("weight-decay", [0.01, 0.1, 0.5], "AdamW's"),
    ("stochastic-depth", [0.0, 0.1, 0.2], "rates at the last block"),
    ("seeds", 2, "models of each kind"),
    ("width", 64, "of the models"),
    ("n-layers", 4, "blocks"),
    ("steps", 2000, "of training at most: it is over when the last mark is reached"),
    ("learning-rate", 4e-3, "after the warm-up; then a cosine"),
    ("warmup", 50, "steps"),
    ("final-rate", 0.1, "where the cosine ends, as a share"),
    ("vocabulary", 300, "entries of the tokenizer"),
    ("n-ctx", 64, "tokens in a window and a passage"),
    ("batch", 8, "windows in a step"),
    (
        "windows",
        32,
        "windows that the training loss is taken on, and as many held-out ones",
    ),
    ("passages", 8, "held-out passages that are measured"),
    (
        "below",
        [0.0, 0.2, 0.4],
        "marks of the training loss, in nats below the held-out loss of counting pairs",
    ),
    ("k", [8], "singular vectors; the first is reported"),
    ("resamples", 2000, "draws of the bootstrap"),
    ("jobs", os.cpu_count() or 1, "models at a time, with one thread each"),
]
# Marks that are reached soon.
SMALL = {
    "tokens": [16384, 65536],
    "weight_decay": [0.01, 0.5],
    "stochastic_depth": [0.0, 0.2],
    "seeds": 1,
}
SMALL |= {
    "width": 32,
    "n_layers": 3,
    "steps": 400,
    "below": [-0.3, -0.1],
    "passages": 3,
    "resamples": 200,
}


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    return small.parsed(small.parser_of(str(__doc__), OPTIONS), argv, SMALL)


def configs_of(arguments: argparse.Namespace) -> list[tuple[int, small.TrainingConfig]]:
    """Every amount of text with every weight decay and rate; no seed twice, so that
    models are independent.

    Raises:
        ValueError: an option out of range.
    """
    if min(arguments.seeds, arguments.jobs, arguments.steps) < 1:
        raise ValueError("`--seeds`, `--jobs` and `--steps` must be at least 1")
    if arguments.n_layers < 2:
        raise ValueError(
            "`--n-layers` must be at least 2: coupling is between blocks, got "
            f"{arguments.n_layers}"
        )
    if (
        not all(0 <= rate < 1 for rate in arguments.stochastic_depth)
        or min(arguments.weight_decay) < 0
    ):
        raise ValueError(
            "`--stochastic-depth` must lie in [0, 1), and `--weight-decay` must not "
            "be negative"
        )
    names = (
        "width",
        "n_layers",
        "steps",
        "learning_rate",
        "warmup",
        "final_rate",
        "vocabulary",
        "n_ctx",
        "batch",
    )
    base = {name: getattr(arguments, name) for name in names} | {
        "n_heads": max(1, arguments.width // 32)
    }
    grid = product(
        arguments.tokens,
        arguments.weight_decay,
        arguments.stochastic_depth,
        range(arguments.seeds),
    )
    return [
        (
            n_tokens,
            small.TrainingConfig(
                **base, weight_decay=decay, stochastic_depth=rate, seed=seed
            ),
        )
        for seed, (n_tokens, decay, rate, _) in enumerate(grid)
    ]


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    configs = configs_of(arguments)
    sizes = sizes_of(arguments.k, [], [arguments.width])
    corpus = small.build_corpus(
        small.read_documents(arguments.text), arguments.vocabulary
    )
    held_out = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.windows)
    bigram = counting_losses(corpus.tokens, held_out, arguments.vocabulary)["bigram"]
    marks = {
        f"training loss {bigram - nats:.2f}": bigram - nats
        for nats in sorted(arguments.below)
    }
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    subsets = {
        n_tokens: corpus.subset(n_tokens) for n_tokens in sorted(set(arguments.tokens))
    }
    # Text that all models learn: were it another for each amount, one mark would not be
    # one stage of learning.
    learned = windows_of(
        subsets[min(subsets)].tokens, arguments.n_ctx, arguments.windows
    )
    at = LossMarks(
        tuple(marks.values()),
        {"training": learned, "held_out": held_out},
        "training",
        stops=True,
    )
    runs = [
        Run(config, subsets[n_tokens], at, known_of(n_tokens, config))
        for n_tokens, config in configs
    ]
    with output_folder(arguments.out) as out:
        measurements = all_runs(
            runs, Study(tuple(marks), sizes, tuple(prompts), out), arguments.jobs
        )
        print(f"held-out loss of counting pairs: {bigram:.3f} nats")
        with tlc.plots.off_screen():
            paths = report(measurements, list(marks), out, arguments.resamples)
    print(*paths, sep="\n")


def known_of(n_tokens: int, config: small.TrainingConfig) -> dict[str, float | str]:
    """Return what a model's rows say of it. Models that differ in their seed alone are
    of one family.
    """
    family = f"{n_tokens} tokens, decay {config.weight_decay:g}, drop {config.stochastic_depth:g}"
    regularisation = {
        "weight_decay": config.weight_decay,
        "stochastic_depth": config.stochastic_depth,
    }
    return {"n_tokens": n_tokens, **regularisation, "family": family}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
