"""What the pictures of trajectories hold: data, labels, limits; and that they leave
pyplot alone.
"""

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
import scipy.stats
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import tl_coupling as tlc
from axes import named_lines
from made_up_results import TOKENS, random_map, walk
from tl_coupling.blocks import Trace
from tl_coupling.plots import (
    plot_inverse_singular_values,
    plot_linearisation,
    plot_perturbation,
    plot_trajectories,
    plot_trajectory_metrics,
)
from tl_coupling.trajectories import (
    TrajectoryResult,
    line_shape_score,
    line_shape_score_by_depth,
    linearisation,
    measure_trajectory,
    norms,
    perturbation,
    step_lengths,
    trajectory_pca,
)

pytestmark = pytest.mark.usefixtures("pyplot_untouched")


def shapes(
    trace: Trace, entropy: torch.Tensor | None = None, **options
) -> TrajectoryResult:
    """The shapes of a walk, which has no model and so no entropy of its own."""
    with mock.patch(
        "tl_coupling.trajectories.result.entropy_by_depth", return_value=entropy
    ):
        return measure_trajectory(trace, linear=False, noise=False, **options)


def lines(ax, label: str):
    return [line for line in ax.lines if line.get_label() == label]


# plot_trajectories


def test_trajectories_are_the_principal_components_of_the_last_depth():
    trace = walk()
    fig = plot_trajectories(trace, views=("all", "shallow", "deep"))
    expected = trajectory_pca(trace.residual).projected.numpy()
    for ax, (first, last) in zip(fig.axes, [(0, 20), (0, 10), (10, 20)], strict=True):
        for t, line in enumerate(named_lines(ax)):
            np.testing.assert_array_equal(
                line.get_xydata(), expected[first : last + 1, t]
            )
        assert f"depth {first} to {last}" in ax.get_title()
        assert "PC 1" in ax.get_xlabel()
        assert "PC 2" in ax.get_ylabel()


def test_the_last_token_is_black_and_no_other():
    colors = [
        to_hex(line.get_color())
        for line in named_lines(plot_trajectories(walk()).axes[0])
    ]
    assert colors[-1] == "#000000"
    assert "#000000" not in colors[:-1]
    assert len(set(colors)) == len(TOKENS)


def test_another_token_is_black_if_asked_for():
    colors = [
        to_hex(line.get_color())
        for line in named_lines(plot_trajectories(walk(), black=-5).axes[0])
    ]
    assert [i for i, color in enumerate(colors) if color == "#000000"] == [1]


def test_a_ring_where_a_token_enters_and_a_dot_where_it_leaves():
    ax = plot_trajectories(walk(), views=["deep"]).axes[0]
    path, ring, dot = ax.lines[:3]
    assert ring.get_xydata().tolist() == path.get_xydata()[:1].tolist()
    assert dot.get_xydata().tolist() == path.get_xydata()[-1:].tolist()
    assert ring.get_markerfacecolor() == "none"
    assert dot.get_markerfacecolor() != "none"


def test_an_attention_sink_is_left_out_and_named():
    trace = walk(sink=0)
    fig = plot_trajectories(trace)
    expected = trajectory_pca(trace.residual[:, 1:]).projected.numpy()
    assert len(named_lines(fig.axes[0])) == len(TOKENS) - 1
    np.testing.assert_array_equal(
        named_lines(fig.axes[0])[0].get_xydata(), expected[:, 0]
    )
    assert "without attention sink: token 0 ‘It’" in fig.get_suptitle()
    assert "sink" not in plot_trajectories(walk()).get_suptitle()


def test_positions_are_what_they_say_sink_or_not():
    fig = plot_trajectories(walk(sink=0), positions=[0, 2, -1])
    assert [line.get_label() for line in named_lines(fig.axes[0])] == [
        "0 ‘It’",
        "2 ‘$5’",
        "5 ‘$6’",
    ]
    assert "sink" not in fig.get_suptitle()


