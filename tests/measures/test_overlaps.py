"""Overlap on one side against numpy over drawn bases, and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_coupling as tlc
from tl_coupling.measures import (
    draws_of_nuclear_overlap,
    nuclear_overlap,
    random_rotations,
)


def numpy_overlap(J_1: np.ndarray, J_2: np.ndarray, k: int) -> float:
    """`‖S₁U₁ᵀU₂S₂‖_*` from the matrices: the roots of eigenvalues of `M Mᵀ`."""
    U_1, s_1, _ = np.linalg.svd(J_1)
    U_2, s_2, _ = np.linalg.svd(J_2)
    M = np.diag(s_1[:k]) @ U_1[:, :k].T @ U_2[:, :k] @ np.diag(s_2[:k])
    eigenvalues = np.linalg.eigvalsh(M @ M.T).clip(0)
    lengths = np.linalg.norm(s_1[:k]) * np.linalg.norm(s_2[:k])
    return float(np.sqrt(eigenvalues).sum() / lengths)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 7))
def test_overlap_is_numpys_within_bounds_and_blind_to_signs(seed, k):
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(2, 7, 7, generator=generator, dtype=torch.float64)
    first, second = tlc.svd(J[0], k), tlc.svd(J[1], k)
    cosines = first.U.mT @ second.U
    overlap = float(nuclear_overlap(cosines, first.S, second.S))
    assert overlap == pytest.approx(numpy_overlap(*J.numpy(), k), abs=1e-9)
    assert 0 <= overlap <= 1 + 1e-12
    signs = torch.randint(2, (2, k), generator=generator).double() * 2 - 1
    flipped = signs[0][:, None] * cosines * signs[1]
    assert float(nuclear_overlap(flipped, first.S, second.S)) == pytest.approx(overlap)
    reversed_pair = float(nuclear_overlap(cosines.mT, second.S, first.S))
    assert reversed_pair == pytest.approx(overlap)


def test_same_vectors_give_the_cosine_of_the_spectra():
    S_1, S_2 = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.5, 0.0])
    overlap = nuclear_overlap(torch.eye(3), S_1, S_2)
    cosine = torch.nn.functional.cosine_similarity(S_1, S_2, dim=0)
    torch.testing.assert_close(overlap, cosine)
    assert nuclear_overlap(torch.zeros(3, 3), S_1, S_2) == 0
    with pytest.warns(UserWarning, match="undefined"):
        assert nuclear_overlap(torch.eye(3), S_1, 0 * S_2).isnan()


def test_turning_within_a_repeated_singular_value_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    cosines = random_rotations(6, columns=3, generator=generator)[:3]
    turned = random_rotations(3, generator=generator) @ cosines
    S_1 = torch.ones(3, dtype=torch.float64)
    S_2 = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        nuclear_overlap(turned, S_1, S_2), nuclear_overlap(cosines, S_1, S_2)
    )


@pytest.mark.parametrize("d", [3, 20])
def test_null_at_k_1_is_the_closed_form(d):
    generator = torch.Generator().manual_seed(d)
    draws = draws_of_nuclear_overlap(
        torch.tensor([2.0]), torch.tensor([0.1]), 1000, d_model=d, generator=generator
    )
    expected = math.gamma(d / 2) / math.sqrt(math.pi) / math.gamma((d + 1) / 2)
    standard_error = float(draws.std()) / math.sqrt(len(draws))
    assert float(draws.mean()) == pytest.approx(expected, abs=4 * standard_error)


def test_null_is_what_numpys_random_bases_give():
    """Both bases drawn, and the matrices themselves built, decomposed by numpy."""
    random = np.random.default_rng(0)
    d, k = 9, 4
    s_1, s_2 = np.array([3.0, 2.0, 2.0, 0.5]), np.array([1.0, 0.9, 0.1, 0.0])

    def matrix(s: np.ndarray) -> np.ndarray:
        left, right = (np.linalg.qr(random.normal(size=(d, d)))[0] for _ in range(2))
        return left[:, :k] * s @ right[:, :k].T

    expected = [numpy_overlap(matrix(s_1), matrix(s_2), k) for _ in range(800)]
    draws = draws_of_nuclear_overlap(
        torch.tensor(s_1),
        torch.tensor(s_2),
        800,
        d_model=d,
        generator=torch.Generator().manual_seed(0),
    ).numpy()
    error = math.hypot(np.std(expected), draws.std()) / math.sqrt(800)
    assert draws.mean() == pytest.approx(np.mean(expected), abs=4 * error)
    mean_square = np.square(draws).mean()
    assert 1 / d - 4 * error <= mean_square <= k / d
    assert draws.std() == pytest.approx(np.std(expected), rel=0.15)


def test_bases_of_the_whole_space_with_flat_spectra_always_overlap():
    S = torch.ones(2, 5)
    generator = torch.Generator().manual_seed(0)
    draws = draws_of_nuclear_overlap(S, S, 3, d_model=5, generator=generator)
    torch.testing.assert_close(draws, torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="k"):
        draws_of_nuclear_overlap(S, S, 3, d_model=4, generator=generator)
