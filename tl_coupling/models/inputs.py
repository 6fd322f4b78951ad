"""What a model is run on: token ids or pixels. Each knows how the model is called with
it, what its tokens are called, and how logits are read.
"""

import hashlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from tl_coupling.models.images import described_type, image_provenance
from tl_coupling.models.loaded import is_bridge, reads_pixels
from tl_coupling.models.own_model import input_device
from tl_coupling.models.tokenization import check_tokens, str_tokens, tokens_of

# Rows of a residual stream in one run of what follows the blocks: so many that reading
# the unembedding does not take longer than multiplying with it.
_N_ROWS_AT_ONCE = 64


@runtime_checkable
class ModelInput(Protocol):
    """One input of a model.

    A residual stream has a row for every token of a text. What follows the blocks
    treats each row by itself, so that several rows are run as the one token of as many
    texts. An image classifier reads its class token alone: several rows are the class
    tokens of as many images.

    Attributes:
        kind: "tokens" or "pixels".
        when_it_fails: what to try where the model fails on such an input.
        head: what kind of head makes logits of it.
        n_rows_at_once: how many rows the model makes logits of in one run.
    """

    kind: ClassVar[str]
    when_it_fails: ClassVar[str]
    head: ClassVar[str]
    n_rows_at_once: ClassVar[int]

    @property
    def further(self) -> Mapping[str, Any]:
        """What else the model is called with on this input, by name."""

    @property
    def batch(self) -> Tensor:
        """What the model takes."""

    @property
    def provenance(self) -> dict[str, object]:
        """How the input was made, JSON-able."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user would not expect of how it was made."""

    @property
    def tokens(self) -> Int[Tensor, " n_pos"] | None:
        """Token ids; None for an image."""

    @property
    def pixels(self) -> Float[Tensor, "1 channels height width"] | None:
        """An image; None for a text."""

    @property
    def n_pos(self) -> int | None:
        """How long the residual stream is; None where only the model knows."""

    def options_of_call(self, model: nn.Module, /) -> dict[str, Any]:
        """Return the keyword arguments with which the model is called."""

    def str_tokens(self, model: nn.Module, n_pos: int, /) -> tuple[str, ...]:
        """Return the names of the tokens of a stream of `n_pos` rows."""

    def of_several_rows(self) -> "ModelInput":
        """Return an input whose stream has two rows at least."""

    def of_rows(self, n_rows: int, /) -> "ModelInput":
        """Return the input on which the model runs to make logits of some rows."""

    def stream(self, rows: Float[Tensor, "n_rows d_model"]) -> Tensor:
        """Return rows as the residual stream of that run."""

    @property
    def wanted_logits(self) -> str:
        """What logits the model should return, in words."""

    def rows_of_logits(self, logits: Tensor) -> Tensor | None:
        """Return the logits of every row; None if their shape is another."""


@dataclass(frozen=True, eq=False)
class TokenIds:
    """A text, as token ids."""

    kind: ClassVar[str] = "tokens"
    when_it_fails: ClassVar[str] = "another dtype"
    head: ClassVar[str] = "a language-model"
    n_rows_at_once: ClassVar[int] = _N_ROWS_AT_ONCE

    batch: Int[Tensor, "n_texts n_pos"]
    provenance: dict[str, object] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> Int[Tensor, " n_pos"]:
        """Token ids."""
        return self.batch[0]

    @property
    def pixels(self) -> None:
        """None: a text has no pixels."""
        return None

    @property
    def n_pos(self) -> int:
        """Number of tokens."""
        return self.batch.shape[1]

    def options_of_call(self, model: nn.Module, /) -> dict[str, Any]:
        """Return the keyword arguments with which the model is called."""
        # A cache of keys and values would be filled and never read.
        options = {"use_cache": False} if is_bridge(model) else {}
        return {**_on_device_of(model, self.further), **options}

    def str_tokens(self, model: nn.Module, _n_pos: int, /) -> tuple[str, ...]:
        """Return each token as text; its id where the model has no tokenizer."""
        return str_tokens(model, self.tokens)

    def of_several_rows(self) -> "TokenIds":
        """Return the same text, or one token twice."""
        ids = self.batch.repeat(1, 2) if self.n_pos == 1 else self.batch
        return TokenIds(ids)

    def of_rows(self, n_rows: int, /) -> "TokenIds":
        """Return the first token, as so many texts of one token each."""
        return TokenIds(self.batch[:, :1].expand(n_rows, 1))

    def stream(
        self, rows: Float[Tensor, "n_rows d_model"]
    ) -> Float[Tensor, "n_rows 1 d_model"]:
        """Return rows as the tokens of as many texts."""
        return rows[:, None]

    @property
    def wanted_logits(self) -> str:
        """What logits the model should return, in words."""
        return f"every token, [1 {self.n_pos} d_vocab]"

    def rows_of_logits(self, logits: Tensor) -> Float[Tensor, "n_rows d_vocab"] | None:
        """Return the logits of every token; None if their shape is another."""
        has_every_token = logits.ndim == 3 and logits.shape[:-1] == self.batch.shape
        return logits.flatten(0, 1) if has_every_token else None


