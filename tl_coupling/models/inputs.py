"""What a model is run on: token ids, made from text, or pixels, made from an image; and
what its tokens are called.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from tl_coupling.arguments import check_text
from tl_coupling.models.facts import facts_of
from tl_coupling.models.loaded import (
    config_of,
    context_length,
    is_bridge,
    reads_pixels,
)
from tl_coupling.models.pictures import picture_in

_GIVE_IDS = "give the prompt as token ids"


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One input of a model: `batch` is token ids `[1 n_pos]` or pixels `[1 channels
    height width]`.

    `remarks` say what a user would not expect of how it was made.
    """

    model: nn.Module
    batch: Tensor
    provenance: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def tokens(self) -> Int[Tensor, " n_pos"] | None:
        """Token ids; None for an image."""
        return None if self.batch.is_floating_point() else self.batch[0]

    def str_tokens(self, n_pos: int) -> tuple[str, ...]:
        """Each token as text (its id without a tokenizer); of an image `cls`, and the
        `row,column` of each patch.
        """
        if self.tokens is not None:
            return str_tokens(self.model, self.tokens)
        rows, columns = self.provenance["patch_grid"] or (0, 0)
        n_more = n_pos - rows * columns - 1
        if not rows or n_more < -1:
            return tuple(map(str, range(n_pos)))
        # DeiT's second token is its teacher's; DINOv2 has several of no meaning.
        more = (
            ["distillation"]
            if n_more == 1
            else [f"register {i}" for i in range(n_more)]
        )
        patches = [
            f"{row},{column}" for row in range(rows) for column in range(columns)
        ]
        return (*["cls"][: n_more + 1], *more, *patches)


def model_input(model: Any, prompt: Any, prepend_bos: bool | None) -> ModelInput:
    """The input of a model that a prompt means: text or token ids, or for a vision
    model an image.

    Raises TypeError for what the model does not read; ValueError for what is no image,
    an empty prompt, or one longer than the context.
    """
    if reads_pixels(model):
        pixels, preparation, remarks = _pixels(model, prompt)
        digest = hashlib.sha256(
            pixels.float().contiguous().numpy().tobytes()
        ).hexdigest()
        name = (
            {"name": os.path.basename(prompt)}
            if isinstance(prompt, str | os.PathLike)
            else {}
        )
        facts = (
            name
            | {"pixels_sha256": digest, "pixels_shape": list(pixels.shape[1:])}
            | preparation
        )
        return ModelInput(
            model,
            pixels,
            {"image": facts, "patch_grid": _patch_grid(model, pixels)},
            remarks,
        )
    if isinstance(prompt, Image.Image | os.PathLike) or (
        isinstance(prompt, Tensor) and prompt.is_floating_point()
    ):
        raise TypeError(
            f"this model reads text: wanted text or token ids, whole numbers; got {_kind(prompt)}"
        )
    tokens, tokenization = tokenize(model, prompt, prepend_bos)
    _check_tokens(model, tokens)
    said = {
        "prompt": prompt if isinstance(prompt, str) else None,
        "tokens": tokens.tolist(),
    }
    return ModelInput(model, tokens[None], tokenization | said)


def _pixels(
    model: Any, image: Any
) -> tuple[Float[Tensor, "1 channels height width"], dict[str, Any], tuple[str, ...]]:
    """An image as the model reads it, by the processor that was saved with the model;
    how it became so, and remarks.
    """
    if isinstance(image, Tensor) and image.is_floating_point():
        pixels = image.detach().cpu()
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        if pixels.ndim != 4 or len(pixels) != 1:
            raise ValueError(
                f"`prompt` must be one image, [1 channels height width], got shape {list(image.shape)}"
            )
        if not bool(pixels.isfinite().all()):
            raise ValueError(
                "`prompt` must be an image of finite numbers, got NaN or infinite ones among its pixels"
            )
        return pixels, {"preprocessing": "none: pixels were given"}, ()
    if not isinstance(image, str | os.PathLike | Image.Image):
        raise TypeError(
            "this model reads images: wanted pixels [1 channels height width] in floating point, a PIL image or an "
            f"image file; got {_kind(image)}"
        )
    config = config_of(model)
    mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
    picture = picture_in(mode, image)
    loaded = facts_of(model).loaded_as
    checkpoint, trusted = (
        loaded.get("checkpoint"),
        loaded.get("trust_remote_code", False),
    )
    processor = _image_processor(config._name_or_path, checkpoint, trusted)
    pixels = processor(picture.image, return_tensors="pt")["pixel_values"]
    settings = {
        name: value for name, value in processor.to_dict().items() if value is not None
    }
    preparation = {
        "preprocessing": {"mode": mode} | settings,
        "exif_orientation": picture.exif_orientation,
    }
    return pixels, preparation, picture.remarks


def _kind(given: Any) -> str:
    return (
        f"a tensor of {given.dtype}"
        if isinstance(given, Tensor)
        else f"a {type(given).__name__}"
    )


