"""What the picture of alignment matrices holds."""

import numpy as np
import pytest
import torch

from axes import colour_bar, tick_labels
from tl_coupling.measures import alignment_matrices
from tl_coupling.plots import plot_alignment_matrices
from tl_coupling.spectra import svd
from tl_coupling.trajectories import ResidualAlignment

pytestmark = pytest.mark.usefixtures("pyplot_untouched")

N_LAYERS, D, K = 5, 8, 3


@pytest.fixture(scope="module")
def result() -> ResidualAlignment:
    spectra = svd(
        torch.randn(N_LAYERS, D, D, generator=torch.Generator().manual_seed(0))
    )
    cosines = (alignment_matrices(spectra, K, sides) for sides in ("uv", "uu", "vv"))
    provenance = {
        "model": "tiny",
        "prompt": "It costs $5",
        "str_tokens": ["It", " costs", " $5"],
    }
    return ResidualAlignment(1.5, 0.25, *cosines, spectra.S, 4, 2, provenance)


@pytest.mark.parametrize("sides", ["uv", "uu", "vv"])
def test_panels_are_the_cosines_of_the_chosen_layers(result, sides):
    for layers, chosen in ((None, [0, 1, 2, 3, 4]), ((3, 0, -1), [3, 0, 4])):
        ax = plot_alignment_matrices(result, sides=sides, layers=layers)
        (image,) = ax.images
        mosaic = np.ma.filled(image.get_array(), np.nan)
        assert mosaic.shape == (len(chosen) * (K + 1) - 1,) * 2
        for row, col in np.ndindex(len(chosen), len(chosen)):
            panel = mosaic[row * (K + 1) :, col * (K + 1) :][:K, :K]
            np.testing.assert_allclose(
                panel, getattr(result, sides)[chosen[row], chosen[col]].abs()
            )
        assert np.isnan(mosaic[K]).all()
        assert tick_labels(ax.xaxis) == tick_labels(ax.yaxis) == list(map(str, chosen))
        np.testing.assert_allclose(ax.get_xticks(), [1, 5, 9, 13, 17][: len(chosen)])


def test_labels_and_null(result):
    ax = plot_alignment_matrices(result)
    assert ax.get_ylabel() == "layer of the left singular vectors U"
    assert ax.get_xlabel() == "layer of the right singular vectors V"
    assert (
        ax.get_title()
        == "Residual alignment · UᵀV · k = 3\ntiny · “It costs $5” · token 2 ‘$5’"
    )
    assert "UᵀU" in plot_alignment_matrices(result, sides="uu").get_title()
    assert {line.get_ydata()[0] for line in colour_bar(ax).lines} == {(1 / D) ** 0.5}
    assert ax.images[0].get_clim() == (0, 1)


@pytest.mark.parametrize("layers", [[], [5], [-6]])
def test_layers_that_are_not_there(result, layers):
    with pytest.raises(
        ValueError, match=r"`layers` must be some of the 5 layers, 0 to 4, got"
    ):
        plot_alignment_matrices(result, layers=layers)


def test_it_draws_where_it_is_told(result):
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plot_alignment_matrices(result, ax=ax) is ax
