"""What the pictures of surveys hold: quartiles, profiles, scatters, fits; and several
models' trajectories.
"""

import numpy as np
import pandas
import pytest
import torch
import xarray
from matplotlib.collections import LineCollection
from matplotlib.text import Text
from scipy import stats

from axes import named_lines
from fake_survey import KS, survey
from made_up_results import walk
from tl_coupling.pictures import labels
from tl_coupling.plots import (
    plot_covariates,
    plot_profiles,
    plot_prompts,
    plot_quartiles,
    plot_trajectories,
)
from tl_coupling.studies.generalization import linear_fit, paper_table1
from tl_coupling.trajectories import trajectory_pca

pytestmark = pytest.mark.usefixtures("pyplot_untouched")

DEPTHS = (4, 6, 6, 9)


def measured(
    checkpoints=("main", "untrained"), n_prompts: int = 8, seed: int = 0
) -> xarray.Dataset:
    """A survey of four models of different depths, with what is kept of every prompt's
    trajectories.
    """
    rng = np.random.default_rng(seed)
    data = survey(
        n_models=len(DEPTHS), n_prompts=n_prompts, checkpoints=checkpoints, seed=seed
    )
    n = data.sizes["model"], data.sizes["checkpoint"], n_prompts
    shapes = (
        "line_shape_score_all_tokens",
        "expodistance_all_tokens",
        "equidistance_all_tokens",
    )
    for name in shapes:
        data[name] = (("model", "checkpoint", "prompt"), 1 + rng.lognormal(size=n))
    for name, extra in (
        ("norm", 1),
        ("logit_lens_entropy", 1),
        ("step_length", 0),
        ("line_shape_score_by_depth", 0),
    ):
        values = rng.lognormal(size=(*n, max(DEPTHS) + extra))
        for model, depth in enumerate(DEPTHS):
            values[model, ..., depth + extra :] = np.nan
        data[name] = (
            ("model", "checkpoint", "prompt", "depth" if extra else "layer"),
            values,
        )
    data["n_layers"] = (
        ("model", "checkpoint"),
        np.repeat(np.array(DEPTHS)[:, None], len(checkpoints), 1),
    )
    data["n_parameters"] = (
        ("model", "checkpoint"),
        np.repeat([[4e6], [1e6], [3e6], [2e6]], len(checkpoints), 1),
    )
    return data


def marks(ax) -> dict[str, tuple[float, float]]:
    return {line.get_label(): tuple(line.get_xydata()[0]) for line in ax.lines}


# plot_quartiles


def test_quartiles_of_every_model_sorted_by_size():
    data = measured()
    fig = plot_quartiles(data, k=5)
    coupling, score, growth, steps, norm = fig.axes
    assert [text.get_text() for text in coupling.get_yticklabels()] == [
        "m1",
        "m3",
        "m2",
        "m0",
    ]
    assert "number of parameters" in fig.get_suptitle()
    assert coupling.get_xlabel() == "coupling (k = 5)"
    for ax, values in (
        (coupling, data.mean_coupling.sel(k=5)),
        (score, data.line_shape_score_all_tokens),
        (growth, data.expodistance_all_tokens),
        (steps, data.equidistance_all_tokens),
    ):
        of = values.sel(model="org/m3", checkpoint="main").values
        assert marks(ax)["org/m3 main"] == (pytest.approx(np.median(of)), 1)
        bars = [
            c.get_segments()[0] for c in ax.collections if isinstance(c, LineCollection)
        ]
        (bar,) = [bar for bar in bars if bar[0][1] == bar[1][1] == 1]
        np.testing.assert_allclose(bar[:, 0], np.quantile(of, (0.25, 0.75)))
    at_the_end = data.norm.sel(model="org/m2", checkpoint="main", depth=6).values
    assert marks(norm)["org/m2 main"] == (pytest.approx(np.median(at_the_end)), 2)
    assert norm.get_xscale() == growth.get_xscale() == "log"


