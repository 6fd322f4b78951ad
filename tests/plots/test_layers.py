"""Pictures of layers: the graph, locality and singular values."""

import dataclasses

import matplotlib.colors
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from made_up_results import random_map
from tl_coupling.plots import plot_adjacency, plot_locality, plot_singular_values

pytestmark = [pytest.mark.on_3_only, pytest.mark.usefixtures("pyplot_untouched")]

# plot_adjacency


def edges_of(ax):
    """Width and opacity of every edge, with its end points."""
    if not ax.collections or not hasattr(ax.collections[0], "get_segments"):
        return {}
    lines = ax.collections[0]
    places = {text.get_text(): text.get_position() for text in ax.texts}

    def node(point):
        return min(
            places, key=lambda name: np.linalg.norm(np.subtract(places[name], point))
        )

    return {
        frozenset(int(node(point)) for point in (segment[0], segment[-1])): (
            width,
            color[3],
        )
        for segment, width, color in zip(
            lines.get_segments(),
            lines.get_linewidths(),
            lines.get_colors(),
            strict=True,
        )
    }


def test_adjacency_draws_the_mean_of_both_orders():
    result = random_map(layers=(4, 5, 6, 9))
    ax = plot_adjacency(result, k=3)
    values = result.coupling(3).numpy()
    drawn = edges_of(ax)
    assert len(drawn) == 6
    for i, j in [(0, 1), (0, 3), (2, 3)]:
        weight = (values[i, j] + values[j, i]) / 2
        assert values[i, j] != values[j, i]
        width, alpha = drawn[frozenset((result.row_layers[i], result.row_layers[j]))]
        assert width == pytest.approx(8 * weight)
        assert alpha == pytest.approx(weight**0.5)
    assert [text.get_text() for text in ax.texts] == ["4", "5", "6", "9"]
    legend = ax.get_legend()
    assert "mean of (l, l′) and (l′, l)" in legend.get_title().get_text()
    assert "6 of 6 edges" in legend.get_title().get_text()
    assert [text.get_text() for text in legend.get_texts()] == [
        "0.1",
        "0.25",
        "0.5",
        "1",
    ]
    assert "k = 3" in ax.get_title()


def test_adjacency_nodes_lie_on_a_circle_the_same_way_each_time():
    result = random_map(layers=range(7), k=2)
    first, second = (
        [text.get_position() for text in plot_adjacency(result).texts] for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-6)


def test_adjacency_keeps_edges_from_the_threshold_on():
    result = random_map()
    values = result.coupling().numpy()
    weights = np.sort(((values + values.T) / 2)[np.tril_indices(4, -1)])
    ax = plot_adjacency(result, threshold=weights[2])
    assert sorted(width for width, _ in edges_of(ax).values()) == pytest.approx(
        8 * weights[2:]
    )
    assert "4 of 6 edges, at least" in ax.get_legend().get_title().get_text()
    none = plot_adjacency(result, threshold=2.0)
    assert edges_of(none) == {}
    assert "0 of 6 edges" in none.get_legend().get_title().get_text()
    assert len(none.texts) == 4


def test_adjacency_draws_the_strongest_edges_and_says_how_many():
    result = random_map(layers=range(8), k=3)
    values = result.coupling().numpy()
    weights = np.sort(((values + values.T) / 2)[np.tril_indices(8, -1)])
    for options, n in (
        ({}, 16),
        ({"strongest": 3}, 3),
        ({"strongest": 3, "threshold": 0.0}, 3),
        ({"threshold": 0}, 28),
    ):
        ax = plot_adjacency(result, **options)
        widths = sorted(width for width, _ in edges_of(ax).values())
        assert widths == pytest.approx(8 * weights[-n:])
        title = ax.get_legend().get_title().get_text()
        assert f"{n} of 28 edges" in title
        assert ("the strongest" in title) == (n < 28)


def test_adjacency_runs_clockwise_from_the_top():
    first, second, *_ = (
        np.array(text.get_position())
        for text in plot_adjacency(random_map(layers=range(8), k=2)).texts
    )
    np.testing.assert_allclose(first, [0, 1], atol=1e-9)
    assert second[0] > 0.5


def test_adjacency_of_an_unbounded_measure_is_full_at_its_largest_weight():
    result = random_map()
    ax = plot_adjacency(result, measure="miscoupling")
    values = result.miscoupling().numpy()
    largest = ((values + values.T) / 2)[np.tril_indices(4, -1)].max()
    assert max(width for width, _ in edges_of(ax).values()) == pytest.approx(8)
    assert ax.get_legend().get_texts()[-1].get_text() == f"{largest:.2g}"


def test_adjacency_leaves_out_undefined_edges():
    result = random_map()
    dead = dataclasses.replace(
        result, matrices=result.matrices * (torch.arange(4) != 1)[:, None, None, None]
    )
    with pytest.warns(UserWarning, match="undefined"):
        ax = plot_adjacency(dead)
    assert set(edges_of(ax)) == {frozenset(pair) for pair in [(0, 2), (0, 3), (2, 3)]}


def test_adjacency_takes_axes():
    ax = Figure().subplots()
    assert plot_adjacency(random_map(), ax=ax) is ax


