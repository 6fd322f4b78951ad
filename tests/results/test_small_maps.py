"""Small maps: their pixels are the values, and notebooks show them below tables."""

import base64
import io
import re

import matplotlib
import numpy as np
import PIL.Image
import pytest

import tl_coupling as tlc
from tl_coupling.results import DIVERGING, SEQUENTIAL, small_map, small_map_html

GREY = (187, 187, 187)
# Half a step of 63 colours, and the stops' distance from the colormap.
CLOSE = 0.02


def pixels(png: bytes) -> np.ndarray:
    return np.array(PIL.Image.open(io.BytesIO(png)).convert("RGB"), dtype=float)


def shares(picture: np.ndarray, cmap: str) -> np.ndarray:
    """Where the colours lie on a scale of matplotlib's, from 0 to 1."""
    scale = matplotlib.colormaps[cmap](np.linspace(0, 1, 1001))[:, :3] * 255
    nearest = np.abs(picture[:, :, None] - scale).sum(-1).argmin(-1)
    return nearest / 1000


def picture_of(page: str) -> np.ndarray:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return pixels(base64.b64decode(data))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.3), (-2.0, 5.0)])
def test_a_pixel_is_a_value(low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    values = low + (high - low) * rng.random((7, 11))
    picture = pixels(small_map(values, (low, high), SEQUENTIAL))
    assert picture.shape == (7, 11, 3)
    expected = (values - low) / (high - low)
    np.testing.assert_allclose(shares(picture, "viridis"), expected, atol=CLOSE)


def test_red_is_above_0_and_blue_below() -> None:
    (red, middle, blue) = pixels(
        small_map(np.array([[0.5, 0.0, -0.5]]), (-0.5, 0.5), DIVERGING)
    )[0]
    assert red[0] > 2 * red[2]
    assert blue[2] > 2 * blue[0]
    assert len(set(middle)) == 1


def test_undefined_values_are_grey_and_others_beyond_the_ends_as_these() -> None:
    picture = pixels(small_map(np.array([[np.nan, 9.0, -9.0]]), (0.0, 1.0), SEQUENTIAL))
    assert picture[0].tolist() == [
        list(GREY),
        *map(list, (SEQUENTIAL[-1], SEQUENTIAL[0])),
    ]


def test_a_map_of_30_layers_is_small() -> None:
    values = np.random.default_rng(0).random((30, 30))
    page = small_map_html(values, (0.0, 1.0), SEQUENTIAL, "of <30> layers")
    assert len(page) < 3000
    assert "of &lt;30&gt; layers" in page
    wide = small_map_html(values[:15], (0.0, 1.0), SEQUENTIAL, "")
    assert 'width="160" height="80"' in wide
    assert not small_map_html(np.zeros((2, 1000)), (0.0, 1.0), SEQUENTIAL, "")


@pytest.mark.parametrize("n_prompts", [1, 2])
def test_a_notebook_shows_the_map_of_coupling(
    tiny_trace: tlc.Trace, n_prompts: int
) -> None:
    result = tlc.depth_coupling(tiny_trace, k=12)
    if n_prompts == 2:
        other = tlc.trace(tiny_trace.model, "w3 w1")
        result = tlc.mean_depth_coupling([tiny_trace, other], k=12)
    page = result._repr_html_()
    assert page.index("<table") < page.index("<img")
    picture = picture_of(page)
    values = result.coupling(10).numpy()
    n = len(values)
    is_own = np.eye(n, dtype=bool)
    assert (picture[is_own] == GREY).all()
    top = values[~is_own].max()
    assert f"to {top:.3f} (bright)" in page
    np.testing.assert_allclose(
        shares(picture, "viridis")[~is_own], (values / top)[~is_own], atol=CLOSE
    )


def test_a_notebook_shows_the_map_of_a_difference(tiny_trace: tlc.Trace) -> None:
    other = tlc.trace(tiny_trace.model, "w3 w1")
    maps = [tlc.depth_coupling(trace, k=4) for trace in (tiny_trace, other)]
    with pytest.warns(UserWarning, match="no interval"):
        comparison = tlc.compare(*maps, k=3)
    page = comparison._repr_html_()
    picture = picture_of(page)
    differences = (maps[1].coupling(3) - maps[0].coupling(3)).numpy()
    is_own = np.eye(len(differences), dtype=bool)
    top = np.abs(differences[~is_own]).max()
    assert f"from −{top:.3f} (blue) to {top:.3f} (red)" in page
    is_red = picture[..., 0] > picture[..., 2]
    np.testing.assert_array_equal(is_red[~is_own], (differences > 0)[~is_own])


def test_tokens_are_named_as_such(tiny_trace: tlc.Trace) -> None:
    result = tlc.self_coupling(tiny_trace, 0, 1, k=2)
    assert "row: token of J₁" in result._repr_html_()


def test_other_results_have_a_table_alone(tiny_trace: tlc.Trace) -> None:
    result = tlc.cross_token_influence(tiny_trace)
    assert "<img" not in result._repr_html_()
