"""The logit lens and principal components: formulas written out, known axes,
refusals.
"""

import math

import numpy as np
import pytest
import sklearn.decomposition
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from properties import batches, close, few, seeds
from random_matrices import gaussian
from tl_coupling.trajectories import logit_lens_entropy, trajectory_pca

# --- the logit lens


def test_entropy_closed_forms() -> None:
    logits = torch.tensor(
        [[0.0, 0.0, 0.0], [2.0, 0.0, -math.inf], [500.0, 0.0, 0.0]], dtype=torch.float64
    )
    p = 1 / (1 + math.exp(-2))
    expected = [[math.log(3)], [-p * math.log(p) - (1 - p) * math.log(1 - p)], [0.0]]
    x = torch.eye(3, dtype=torch.float64)[:, None]
    close(logit_lens_entropy(x, lambda stream: logits[stream.argmax(-1)]), expected)


@few
@given(seed=seeds, batch=batches, n_vocab=st.integers(1, 7))
def test_entropy_is_the_sum_written_out(
    seed: int, batch: tuple[int, ...], n_vocab: int
) -> None:
    x, W = gaussian(3, *batch, 4, seed=seed), 3 * gaussian(4, n_vocab, seed=seed + 1)
    got = logit_lens_entropy(x, lambda stream: stream @ W)
    assert got.shape == (3, *batch)
    for entry, logits in zip(
        got.flatten().tolist(), (x @ W).reshape(-1, n_vocab).tolist(), strict=True
    ):
        weights = [math.exp(a) for a in logits]
        p = [w / sum(weights) for w in weights]
        assert entry == pytest.approx(-sum(a * math.log(a) for a in p), abs=1e-12)
        assert -1e-12 <= entry <= math.log(n_vocab) + 1e-12


def test_the_lens_keeps_no_graph_and_sees_the_dtype() -> None:
    unembed = torch.nn.Linear(4, 5, dtype=torch.bfloat16)
    got = logit_lens_entropy(gaussian(3, 2, 4).bfloat16(), unembed)
    assert got.dtype == torch.float32
    assert not got.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_lens_refuses_bad_logits(bad: float) -> None:
    with pytest.raises(ValueError, match=r"without NaN or \+inf, got some at depth 0"):
        logit_lens_entropy(gaussian(3, 2, 4), lambda stream: stream + bad)


def test_the_lens_refuses_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"`unembed` must map .*, got \[8\] for \[2, 4\]"
    ):
        logit_lens_entropy(gaussian(3, 2, 4), torch.flatten)


# --- principal components


@pytest.mark.parametrize("shape", [(4, 7, 5), (4, 3, 9), (3, 2, 4, 6)])
@pytest.mark.parametrize("n_components", [1, 2])
def test_pca_is_numpys(shape: tuple[int, ...], n_components: int) -> None:
    x = gaussian(*shape, seed=len(shape)) + 3
    last = x[-1].reshape(-1, shape[-1]).numpy()
    mean = last.mean(0)
    _, S, Vh = np.linalg.svd(last - mean)
    components = Vh[:n_components]
    components = (
        components * np.sign([row[np.abs(row).argmax()] for row in components])[:, None]
    )

    pca = trajectory_pca(x, n_components=n_components)
    close(pca.mean, mean)
    close(pca.components, components, 1e-10)
    close(pca.projected, (x.numpy() - mean) @ components.T, 1e-10)
    close(pca.explained_variance_ratio, (S**2 / (S**2).sum())[:n_components])
    variance = pca.projected[-1].reshape(-1, n_components).var(0, correction=0)
    close(
        variance / torch.as_tensor(last).var(0, correction=0).sum(),
        pca.explained_variance_ratio,
    )


def test_pca_of_known_axes() -> None:
    last = (
        torch.tensor(
            [[0.0, 0.0, -3.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0], [0.0, -1.0, 0.0]]
        )
        + 5
    )
    pca = trajectory_pca(torch.stack([torch.zeros(4, 3), last]))
    close(pca.components, [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]], 1e-6)
    close(pca.projected[0], [[-5.0, -5.0]] * 4, 1e-6)
    close(pca.explained_variance_ratio, [0.9, 0.1], 1e-6)


@few
@given(seed=seeds, order=st.permutations(range(6)))
def test_pca_has_one_sign(seed: int, order: list[int]) -> None:
    x = gaussian(3, 6, 5, seed=seed) * torch.tensor([9.0, 4.0, 1.0, 0.5, 0.1])
    pca, shuffled = trajectory_pca(x), trajectory_pca(x[:, order])
    assume(bool(pca.explained_variance_ratio.diff().abs() > 0.05))
    top_two = pca.components.abs().topk(2).values
    assume(bool((top_two[:, 0] - top_two[:, 1] > 1e-6).all()))
    close(shuffled.components, pca.components, 1e-8)
    close(shuffled.projected, pca.projected[:, order], 1e-8)


def test_two_tokens_have_one_component() -> None:
    x = gaussian(4, 2, 5)
    close(trajectory_pca(x, n_components=1).explained_variance_ratio, [1.0])
    with pytest.warns(
        UserWarning, match="2 tokens .* span 1 of the 2 components"
    ) as caught:
        pca = trajectory_pca(x)
    assert len(caught) == 1
    close(pca.explained_variance_ratio, [1.0, 0.0])
    close(pca.components @ pca.components.mT, torch.eye(2))


@pytest.mark.parametrize(
    ("x", "n_components", "message"),
    [
        (gaussian(4, 1, 5), 1, "at least 2 tokens, got 1"),
        (gaussian(4, 5), 1, "at least 2 tokens, got 1"),
        (torch.full((4, 3, 5), 0.1), 2, "tokens that differ, got 3 equal ones"),
        (
            gaussian(4, 3, 5),
            4,
            r"`n_components` must lie in \[1, 3\] for 3 tokens of width 5, got 4",
        ),
        (gaussian(4, 3, 5), 0, r"`n_components` must be at least 1, got 0"),
    ],
)
def test_pca_refuses(x: Tensor, n_components: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory_pca(x, n_components=n_components)


def test_another_stream_is_projected_as_by_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 4, 9, 7, generator=generator, dtype=torch.float64)
    pca = trajectory_pca(first, n_components=3)
    fitted = sklearn.decomposition.PCA(3).fit(first[-1].numpy())
    expected = fitted.transform(second.flatten(0, 1).numpy()).reshape(4, 9, 3)
    # Signs are a convention of each.
    signs = np.sign((fitted.components_ * pca.components.numpy()).sum(1))
    np.testing.assert_allclose(pca.project(second).numpy(), signs * expected)
    torch.testing.assert_close(pca.project(first), pca.projected)