def test_views_and_figures_are_chosen():
    figure = Figure(layout="constrained")
    assert plot_trajectories(walk(), views=("deep", "all"), fig=figure) is figure
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == ["deep", "all"]


def test_dollars_in_tokens_are_no_formulas():
    fig = plot_trajectories(walk())
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()][2] == "2 ‘$5’"
    assert not any(text.get_parse_math() for text in legend.get_texts())
    fig.draw_without_rendering()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": ()}, "`views` is empty"),
        ({"positions": [6]}, r"`positions` must lie in \[-6, 5\]"),
        ({"black": 6}, r"`black` must lie in \[-6, 5\], got 6"),
        (
            {"names": ["a", "b"]},
            "`names` must have one name for each of the 6 positions, got 2",
        ),
        ({"positions": [2]}, r"at least 2 tokens, got positions \[2\]"),
        (
            {"views": ["whole"]},
            "`views` must be one of all, shallow, deep, got 'whole'",
        ),
    ],
)
def test_trajectories_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        plot_trajectories(walk(), **options)


def test_a_residual_stream_is_drawn_like_its_trace():
    trace = walk(sink=0)
    for stream in (trace.residual, trace.residual.numpy()):
        fig = plot_trajectories(stream)
        for ours, expected in zip(
            named_lines(fig.axes[0]),
            named_lines(plot_trajectories(trace).axes[0]),
            strict=True,
        ):
            np.testing.assert_array_equal(ours.get_xydata(), expected.get_xydata())
        assert [line.get_label() for line in named_lines(fig.axes[0])] == [
            "1",
            "2",
            "3",
            "4",
            "5",
        ]
        assert "without attention sink: token 0" in fig.get_suptitle()


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (torch.randn(21, 8), "`trace` must have shape"),
        (
            torch.ones(21, 6, 8, dtype=torch.int64),
            "must be a Trace, a floating-point torch tensor .* or a mapping from strings to",
        ),
        (
            None,
            "must be a Trace, a floating-point torch tensor .* or a mapping from strings to",
        ),
        (torch.full((21, 6, 8), torch.nan), "`x` must be finite"),
    ],
)
def test_other_streams_are_refused(stream, message):
    with pytest.raises((ValueError, TypeError), match=message):
        plot_trajectories(stream)


def test_many_tokens_have_a_colour_bar_in_place_of_a_legend():
    fig = plot_trajectories(
        torch.randn(9, 30, 8, generator=torch.Generator().manual_seed(0)).cumsum(0)
    )
    assert not fig.legends
    assert "token position" in fig.axes[-1].get_ylabel()
    shown = [to_hex(line.get_color()) for line in named_lines(fig.axes[0])]
    assert len(set(shown)) == 30
    assert shown[-1] == "#000000"


def test_prompts_have_their_names_and_a_shape_each():
    stream = walk(sink=0).residual
    names = ["France", "Italy", "$x$", "Norway", "Greece", "Oslo"]
    fig = plot_trajectories(stream, views=["deep"], names=names, black=None)
    (ax,) = fig.axes
    drawn = named_lines(ax)
    # A prompt that is far from the others is no sink: it is drawn.
    expected = trajectory_pca(stream).projected.numpy()[10:]
    for i, line in enumerate(drawn):
        np.testing.assert_array_equal(line.get_xydata(), expected[:, i])
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    shapes_in_legend = [handle.get_marker() for handle in legend.legend_handles]
    assert len(set(shapes_in_legend)) == len(names)
    ends = ax.lines[2::3]
    assert [end.get_marker() for end in ends] == shapes_in_legend
    assert "#000000" not in {to_hex(line.get_color()) for line in drawn}
    assert "tokens" not in fig.get_suptitle()
    assert "sink" not in fig.get_suptitle()


