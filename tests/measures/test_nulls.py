"""The null of coupling measures against sampled random subspaces and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import gammaln
from torch import Tensor

import tl_coupling as tlc
from random_matrices import haar
from tl_coupling.measures import (
    MEASURES,
    Measure,
    draws_of_random_subspaces,
    measure_named,
    measure_of,
    nulls_at_every_k,
    random_rotations,
    rotation_null,
)

N_SAMPLES = 40_000
# Small enough that what the closed forms say differs much from "1".
NULL_D = 12
NULL_K = 3
SPECTRA = {
    "flat": np.full(NULL_D, 0.8),
    "rank one": 3.0 * np.eye(NULL_D)[0],
    "fast": np.geomspace(2, 1e-5, NULL_D),
    "slow": 1 / np.arange(1, NULL_D + 1),
    "rank k + 1, flat": np.where(np.arange(NULL_D) <= NULL_K, 1.0, 0.0),
}


@pytest.fixture(scope="module")
def frames() -> tuple[torch.Tensor, torch.Tensor]:
    """Independent Haar-random orthonormal frames `[n d k]`: QR of Gaussians, the signs
    of R's diagonal put right.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, N_SAMPLES, NULL_D, NULL_K)
    Q, R = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    U, V = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return U, V


def sampled(frames: tuple[torch.Tensor, torch.Tensor], sigma: np.ndarray) -> np.ndarray:
    """A of every sampled pair of frames, `[n k k]`."""
    rng = np.random.default_rng(1)
    J = torch.from_numpy(haar(NULL_D, rng) * sigma @ haar(NULL_D, rng))
    U, V = frames
    return (U.mT @ J @ V).numpy()


def assert_mean_of_squares(samples: np.ndarray, null: float) -> None:
    """That null² is the mean of samples², to five standard errors and these within 2 %
    of it.
    """
    squares = samples**2
    error = squares.std() / math.sqrt(len(squares))
    assert error < 0.02 * max(squares.mean(), 1e-12)
    assert abs(squares.mean() - null**2) < 5 * error + 1e-12


def assert_root_mean_square(measure: Measure, values: Tensor, null: float) -> None:
    """That the null is what the measure itself makes of drawn values, to five standard
    errors of a hundred batches, and these within 1 % of it.
    """
    of_batches = measure.null_of_draws(values.reshape(100, -1).mT).numpy()
    error = of_batches.std() / math.sqrt(len(of_batches))
    assert error < 0.01 * max(abs(null), 1e-12)
    assert abs(float(measure.null_of_draws(values)) - null) < 5 * error + 1e-9


def null_of(
    sigma: np.ndarray,
    measure: str,
    n_known: int | None = None,
    k: int = NULL_K,
    **options,
) -> float:
    S = torch.from_numpy(sigma)[None]
    value = tlc.random_subspace_null(
        k,
        measure,
        d_model=len(sigma),
        S_1=S[:, :n_known],
        frobenius_norm=S.norm(dim=-1),
        **options,
    )
    # The null of m̃ is the same for every J_1: one number.
    if measure in ("coupling", "normalized_miscoupling"):
        assert value.shape == ()
    else:
        assert value.shape == (1,)
    return float(value.mean())


@pytest.mark.parametrize("name", SPECTRA)
def test_null_against_sampled_random_subspaces(name, frames):
    sigma = SPECTRA[name]
    A = sampled(frames, sigma)
    s = np.diag(sigma[:NULL_K])
    off = A * (1 - np.eye(NULL_K))
    total = np.linalg.norm(A, axis=(1, 2))
    length = np.linalg.norm(s)
    trace = np.trace(s)
    miscoupling = np.linalg.norm(off, axis=(1, 2))
    assert_mean_of_squares(miscoupling, null_of(sigma, "miscoupling"))
    assert_mean_of_squares(
        miscoupling / total, null_of(sigma, "normalized_miscoupling")
    )
    assert_mean_of_squares(total / length, null_of(sigma, "captured_energy"))
    assert null_of(sigma, "coupling") == pytest.approx(
        1 - null_of(sigma, "normalized_miscoupling")
    )
    for absolute, values in ((False, A), (True, np.abs(A))):
        distance = np.linalg.norm(values - s, axis=(1, 2))
        for p, norm in ((2.0, length), (1.0, trace)):
            null = null_of(sigma, "spectral_miscoupling", p=p, absolute=absolute)
            assert_mean_of_squares(distance / norm, null)
            # From what a result keeps: the top k and ‖J‖_F. Never above, and less than
            # 0.4 % below.
            approximate = null_of(
                sigma, "spectral_miscoupling", n_known=NULL_K, p=p, absolute=absolute
            )
            assert null * (1 - 4e-3) < approximate <= null * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10, 300])
