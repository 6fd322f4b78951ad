"""Options that several commands share, in groups: a parameter of such a type becomes an
option for each field.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import torch
import typer
from torch import nn

from tl_coupling.blocks import Trace, trace
from tl_coupling.jacobians import AnyMethod
from tl_coupling.measures import MEASURES, Orientation
from tl_coupling.models import (
    EMBEDDED_MODEL,
    Backend,
    Memory,
    Quantization,
    load_model,
    named_device,
    reads_pixels,
)
from tl_coupling.prompts import Prompt, as_prompts, load_prompts
from tl_coupling.spectra import check_k
from tl_coupling.studies.surveys import PAPER_PROMPT, Checkpoint, Settings

# Help texts have a section of these options, below the command's own.
MODEL_PANEL = "Options for the model"
model_option = partial(typer.Option, rich_help_panel=MODEL_PANEL)
Untrained = Annotated[bool, typer.Option(help="Measure untrained twins as well.")]
Position = Annotated[
    int, typer.Option(help="Token position; negative counts from the end.")
]
# The default that help shows for a position that is chosen by the kind of prompt.
OWN_POSITION = "[the last; of an image the class token, 0]"
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many Jacobians are computed by one call. [what fits on a GPU; one on "
        "a CPU]",
    ),
]
Method = Annotated[
    AnyMethod,
    typer.Option(
        help="Form Jacobians, or take products with vectors alone, for wide models and "
        "small k; auto: what takes less."
    ),
]
Out = Annotated[
    Path, typer.Option(help="Folder for results and pictures.", file_okay=False)
]
OUT = Path("out")


class Loading(TypedDict):
    """Arguments of `load_model` and of surveys."""

    backend: Backend
    device: str | None
    dtype: torch.dtype
    quantization: Quantization | None
    memory: Memory


class TokenChoices(TypedDict):
    """Arguments of `token_portrait` and `portrait`."""

    layer: int | None
    other_layer: int | None
    position: int
    input_position: int


def _checked_device(device: str | None) -> str | None:
    """Return the device as torch writes it.

    An unknown one is an error before any work: units of a run load their models later,
    perhaps on another machine.
    """
    return None if device is None else str(named_device(device))


@dataclass(frozen=True)
class Tracing:
    """Where models run, and how prompts are traced."""

    backend: Annotated[Backend, model_option(help="TransformerLens' class.")] = "auto"
    device: Annotated[
        str | None,
        model_option(
            help="Torch device; CUDA if there is one, else the CPU.",
            callback=_checked_device,
        ),
    ] = None
    prepend_bos: Annotated[
        bool | None,
        model_option(help="Put a BOS token first; by default as the tokenizer does."),
    ] = None
    final_norm: Annotated[
        bool,
        model_option("--final-norm", help="Include the final norm in the last block."),
    ] = False


@dataclass(frozen=True)
class Setup(Tracing):
    """How models are loaded as well."""

    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        model_option(help="Precision of the weights."),
    ] = "float32"
    quantization: Annotated[
        Quantization | None,
        model_option(
            help="Quantise on loading, with bitsandbytes; the dequantised weights "
            "are measured."
        ),
    ] = None
    memory: Annotated[
        Memory,
        model_option(help="Keep weights in memory, or read one block at a time."),
    ] = "resident"

    @property
    def loading(self) -> Loading:
        """Arguments of `load_model` and of surveys."""
        # The option is the name of a dtype in torch.
        dtype: torch.dtype = getattr(torch, self.dtype)
        return {
            "backend": self.backend,
            "device": self.device,
            "quantization": self.quantization,
            "memory": self.memory,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class OneModel(Setup):
    """One model, and how its prompts are traced."""

    model: Annotated[
        str,
        model_option(
            help="Embedded model, hub name, local HuggingFace folder, or GGUF file."
        ),
    ] = EMBEDDED_MODEL
    checkpoint: Annotated[
        str | None, model_option(help="Training step, or hub revision.")
    ] = None
    label: Annotated[
        str | None,
        model_option(
            help="Name of the model in results. [default: --model, with the path of "
            "a local folder]"
        ),
    ] = None

    def load(self, untrained: bool) -> nn.Module:
        """Return the model, or its untrained twin."""
        checkpoint = None
        # The twin has the architecture of the model, whatever the checkpoint.
        if self.checkpoint is not None and not untrained:
            checkpoint = training_step(self.checkpoint)
        return load_model(
            self.model,
            checkpoint=checkpoint,
            untrained=untrained,
            label=self.label,
            **self.loading,
        )

    def trace(self, model: nn.Module, prompt: Prompt) -> Trace:
        """Return the traced prompt.

        Raises ValueError for an image where the model reads text, and the other way
        round.
        """
        if reads_pixels(model) and prompt.image is None:
            raise ValueError(f"{self.model!r} reads images: give one, with --image")
        if prompt.image is not None and not reads_pixels(model):
            raise ValueError(
                f"{self.model!r} reads text, not images: give --model a vision model"
            )
        return trace(
            model, prompt, prepend_bos=self.prepend_bos, final_norm=self.final_norm
        )


@dataclass(frozen=True)
class Comparing:
    """How blocks are compared."""

    k: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of top singular vectors; may be repeated. [default: 10, 30, "
            "50]"
        ),
    ] = None
    orientation: Annotated[
        Orientation, typer.Option(help="A = U' J V of the paper, or V' J U.")
    ] = "ujv"

    @property
    def ks(self) -> list[int]:
        """Numbers of singular vectors, smallest first."""
        ks = sorted(set(self.k or (10, 30, 50)))
        if ks[0] < 1:
            raise ValueError(f"`--k` must be at least 1, got {ks[0]}")
        return ks

    @property
    def largest(self) -> int | None:
        """The largest that was asked for."""
        # None: the library chooses by the width of the model.
        return self.ks[-1] if self.k else None

    def up_to(self, k: int) -> list[int]:
        """Return `ks` for a result that holds k; a narrow model has fewer vectors.

        Raises ValueError for more than that which were asked for.
        """
        if self.k:
            check_k(self.ks[-1], k)
        # A set: several of the defaults may be cut to the same k.
        return sorted({min(wide_k, k) for wide_k in self.ks})


@dataclass(frozen=True)
class Changing:
    """How Jacobians are known, and what is done to them before they are compared."""

    without: Annotated[
        Literal["identity"] | None,
        typer.Option(
            help="Compare what is left of each block without its best multiple of the "
            "identity. [whole blocks]"
        ),
    ] = None
    metric: Annotated[
        Literal["stream"] | None,
        typer.Option(
            help="Compare blocks in coordinates in which the residual stream of all "
            "prompts has the same size in every direction. [the model's own]"
        ),
    ] = None
    method: Method = "jacobians"
    batch: Batch = None


@dataclass(frozen=True)
class Measuring(Comparing, Tracing):
    """How prompts are measured."""

    position: Position = -1

    @property
    def settings(self) -> Settings:
        """The settings of the library."""
        return Settings(
            k=tuple(self.ks),
            position=self.position,
            orientation=self.orientation,
            final_norm=self.final_norm,
            prepend_bos=self.prepend_bos,
        )


@dataclass(frozen=True)
class Choosing:
    """What a mean coupling is a mean of."""

    diagonal: Annotated[
        bool,
        typer.Option(
            "--diagonal",
            help="Average over all pairs of layers, also l = l', as in the paper. "
            "[different layers]",
        ),
    ] = False
    all_measures: Annotated[
        bool,
        typer.Option(
            "--all-measures",
            help="Every measure, orientation and choice of pairs, in one table.",
        ),
    ] = False

    def settings_for(self, settings: Settings) -> Settings:
        """Return settings with these choices; their own orientation comes first."""
        settings = replace(settings, diagonal=self.diagonal)
        if not self.all_measures:
            return settings
        first = settings.orientations[0]
        # The one that was asked for comes first: it is what pictures are of.
        second: Orientation = "vju" if first == "ujv" else "ujv"
        return replace(settings, orientation=(first, second), measures=tuple(MEASURES))


@dataclass(frozen=True)
class Sweep(Measuring, Changing, Setup, Choosing):
    """How models are measured across checkpoints."""

    checkpoint: Annotated[
        list[str] | None,
        model_option(
            help="Training step or hub revision, of every model; may be repeated."
        ),
    ] = None
    dynamics: Annotated[
        bool,
        typer.Option(
            "--dynamics",
            help="Also measure products of blocks; takes about eight times as long.",
        ),
    ] = False
    carriers: Annotated[
        bool,
        typer.Option(
            "--carriers",
            help=(
                "Also measure how much of coupling attention and MLPs carry; takes about "
                "three times as long."
            ),
        ),
    ] = False

    @property
    def settings(self) -> Settings:
        """The settings of the library."""
        settings = self.settings_for(super().settings)
        return replace(
            settings,
            without=self.without,
            metric=self.metric,
            method=self.method,
            batch=self.batch,
            dynamics=self.dynamics,
            carriers=self.carriers,
        )

    @property
    def checkpoints(self) -> list[Checkpoint] | None:
        """Training steps as numbers, revisions as text."""
        if self.checkpoint is None:
            return None
        return [training_step(checkpoint) for checkpoint in self.checkpoint]


@dataclass(frozen=True)
class AcrossTokens:
    """What is compared across tokens; names are those of `token_portrait`."""

    layer: Annotated[
        int | None, typer.Option(help="Layer of J_1 across tokens. [the middle one]")
    ] = None
    other_layer: Annotated[
        int | None,
        typer.Option(
            help="Layer of the singular vectors across tokens. [the one after]"
        ),
    ] = None
    position: Annotated[
        int | None,
        typer.Option(
            help=f"The fixed output, and the token that is influenced. {OWN_POSITION}"
        ),
    ] = None
    input_position: Annotated[int, typer.Option(help="The fixed input.")] = 0

    def arguments(self, prompt: Prompt) -> TokenChoices:
        """Return arguments of `token_portrait` for this prompt."""
        return {
            "layer": self.layer,
            "other_layer": self.other_layer,
            "position": own_position(prompt, self.position),
            "input_position": self.input_position,
        }


PromptKey = Annotated[
    str, typer.Option(help="Key under which the texts of a JSONL file stand.")
]


@dataclass(frozen=True)
class OnePrompt:
    """One prompt, or one image."""

    prompt: Annotated[
        str | None, typer.Option(help=f"One prompt. [default: {PAPER_PROMPT!r}]")
    ] = None
    image: Annotated[
        Path | None,
        typer.Option(
            help="Image file in place of a prompt, for a vision model.", dir_okay=False
        ),
    ] = None

    def single_prompt(self) -> Prompt:
        """Return the prompt, the image, or the paper's prompt.

        Raises ValueError if both a prompt and an image are given.
        """
        if self.image is None:
            # An empty --prompt is an error, and not the default.
            text = PAPER_PROMPT if self.prompt is None else self.prompt
            return Prompt(text, "prompt")
        if self.prompt is not None:
            raise ValueError("give --prompt or --image, not both")
        return Prompt(image=self.image)


@dataclass(frozen=True)
class Prompts(OnePrompt):
    """One prompt or image, or those of a file."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file, one {"id": …, "prompt": …} or {"image": …} per line.',
            dir_okay=False,
        ),
    ] = None
    prompt_key: PromptKey = "prompt"

    def selected(self) -> list[Prompt]:
        """Return the one prompt, those of the file, or the paper's.

        Raises ValueError if both a prompt and a file are given, or a key without a file.
        """
        if self.prompts is None:
            if self.prompt_key != "prompt":
                raise ValueError("--prompt-key is for a file: give --prompts as well")
            return [self.single_prompt()]
        if self.prompt is not None:
            raise ValueError("give --prompt or --prompts, not both")
        if self.image is not None:
            raise ValueError("give --image or --prompts, not both")
        return self.in_file(self.prompts)

    def in_file(self, path: Path) -> list[Prompt]:
        """Return the prompts of a file, whose texts stand under the key."""
        return as_prompts(load_prompts(path, key=self.prompt_key))


def own_position(prompt: Prompt, position: int | None) -> int:
    """Return the position, or the one that is measured unless another is asked for."""
    if position is not None:
        return position
    # The last token of a text; the class token of an image.
    return -1 if prompt.image is None else 0


def training_step(checkpoint: str) -> Checkpoint:
    """Return a checkpoint as `load_model` takes it: training steps are numbers."""
    # `int` reads digits of other scripts too, which may name a revision.
    is_step = checkpoint.isdecimal() and checkpoint.isascii()
    return int(checkpoint) if is_step else checkpoint