def test_names_are_of_positions_and_always_in_a_legend():
    names = [f"prompt {i}" for i in range(30)]
    stream = torch.randn(9, 30, 8, generator=torch.Generator().manual_seed(0))
    fig = plot_trajectories(stream, names=names)
    assert len(fig.legends[0].get_texts()) == 30
    chosen = plot_trajectories(stream, names=names, positions=[3, 7, -1])
    labels = [line.get_label() for line in named_lines(chosen.axes[0])]
    assert labels == ["prompt 3", "prompt 7", "prompt 29"]
    by_name = plot_trajectories({"a": stream, "b": stream}, names=names)
    assert len(by_name.legends[0].get_texts()) == 30


def test_a_bar_names_no_black_token_where_there_is_none():
    stream = torch.randn(9, 30, 8, generator=torch.Generator().manual_seed(0))
    fig = plot_trajectories(stream.cumsum(0), black=None)
    assert fig.axes[-1].get_ylabel() == "token position"
    colors = {to_hex(line.get_color()) for line in named_lines(fig.axes[0])}
    assert "#000000" not in colors


@pytest.mark.parametrize(
    ("n_layers", "depths"),
    [(20, [3, 6, 9, 12, 15, 18]), (30, [5, 10, 15, 20, 25]), (2, [1]), (1, [])],
)
def test_small_dots_grow_along_each_line(n_layers, depths):
    trace = walk(n_layers)
    ax = plot_trajectories(trace, views=["all"]).axes[0]
    projected = trajectory_pca(trace.residual).projected.numpy()
    assert len(ax.collections) == len(TOKENS)
    for i, dots in enumerate(ax.collections):
        np.testing.assert_array_equal(dots.get_offsets(), projected[depths, i])
        assert (np.diff(dots.get_sizes()) > 0).all()
    # They are smaller than the dot at the end, of 4 points.
    assert all((dots.get_sizes() < 16).all() for dots in ax.collections)


def test_labels_say_that_components_are_of_the_last_depth():
    trace = walk()
    shares = trajectory_pca(trace.residual).explained_variance_ratio.tolist()
    (ax,) = plot_trajectories(trace, views=["all"]).axes
    assert ax.get_xlabel() == f"PC 1 of the last depth ({shares[0]:.0%} of variance)"
    assert ax.get_ylabel() == f"PC 2 of the last depth ({shares[1]:.0%})"
    for several in (trace, {"a": trace, "b": trace}):
        for ax in plot_trajectories(several).axes:
            assert ax.get_xlabel().startswith("PC 1 of the last depth\n")
            assert ax.get_ylabel().startswith("PC 2 of the last depth\n")


def test_one_panel_for_print_has_no_title_and_panels_keep_their_views():
    with tlc.plots.paper_style():
        one = plot_trajectories(walk(), views=["all"])
        two = plot_trajectories(walk())
    assert one.axes[0].get_title() == ""
    assert one.get_suptitle() == two.get_suptitle() == ""
    assert [ax.get_title().split(":")[0] for ax in two.axes] == ["all", "shallow"]


def test_labels_of_panels_side_by_side_do_not_overlap():
    trace = walk()
    widths = (("all",), ("all", "shallow"), ("all", "shallow", "deep"))
    for views in widths:
        for width in (3.3, 6.8):
            with tlc.plots.off_screen(), tlc.plots.paper_style(width):
                fig = plot_trajectories(trace, views=views)
            fig.draw_without_rendering()
            boxes = [ax.xaxis.label.get_window_extent() for ax in fig.axes]
            for left, right in itertools.pairwise(boxes):
                assert left.x1 < right.x0


# plot_trajectory_metrics