def test_adjacency_wants_the_same_layers_on_both_sides():
    result = random_map()
    with pytest.raises(
        ValueError, match=r"same layers, each once.*columns \[3, 2, 1, 0\]"
    ):
        plot_adjacency(dataclasses.replace(result, col_layers=(3, 2, 1, 0)))
    with pytest.raises(ValueError, match=r"each once.*got rows \[0, 0\]"):
        plot_adjacency(random_map(layers=(0, 0)))


# plot_locality


def test_locality_draws_the_profiles_and_the_null():
    maps = {"first $": random_map(), "second $": random_map(seed=1)}
    ax = plot_locality(maps, k=3)
    *lines, null = ax.lines
    for line, (name, result) in zip(lines, maps.items(), strict=True):
        assert line.get_label() == name
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
        np.testing.assert_array_equal(line.get_ydata(), result.locality_profile(3)[1:])
    assert lines[0].get_color() != lines[1].get_color()
    assert null.get_linestyle() == "--"
    assert list(null.get_ydata()) == pytest.approx([1 - (2 / 3) ** 0.5] * 2)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "first $",
        "second $",
        "random subspaces, 0.184",
    ]
    assert not any(text.get_parse_math() for text in ax.get_legend().get_texts())
    assert ax.get_ylim()[0] == 0
    assert "k = 3" in ax.get_ylabel()


def test_locality_passes_over_distances_that_no_pair_has():
    result = random_map(layers=(0, 1, 5))
    line = plot_locality(result).lines[0]
    assert list(line.get_xdata()) == [1, 4, 5]
    np.testing.assert_array_equal(
        line.get_ydata(), result.locality_profile()[[1, 4, 5]]
    )


def test_one_map_needs_no_name():
    ax = Figure().subplots()
    assert plot_locality(random_map(), ax=ax) is ax
    assert ax.lines[0].get_label() == "tiny"
    assert len(ax.lines) == 2
    assert plot_singular_values(random_map(k=2)).lines[0].get_label() == "tiny, top 2"


def test_title_tells_only_what_all_maps_share():
    twin = dataclasses.replace(
        random_map(untrained=True, prompt="Another"), orientation="vju"
    )
    title = plot_locality({"trained": random_map(), "untrained": twin}).get_title()
    assert title == "Depth coupling · k = 5\ntiny\ntoken 3 ‘\\n’"


def test_locality_wants_one_k():
    maps = {"five": random_map(k=5), "three": random_map(k=3)}
    with pytest.raises(ValueError, match=r"`k` must be given .* here \[5, 3\]"):
        plot_locality(maps)
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 3\]"):
        plot_locality(maps, k=4)
    assert len(plot_locality(maps, k=3).lines) == 3


# plot_singular_values


def test_singular_values_against_depth():
    # Layers out of order: lines still run from left to right.
    maps = {
        "trained": random_map(layers=(2, 0, 1)),
        "untrained": random_map(layers=(2, 0, 1), seed=1),
    }
    ax = plot_singular_values(maps, n=3)
    assert ax.get_yscale() == "log"
    assert len(ax.lines) == 6
    for number, result in enumerate(maps.values()):
        for i, line in enumerate(ax.lines[3 * number : 3 * number + 3]):
            assert list(line.get_xdata()) == [0, 1, 2]
            np.testing.assert_array_equal(
                line.get_ydata(), result.singular_values[[1, 2, 0], i]
            )
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "trained, top 3",
        "untrained, top 3",
    ]
    assert ax.get_xlabel() == "layer"


def test_singular_values_have_one_colour_family_each_darkest_first():
    ax = plot_singular_values({"a": random_map(), "b": random_map(seed=1)}, n=4)
    colours = np.array(
        [matplotlib.colors.to_rgb(line.get_color()) for line in ax.lines]
    ).reshape(2, 4, 3)
    assert (np.diff(colours.sum(-1), axis=1) > 0).all()
    hues = matplotlib.colors.rgb_to_hsv(colours)[..., 0]
    np.testing.assert_allclose(hues, hues[:, :1] * np.ones(4), atol=1e-6)
    assert abs(hues[0, 0] - hues[1, 0]) > 0.1


def test_singular_values_of_zero_leave_a_gap():
    result = random_map()
    dead = dataclasses.replace(
        result, singular_values=result.singular_values * (torch.arange(4) != 1)[:, None]
    )
    ax = plot_singular_values(dead)
    assert np.isfinite(
        ax.yaxis.get_transform().transform(ax.lines[0].get_ydata())
    ).tolist() == [1, 0, 1, 1]


def test_singular_values_are_as_many_as_the_map_holds():
    assert len(plot_singular_values(random_map(k=5)).lines) == 5
    with pytest.raises(ValueError, match=r"`n` must be at least 1.*got 0"):
        plot_singular_values(random_map(), n=0)


# What they all refuse


@pytest.mark.parametrize("plot", [plot_adjacency, plot_locality, plot_singular_values])
def test_maps_of_tokens_are_refused_where_layers_are_drawn(plot):
    with pytest.raises(
        ValueError, match=r"kind 'depth' \(`depth_coupling`\).*of kind 'self'"
    ):
        plot(random_map(kind="self"))


@pytest.mark.parametrize("plot", [plot_locality, plot_singular_values])
def test_results_must_be_maps(plot):
    with pytest.raises(ValueError, match="`results` is empty"):
        plot({})
    with pytest.raises(
        TypeError,
        match="`results` must be a CouplingMap or a mapping from strings to CouplingMaps",
    ):
        plot([random_map()])
