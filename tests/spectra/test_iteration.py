"""The top of a spectrum by iteration, beside numpy's SVD in float64 of matrices whose
spectra are known.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_coupling as tlc
from random_matrices import as_numpy, matrix
from tl_coupling.spectra import (
    Spectrum,
    decompositions,
    iteration,
    symmetric,
    tail_energy,
)

N = 320
K = 12
# What the docstring promises of residuals in float32, with room for rounding U, S and
# Vh.
PROMISED = 2.5e-6
SIGMA = {
    "as block Jacobians have": np.arange(1, N + 1) ** -0.5,
    "geometric": np.geomspace(1, 1e-6, N),
    "clusters": np.concatenate(
        [
            np.full(5, 1.0),
            np.full(5, 0.9),
            np.full(5, 0.8999),
            np.linspace(0.5, 0.1, N - 15),
        ]
    ),
    "repeated across the cut": np.concatenate(
        [np.linspace(2, 1, K - 4), np.full(9, 0.8), np.linspace(0.5, 0, N - K - 5)]
    ),
    "repeated more often than a block is wide": np.concatenate(
        [np.full(60, 1.0), np.linspace(0.5, 0.1, N - 60)]
    ),
    "flat": np.full(N, 0.7),
    "nearly flat": np.linspace(1, 0.99, N),
    "an outlier": np.concatenate([[300.0], np.linspace(1.0, 0.1, N - 1)]),
    "rank beyond the block": np.where(np.arange(N) < 40, np.linspace(1, 0.5, N), 0),
    "rank within the block": np.where(np.arange(N) < K + 3, np.linspace(1, 0.5, N), 0),
    "rank below k": np.where(np.arange(N) < K - 3, np.linspace(1, 0.5, N), 0),
    "zero": np.zeros(N),
}
# For these no full SVD is wanted.
CHEAP = (
    "as block Jacobians have",
    "geometric",
    "clusters",
    "repeated across the cut",
    "rank beyond the block",
)
WAYS = ("block Krylov space", "filtered subspace iteration")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Each of the two, at a size where `svd` would choose but one of them."""
    monkeypatch.setattr(
        decompositions, "_FORM_SQUARE", 0 if request.param == WAYS[0] else 30
    )
    return request.param


def planted(
    sigma: np.ndarray, shape: tuple[int, int] | None = None, seed: int = 1
) -> torch.Tensor:
    """A float32 matrix with these singular values, square unless a shape is given."""
    return torch.from_numpy(
        matrix(sigma, shape or (len(sigma), len(sigma)), seed)
    ).float()


def assert_top(J: np.ndarray, spectrum: Spectrum, tolerance: float = PROMISED) -> None:
    """That these are triplets of J (in float64), as many as there are the largest, and
    that none larger is missed.
    """
    scale = max(np.abs(J).max(), 1e-300)
    U, S, Vh = as_numpy(spectrum)
    J = J / scale
    S = S / scale
    exact = np.linalg.svd(J, compute_uv=False)
    largest = max(exact[0], 1e-300)
    k = len(S)
    np.testing.assert_allclose(U.T @ U, np.eye(k), rtol=0, atol=1e-5)
    np.testing.assert_allclose(Vh @ Vh.T, np.eye(k), rtol=0, atol=1e-5)
    assert np.abs(S - exact[:k]).max() <= tolerance * largest
    assert np.linalg.norm(J @ Vh.T - U * S, axis=0).max() <= tolerance * largest
    assert np.linalg.norm(J.T @ U - Vh.T * S, axis=0).max() <= tolerance * largest
    assert np.linalg.norm(J - U * S @ Vh, 2) <= exact[k] + 2 * tolerance * largest


