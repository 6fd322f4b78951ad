"""What the pictures hold: data, labels, limits, artists; and where their figures
live.
"""

import dataclasses

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from axes import colour_bar, panels, tick_labels
from made_up_results import random_map
from tl_coupling.comparisons import CouplingMap
from tl_coupling.pictures import (
    paper_style,
    plot_adjacency,
    plot_coupling,
    plot_coupling_matrices,
    plot_locality,
    plot_singular_values,
)
from tl_coupling.pictures.labels import off_screen
from tl_coupling.pictures.maps import color_scale

pytestmark = pytest.mark.usefixtures("pyplot_untouched")


def off_diagonal(values: torch.Tensor, on: float) -> np.ndarray:
    """The values, and `on` where a layer meets itself."""
    values = values.numpy().copy()
    np.fill_diagonal(values, on)
    return values


# plot_coupling


def test_coupling_image_is_the_measure():
    result = random_map()
    ax = plot_coupling(result, k=3)
    (image,) = ax.images
    np.testing.assert_array_equal(
        image.get_array().filled(-1), off_diagonal(result.coupling(3), -1)
    )
    assert image.get_clim() == (
        0,
        max(4 * (1 - (2 / 3) ** 0.5), off_diagonal(result.coupling(3), 0).max()),
    )
    assert "k = 3" in ax.get_title()
    assert colour_bar(ax).get_ylabel() == "coupling"


def test_coupling_of_all_singular_vectors_by_default():
    result = random_map(k=5)
    ax = plot_coupling(result)
    np.testing.assert_array_equal(
        ax.images[0].get_array().filled(-1), off_diagonal(result.coupling(5), -1)
    )
    assert "k = 5" in ax.get_title()


@pytest.mark.parametrize(
    ("measure", "name"),
    [
        ("normalized_miscoupling", "normalised mis-coupling"),
        ("captured_energy", "captured energy"),
        ("miscoupling", "mis-coupling"),
        ("spectral_miscoupling", "spectral mis-coupling"),
    ],
)
def test_coupling_limits_and_label_of_each_measure(measure, name):
    result = random_map()
    options = {"p": 2.0} if measure == "spectral_miscoupling" else {}
    ax = plot_coupling(result, measure=measure, **options)
    values = result.values(measure=measure, **options)
    np.testing.assert_array_equal(
        ax.images[0].get_array().filled(-1), off_diagonal(values, -1)
    )
    null = result.null(measure=measure, **options)
    smallest, largest = (
        min(off_diagonal(values, 9).min(), null),
        max(off_diagonal(values, 0).max(), null),
    )
    assert ax.images[0].get_clim() == (
        (smallest, 1) if measure == "normalized_miscoupling" else (0, largest)
    )
    assert colour_bar(ax).get_ylabel().startswith(name)


def test_coupling_options_reach_the_measure_and_the_label():
    result = random_map()
    ax = plot_coupling(result, measure="spectral_miscoupling", p=1.0, absolute=True)
    values = result.spectral_miscoupling(p=1.0, absolute=True)
    np.testing.assert_array_equal(
        ax.images[0].get_array().filled(-1), off_diagonal(values, -1)
    )
    assert "p = 1, |A|" in colour_bar(ax).get_ylabel()


def test_coupling_takes_limits_colours_and_axes():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    ax = plot_coupling(random_map(), ax=right, vmin=0.2, vmax=0.7, cmap="magma")
    assert ax is right
    assert not left.images
    assert ax.images[0].get_clim() == (0.2, 0.7)
    assert ax.images[0].get_cmap().name == "magma"


def test_coupling_marks_undefined_values_without_touching_the_registered_colour_map():
    result = random_map()
    dead = dataclasses.replace(
        result, matrices=result.matrices * (torch.arange(4) != 1)[:, None, None, None]
    )
    with pytest.warns(UserWarning, match="undefined"):
        ax = plot_coupling(dead)
    assert np.isnan(ax.images[0].get_array().filled(np.nan)).sum(axis=1).tolist() == [
        1,
        4,
        1,
        1,
    ]
    assert ax.images[0].get_cmap()(np.nan) == pytest.approx((0.8, 0.8, 0.8, 1))
    assert matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](np.nan)[3] == 0


