"""What the picture of an audit holds."""

import numpy as np
import pytest
import torch

from axes import named_lines
from tl_coupling.plots import plot_lens_audit
from tl_coupling.trajectories import LensAudit


def made_up(**changes):
    values = {
        "halves": torch.tensor([0.4, 0.2, 0.05]).double(),
        "spread": torch.tensor([0.79, 0.29, 0.09]).double(),
        "distance": torch.rand(4, 3).double(),
        "distance_from_mean": torch.tensor([0.3, 0.2, 0.05]).double(),
        "expected_distance": torch.tensor([0.4, 0.15, 0.05]).double(),
        "n_directions": torch.tensor([20.0, 60.0, 15.0]).double(),
        "of_its_prompts": False,
        "prompt_weights": torch.full((4,), 0.1).double(),
        "unexplained": 0.4,
        "facts_that_differ": (),
        "remarks": (),
        "lens_n_prompts": 100,
        "accuracy": 0.1,
        "layers": (0, 1, 2),
        "provenance": {"model": "m"},
    }
    return LensAudit(**values | changes)


def test_it_shows_distances_and_needed_prompts(pyplot_untouched):
    result = made_up()
    fig = plot_lens_audit(result)
    distances, needed = fig.axes
    lines = {str(line.get_label()): line for line in named_lines(distances)}
    for name, values in (
        ("the lens from their mean", result.distance_from_mean),
        ("two halves of the prompts", result.halves),
        ("the lens from each prompt", result.distance[0]),
    ):
        assert np.allclose(lines[name].get_ydata(), values)
    (band,) = distances.collections
    top = band.get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(float(result.farthest.max()))
    assert band.get_label() == "where a right lens lies (99.9 %)"
    # (0.79 / 0.1)², (0.29 / 0.1)² and (0.09 / 0.1)², rounded up.
    assert np.allclose(needed.lines[0].get_ydata(), [63, 9, 1])
    assert set(needed.lines[1].get_ydata()) == {100}
    assert "nothing speaks against it" in fig.get_suptitle()


def test_the_band_is_of_what_prompts_can_tell():
    few = made_up(n_directions=torch.full((3,), torch.nan).double())
    assert not plot_lens_audit(few).axes[0].collections
    (band,) = plot_lens_audit(made_up(of_its_prompts=True)).axes[0].collections
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(0.021)
    assert "rounding" in str(band.get_label())


def test_its_title_counts_faults():
    far = made_up(
        distance_from_mean=torch.ones(3).double(), facts_that_differ=("a fact",)
    )
    assert "2 faults found" in plot_lens_audit(far).get_suptitle()
