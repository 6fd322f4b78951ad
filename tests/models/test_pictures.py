"""Pictures of every kind: the model reads what a viewer shows, and is told what was
changed or refused.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch import nn

import tl_coupling as tlc
from tl_coupling.models import pictures
from tl_coupling.pictures.patches import picture_of
from tl_coupling.report.patches import shown_picture
from vision_models import png_header, save_vit

HEIGHT, WIDTH = 16, 8
ORIENTATION = 0x0112
# What a viewer does to the stored picture, by its EXIF orientation.
SHOWN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return tlc.load_model(str(save_vit(tmp_path_factory.mktemp("vit"))))


def colors(height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def expected_pixels(rgb: np.ndarray) -> torch.Tensor:
    """As the processor of `save_vit` prepares a picture of the model's size, by
    hand.
    """
    return torch.tensor(rgb / 127.5 - 1, dtype=torch.float32).permute(2, 0, 1)[None]


def read_pixels(model: nn.Module, image: object) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tlc.trace(model, image).pixels


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("as_file", [True, False])
def test_a_photograph_is_turned_as_its_camera_was_held(
    model: nn.Module, tmp_path: Path, orientation: int, as_file: bool
) -> None:
    stored = colors(WIDTH, HEIGHT) if orientation >= 5 else colors()
    image = Image.fromarray(stored)
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    image.save(tmp_path / "photo.png", exif=exif)
    with Image.open(tmp_path / "photo.png") as opened:
        trace = tlc.trace(model, tmp_path / "photo.png" if as_file else opened)
    shown = np.ascontiguousarray(SHOWN[orientation](stored))
    upright = tlc.trace(model, Image.fromarray(shown))
    torch.testing.assert_close(trace.pixels, expected_pixels(shown))
    assert trace.provenance["image"]["exif_orientation"] == orientation
    assert (
        trace.provenance["image"]["pixels_sha256"]
        == upright.provenance["image"]["pixels_sha256"]
    )
    # The report shows what was measured.
    np.testing.assert_allclose(picture_of(trace), shown / 255, atol=1e-6)
    source = re.compile('src="[^"]*"')
    assert source.findall(shown_picture(trace)) == source.findall(
        shown_picture(upright)
    )


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("as_file", [True, False])
def test_greys_of_16_bits_are_scaled(
    model: nn.Module, tmp_path: Path, suffix: str, as_file: bool
) -> None:
    greys = colors()[..., 0].astype(np.uint16)
    image = Image.fromarray(257 * greys)
    assert image.mode == "I;16"
    image.save(tmp_path / f"scan.{suffix}")
    with pytest.warns(
        UserWarning, match="the image is grey in 16 bits: scaled to 8 bits"
    ):
        trace = tlc.trace(model, tmp_path / f"scan.{suffix}" if as_file else image)
    torch.testing.assert_close(trace.pixels, expected_pixels(np.stack([greys] * 3, -1)))
    assert trace.provenance["remarks"] == [
        "the image is grey in 16 bits: scaled to 8 bits"
    ]


@pytest.mark.parametrize(
    ("kind", "factor", "remark"),
    [
        (np.int32, 257, "16 bits"),
        (np.int32, 1, ""),
        (np.float32, 257, "16 bits"),
        (np.float32, 1, ""),
        (np.float32, 1 / 255, "numbers from 0 to 1"),
    ],
)
def test_greys_of_unknown_scale_go_by_their_largest(
    model: nn.Module, kind, factor: float, remark: str
) -> None:
    greys = colors()[..., 0]
    greys[0, 0] = 255
    image = Image.fromarray((factor * greys.astype(np.float64)).astype(kind))
    assert image.mode in ("I", "F")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trace = tlc.trace(model, image)
    torch.testing.assert_close(trace.pixels, expected_pixels(np.stack([greys] * 3, -1)))
    assert trace.provenance["remarks"] == (
        [f"the image is grey in {remark}: scaled to 8 bits"] if remark else []
    )
    assert len(warned) == bool(remark)


@pytest.mark.parametrize("values", [-1.0, 70000.0, np.nan])
def test_greys_beyond_every_scale_are_refused(model: nn.Module, values: float) -> None:
    greys = np.full((HEIGHT, WIDTH), values, dtype=np.float32)
    with pytest.raises(
        ValueError, match="the image must have greys from 0 to 1, 255 or 65,535, it has"
    ):
        tlc.trace(model, Image.fromarray(greys))


def test_of_an_animation_one_frame_is_measured_and_said(
    model: nn.Module, tmp_path: Path
) -> None:
    frames = [Image.fromarray(colors(seed=seed)) for seed in range(3)]
    frames[0].save(tmp_path / "moving.png", save_all=True, append_images=frames[1:])
    with pytest.warns(
        UserWarning, match="the image has 3 frames: frame 0 is measured, counted from 0"
    ):
        trace = tlc.trace(model, tmp_path / "moving.png")
    torch.testing.assert_close(trace.pixels, expected_pixels(colors()))
    with Image.open(tmp_path / "moving.png") as animation:
        animation.seek(2)
        with pytest.warns(UserWarning, match="frame 2 is measured"):
            trace = tlc.trace(model, animation)
    torch.testing.assert_close(trace.pixels, expected_pixels(colors(seed=2)))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_colours_of_another_space_are_converted_and_said(
    model: nn.Module, mode: str
) -> None:
    image = Image.fromarray(colors()).convert(mode)
    with pytest.warns(
        UserWarning, match=f"the image is in {mode}: converted without a profile"
    ):
        trace = tlc.trace(model, image)
    torch.testing.assert_close(
        trace.pixels, expected_pixels(np.asarray(image.convert("RGB")))
    )


def test_a_file_in_cmyk(model: nn.Module, tmp_path: Path) -> None:
    Image.fromarray(colors()).convert("CMYK").save(tmp_path / "print.tif")
    with pytest.warns(UserWarning, match="the image is in CMYK"):
        assert (
            "CMYK" in tlc.trace(model, tmp_path / "print.tif").provenance["remarks"][0]
        )


def test_what_cannot_be_converted_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ValueError,
        match=r"the image cannot be converted to RGB \(.* La .*\): save it as RGB",
    ):
        tlc.trace(model, Image.new("La", (WIDTH, HEIGHT)))


def see_through(alpha: int, mode: str) -> Image.Image:
    image = Image.fromarray(colors()).convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes([alpha]) * 256
        return image
    image.putalpha(Image.fromarray(np.full((HEIGHT, WIDTH), alpha, dtype=np.uint8)))
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_said_where_there_is_any(model: nn.Module, mode: str) -> None:
    opaque = read_pixels(model, see_through(255, mode))
    with pytest.warns(
        UserWarning, match="the image is transparent in places: that is ignored"
    ):
        trace = tlc.trace(model, see_through(100, mode))
    assert torch.equal(trace.pixels, opaque)
    base = Image.fromarray(colors()).convert(mode).convert("RGB")
    torch.testing.assert_close(opaque, expected_pixels(np.asarray(base)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_usual_modes_are_read_without_a_word(model: nn.Module, mode: str) -> None:
    image = Image.fromarray(colors()).convert(mode)
    torch.testing.assert_close(
        read_pixels(model, image), expected_pixels(np.asarray(image.convert("RGB")))
    )


@pytest.mark.parametrize("side", [8193, 12_000, 30_000])
def test_too_many_pixels_are_refused_before_they_are_decoded(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(side, side))
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda *_: pytest.fail("it was decoded")
    )
    with pytest.raises(
        ValueError,
        match=r"bomb\.png' has too many pixels \(.*: wanted at most 67,108,864",
    ) as caught:
        read_pixels(model, tmp_path / "bomb.png")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    message = rf"the image has too many pixels \({side:,} × {side:,}\): wanted at most 67,108,864"
    with (
        Image.open(tmp_path / "bomb.png") as image,
        pytest.raises(ValueError, match=message),
    ):
        read_pixels(model, image)


def test_the_limit_is_one_of_pixels(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_PIXELS", HEIGHT * WIDTH)
    read_pixels(model, Image.fromarray(colors()))
    with pytest.raises(ValueError, match=r"too many pixels \(9 × 16\)"):
        read_pixels(model, Image.fromarray(colors(HEIGHT, WIDTH + 1)))


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(
    model: nn.Module, tmp_path: Path, size: tuple[int, int]
) -> None:
    width, height = size
    with pytest.raises(
        ValueError, match=f"the image has no pixels, {width} × {height}"
    ):
        tlc.trace(model, Image.new("RGB", size))
    (tmp_path / "empty.ppm").write_bytes(b"P6 %d %d 255\n" % size)
    with pytest.raises(ValueError, match=r"empty\.ppm"):
        tlc.trace(model, tmp_path / "empty.ppm")


def test_a_broken_file_is_refused_in_one_line(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "half.png").write_bytes(png_header(WIDTH, HEIGHT))
    with Image.open(tmp_path / "half.png") as image:
        for source in (tmp_path / "half.png", image):
            with pytest.raises(
                ValueError, match="is not an image file that can be read"
            ) as caught:
                tlc.trace(model, source)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b.png", "\ud800.png"])
def test_names_that_no_file_has(model: nn.Module, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"this model reads images, and .* is not an image file"
    ):
        tlc.trace(model, name)