def test_coupling_ticks_are_layers():
    ax = plot_coupling(random_map(layers=(2, 5, 11)))
    assert tick_labels(ax.xaxis) == tick_labels(ax.yaxis) == ["2", "5", "11"]
    assert list(ax.get_xticks()) == [0, 1, 2]
    assert ax.get_ylabel() == "whose Jacobian (layer)"
    assert "singular vectors" in ax.get_xlabel()


def test_coupling_thins_the_ticks_of_many_layers():
    ax = plot_coupling(random_map(layers=range(20), k=2))
    assert list(ax.get_xticks()) == list(range(0, 20, 2))
    assert tick_labels(ax.yaxis) == [str(layer) for layer in range(0, 20, 2)]


@pytest.mark.parametrize("kind", ["self", "context"])
def test_coupling_ticks_are_tokens(kind):
    ax = plot_coupling(random_map(layers=range(1, 6), kind=kind))
    expected = ["1 ‘costs’", "2 ‘$5’", "3 ‘\\n’", "4 ‘␣’", "5 ‘$6’"]
    assert tick_labels(ax.xaxis) == tick_labels(ax.yaxis) == expected
    assert ax.get_ylabel() == "whose Jacobian (token, layer 8)"
    assert ax.get_xlabel() == "whose singular vectors (token, layer 9)"
    assert ax.get_title().startswith(f"{kind.capitalize()} coupling")
    assert not any(label.get_parse_math() for label in ax.get_xticklabels())


def test_coupling_ticks_are_bare_positions_without_the_text():
    ax = plot_coupling(random_map(layers=(4, 7), kind="self", str_tokens=None))
    assert tick_labels(ax.xaxis) == ["4", "7"]


def test_only_pairs_of_a_connection_with_itself_are_grey():
    """In a map of tokens at two layers the diagonal compares layers, and is shown."""
    tokens = plot_coupling(random_map(kind="self")).images[0].get_array()
    assert np.isfinite(tokens.filled(np.nan)).all()
    moved = (
        plot_coupling(dataclasses.replace(random_map(), col_layers=(3, 1, 7, 8)))
        .images[0]
        .get_array()
    )
    assert np.argwhere(np.isnan(moved.filled(np.nan))).tolist() == [[1, 1], [3, 0]]
    alone = plot_coupling(random_map(layers=[4])).images[0].get_array()
    np.testing.assert_allclose(alone, [[1]])


def test_the_null_is_marked_on_the_colour_bar():
    bar = colour_bar(plot_coupling(random_map(), k=4))
    null = 1 - (3 / 4) ** 0.5
    assert any(
        list(line.get_ydata()) == pytest.approx([null] * 2) for line in bar.lines
    )
    (mark,) = [text for text in bar.texts if "null" in text.get_text()]
    assert mark.get_position()[1] == pytest.approx(null)
    assert not colour_bar(plot_coupling(random_map(), k=4, vmax=0.1)).texts


def test_several_maps_of_a_figure_share_a_colour_bar():
    fig = Figure(figsize=(8, 4), layout="constrained")
    row = list(fig.subplots(1, 2))
    for ax, result in zip(row, (random_map(), random_map(seed=1)), strict=True):
        plot_coupling(result, ax=ax, vmin=0, vmax=1, colorbar=False)
    assert fig.axes == row
    fig.colorbar(row[0].images[0], ax=row)
    assert len(fig.axes) == 3
    fig.draw_without_rendering()


def test_one_scale_holds_several_maps():
    maps = [random_map(), random_map(seed=3)]
    assert color_scale(maps, 3) == (
        0,
        max(plot_coupling(each_map, k=3).images[0].get_clim()[1] for each_map in maps),
    )


