"""What `load_model` was asked for, and which wishes exclude each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch

from tl_coupling.models.embedded import EMBEDDED_MODEL
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs
from tl_coupling.models.weights import Quantization, is_gguf, refuse_streaming

Backend = Literal["auto", "bridge", "hooked"]
Memory = Literal["resident", "stream"]
UNTRAINED_SEED = 0


class BootOptions(TypedDict, total=False):
    """What TransformerLens is told when it loads a model."""

    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool
    checkpoint_value: int
    revision: str


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `load_model`, but for the device; see there."""

    name: str
    checkpoint: int | str | None
    untrained: bool
    backend: Backend
    dtype: torch.dtype
    memory: Memory
    quantization: Quantization | None
    trust_remote_code: bool
    label: str | None

    @property
    def is_file(self) -> bool:
        """Whether the model is in a GGUF file."""
        return is_gguf(self.name)

    @property
    def is_streamed(self) -> bool:
        """Whether weights are left in their files."""
        return self.memory == "stream"

    @property
    def revision(self) -> str | None:
        """The branch or commit on the hub, where one was named."""
        return self.checkpoint if isinstance(self.checkpoint, str) else None

    def boot_options(self, device: torch.device) -> BootOptions:
        """Return what TransformerLens is told."""
        options: BootOptions = {
            "device": device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
        }
        if isinstance(self.checkpoint, int):
            options["checkpoint_value"] = self.checkpoint
        elif self.checkpoint is not None:
            options["revision"] = self.checkpoint
        return options

    def loaded_as(self, weight_facts: LoadedAs) -> LoadedAs:
        """Return the provenance of the model, with that of its weights."""
        loaded_as: LoadedAs = {
            "model": self.label or self.name,
            "checkpoint": self.checkpoint,
            "untrained": self.untrained,
            **weight_facts,
        }
        if self.untrained:
            loaded_as["seed"] = UNTRAINED_SEED
        if self.trust_remote_code:
            loaded_as["trust_remote_code"] = True
        if self.is_streamed:
            loaded_as["memory"] = self.memory
        return loaded_as

    def check(self) -> None:
        """Raise ModelError, naming the first of the wishes that exclude each other."""
        conflict = next(self._conflicts(), None)
        if conflict is not None:
            raise ModelError(conflict)

    def _conflicts(self) -> Iterator[str]:
        if self.untrained:
            yield from self._conflicts_of_untrained()
        if self.quantization is not None or self.is_file:
            yield from self._conflicts_of_quantization()
        if self.is_streamed:
            yield from self._conflicts_of_streaming()
        kind = self._kind_without_checkpoints()
        if self.checkpoint is not None and kind is not None:
            yield (
                f"{self.name!r} has no checkpoints, it is {kind}; `checkpoint` is for "
                "hub models that published theirs; load a local checkpoint by its own "
                "folder"
            )

    def _conflicts_of_untrained(self) -> Iterator[str]:
        if self.checkpoint is not None:
            yield (
                "`untrained=True` and `checkpoint` exclude each other: an untrained "
                "model has no steps"
            )
        if self.quantization is not None:
            yield (
                "`untrained=True` and `quantization` exclude each other: leave one of "
                "them out"
            )

    def _conflicts_of_quantization(self) -> Iterator[str]:
        if self.is_file and self.quantization is not None:
            yield (
                f"{self.name!r} is quantised already (gguf): leave `quantization` out"
            )
        if self.quantization == "nf4" and self.dtype == torch.float64:
            yield (
                '`dtype` with `quantization="nf4"` must be float32, bfloat16 or '
                "float16, in which bitsandbytes quantises to 4 bits, got torch.float64"
            )
        if self.backend == "hooked":
            yield (
                "quantised weights need a TransformerBridge: leave "
                '`backend="hooked"` out'
            )

    def _conflicts_of_streaming(self) -> Iterator[str]:
        reason = None
        if self.untrained:
            reason = "`untrained=True` has no files"
        elif self.backend == "hooked":
            reason = 'HookedTransformer (`backend="hooked"`) reads all'
        if reason is not None:
            yield (
                f'`memory="stream"` leaves weights in their files, and {reason}: leave '
                "one of the two out"
            )
        refuse_streaming(self.name, self.quantization)

    def _kind_without_checkpoints(self) -> str | None:
        """Say what the model is, if not one on the hub."""
        if self.is_file:
            return "a GGUF file"
        if self.name == EMBEDDED_MODEL:
            return "the embedded model"
        return "a local folder" if Path(self.name).is_dir() else None
