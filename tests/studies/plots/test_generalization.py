"""What the pictures of coupling against score hold: points, lines, bands, names,
labels; pyplot is left alone.
"""

import itertools

import numpy as np
import pandas
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fake_survey import KS, survey
from tl_coupling.studies.generalization import Generalization, generalization_study
from tl_coupling.studies.plots.generalization import (
    plot_forest,
    plot_generalization,
    plot_k_sweep,
)


@pytest.fixture(scope="module")
def result() -> Generalization:
    data = survey(n_models=14)
    rng = np.random.default_rng(0)
    x = data["mean_coupling"].values[:, 0, :, 0].mean(1)
    scores = pandas.DataFrame(
        {
            "model": data["model"].values,
            "score": 20 + 60 * x + 3 * rng.standard_normal(14),
        }
    )
    return generalization_study(
        data, scores, k=5, subsets={"deep $x$": "n_layers > 12"}, n_resamples=200
    )


pytestmark = pytest.mark.usefixtures("pyplot_untouched")


def lines(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def test_the_scatter_holds_models_line_band_and_null(result):
    ax = plot_generalization(result)
    found, line = lines(ax), result.association.linear
    np.testing.assert_array_equal(
        found["_models"].get_xdata(), result.table["coupling"]
    )
    np.testing.assert_array_equal(found["_models"].get_ydata(), result.table["score"])
    (x0, x1), (y0, y1) = (ends[[0, -1]] for ends in found["linear fit"].get_data())
    assert (y1 - y0) / (x1 - x0) == pytest.approx(line.slope)
    assert y0 - line.slope * x0 == pytest.approx(line.intercept)
    null = 1 - np.sqrt(1 - 1 / 5)
    np.testing.assert_allclose(found[f"random subspaces, {null:.3f}"].get_xdata(), null)
    band = ax.collections[0].get_paths()[0].vertices
    drawn = result.association.bootstrap
    # Readers take a band without a name for where models lie.
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "95 % bootstrap band of the line" in said
    assert band[:, 1].min() == pytest.approx(drawn.band_low.min())
    assert band[:, 1].max() == pytest.approx(drawn.band_high.max())
    (exponential,) = [
        line for label, line in found.items() if label.startswith("exponential")
    ]
    fit = result.exponential
    np.testing.assert_allclose(
        exponential.get_ydata(), fit.a * np.exp(fit.b * exponential.get_xdata())
    )
    assert f"n = 14, R² = {line.r_squared:.2f}, p = {line.p:.2g}" in ax.get_title()
    assert "score against coupling\nmean over 6 prompts" in ax.get_title()
    assert ax.get_xlabel() == r"mean coupling $1 - \tilde{m}$ (k = 5)"
    assert ax.get_ylabel() == "score"


def test_every_model_has_its_name_beside_it_and_none_covers_another(result):
    ax = plot_generalization(result)
    ax.figure.draw_without_rendering()
    names = [text.get_text() for text in ax.texts]
    assert names == [model.removeprefix("org/") for model in result.table["model"]]
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    for label in (
        "linear fit",
        f"exponential fit $a\\,e^{{bx}}$, R² = {result.exponential.r_squared:.2f}",
    ):
        curve = ax.transData.transform(lines(ax)[label].get_xydata())
        dense = np.linspace(curve[0, 0], curve[-1, 0], 2000)
        heights = np.interp(dense, *curve.T)
        assert not any(
            box.count_contains(np.column_stack([dense, heights])) for box in boxes
        )
    assert ax.get_legend().get_window_extent().y1 < ax.get_window_extent().y0
    covering = [
        pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])
    ]
    assert not covering
    inside = ax.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


def test_names_that_differ_in_the_organisation_alone_stay_whole(result):
    twins = result.table.assign(model=["a/same", "b/same", *result.table["model"][2:]])
    ax = plot_generalization(Generalization(**{**vars(result), "table": twins}))
    assert [text.get_text() for text in ax.texts][:3] == ["a/same", "b/same", "m2"]


def test_a_null_that_differs_is_a_mark_for_each_model(result):
    nulls = np.linspace(0.2, 0.4, 14)
    ax = plot_generalization(
        Generalization(**{**vars(result), "table": result.table.assign(null=nulls)})
    )
    np.testing.assert_array_equal(lines(ax)["random subspaces"].get_xdata(), nulls)


