"""Means by task, their intervals over prompts, and the picture of them."""

import numpy as np
import pytest
from scipy import stats

import tl_coupling as tlc
from fake_survey import survey
from tl_coupling.pictures import labels
from tl_coupling.studies.generalization import task_means


def test_task_means_are_means_with_intervals_over_prompts():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            0.2 + 0.1 * rng.standard_normal((2, 200)),
            0.6 + 0.1 * rng.standard_normal((2, 200)),
        ],
        1,
    )
    table = task_means(survey(x), k=5)
    assert table.attrs == {
        "k": 5,
        "measure": "coupling",
        "pairs": "pairs of different layers",
    }
    assert table["task"].tolist() == ["arc", "mmlu", "all prompts"] * 2
    assert table["n_prompts"].tolist() == [200, 200, 400] * 2
    np.testing.assert_allclose(
        table["mean"][:3], [x[0, :200].mean(), x[0, 200:].mean(), x[0].mean()]
    )
    # The bootstrap of a mean is the normal interval here, to a few per cent of its
    # width.
    half = (
        stats.norm.ppf(0.975)
        * np.array([x[0, :200].std(), x[0, 200:].std(), x[0].std()])
        / np.sqrt([200, 200, 400])
    )
    np.testing.assert_allclose(table["high"][:3] - table["mean"][:3], half, rtol=0.1)
    np.testing.assert_allclose(table["mean"][:3] - table["low"][:3], half, rtol=0.1)


@pytest.mark.long("simulates hundreds of studies")
@pytest.mark.parametrize("n_prompts", [2, 3, 4])
def test_intervals_over_few_prompts_cover_their_mean(n_prompts: int):
    """95 % of 400 made-up models; percentiles of resamples cover .50, .74 and .86."""
    x = np.random.default_rng(n_prompts).standard_normal((400, n_prompts))
    table = task_means(survey(x), k=5, n_resamples=20)
    of_all = table[table["task"] == "all prompts"]
    covers = (of_all["low"] < 0) & (of_all["high"] > 0)
    assert len(covers) == 400
    assert 0.91 < covers.mean() < 0.99
    np.testing.assert_allclose(
        of_all["high"][:1],
        stats.ttest_1samp(x[0], 0).confidence_interval().high,
    )


def test_task_means_leave_out_what_was_not_measured():
    data = survey(n_models=2, n_prompts=4)
    data["mean_coupling"][1, 0, :2] = np.nan
    data["mean_coupling"][1, 0, 3] = np.nan
    table = task_means(data)
    assert table[table["model"] == "org/m1"]["task"].tolist() == ["mmlu", "all prompts"]
    assert table[table["model"] == "org/m1"]["n_prompts"].tolist() == [1, 1]
    assert table[table["model"] == "org/m1"][["low", "high"]].isna().all(axis=None)
    assert table["loss"].notna().all()
    with pytest.raises(ValueError, match="`k` = 7 was not measured"):
        task_means(data, k=7)


def test_picture_of_task_means_has_a_row_for_each_task():
    table = task_means(survey(n_models=2).drop_vars("d_model"), k=5)
    assert table["d_model"].isna().all()
    ax = tlc.plots.plot_task_means(table)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "arc (n = 3)",
        "mmlu (n = 3)",
        "all prompts (n = 6)",
    ]
    drawn = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert [line.get_label() for line in drawn] == ["org/m0", "org/m1"]
    np.testing.assert_allclose(
        drawn[1].get_xdata(), table[table["model"] == "org/m1"]["mean"]
    )
    intervals = ax.collections[0].get_segments()
    np.testing.assert_allclose(
        [segment[:, 0] for segment in intervals], table[["low", "high"]][:3]
    )
    assert "k = 5" in ax.get_xlabel()
    assert "pairs of different layers" in ax.get_title()
    all_pairs = tlc.plots.plot_task_means(
        task_means(survey(n_models=2).assign_attrs(diagonal=1), k=5)
    )
    assert "all pairs of layers" in all_pairs.get_title()


def test_a_twin_has_the_colour_of_its_model_and_a_legend_of_many_stays_short():
    table = task_means(survey(n_models=10, checkpoints=("main", "untrained")), k=5)
    ax = tlc.plots.plot_task_means(table)
    drawn = [line for line in ax.lines if line.get_linestyle() == "None"]
    colors = [labels.COLORS[i % len(labels.COLORS)] for i in range(10)]
    assert [line.get_color() for line in drawn] == [
        color for color in colors for _ in range(2)
    ]
    assert [line.get_markerfacecolor() == "white" for line in drawn] == [
        False,
        True,
    ] * 10
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named == [
        *(f"org/m{i}" for i in range(10)),
        "random subspaces, 0.106",
        "main",
        "untrained",
    ]
    ax = tlc.plots.plot_task_means(task_means(survey(n_models=24), k=5))
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named == ["each of 24 models", "random subspaces, 0.106"]


def test_task_means_of_a_few_sizes_are_drawn_in_their_colours_and_shapes():
    data = survey(n_models=4, checkpoints=("main", "untrained"))
    data["d_model"][:] = np.array([64, 64, 128, 128])[:, None]
    data["n_layers"][:] = np.array([2, 5, 2, 5])[:, None]
    table = task_means(data, k=5)
    assert set(table["d_model"]) == {64, 128}
    assert set(table["n_layers"]) == {2, 5}
    ax = tlc.plots.plot_task_means(table)
    drawn = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert [line.get_marker() for line in drawn] == ["o", "o", "s", "s"] * 2
    colors = [tuple(line.get_color()) for line in drawn]
    assert len(set(colors[:4])) == len(set(colors[4:])) == 1
    assert colors[0] != colors[4]
    hollow = [line.get_markerfacecolor() == "white" for line in drawn]
    assert hollow == [False, True] * 4
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named[:4] == ["width 64", "width 128", "2 layers", "5 layers"]
    assert named[-1] == "untrained"
    beside = [text.get_text() for text in ax.texts]
    assert beside[:3] == ["m0 main", "m0 untrained", "m1 main"]


def test_infinity_is_no_number_that_is_missing():
    """NaN is left out, as what was not measured; infinity was left out with it."""
    x = 0.2 + 0.1 * np.random.default_rng(0).standard_normal((8, 5))
    y = np.arange(8.0)
    for values, places in ((x, (2, 3)), (y, (2,))):
        original = values[places]
        values[places] = np.inf
        with pytest.raises(ValueError, match="has a value of inf in size"):
            tlc.generalization.bootstrap(x, y, n_resamples=20)
        values[places] = original
    x[0, 0] = np.inf
    for measure in (task_means, tlc.generalization.prompt_correlations):
        options = {} if measure is task_means else {"against": "n_pos"}
        with pytest.raises(
            ValueError, match="holds infinite numbers, in mean_coupling"
        ):
            measure(survey(x), k=5, **options)
