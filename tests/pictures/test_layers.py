"""Pictures of layers: the graph, locality and singular values."""

import dataclasses

import matplotlib.colors
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from made_up_results import random_map
from tl_coupling.plots import plot_adjacency, plot_locality, plot_singular_values

pytestmark = pytest.mark.usefixtures("pyplot_untouched")

# plot_adjacency


def arcs_of(ax):
    """Width and value of every arc, by the layers at its ends."""
    (arcs,) = ax.collections
    return {
        (round(segment[0, 0]), round(segment[-1, 0])): (width, value)
        for segment, width, value in zip(
            arcs.get_segments(), arcs.get_linewidths(), arcs.get_array(), strict=True
        )
    }


def scale_of(result, k=None):
    """The largest value of a pair of different layers, or four times the null."""
    values = result.coupling(k).numpy().copy()
    np.fill_diagonal(values, 0)
    return max(values.max(), 4 * result.null(k))


def test_adjacency_draws_the_mean_of_both_orders():
    result = random_map(layers=(4, 5, 6, 9))
    ax = plot_adjacency(result, k=3)
    values = result.coupling(3).numpy()
    drawn = arcs_of(plot_adjacency(result, k=3, strongest=6))
    assert len(drawn) == 6
    for i, j in [(0, 1), (0, 3), (2, 3)]:
        weight = (values[i, j] + values[j, i]) / 2
        assert values[i, j] != values[j, i]
        width, value = drawn[result.row_layers[i], result.row_layers[j]]
        assert width == pytest.approx(4 * weight / scale_of(result, 3))
        assert value == pytest.approx(weight)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["4", "5", "6", "9"]
    assert ax.get_xticks().tolist() == [4, 5, 6, 9]
    assert "4 of 6 pairs, the strongest" in ax.get_xlabel()
    bar = ax.figure.axes[-1]
    assert bar.get_ylabel() == "coupling, mean of both orders"
    assert bar.get_ylim() == (0, pytest.approx(scale_of(result, 3)))
    assert bar.lines[-1].get_ydata()[0] == pytest.approx(result.null(3))
    assert "k = 3" in ax.get_title()


def test_adjacency_arcs_are_half_circles_over_their_layers():
    ax = plot_adjacency(random_map(layers=range(7), k=2), threshold=0)
    for arc in ax.collections[0].get_segments():
        radius = (arc[-1, 0] - arc[0, 0]) / 2
        middle = (arc[-1, 0] + arc[0, 0]) / 2
        away = np.linalg.norm(arc - [middle, 0], axis=1)
        np.testing.assert_allclose(away, radius)
        assert arc[:, 1].max() <= ax.get_ylim()[1]
        assert arc[:, 1].min() >= -1e-9


def test_adjacency_keeps_arcs_from_the_threshold_on():
    result = random_map()
    values = result.coupling().numpy()
    weights = np.sort(((values + values.T) / 2)[np.tril_indices(4, -1)])
    ax = plot_adjacency(result, threshold=weights[2])
    assert [value for _, value in arcs_of(ax).values()] == pytest.approx(weights[2:])
    assert f"4 of 6 pairs at {weights[2]:g} or more" in ax.get_xlabel()
    none = plot_adjacency(result, threshold=2.0)
    assert arcs_of(none) == {}
    assert "0 of 6 pairs" in none.get_xlabel()
    assert len(none.get_xticks()) == 4


def test_adjacency_draws_the_strongest_arcs_and_says_how_many():
    result = random_map(layers=range(8), k=3)
    values = result.coupling().numpy()
    weights = np.sort(((values + values.T) / 2)[np.tril_indices(8, -1)])
    for options, n in (
        ({}, 8),
        ({"strongest": 3}, 3),
        ({"strongest": 3, "threshold": 0.0}, 3),
        ({"threshold": 0}, 28),
    ):
        ax = plot_adjacency(result, **options)
        drawn = [value for _, value in arcs_of(ax).values()]
        assert drawn == pytest.approx(weights[-n:])
        assert f"{n} of 28 pairs" in ax.get_xlabel()
        assert ("the strongest" in ax.get_xlabel()) == (n < 28)


def test_adjacency_draws_at_most_twenty_arcs_unless_told():
    result = random_map(layers=range(23), k=2)
    assert len(arcs_of(plot_adjacency(result))) == 20
    assert len(arcs_of(plot_adjacency(result, strongest=30))) == 30


def test_adjacency_of_an_unbounded_measure_ends_at_its_largest_value():
    result = random_map()
    ax = plot_adjacency(result, measure="miscoupling")
    values = result.miscoupling().numpy().copy()
    np.fill_diagonal(values, 0)
    largest = max(values.max(), result.null(5, "miscoupling"))
    assert ax.collections[0].get_clim() == (0, pytest.approx(largest))


def test_adjacency_leaves_out_undefined_pairs():
    result = random_map()
    dead = dataclasses.replace(
        result, matrices=result.matrices * (torch.arange(4) != 1)[:, None, None, None]
    )
    with pytest.warns(UserWarning, match="undefined"):
        ax = plot_adjacency(dead)
    assert set(arcs_of(ax)) == {(0, 2), (0, 3), (2, 3)}


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
        "95 % of random",
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


def test_the_band_of_locality_holds_the_intervals_of_all_maps():
    maps = {"first": random_map(), "shallower": random_map(layers=(0, 1, 2), seed=1)}
    (band,) = plot_locality(maps, k=3).collections
    intervals = [result.null_interval_by_distance(3) for result in maps.values()]
    for distance in (1, 2, 3):
        known = np.array([x[distance] for x in intervals if len(x) > distance])
        path = band.get_paths()[0].vertices
        ends = np.unique(path[path[:, 0] == distance, 1])
        np.testing.assert_allclose(
            ends[[0, -1]], [known[:, 0].min(), known[:, 1].max()]
        )
    assert len(known) == 1


def test_locality_is_faded_where_few_pairs_carry_a_point():
    result = random_map(layers=range(24), k=2)
    faded, line, null = plot_locality(result).lines
    # Of 46 pairs of neighbours a tenth is four: two at distance 23, four at 22.
    assert list(line.get_xdata()) == list(range(1, 22))
    assert list(faded.get_xdata()) == list(range(1, 24))
    assert faded.get_alpha() < 1
    assert null.get_linestyle() == "--"


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
    assert title == "Depth coupling · k = 5\ntiny · token 3 ‘\\n’"


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