@pytest.mark.parametrize("shape", [(N, N), (N + 50, N), (N, N + 50)])
@pytest.mark.parametrize("name", SIGMA)
def test_planted_spectra(name, shape, way):
    J = planted(SIGMA[name], shape)
    spectrum = tlc.svd(J, K)
    # LAPACK's residuals in float32, where it was asked instead.
    assert_top(J.double().numpy(), spectrum, PROMISED if spectrum.steps else 1e-5)
    if name in CHEAP:
        assert int(spectrum.steps) > 0
        assert spectrum.way == way
    if name in ("rank below k", "zero"):
        assert int(spectrum.steps) == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_a_matrix_of_any_size_takes_the_same_steps(scale, way):
    sigma = SIGMA["as block Jacobians have"]
    spectrum, scaled = (tlc.svd(planted(factor * sigma), K) for factor in (1.0, scale))
    assert abs(int(spectrum.steps) - int(scaled.steps)) <= 3
    assert int(scaled.steps) > 0
    np.testing.assert_allclose(
        scaled.S.double() / scale, spectrum.S.double(), rtol=2e-6
    )
    np.testing.assert_allclose(scaled.norm / scale, spectrum.norm, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["as block Jacobians have", "flat", "rank within the block"]
)
def test_float64_has_the_accuracy_of_float64(name, way):
    J = matrix(SIGMA[name], (N, N))
    assert_top(J, tlc.svd(torch.from_numpy(J), 5), 3e-12)


@given(
    n=st.integers(90, 150),
    more=st.integers(0, 40),
    wide=st.booleans(),
    k=st.integers(1, 5),
    decay=st.floats(0, 3),
    repeats=st.integers(1, 6),
    rank=st.integers(0, 150),
    krylov=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_any_shape_and_decay(n, more, wide, k, decay, repeats, rank, krylov, seed):
    sigma = np.arange(1, n + 1).repeat(repeats)[:n] ** -decay * (np.arange(n) < rank)
    J = torch.from_numpy(
        matrix(sigma, (n, n + more) if wide else (n + more, n), seed)
    ).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompositions, "_FORM_SQUARE", 0 if krylov else 30)
        assert_top(J.double().numpy(), tlc.svd(J, k), 1e-5)


def test_a_direction_that_a_start_of_ones_would_miss_is_found(way):
    """The largest triplet is orthogonal to the sum of all columns, and to most of the
    others.
    """
    sigma = np.concatenate([[2.0], np.arange(1, N) ** -0.5])
    J = torch.zeros(N, N)
    J[range(N), range(N)] = torch.from_numpy(sigma[::-1].copy()).float()
    np.testing.assert_allclose(tlc.svd(J, 3).S, [2.0, 1.0, 2**-0.5], rtol=1e-6)


@pytest.mark.parametrize("width", [8, 15])
def test_a_triplet_just_above_the_cut_is_not_lost(width, way):
    """Clusters on both sides of a cut a few ε σ_1 wide: mixed or lost triplets have
    residuals below the tolerance.
    """
    below = 1 - width * 20 * np.finfo(np.float32).eps
    J = matrix(
        np.concatenate([[20.0], np.full(K - 1, 1.0), np.full(N - K, below)]), (N, N)
    )
    inside = np.linalg.svd(J)[2][:K]
    Vh = tlc.svd(torch.from_numpy(J).float(), K).Vh.double().numpy()
    assert np.linalg.norm(Vh - Vh @ inside.T @ inside, 2) < 0.3


def wrong_spaces(J: torch.Tensor, k: int):
    """What an iteration that never converged would hand on, twice."""
    for seed in range(2):
        width = iteration.block_width(k)
        yield (
            3,
            torch.randn(
                J.shape[1],
                width,
                generator=torch.Generator().manual_seed(seed),
                dtype=J.dtype,
            ),
        )