def test_metrics_are_the_measures_of_each_token_and_their_mean():
    trace = walk()
    fig = plot_trajectory_metrics(shapes(trace, window=5))
    x = trace.residual
    measures = [
        norms(x),
        step_lengths(x),
        line_shape_score(x, window=5),
        line_shape_score_by_depth(x),
    ]
    for ax, expected, start in zip(fig.axes, measures, (0, 0, 2, 0), strict=True):
        faint = lines(ax, "_tokens")
        np.testing.assert_array_equal(
            np.stack([line.get_ydata() for line in faint], axis=1), expected
        )
        (mean,) = lines(ax, "tiny")
        np.testing.assert_allclose(mean.get_ydata(), expected.mean(1))
        assert list(mean.get_xdata()) == list(range(start, start + len(expected)))
        assert mean.get_color() == faint[0].get_color()
        assert faint[0].get_alpha() < 0.5
    assert [ax.get_yscale() for ax in fig.axes] == ["log", "log", "linear", "linear"]
    assert fig.axes[2].get_ylim()[0] == fig.axes[3].get_ylim()[0] == 1
    assert "5 steps" in fig.axes[2].get_title()


def test_metrics_show_what_random_steps_score():
    fig = plot_trajectory_metrics(shapes(walk(), window=5))
    (level,) = [line for line in fig.axes[2].lines if line.get_linestyle() == "--"]
    assert set(level.get_ydata()) == {5**0.5}
    (curve,) = lines(fig.axes[3], "random steps")
    np.testing.assert_allclose(curve.get_ydata(), np.sqrt(np.arange(1, 21)))


def test_metrics_of_several_results_have_a_colour_each():
    fig = plot_trajectory_metrics(
        {"trained": shapes(walk()), "untrained": shapes(walk(seed=1, untrained=True))}
    )
    for ax in fig.axes:
        assert (
            lines(ax, "trained")[0].get_color() != lines(ax, "untrained")[0].get_color()
        )
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "trained",
        "untrained",
        "random steps",
    ]
    assert "untrained" not in fig.get_suptitle()


def test_metrics_leave_out_a_sink_of_any_result():
    fig = plot_trajectory_metrics(
        {"a": shapes(walk(sink=2)), "b": shapes(walk(seed=1))}
    )
    assert len(lines(fig.axes[0], "_tokens")) == 2 * (len(TOKENS) - 1)
    assert "sink: token 2 ‘$5’" in fig.get_suptitle()


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@pytest.mark.parametrize(
    ("n_layers", "width"), [(20, 11), (11, 11), (10, 9), (2, 1), (1, 1)]
)
def test_a_shallow_model_takes_a_window_that_it_fills(n_layers, width):
    fig = plot_trajectory_metrics(shapes(walk(n_layers)))
    assert f"{width} steps" in fig.axes[2].get_title()
    assert len(lines(fig.axes[2], "tiny")[0].get_ydata()) == n_layers - width + 1


def test_entropies_are_a_fifth_panel():
    entropy = torch.rand(21, len(TOKENS))
    fig = plot_trajectory_metrics(
        {"a": shapes(walk(), entropy), "b": shapes(walk(seed=1))}
    )
    np.testing.assert_allclose(
        lines(fig.axes[4], "a")[0].get_ydata(), entropy.mean(1), rtol=1e-6
    )
    assert not lines(fig.axes[4], "b")
    assert fig.axes[4].get_ylabel() == "nats"
    assert len(plot_trajectory_metrics(shapes(walk())).axes) == 4


def test_metrics_are_of_results_because_pictures_run_no_model(tiny_trace: Trace):
    with pytest.raises(TypeError, match=r"`results` must be .*TrajectoryResult"):
        plot_trajectory_metrics(tiny_trace)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([], "`positions` is empty"),
        ([6], r"`positions` must lie in \[-6, 5\] .* got 6"),
    ],
)
def test_metrics_refuse(positions, message):
    with pytest.raises(ValueError, match=message):
        plot_trajectory_metrics(shapes(walk()), positions=positions)


def test_metrics_of_different_prompts_are_refused():
    other = shapes(walk(str_tokens=["It", " is"] * 3))
    with pytest.raises(ValueError, match="`results` must be of one prompt"):
        plot_trajectory_metrics({"a": shapes(walk()), "b": other})


# plot_linearisation


