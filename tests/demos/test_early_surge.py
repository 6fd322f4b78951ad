"""The study of the early surge: its probes on matrices whose answer is known, its
interventions, a run of seconds.
"""

import json
import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import xarray
from torch import nn

import early_surge
import small_models
import surge_interventions
import surge_probes as probes
import surge_report
import tl_coupling as tlc
from tl_coupling.measures import random_rotations, without_shared, without_top

N_LAYERS, D, K = 5, 48, 5
NULL = 1 - math.sqrt(1 - 1 / K)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def orthonormal(n: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(D, D, seed=seed))[0][:, :n]


NOISE = gaussian(N_LAYERS, D, D) / math.sqrt(D)
# Singular values of the noise end at 2.
ONE_DIRECTION = NOISE + 20 * orthonormal(1, 1) @ orthonormal(1, 2).T
DECAYING = (
    orthonormal(D, 3)
    @ torch.diag(40 * 0.8 ** torch.arange(D, dtype=torch.float64))
    @ orthonormal(D, 4).T
)
ONE_MAP = NOISE + DECAYING


def test_coupling_of_matrices_is_that_of_a_trace(tiny_trace):
    J = tlc.block_jacobians(tiny_trace)
    assert probes.mean_coupling(J, 4) == pytest.approx(
        tlc.depth_coupling(tiny_trace, 4).mean(4), abs=1e-5
    )


def test_coupling_is_1_of_one_map_and_the_null_of_random_ones():
    assert probes.mean_coupling(DECAYING.expand(3, D, D), K) == pytest.approx(1)
    assert probes.mean_coupling(NOISE, K) == pytest.approx(NULL, abs=0.05)
    with pytest.raises(
        ValueError, match="every pair here compares a connection with itself"
    ):
        probes.mean_coupling(NOISE[:1], K)


def test_cosines_are_means_over_pairs():
    assert probes.mean_cosine(
        torch.stack([DECAYING, 3 * DECAYING, -DECAYING])
    ) == pytest.approx(-1 / 3)
    assert probes.mean_cosine(torch.eye(4).reshape(4, 2, 2)) == pytest.approx(0)
    pairs = [
        float((a * b).sum() / (a.norm() * b.norm()))
        for i, a in enumerate(ONE_MAP)
        for b in ONE_MAP[i + 1 :]
    ]
    assert probes.mean_cosine(ONE_MAP) == pytest.approx(np.mean(pairs))


def test_share_of_sigma_1():
    assert probes.sigma_1_share(
        torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    ) == pytest.approx(0.75)


def test_a_planted_direction_is_taken_away():
    left, right = orthonormal(1, 1), orthonormal(1, 2)
    rest = without_shared(ONE_DIRECTION, 1)
    # The noise turns the direction a little.
    assert float((left.T @ rest).norm(dim=-1).max()) < 0.2
    assert float((rest @ right).norm(dim=-2).max()) < 0.2
    assert probes.mean_coupling(ONE_DIRECTION, K) > 0.6
    assert probes.mean_coupling(rest, K) == pytest.approx(NULL, abs=0.05)
    assert probes.mean_coupling(without_top(ONE_DIRECTION, 1), K) == pytest.approx(
        NULL, abs=0.05
    )


@pytest.mark.parametrize("r", [1, 5])
def test_a_planted_map_is_more_than_a_few_directions(r):
    rest = without_shared(ONE_MAP, r)
    assert torch.linalg.matrix_rank(rest).tolist() == [D - r] * N_LAYERS
    assert probes.mean_coupling(ONE_MAP, K) > 0.8
    assert probes.mean_coupling(rest, K) > 0.5


def test_a_planted_map_is_taken_away():
    assert probes.coupling_without_shared_map(ONE_MAP, K) == pytest.approx(
        NULL, abs=0.08
    )
    # Random matrices share none.
    assert probes.coupling_without_shared_map(NOISE, K) == pytest.approx(NULL, abs=0.05)
    with pytest.raises(ValueError, match="at least 4 layers, got 3"):
        probes.coupling_without_shared_map(ONE_MAP[:3], K)


def test_a_map_that_only_two_layers_share_is_not_the_others():
    J = torch.cat([ONE_MAP[:2], NOISE[2:]])
    pair = probes.mean_coupling(J[:2], K)
    # One pair of ten keeps its coupling.
    assert probes.coupling_without_shared_map(J, K) > NULL + (pair - NULL) / 20


