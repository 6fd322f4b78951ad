"""Pictures of coupling across prompts: data, labels and limits."""

import numpy as np
import pytest
import torch

import tl_coupling as tlc
from tl_coupling.comparisons import PromptCoupling
from tl_coupling.results import RANDOM_BASES

pytestmark = pytest.mark.usefixtures("pyplot_untouched")
PROMPTS = ("It costs $5", "or $6 and so on and on, to the end", "a")


def made_up(seed: int = 0, layers=(4, 5), **provenance) -> PromptCoupling:
    """Random 8×8 Jacobians of two layers on three prompts."""
    generator = torch.Generator().manual_seed(seed)
    n, k = len(PROMPTS), 3
    J = torch.randn(2, n, 8, 8, generator=generator, dtype=torch.float64)
    spectra = tlc.svd(J, k)
    U, V = spectra.U, spectra.Vh.mT
    return PromptCoupling(
        matrices=U.mT[:, None] @ J[:, :, None] @ V[:, None],
        write_cosines=U.mT[:, :, None] @ U[:, None],
        read_cosines=V.mT[:, :, None] @ V[:, None],
        singular_values=spectra.S,
        frobenius_norms=torch.linalg.matrix_norm(J),
        d_model=8,
        layers=layers,
        prompts=PROMPTS,
        positions=(2, 9, 0),
        provenance={"model": "tiny", **provenance},
    )


@pytest.mark.parametrize("measure", ["coupling", "write_overlap", "read_overlap"])
def test_lines_are_pairs_their_mean_and_the_null(measure):
    result = made_up()
    ax = tlc.plots.plot_prompt_coupling(result, k=2, measure=measure)
    *pairs, mean, null = ax.lines
    assert len(pairs) == 6
    np.testing.assert_allclose(mean.get_ydata(), result.by_layer(2, measure))
    np.testing.assert_allclose(
        np.mean([line.get_ydata() for line in pairs], 0), mean.get_ydata()
    )
    np.testing.assert_allclose(null.get_ydata(), result.null_by_layer(2, measure))
    assert list(null.get_xdata()) == [4, 5]
    (band,) = ax.collections
    path = band.get_paths()[0].vertices
    for layer, interval in zip(
        (4, 5), result.null_interval_by_layer(2, measure), strict=True
    ):
        ends = np.unique(path[path[:, 0] == layer, 1])
        np.testing.assert_allclose(ends[[0, -1]], interval)
    assert ax.get_title() == "Across 3 prompts · k = 2\ntiny"
    assert measure.partition("_")[0] in ax.get_ylabel()


def test_a_twin_is_drawn_beside_on_the_same_layers():
    twin = made_up(seed=1, untrained=True)
    ax = tlc.plots.plot_prompt_coupling(made_up(), untrained=twin)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["untrained", "trained", RANDOM_BASES, "95 % of random"]
    with pytest.raises(ValueError, match=r"layers of `result`, \[4, 5\], got \[0, 1\]"):
        tlc.plots.plot_prompt_coupling(made_up(), untrained=made_up(layers=(0, 1)))


def test_a_map_shows_a_layer_or_the_mean_without_own_pairs():
    result = made_up()
    ax = tlc.plots.plot_prompt_map(result, layer=5, k=2)
    own = np.eye(3, dtype=bool)
    expected = np.where(own, np.nan, result.values(2)[1])
    np.testing.assert_allclose(ax.images[0].get_array().filled(np.nan), expected)
    assert ax.get_title().startswith("Across prompts · layer 5 · k = 2")
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == ["It costs $5", "…o on and on, to the end", "a"]
    of_mean = tlc.plots.plot_prompt_map(result).images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(of_mean[~own], result.values().mean(0)[~own])
    with pytest.raises(ValueError, match=r"one of the result's, \[4, 5\], got 0"):
        tlc.plots.plot_prompt_map(result, layer=0)
