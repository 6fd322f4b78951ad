"""Pictures of directions, of made-up effects."""

import itertools

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from axes import tick_labels
from made_up_results import PROVENANCE
from tl_coupling.directions import Ablation, Rotation, Steering, Subspace
from tl_coupling.plots import (
    plot_ablation,
    plot_rotation,
    plot_steering,
    plot_subspace,
)

pytestmark = pytest.mark.usefixtures("pyplot_untouched")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1


def test_steering_is_a_line_for_each_kind_and_the_prediction() -> None:
    kinds = ("direction", "direction", "random", "random", "low_gain")
    result = Steering(
        kl=drawn(5, 3, 2, 4),
        surprise=drawn(5, 3, 2, 4),
        logit_difference=drawn(5, 3, 2, 4),
        predicted_kl=drawn(5, 3, 4, seed=1),
        amplification=drawn(5, 4),
        alignment=drawn(5, 4),
        kinds=kinds,
        scales=(0.01, 0.1, 0.5),
        prompts=("a", "b", "c", "d"),
        provenance=PROVENANCE,
    )
    ax = plot_steering(result)
    lines = {line.get_label(): line for line in ax.lines}
    names = ["predicted", "singular vectors", "random", "of small gain"]
    assert list(lines) == names
    expected = result.kl[:2].mean((0, 2, 3))
    np.testing.assert_allclose(lines["singular vectors"].get_ydata(), expected)
    predicted = result.predicted_kl[:2].mean((0, 2))
    np.testing.assert_allclose(lines["predicted"].get_ydata(), predicted)
    assert list(lines["random"].get_xdata()) == [0.01, 0.1, 0.5]
    (band,) = ax.collections
    (corners,) = band.get_paths()
    draws = result.kl[2:4].mean((2, 3)).numpy()
    for i, scale in enumerate(result.scales):
        ends = corners.vertices[corners.vertices[:, 0] == scale, 1]
        np.testing.assert_allclose(ends.min(), draws[:, i].min())
        np.testing.assert_allclose(ends.max(), draws[:, i].max())
    assert list(ax.get_xticks()) == [0.01, 0.1, 0.5]
    ax.figure.draw_without_rendering()
    assert tick_labels(ax.xaxis) == ["0.01", "0.1", "0.5"]
    assert "4 prompts" in ax.figure.get_suptitle()
    _, differences = ax.figure.axes
    table = result.to_dataframe()
    for kind, line in zip(("random", "low_gain"), differences.lines[:2], strict=True):
        rows = table[table["kind"] == kind]
        np.testing.assert_allclose(line.get_ydata(), rows["direction_less_this"])
    (bars, _) = differences.collections
    segments = np.array(bars.get_segments())
    rows = table[table["kind"] == "random"]
    np.testing.assert_allclose(segments[:, 0, 1], rows["direction_less_this_low"])
    np.testing.assert_allclose(segments[:, 1, 1], rows["direction_less_this_high"])


def test_names_of_many_scales_do_not_overprint_each_other() -> None:
    scales = tuple(np.geomspace(0.004123, 0.4123, 17).tolist())
    result = Steering(
        kl=drawn(3, 17, 2, 4),
        surprise=drawn(3, 17, 2, 4),
        logit_difference=drawn(3, 17, 2, 4),
        predicted_kl=drawn(3, 17, 4),
        amplification=drawn(3, 4),
        alignment=drawn(3, 4),
        kinds=("direction", "random", "random"),
        scales=scales,
        prompts=("a", "b", "c", "d"),
        provenance=PROVENANCE,
    )
    figure = plot_steering(result).figure
    figure.draw_without_rendering()
    for ax in figure.axes:
        names = [label for label in ax.get_xticklabels() if label.get_text()]
        assert len(names) >= 4
        boxes = [label.get_window_extent() for label in names]
        for left, right in itertools.pairwise(boxes):
            assert left.x1 < right.x0


def test_steering_without_controls_or_in_given_axes_is_one_panel() -> None:
    kl = torch.tensor([[[[0.001, 0.1]]]], dtype=torch.float64).expand(1, 2, 2, 2)
    result = Steering(
        kl=kl,
        surprise=kl,
        logit_difference=kl,
        predicted_kl=kl[:, :, 0],
        amplification=kl[:, 0, 0],
        alignment=kl[:, 0, 0],
        kinds=("direction",),
        scales=(0.01, 0.1),
        prompts=("a", "b"),
        provenance=PROVENANCE,
    )
    assert len(plot_steering(result).figure.axes) == 1
    ax = Figure().subplots()
    assert plot_steering(result, ax=ax) is ax
    assert ax.get_title().startswith("What steering does · 2 prompts")