class MeanMap(CouplingMap):
    """As a mean over prompts is: a map whose values are not those of its matrices."""

    n_prompts = 3

    def values(self, k=None, measure="coupling", **options):
        return super().values(k, measure, **options) / 2


def test_a_mean_over_prompts_is_drawn_and_says_of_how_many():
    result = random_map()
    mean = MeanMap(
        **{
            field.name: getattr(result, field.name)
            for field in dataclasses.fields(result)
        }
    )
    ax = plot_coupling(mean, k=3)
    np.testing.assert_allclose(
        ax.images[0].get_array().filled(-1), off_diagonal(result.coupling(3) / 2, -1)
    )
    assert ax.get_title().endswith("\nmean over 3 prompts · tiny")
    assert "mean over 3 prompts" in plot_adjacency(mean).get_title()
    assert (
        "mean over 3 prompts"
        in plot_locality({"trained": mean, "untrained": mean}).get_title()
    )


def test_coupling_title_tells_model_prompt_and_token():
    ax = plot_coupling(random_map(untrained=True, checkpoint=0), k=2)
    assert ax.get_title() == (
        "Depth coupling · k = 2\nmean 0.274, random subspaces 0.293\n"
        "tiny at checkpoint 0 (untrained) · “It costs $5 or $6”\ntoken 3 ‘\\n’"
    )
    assert not ax.title.get_parse_math()


def test_coupling_title_shortens_a_long_prompt_and_bears_an_empty_provenance():
    long = plot_coupling(random_map(prompt="word " * 100)).get_title()
    (line,) = (line for line in long.splitlines() if line.startswith("“word word"))
    assert "…”" in line
    assert len(line) < 80
    bare = dataclasses.replace(random_map(), provenance={})
    title = plot_coupling(bare).get_title()
    assert title.startswith("Depth coupling · k = 5\nmean")
    assert title.endswith(" · token 3")


@pytest.mark.parametrize("k", [0, 6])
def test_k_out_of_range_is_refused_everywhere(k):
    result = random_map(k=5)
    for plot in (plot_coupling, plot_coupling_matrices, plot_adjacency, plot_locality):
        with pytest.raises(ValueError, match=rf"`k` must lie in \[1, 5\].*got {k}"):
            plot(result, k=k)


# plot_coupling_matrices


def test_matrices_are_drawn_relative_to_the_largest_singular_value():
    result = random_map()
    fig = plot_coupling_matrices(result, k=4, layers=[3, 1])
    assert isinstance(fig, Figure)
    ax, bar = fig.axes
    drawn = panels(ax, 2)
    for panel, (row, col) in zip(drawn, [(3, 3), (3, 1), (1, 3), (1, 1)], strict=True):
        expected = result.matrices[row, col, :4, :4] / result.singular_values[row, 0]
        np.testing.assert_allclose(panel, expected, rtol=1e-12)
    off_diagonal_panels = np.abs([drawn[1], drawn[2]])
    largest = max(0.12, np.quantile(off_diagonal_panels, 0.995))
    assert ax.images[0].get_clim() == pytest.approx((-largest, largest))
    assert tick_labels(ax.xaxis) == tick_labels(ax.yaxis) == ["3", "1"]
    assert list(ax.get_xticks()) == [1.5, 6.5]
    assert "A / σ₁ of the Jacobian" in bar.get_ylabel()
    assert "k = 4" in ax.get_title()


def test_matrices_find_layers_that_rows_and_columns_order_differently():
    result = dataclasses.replace(random_map(), col_layers=(1, 0, 3, 2))
    one_above_two = panels(plot_coupling_matrices(result, layers=[1, 2]).axes[0], 2)[1]
    np.testing.assert_allclose(
        one_above_two,
        result.matrices[1, 3] / result.singular_values[1, 0],
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    ("held", "drawn"),
    [
        (range(18), range(6, 11)),
        (range(10), range(2, 7)),
        (range(4), range(4)),
        ((0, 1, 2, 3, 4, 5, 6, 7, 19), (2, 3, 4, 5, 6)),
    ],
)
def test_matrices_of_the_layers_in_the_middle_by_default(held, drawn):
    ax, _ = plot_coupling_matrices(random_map(layers=held, k=1)).axes
    assert tick_labels(ax.xaxis) == [str(layer) for layer in drawn]
    assert len(panels(ax, len(drawn))) == len(drawn) ** 2