def test_the_mean_coupling_of_gaussian_matrices(k):
    """The diagonal's share is Beta-distributed: its mean by quadrature, and by drawing."""
    mean = tlc.measures.mean_random_coupling(k)
    if k == 1:
        assert mean == 1
        return
    share = stats.beta(k / 2, k * (k - 1) / 2)
    assert mean == pytest.approx(share.expect(lambda x: 1 - np.sqrt(1 - x)), rel=1e-6)
    if k <= 10:
        A = np.random.default_rng(0).standard_normal((20_000, k, k))
        off = np.linalg.norm(A * (1 - np.eye(k)), axis=(1, 2))
        drawn = 1 - off / np.linalg.norm(A, axis=(1, 2))
        error = drawn.std() / math.sqrt(len(drawn))
        assert mean == pytest.approx(drawn.mean(), abs=4 * error)


@pytest.mark.parametrize("d", [2, 12, 576])
@pytest.mark.parametrize("knows_all", [True, False])
def test_null_of_flat_and_of_rank_one_in_closed_form(d, knows_all):
    """`E|u_1| = Γ(d/2) / (√π Γ((d+1)/2))`: `E|uᵀJv|` c times it for an orthogonal cQ, σ
    times its square for σuvᵀ.
    """
    k = min(3, d)
    mean_u = math.exp(gammaln(d / 2) - gammaln((d + 1) / 2)) / math.sqrt(math.pi)
    n = None if knows_all else k
    flat = np.full(d, 0.8)
    rank_one = 3.0 * np.eye(d)[0]
    squared = k**2 * d * 0.64 / d**2 + k * 0.64 - 2 * k * 0.8 * 0.8 * mean_u
    null = null_of(flat, "spectral_miscoupling", n, k, absolute=True)
    assert null == pytest.approx(math.sqrt(max(squared, 0) / (k * 0.64)), abs=1e-7)
    squared = k**2 * 9 / d**2 + 9 - 2 * 3 * 3 * mean_u**2
    null = null_of(rank_one, "spectral_miscoupling", n, k, absolute=True)
    assert null == pytest.approx(math.sqrt(max(squared, 0) / 9), abs=1e-7)


@pytest.mark.parametrize("d", [64, 576])
@pytest.mark.parametrize("k", [2, 10, 50])
def test_the_null_from_the_top_k_alone_is_close_at_the_sizes_of_real_models(d, k):
    """Energy left over is taken as spread evenly, which is the most `E|a|` it can give;
    k + 1 equal gains are worst.
    """
    index = np.arange(1, d + 1)
    for sigma in (
        np.geomspace(1, 1e-6, d),
        1 / index,
        index**-0.5,
        np.where(index <= k + 1, 1.0, 0.0),
    ):
        full, top = (
            null_of(sigma, "spectral_miscoupling", n, k, absolute=True)
            for n in (None, k)
        )
        assert full * (1 - 1e-3) < top <= full * (1 + 1e-9)


def test_null_depends_on_the_subspaces_being_random_and_not_on_k_alone(frames):
    """What the page says: m̃ near √(1 − 1/k), coupling 0.051 at k = 10 and 0.010 at k =
    50, m_K near 1.
    """
    assert float(tlc.random_subspace_null(10)) == pytest.approx(0.051, abs=5e-4)
    assert float(tlc.random_subspace_null(50)) == pytest.approx(0.010, abs=5e-4)
    for k in (10, 50):
        assert null_of(
            1 / np.arange(1, 577), "spectral_miscoupling", k=k, absolute=True
        ) == pytest.approx(1, abs=0.02)


def test_null_in_full_dimension():
    """k = d: the frames are whole bases and `‖A‖_F = ‖J‖_F`, not in the mean but
    always.
    """
    sigma = np.linspace(2, 1, 5)
    assert null_of(sigma, "captured_energy", k=5) == pytest.approx(1)
    assert null_of(sigma, "miscoupling", k=5) == pytest.approx(
        np.linalg.norm(sigma) * math.sqrt(1 - 1 / 5)
    )