@dataclass(frozen=True, eq=False)
class Pixels:
    """An image, as pixels."""

    kind: ClassVar[str] = "pixels"
    when_it_fails: ClassVar[str] = "pixels of the shape it was made for"
    head: ClassVar[str] = "an image classifier's"
    wanted_logits: ClassVar[str] = "an image, [1 n_classes]"
    n_rows_at_once: ClassVar[int] = _N_ROWS_AT_ONCE

    batch: Float[Tensor, "1 channels height width"]
    provenance: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> None:
        """None: an image has no token ids."""
        return None

    @property
    def pixels(self) -> Float[Tensor, "1 channels height width"]:
        """The image."""
        return self.batch

    @property
    def n_pos(self) -> None:
        """None: how many patches and other tokens there are, the model decides."""
        return None

    def options_of_call(self, model: nn.Module, /) -> dict[str, Any]:
        """Return the keyword arguments with which the model is called."""
        return _on_device_of(model, self.further)

    def str_tokens(self, _model: nn.Module, n_pos: int, /) -> tuple[str, ...]:
        """Return `cls`, the names of further tokens, and the `row,column` of each
        patch; positions where the size of patches is not known.
        """
        rows, columns = self.provenance["patch_grid"] or (0, 0)
        # Beside the patches and the class token; −1 for a model without one.
        n_extra = n_pos - rows * columns - 1
        if not rows or n_extra < -1:
            return tuple(map(str, range(n_pos)))
        patches = [
            f"{row},{column}" for row in range(rows) for column in range(columns)
        ]
        if n_extra == -1:
            return tuple(patches)
        # DeiT's second token is its teacher's; DINOv2 has several of no meaning.
        extra = ["distillation"]
        if n_extra != 1:
            extra = [f"register {i}" for i in range(n_extra)]
        return ("cls", *extra, *patches)

    def of_several_rows(self) -> "Pixels":
        """Return the same image: its patches are rows."""
        return self

    def of_rows(self, _n_rows: int, /) -> "Pixels":
        """Return the same image: each row is the class token of one like it."""
        return self

    def stream(
        self, rows: Float[Tensor, "n_rows d_model"]
    ) -> Float[Tensor, "n_rows 1 d_model"]:
        """Return rows as the class tokens of as many images."""
        return rows[:, None]

    def rows_of_logits(
        self, logits: Tensor
    ) -> Float[Tensor, "n_rows n_classes"] | None:
        """Return the logits of every image; None if their shape is another."""
        return logits if logits.ndim == 2 else None