def test_a_null_far_away_is_named_at_the_edge_and_leaves_room_to_the_models(result):
    x = result.table["coupling"]
    far = x.min() - 2 * np.ptp(x)
    table = result.table.assign(null=far)
    ax = plot_generalization(Generalization(**{**vars(result), "table": table}))
    assert f"◂ random subspaces {far:.3f}" in [text.get_text() for text in ax.texts]
    assert not any("random subspaces" in label for label in lines(ax))
    left, right = ax.get_xlim()
    assert left < x.min() < x.max() < right
    assert right - left < 1.5 * np.ptp(x)
    beyond = result.table.assign(null=x.max() + 2 * np.ptp(x) + np.linspace(0, 1, 14))
    ax = plot_generalization(Generalization(**{**vars(result), "table": beyond}))
    low, high = beyond["null"].min(), beyond["null"].max()
    assert f"random subspaces {low:.3f} to {high:.3f} ▸" in [
        text.get_text() for text in ax.texts
    ]


def test_colours_are_widths_and_shapes_are_depths_where_these_are_few(result):
    table = result.table.assign(d_model=[64, 128] * 7, n_layers=[2] * 8 + [6] * 6)
    ax = plot_generalization(Generalization(**{**vars(result), "table": table}))
    models = [line for line in ax.lines if line.get_label() == "_models"]
    drawn = {
        (x, y): (tuple(line.get_color()), line.get_marker())
        for line in models
        for x, y in line.get_xydata()
    }
    assert len(drawn) == 14
    points = zip(table.coupling, table.score, strict=True)
    looks = [drawn[point] for point in points]
    for sizes, part in ((table.d_model, 0), (table.n_layers, 1)):
        seen = set(zip(sizes, (look[part] for look in looks), strict=True))
        assert len(seen) == len({look for _, look in seen}) == 2
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named[-4:] == ["width 64", "width 128", "2 layers", "6 layers"]


def test_the_forest_has_a_row_for_each_slope(result):
    ax = plot_forest(result)
    labels = [text.get_text().split("\n")[0] for text in ax.get_yticklabels()]
    first = ["all models", "all models, bootstrap", "all models, corrected", "deep $x$"]
    assert labels == first + [f"given {name}" for name in result.partial]
    ends = np.array([path.vertices[:, 0] for path in ax.collections[0].get_paths()])
    expected = [
        result.association.linear.slope_interval,
        result.association.bootstrap.slope,
    ]
    expected.append(result.attenuation.slope_interval)
    expected += [
        result.subsets["deep $x$"].slope_interval,
        *(fit.slope_interval for fit in result.partial.values()),
    ]
    np.testing.assert_allclose(ends, expected)
    values = ax.lines[0].get_xdata()
    assert values[3] == result.subsets["deep $x$"].slope
    assert values[-1] == list(result.partial.values())[-1].slope
    assert ax.yaxis_inverted()
    assert (
        f"VIF = {result.partial['n_layers'].vif:.1f}"
        in ax.get_yticklabels()[5].get_text()
    )
    assert (
        f"reliability {result.attenuation.reliability:.2f}"
        in ax.get_yticklabels()[2].get_text()
    )


def test_the_k_sweep_has_a_point_and_an_interval_for_each_k(result):
    ax = plot_k_sweep(result)
    np.testing.assert_allclose(
        ax.lines[0].get_ydata(), [result.by_k[k].linear.r_squared for k in KS]
    )
    ends = np.array([path.vertices[:, 1] for path in ax.collections[0].get_paths()])
    np.testing.assert_allclose(ends, [result.by_k[k].bootstrap.r_squared for k in KS])
    # Two points are not joined.
    assert ax.lines[0].get_linestyle() == "None"
    three = dict(result.by_k) | {20: result.by_k[10]}
    joined = plot_k_sweep(Generalization(**{**vars(result), "by_k": three}))
    assert joined.lines[0].get_linestyle() == "-"
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert labels == [f"{k}\np = {result.by_k[k].linear.p:.2g}" for k in KS]
    assert "k = 5: n = 14" in ax.get_title()


@pytest.mark.parametrize("plot", [plot_generalization, plot_forest, plot_k_sweep])
def test_axes_of_the_caller_are_drawn_on(plot, result):
    ax = Figure().subplots(1, 2)[1]
    assert plot(result, ax=ax) is ax
    with pytest.raises(TypeError):
        plot(result, ax)


def test_a_loss_says_its_unit():
    ax = plot_generalization(generalization_study(survey(), n_resamples=50))
    assert ax.get_ylabel() == "loss (nats per token)"