def test_twins_are_open_and_chance_is_marked():
    data = measured()
    coupling, score, *_ = plot_quartiles(data).axes
    faces = {line.get_label(): line.get_markerfacecolor() for line in coupling.lines}
    assert {face for name, face in faces.items() if name.endswith("untrained")} == {
        "white"
    }
    assert {face for name, face in faces.items() if name.endswith("main")} == {
        labels.TRAINED
    }

    def places(ax) -> set[float]:
        segments = [segment for c in ax.collections for segment in c.get_segments()]
        return {round(float(a[0]), 6) for a, b in segments if a[0] == b[0]}

    assert places(coupling) == {round(1 - (1 - 1 / KS[-1]) ** 0.5, 6)}
    assert places(score) == {round(depth**0.5, 6) for depth in DEPTHS}


def test_models_are_sorted_by_a_score_and_those_without_come_last():
    fig = plot_quartiles(
        measured(("main",)), by={"org/m2": 30.0, "org/m0": 50.0, "org/m3": 40.0}
    )
    assert [text.get_text() for text in fig.axes[0].get_yticklabels()] == [
        "m2",
        "m3",
        "m0",
        "m1",
    ]
    assert "sorted by score" in fig.get_suptitle()
    assert "untrained" not in [text.get_text() for text in fig.legends[0].get_texts()]


def test_names_are_short_unless_two_are_then_the_same():
    data = measured(("main",)).assign_coords(
        model=["a/step2", "b/step2", "b/other", "c/third"]
    )
    names = [text.get_text() for text in plot_quartiles(data).axes[0].get_yticklabels()]
    assert set(names) == {"a/step2", "b/step2", "other", "third"}


def test_the_last_checkpoint_counts():
    data = measured((2, 10), n_prompts=4)
    ax = plot_quartiles(data, k=5).axes[0]
    expected = data.mean_coupling.sel(model="org/m1", checkpoint=10, k=5).median()
    assert marks(ax)["org/m1 10"][0] == pytest.approx(float(expected))
    assert "org/m1 2" not in marks(ax)


# plot_profiles


def test_profiles_are_over_each_models_own_depth():
    data = measured()
    fig = plot_profiles(data)
    norm, score, steps, entropy = fig.axes
    by = {line.get_label(): line for line in norm.lines}
    np.testing.assert_allclose(by["m3"].get_xdata(), np.arange(10) / 9)
    expected = np.median(
        data.norm.sel(model="org/m3", checkpoint="main").values, axis=0
    )
    np.testing.assert_allclose(by["m3"].get_ydata(), expected)
    assert by["_org/m3 untrained"].get_linestyle() == "--"
    assert by["_org/m3 untrained"].get_color() == by["m3"].get_color()
    short = {line.get_label(): line for line in steps.lines}["m0"]
    np.testing.assert_allclose(short.get_xdata(), np.arange(1, 5) / 4)
    assert norm.get_yscale() == steps.get_yscale() == "log"
    assert score.get_yscale() == entropy.get_yscale() == "linear"
    assert len(plot_profiles(data.drop_vars("logit_lens_entropy")).axes) == 3
    with pytest.raises(ValueError, match="wanted a survey that holds norm or"):
        plot_profiles(survey())


# plot_prompts


def one_model(x_between: float, x_within: float, n: int = 40) -> xarray.Dataset:
    """Coupling goes with length by one slope between two tasks, and by another within
    them.
    """
    rng = np.random.default_rng(3)
    task = np.arange(n) % 2
    length = 20 + 30 * task + rng.integers(0, 10, n)
    within = length - np.where(task, length[task == 1].mean(), length[task == 0].mean())
    coupling = (
        0.4 + x_between * task + x_within * within + 1e-4 * rng.standard_normal(n)
    )
    data = survey(coupling[None], n_prompts=n)
    data["n_pos"] = (
        ("model", "checkpoint", "prompt"),
        length[None, None].astype(float),
    )
    return data.assign_coords(task=("prompt", np.where(task, "sums", "riddles")))