def model_input(model: Any, prompt: Any, prepend_bos: bool | None) -> ModelInput:
    """Return the input of a model that a prompt means: text or token ids, or for a
    vision model an image; or what a tokenizer or processor returns.

    Raises:
        TypeError: what the model does not read.
        ValueError: what is no image, an empty prompt, one longer than the context, or
            one with inputs that the model does not take.
    """
    further: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        prompt, further = _unpack_batch(model, prompt)
    described = {name: _described_input(value) for name, value in further.items()}
    inputs = {"inputs": described} if described else {}
    if reads_pixels(model):
        image, provenance = image_provenance(model, prompt)
        return Pixels(image.pixels, provenance | inputs, image.remarks, further)
    is_pixels = isinstance(prompt, Tensor) and prompt.is_floating_point()
    if is_pixels or isinstance(prompt, Image.Image | os.PathLike):
        raise TypeError(
            "this model reads text: wanted text or token ids, whole numbers; got "
            f"{described_type(prompt)}; embeddings go through `trace_modules`"
        )
    tokens = tokens_of(model, prompt, prepend_bos)
    check_tokens(model, tokens.ids)
    text = prompt if isinstance(prompt, str) else None
    provenance = {**tokens.provenance, "prompt": text, "tokens": tokens.ids.tolist()}
    return TokenIds(tokens.ids[None], provenance | inputs, tokens.remarks, further)


def _unpack_batch(
    model: Any, batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the token ids or the pixels of what a tokenizer or processor returns, and
    what else the model is called with.

    Raises:
        ValueError: it has neither, tokens that are padding, or what the model does not
            take.
    """
    input_name = "pixel_values" if reads_pixels(model) else "input_ids"
    if input_name not in batch:
        raise ValueError(
            f"`prompt` must hold {input_name!r}, as a tokenizer or processor returns it for "
            f"this model; got {sorted(map(str, batch))}"
        )
    try:
        prompt = torch.as_tensor(batch[input_name])
        further = {
            name: _as_input(value)
            for name, value in batch.items()
            if name != input_name and value is not None
        }
    except ValueError:
        raise ValueError(
            "`prompt` must be one prompt, got several of different lengths: tokenize "
            "one text at a time"
        ) from None
    # Inputs that say nothing (a mask of ones) are left out, for models that do not take
    # them.
    if _says_nothing(further.get("attention_mask"), 1):
        del further["attention_mask"]
    # GPT-2 adds the embedding of token 0 where all types are 0.
    is_unused = not _takes(model, "token_type_ids")
    if is_unused and _says_nothing(further.get("token_type_ids"), 0):
        del further["token_type_ids"]
    mask = further.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim <= 2:
        raise ValueError(
            "`prompt` must be unpadded: its attention mask leaves tokens out; tokenize "
            "one text at a time, without padding"
        )
    for name, value in further.items():
        if not isinstance(value, Tensor | bool | int | float | str):
            raise ValueError(
                f"`prompt` must hold tensors and numbers, {name!r} is a "
                f"{type(value).__name__}, which the model may change: leave it out"
            )
        if not _takes(model, name):
            raise ValueError(
                f"`prompt` must hold what the model takes: {name!r} is no argument of "
                f"{type(_called(model)).__name__}; leave it out"
            )
    return prompt, further


def _as_input(value: Any) -> Any:
    """Return a list of numbers as a tensor of one text, and anything else as it is."""
    if not isinstance(value, list | tuple | np.ndarray):
        return value
    tensor = torch.as_tensor(value)
    return tensor[None] if tensor.ndim == 1 else tensor


def _says_nothing(value: Any, usual: int) -> bool:
    return (
        isinstance(value, Tensor) and value.ndim <= 2 and bool((value == usual).all())
    )


def _called(model: Any) -> Any:
    """Return what is called in the end: the HuggingFace model, or the model itself."""
    return model.original_model if is_bridge(model) else model


def _takes(model: Any, name: str) -> bool:
    """Say whether a model's call has an argument of this name; one that takes any would
    swallow it without a word.
    """
    called = _called(model)
    models = [called]
    # A model of peft passes on what it gets.
    if hasattr(type(called), "get_base_model"):
        models.append(called.get_base_model())
    return any(name in inspect.signature(m.forward).parameters for m in models)


def _on_device_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    device = input_device(model)
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def _described_input(value: Any) -> object:
    """Return what provenance says of a further input: a checksum of a tensor."""
    if not isinstance(value, Tensor):
        return value
    content = value.detach().cpu().double().contiguous().numpy().tobytes()
    return {
        "shape": list(value.shape),
        "sha256": hashlib.sha256(content).hexdigest()[:16],
    }