def test_linearisation_lines_are_its_errors_and_cosines(tiny_trace: Trace):
    result = linearisation(tiny_trace, k=7)
    error, compounded_error, cosine, compounded_cosine = plot_linearisation(
        {"mine": result}
    ).axes
    expected = {
        error: ("one_step", "previous"),
        compounded_error: ("product", "closed_form", "input"),
    }
    for ax, predictions in expected.items():
        for line, prediction in zip(named_lines(ax), predictions, strict=True):
            np.testing.assert_allclose(
                line.get_ydata(), result.relative_error(prediction)
            )
    assert error.get_yscale() == "linear"
    assert compounded_error.get_yscale() == "log"
    for line in named_lines(error):
        assert str(line.get_label()).startswith("mine: ")
    expected = {
        cosine: ("one_step", "previous"),
        compounded_cosine: ("product", "closed_form", "input"),
    }
    for ax, predictions in expected.items():
        for line, prediction in zip(named_lines(ax), predictions, strict=True):
            np.testing.assert_allclose(
                line.get_ydata(), result.cosine_similarity(prediction)
            )
            assert str(line.get_label()).startswith("mine: ")
        assert ax.get_ylim()[1] == pytest.approx(1.03)


def test_linearisation_says_whose_u_and_which_token(tiny_trace: Trace):
    fig = plot_linearisation(linearisation(tiny_trace, position=2, reference_layer=0))
    assert "closed form with U of layer 0" in fig.get_suptitle()
    assert "token 2 ‘w15’" in fig.get_suptitle()


def test_linearisation_without_a_closed_form_draws_none(tiny_trace: Trace):
    fig = plot_linearisation(linearisation(tiny_trace, closed_form=False))
    assert [len(named_lines(ax)) for ax in fig.axes] == [2, 2, 2, 2]
    assert "closed form" not in fig.get_suptitle()


def test_an_exploding_prediction_is_drawn_whole(tiny_trace: Trace):
    calm = linearisation(tiny_trace)
    wild = dataclasses.replace(calm, closed_form=1e9 * calm.closed_form)
    fig = plot_linearisation({"calm": calm, "wild": wild})
    largest = float(wild.relative_error("closed_form").max())
    assert fig.axes[1].get_ylim()[1] >= largest > 1e6
    # One step's errors keep an axis of their own.
    assert fig.axes[0].get_ylim()[1] < 100


def test_titles_say_whether_the_linear_step_is_better_than_none(tiny_trace: Trace):
    result = linearisation(tiny_trace)
    x = result.trajectory[1:]
    good = dataclasses.replace(result, one_step=x.clone(), product=x.clone())
    bad = dataclasses.replace(result, one_step=-9 * x, product=-9 * x)
    fig = plot_linearisation({"good": good, "bad": bad})
    for ax, no_step in zip(fig.axes[:2], ("previous", "input"), strict=True):
        plain = float(result.relative_error(no_step).mean())
        _, points = " ".join(ax.get_title().split()).split("no step ", 1)
        of_good = f"good: better, 0.00 against {plain:.2f}"
        assert points == f"{of_good} bad: no better, 10.00 against {plain:.2f}"


def test_parts_of_results_are_drawn_like_themselves(tiny_trace: Trace):
    whole = measure_trajectory(tiny_trace, position=2)
    pairs = [
        (plot_linearisation(whole).axes, plot_linearisation(whole.linearisation).axes),
        ([plot_perturbation(whole)], [plot_perturbation(whole.perturbation)]),
        (
            [plot_inverse_singular_values(whole)],
            [plot_inverse_singular_values(whole.linearisation)],
        ),
    ]
    for ours, wanted in pairs:
        for ax, other in zip(ours, wanted, strict=True):
            for line, same in zip(ax.lines, other.lines, strict=True):
                np.testing.assert_array_equal(line.get_xydata(), same.get_xydata())
    of_map = plot_inverse_singular_values(
        tlc.depth_coupling(tiny_trace, k=3, position=2)
    ).lines
    for line, same in zip(
        plot_inverse_singular_values(whole).lines, of_map, strict=True
    ):
        np.testing.assert_allclose(line.get_ydata(), same.get_ydata(), rtol=1e-4)