def test_a_relation_between_tasks_alone_is_gone_within_them():
    data = one_model(x_between=0.2, x_within=-0.004)
    pooled, within = plot_prompts(data, k=5).axes
    x, y = data.n_pos.values.ravel(), data.mean_coupling.sel(k=5).values.ravel()
    rho, p = stats.spearmanr(x, y)
    assert pooled.get_title() == f"all prompts:\nρ = {rho:+.2f}, p = {p:.2g}\nn = 40"
    inside = data.task.values == "sums"
    less = [
        values - np.where(inside, values[inside].mean(), values[~inside].mean())
        for values in (x, y)
    ]
    rho_within, p_within = stats.spearmanr(*less)
    assert rho > 0.5 > -0.9 > rho_within
    said = f"within tasks:\nρ = −{-rho_within:.2f}, p = {p_within:.2g}\nn = 40"
    assert within.get_title() == said
    drawn = {line.get_label(): line.get_xydata() for line in pooled.lines}
    np.testing.assert_allclose(drawn["sums"], np.stack([x[inside], y[inside]], 1))
    moved = {line.get_label(): line.get_xydata() for line in within.lines}
    np.testing.assert_allclose(
        moved["sums"], np.stack([one[inside] for one in less], 1)
    )


def test_against_a_difficulty_prompts_without_one_are_left_out():
    data = one_model(0.0, 0.01)
    hard = {f"p{i}": float(i) for i in range(30)}
    pooled, _ = plot_prompts(data, hard).axes
    assert "n = 30" in pooled.get_title()
    assert pooled.get_xlabel() == "difficulty"
    (alone,) = plot_prompts(data.drop_vars("task"), hard).axes
    assert alone.get_title() == pooled.get_title()
    with pytest.raises(
        ValueError,
        match="'org/m0': wanted at least three prompts with a difficulty, got 2",
    ):
        plot_prompts(data, {"p0": 1.0, "p1": 2.0})


def test_prompts_of_one_length_have_no_correlation():
    data = one_model(0.1, 0.0)
    data["n_pos"] = data.n_pos * 0 + 7
    assert {ax.get_title() for ax in plot_prompts(data).axes} == {
        "all prompts:\nρ is undefined",
        "within tasks:\nρ is undefined",
    }


def test_a_row_for_each_model_but_no_more_than_four():
    panels = plot_prompts(measured()).axes
    assert [ax.get_title().split("\n")[0] for ax in panels[::2]] == [
        "m1",
        "m3",
        "m2",
        "m0",
    ]
    assert len(plot_prompts(survey(n_models=6)).axes) == 8


# plot_covariates


def test_the_papers_table_against_its_sizes():
    table = paper_table1()
    fig = plot_covariates(table)
    names = ["log10(params_billion)", "n_layers", "d_model", "log10(training_tokens)"]
    words = ["parameters (billions)", "number of layers", "width of the stream"]
    assert [ax.get_xlabel() for ax in fig.axes] == [*words, "training tokens"]
    for ax, name in zip(fig.axes, names, strict=True):
        column = name.removeprefix("log10(").removesuffix(")")
        x = table[column] if column == name else np.log10(table[column])
        known = x.notna() & table.score.notna()
        fit = stats.linregress(x[known], table.score[known])
        robust = linear_fit(table, name, "score", families="family")
        n_families = table.family[known].nunique()
        assert ax.get_title() == (
            f"R² = {fit.rvalue**2:.3f}, p of the slope {robust.p:.2g}, "
            f"n = {known.sum()} of {n_families} families"
        )
        fitted = fit.intercept + fit.slope * x[known]
        residuals = (table.score[known] - fitted).abs().sort_values()
        furthest = set(table.model[residuals.index[-5:]].str.split("/").str[-1])
        assert {text.get_text().split("/")[-1] for text in ax.texts} == furthest
        line = ax.lines[1].get_xydata()
        np.testing.assert_allclose(line[:, 1], fit.intercept + fit.slope * line[:, 0])
    sizes = plot_covariates(table, x=["params_billion"]).axes[0].get_title()
    assert f"R² = {linear_fit(table, 'params_billion', 'score').r_squared:.3f}" in sizes
    # All of one depth: nothing to fit there.
    same = plot_covariates(table[table.n_layers == 32]).axes
    assert [ax.get_xlabel() for ax in same] == [
        "parameters (billions)",
        "width of the stream",
        "training tokens",
    ]
    with pytest.raises(
        ValueError, match="`x` is empty: wanted columns to draw 'score' against"
    ):
        plot_covariates(pandas.DataFrame({"model": ["a"], "score": [1.0]}))