def test_own_top_pair_is_taken_away():
    S = torch.linalg.svdvals(ONE_MAP)
    rest = torch.linalg.svdvals(without_top(ONE_MAP, 1))
    torch.testing.assert_close(rest[:, :-1], S[:, 1:])
    assert float(rest[:, -1].max()) < 1e-10


def test_random_vectors_keep_singular_values_and_nothing_else():
    J = DECAYING.expand(N_LAYERS, D, D)
    probed = probes.with_random_vectors(J, torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.linalg.svdvals(probed), torch.linalg.svdvals(J))
    assert probes.mean_coupling(probed, K) == pytest.approx(NULL, abs=0.05)
    assert abs(probes.mean_cosine(probed)) < 0.05


def test_rotations_are_orthogonal_and_independent():
    Q = random_rotations(3, D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Q.mT @ Q, torch.eye(D, dtype=Q.dtype).expand(3, D, D))
    assert abs(probes.mean_cosine(Q)) < 0.05


def test_overlap_is_the_share_inside():
    basis = torch.eye(D)[:, :4].expand(2, D, 4)
    vectors = torch.stack([torch.eye(D)[:, 2:6], torch.eye(D)[:, :4]])
    assert probes.mean_overlap(basis, vectors) == pytest.approx(0.75)
    random = torch.stack([orthonormal(12, seed) for seed in range(40)])
    assert probes.mean_overlap(
        random, orthonormal(K, 99).expand(40, D, K)
    ) == pytest.approx(12 / D, abs=0.02)


def test_leading_directions_are_where_the_rows_lie():
    plane = orthonormal(2, 5)
    X = gaussian(200, 2, seed=6) @ plane.T + 0.01 * gaussian(200, D, seed=7)
    assert (
        probes.mean_overlap(probes.leading_directions(X, 2)[None], plane[None]) > 0.999
    )


def test_frequent_tokens_against_the_average():
    W = gaussian(6, D)
    assert (
        float(
            probes.frequency_direction(W, torch.full((6,), 1 / 6, dtype=W.dtype)).norm()
        )
        < 1e-12
    )
    only = torch.eye(6, dtype=W.dtype)[2]
    torch.testing.assert_close(probes.frequency_direction(W, only), W[2] - W.sum(0) / 6)


@pytest.fixture
def batch(small_corpus, small_config) -> torch.Tensor:
    return next(small_models.batches(small_config, small_corpus.tokens))


@pytest.fixture
def rotations(small_config) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return random_rotations(
        small_config.n_layers, small_config.width, generator=generator
    ).float()


def backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits
    nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    return logits.detach()


def test_feedback_is_turned_and_nothing_else(small_config, batch, rotations):
    plain, turned = (small_models.new_model(small_config) for _ in range(2))
    surge_interventions.turn_feedback(turned, rotations)
    torch.testing.assert_close(backward(turned, batch), backward(plain, batch))
    # The gradient of an output's bias is the sum over tokens of what the block is told.
    # Nothing above the last block.
    of_plain, of_turned = (
        model.gpt_neox.layers[-1].mlp.dense_4h_to_h.bias.grad
        for model in (plain, turned)
    )
    torch.testing.assert_close(
        of_turned, of_plain @ rotations[-1], atol=1e-6, rtol=1e-4
    )
    torch.testing.assert_close(
        *(model.get_output_embeddings().weight.grad for model in (turned, plain)),
        atol=1e-6,
        rtol=1e-4,
    )


def test_turned_outputs_fold_into_the_weights(small_config, batch, rotations):
    model = small_models.new_model(small_config)
    gradients_before = backward(model, batch)
    surge_interventions.turn_output(model, rotations)
    logits = backward(model, batch)
    assert float((logits - gradients_before).abs().max()) > 0.01
    torch.testing.assert_close(
        surge_interventions.fold_output(model, rotations)(batch).logits, logits
    )


def test_only_the_blocks_that_may_learn_do(small_config, small_corpus):
    model, untouched = (small_models.new_model(small_config) for _ in range(2))
    surge_interventions.freeze_all_but(model, [1])
    data = small_models.batches(small_config, small_corpus.tokens)
    assert [step for step, _ in small_models.learn(model, small_config, data)] == list(
        range(7)
    )
    weights_before = untouched.state_dict()
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, weights_before[name])
    }
    assert changed
    assert all(name.startswith("gpt_neox.layers.1.") for name in changed)


