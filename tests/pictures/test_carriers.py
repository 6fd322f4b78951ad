"""Pictures of what carries coupling, of made-up shares."""

import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from made_up_results import PROVENANCE
from tl_coupling.comparisons import Carriers
from tl_coupling.plots import plot_carriers, plot_carriers_by_depth

pytestmark = pytest.mark.usefixtures("pyplot_untouched")

LABELS = ("H0", "H1", "H2", "mlp_out", "mlp∘attn")


def random_carriers(seed: int = 0, layers: tuple[int, ...] = (3, 4, 7)) -> Carriers:
    """Return shares of five components that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    n = len(layers)

    def shares(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, len(LABELS), generator=generator)
        return drawn + (1 - drawn.sum(-1, keepdim=True)) / len(LABELS)

    return Carriers(
        diagonal_share=shares(n, n),
        energy_share=shares(n, n),
        jacobian_share=shares(n, 1).expand(n, n, -1).contiguous(),
        null_share=shares(n, 6),
        labels=LABELS,
        row_layers=layers,
        col_layers=layers,
        position=3,
        k=5,
        orientation="ujv",
        provenance=PROVENANCE,
    )


def test_heads_are_drawn_by_layer_on_a_scale_around_zero() -> None:
    result = random_carriers()
    ax = plot_carriers(result)
    (image,) = ax.images
    expected = result.by_layer()[:, :3].numpy()
    np.testing.assert_allclose(image.get_array(), expected)
    low, high = image.get_clim()
    assert low == -high
    assert high == pytest.approx(abs(expected).max())
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1", "2"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["3", "4", "7"]
    assert "k = 5" in ax.get_title()
    assert "$5" in ax.get_title()


def test_the_twin_is_drawn_beside_it_on_the_same_scale() -> None:
    trained = random_carriers()
    untrained = random_carriers(seed=1)
    ax = plot_carriers(trained, untrained=untrained)
    _, other, *_ = ax.figure.axes
    assert ax.images[0].get_clim() == other.images[0].get_clim()
    np.testing.assert_allclose(
        other.images[0].get_array(), untrained.by_layer()[:, :3].numpy()
    )
    assert (ax.get_title(), other.get_title()) == ("trained", "untrained")
    with pytest.raises(ValueError, match="leave `ax` out"):
        plot_carriers(trained, untrained=untrained, ax=ax)


def test_branches_are_lines_with_their_shares_of_the_jacobian() -> None:
    result = random_carriers()
    ax = plot_carriers_by_depth(result)
    merged = result.by_branch()
    lines = {line.get_label(): line for line in ax.lines}
    for place, name in enumerate(("attention", "MLP", "MLP acting on attention")):
        of_diagonal = merged.by_layer("diagonal_share")[:, place]
        of_jacobian = merged.jacobian_share[:, 0, place]
        np.testing.assert_allclose(lines[name].get_ydata(), of_diagonal)
        np.testing.assert_allclose(
            lines[f"_{name}, of J"].get_ydata(), of_jacobian, rtol=1e-5
        )
        assert lines[name].get_color() == lines[f"_{name}, of J"].get_color()
        assert list(lines[name].get_xdata()) == [3, 4, 7]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    names = ["attention", "MLP", "MLP acting on attention"]
    assert legend == [*names, "share of J", "95 % of random"]
    bands = {to_rgb(band.get_facecolor()[0]): band for band in ax.collections[:3]}
    for name in names:
        line = lines[f"_{name}, of J"]
        ends = bands[to_rgb(line.get_color())].get_paths()[0].vertices[:, 1]
        assert ends.min() < line.get_ydata().mean() < ends.max()


def test_what_has_no_heads_or_no_pairs_is_refused() -> None:
    result = random_carriers()
    shares = ("diagonal_share", "energy_share", "jacobian_share", "null_share")
    of_mlp = {name: getattr(result, name)[..., 3:] for name in shares}
    without_heads = dataclasses.replace(result, labels=LABELS[3:], **of_mlp)
    with pytest.raises(ValueError, match="no attention"):
        plot_carriers(without_heads)
    with pytest.raises(ValueError, match="two layers"):
        plot_carriers_by_depth(random_carriers(layers=(3,)))