def test_no_line_before_the_first_layer_hides_another(tiny_trace: Trace):
    """Drawn alone in one place, each of three lines is seen somewhere."""
    noisy = perturbation(tiny_trace, (0.1, 1.0), n_samples=2)
    names = ("trained", "untrained", "other")
    ax = plot_perturbation(dict.fromkeys(names, noisy))
    before = [line for line in ax.lines if "before" in line.get_label()]
    colors = [to_rgb(line.get_color()) for line in before]
    for line in set(ax.lines) - set(before):
        line.remove()
    canvas = FigureCanvasAgg(ax.figure)
    ax.get_legend().remove()
    canvas.draw()
    dots = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    for color in colors:
        assert (np.abs(dots - color).max(axis=-1) < 0.02).sum() > 20


def test_parts_that_were_left_out_are_named(tiny_trace: Trace):
    bare = measure_trajectory(tiny_trace, linear=False, noise=False)
    for plot, part in [
        (plot_linearisation, "linearisation"),
        (plot_perturbation, "perturbation"),
        (plot_inverse_singular_values, "linearisation"),
    ]:
        with pytest.raises(ValueError, match=f"'bare' was measured without its {part}"):
            plot({"bare": bare})
    with pytest.raises(
        ValueError, match="'a' has no singular values: measure with `closed_form=True`"
    ):
        plot_inverse_singular_values(
            {"a": linearisation(tiny_trace, closed_form=False)}
        )


def test_linearisations_by_name_have_a_colour_each(tiny_trace: Trace):
    result = linearisation(tiny_trace, closed_form=False)
    figure = Figure()
    assert plot_linearisation({"a": result, "b": result}, fig=figure) is figure
    first, same, second, again = (
        line.get_color() for line in named_lines(figure.axes[0])
    )
    assert first == same != second == again


# plot_perturbation


def test_perturbation_lines_are_the_first_and_the_last_depth(tiny_trace: Trace):
    result = perturbation(tiny_trace, (1.0, 0.1), n_samples=3)
    ax = plot_perturbation(result)
    first, last = named_lines(ax)
    assert "before the first layer" in first.get_label()
    assert "after the last layer" in last.get_label()
    for line, depth in ((first, 0), (last, -1)):
        np.testing.assert_array_equal(line.get_xdata(), [0.1, 1.0])
        np.testing.assert_array_equal(
            line.get_ydata(), result.cosine_similarity[:, :, depth].mean(1).flip(0)
        )
    (samples,) = lines(ax, "_samples")
    assert sorted(samples.get_ydata()) == sorted(
        result.cosine_similarity[..., -1].flatten().tolist()
    )
    assert sorted(set(samples.get_xdata())) == [0.1, 1.0]
    assert ax.get_xscale() == "log"
    assert "token 7" in ax.get_title()


def test_the_axis_says_what_the_noise_is_relative_to(tiny_trace: Trace):
    relative, absolute = (
        perturbation(tiny_trace, (1.0,), n_samples=1, relative=one)
        for one in (True, False)
    )
    assert (
        plot_perturbation(relative).get_xlabel()
        == "size of the noise / size of the embedding"
    )
    assert (
        plot_perturbation(absolute).get_xlabel()
        == "standard deviation of noise entries"
    )
    with pytest.raises(ValueError, match="relative, of others absolute"):
        plot_perturbation({"a": relative, "b": absolute})


def test_perturbation_with_scale_zero_is_drawn_linearly_and_where_it_is_told(
    tiny_trace: Trace,
):
    _, right = Figure().subplots(1, 2)
    result = perturbation(tiny_trace, (0.0, 1.0), n_samples=1)
    assert plot_perturbation({"a": result, "b": result}, ax=right) is right
    assert right.get_xscale() == "linear"
    first, same, second, again = (line.get_color() for line in named_lines(right))
    assert first == same != second == again


