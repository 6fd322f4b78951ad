"""Jacobians without their leading or their shared directions, on matrices whose answer
is known.
"""

import math

import numpy as np
import pytest
import torch

from random_matrices import haar
from tl_coupling.comparisons import jacobian_coupling
from tl_coupling.measures import without_shared, without_top

N_LAYERS = 5
D = 48
K = 5
NULL = 1 - math.sqrt(1 - 1 / K)


def noise(rng: np.random.Generator) -> np.ndarray:
    """Gaussian matrices whose singular values end at 2."""
    return rng.standard_normal((N_LAYERS, D, D)) / math.sqrt(D)


@pytest.fixture(scope="module")
def outlier() -> torch.Tensor:
    """Noise, and in every layer the same outlier direction."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(
        noise(rng) + 20 * np.outer(haar(D, rng)[0], haar(D, rng)[0])
    )


@pytest.fixture(scope="module")
def one_map() -> torch.Tensor:
    """Noise, and in every layer the same map with many gains."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(
        noise(rng) + haar(D, rng) * 40 * 0.8 ** np.arange(D) @ haar(D, rng)
    )


@pytest.mark.parametrize("r", [1, 3, D])
def test_without_top_is_numpys(one_map, r: int) -> None:
    U, S, Vh = np.linalg.svd(one_map.numpy())
    S[:, :r] = 0
    np.testing.assert_allclose(without_top(one_map, r), U * S[:, None] @ Vh, atol=1e-11)


@pytest.mark.parametrize("r", [1, 3])
def test_without_shared_is_the_projection(one_map, r: int) -> None:
    left = sum(J @ J.T / (J**2).sum() for J in one_map.numpy())
    right = sum(J.T @ J / (J**2).sum() for J in one_map.numpy())
    P, Q = (np.linalg.svd(gram)[0][:, :r] for gram in (left, right))
    expected = [
        (np.eye(D) - P @ P.T) @ J @ (np.eye(D) - Q @ Q.T) for J in one_map.numpy()
    ]
    np.testing.assert_allclose(without_shared(one_map, r), expected, atol=1e-11)


def test_an_outlier_direction_couples_until_it_is_left_out(outlier) -> None:
    assert jacobian_coupling(outlier, K).mean() > 0.6
    for reduced in (without_top(outlier, 1), without_shared(outlier, 1)):
        low, high = jacobian_coupling(reduced, K).null_interval()
        assert low - 0.02 < jacobian_coupling(reduced, K).mean() < high + 0.02


def test_a_shared_map_couples_all_the_same(one_map) -> None:
    for reduced in (without_top(one_map, 2), without_shared(one_map, 2)):
        assert jacobian_coupling(reduced, K).mean() > 0.5


def test_paired_rotations_tell_a_shared_map_from_shared_spans(one_map, outlier) -> None:
    """A map whose gains are equal is coupled however its span is rotated: its axes mean
    nothing.
    """
    result = jacobian_coupling(one_map, K)
    assert result.null(within="spans") == pytest.approx(NULL)
    assert NULL < result.null(within="pairs") < result.mean()
    rng = np.random.default_rng(2)
    plane = haar(D, rng)[:, :K] @ haar(D, rng)[:K]
    flat = jacobian_coupling(torch.from_numpy(noise(rng) / 20 + 5 * plane), K)
    assert flat.mean() > 0.9
    low, high = flat.null_interval(within="pairs")
    assert low - 0.01 < flat.mean() < high + 0.01


def test_what_has_nothing_to_leave_out(one_map) -> None:
    for removed in (without_top, without_shared):
        with pytest.raises(
            ValueError,
            match=rf"`r` must lie in \[1, {D}\] \(the number of directions\), got {D + 1}",
        ):
            removed(one_map, D + 1)
    with pytest.raises(ValueError, match="a Jacobian in `J` is zero"):
        without_shared(0 * one_map, 1)