def test_gradients_are_those_of_what_blocks_write(small_config, batch):
    model = small_models.new_model(small_config)
    gradients, inputs = early_surge.gradients_and_inputs(model, batch)
    assert gradients.shape == inputs.shape == (2, 4 * 15, 32)
    # An output's bias is added at every token; a window's last token has no gradient.
    for gradient, block in zip(gradients, model.gpt_neox.layers, strict=True):
        torch.testing.assert_close(
            gradient.sum(0).float(), block.mlp.dense_4h_to_h.bias.grad
        )
    assert inputs.mean(-1).abs().max() < 1e-5
    assert inputs.square().mean(-1).median() == pytest.approx(1, abs=0.05)


@pytest.fixture(scope="module")
def options(small_text, tmp_path_factory) -> list[str]:
    size = (
        "--width 32 --n-layers 4 --n-heads 2 --vocabulary 300 "
        "--n-ctx 16 --batch 4 --steps 4 --at 0 4 --prompts 2"
    )
    return [
        *size.split(),
        "--jobs",
        "1",
        "--text",
        str(small_text),
        "--out",
        str(tmp_path_factory.mktemp("out")),
    ]


@pytest.fixture(scope="module")
def printed(options) -> str:
    """Run the study; return what it prints."""
    with redirect_stdout(StringIO()) as said:
        assert early_surge.main([*options, "--seeds", "1"]) == 0
    return said.getvalue()


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("surge")
def test_study_trains_measures_reports_and_draws(options, printed):
    out = Path(options[-1])
    data = xarray.load_dataset(out / "surge.nc")
    assert data.checkpoint.values.tolist() == [0, 4]
    assert set(data.variant.values) >= {
        "base",
        "learning rate 0.0005",
        "width 64",
        "width 16, 6 blocks",
        "blocks alone",
    }
    assert np.isfinite(data.coupling).all()
    base = data.isel(run=np.flatnonzero(data.kind == "base"))
    assert all(np.isfinite(base[name]).all() for name in surge_report.PROBES)
    assert (base.loss.isel(checkpoint=1) < base.loss.isel(checkpoint=0)).all()
    assert json.loads(str(data.training.values[0]))["width"] == 32
    assert data.attrs["null"] == pytest.approx(NULL)
    assert (out / "surge.png").stat().st_size > 10_000
    table = pandas.read_csv(out / "measured.csv").set_index(["run", "checkpoint"])
    assert len(table) == int(data.coupling.notnull().any("prompt").sum())
    of_run = str(base.run.values[0])
    expected = float(base.coupling.isel(run=0, checkpoint=1).mean())
    assert table.loc[(of_run, 4), "coupling"] == pytest.approx(expected, abs=1e-5)
    assert "What removes the surge" in (out / "report.txt").read_text()
    assert all(label in printed for label, _ in surge_report.PROBES.values())
    assert all(name in printed for name in surge_interventions.INTERVENTIONS)
    assert printed.count(f"{float(base.coupling.isel(checkpoint=1).mean()):.3f}") >= 3


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("surge")
def test_own_feedback_takes_the_surge_away(options, printed):
    data = xarray.load_dataset(Path(options[-1]) / "surge.nc").sel(checkpoint=4)
    coupling = dict(
        zip(
            data.variant.values.tolist(),
            data.coupling.mean("prompt").values.tolist(),
            strict=True,
        )
    )
    assert coupling["own feedback"] < NULL + 0.08
    assert (
        min(coupling[name] for name in ("base", "one wrong feedback", "blocks alone"))
        > NULL + 0.15
    )


@pytest.mark.long("trains the models of a study")
@pytest.mark.xdist_group("surge")
def test_study_keeps_what_is_finished(options, printed, monkeypatch):
    def untouched(*_, **__):
        raise AssertionError("done again")

    for room, name in (
        (small_models, "new_model"),
        (surge_interventions, "new_model"),
        (tlc, "block_jacobians"),
    ):
        monkeypatch.setattr(room, name, untouched)
    assert early_surge.main([*options, "--seeds", "1"]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seeds", "0"], "`--seeds` and `--jobs` must be at least 1, got 0 and 1"),
        (["--n-layers", "3"], "`--n-layers` must be at least 4"),
        (
            ["--at", "0", "3"],
            "`--at` must hold 0, and steps with a checkpoint, [0, 1, 2, 4], got [0, 3]",
        ),
        (["--at", "1"], "`--at` must hold 0"),
        (["--k", "99"], "`--k` must lie in [2, 16]"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_study_says_in_one_line_what_is_wrong(
    options, given, message, capsys, tmp_path
):
    assert early_surge.main([*options, "--out", str(tmp_path / "out"), *given]) == 2
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error:")
    ]
    assert len(lines) == 1
    assert message in lines[0]
