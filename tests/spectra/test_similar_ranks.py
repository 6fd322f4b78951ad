"""Singular values of matrices of similar rank: against numpy's, in float64."""

import numpy as np
import pytest
import torch

from tl_coupling.spectra import SimilarRanks, decompositions

WIDTH = 96


def of_rank(rank: int, seed: int) -> torch.Tensor:
    """Return a matrix of a rank, with singular values over three decades."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(WIDTH, rank, generator=generator)
    right = torch.randn(rank, WIDTH, generator=generator)
    return (left * torch.logspace(0, -3, rank)) @ right


@pytest.fixture
def in_full(monkeypatch) -> list[int]:
    """Return a list that gets an item for each matrix that is decomposed in full."""
    counted: list[int] = []
    singular_values = decompositions.singular_values

    def count(J: torch.Tensor) -> torch.Tensor:
        counted.append(len(J))
        return singular_values(J)

    monkeypatch.setattr(decompositions, "singular_values", count)
    return counted


@pytest.mark.parametrize(
    ("ranks", "n_in_full"),
    [
        # The same rank, or a lower one: the first alone.
        ((20, 20, 18, 20), 1),
        # A matrix of full rank between those of a low one, and one after it.
        ((20, 20, WIDTH, 20, 20), 3),
        # A little more than the sketch holds.
        ((5, 25, 25), 2),
        # No rank at all.
        ((0, 0, 20, 0), 2),
        # Too high a rank for a sketch.
        ((60, 60), 2),
    ],
)
def test_values_are_those_of_numpy(ranks, n_in_full, in_full):
    matrices = torch.stack([of_rank(rank, seed) for seed, rank in enumerate(ranks)])
    values = SimilarRanks()
    S = torch.cat([values(matrix[None]) for matrix in matrices])
    expected = np.linalg.svd(matrices.double().numpy(), compute_uv=False)
    largest = expected[:, :1]
    assert np.abs(S.numpy() - expected).max() < 2e-6 * max(1.0, largest.max())
    relative = np.abs(S.numpy() - expected) / np.where(largest == 0, 1, largest)
    assert relative.max() < 1e-6
    assert len(in_full) == n_in_full


def test_a_small_part_outside_of_the_sketch_is_seen(in_full):
    """Of 1e-4, far above rounding, in as many directions as there are."""
    low = of_rank(10, 0)
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(WIDTH, WIDTH, generator=generator)
    both = low + 1e-4 * low.norm() / flat.norm() * flat
    S = SimilarRanks()(torch.stack([low, both]))
    assert len(in_full) == 2
    assert float(S[1, -1]) > 0
    torch.testing.assert_close(S[1], torch.linalg.svdvals(both))


def test_float64_is_decomposed_in_full(in_full):
    matrices = torch.stack([of_rank(10, seed).double() for seed in (0, 1)])
    S = SimilarRanks()(matrices)
    assert len(in_full) == 2
    torch.testing.assert_close(S, torch.linalg.svdvals(matrices))