def test_names_stand_on_no_point_named_or_not():
    fig = plot_covariates(paper_table1())
    fig.draw_without_rendering()
    for ax in fig.axes:
        points = ax.transData.transform(ax.lines[0].get_xydata())
        for name in ax.texts:
            box = Text.get_window_extent(name)
            assert not any(box.contains(*point) for point in points), name.get_text()


# plot_trajectories of several


def test_each_model_has_a_row_and_its_own_components():
    small, large = walk(), walk(n_layers=9, seed=1)
    fig = plot_trajectories({"small $x$": small, "large": large})
    panels = np.reshape(fig.axes[:4], (2, 2))
    for trace, row, depth in ((small, panels[0], 20), (large, panels[1], 9)):
        expected = trajectory_pca(trace.residual).projected.numpy()
        for ax, (first, last) in zip(row, [(0, depth), (0, depth // 2)], strict=True):
            for t, line in enumerate(named_lines(ax)):
                np.testing.assert_array_equal(
                    line.get_xydata(), expected[first : last + 1, t]
                )
    assert panels[0, 0].get_title().startswith("small $x$\nall: depth 0 to 20")
    assert len(fig.legends) == 1
    fig.draw_without_rendering()


def test_other_tokens_have_a_bar_in_place_of_names():
    other = walk(str_tokens=list("abcdef"))
    fig = plot_trajectories({"a": walk(sink=0), "b": other}, views=["all"])
    assert not fig.legends
    assert fig.axes[-1].get_ylabel() == "token position (the last: black)"
    assert "without attention sinks" in fig.get_suptitle()
    # What is a sink in one is left out of both, and both axes have one scale.
    assert [len(named_lines(ax)) for ax in fig.axes[:2]] == [5, 5]
    assert {ax.get_aspect() for ax in fig.axes[:2]} == {1.0}
    with pytest.raises(ValueError, match="`trace` is empty"):
        plot_trajectories({})
    with pytest.raises(ValueError, match="at least 2 tokens"):
        plot_trajectories({"a": torch.randn(3, 1, 4)})


@pytest.mark.parametrize("plot", [plot_quartiles, plot_profiles, plot_prompts])
def test_pictures_render_and_take_a_figure(plot):
    from matplotlib.figure import Figure

    fig = Figure(layout="constrained")
    assert plot(measured(), fig=fig) is fig
    fig.canvas.draw()


@pytest.mark.parametrize("plot", [plot_quartiles, plot_prompts])
def test_bad_input_is_one_line(plot):
    data = measured()
    with pytest.raises(
        ValueError, match=r"`k` = 7 was not measured; there are \[5, 10\]"
    ):
        plot(data, k=7)
    with pytest.raises(ValueError, match="no 'mean_miscoupling' in the survey"):
        plot(data, measure="miscoupling")
    if plot is plot_quartiles:
        with pytest.raises(
            ValueError, match="`by` must be a number for each model, or a fact"
        ):
            plot(data, by="weight")
