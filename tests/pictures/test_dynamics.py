"""What the pictures of products and eigenvalues hold."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import tl_coupling as tlc
from axes import named_lines
from tl_coupling.plots import plot_eigenvalues, plot_product_map, plot_products


def by_label(ax: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in named_lines(ax)}


def test_products_stand_beside_their_bands(tiny_trace):
    result = tlc.dynamics.products(tiny_trace, n_draws=5)
    other = tlc.dynamics.products(tiny_trace, position=2, n_draws=5)
    with pytest.warns(UserWarning, match="the band of 5 draws"):
        fig = plot_products({"trained": result, "untrained": other})
    largest, ratio = fig.axes
    lines = by_label(largest)
    for name, shown in (("trained", result), ("untrained", other)):
        assert np.allclose(lines[name].get_ydata(), shown.log_largest)
        band = next(
            band
            for band in largest.collections
            if band.get_label() == f"{name}, blocks turned at random"
        )
        heights = band.get_paths()[0].vertices[:, 1]
        with pytest.warns(UserWarning, match="the band of 5 draws"):
            ends = shown.null_band.numpy()
        assert heights.min() == pytest.approx(ends.min())
        assert heights.max() == pytest.approx(ends.max())
    of_ratio = by_label(ratio)
    assert np.allclose(of_ratio["trained"].get_ydata(), result.participation_ratio)
    (dashed, _) = [line for line in ratio.lines if line.get_linestyle() == "--"]
    null_ratio = result.null_participation_ratio
    assert np.allclose(dashed.get_ydata(), null_ratio.mean(0))
    heights = ratio.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(np.quantile(null_ratio, 0.025, axis=0).min())
    gain = f"{result.alignment_gain[-1]:+.2f}".replace("-", "−")
    assert f"trained {gain}" in fig.get_suptitle()
    assert largest.get_xlabel() == "product up to layer"


def test_a_map_of_runs_shows_log_sigma_and_the_gain(tiny_trace):
    result = tlc.dynamics.product_map(tiny_trace)
    fig = plot_product_map(result)
    left, right = fig.axes[:2]
    for ax, values in ((left, result.log_largest), (right, result.alignment_gain)):
        shown = np.ma.filled(ax.images[0].get_array(), np.nan)
        assert np.allclose(shown, values, equal_nan=True)
    low, high = right.images[0].get_clim()
    assert low == -high


def test_eigenvalues_of_chosen_layers_with_the_null(tiny_trace):
    result = tlc.dynamics.eigenvalues(tiny_trace, n_draws=2)
    fig = plot_eigenvalues(result, layers=[1])
    plane, departures = fig.axes
    null, block = (dots.get_offsets() for dots in plane.collections)
    values = result.values[1].numpy()
    assert np.allclose(block, np.stack([values.real, values.imag], 1))
    assert np.allclose(null[:, 0], result.null_real[1])
    assert plane.get_title() == "layer 1"
    (henrici, of_null) = departures.lines
    assert np.allclose(henrici.get_ydata(), result.henrici)
    assert np.allclose(of_null.get_ydata(), result.null_henrici.mean(0))
    with pytest.raises(ValueError, match=r"1 to 4 of the result's 0 … 1, got \[2\]"):
        plot_eigenvalues(result, layers=[2])
