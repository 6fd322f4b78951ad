"""Patches over the picture: what is drawn where, and on which picture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from PIL import Image

import tl_coupling as tlc
from tl_coupling.pictures import plot_patches
from tl_coupling.pictures.patches import picture_of
from vision_models import pixels, vit

pytestmark = pytest.mark.usefixtures("pyplot_untouched")


@pytest.fixture(scope="module")
def trace(folder_vit: Path) -> tlc.Trace:
    return tlc.trace(tlc.load_model(str(folder_vit)), folder_vit / "image.png")


def test_every_value_lies_on_its_patch_and_the_class_tokens_below(
    trace: tlc.Trace,
) -> None:
    values = torch.arange(9.0) / 10 + 3
    ax = plot_patches(trace, values, label="a measure", position=0)
    picture, over = ax.images
    # Four rows of two patches, after the class token.
    np.testing.assert_allclose(over.get_array(), values[1:].reshape(4, 2))
    assert picture.get_extent() == over.get_extent() == [-0.5, 1.5, 3.5, -0.5]
    assert over.get_clim() == pytest.approx((3.1, 3.8))
    assert 0 < over.get_alpha() < 1
    assert ax.get_xlabel() == "column of patches\ncls: 3"
    assert ax.figure.axes[1].get_ylabel() == "a measure"
    assert "image.png" in ax.get_title()
    assert "token 0 ‘cls’" in ax.get_title()
    # The outline is of a patch.
    assert not [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    ax = plot_patches(trace, values, position=-2, vmin=0, vmax=9, cmap="magma")
    (outline,) = ax.patches
    assert outline.get_bbox().bounds == (-0.5, 2.5, 1, 1)
    assert ax.images[1].get_clim() == (0, 9)
    assert ax.images[1].get_cmap().name == "magma"


def test_the_picture_is_the_image_that_the_model_read(
    trace: tlc.Trace, folder_vit: Path
) -> None:
    with Image.open(folder_vit / "image.png") as image:
        expected = np.asarray(image) / 255
    np.testing.assert_allclose(picture_of(trace), expected, atol=1e-6)
    grey = plot_patches(trace, torch.ones(9)).images[0].get_array()
    # Paler, in the same order.
    assert np.corrcoef(grey.ravel(), expected.mean(-1).ravel())[0, 1] == pytest.approx(
        1
    )


def test_pixels_without_a_processor_go_from_black_to_white() -> None:
    trace = tlc.trace(vit("DeiTForImageClassification")[0], pixels())
    picture = picture_of(trace)
    assert (picture.shape, picture.min(), picture.max()) == ((16, 8, 3), 0, 1)
    ax = plot_patches(trace, torch.arange(trace.n_pos).float())
    n_before = trace.n_pos - 8
    assert np.asarray(ax.images[1].get_array()).ravel().tolist() == list(
        range(n_before, trace.n_pos)
    )


def test_undefined_values_are_not_drawn(trace: tlc.Trace) -> None:
    values = torch.arange(9.0)
    values[[0, 4]] = torch.nan
    ax = plot_patches(trace, values)
    assert (
        np.isnan(np.ma.filled(ax.images[1].get_array().astype(float), np.nan)).sum()
        == 1
    )
    assert ax.images[1].get_clim() == (1, 8)
    assert ax.get_xlabel() == "column of patches"
    plot_patches(trace, torch.full((9,), torch.nan)).figure.canvas.draw()


def test_bad_input_says_what_was_wanted(
    trace: tlc.Trace, tiny_trace: tlc.Trace
) -> None:
    text = torch.ones(tiny_trace.n_pos)
    unknown = replace(trace, provenance=trace.provenance | {"patch_grid": None})
    for call, message in (
        (lambda: plot_patches(tiny_trace, text), "wanted the trace of an image"),
        (lambda: plot_patches(unknown, torch.ones(9)), "wanted the trace of an image"),
        (
            lambda: plot_patches(trace, torch.ones(8)),
            "one for each of the 9 tokens, got 8",
        ),
        (
            lambda: plot_patches(trace, torch.ones(9), position=9),
            r"`position` must lie in \[-9, 8\]",
        ),
        (
            lambda: plot_patches(trace, torch.ones(9), vmin=2, vmax=1),
            "`vmin` must lie below `vmax`",
        ),
        (
            lambda: plot_patches(trace, torch.ones(9), cmap="no"),
            "`cmap` must be a colour map",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
