"""Singular value decompositions of matrices whose singular values are known, beside
numpy's in float64.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_coupling as tlc
from random_matrices import as_numpy, matrix
from tl_coupling.spectra import SimilarRanks, Spectrum, check_cut, decompositions

N = 9
SIGMA = {
    "distinct": np.linspace(2.0, 0.4, N),
    "scaled up": 1e6 * np.linspace(2.0, 0.4, N),
    "flat": np.full(N, 0.7),
    "repeated pair": np.array([3.0, 2.0, 2.0, 1.5, 1.0, 1.0, 1.0, 0.5, 0.1]),
    "rank 0": np.zeros(N),
    "rank 1": np.eye(N)[0] * 5.0,
    "rank 4": np.array([4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
    "moderate tail": np.geomspace(1, 1e-4, N),
    "heavy tail": np.geomspace(1, 1e-8, N),
    "one gain, then nothing to speak of": np.concatenate(
        [[1.0], np.geomspace(1e-7, 1e-8, N - 1)]
    ),
}
SHAPES = [(N, N), (N + 4, N), (N, N + 4)]
# What the docstring promises of the cheap route: triplets to 1e-5 of σ_1, columns
# orthonormal to the same.
PROMISED = 1e-5
DTYPES = [torch.float32, torch.float64]


def assert_svd(J: np.ndarray, spectrum: Spectrum, tolerance: float) -> None:
    """That these are k largest triplets of J (in float64), whatever the freedom in
    choosing them.
    """
    U, S, Vh = as_numpy(spectrum)
    k = len(S)
    exact = np.linalg.svd(J, compute_uv=False)
    scale = max(exact[0], 1e-300)
    assert U.shape == (J.shape[0], k)
    assert Vh.shape == (k, J.shape[1])
    assert (S >= 0).all()
    assert (np.diff(S) <= tolerance * scale).all()
    np.testing.assert_allclose(U.T @ U, np.eye(k), rtol=0, atol=tolerance)
    np.testing.assert_allclose(Vh @ Vh.T, np.eye(k), rtol=0, atol=tolerance)
    np.testing.assert_allclose(S, exact[:k], rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(J @ Vh.T, U * S, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(J.T @ U, Vh.T * S, rtol=0, atol=tolerance * scale)
    # Eckart–Young: no matrix of rank k is nearer, and what is left over has norm
    # σ_{k+1}.
    left_over = np.linalg.norm(J - U * S @ Vh, 2)
    assert left_over == pytest.approx(
        exact[k] if k < len(exact) else 0.0, abs=tolerance * scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SIGMA)
def test_full_svd(name, shape, dtype):
    J = torch.from_numpy(matrix(SIGMA[name], shape)).to(dtype)
    spectrum = tlc.svd(J)
    assert spectrum.k == N
    assert {spectrum.U.dtype, spectrum.S.dtype, spectrum.Vh.dtype} == {dtype}
    assert_svd(J.double().numpy(), spectrum, 100 * torch.finfo(dtype).eps)
    np.testing.assert_allclose(
        spectrum.S,
        SIGMA[name],
        rtol=0,
        atol=100 * torch.finfo(dtype).eps * SIGMA[name][0],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SIGMA)
def test_top_k_for_every_k(name, shape, dtype):
    J = torch.from_numpy(matrix(SIGMA[name], shape)).to(dtype)
    for k in range(1, N + 1):
        spectrum = tlc.svd(J, k)
        assert spectrum.k == k
        assert {spectrum.U.dtype, spectrum.S.dtype, spectrum.Vh.dtype} == {dtype}
        assert_svd(J.double().numpy(), spectrum, 2 * PROMISED)


@pytest.mark.parametrize("k", [None, 1, 4, N])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_distinct_singular_vectors_equal_numpys_up_to_a_sign_in_pairs(shape, dtype, k):
    J = torch.from_numpy(matrix(SIGMA["distinct"], shape, seed=1)).to(dtype)
    U, S, Vh = as_numpy(tlc.svd(J, k))
    U_np, S_np, Vh_np = np.linalg.svd(J.double().numpy(), full_matrices=False)
    n = len(S)
    U_np = U_np[:, :n]
    S_np = S_np[:n]
    Vh_np = Vh_np[:n]
    sign = np.sign((U * U_np).sum(0))
    tolerance = 200 * torch.finfo(dtype).eps
    np.testing.assert_allclose(S, S_np, rtol=tolerance)
    np.testing.assert_allclose(U * sign, U_np, rtol=0, atol=tolerance)
    # One sign for both: (u, v) → (−u, −v), never one of them alone.
    np.testing.assert_allclose(Vh * sign[:, None], Vh_np, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "k"),
    [("heavy tail", N), ("heavy tail", 8), ("rank 0", 1), ("rank 1", 2), ("rank 4", 5)],
)
def test_small_singular_values_keep_their_digits(name, k):
    J = torch.from_numpy(matrix(SIGMA[name], seed=2))
    spectrum = tlc.svd(J, k)
    assert_svd(J.numpy(), spectrum, 1e-12)
    # σ_8 = 1e-7 and σ_9 = 1e-8 to 1e-6 of themselves.
    np.testing.assert_allclose(spectrum.S, SIGMA[name][:k], rtol=1e-6, atol=1e-14)


def test_a_tiny_singular_value_beside_a_large_one_keeps_its_vectors():
    sigma = np.concatenate([[1.0], np.linspace(1e-8, 1e-9, 31)])
    J = matrix(sigma, (32, 32), seed=2)
    U, S, Vh = as_numpy(tlc.svd(torch.from_numpy(J), 2))
    np.testing.assert_allclose(S, sigma[:2], rtol=1e-6)
    left, _, right = np.linalg.svd(J)
    assert abs(U[:, 1] @ left[:, 1]) > 0.999
    assert abs(Vh[1] @ right[1]) > 0.999


@pytest.mark.parametrize("k", [None, 2, 4])
@pytest.mark.parametrize("batch", [(3,), (1,), (2, 3), (2, 1, 2), (0,), (2, 0)])
def test_batches_are_their_matrices_one_by_one(batch, k):
    J = torch.randn(
        *batch, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    spectrum = tlc.svd(J, k)
    n = k or 4
    assert (spectrum.U.shape, spectrum.S.shape, spectrum.Vh.shape) == (
        (*batch, 6, n),
        (*batch, n),
        (*batch, n, 4),
    )
    for index in np.ndindex(batch):
        assert_svd(
            J[index].numpy(),
            Spectrum(spectrum.U[index], spectrum.S[index], spectrum.Vh[index]),
            1e-10,
        )


@pytest.mark.parametrize("k", [None, 3])
def test_the_matrix_is_left_as_it_was(k):
    J = torch.from_numpy(matrix(SIGMA["distinct"])).float().mT
    copy = J.clone()
    tlc.svd(J, k)
    assert torch.equal(J, copy)


@given(
    d_out=st.integers(1, 8),
    d_in=st.integers(1, 8),
    rank=st.integers(0, 8),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@settings(max_examples=60)
def test_top_k_of_any_rank_shape_and_scale(d_out, d_in, rank, exponent, seed, data):
    rng = np.random.default_rng(seed)
    n = min(d_out, d_in)
    sigma = (
        np.where(np.arange(n) < rank, np.sort(rng.uniform(0.1, 1, n))[::-1], 0.0)
        * 10.0**exponent
    )
    J = torch.from_numpy(matrix(sigma, (d_out, d_in), seed)).float()
    spectrum = tlc.svd(J, data.draw(st.integers(1, n)))
    assert_svd(J.double().numpy(), spectrum, 2 * PROMISED)


@pytest.mark.parametrize("shape", [(5, 5), (7, 5), (5, 7), (2, 5, 7), (0, 5, 7)])
@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_out_of_range(shape, k):
    with pytest.raises(ValueError, match=rf"`k` must lie in \[1, 5\].*got {k}"):
        tlc.svd(torch.zeros(shape), k)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_entries_that_are_not_finite(value, k):
    J = torch.eye(4).repeat(3, 1, 1)
    J[1, 2, 3] = value
    with pytest.raises(ValueError, match="`J` has NaN or infinite entries"):
        tlc.svd(J, k)


def test_top_is_a_slice():
    spectrum = tlc.svd(
        torch.from_numpy(
            np.stack([matrix(SIGMA["distinct"], (N + 1, N), s) for s in range(2)])
        )
    )
    top = spectrum.top(3)
    assert top.k == 3
    assert torch.equal(top.U, spectrum.U[:, :, :3])
    assert torch.equal(top.S, spectrum.S[:, :3])
    assert torch.equal(top.Vh, spectrum.Vh[:, :3, :])
    assert top.U.data_ptr() == spectrum.U.data_ptr()
    assert torch.equal(spectrum.top(N).U, spectrum.U)
    for k in (0, -2, N + 1):
        with pytest.raises(ValueError, match=rf"`k` must lie in \[1, {N}\].*got {k}"):
            spectrum.top(k)
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        top.top(4)


def warnings_of(S: torch.Tensor, k: int, names: list[str]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_cut(S, k, names)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cut_inside_a_near_repeated_singular_value_warns_and_names_it(dtype):
    eps = torch.finfo(dtype).eps
    S = torch.tensor(
        [
            [3, 2, 2, 1],
            [3, 2, 1, 0],
            [3, 2, 2 - 4 * eps, 1],
            [3, 2, 2 - 100 * eps, 1],
            [0, 0, 0, 0],
        ],
        dtype=dtype,
    )
    names = ["the repeated", "the clear", "the near", "the just distinct", "the zero"]
    beyond, equal = warnings_of(S, 2, names)
    assert beyond.startswith("k = 2 is above the rank of the zero (at least 0)")
    assert equal.startswith("σ_2 and σ_3 are equal to rounding in the repeated, the ne")
    assert [name for name in names if name in equal] == ["the repeated", "the near"]


@pytest.mark.parametrize("k", [3, 4, 5])
def test_a_cut_beyond_the_rank_says_so_and_how_many_there_are(k):
    S = torch.tensor([[3, 2, 0, 0, 0], [3, 2, 1, 0.5, 0.2]], dtype=torch.float64)
    (message,) = warnings_of(S, k, ["the low", "the full"])
    assert message.startswith(f"k = {k} is above the rank of the low (at least 2)")
    assert message.endswith("ask for at most 2")


@pytest.mark.parametrize(
    ("sigma", "k"),
    [
        ([3, 2, 2, 1], 1),
        # A repeated value on one side of the cut is rotated within it: the subspace is
        # the same.
        ([3, 2, 2, 1], 3),
        ([1, 1, 0.999, 0.5], 2),
        # All of the singular vectors: there is no cut.
        ([2, 2, 2, 2], 4),
        ([2, 2, 2, 2], 5),
        ([3, 2, 0, 0], 2),
        ([1e-20, 0.9e-20, 0.5e-20, 0], 2),
    ],
)
def test_a_clear_cut_does_not_warn(sigma, k):
    assert warnings_of(torch.tensor([sigma], dtype=torch.float32), k, ["layer 0"]) == []


def test_the_warning_tells_apart_subspaces_that_rounding_turns_from_those_that_it_does_not():
    """Rounding J to float32 turns the top-2 subspace much where the warning is given,
    and hardly where not.
    """
    turned = {}
    for gap in (1e-8, 1e-2):
        J = matrix(np.array([3, 2, 2 - gap, 1.0]), (4, 4), seed=3)
        rounded = J.astype(np.float32).astype(np.float64)
        U, U_rounded = (np.linalg.svd(M)[0][:, :2] for M in (J, rounded))
        cosine = np.linalg.svd(U.T @ U_rounded, compute_uv=False)[-1]
        S = tlc.svd(torch.from_numpy(rounded).float()).S[None]
        turned[bool(warnings_of(S, 2, ["J"]))] = float(np.sqrt(max(0, 1 - cosine**2)))
    assert turned[True] > 0.1
    assert turned[False] < 1e-3


LARGE = 240
# Spectra, and whether their top 30 should be had for less than a full SVD; None for
# either.
LARGE_SIGMA = {
    "as block Jacobians have": (np.arange(1, LARGE + 1) ** -0.5, True),
    "flat": (np.full(LARGE, 0.7), True),
    "two levels, the cut inside the lower": (
        np.where(np.arange(LARGE) < 20, 1.0, 0.3),
        True,
    ),
    "an outlier": (np.concatenate([[10.0], np.linspace(1.0, 0.5, LARGE - 1)]), None),
    "an outlier that hides the rest": (
        np.concatenate([[1e4], np.linspace(1.0, 0.5, LARGE - 1)]),
        False,
    ),
    "steep": (np.geomspace(1, 1e-8, LARGE), True),
    "heavy tail": (np.geomspace(1, 1e-12, LARGE), None),
    "rank 8": (np.where(np.arange(LARGE) < 8, 1.0, 0.0), False),
}


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize(
    "shape", [(LARGE, LARGE), (LARGE + 40, LARGE), (LARGE, LARGE + 40)]
)
@pytest.mark.parametrize("name", LARGE_SIGMA)
def test_top_triplets_of_a_large_matrix(name, shape, scale, monkeypatch):
    sigma, cheaper = LARGE_SIGMA[name]
    J = torch.from_numpy(matrix(scale * sigma, shape)).float()
    decompose = torch.linalg.svd
    full = []

    def counted(J, **options):
        full.append(1)
        return decompose(J, **options)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    spectrum = tlc.svd(J, k=30)
    assert cheaper is None or bool(full) != cheaper
    # LAPACK's own residuals in float32 reach 5e-6.
    tolerance = 4e-6 if cheaper else PROMISED
    assert_svd(J.double().numpy(), spectrum, tolerance)
    residual = (
        J.double() @ spectrum.Vh.mT.double() - spectrum.U.double() * spectrum.S.double()
    )
    assert float(residual.norm(dim=0).max()) <= tolerance * float(spectrum.S[0])


def test_a_triplet_just_above_the_cut_is_not_lost():
    """Clusters on both sides of a cut a few ε wide, u_1 = v_1: residuals of 17 ε hid a
    lost triplet.
    """
    n = 300
    k = 60
    eps = np.finfo(np.float32).eps
    rng = np.random.default_rng(0)
    sigma = np.concatenate(
        [[20.0], np.full(k - 1, 1.0), np.full(n - k, 1 - 30 * 20 * eps)]
    )
    first = np.full((n, 1), n**-0.5)
    U, V = (
        np.linalg.qr(np.concatenate([first, rng.standard_normal((n, n - 1))], 1))[0]
        for _ in range(2)
    )
    J = U * sigma @ V.T
    spectrum = tlc.svd(torch.from_numpy(J).float(), k)
    outside = V[:, k:].T @ spectrum.Vh.mT.double().numpy()
    assert np.linalg.norm(outside, 2) < 0.3


EMPTY = [(0, 0), (3, 0, 0), (2, 0), (0, 2)]


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize(
    "reading", ["svd", "singular_values", "non_normality", "asymmetry"]
)
def test_matrices_without_entries_are_refused(
    reading: str, shape: tuple[int, ...]
) -> None:
    if reading in ("non_normality", "asymmetry") and shape[-2] != shape[-1]:
        shape = (0, 0)
    with pytest.raises(
        ValueError, match=r"`J` must have at least one row and one column, got shape \["
    ):
        getattr(tlc.spectra, reading)(torch.zeros(shape))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_batch_may_be_empty(n_threads: int, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    assert tlc.svd(torch.zeros(0, 3, 2)).S.shape == (0, 2)
    assert tlc.spectra.asymmetry(torch.zeros(0, 3, 3)).shape == (0,)


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
