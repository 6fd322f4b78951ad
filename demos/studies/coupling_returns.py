"""Does coupling come back after its early fall?

    python demos/studies/coupling_returns.py --width 64 --out out/study-returns
    python demos/studies/coupling_returns.py --out out/study-returns-small --small

Coupling of small models rises and falls within 512 steps (`early_surge.py`). The paper's
first checkpoint comes after 268 million tokens, and from there on it sees a rise. Here
models are trained on for as long as there is time, at a constant rate after the warm-up,
and measured on held-out passages at log-spaced steps. Two seeds are pilots: they say
where the peak and the trough lie, and are not used again. On the other seeds the fall
and the rise are tested.

`coupling_returns.md` says what is compared, and which sentence each outcome earns; it
was committed before the models were trained.

All models are brought to one step before any goes on to the next, so that they end
alike. `--minutes` ends the study after the last step for which there is time. Weights,
the optimizer and what was measured are written every few minutes: an interrupted study
goes on where it was, with the same curve (to the bit on a CPU), and so does one that is
called again with more minutes. Each setting of width and depth has a table; what is
printed is of all settings in the folder, and `--table FOLDER` only prints.

On a GPU: `--device cuda`, and a text that is longer than the standard library's, because
a model of width 256 knows that one before the time is over: `--text FOLDER` of Python
modules and `--characters`.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from jaxtyping import Int
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from tl_coupling.files import output_folder, remove_left_overs, write_atomically
from tl_coupling.measures import mean_random_coupling, without_identity

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from coupling_returns_report import MAIN, PILOT, draw, print_report
from loss_marks import mean_loss, windows_of
from treatment import identity_share

OPTIONS: list[tuple[str, Any, str]] = [
    ("out", Path("out/study-returns"), "folder for models, curves, figures"),
    ("minutes", 180.0, "of this call, after which no further step is begun"),
    ("save-minutes", 3.0, "between two writings of a model's state"),
    ("device", "cpu", "of training and measuring: cpu or cuda"),
    ("characters", small.MAX_CHARACTERS, "of the text, at most"),
    ("little", 0, "tokens to learn from; 0 for the whole text"),
    ("pilots", 2, "seeds that say where the peak and the trough lie"),
    ("seeds", 6, "further seeds, on which the rise is tested"),
    ("first-seed", 0, "the first of all seeds"),
    ("width", 256, "of the models"),
    ("n-layers", 6, "blocks"),
    ("learning-rate", 2e-3, "constant after the warm-up"),
    ("warmup", 50, "steps"),
    ("weight-decay", 0.01, "AdamW's"),
    ("vocabulary", 2048, "entries of the tokenizer"),
    ("n-ctx", 128, "tokens in a window and a passage"),
    ("batch", 16, "windows in a step"),
    ("steps", 2**15, "at most"),
    ("per-octave", 4, "measurements while the steps double"),
    ("windows", 128, "of each text on which a loss is taken"),
    ("passages", 16, "held-out passages that are measured, at their last token"),
    ("k", 5, "singular vectors"),
    ("jobs", os.cpu_count() or 1, "models at a time, one thread each"),
]
SMALL = {
    "pilots": 1,
    "seeds": 3,
    "width": 16,
    "n_layers": 3,
    "vocabulary": 300,
    "n_ctx": 32,
    "warmup": 4,
    "steps": 512,
    "per_octave": 2,
    "windows": 16,
    "passages": 3,
    "k": 4,
    "characters": 400_000,
}


@dataclass(frozen=True)
class Design:
    """What all models of the study share.

    Attributes:
        tokens: the text that is learned.
        text_digest: of it.
        training, held_out: windows on which losses are taken.
        passages: held out; coupling is measured at the last token of each.
        k: singular vectors.
        last_step, per_octave: when a model is measured, see `measured_steps`.
        device: of training and measuring.
        save_seconds: between two writings of a model's state.
        out: the folder.
    """

    tokens: Int[Tensor, " n_tokens"]
    text_digest: str
    training: Int[Tensor, "n n_ctx"]
    held_out: Int[Tensor, "n n_ctx"]
    passages: Int[Tensor, "n n_ctx"]
    k: int
    last_step: int
    per_octave: int
    device: str
    save_seconds: float
    out: Path

    @property
    def steps(self) -> tuple[int, ...]:
        """At which a model is measured."""
        return measured_steps(self.last_step, self.per_octave)

    def state_path(self, config: small.TrainingConfig) -> Path:
        """Return where a model's state is: a name for all that its curve depends on."""
        digest = small.digest_of(
            # Neither a constant rate nor the order of windows depends on their number.
            asdict(replace(config, steps=0)),
            self.text_digest,
            (self.training.tolist(), self.held_out.tolist(), self.passages.tolist()),
            self.k,
            self.per_octave,
            tlc.__version__,
        )
        return self.out / "models" / f"seed{config.seed}-{digest}.pt"


