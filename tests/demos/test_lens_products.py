"""The study of products and means: on blocks whose covariation is known, and small."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import lens_products as study

D, N_LAYERS, N_PROMPTS = 12, 4, 40


def blocks(departures):
    """Blocks near the identity that depart from it so on each prompt."""
    return torch.eye(D) + departures


def random(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


def test_defects_are_those_of_loops_over_prompts():
    B = blocks(0.3 * random(5, N_LAYERS, D, D))
    R = study.random_rotations(
        N_LAYERS - 1, D, generator=torch.Generator().manual_seed(1)
    ).float()
    for rotations in (None, R):
        found = study.defects(B, rotations)
        for first in range(N_LAYERS):
            means = np.eye(D)
            singles = [np.eye(D)] * len(B)
            for layer in range(first, N_LAYERS):
                turn = np.eye(D)
                if rotations is not None and layer > first:
                    turn = rotations[layer - 1].numpy()
                singles = [
                    blocks_of_prompt[layer].numpy() @ turn @ product
                    for blocks_of_prompt, product in zip(B, singles, strict=True)
                ]
                means = B[:, layer].numpy().mean(0) @ turn @ means
            whole = np.mean(singles, 0)
            expected = np.linalg.norm(whole - means) / np.linalg.norm(whole)
            assert float(found[first]) == pytest.approx(expected, abs=1e-5)


def test_independent_blocks_covary_as_those_of_other_prompts():
    B = blocks(random(N_PROMPTS, N_LAYERS, D, D))
    generator = torch.Generator().manual_seed(2)
    own = study.covariations(B)
    others = study.covariations(study.of_other_prompts(B, generator))
    assert torch.allclose(own, others, rtol=0.3)


def test_blocks_that_vary_along_one_direction_covary_and_turned_ones_do_not():
    direction = torch.nn.functional.normalize(random(D), dim=0)
    sizes = random(N_PROMPTS, 1)
    one = torch.outer(direction, direction)
    B = blocks((sizes[..., None, None] * one).expand(-1, N_LAYERS, -1, -1))
    # `‖E[s² d dᵀ]‖ / E[s²]`
    assert study.covariations(B) == pytest.approx(torch.ones(N_LAYERS - 1), abs=1e-4)
    others = study.of_other_prompts(B, torch.Generator().manual_seed(0))
    assert study.covariations(others).max() < 0.5
    R = study.random_rotations(
        N_LAYERS - 1, D, generator=torch.Generator().manual_seed(1)
    ).float()
    expected = (direction @ R @ direction).abs()
    assert study.covariations(B, R) == pytest.approx(expected, abs=1e-4)


def test_p_is_that_of_shifts():
    x = np.arange(20.0)
    assert study.shifted_p(x, x**3) == (pytest.approx(1.0), 0.05)
    noise = np.random.default_rng(0).normal(size=20)
    assert study.shifted_p(x, noise)[1] > 0.1
    # A line is all depth: nothing is left of it.
    assert np.allclose(study.without_depth(x), 0)


@pytest.mark.long("runs a study")
def test_it_runs_small_and_its_report_is_of_its_table(tmp_path):
    script = Path(study.__file__)
    command = [sys.executable, str(script), "--out", str(tmp_path)]
    ran = subprocess.run(
        command,
        env=os.environ | {"SMALL": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    table = pandas.read_csv(tmp_path / "smollm2-135m.csv")
    rows = table.set_index(["measure", "control", "draw"]).sort_index()
    own = rows.loc[("covariation", "own", 0), "value"]
    coupling = rows.loc[("coupling", "own", 0), "value"]
    assert len(own) == len(coupling) == 3
    rho = stats.spearmanr(own, coupling).statistic
    assert f"ρ {rho:+.2f}" in ran.stdout
    assert f"covariation of neighbours, mean: own {own.mean():.3f}" in ran.stdout


def test_the_page_has_the_committed_numbers():
    docs = Path(__file__).parents[2] / "docs"
    page = " ".join((docs / "findings/amplification.md").read_text().split())
    section = page.partition("## Does coupling explain the lens?")[2]
    for path in study.RESULTS.glob("*.csv"):
        table = pandas.read_csv(path)
        means = table.groupby(["measure", "control", "layer"])["value"].mean()
        spans = means["defect"].unstack("control").iloc[0]
        pairs = means["covariation"].unstack("control")
        for value in [*spans, *pairs.mean()]:
            assert f"{value:.3f}"[1:] in section
        coupling = means["coupling"]["own"]
        rho = stats.spearmanr(pairs["own"], coupling).statistic
        assert f"{rho:+.2f}".replace("0.", ".") in section
    assert len(list(study.RESULTS.glob("*.csv"))) == 2
