"""Images as a vision model reads them: pixels, prepared by the processor that was saved
with the model, and how they were prepared.
"""

import hashlib
import os
from functools import lru_cache
from typing import Any, NamedTuple

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from tl_coupling.models.facts import facts_of
from tl_coupling.models.loaded import config_of
from tl_coupling.models.pictures import picture_in


class PreparedImage(NamedTuple):
    """Pixels, how they were made, and what a user would not expect of that."""

    pixels: Float[Tensor, "1 channels height width"]
    preparation: dict[str, object]
    remarks: tuple[str, ...] = ()


def prepared_image(model: Any, image: object) -> PreparedImage:
    """Return an image as the model reads it. Pixels are taken as they are.

    Raises:
        TypeError: neither pixels nor an image or its file.
        ValueError: pixels of more than one image, or that are not finite; an image that
            cannot be read; no processor was saved with the model.
    """
    if isinstance(image, Tensor) and image.is_floating_point():
        as_given: dict[str, object] = {"preprocessing": "none: pixels were given"}
        return PreparedImage(_pixels_of_one_image(image), as_given)
    if not isinstance(image, str | os.PathLike | Image.Image):
        raise TypeError(
            "this model reads images: wanted pixels [1 channels height width] in "
            "floating point, a PIL image or an image file; "
            f"got {described_type(image)}"
        )
    config = config_of(model)
    # PIL's names for grey and for colour.
    mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
    picture = picture_in(mode, image)
    loaded_as = facts_of(model).loaded_as
    processor = _image_processor(
        config._name_or_path,
        loaded_as.get("checkpoint"),
        loaded_as.get("trust_remote_code", False),
    )
    pixels = processor(picture.image, return_tensors="pt")["pixel_values"]
    all_settings = processor.to_dict()
    settings = {name: v for name, v in all_settings.items() if v is not None}
    preparation = {
        "preprocessing": {"mode": mode, **settings},
        "exif_orientation": picture.exif_orientation,
    }
    return PreparedImage(pixels, preparation, picture.remarks)


def image_provenance(
    model: Any, image: object
) -> tuple[PreparedImage, dict[str, object]]:
    """Return a prepared image, and the provenance of a trace that is run on it."""
    prepared = prepared_image(model, image)
    pixels = prepared.pixels
    # In float32: pixels that were given in another dtype have the same checksum.
    content = pixels.float().contiguous().numpy().tobytes()
    facts: dict[str, object] = {}
    if isinstance(image, str | os.PathLike):
        facts["name"] = os.path.basename(image)
    facts["pixels_sha256"] = hashlib.sha256(content).hexdigest()
    facts["pixels_shape"] = list(pixels.shape[1:])
    facts |= prepared.preparation
    return prepared, {"image": facts, "patch_grid": _patch_grid(model, pixels)}


def described_type(value: object) -> str:
    """Say what kind of thing was given, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a {type(value).__name__}"


def _pixels_of_one_image(image: Tensor) -> Float[Tensor, "1 channels height width"]:
    pixels = image.detach().cpu()
    if pixels.ndim == 3:
        pixels = pixels[None]
    if pixels.ndim != 4 or len(pixels) != 1:
        raise ValueError(
            "`prompt` must be one image, [1 channels height width], got shape "
            f"{list(image.shape)}"
        )
    if not bool(pixels.isfinite().all()):
        raise ValueError(
            "`prompt` must be an image of finite numbers, got NaN or infinite ones "
            "among its pixels"
        )
    return pixels


@lru_cache(maxsize=8)
def _image_processor(
    name_or_path: str, checkpoint: str | int | None, trust_remote_code: bool
) -> Any:
    from transformers import AutoImageProcessor

    # A training step is no branch; its processor is that of the main one.
    revision = {"revision": checkpoint} if isinstance(checkpoint, str) else {}
    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoImageProcessor.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, **revision
        )
    except (OSError, ValueError, ImportError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            "no image processor is saved with this model, so it takes only "
            f"pixels, [1 channels height width] ({cause})"
        ) from None


def _patch_grid(
    model: Any, pixels: Float[Tensor, "1 channels height width"]
) -> list[int] | None:
    """Return how many rows and columns of patches there are; None where the model does
    not declare their size.
    """
    size = getattr(config_of(model), "patch_size", None)
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return [pixels.shape[-2] // height, pixels.shape[-1] // width]
