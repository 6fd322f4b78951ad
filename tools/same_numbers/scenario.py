"""The commands that run in both trees.

Each writes into a folder with its name. Its paths are relative to the folder of
results, beside which the inputs lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

DEMO = "What is the capital of France? The capital is"
ENGLISH = "The capital of France is"
WORDS = "w3 w14 w15 w92 w65 w35 w89 w79"
INPUTS = "../inputs"
LLAMA = f"{INPUTS}/llama"
TRAINING = f"{INPUTS}/training"
WORD_PROMPTS = f"{INPUTS}/words.jsonl"
ENGLISH_PROMPTS = f"{INPUTS}/english.jsonl"
ALL_MODELS = ("llama", "gpt2", "neox", "qwen", "mistral", "phi")


@dataclass(frozen=True)
class Command:
    """A call of `tl-coupling`.

    Attributes:
        name: of its folder of results.
        arguments: without `--out`.
        suffix: of `--out`, where the command writes one file and no folder.
        reads: the name of an earlier command, whose results this one reads.
    """

    name: str
    arguments: tuple[str, ...]
    suffix: str = ""
    reads: str | None = None


def _command(
    name: str, *arguments: str, suffix: str = "", reads: str | None = None
) -> Command:
    _, subcommand = name.split("-", maxsplit=1)
    return Command(name, (subcommand, *arguments), suffix, reads)


def _named_models() -> list[str]:
    options = []
    for name in ALL_MODELS:
        options += ["--model", f"{name}={INPUTS}/{name}"]
    return options


COMMANDS = (
    _command(
        "tiny-depth",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--k", "2", "--k", "4"),
        *("--untrained", "--all-measures", "--save-maps"),
    ),
    _command(
        "tiny-carriers",
        *("--model", LLAMA, "--prompt", WORDS, "--k", "4", "--untrained"),
    ),
    _command(
        "tiny-directions",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--k", "2", "--draws", "3"),
        *("--steer", "--ablate", "--rank", "2"),
    ),
    _command(
        "tiny-rotate",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--side", "both"),
        *("--angle", "30", "--draws", "3"),
    ),
    _command(
        "tiny-compare",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--k", "4", "--other-untrained"),
    ),
    _command(
        "tiny-tokens",
        *("--model", LLAMA, "--prompt", WORDS, "--k", "4", "--untrained"),
    ),
    _command(
        "tiny-trajectory",
        *("--model", LLAMA, "--prompt", WORDS, "--untrained"),
    ),
    _command(
        "tiny-dynamics",
        *("--model", LLAMA, "--prompt", WORDS, "--runs", "--untrained"),
    ),
    _command(
        "tiny-lens-audit",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--lens", f"{INPUTS}/lens.pt"),
    ),
    _command(
        "tiny-compare-trajectories",
        *("--model", TRAINING, "--checkpoint", "0", "--checkpoint", "8"),
        *("--prompt", WORDS),
    ),
    _command(
        "tiny-report",
        *("--model", LLAMA, "--prompt", WORDS, "--k", "4"),
        suffix=".html",
    ),
    _command(
        "tiny-checkpoints",
        *("--model", TRAINING, "--prompts", WORD_PROMPTS, "--k", "4"),
    ),
    _command(
        "tiny-survey",
        *_named_models(),
        *("--prompts", WORD_PROMPTS, "--k", "2", "--k", "4", "--all-measures"),
    ),
    _command(
        "tiny-generalization",
        *("--survey", "tiny-survey", "--scores", f"{INPUTS}/scores.csv"),
        *("--control", "log10(n_parameters)", "--resamples", "200"),
        reads="tiny-survey",
    ),
    _command(
        "tiny-atlas",
        *("--maps", "tiny-survey"),
        suffix=".html",
        reads="tiny-survey",
    ),
    _command(
        "tiny-redundancy",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--k", "2", "--k", "4"),
    ),
    _command(
        "tiny-precision",
        *("--model", LLAMA, "--prompts", WORD_PROMPTS, "--k", "4"),
    ),
    # `make demo`.
    _command("smollm2-depth", "--prompt", DEMO, "--untrained"),
    _command("smollm2-tokens", "--prompt", ENGLISH, "--k", "10"),
    _command("smollm2-trajectory", "--prompt", ENGLISH),
    _command(
        "smollm2-compare-trajectories",
        *("--model", "smollm2-135m", "--prompt", ENGLISH),
    ),
    _command(
        "smollm2-report",
        *("--prompt", ENGLISH, "--k", "10", "--no-untrained"),
        suffix=".html",
    ),
    # No checkpoints: there is one of this model.
    _command(
        "smollm2-survey",
        *("--model", "smollm2-135m", "--prompts", ENGLISH_PROMPTS, "--k", "10"),
    ),
    _command("smollm2-redundancy", "--prompts", ENGLISH_PROMPTS, "--k", "10"),
    # Two precisions, as each is another pass over all of its blocks.
    _command(
        "smollm2-precision",
        *("--prompts", ENGLISH_PROMPTS, "--k", "10"),
        *("--precision", "float32", "--precision", "bfloat16"),
    ),
)


def is_selected(name: str, parts: Sequence[str]) -> bool:
    """Say whether the name contains one of the parts, or there are none."""
    return not parts or any(part in name for part in parts)


def selected_commands(parts: Sequence[str]) -> list[Command]:
    """Return the commands with such names, and those whose results they read."""
    selected = [command for command in COMMANDS if is_selected(command.name, parts)]
    read = {command.reads for command in selected}
    return [
        command for command in COMMANDS if command in selected or command.name in read
    ]