def nearly_right_spaces(J: torch.Tensor, k: int):
    """The right space, off by ten times the tolerance."""
    noise = torch.randn(
        J.shape[1], k, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    V = torch.linalg.svd(J.double()).Vh[:k].mT
    yield 3, V + 2e-5 * noise / N**0.5


def replace_spaces(monkeypatch, spaces):
    def search(J, *arguments):
        """As an iteration of one matrix yields them."""
        for steps, space in spaces(J[0], K):
            yield iteration._Spaces([0], [steps], space[None])

    monkeypatch.setattr(iteration, "_krylov_spaces", search)
    monkeypatch.setattr(iteration, "_filtered_spaces", search)


@pytest.mark.parametrize("spaces", [wrong_spaces, nearly_right_spaces])
def test_a_wrong_iteration_is_caught_and_a_full_svd_taken(spaces, way, monkeypatch):
    replace_spaces(monkeypatch, spaces)
    J = planted(SIGMA["as block Jacobians have"])
    spectrum = tlc.svd(J, K)
    assert int(spectrum.steps) == 0
    assert spectrum.method == "1 by full SVD, in float32"
    assert_top(J.double().numpy(), spectrum, 1e-5)


def test_a_space_that_is_right_is_accepted(way, monkeypatch):
    def right(J, k):
        yield (
            3,
            torch.linalg.svd(J.double()).Vh[: iteration.block_width(k)].mT,
        )

    replace_spaces(monkeypatch, right)
    J = planted(SIGMA["as block Jacobians have"])
    assert int(tlc.svd(J, K).steps) == 3


def test_matrices_that_go_together_have_what_each_has_alone(way):
    """As on a GPU: of spectra that take different numbers of steps, and with one that
    has no triplets among them, which gets a full SVD."""
    matrices = [planted(SIGMA[name]) for name in CHEAP]
    J = torch.stack([*matrices, torch.zeros(N, N)])
    U, S, Vh, residuals, steps = decompositions._decompose(J, K)
    alone = [decompositions._decompose(one[None], K) for one in J]
    assert steps.tolist() == [float(one[4]) for one in alone]
    assert len(set(steps.tolist())) > 2
    assert steps[-1] == 0
    for i, of_one in enumerate(matrices):
        spectrum = Spectrum(U[i], S[i], Vh[i], residuals[i], steps[i].int())
        assert_top(of_one.double().numpy(), spectrum)


def test_neither_the_global_generator_nor_the_batch_matters(way):
    J = torch.stack([planted(SIGMA[name]) for name in CHEAP])
    spectra = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        spectra.append(tlc.svd(J, K))
        assert torch.equal(torch.get_rng_state(), state)
    alone = Spectrum.cat([tlc.svd(J[i : i + 1].clone(), K) for i in (4, 2, 0)])
    for part in ("U", "S", "Vh", "residuals", "steps"):
        of_batch = getattr(spectra[0], part)
        assert torch.equal(of_batch, getattr(spectra[1], part))
        assert torch.equal(of_batch[[4, 2, 0]], getattr(alone, part))


def test_threads_matter_to_rounding_only(way):
    J = planted(SIGMA["as block Jacobians have"])
    spectra = []
    n_threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            spectra.append(tlc.svd(J, K))
    finally:
        torch.set_num_threads(n_threads)
    np.testing.assert_allclose(spectra[0].S, spectra[1].S, rtol=1e-6)
    cosines = (spectra[0].Vh * spectra[1].Vh).sum(-1).abs()
    np.testing.assert_allclose(cosines, 1, rtol=0, atol=1e-6)


def test_what_a_spectrum_says_of_itself():
    sigma = {
        name: SIGMA[name] for name in ("as block Jacobians have", "zero", "geometric")
    }
    J = torch.stack([planted(values) for values in sigma.values()])
    spectrum = tlc.svd(J, K)
    assert [int(steps) > 0 for steps in spectrum.steps] == [True, False, True]
    assert spectrum.method.startswith("2 by filtered subspace iteration in ")
    assert spectrum.method.endswith(" σ_1; 1 by full SVD, in float32")
    assert spectrum.residuals.shape == (3, K)
    assert float(spectrum.residuals.max()) <= 2e-6
    exact = torch.tensor(np.stack(list(sigma.values())))
    np.testing.assert_allclose(spectrum.norm, exact.norm(dim=-1), rtol=1e-6)
    np.testing.assert_allclose(
        spectrum.uncaptured[[0, 2]], tail_energy(exact[[0, 2]], K), rtol=0, atol=1e-6
    )
    assert float(spectrum.uncaptured[1]) == 0
    # What is left out bounds every other singular value.
    assert (spectrum.norm * spectrum.uncaptured.sqrt() >= exact[:, K] - 1e-5).all()
    top = spectrum.top(3)
    assert torch.equal(top.residuals, spectrum.residuals[:, :3])
    assert torch.equal(top.steps, spectrum.steps)
    np.testing.assert_allclose(
        top.uncaptured[[0, 2]], tail_energy(exact[[0, 2]], 3), rtol=0, atol=1e-6
    )


def test_of_an_energy_that_is_not_known_it_is_not_known_what_is_left_out():
    J = torch.stack([torch.eye(4), torch.zeros(4, 4), torch.eye(4)])
    spectrum = tlc.svd(J, 2)
    assert spectrum.uncaptured.tolist() == pytest.approx([0.5, 0, 0.5])
    norm = spectrum.norm.clone()
    norm[2] = torch.nan
    planted = dataclasses.replace(spectrum, norm=norm).uncaptured
    assert planted[:2].tolist() == pytest.approx([0.5, 0])
    assert planted[2].isnan()


def test_residuals_of_a_full_svd_are_told_too():
    J = planted(SIGMA["geometric"][:9])
    spectrum = tlc.svd(J)
    U, S, Vh = as_numpy(spectrum)
    of_right = np.linalg.norm(J.double().numpy() @ Vh.T - U * S, axis=0) / S[0]
    np.testing.assert_allclose(spectrum.residuals, of_right, rtol=0, atol=1e-6)
    assert spectrum.method == "1 by full SVD, in float32"


def test_spectra_made_by_hand_know_nothing_of_how():
    full = tlc.svd(torch.eye(3))
    by_hand = Spectrum(full.U, full.S, full.Vh)
    assert by_hand.method == "not known"
    assert by_hand.top(1).residuals is None
    with pytest.raises(ValueError, match="the energy of J is not known"):
        _ = by_hand.uncaptured
    both = Spectrum.cat(
        [
            tlc.svd(torch.eye(3)[None]),
            Spectrum(full.U[None], full.S[None], full.Vh[None]),
        ]
    )
    assert (both.S.shape, both.steps, both.norm) == ((2, 3), None, None)


@pytest.mark.long("measures SmolLM2")
def test_measures_of_a_real_model_are_those_of_float64(smollm2):
    """Also where the cut falls between two close singular values."""
    J = tlc.block_jacobians(
        tlc.trace(smollm2, "What is the capital of France? The capital is"),
        layers=[0, 12, 22, 29],
    )
    U, S, Vh = torch.linalg.svd(J.double())
    gaps = ((S[:, 4:60] - S[:, 5:61]) / S[:, :1]).amin(0)
    for k in (10, 50, 5 + int(gaps.argmin())):
        top = tlc.svd(J, k)
        A = of_all_pairs(J, top.U.double(), top.Vh.double())
        exact = of_all_pairs(J, U[..., :k], Vh[:, :k])
        for measure in (tlc.miscoupling, tlc.normalized_miscoupling):
            torch.testing.assert_close(measure(A), measure(exact), rtol=2e-5, atol=1e-5)
        S_1 = S[:, None, :k]
        torch.testing.assert_close(
            tlc.spectral_miscoupling(A, S_1, absolute=True),
            tlc.spectral_miscoupling(exact, S_1, absolute=True),
            rtol=0,
            atol=1e-5,
        )


def of_all_pairs(J: torch.Tensor, U: torch.Tensor, Vh: torch.Tensor) -> torch.Tensor:
    """Coupling matrices of every J with the singular vectors of every other."""
    return torch.stack(
        [
            torch.stack([u.mT @ J_1 @ vh.mT for u, vh in zip(U, Vh, strict=True)])
            for J_1 in J.double()
        ]
    )


@pytest.mark.parametrize("shape", [(7, 5, 5), (2, 3, 4, 4), (1, 3, 3)])
def test_small_matrices_by_the_cores_of_the_cpu(shape, monkeypatch):
    """As for a GPU, whose own library takes longer."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    T = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()
    T = T + T.mT
    values, vectors = symmetric._by_cores(torch.linalg.eigh, T)
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mT, T)
    torch.testing.assert_close(
        symmetric._by_cores(torch.linalg.eigvalsh, T), torch.linalg.eigvalsh(T)
    )


@pytest.mark.parametrize("name", SIGMA)
def test_triplets_of_the_square_are_right_or_not_given(name):
    """As for a GPU, where an iteration does not pay."""
    J = planted(SIGMA[name])
    triplets = iteration.triplets_of_square(J, K)
    if triplets is not None:
        spectrum = Spectrum(
            triplets.U.float(),
            triplets.S.float(),
            triplets.V.mT.float(),
            triplets.residuals.float(),
            torch.zeros((), dtype=torch.int32),
        )
        assert_top(J.double().numpy(), spectrum)


def test_triplets_of_the_square_of_a_flat_spectrum_are_given():
    flat = planted(np.linspace(2, 1, N))
    assert iteration.triplets_of_square(flat, K) is not None
    # Of rank 1 the others are rounding, and in float64 the square rounds too much.
    rank_one = torch.outer(flat[0], flat[1])
    assert iteration.triplets_of_square(rank_one, K) is None