def test_matrices_are_of_twenty_vectors_by_default():
    narrow = random_map()
    wide = dataclasses.replace(
        narrow, matrices=torch.ones(4, 4, 21, 21), singular_values=torch.ones(4, 21)
    )
    ax, _ = plot_coupling_matrices(wide).axes
    assert "k = 20" in ax.get_title()


def test_the_untrained_twin_stands_beside_on_one_scale():
    trained, twin = random_map(), random_map(seed=1, untrained=True)
    ax = plot_coupling(trained, untrained=twin, k=3)
    ax.figure.draw_without_rendering()
    left, right, bar = ax.figure.axes
    assert left is ax
    assert left.bbox.x1 <= right.bbox.x0
    for part, result in ((left, trained), (right, twin)):
        np.testing.assert_array_equal(
            part.images[0].get_array().filled(-1),
            off_diagonal(result.coupling(3), -1),
        )
        assert part.images[0].get_clim() == color_scale([trained, twin], 3)
        assert f"mean {result.mean(3):.3f}" in part.get_title()
    assert bar.get_xlabel() == "coupling"
    with pytest.raises(ValueError, match="leave `ax` out"):
        plot_coupling(trained, untrained=twin, ax=ax)


def test_in_the_style_of_papers_figures_have_its_width_and_no_title():
    with paper_style(6.8):
        ax = plot_coupling(random_map(), untrained=random_map(seed=1))
        assert matplotlib.rcParams["font.size"] == 7
        # Of the user's own figures as well.
        assert matplotlib.rcParams["pdf.fonttype"] == 42
    assert matplotlib.rcParams["pdf.fonttype"] == 3
    assert ax.figure.get_figwidth() == 6.8
    assert ax.get_title() == ""
    assert matplotlib.rcParams["font.size"] == 10
    assert plot_coupling(random_map()).get_title()


def test_matrices_of_the_untrained_twin_lie_beside_on_the_same_scale():
    trained, twin = random_map(), random_map(seed=1, untrained=True)
    fig = plot_coupling_matrices(trained, untrained=twin, k=2, vmax=0.5)
    fig.draw_without_rendering()
    left, right, _ = fig.axes
    assert left.bbox.x1 <= right.bbox.x0
    assert left.get_title() == "trained"
    assert right.get_title() == "untrained"
    for part, result in ((left, trained), (right, twin)):
        expected = result.at(2) / result.singular_values[:, :1, None, None]
        np.testing.assert_allclose(
            np.stack(panels(part, 4)), expected.flatten(0, 1), rtol=1e-12
        )
        assert part.images[0].get_clim() == (-0.5, 0.5)


def test_matrices_of_a_dead_block_are_dark_and_finite():
    result = random_map()
    dead = dataclasses.replace(
        result, matrices=result.matrices * 0, singular_values=result.singular_values * 0
    )
    assert all(
        (panel == 0).all() for panel in panels(plot_coupling_matrices(dead).axes[0], 4)
    )


def test_matrices_count_negative_layers_from_the_models_end():
    fig = plot_coupling_matrices(random_map(layers=(0, 18, 19)), layers=[-1, 0])
    assert tick_labels(fig.axes[0].xaxis) == ["19", "0"]


