"""The study of rotated blocks: its tables on made-up results, and its committed ones."""

from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

import pictures
import rotation
from tl_coupling.plots import labels

FOLDER = Path(rotation.__file__).parent / "results" / "rotation"
PAGE = Path(__file__).parents[2] / "docs/findings/directions.md"


def test_differences_are_paired_over_texts():
    rows = [
        ("write", 45.0, kind, text, shift + text)
        for kind, shift in (("together", 1.0), ("apart", 3.0), ("shrunk", 0.0))
        for text in range(4)
    ]
    names = ["side", "angle", "kind", "text", "loss_change"]
    table = rotation.table_of_blocks(pandas.DataFrame(rows, columns=names))
    assert table.loc[("write", 45.0), "together − apart"] == "-2 [-2, -2]"
    assert table.loc[("write", 45.0), "shrunk"].startswith("1.5 [")


def test_a_cost_that_follows_depth_has_no_partial_correlation():
    layer = np.arange(30)
    distance = np.abs(layer - 14.5)
    noise = np.random.default_rng(0).normal(size=(2, 30))
    rows = pandas.DataFrame(
        {
            "layer": layer,
            "alone": distance + noise[0],
            "shrunk": 0.0,
            "coupling": -distance + noise[1],
        }
    )
    found = rotation.rank_correlations(rows)
    name = "alone with coupling"
    expected = stats.spearmanr(rows["alone"], rows["coupling"]).statistic
    assert found[name] == pytest.approx(expected)
    assert found[name] < -0.8
    assert abs(found[f"{name}, given the distance"]) < 0.4


def signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def test_the_page_has_the_committed_numbers():
    """Recomputed from the tables by pandas and scipy alone."""
    section = PAGE.read_text().partition("## Rotating blocks")[2]
    for side in ("write", "read", "both"):
        rows = pandas.read_csv(FOLDER / f"{side}.csv")
        for angle in (10, 20, 45, 90):
            of_angle = rows[rows["angle"] == angle]
            wide = of_angle.pivot_table(
                index="text", columns="kind", values="loss_change"
            )
            assert len(wide) == 8
            means = [signed(wide[kind].mean()) for kind in ("together", "apart")]
            test = stats.ttest_rel(wide["together"], wide["apart"])
            low, high = map(signed, test.confidence_interval())
            less = signed((wide["together"] - wide["apart"]).mean())
            cells = [*means, signed(wide["shrunk"].mean()), f"{less} [{low}, {high}]"]
            assert f"| {side}, {angle}° | {' | '.join(cells)} |" in section
    added = pandas.read_csv(FOLDER / "steps.csv")["addition"]
    low, high = stats.ttest_1samp(added, 0).confidence_interval()
    assert f"{added.mean():.2f} [{low:.2f}, {high:.2f}]" in section


def test_the_picture_has_the_committed_means():
    figure = pictures.rotation()
    for ax, side in zip(figure.axes, ("write", "read", "both"), strict=True):
        rows = pandas.read_csv(FOLDER / f"{side}.csv")
        for line, kind in zip(ax.lines, ("together", "apart", "shrunk"), strict=False):
            means = rows[rows["kind"] == kind].groupby("angle")["loss_change"].mean()
            assert line.get_ydata().tolist() == pytest.approx(means.tolist())
    assert figure.get_figwidth() == pytest.approx(labels.PAGE_WIDTH)
