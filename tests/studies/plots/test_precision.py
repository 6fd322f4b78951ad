"""What `plot_precision` shows, of made-up numbers."""

import numpy as np
import pytest
import xarray

import tl_coupling as tlc


@pytest.fixture
def data() -> xarray.Dataset:
    rng = np.random.default_rng(0)
    per_prompt = (
        "mean_coupling",
        "line_shape_score",
        "line_shape_score_all_tokens",
        "expodistance",
    )
    sizes = {"precision": 3, "prompt": 2, "k": 2, "layer": 4}
    dims = {
        name: ("precision", "prompt")
        for name in (*per_prompt, "expodistance_all_tokens")
    }
    dims |= {
        "mean_coupling": ("precision", "prompt", "k"),
        "largest_singular_value_change": ("precision", "prompt", "layer"),
    }
    dims |= {
        f"{side}_overlap": ("precision", "prompt", "k", "layer")
        for side in ("left", "right")
    }
    values = {
        name: (of, 0.1 + rng.random([sizes[dim] for dim in of]))
        for name, of in dims.items()
    }
    coords = {
        "precision": ["float32", "int8", "nf4"],
        "prompt": ["a", "b"],
        "k": [4, 8],
        "layer": range(4),
    }
    return xarray.Dataset(values, coords, {"model": "m", "d_model": 32})


def test_changes_and_overlaps_are_drawn(
    data: xarray.Dataset, pyplot_untouched: None
) -> None:
    fig = tlc.plots.plot_precision(data)
    coupling, shapes, overlap, gains = fig.axes
    change = (
        data["mean_coupling"] - data["mean_coupling"].sel(precision="float32")
    ).mean("prompt")
    means = [line.get_ydata()[0] for line in coupling.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(
        means, change.sel(precision=["int8", "nf4"]).values.ravel()
    )
    assert [tick.get_text() for tick in coupling.get_xticklabels()] == ["4", "8"]
    lost = 1 - data["left_overlap"].sel(precision="nf4", k=8).mean("prompt")
    assert any(np.allclose(line.get_ydata(), lost) for line in overlap.lines)
    assert overlap.get_yscale() == "log"
    assert overlap.get_ylabel() == "1 − overlap of subspaces (k = 8)"
    # Below all panels: in one of them it made all narrow.
    assert overlap.get_legend() is None
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "int8",
        "nf4",
        "random subspaces, 0.750",
        "left singular vectors",
        "right singular vectors",
    ]
    assert [line.get_label() for line in gains.lines] == ["int8", "nf4"]
    assert shapes.get_ylabel() == "change (%)"
    again = tlc.plots.plot_precision(data, k=4).axes[2]
    assert "k = 4" in again.get_ylabel()


def test_what_cannot_be_drawn(data: xarray.Dataset) -> None:
    with pytest.raises(ValueError, match=r"`k` must be one of \[4, 8\], got 5"):
        tlc.plots.plot_precision(data, k=5)
    with pytest.raises(ValueError, match="must hold two precisions or more"):
        tlc.plots.plot_precision(data.isel(precision=[0]))