def test_null_of_a_batch_is_its_rows_one_by_one():
    unordered = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(5))
    S = unordered.sort(descending=True).values
    norm = 1.5 * S.norm(dim=-1)
    absolute = measure_named("spectral_miscoupling", absolute=True)
    for measure in ("miscoupling", "captured_energy", "spectral_miscoupling", absolute):
        value = tlc.random_subspace_null(
            4, measure, d_model=9, S_1=S, frobenius_norm=norm
        )
        assert value.shape == (2, 3)
        for i, j in np.ndindex(2, 3):
            of_row = tlc.random_subspace_null(
                4,
                measure,
                d_model=9,
                S_1=S[i, j][None],
                frobenius_norm=norm[i, j][None],
            )
            torch.testing.assert_close(value[i, j], of_row[0])


@pytest.mark.parametrize("options", [{"p": 1}, {"absolute": True}])
@pytest.mark.parametrize("measure", ["coupling", "captured_energy", "released_trace"])
def test_options_of_another_measure_are_refused(measure: str, options: dict):
    """They would be ignored, and the null would not be of what was asked for."""
    S = torch.tensor([2.0, 1.0])
    message = f"options of 'spectral_miscoupling', not of '{measure}'"
    with pytest.raises(ValueError, match=message):
        tlc.random_subspace_null(
            2, measure, d_model=3, S_1=S, frobenius_norm=S.norm(), **options
        )
    with pytest.raises(ValueError, match=message):
        rotation_null(torch.diag(S), S, measure, **options)


def test_absolute_null_of_a_single_jacobian():
    S = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    null = tlc.random_subspace_null(
        2,
        "spectral_miscoupling",
        d_model=3,
        S_1=S,
        frobenius_norm=S.norm(),
        absolute=True,
    )
    assert null.shape == ()
    assert float(null) == pytest.approx(
        null_of(S.numpy(), "spectral_miscoupling", k=2, absolute=True)
    )


@pytest.mark.parametrize("measure", ["captured_energy", "spectral_miscoupling"])
def test_null_of_a_zero_jacobian_is_nan_with_a_warning(measure):
    with pytest.warns(UserWarning, match="is 0 for 1 matrices"):
        null_of(np.zeros(5), measure)


def test_every_null_at_every_k_is_that_null(frames):
    S = torch.from_numpy(np.stack([SPECTRA["fast"], SPECTRA["slow"]]))[:, :5]
    norms = 1.5 * S.norm(dim=-1)
    values = nulls_at_every_k(S, norms, NULL_D)
    assert values.shape == (len(MEASURES), 5, 2)
    for i, measure in enumerate(MEASURES):
        for k in range(1, 6):
            expected = tlc.random_subspace_null(
                k, measure, d_model=NULL_D, S_1=S, frobenius_norm=norms
            )
            torch.testing.assert_close(values[i, k - 1], expected.expand(2))


@pytest.mark.parametrize("k", [2, 3, 10])
def test_the_null_is_a_root_mean_square_and_lies_below_the_mean(k):
    """Of a Gaussian A, `m̃²` is a Beta variable: scipy knows its moments and
    quantiles.
    """
    d = 400
    S = torch.ones(1)
    of_A = stats.beta((k * k - k) / 2, k / 2)
    generator = torch.Generator().manual_seed(k)
    A = draws_of_random_subspaces(
        k,
        4000,
        d_model=d,
        S_1=S,
        frobenius_norm=torch.tensor(d**0.5),
        generator=generator,
    )
    drawn = 1 - tlc.normalized_miscoupling(A).numpy()
    mean = 1 - of_A.expect(np.sqrt)
    assert drawn.mean() == pytest.approx(mean, abs=4 * drawn.std() / 63)
    expected = {2: 1.138, 3: 1.061, 10: 1.005}[k]
    assert mean / float(tlc.random_subspace_null(k)) == pytest.approx(
        expected, abs=5e-4
    )
    # The far ends of 4000 draws, and of d = 400 against infinity.
    np.testing.assert_allclose(
        np.quantile(drawn, (0.025, 0.5, 0.975)),
        1 - np.sqrt(of_A.ppf((0.975, 0.5, 0.025))),
        rtol=0.12,
        atol=0.002,
    )


