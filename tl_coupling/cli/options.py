"""Options that several commands share, in groups: a parameter of such a type becomes an
option for each field.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

from tl_coupling.measures import MEASURES, Orientation
from tl_coupling.models import EMBEDDED_MODEL, load_model, named_device, reads_pixels
from tl_coupling.prompts import Prompt, load_prompts
from tl_coupling.surveys import Settings
from tl_coupling.surveys.measurements import PAPER_PROMPT
from tl_coupling.traces import Trace, trace

Untrained = Annotated[bool, typer.Option(help="Measure untrained twins as well.")]
Position = Annotated[
    int, typer.Option(help="Token position; negative counts from the end.")
]
OWN_POSITION = "[the last; of an image the class token, 0]"
Out = Annotated[
    Path, typer.Option(help="Folder for results and pictures.", file_okay=False)
]
OUT = Path("out")


@dataclass(frozen=True)
class Tracing:
    """Where models run, and how prompts are traced."""

    backend: Annotated[
        Literal["auto", "bridge", "hooked"],
        typer.Option(help="TransformerLens' class."),
    ] = "auto"
    device: Annotated[
        str | None,
        typer.Option(
            help="Torch device; CUDA if there is one, else the CPU.",
            # Before any work: units of a run load their models later, perhaps on
            # another machine.
            callback=lambda device: (
                device if device is None else str(named_device(device))
            ),
        ),
    ] = None
    prepend_bos: Annotated[
        bool | None,
        typer.Option(help="Put a BOS token first; by default as the tokenizer does."),
    ] = None
    final_norm: Annotated[
        bool,
        typer.Option("--final-norm", help="Include the final norm in the last block."),
    ] = False


@dataclass(frozen=True)
class Setup(Tracing):
    """How models are loaded as well."""

    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        typer.Option(help="Precision of the weights."),
    ] = "float32"
    quantization: Annotated[
        Literal["nf4", "int8"] | None,
        typer.Option(
            help="Quantise on loading, with bitsandbytes; what is measured are the dequantised weights."
        ),
    ] = None
    memory: Annotated[
        Literal["resident", "stream"],
        typer.Option(help="Leave weights in their files but for one block at a time."),
    ] = "resident"

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_model` and of surveys."""
        names = ("backend", "device", "quantization", "memory")
        return {name: getattr(self, name) for name in names} | {
            "dtype": getattr(torch, self.dtype)
        }


@dataclass(frozen=True)
class OneModel(Setup):
    """One model, and how its prompts are traced."""

    model: Annotated[
        str,
        typer.Option(
            help="Embedded model, hub name, local HuggingFace folder, or GGUF file."
        ),
    ] = EMBEDDED_MODEL
    checkpoint: Annotated[
        str | None, typer.Option(help="Training step, or hub revision.")
    ] = None
    label: Annotated[
        str | None,
        typer.Option(
            help="What results call the model. [default: as --model, with a local folder's path]"
        ),
    ] = None

    def load(self, untrained: bool) -> nn.Module:
        """The model, or its untrained twin."""
        checkpoint = None if untrained else training_step(self.checkpoint)
        return load_model(
            self.model,
            checkpoint=checkpoint,
            untrained=untrained,
            label=self.label,
            **self.loading,
        )

    def trace(self, model: nn.Module, prompt: Prompt) -> Trace:
        """The traced prompt; ValueError for an image where the model reads text, and
        the other way round.
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
            help="Number of top singular vectors; may be repeated. [default: 10, 30, 50]"
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
        return self.ks[-1] if self.k else None

    def up_to(self, k: int) -> list[int]:
        """As `ks`, of a result that holds k: a narrow model has fewer than the
        default.
        """
        return sorted({min(one, k) for one in self.ks})


@dataclass(frozen=True)
class Measuring(Comparing, Tracing):
    """How prompts are measured."""

    position: Position = -1

    @property
    def settings(self) -> Settings:
        """As the library takes them."""
        return Settings(
            tuple(self.ks),
            self.position,
            self.orientation,
            self.final_norm,
            self.prepend_bos,
        )


@dataclass(frozen=True)
class Choosing:
    """What a mean coupling is a mean of."""

    diagonal: Annotated[
        bool,
        typer.Option(
            "--diagonal",
            help="Means over all pairs of layers, l = l' too, as in the paper. [different ones]",
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
        """With these choices; the orientation that was asked for comes first."""
        first = settings.orientations[0]
        both: tuple[Orientation, ...] = (first, "vju" if first == "ujv" else "ujv")
        all_of = (
            {"orientation": both, "measures": tuple(MEASURES)}
            if self.all_measures
            else {}
        )
        return replace(settings, diagonal=self.diagonal, **all_of)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sweep(Measuring, Setup, Choosing):
    """How models are measured across checkpoints."""

    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Training step or hub revision, of every model; may be repeated."
        ),
    ] = None

    @property
    def settings(self) -> Settings:
        """As the library takes them."""
        return self.settings_for(super().settings)

    @property
    def checkpoints(self) -> list[Any] | None:
        """As the library takes them."""
        return (
            None
            if self.checkpoint is None
            else [training_step(one) for one in self.checkpoint]
        )


@dataclass(frozen=True)
class AcrossTokens:
    """What is compared across tokens; the names are those of `token_portrait`."""

    layer: Annotated[
        int | None, typer.Option(help="Layer of J_1 across tokens. [in the middle]")
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

    def arguments(self, prompt: Prompt) -> dict[str, Any]:
        """As `token_portrait` takes them."""
        return asdict(self) | {"position": own_position(prompt, self.position)}


@dataclass(frozen=True)
class OnePrompt:
    """One prompt, or one image."""

    prompt: Annotated[
        str | None, typer.Option(help=f"One prompt. Without any: {PAPER_PROMPT!r}.")
    ] = None
    image: Annotated[
        Path | None,
        typer.Option(
            help="Image file in place of a prompt, for a vision model.", dir_okay=False
        ),
    ] = None

    def one(self) -> Prompt:
        """The prompt, the image, or the paper's prompt; ValueError if both are
        given.
        """
        if self.image is None:
            return Prompt(
                "prompt", PAPER_PROMPT if self.prompt is None else self.prompt
            )
        if self.prompt is not None:
            raise ValueError("give --prompt or --image, not both")
        return Prompt(self.image.name, image=self.image)


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

    def chosen(self) -> list[Prompt]:
        """The one prompt, those of the file, or the paper's; ValueError if both are
        given.
        """
        if self.prompts is None:
            return [self.one()]
        if self.prompt is not None or self.image is not None:
            raise ValueError(
                f"give {'--image' if self.prompt is None else '--prompt'} or --prompts, not both"
            )
        return load_prompts(self.prompts)


def own_position(prompt: Prompt, position: int | None) -> int:
    """The position, or the one that is measured unless another is asked for."""
    return position if position is not None else -1 if prompt.image is None else 0


def training_step(checkpoint: str | None) -> str | int | None:
    """A checkpoint as `load_model` takes it: training steps are numbers."""
    return (
        int(checkpoint)
        if checkpoint is not None and checkpoint.isdecimal() and checkpoint.isascii()
        else checkpoint
    )
