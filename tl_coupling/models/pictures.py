"""Pictures of any kind as a processor takes them: upright, in 8 bits, in colour or
grey; and what that did to them.
"""

import os
import warnings
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

# More than photographs have. Decoding and preparing takes about 15 bytes a pixel: 1 GiB
# for as many.
MOST_PIXELS = 2**26
# Modes whose conversion to colour or to grey is the one that everybody expects.
_USUAL_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX"}
_SMALLER = f"wanted at most {MOST_PIXELS:,} (8,192 × 8,192): make it smaller"


class Picture(NamedTuple):
    """An image in the mode that was asked for.

    `exif_orientation` is the camera's, 1 to 8, which has been undone; `remarks` say in
    words what else was changed, or left out.
    """

    image: Image.Image
    exif_orientation: int
    remarks: tuple[str, ...]


def picture_in(mode: str, source: str | os.PathLike[str] | Image.Image) -> Picture:
    """Return the picture of a file, or of PIL's, in `"RGB"` or `"L"`.

    Its size is read before it is decoded.

    Raises:
        ValueError: no image, one without pixels or with more than `MOST_PIXELS`, one
            that cannot be decoded, or grey values whose scale is not known.
    """
    if isinstance(source, Image.Image):
        return _convert(mode, source, "the image")
    name = repr(os.fspath(source))
    try:
        # Opened here, because PIL leaves files open that it refuses.
        file = open(source, "rb")  # noqa: SIM115
    # A name may have a null byte or characters that no file name has.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"this model reads images, and {name} is not an image file ({_one_line(error)})"
        ) from None
    with file:
        return _convert(mode, _opened(file, name), name)


def _opened(file: BinaryIO, name: str) -> Image.Image:
    """Open the picture in a file, not decoded yet."""
    try:
        with warnings.catch_warnings():
            # PIL only warns of pictures that are up to twice its own limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(file)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{name} has too many pixels ({_one_line(error)}): {_SMALLER}"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(
            f"this model reads images, and {name} is not an image file of a kind that PIL knows"
        ) from None
    except OSError as error:
        raise ValueError(
            f"this model reads images, and {name} is not an image file ({_one_line(error)})"
        ) from None


def _convert(mode: str, image: Image.Image, name: str) -> Picture:
    """Return a picture upright and in a mode; the name is for errors."""
    _check_size(image, name)
    n_frames = getattr(image, "n_frames", 1)
    frame = image.tell()
    upright, orientation = _upright(image, name)
    remarks = []
    if n_frames > 1:
        remarks.append(
            f"the image has {n_frames} frames: frame {frame} is measured, counted from 0"
        )
    if upright.mode.startswith("I") or upright.mode == "F":
        upright, scaling = _scale_to_8_bits(upright, name)
        remarks += scaling
    elif upright.mode not in _USUAL_MODES:
        remarks.append(
            f"the image is in {upright.mode}: converted without a profile, colours are "
            "approximate"
        )
    try:
        # Palettes may be transparent too: only in RGBA is there a channel to look at.
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            least_opaque = int(np.asarray(upright.getchannel("A")).min())
            if least_opaque < 255:
                remarks.append(
                    "the image is transparent in places: that is ignored, the colours "
                    "beneath are measured"
                )
        converted = upright.convert(mode)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be converted to {mode} ({_one_line(error)}): save it as RGB"
        ) from None
    return Picture(converted, orientation, tuple(remarks))


def _upright(image: Image.Image, name: str) -> tuple[Image.Image, int]:
    """Decode a picture; return it turned upright, and the orientation that it had."""
    try:
        image.load()
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return ImageOps.exif_transpose(image), orientation
    except MemoryError:
        raise
    # PIL's decoders raise what they like on damaged files: SyntaxError, EOFError,
    # struct.error, …
    except Exception as error:
        raise ValueError(
            f"{name} is not an image file that can be read ({_one_line(error)})"
        ) from None


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if not width * height:
        raise ValueError(
            f"{name} has no pixels, {width} × {height}: wanted an image of at least 1 × 1"
        )
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"{name} has too many pixels ({width:,} × {height:,}): {_SMALLER}"
        )


def _scale_to_8_bits(image: Image.Image, name: str) -> tuple[Image.Image, list[str]]:
    """Scale a picture of greys in 16 bits, whole numbers or floating point, which PIL
    would cut off at 255; return it, and a remark if it was scaled.

    Modes `I` and `F` do not name their scale. It is that of 8 bits where no value is
    larger; of numbers from 0 to 1 in floating point; and of 16 bits.
    """
    values = np.asarray(image).astype(np.float64)
    darkest = float(values.min())
    brightest = float(values.max())
    if not 0 <= darkest <= brightest <= 65535:
        raise ValueError(
            f"{name} must have greys from 0 to 1, 255 or 65,535, it has {darkest:g} … "
            f"{brightest:g}: scale it"
        )
    if image.mode == "F" and brightest <= 1:
        values = 255 * values
        remarks = ["the image is grey in numbers from 0 to 1: scaled to 8 bits"]
    elif image.mode in ("I", "F") and brightest <= 255:
        remarks = []
    else:
        # 65,535 / 255: white stays white.
        values = values / 257
        remarks = ["the image is grey in 16 bits: scaled to 8 bits"]
    return Image.fromarray(values.round().astype(np.uint8)), remarks


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
