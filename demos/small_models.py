"""Small Pythias (GPT-NeoX) trained from scratch on the CPU, on text that every Python
has.

By default they learn the standard library's own source, with byte-level BPE;
checkpoints are in HuggingFace format at log-spaced steps. Shared by the studies and
notebooks that train their own models.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xarray
from jaxtyping import Int
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from loss_marks import LossMarks, is_evaluated
from stochastic_depth import DropPath, drop_rates
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# A quarter of a minute's work for the tokenizer at most.
MAX_CHARACTERS = 8_000_000
HELD_OUT = 20
# Of which smaller amounts of text are made: about a screen.
PIECE = 512
# Not the library, its tests, and tables of characters.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class TrainingConfig:
    """A model and how it is trained: AdamW, a linear warm-up, then a cosine or a
    constant rate, random windows.

    Attributes:
        width: of the residual stream, d_model; the MLP is four times as wide.
        n_layers, n_heads: blocks, and heads in each.
        vocabulary: entries of the byte-level BPE.
        n_ctx: tokens in a window.
        batch: windows in a step.
        steps: how many; checkpoints lie at `checkpoint_steps(steps)`.
        learning_rate, warmup, weight_decay: warm-up in steps.
        final_rate: where the cosine ends, as a share of `learning_rate`; 1 for a
            constant rate.
        stochastic_depth: rate of the last block, see `drop_rates`.
        seed: of the initial weights, of the order of the data, and of what stochastic
            depth drops.
    """

    width: int = 128
    n_layers: int = 6
    n_heads: int = 4
    vocabulary: int = 2048
    n_ctx: int = 128
    batch: int = 16
    steps: int = 512
    learning_rate: float = 2e-3
    warmup: int = 0
    weight_decay: float = 0.01
    final_rate: float = 1.0
    stochastic_depth: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """A text as training wants it: tokens to learn from, passages held out, and the
    tokenizer of both.
    """

    tokenizer: "PreTrainedTokenizerFast"
    tokens: Int[Tensor, " n_tokens"]
    held_out: tuple[str, ...]
    digest: str

    @property
    def held_out_tokens(self) -> Int[Tensor, " n_held_out"]:
        """All held-out documents, one after the other."""
        ids = [
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in self.held_out
        ]
        return torch.tensor([i for document in ids for i in document])

    def subset(self, n_tokens: int, first: int = 0) -> "Corpus":
        """Return the same with less to learn from: pieces of `PIECE` tokens from all
        over, in one random order, from the piece `first` on.

        Smaller subsets from one place lie in larger.

        Raises:
            ValueError: there are not so many tokens, or not one piece is wanted.
        """
        n_pieces = n_tokens // PIECE
        n_there = len(self.tokens) // PIECE
        if n_pieces < 1 or first < 0 or first + n_pieces > n_there:
            after = f", after {first} pieces" if first else ""
            raise ValueError(
                f"wanted {n_tokens} tokens to learn from, in pieces of "
                f"{PIECE}, of {len(self.tokens)}{after}"
            )
        order = torch.randperm(n_there, generator=torch.Generator().manual_seed(0))
        tokens = (
            self.tokens[: n_there * PIECE]
            .view(n_there, PIECE)[order[first : first + n_pieces]]
            .flatten()
        )
        place = f"-{first}" if first else ""
        return replace(self, tokens=tokens, digest=f"{self.digest}-{n_tokens}{place}")


def parser_of(
    description: str, options: Iterable[tuple[str, Any, str]]
) -> argparse.ArgumentParser:
    """Return a command line with options `(name, default, what it is)`, whose types are
    those of the defaults.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, text in options:
        several = isinstance(default, list)
        shown = (
            f"{text} (default {' '.join(map(str, default)) if several else default})"
        )
        kind = type(default[0]) if several else type(default)
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            nargs="+" if several else None,
            help=shown,
        )
    return parser


def parsed(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    of_small: Mapping[str, Any],
) -> argparse.Namespace:
    """With `--text`, and with `--small`, which changes these defaults."""
    parser.add_argument(
        "--text",
        type=Path,
        help="text to learn (default: the standard library's source)",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="fewer and smaller models: minutes, to see that it works",
    )
    if parser.parse_known_args(argv)[0].small:
        parser.set_defaults(**of_small)
    return parser.parse_args(argv)


def training_parser(
    description: str, out: str, *, seeds: int, prompts: int
) -> argparse.ArgumentParser:
    """Return the options that studies share: every field of `TrainingConfig`, text,
    seeds, passages, and where to write.
    """
    options: list[tuple[str, Any, str]] = [
        ("out", Path(out), "folder for all results"),
        ("seeds", seeds, "runs, from --seed on"),
        ("jobs", os.cpu_count() or 1, "runs at a time"),
        ("prompts", prompts, "held-out passages"),
    ]
    training = [
        (field.name.replace("_", "-"), field.default, "of training")
        for field in fields(TrainingConfig)
    ]
    parser = parser_of(description, [*options, *training])
    parser.add_argument(
        "--text",
        type=Path,
        help="text to learn (default: the standard library's source)",
    )
    return parser