@lru_cache(maxsize=8)
def _image_processor(
    name_or_path: str, checkpoint: str | int | None, trust_remote_code: bool
) -> Any:
    from transformers import AutoImageProcessor

    try:
        revision = {"revision": checkpoint} if isinstance(checkpoint, str) else {}
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoImageProcessor.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, **revision
        )
    except (OSError, ValueError, ImportError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"no image processor is saved with this model, so that it takes pixels alone, [1 channels height width] "
            f"({said})"
        ) from None


def _patch_grid(
    model: Any, pixels: Float[Tensor, "1 channels height width"]
) -> list[int] | None:
    """Rows and columns of patches; None where the model does not declare their size."""
    if (size := getattr(config_of(model), "patch_size", None)) is None:
        return None
    sides = size if isinstance(size, list | tuple) else (size, size)
    return [pixels.shape[-2] // sides[0], pixels.shape[-1] // sides[1]]


def _check_tokens(model: Any, tokens: Int[Tensor, " n_pos"]) -> None:
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: wanted at least one token")
    n_ctx, d_vocab = context_length(model), model.cfg.d_vocab
    if n_ctx is not None and n_ctx < len(tokens):
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, this model's context holds {n_ctx}: shorten the prompt"
        )
    least, most = int(tokens.min()), int(tokens.max())
    if d_vocab is not None and d_vocab > 0 and not 0 <= least <= most < d_vocab:
        raise ValueError(
            f"token ids must lie in [0, {d_vocab - 1}], got {least} … {most}"
        )


def tokenize(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> tuple[Int[Tensor, " n_pos"], dict[str, Any]]:
    """Token ids of one prompt, and their provenance. Ids are taken as they are.

    Text begins with what the tokenizer prepends by itself (`prepend_bos=None`), nothing
    (`False`), or at least a BOS token (`True`). What a tokenizer appends (`</s>`) is
    left off, so that the last position is the last token of the text. Models that read
    both ways (BERT) keep it: their other tokens see the `[SEP]`, and were trained to.

    Raises:
        ValueError: an empty prompt, ids of more than one prompt, text without a
            tokenizer or with lone surrogates, no BOS token.

    Example:
        >>> tokens, provenance = tlc.models.tokenize(model, "w3 w14 w15", prepend_bos=True)
        >>> tokens
        tensor([ 0,  3, 14, 15])
    """
    if not isinstance(prompt, str):
        given = torch.as_tensor(prompt, dtype=torch.long, device="cpu")
        if given.ndim != 1 and not (given.ndim == 2 and len(given) == 1):
            wanted = "text, or token ids [n_pos] or [1 n_pos] of one prompt"
            raise ValueError(
                f"`prompt` must be {wanted}; got shape {list(given.shape)}"
            )
        return given.flatten(), dict.fromkeys(
            ("prepend_bos", "append_eos"), "token ids given"
        )
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"this model has no tokenizer: {_GIVE_IDS}")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    check_text(prompt, "prompt")
    own = tokenizer
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        # TransformerLens may have replaced it by one that always prepends.
        trusted = facts_of(model).loaded_as.get("trust_remote_code", False)
        own = _reloaded_tokenizer(tokenizer.name_or_path, trusted) or tokenizer
    text = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    encoded = own(prompt, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    # The mask tells an appended token from the same token in the text, but not every
    # tokenizer fills it in.
    starts = [
        special.index(0) if 0 in special else 0,
        *range(len(ids) - len(text), -1, -1),
    ]
    start = next((i for i in starts if ids[i : i + len(text)] == text), None)
    if start is None:
        raise ValueError(
            f"this model's tokenizer splits the text differently when it adds special tokens: {_GIVE_IDS}"
        )
    before, after = ids[:start], ids[start + len(text) :]
    if prepend_bos is False:
        before = []
    elif prepend_bos and not before:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "`prepend_bos=True`, but this model's tokenizer has no BOS token"
            )
        before = [tokenizer.bos_token_id]
    after = after if _reads_both_ways(model) else []
    added = {"prepend_bos": bool(before), "append_eos": bool(after)}
    return torch.tensor([*before, *text, *after], dtype=torch.long), added


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Each token as text; its id where the model has no tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return tuple(map(str, tokens.tolist()))
    return tuple(
        tokenizer.decode([i], clean_up_tokenization_spaces=False)
        for i in tokens.tolist()
    )


def _reads_both_ways(model: Any) -> bool:
    """Whether tokens also see those after them (BERT), so that an appended token
    changes them.
    """
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    is_decoder = is_bridge(model) and getattr(config_of(model), "is_decoder", False)
    is_masked = getattr(model.cfg, "architecture", None) in MASKED_LM_ARCHITECTURES
    return not is_decoder and (
        is_masked or getattr(model.cfg, "attention_dir", "causal") == "bidirectional"
    )


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None