def test_matrices_are_drawn_on_the_figure_given():
    fig = Figure()
    assert plot_coupling_matrices(random_map(), fig=fig) is fig
    assert len(fig.axes) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": [1, 7]},
            r"`layers` must be among those of 'result', \[0, 1, 2, 3\], got \[7\]",
        ),
        ({"layers": []}, "`layers` is empty"),
        (
            {"untrained": random_map(layers=(0, 1))},
            r"among those of 'untrained', \[0, 1\], got \[2, 3\]",
        ),
        ({"untrained": random_map(k=3)}, r"`k` must be given .* here \[5, 3\]"),
        ({"untrained": random_map(k=3), "k": 4}, r"`k` must lie in \[1, 3\]"),
        (
            {"untrained": random_map(kind="self")},
            "`untrained` must be a map of kind 'depth' as well, got 'self'",
        ),
    ],
)
def test_matrices_refuse_what_they_cannot_draw(options, message):
    with pytest.raises(ValueError, match=message) as error:
        plot_coupling_matrices(random_map(), **options)
    assert "\n" not in str(error.value)


def test_pictures_render_without_warnings(tmp_path, recwarn):
    trained, twin = (
        random_map(layers=range(6)),
        random_map(layers=range(6), seed=1, untrained=True),
    )
    both = {"trained": trained, "untrained": twin}
    figures = [
        plot_coupling(trained).figure,
        plot_coupling(random_map(layers=range(6), kind="self")).figure,
        plot_coupling_matrices(trained, layers=[0, 5], untrained=twin),
        plot_adjacency(trained).figure,
        plot_locality(both).figure,
        plot_singular_values(both).figure,
    ]
    for i, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{i}.png", dpi=40)
        assert plt.imread(tmp_path / f"{i}.png").std() > 0
    assert [str(warning.message) for warning in recwarn] == []


# Where figures live


def test_pyplot_shows_what_is_drawn_without_axes_and_nothing_else(tiny_trace):
    result = random_map()
    ax = plot_coupling(result)
    fig = plot_coupling_matrices(result, layers=[0, 1])
    assert [plt.figure(number) for number in plt.get_fignums()] == [ax.figure, fig]
    plot_coupling(result, ax=Figure().subplots())
    plot_coupling_matrices(result, layers=[0, 1], fig=Figure())
    with off_screen():
        plot_locality(result)
    assert len(plt.get_fignums()) == 2


@pytest.mark.long("runs a notebook")
def test_a_notebook_shows_every_figure_once():
    """Also where a cell ends in one, whose value IPython displays as well."""
    nbformat, nbclient = (
        pytest.importorskip(name) for name in ("nbformat", "nbclient")
    )
    setup = (
        "import torch\n"
        "from tl_coupling.comparisons import CouplingMap\n"
        "from tl_coupling.pictures import plot_coupling, plot_coupling_matrices\n"
        "A, one = torch.randn(2, 2, 3, 3), torch.ones(2, 3)\n"
        "of = CouplingMap(A, one, one[:, 0], 8, (0, 1), (0, 1), (0, 0), (0, 0), 'depth', 'ujv', {})"
    )
    cells = (
        "plot_coupling_matrices(of)",
        "fig = plot_coupling_matrices(of)",
        "fig",
        "ax = plot_coupling(of)",
    )
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (setup, *cells)]
    )
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    pictures = [
        ["image/png" in part.get("data", ()) for part in cell.outputs].count(True)
        for cell in notebook.cells
    ]
    assert pictures == [0, 1, 1, 1, 1]


def test_means_over_two_classes_of_prompts_are_told_apart_by_their_titles():
    names = {"sums": ["1 + 1 =", "2 + 2 ="], "riddles": ["What has keys " * 4, "Who?"]}
    result = random_map()
    fields = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(result)
    }
    means = {
        name: MeanMap(
            **fields | {"provenance": result.provenance | {"prompts": prompts}}
        )
        for name, prompts in names.items()
    }
    for plot in (plot_coupling, plot_adjacency, plot_locality):
        sums = plot(means["sums"]).get_title()
        riddles = plot(means["riddles"]).get_title()
        assert "“1 + 1 =”, “2 + 2 =”" in sums
        assert "“What has keys What has…”, “Who?”" in riddles
    # Lines of both have names of their own, and the title what they have in common.
    assert "“" not in plot_locality(means).get_title()