def test_ablation_is_a_row_for_each_kind_with_its_draws() -> None:
    kinds = ("shared", "random", "random", "random", "principal")
    result = Ablation(
        loss=drawn(6),
        loss_change=drawn(5, 6),
        kl=drawn(5, 6),
        removed=drawn(5, 6),
        kinds=kinds,
        layers=(1, 2),
        prompts=tuple("abcdef"),
        side="write",
        rank=3,
        provenance=PROVENANCE,
    )
    ax = plot_ablation(result)
    rows = [tick.get_text() for tick in ax.get_yticklabels()]
    assert rows == ["shared directions", "random", "principal directions"]
    marks = [line for line in ax.lines if line.get_marker() == "D"]
    expected = [result.of(kind).mean() for kind in ("shared", "random", "principal")]
    np.testing.assert_allclose([mark.get_xdata()[0] for mark in marks], expected)
    (draws,) = [line for line in ax.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(draws.get_xdata(), result.draws("random"))
    removed = [text.get_text() for text in ax.texts]
    assert removed[0] == f"{result.of('shared', 'removed').mean():.1%} removed"
    assert "write" in ax.get_title()


def rotation(n_prompts: int, kinds: tuple[str, ...]) -> Rotation:
    return Rotation(
        loss=drawn(n_prompts),
        loss_change=drawn(len(kinds), n_prompts),
        kl=drawn(len(kinds), n_prompts),
        kinds=kinds,
        layers=(1, 2),
        prompts=tuple("abcdef"[:n_prompts]),
        side="both",
        angle=30.0,
        provenance=PROVENANCE,
    )


def test_rotations_are_rows_with_a_line_for_each_prompt() -> None:
    kinds = ("together", "together", "apart", "apart", "shrunk")
    result = rotation(6, kinds)
    ax = plot_rotation(result)
    changes = result.loss_change.numpy()
    of_prompts = np.stack([changes[:2].mean(0), changes[2:4].mean(0), changes[4]])
    of_each = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(of_each) == 6
    for prompt, line in enumerate(of_each):
        np.testing.assert_allclose(line.get_xdata(), of_prompts[:, prompt])
        assert list(line.get_ydata()) == [0, 1, 2]
    marks = [line for line in ax.lines if line.get_marker() == "D"]
    means = [mark.get_xdata()[0] for mark in marks]
    np.testing.assert_allclose(means, of_prompts.mean(1))
    bars = [line for line in ax.lines if line.get_linewidth() == 2]
    for bar, values in zip(bars, of_prompts, strict=True):
        expected = stats.ttest_1samp(values, 0).confidence_interval()
        np.testing.assert_allclose(bar.get_xdata(), expected)
    less = (of_prompts[0] - of_prompts[1]).mean()
    words = [text.get_text() for text in ax.texts]
    assert words[0].startswith("together − apart\n" + f"{less:+#.3g}".replace("-", "−"))
    assert words[1].startswith("together − shrunk\n")
    rows = [tick.get_text() for tick in ax.get_yticklabels()]
    assert rows[:2] == ["one rotation,\ncoupling kept", "one each,\ncoupling destroyed"]
    assert "read and write · θ = 30°\n2 layers, 6 prompts" in ax.get_title()


@pytest.mark.filterwarnings("ignore:the difference of single samples")
def test_a_rotation_of_one_prompt_has_no_interval_in_given_axes() -> None:
    ax = Figure().subplots()
    assert plot_rotation(rotation(1, ("alone", "shrunk")), ax=ax) is ax
    (note,) = ax.texts
    assert "nan" not in note.get_text()
    assert "2 layers, 1 prompt" in ax.get_title()
    assert "prompts" not in ax.get_title()


def test_subspace_is_a_line_for_each_side_beside_random_frames() -> None:
    rank = 4
    result = Subspace(
        bases=drawn(2, 8, rank),
        eigenvalues=drawn(2, rank),
        null_eigenvalues=drawn(2, 5, rank),
        cosines=drawn(2, rank),
        null_cosines=drawn(5, rank),
        span=drawn(2, 3, 8, 2),
        mean=drawn(3, 8),
        unshared=drawn(2, 3, 8, 2),
        low_gain=drawn(2, 3, 8, 2),
        gains=drawn(2, 3, 3),
        layers=(0, 1, 2),
        k=4,
        provenance=PROVENANCE,
    )
    ax = plot_subspace(result)
    written, read = ax.lines
    np.testing.assert_allclose(written.get_ydata(), result.eigenvalues[1])
    np.testing.assert_allclose(read.get_ydata(), result.eigenvalues[0])
    (band,) = ax.collections
    lowest = band.get_paths()[0].vertices[:, 1].min()
    assert lowest == pytest.approx(float(result.null_eigenvalues.min()))
    read_cosine = float(result.cosines[0].min())
    random_cosine = float(result.null_cosines.min(1).values.mean())
    assert f"read {read_cosine:.2f}, written" in " ".join(ax.get_title().split())
    assert f"random {random_cosine:.2f}" in ax.get_title()


def test_directions_and_subspaces_of_ones_own_are_called_so() -> None:
    shape = (3, 2, 2, 4)
    steering = Steering(
        kl=drawn(*shape),
        surprise=drawn(*shape),
        logit_difference=drawn(*shape),
        predicted_kl=drawn(3, 2, 4),
        amplification=drawn(3, 4),
        alignment=drawn(3, 4),
        kinds=("direction", "random", "random"),
        scales=(0.01, 0.1),
        prompts=("a", "b", "c", "d"),
        provenance=PROVENANCE | {"own": True, "directions": "probes"},
    )
    ax = plot_steering(steering)
    assert [line.get_label() for line in ax.lines][1] == "own directions"
    assert "own directions" in ax.figure.axes[1].get_ylabel()
    own = Subspace.of(torch.eye(8)[:, :2], 0)
    with pytest.raises(ValueError, match="no eigenvalues to draw"):
        plot_subspace(own)