# plot_inverse_singular_values


def test_inverse_singular_values_with_their_line_and_r_squared():
    result = random_map(layers=(5, 2, 11, 7))
    ax = plot_inverse_singular_values({"mine": result}, n=2)
    for i in range(2):
        points, fit = ax.lines[2 * i : 2 * i + 2]
        y = 1 / result.singular_values[:, i].numpy()
        np.testing.assert_allclose(
            points.get_xydata(), np.stack([[5, 2, 11, 7], y], axis=1)
        )
        line = scipy.stats.linregress([5, 2, 11, 7], y)
        assert list(fit.get_xdata()) == [2, 11]
        np.testing.assert_allclose(
            fit.get_ydata(), line.intercept + line.slope * np.array([2, 11])
        )
        assert points.get_label() == f"mine, σ_{i + 1}: R² = {line.rvalue**2:.2f}"
        assert fit.get_color() == points.get_color()
    assert len(ax.lines) == 4
    assert ax.get_ylim()[0] == 0
    assert "Inverse singular values" in ax.get_title()
    assert "token 3" in ax.get_title()


def test_inverse_singular_values_of_several_results_and_fewer_than_asked():
    ax = plot_inverse_singular_values(
        {"a": random_map(k=2), "b": random_map(seed=1, k=2)}, n=5
    )
    first, same, second, again = (line.get_color() for line in named_lines(ax))
    assert first == same != second == again


@pytest.mark.parametrize(
    ("result", "options", "message"),
    [
        (random_map(), {"n": 0}, "`n` must be at least 1"),
        (random_map(kind="self"), {}, "kind 'depth'"),
        (random_map(layers=(4,)), {}, "at least 2 rows"),
    ],
)
def test_inverse_singular_values_refuse(result, options, message):
    with pytest.raises(ValueError, match=message):
        plot_inverse_singular_values(result, **options)


def test_nothing_to_draw_and_other_things_are_refused():
    for plot in (
        plot_trajectory_metrics,
        plot_linearisation,
        plot_perturbation,
        plot_inverse_singular_values,
    ):
        with pytest.raises(ValueError, match="`results` is empty: wanted at least one"):
            plot({})


def test_every_picture_renders(tiny_trace: Trace):
    maps = {name: tlc.depth_coupling(tiny_trace, k=3) for name in ("a", "b")}
    pictures = [
        plot_trajectories(tiny_trace),
        plot_trajectory_metrics(measure_trajectory(tiny_trace, noise=False)),
        plot_linearisation(linearisation(tiny_trace)),
        plot_perturbation(perturbation(tiny_trace, n_samples=1)).figure,
        plot_inverse_singular_values(maps).figure,
    ]
    for picture in pictures:
        picture.draw_without_rendering()


@pytest.mark.parametrize("shape", [(3, 2, 8, 32), (3, 1, 8, 32), (8, 32)])
def test_a_stream_of_a_batch_is_refused_in_a_line(shape: tuple[int, ...]) -> None:
    message = r"`trace` must have shape \[n_layers\+1 n_pos d_model\], got"
    for stream in (torch.zeros(shape), {"model": torch.zeros(shape)}):
        with pytest.raises(ValueError, match=message) as error:
            plot_trajectories(stream)
        assert "\n" not in str(error.value)


def test_paths_are_drawn_in_a_part_of_a_figure() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    left.subplots()
    trace = walk()
    assert plot_trajectories(trace, views=["all"], fig=right) is figure
    (ax,) = right.axes
    alone = plot_trajectories(trace, views=["all"], fig=Figure()).axes[0]
    for line, expected in zip(ax.lines, alone.lines, strict=True):
        np.testing.assert_array_equal(line.get_xydata(), expected.get_xydata())
    assert right.legends
    assert not figure.legends
    figure.draw_without_rendering()
    legend = right.legends[0].get_window_extent()
    assert right.bbox.x0 <= legend.x0 < legend.x1 <= right.bbox.x1