@dataclass(frozen=True)
class Progress:
    """What was measured of a model up to a step, and the seconds that it took.

    Attributes:
        rows: of the measured steps.
        reached: the step that it was trained to, by this call or an earlier one.
        training, measuring: seconds of all its steps and measurements.
    """

    rows: list[dict[str, float]]
    reached: int
    training: float
    measuring: float


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    parser = small.parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, SMALL)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option out of range."""
    for name in ("pilots", "seeds", "jobs", "per_octave", "passages", "windows"):
        if getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(
                f"`--{option}` must be at least 1, got {getattr(arguments, name)}"
            )
    if not 2 <= arguments.k < arguments.width:
        raise ValueError(
            f"`--k` must lie in [2, {arguments.width - 1}], got {arguments.k}"
        )
    if arguments.n_layers < 2:
        raise ValueError(
            f"`--n-layers` must be at least 2 to be compared, got {arguments.n_layers}"
        )


def configs_of(arguments: argparse.Namespace) -> list[small.TrainingConfig]:
    """Return how each model is trained: the pilots, then the others."""
    names = ["width", "n_layers", "vocabulary", "n_ctx", "batch", "steps"]
    names += ["learning_rate", "warmup", "weight_decay"]
    base = small.TrainingConfig(
        **{name: getattr(arguments, name) for name in names},
        n_heads=max(1, arguments.width // 32),
    )
    n_models = arguments.pilots + arguments.seeds
    return [replace(base, seed=arguments.first_seed + i) for i in range(n_models)]


def measured_steps(last: int, per_octave: int) -> tuple[int, ...]:
    """Return 0, and log-spaced steps up to the last: so many while they double."""
    exponents = range(per_octave * last.bit_length() + 1)
    spaced = {round(2 ** (i / per_octave)) for i in exponents}
    return (0, *sorted(step for step in spaced if step <= last))


def steps_in_pass(
    config: small.TrainingConfig, tokens: Int[Tensor, " n_tokens"]
) -> int:
    """Return in how many steps the whole text is read once.

    Raises:
        ValueError: the text is shorter than a step.
    """
    # A pass begins at one of the first `n_ctx` tokens.
    n_windows = (len(tokens) - config.n_ctx + 1) // config.n_ctx
    if n_windows < config.batch:
        raise ValueError(
            f"wanted a text of at least {(config.batch + 1) * config.n_ctx} tokens, "
            f"got {len(tokens)}"
        )
    return n_windows // config.batch


def batches_after(
    n_done: int, config: small.TrainingConfig, tokens: Int[Tensor, " n_tokens"]
) -> Iterator[Int[Tensor, "batch n_ctx"]]:
    """Yield the windows of step `n_done + 1`, and of all steps after it.

    In each pass windows lie side by side, from an offset on, and are read once each, but
    for less than a batch; the offset and the order are those of the seed and the pass.
    """
    per_pass = steps_in_pass(config, tokens)
    window = torch.arange(config.n_ctx)
    n_windows = (len(tokens) - config.n_ctx + 1) // config.n_ctx
    first_pass, first_batch = divmod(n_done, per_pass)
    for number in count(first_pass):
        generator = torch.Generator().manual_seed(config.seed + 1_000_000 * number)
        offset = torch.randint(config.n_ctx, (1,), generator=generator)
        order = torch.randperm(n_windows, generator=generator)
        starts = (offset + config.n_ctx * order).split(config.batch)
        for of_batch in islice(starts, first_batch, per_pass):
            yield tokens[of_batch[:, None] + window]
        first_batch = 0


def brought_to(config: small.TrainingConfig, step: int, design: Design) -> Progress:
    """Train one model up to a step, from where it was left, on one thread, and measure
    it on the way.
    """
    torch.set_num_threads(1)
    # Again, because this may be a process of its own.
    disable_progress_bar()
    path = design.state_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_overs(path.parent, path.stem)
    state: dict[str, Any] = {"step": 0, "rows": [], "training": 0.0, "measuring": 0.0}
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
    rows: list[dict[str, float]] = state["rows"]
    n_done: int = state["step"]
    rows_there = [row for row in rows if row["step"] <= step]
    if rows_there and rows_there[-1]["step"] == step:
        return Progress(rows_there, n_done, state["training"], state["measuring"])
    model: Any = small.new_model(config).to(design.device)
    optimizer = small.optimizer_of(model, config)
    if n_done:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    start = time.monotonic()
    measuring = 0.0

    def save(reached: int) -> Progress:
        training = time.monotonic() - start - measuring
        content: dict[str, Any] = {
            "step": reached,
            "rows": rows,
            "training": state["training"] + training,
            "measuring": state["measuring"] + measuring,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        write_atomically(path, partial(torch.save, content))
        return Progress(rows, reached, content["training"], content["measuring"])

    saved = start
    measured_at = set(design.steps)
    left = islice(batches_after(n_done, config, design.tokens), step - n_done)
    batches = (batch.to(design.device) for batch in left)
    steps = small.learn(model, config, batches, optimizer=optimizer, n_done=n_done)
    for reached, _ in steps:
        # What an interrupted study had reached was measured before it was written.
        if reached in measured_at and not (rows and rows[-1]["step"] == reached):
            before = time.monotonic()
            rows.append({"step": reached} | measured(model, design))
            measuring += time.monotonic() - before
        if time.monotonic() - saved > design.save_seconds:
            save(reached)
            saved = time.monotonic()
    return save(step)


def measured(model: Any, design: Design) -> dict[str, float]:
    """Return the losses of a model, and its coupling, as means over the passages.

    Coupling; coupling without each block's best multiple of the identity; the share of
    that multiple; the energy that subspaces share, paired or not; the size of the
    Jacobians.
    """
    was_training = model.training
    model.eval()
    device = design.device
    blocks = list(model.gpt_neox.layers)
    rows = []
    for ids in design.passages.to(device):
        with torch.no_grad():
            trace = tlc.trace_modules(blocks, partial(model, ids[None]))
        J = tlc.block_jacobians(trace, progress=False)
        depth = tlc.comparisons.jacobian_coupling(J, design.k)
        rest = tlc.comparisons.jacobian_coupling(without_identity(J), design.k)
        rows.append(
            {
                "coupling": depth.mean(),
                "coupling_without_identity": rest.mean(),
                "identity_share": float(identity_share(J).mean()),
                "captured_energy": depth.mean(measure="captured_energy"),
                "size_of_J": float(torch.linalg.matrix_norm(J).mean()),
            }
        )
    losses = {
        "loss_training": mean_loss(model, design.training.to(device)),
        "loss_held_out": mean_loss(model, design.held_out.to(device)),
    }
    model.train(was_training)
    return losses | pandas.DataFrame(rows).mean().to_dict()


def design_of(arguments: argparse.Namespace) -> Design:
    """Return what the models share: the text, the passages, the steps."""
    corpus = small.build_corpus(
        small.read_documents(arguments.text, arguments.characters),
        arguments.vocabulary,
    )
    if arguments.little:
        corpus = corpus.subset(arguments.little)
    held_out = corpus.held_out_tokens
    return Design(
        tokens=corpus.tokens,
        text_digest=corpus.digest,
        training=windows_of(corpus.tokens, arguments.n_ctx, arguments.windows),
        held_out=windows_of(held_out, arguments.n_ctx, arguments.windows),
        passages=windows_of(held_out, arguments.n_ctx, arguments.passages),
        k=arguments.k,
        last_step=arguments.steps,
        per_octave=arguments.per_octave,
        device=arguments.device,
        save_seconds=60 * arguments.save_minutes,
        out=arguments.out,
    )


def seconds_to(step: int, progress: Progress) -> float:
    """Return how long a model will take to a step and its measurement; 0 where it was
    trained to there.
    """
    left = step - progress.reached
    if left <= 0:
        return 0.0
    training = progress.training / max(1, progress.reached)
    return left * training + progress.measuring / len(progress.rows)


def table_of(
    runs: Sequence[Progress],
    configs: Sequence[small.TrainingConfig],
    design: Design,
    n_pilots: int,
) -> pandas.DataFrame:
    """Return a row for each model and measured step."""
    tables = []
    for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
        role = PILOT if number < n_pilots else MAIN
        known = {"width": config.width, "n_layers": config.n_layers, "k": design.k}
        known |= {"text_tokens": len(design.tokens)}
        known |= {"chance": mean_random_coupling(design.k), "seed": config.seed}
        table = pandas.DataFrame(run.rows).assign(**known, role=role)
        tokens_in_step = config.batch * config.n_ctx
        table["tokens"] = table["step"] * tokens_in_step
        table["passes"] = table["step"] / steps_in_pass(config, design.tokens)
        tables.append(table)
    return pandas.concat(tables, ignore_index=True)


def table_name(config: small.TrainingConfig, design: Design) -> str:
    """Return the name of a setting's table."""
    return (
        f"curves-width{config.width}-layers{config.n_layers}-"
        f"text{len(design.tokens)}.csv"
    )


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    end = time.monotonic() + 60 * arguments.minutes
    check_options(arguments)
    configs = configs_of(arguments)
    design = design_of(arguments)
    # An error of the text comes before any training.
    steps_in_pass(configs[0], design.tokens)
    n_turns = -(-len(configs) // arguments.jobs)
    reached = 0
    needed = 0.0
    with (
        output_folder(arguments.out) as out,
        small.parallel_map(arguments.jobs) as mapped,
    ):
        for step, following in pairwise((*design.steps, arguments.steps)):
            # What an earlier call reached takes no time.
            if needed and time.monotonic() + needed > end:
                break
            runs = list(mapped(partial(brought_to, step=step, design=design), configs))
            reached = step
            needed = n_turns * float(
                np.mean([seconds_to(following, run) for run in runs])
            )
            if not step:
                continue
            table = table_of(runs, configs, design, arguments.pilots)
            save = partial(table.to_csv, index=False, float_format="%.5g")
            write_atomically(out / table_name(configs[0], design), save)
        if not reached:
            raise ValueError(
                f"wanted time for a step, got `--minutes {arguments.minutes:g}`: give more"
            )
        # As `--table` reads them, so that both print the same.
        curves = read_curves(out)
        print_report(curves)
        figure = draw(curves)
        save = partial(figure.savefig, dpi=200, format="png")
        print(write_atomically(out / "coupling_returns.png", save))


def read_curves(folder: Path) -> pandas.DataFrame:
    """Return the curves of all settings that are in a folder.

    Raises:
        ValueError: there are none.
    """
    tables = [pandas.read_csv(path) for path in sorted(folder.glob("curves-*.csv"))]
    if not tables:
        raise ValueError(f"there are no results in {folder}: run it without --table")
    return pandas.concat(tables, ignore_index=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        return small.status_of(lambda: print_report(read_curves(arguments.table)))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
