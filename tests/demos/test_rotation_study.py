"""The study of rotated blocks: its tables on made-up results, its committed ones, and a
small run.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

import paths
import pictures
import rotation
from tl_coupling.models.embedded import embedded_folder
from tl_coupling.pictures import labels

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


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
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


@pytest.mark.long("rotates the blocks of a model")
def test_a_small_study_works(smollm2, tmp_path):
    """`SMALL=1`; losses and steps are those of HuggingFace's own model."""
    options = {
        "env": os.environ | {"SMALL": "1", "TQDM_DISABLE": "1"},
        "capture_output": True,
        "text": True,
    }
    command = [sys.executable, rotation.__file__, "--out", str(tmp_path)]
    ended = subprocess.run(command, **options)
    assert ended.returncode == 0, ended.stderr
    folder = embedded_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tables = {
        name: pandas.read_csv(tmp_path / f"{name}.csv") for name in rotation.PARTS
    }
    for i, text in enumerate(paths.distinct_texts(2)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model(ids, labels=ids, output_hidden_states=True)
        for side in rotation.SIDES:
            rows = tables[side][tables[side]["text"] == i]
            assert rows["kind"].tolist() == ["together", "apart", "shrunk"]
            assert rows["loss"].tolist() == pytest.approx([float(whole.loss)] * 3, 1e-4)
        stream = torch.cat(whole.hidden_states[2:5]).double()[:, 1:]
        f = stream.diff(dim=0)
        total = f.sum(0).square().sum(-1) / f.square().sum((0, -1))
        addition = tables["steps"]["addition"][i]
        assert addition == pytest.approx(float(total.mean()), rel=1e-3)
    by_kind = tables["both"].groupby("kind")["loss_change"].mean()
    assert f"{by_kind['together'] - by_kind['apart']:.4g}" in ended.stdout
    alone = tables["alone"]
    rho = stats.spearmanr(alone["alone"], alone["shrunk"]).statistic
    assert f"alone with shrunk: {rho:+.2f}" in ended.stdout
    again = subprocess.run([*command, "--table"], **options)
    assert again.stdout == ended.stdout


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


def test_the_page_has_the_committed_correlations_of_single_blocks():
    """Spearman's ρ by scipy, and its partial one by the formula of three ρ."""
    section = " ".join(PAGE.read_text().partition("## Rotating blocks")[2].split())
    table = pandas.read_csv(FOLDER / "alone.csv")
    distance = (table["layer"] - 14.5).abs()

    def rho(x: pandas.Series, y: pandas.Series) -> float:
        return float(stats.spearmanr(x, y).statistic)

    cost, coupling = table["alone"], table["coupling"]
    plain = rho(cost, coupling)
    of_cost, of_coupling = rho(cost, distance), rho(coupling, distance)
    given = (plain - of_cost * of_coupling) / (
        (1 - of_cost**2) * (1 - of_coupling**2)
    ) ** 0.5
    removed = rho(cost, table["shrunk"])
    assert len(table) == 30
    assert (
        f"rank correlation {signed(plain)} with its coupling, {signed(given)} given the "
        f"distance from the middle, and +{removed:.2f} with the cost of removing"
    ) in section
    # `rotation.md` says beforehand what counts, and what each outcome means.
    assert abs(plain) > 0.36 > abs(given)
    assert "It follows depth." in section
    losses = pandas.read_csv(FOLDER / "write.csv").drop_duplicates("text")["loss"]
    uniform = np.log(pictures.VOCABULARY) - losses.mean()
    assert f"rises by {uniform:.2f} nats is that of a uniform prediction" in section


def test_the_picture_has_the_committed_means():
    figure = pictures.rotation()
    for ax, side in zip(figure.axes, ("write", "read", "both"), strict=True):
        rows = pandas.read_csv(FOLDER / f"{side}.csv")
        for line, kind in zip(ax.lines, ("together", "apart", "shrunk"), strict=False):
            means = rows[rows["kind"] == kind].groupby("angle")["loss_change"].mean()
            assert line.get_ydata().tolist() == pytest.approx(means.tolist())
    assert figure.get_figwidth() == pytest.approx(labels.PHONE_WIDTH)
