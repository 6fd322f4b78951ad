"""The study of products and means between all tokens: on blocks that are known."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import lens_products_later as study

N_LAYERS, N_PROMPTS, N_TOKENS, D = 3, 4, 2, 4
SIZE = N_TOKENS * D
# Of random gradients, so that their noise is small beside the tolerance.
N_PROBES = 20_000
N_DRAWS = 1


@pytest.fixture(scope="module")
def blocks():
    generator = torch.Generator().manual_seed(0)
    departures = torch.randn(N_LAYERS, N_PROMPTS, SIZE, SIZE, generator=generator)
    return torch.eye(SIZE) + 0.4 * departures


@pytest.fixture(scope="module")
def table(blocks):
    def pull_back(layer, prompt, gradients):
        return (gradients.flatten(1) @ blocks[layer, prompt]).reshape(gradients.shape)

    shape = (N_LAYERS, N_PROMPTS, N_TOKENS, D)
    return pandas.DataFrame(study.rows_of(pull_back, shape, N_PROBES, N_DRAWS))


def whole(rotation):
    """A rotation of the stream, of every token."""
    return np.kron(np.eye(N_TOKENS), rotation)


def lens_of(product):
    """Effects on tokens summed, and their mean over the tokens that act."""
    return product.reshape(N_TOKENS, D, N_TOKENS, D).sum(0).mean(1)


@pytest.mark.parametrize("index", range(1 + 2 * N_DRAWS))
def test_measures_are_those_of_whole_matrices(blocks, table, index):
    products = torch.zeros(N_PROMPTS, 1, N_TOKENS, D)
    course = list(study.courses_of(N_LAYERS, products, N_DRAWS))[index]
    rows = table[(table["control"] == course.control) & (table["draw"] == course.draw)]
    rows = rows.set_index(["measure", "layer"])["value"]
    B = np.stack(
        [blocks[layer][course.orders[layer]].numpy() for layer in range(N_LAYERS)]
    )
    turns = [np.eye(SIZE)] * (N_LAYERS - 1)
    if course.rotations is not None:
        turns = [whole(rotation.numpy()) for rotation in course.rotations]
    departures = B - B.mean(1, keepdims=True)
    for layer in range(N_LAYERS):
        products = B[layer]
        of_means = B[layer].mean(0)
        for above in range(layer + 1, N_LAYERS):
            products = B[above] @ turns[above - 1] @ products
            of_means = B[above].mean(0) @ turns[above - 1] @ of_means
        lens = lens_of(products.mean(0))
        defect = np.linalg.norm(lens - lens_of(of_means)) / np.linalg.norm(lens)
        assert rows["defect", layer] == pytest.approx(defect, rel=0.05, abs=1e-5)
        if layer + 1 < N_LAYERS:
            later = departures[layer + 1] @ turns[layer]
            together = np.linalg.norm((later @ departures[layer]).mean(0))
            sizes = np.square(departures).sum((2, 3)).mean(1)
            expected = together / np.sqrt(sizes[layer] * sizes[layer + 1])
            assert rows["covariation", layer] == pytest.approx(expected, rel=0.05)


@pytest.mark.long("runs a study")
def test_it_runs_small_and_says_both(tmp_path):
    command = [sys.executable, str(Path(study.__file__)), "--out", str(tmp_path)]
    ran = subprocess.run(
        command,
        env=os.environ | {"SMALL": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    table = pandas.read_csv(tmp_path / "smollm2-135m.csv")
    first = table[(table["measure"] == "defect") & (table["layer"] == 0)]
    means = first.groupby(["tokens", "control"])["value"].mean()
    for tokens in ("same", "later"):
        excess = means[tokens, "own"] - means[tokens, "other prompts"]
        assert f"{tokens} {excess:+.3f}" in ran.stdout


def test_the_page_has_the_committed_numbers():
    docs = Path(__file__).parents[2] / "docs"
    page = " ".join((docs / "findings/amplification.md").read_text().split())
    section = page.partition("At later tokens, averages commute less")[2]
    (path,) = study.RESULTS.glob("*.csv")
    table = pandas.read_csv(path)
    means = table.groupby(["tokens", "measure", "control", "layer"])["value"].mean()
    for tokens in ("same", "later"):
        first = means[tokens, "defect"].unstack("control").loc[0]
        for control in ("own", "other prompts"):
            assert f"{first[control]:.3f}"[1:] in section
        covariation = means[tokens, "covariation", "own"].to_numpy()
        coupling = means[tokens, "coupling", "own"].to_numpy()[: len(covariation)]
        depth = np.arange(len(coupling))
        ranks = [stats.rankdata(values) for values in (coupling, covariation)]
        left = [r - np.polyval(np.polyfit(depth, r, 1), depth) for r in ranks]
        for values in (ranks, left):
            rho = stats.spearmanr(*values).statistic
            assert f"{rho:+.2f}".replace("0.", ".") in section
    assert len(depth) == 29
    excess = means.unstack("control").xs(0, level="layer").xs("defect", level="measure")
    excess = excess["own"] - excess["other prompts"]
    assert excess["later"] > excess["same"] + 0.02
    for tokens in ("same", "later"):
        assert f"{excess[tokens]:.3f}"[1:] in section
