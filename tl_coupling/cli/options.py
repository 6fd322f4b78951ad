"""Options that several commands have in common."""

from pathlib import Path
from typing import Annotated

import typer

from tl_coupling.models import named_device
from tl_coupling.prompts import Prompt, read_prompts
from tl_coupling.surveys.measurements import PAPER_PROMPT

Model = Annotated[str, typer.Option(help="Embedded model, hub name, or local HuggingFace folder.")]
Ks = Annotated[list[int] | None, typer.Option("--k", help="Top singular vectors; may be repeated. [10, 30, 50]")]
Untrained = Annotated[bool, typer.Option("--untrained", help="Measure the untrained twin as well.")]
PromptOrPaper = Annotated[str | None, typer.Option(help=f"One prompt. Without any: {PAPER_PROMPT!r}.")]
Prompts = Annotated[Path | None, typer.Option(help='JSONL file, one {"id": …, "prompt": …} a line.', dir_okay=False)]
OnePrompt = Annotated[str, typer.Option(help="The prompt.")]
Position = Annotated[int, typer.Option(help="Token position; negative counts from the end.")]
PrependBos = Annotated[bool | None, typer.Option(help="Put a BOS token first; by default as the tokenizer does.")]
FinalNorm = Annotated[bool, typer.Option("--final-norm", help="Include the final norm in the last block.")]
Orientation = Annotated[str, typer.Option(help='"ujv" (the paper\'s) or "vju".')]
Checkpoint = Annotated[str | None, typer.Option(help="Training step, or hub revision.")]
Backend = Annotated[str, typer.Option(help='"auto", "bridge" or "hooked".')]
Device = Annotated[
    str | None,
    typer.Option(
        help="Torch device; CUDA if there is one, else the CPU.",
        # Before any work: units of a run load their models later, perhaps on another machine.
        callback=lambda device: device if device is None else str(named_device(device)),
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for results and pictures.", file_okay=False)]


def chosen_prompts(prompt: str | None, prompts: Path | None) -> list[Prompt]:
    """The one prompt, those of the file, or the paper's.

    Raises:
        ValueError: both are given, or the file is not one of prompts.
    """
    if prompt is not None and prompts is not None:
        raise ValueError("give --prompt or --prompts, not both")
    return [Prompt("prompt", PAPER_PROMPT if prompt is None else prompt)] if prompts is None else read_prompts(prompts)


def checked_ks(k: list[int] | None) -> list[int]:
    """Numbers of singular vectors, smallest first."""
    ks = sorted(set(k or (10, 30, 50)))
    if ks[0] < 1:
        raise ValueError(f"`--k` must be at least 1, got {ks[0]}")
    return ks


def training_step(checkpoint: str | None) -> str | int | None:
    """A checkpoint as `load_model` takes it: a number where it is one."""
    return int(checkpoint) if checkpoint is not None and checkpoint.isdecimal() and checkpoint.isascii() else checkpoint