def config_of(arguments: argparse.Namespace) -> TrainingConfig:
    """Return the `TrainingConfig` among the options of `training_parser`.

    Raises:
        ValueError: fewer than one seed or job.
    """
    if min(arguments.seeds, arguments.jobs) < 1:
        raise ValueError(
            f"`--seeds` and `--jobs` must be at least 1, got {arguments.seeds} and "
            f"{arguments.jobs}"
        )
    return TrainingConfig(
        **{
            field.name: getattr(arguments, field.name)
            for field in fields(TrainingConfig)
        }
    )


@contextmanager
def parallel_map(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` over that many processes of one thread each: threads that wait for each
    other are slower.
    """
    if jobs == 1:
        yield map
    else:
        with tlc.surveys.process_pool(jobs) as pool:
            yield pool.map


def status_of(study: Callable[[], None]) -> int:
    """Run a study; bad input is one line on standard error and status 2."""
    # Of every file that is saved or loaded.
    disable_progress_bar()
    try:
        study()
    except (ValueError, OSError, tlc.models.ModelError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def digest_of(*parts: Any) -> str:
    """Names a file after all that what it holds depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def kept(path: Path, compute: Callable[[], xarray.Dataset]) -> xarray.Dataset:
    """Return what is in the file; if there is none, what is computed, which is then
    written at once.
    """
    if path.exists():
        return xarray.load_dataset(path)
    data = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, partial(data.to_netcdf, engine="netcdf4"))
    return data


def checkpoint_steps(steps: int) -> tuple[int, ...]:
    """Log-spaced steps from 0 to `steps`: powers of two, from 16 on also halfway
    between them.
    """
    powers = [2**i for i in range(max(1, steps).bit_length())]
    spaced = sorted(
        {0, steps, *powers, *(power * 3 // 2 for power in powers if power >= 16)}
    )
    return tuple(step for step in spaced if step <= steps)


def read_documents(
    path: str | os.PathLike[str] | None = None, n_characters: int | None = None
) -> list[str]:
    """Return the modules of the standard library, or of another folder; or a file's
    paragraphs, as about so many documents. About `n_characters` at most, by default
    `MAX_CHARACTERS`.
    """
    if n_characters is None:
        n_characters = MAX_CHARACTERS
    if path is not None and not Path(path).is_dir():
        text = Path(path).read_text(encoding="utf-8", errors="replace")[:n_characters]
        lines = text.splitlines(keepends=True)
        per_document = max(1, len(lines) // 400)
        return [
            "".join(lines[i : i + per_document])
            for i in range(0, len(lines), per_document)
        ]
    library = Path(path or sysconfig.get_path("stdlib"))
    documents = []
    size = 0
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if SKIPPED.isdisjoint(parts) and size < n_characters:
            documents.append(file.read_text(encoding="utf-8", errors="replace"))
            size += len(documents[-1])
    return documents


def build_corpus(documents: Sequence[str], vocabulary: int) -> Corpus:
    """Byte-level BPE trained on all but every 20th document, which is held out.

    Raises:
        ValueError: fewer than two documents, or none with text.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    held_out = tuple(documents[::HELD_OUT])
    learned = [text for i, text in enumerate(documents) if i % HELD_OUT]
    if not any(learned):
        raise ValueError(
            f"wanted a text of at least two documents (files, or lines of "
            f"one file), got {len(documents)}"
        )
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        learned, vocabulary, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )
    end = [tokenizer.eos_token_id]
    tokens = [i for encoded in bpe.encode_batch(learned) for i in encoded.ids + end]
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()[:8]
    return Corpus(tokenizer, torch.tensor(tokens), held_out, digest)


def passages(
    documents: Sequence[str], tokenizer: Any, n: int, n_tokens: int
) -> list[str]:
    """`n` passages of about `n_tokens`, from the middle of documents that lie evenly
    spread.

    Raises:
        ValueError: not so many are long enough.
    """
    encoded = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents
    ]
    long_enough = [ids for ids in encoded if len(ids) >= n_tokens]
    if len(long_enough) < n:
        raise ValueError(
            f"wanted {n} held-out passages of {n_tokens} tokens, the text has "
            f"{len(long_enough)}"
        )
    spread = [long_enough[i * len(long_enough) // n] for i in range(n)]
    middles = [(len(ids) - n_tokens) // 2 for ids in spread]
    return [
        tokenizer.decode(ids[m : m + n_tokens])
        for ids, m in zip(spread, middles, strict=True)
    ]


def new_model(config: TrainingConfig) -> nn.Module:
    """Return a Pythia of this size at its own initialisation, seeded; the caller's
    generator is left as it was.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.width,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.n_heads,
                intermediate_size=4 * config.width,
                max_position_embeddings=2 * config.n_ctx,
                use_parallel_residual=True,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
    for block, rate in zip(
        model.gpt_neox.layers,
        drop_rates(config.n_layers, config.stochastic_depth),
        strict=True,
    ):
        # In the place of drop-out: it has no weights and does nothing in eval mode, so
        # that a plain model is saved.
        block.post_attention_dropout = DropPath(rate)
        block.post_mlp_dropout = DropPath(rate)
    return model


def batches(
    config: TrainingConfig, tokens: Int[Tensor, " n_tokens"]
) -> Iterator[Int[Tensor, "batch n_ctx"]]:
    """Random windows of the text, `steps` times; their order is the seed's."""
    generator = torch.Generator().manual_seed(config.seed)
    window = torch.arange(config.n_ctx)
    for _ in range(config.steps):
        start = torch.randint(
            len(tokens) - config.n_ctx + 1, (config.batch, 1), generator=generator
        )
        yield tokens[start + window]


def rate_at(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, then half a
    cosine to `final_rate`.
    """
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    gone = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, gone))) / 2
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * cosine)


def optimizer_of(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW of the parameters that ask for a gradient."""
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )


def learn(
    model: Any,
    config: TrainingConfig,
    data: Iterable[Tensor],
    add_gradients: Callable[[int], None] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    n_done: int = 0,
) -> Iterator[tuple[int, float]]:
    """Train in memory: after each step, which it was and its loss in nats; first of all
    step 0, without a loss (NaN).

    Parameters that ask for no gradient stay as they are. `add_gradients` is called with
    each step when the loss has left its gradients, before they are clipped. To go on
    after `n_done` steps, give the optimizer as they left it, and the data after them.
    """
    learned = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        optimizer = optimizer_of(model, config)
    model.train()
    yield n_done, float("nan")
    for step, batch in enumerate(data, n_done + 1):
        optimizer.param_groups[0]["lr"] = rate_at(config, step)
        loss = nn.functional.cross_entropy(
            model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        if add_gradients is not None:
            add_gradients(step)
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        yield step, loss.item()


class Snapshot(NamedTuple):
    """A copy of a model's weights after a step."""

    step: int
    weights: dict[str, Tensor]


def snapshot(model: nn.Module, step: int) -> Snapshot:
    """Return a copy of the weights."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Snapshot(step, weights)


def save(model: Any, corpus: Corpus, folder: Path) -> None:
    """Write a model and its tokenizer in HuggingFace format."""
    model.save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)


def train(
    config: TrainingConfig,
    corpus: Corpus,
    folder: Path,
    progress: Callable[[Iterable[Tensor]], Iterable[Tensor]] | None = None,
    *,
    checkpoints: Iterable[int] | LossMarks | None = None,
) -> Path:
    """Train one model; its checkpoints in HuggingFace format, `step0`, `step1`, … of a
    folder named after the run.

    By default at `checkpoint_steps(config.steps)`; with `LossMarks` the first, the
    last, and those on both sides of each mark, the last of which may end the training.
    A finished run is kept, with the checkpoints it has. The folder gets its name when
    everything is in it, so an interrupted run leaves none; it also holds
    `training.json`: the config, and the loss of every step in nats; with marks the
    losses that were taken, by step, and each mark with the step at which it was
    `reached` and the one before at which losses were taken, or null.
    """
    marks = checkpoints if isinstance(checkpoints, LossMarks) else None
    steps = checkpoint_steps(config.steps) if checkpoints is None else checkpoints
    steps_to_save = {0, config.steps} if isinstance(steps, LossMarks) else set(steps)
    described = (
        asdict(config)
        | {"text": corpus.digest}
        | ({"marks": marks.digest} if marks else {})
    )
    name = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:8]
    done = (
        folder / f"width{config.width}-layers{config.n_layers}-seed{config.seed}-{name}"
    )
    if done.is_dir():
        return done
    unfinished = folder / f".{done.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    model: Any = new_model(config)
    data = batches(config, corpus.tokens)
    losses: list[float] = []
    evaluated: dict[int, dict[str, float]] = {}
    reached: dict[float, tuple[int, int] | None] = dict.fromkeys(
        marks.values if marks else ()
    )
    before = snapshot(model, 0)
    # What stochastic depth drops is drawn from torch's generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for step, loss in learn(model, config, progress(data) if progress else data):
            losses += [loss] if step else []
            new: list[float] = []
            if marks and is_evaluated(step, config.steps):
                evaluated[step] = marks.losses(model)
                new = [
                    value
                    for value, at in reached.items()
                    if at is None and evaluated[step][marks.of] <= value
                ]
                reached |= dict.fromkeys(new, (before.step, step))
                if new and not (unfinished / f"step{before.step}").exists():
                    now = snapshot(model, step)
                    model.load_state_dict(before.weights)
                    save(model, corpus, unfinished / f"step{before.step}")
                    model.load_state_dict(now.weights)
                before = snapshot(model, step)
            is_over = bool(marks and marks.stops and None not in reached.values())
            if new or step in steps_to_save:
                save(model, corpus, unfinished / f"step{step}")
            if is_over:
                break
    measured = {"loss": losses} | (
        {"evaluated": evaluated, "reached": list(reached.items())} if marks else {}
    )
    (unfinished / "training.json").write_text(json.dumps(described | measured))
    unfinished.rename(done)
    return done