@pytest.mark.parametrize("n_known", [NULL_K, NULL_D])
def test_draws_are_random_frames_of_the_singular_vectors(n_known, frames):
    """Entries of every order: means over 4000 draws against 40,000 of whole
    matrices.
    """
    sigma = np.r_[3, 2, 1, np.full(NULL_D - 3, 0.4)]
    S = torch.from_numpy(sigma)
    generator = torch.Generator().manual_seed(0)
    options = {
        "d_model": NULL_D,
        "S_1": S[:n_known],
        "frobenius_norm": S.norm(),
        "generator": generator,
    }
    A = draws_of_random_subspaces(NULL_K, 4000, **options)
    of_whole_matrices = torch.from_numpy(sampled(frames, sigma))
    for measure in MEASURES:
        drawn = measure_of(A, S, measure).numpy()
        expected = measure_of(of_whole_matrices, S, measure).numpy()
        assert stats.ks_2samp(drawn, expected).pvalue > 0.01, measure


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("kind", ["any", "diagonal", "indefinite", "skew", "identity"])
def test_rotation_null_against_rotations(paired, kind):
    k = 4
    rng = np.random.default_rng(2)
    matrices = {
        "any": rng.standard_normal((k, k)) + 2 * np.eye(k),
        "diagonal": np.diag([3.0, 2, 1, 0.5]),
        "indefinite": np.diag([2.0, -1.5, 0.1, -0.4]),
        "skew": np.triu(np.ones((k, k)), 1) - np.tril(np.ones((k, k)), -1),
        "identity": np.eye(k),
    }
    A = torch.from_numpy(matrices[kind])
    s = torch.tensor([3.0, 2, 1, 0.7], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    Q, R = (random_rotations(N_SAMPLES, k, generator=generator) for _ in range(2))
    turned = Q.mT @ A @ (Q if paired else R)
    for name, measure in MEASURES.items():
        values = measure_of(turned, s, name)
        null = float(rotation_null(A, s, name, paired=paired))
        if kind == "identity" and paired:
            np.testing.assert_allclose(values, null, atol=1e-9)
        else:
            assert_root_mean_square(measure, values, null)


def test_rotation_null_of_what_rotations_leave_alone():
    """Independent bases: `√(1 − 1/k)` of any A. Paired ones leave the identity as it
    is.
    """
    A = torch.randn(
        3, 5, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    s = torch.ones(5, dtype=torch.float64)
    haar_null = tlc.random_subspace_null(5).expand(3)
    torch.testing.assert_close(rotation_null(A, s, paired=False), haar_null)
    assert float(rotation_null(0.3 * torch.eye(5), s)) == pytest.approx(1)
    with pytest.warns(UserWarning, match="is 0 for 1 matrices"):
        assert rotation_null(torch.zeros(5, 5), s).isnan()


def test_random_rotations_are_uniform():
    Q = random_rotations(2000, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Q.mT @ Q, torch.eye(5, dtype=Q.dtype).expand(2000, 5, 5))
    # Under the Haar measure the trace has mean 0 and variance 1.
    traces = Q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(traces.mean()) < 0.1
    assert float(traces.var()) == pytest.approx(1, abs=0.15)
    assert random_rotations(
        2, 5, columns=3, generator=torch.Generator().manual_seed(0)
    ).shape == (2, 5, 3)


@pytest.mark.parametrize("d", [4, 12, 64])
def test_null_of_the_identity_is_transformerlens_mean_projection_kernel(d, frames):
    """With `J = I`, `‖A‖_F²` is the projection kernel of two random subspaces."""
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "random_projection_kernel_moments"):
        pytest.skip("this TransformerLens has no random_projection_kernel_moments")
    for k in (1, 2, d):
        moments = analysis.random_projection_kernel_moments(d, k)
        energy = null_of(np.ones(d), "captured_energy", k=k)
        assert energy**2 * k == pytest.approx(moments.mean)
        miscoupling = null_of(np.ones(d), "miscoupling", k=k)
        assert miscoupling**2 == pytest.approx(moments.mean * (1 - 1 / k))
    if d == NULL_D:
        # And so are the samples that the null was held against, in mean and spread.
        moments = analysis.random_projection_kernel_moments(d, NULL_K)
        kernel = np.square(sampled(frames, np.ones(d))).sum((1, 2))
        assert kernel.mean() == pytest.approx(moments.mean, rel=0.01)
        assert kernel.var() == pytest.approx(moments.variance, rel=0.05)


def test_the_earlier_name_of_a_null_of_draws_warns_and_does_the_same() -> None:
    values = torch.tensor([0.2, 0.4])
    for measure in MEASURES.values():
        with pytest.warns(DeprecationWarning, match="is called `null_of_draws` now"):
            null = measure.root_mean_square(values)
        assert null == measure.null_of_draws(values)
