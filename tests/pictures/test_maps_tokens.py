"""What the pictures of token maps and of influence hold: data, labels, colours."""

import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm

import tl_coupling as tlc
from axes import panels, tick_labels
from tl_coupling.comparisons import CouplingMap
from tl_coupling.influence import Influence
from tl_coupling.plots import plot_coupling, plot_coupling_matrices, plot_influence

pytestmark = pytest.mark.usefixtures("pyplot_untouched")

TOKENS = ["<s>", "It", "costs", "$5", "\n", "日本", "$6", "."]


@pytest.fixture(scope="module")
def token_map(tiny_trace) -> CouplingMap:
    result = tlc.context_coupling(tiny_trace, 0, 1, fixed="output", position=5, k=4)
    return dataclasses.replace(
        result, provenance=result.provenance | {"str_tokens": TOKENS}
    )


def test_token_grid(token_map):
    *grids, _ = plot_coupling_matrices(
        token_map, positions=[4, 0, -3], k=3, untrained=token_map
    ).axes
    assert len(grids) == 2
    for ax in grids:
        pairs = [(i, j) for i in (4, 0, 5) for j in (4, 0, 5)]
        for panel, (row, col) in zip(panels(ax, 3), pairs, strict=True):
            expected = token_map.at(3)[row, col] / token_map.singular_values[row, 0]
            np.testing.assert_allclose(panel, expected, rtol=1e-6)
        names = ["4 ‘\\n’", "0 ‘<s>’", "5 ‘日本’"]
        assert tick_labels(ax.xaxis) == names
        # Rows are named once, on the left.
        assert tick_labels(ax.yaxis) == (names if ax is grids[0] else [])
        # Where they break depends on their room.
        whose = "whose Jacobian (input token, layer 0)" if ax is grids[0] else ""
        assert " ".join(ax.get_ylabel().split()) == whose
        vectors = "whose singular vectors (input token, layer 1)"
        assert " ".join(ax.get_xlabel().split()) == vectors
        title = ax.figure.get_suptitle()
        assert title.startswith("Context coupling · k = 3\noutput fixed at 5 ‘日本’")


def test_token_grid_shows_the_last_five_by_default(token_map):
    ax, _ = plot_coupling_matrices(token_map).axes
    assert [int(label.split()[0]) for label in tick_labels(ax.xaxis)] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_the_title_says_what_is_fixed(token_map):
    assert "output fixed at 5 ‘日本’" in plot_coupling(token_map).get_title()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"positions": [7]},
            r"`positions` must be among those of 'result', \[0, 1, 2, 3, 4, 5\], got \[7\]",
        ),
        ({"positions": []}, "`positions` is empty"),
        (
            {"layers": [0]},
            "a map of kind 'context' is drawn for chosen `positions` only",
        ),
    ],
)
def test_token_grid_refuses(token_map, options, message):
    with pytest.raises(ValueError, match=message):
        plot_coupling_matrices(token_map, **options)


def influence(n_sources: int = 4, **provenance) -> Influence:
    generator = torch.Generator().manual_seed(n_sources)
    values = [torch.rand(3, n_sources, generator=generator) + 0.1 for _ in range(4)]
    provenance = {
        "model": "tiny",
        "prompt": "It costs",
        "str_tokens": TOKENS,
    } | provenance
    return Influence(
        *values, (0, 1, 5), tuple(range(n_sources)), n_sources - 1, provenance
    )


@pytest.mark.parametrize(
    "measure", ["frobenius_norm", "largest_singular_value", "participation_ratio"]
)
def test_influence_shows_the_values(measure):
    result = influence()
    fig = plot_influence(result, measure=measure)
    ax, bar = fig.axes
    (image,) = ax.images
    np.testing.assert_allclose(
        np.asarray(image.get_array()), getattr(result, measure), rtol=1e-6
    )
    assert isinstance(image.norm, LogNorm) == (measure != "participation_ratio")
    assert image.norm.vmax == pytest.approx(float(getattr(result, measure).max()))
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "0 ‘<s>’",
        "1 ‘It’",
        "2 ‘costs’",
        "3 ‘$5’",
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "5"]
    assert ax.get_ylim() == (2.5, -0.5), "the first layer is on top, as in every map"
    assert bar.get_ylabel().endswith("of J")
    assert fig.get_suptitle() == "Influence on token 3 ‘$5’\ntiny · “It costs”"


def test_two_influences_share_a_scale_and_zeros_are_masked():
    one, other = influence(), influence(5)
    other.frobenius_norm[0, 0] = 0
    fig = plot_influence({"trained": one, "untrained": other})
    left, right, _ = fig.axes
    assert left.images[0].norm is right.images[0].norm
    assert (left.get_title(), right.get_title()) == ("trained", "untrained")
    assert bool(np.ma.getmaskarray(right.images[0].get_array())[0, 0])
    largest = max(float(one.frobenius_norm.max()), float(other.frobenius_norm.max()))
    assert left.images[0].norm.vmax == pytest.approx(largest)


def test_unknown_measure():
    with pytest.raises(
        ValueError, match=r"`measure` must be one of frobenius_norm, .*, got 'rank'"
    ):
        plot_influence(influence(), measure="rank")
