"""Coupling matrices and their measures against loops and numpy formulae."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_coupling as tlc
from random_matrices import haar, matrix
from tl_coupling.spectra import Spectrum

D = 8
K = 4
MEASURES = {
    "miscoupling": lambda A, S: tlc.miscoupling(A),
    "normalized_miscoupling": lambda A, S: tlc.normalized_miscoupling(A),
    "spectral p=2": lambda A, S: tlc.spectral_miscoupling(A, S),
    "spectral p=1": lambda A, S: tlc.spectral_miscoupling(A, S, p=1.0),
    "spectral p=2 absolute": lambda A, S: tlc.spectral_miscoupling(A, S, absolute=True),
    "spectral p=1 absolute": lambda A, S: tlc.spectral_miscoupling(
        A, S, p=1.0, absolute=True
    ),
    "captured_energy": lambda A, S: tlc.captured_energy(A, S),
}


def numpy_measures(A: np.ndarray, s: np.ndarray) -> dict[str, float]:
    """Every measure of one A, entry by entry."""
    k = len(A)
    off = sum(A[i, j] ** 2 for i in range(k) for j in range(k) if i != j)
    total = sum(A[i, j] ** 2 for i in range(k) for j in range(k))
    distance = sum((A[i, j] - s[i] * (i == j)) ** 2 for i in range(k) for j in range(k))
    distance_abs = sum(
        (abs(A[i, j]) - s[i] * (i == j)) ** 2 for i in range(k) for j in range(k)
    )
    trace = sum(s[:k])
    length = math.sqrt(sum(s[:k] ** 2))
    return {
        "miscoupling": math.sqrt(off),
        "normalized_miscoupling": math.sqrt(off / total),
        "spectral p=2": math.sqrt(distance) / length,
        "spectral p=1": math.sqrt(distance) / trace,
        "spectral p=2 absolute": math.sqrt(distance_abs) / length,
        "spectral p=1 absolute": math.sqrt(distance_abs) / trace,
        "captured_energy": math.sqrt(total) / length,
    }


def random_pair(seed: int, d: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    J_1, J_2 = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    # Partly coupled, as in real models: otherwise every value sits at the null.
    return J_1 + 0.7 * J_2, J_2


def all_measures(A: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    return torch.stack([measure(A, S) for measure in MEASURES.values()])


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
@pytest.mark.parametrize("k", [1, 3, D])
def test_coupling_matrix_is_the_double_loop(orientation, k):
    J_1, J_2 = random_pair(0)
    U, _, Vh = np.linalg.svd(J_2.numpy())
    # Any singular values will do: A is of the vectors alone.
    S = torch.arange(D, 0, -1, dtype=torch.float64)
    spectrum = Spectrum(torch.from_numpy(U), S, torch.from_numpy(Vh))
    A = tlc.coupling_matrix(J_1, spectrum, k, orientation)
    assert A.shape == (k, k)
    for i in range(k):
        for j in range(k):
            expected = U[:, i] @ J_1.numpy() @ Vh[j]
            if orientation == "vju":
                expected = Vh[i] @ J_1.numpy() @ U[:, j]
            assert float(A[i, j]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
def test_batches_are_their_matrices_one_by_one(orientation):
    J = torch.randn(
        2, 3, D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    spectrum = tlc.svd(J.flip(1))
    A = tlc.coupling_matrix(J, spectrum, K, orientation)
    S = torch.linalg.svdvals(J)
    assert A.shape == (2, 3, K, K)
    values = all_measures(A, S)
    for i, j in np.ndindex(2, 3):
        of_pair = Spectrum(spectrum.U[i, j], spectrum.S[i, j], spectrum.Vh[i, j])
        torch.testing.assert_close(
            A[i, j], tlc.coupling_matrix(J[i, j], of_pair, K, orientation)
        )
        torch.testing.assert_close(values[:, i, j], all_measures(A[i, j], S[i, j]))


def test_arbitrary_singular_vectors_are_warned_of_by_their_place_in_the_batch():
    """Of rank 2, of equal σ, and neither: the first two are named."""
    low_rank = np.array([3, 2, 0, 0, 0, 0, 0, 0.0])
    repeated = np.array([3, 2, 2, 2, 1, 0.9, 0.8, 0.7])
    distinct = np.arange(D, 0, -1.0)
    J_2 = torch.stack(
        [
            torch.from_numpy(matrix(S, (D, D), seed))
            for seed, S in enumerate((low_rank, repeated, distinct))
        ]
    )
    with (
        pytest.warns(
            UserWarning, match=r"k = 3 is above the rank of spectrum_2\[0\] \("
        ),
        pytest.warns(UserWarning, match=r"σ_3 and σ_4 .* rounding in spectrum_2\[1\]:"),
    ):
        tlc.coupling_matrix(J_2, tlc.svd(J_2), k=3)
    with pytest.warns(UserWarning, match=r"above the rank of spectrum_2 \("):
        tlc.coupling_matrix(J_2[2], tlc.svd(J_2[0]), k=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tlc.coupling_matrix(J_2, tlc.svd(J_2[2]), k=3)


def test_one_spectrum_of_singular_values_serves_a_row_of_pairs():
    A = torch.randn(2, 3, K, K, generator=torch.Generator().manual_seed(2))
    S = torch.rand(2, D).sort(descending=True).values
    values = all_measures(A, S[:, None])
    assert values.shape == (len(MEASURES), 2, 3)
    for i, j in np.ndindex(2, 3):
        torch.testing.assert_close(values[:, i, j], all_measures(A[i, j], S[i]))


@pytest.mark.parametrize(
    "sigma",
    [np.linspace(3, 1, D), np.geomspace(1, 1e-3, D), np.array([3.0, 2, 1, *[0] * 5])],
)
# The last has rank 3: at k = D the rest is arbitrary, and A is diagonal all the same.
@pytest.mark.filterwarnings("ignore:k = 8 is above the rank of spectrum_2")
def test_a_jacobian_coupled_with_itself_is_its_singular_values(sigma):
    rng = np.random.default_rng(3)
    J = torch.from_numpy(haar(D, rng) * sigma @ haar(D, rng))
    spectrum = tlc.svd(J)
    for k in (1, 3, D):
        A = tlc.coupling_matrix(J, spectrum, k)
        torch.testing.assert_close(
            A, torch.diag(torch.from_numpy(sigma[:k])), rtol=0, atol=1e-12
        )
        values = dict(zip(MEASURES, all_measures(A, spectrum.S).tolist(), strict=True))
        assert values.pop("captured_energy") == pytest.approx(1, abs=1e-12)
        assert all(abs(value) < 1e-11 for value in values.values())


def test_a_symmetric_positive_jacobian_is_the_same_in_both_orientations():
    Q = haar(D, np.random.default_rng(4))
    J = torch.from_numpy(Q * np.linspace(2, 1, D) @ Q.T)
    ujv, vju = (
        tlc.coupling_matrix(J, tlc.svd(J), K, orientation)
        for orientation in ("ujv", "vju")
    )
    torch.testing.assert_close(ujv, vju)


def test_a_rotation_is_not_coupled_with_itself_in_the_swapped_orientation():
    """`J = U S Vᵀ` has `VᵀJU = (VᵀU) S (VᵀU)`: vju of a Jacobian with itself is not its
    singular values.
    """
    J = random_pair(5)[0]
    U, S, Vh = np.linalg.svd(J.numpy())
    A = tlc.coupling_matrix(J, tlc.svd(J), D, "vju")
    np.testing.assert_allclose(A.abs(), np.abs(Vh @ U * S @ Vh @ U), atol=1e-12)
    assert float(tlc.normalized_miscoupling(A)) > 0.5


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
def test_a_smaller_k_is_a_corner(orientation):
    J_1, J_2 = random_pair(6)
    spectrum = tlc.svd(J_2)
    A = tlc.coupling_matrix(J_1, spectrum, D, orientation)
    for k in range(1, D + 1):
        torch.testing.assert_close(
            tlc.coupling_matrix(J_1, spectrum, k, orientation), A[:k, :k]
        )
        torch.testing.assert_close(
            tlc.coupling_matrix(J_1, spectrum.top(k), k, orientation), A[:k, :k]
        )


def test_swapped_orientation_is_the_other_one_of_the_transposes():
    J_1, J_2 = random_pair(7)
    spectrum = tlc.svd(J_2)
    transposed = Spectrum(spectrum.Vh.mT, spectrum.S, spectrum.U.mT)
    ujv, vju = (
        tlc.coupling_matrix(J_1, spectrum, K, orientation)
        for orientation in ("ujv", "vju")
    )
    torch.testing.assert_close(tlc.coupling_matrix(J_1.mT, transposed, K), ujv.mT)
    torch.testing.assert_close(tlc.coupling_matrix(J_1, transposed, K), vju)
    S = torch.linalg.svdvals(J_1)
    torch.testing.assert_close(all_measures(ujv.mT, S), all_measures(ujv, S))


@given(
    seed=st.integers(0, 2**16),
    k=st.integers(1, D),
    orientation=st.sampled_from(["ujv", "vju"]),
)
@settings(max_examples=30)
def test_measures_are_the_formulae_and_within_bounds(seed, k, orientation):
    J_1, J_2 = random_pair(seed)
    S = torch.linalg.svdvals(J_1)
    A = tlc.coupling_matrix(J_1, tlc.svd(J_2), k, orientation)
    values = dict(zip(MEASURES, all_measures(A, S).tolist(), strict=True))
    assert values == pytest.approx(
        numpy_measures(A.numpy(), S.numpy()), rel=1e-10, abs=1e-12
    )
    assert 0 <= values["normalized_miscoupling"] <= 1
    assert 0 <= values["captured_energy"] <= 1 + 1e-12
    assert values["spectral p=2 absolute"] <= values["spectral p=2"] + 1e-12
    # ‖s‖₂ ≤ ‖s‖₁
    assert values["spectral p=1"] <= values["spectral p=2"]


@given(
    seed=st.integers(0, 2**16),
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=D, max_size=D),
    orientation=st.sampled_from(["ujv", "vju"]),
)
@settings(max_examples=30)
def test_joint_sign_flips_change_no_measure(seed, signs, orientation):
    J_1, J_2 = random_pair(seed)
    spectrum = tlc.svd(J_2)
    sign = torch.tensor(signs, dtype=torch.float64)
    flipped = Spectrum(spectrum.U * sign, spectrum.S, sign[:, None] * spectrum.Vh)
    S = torch.linalg.svdvals(J_1)
    values, values_flipped = (
        all_measures(tlc.coupling_matrix(J_1, s, K, orientation), S)
        for s in (spectrum, flipped)
    )
    torch.testing.assert_close(values, values_flipped)


@given(seed=st.integers(0, 2**16), orientation=st.sampled_from(["ujv", "vju"]))
@settings(max_examples=20)
def test_a_change_of_basis_of_the_residual_stream_changes_no_measure(seed, orientation):
    J_1, J_2 = random_pair(seed)
    Q = torch.from_numpy(haar(D, np.random.default_rng(seed)))
    turned_1 = Q @ J_1 @ Q.mT
    turned_2 = Q @ J_2 @ Q.mT
    S = torch.linalg.svdvals(J_1)
    values = all_measures(tlc.coupling_matrix(J_1, tlc.svd(J_2), K, orientation), S)
    turned = all_measures(
        tlc.coupling_matrix(turned_1, tlc.svd(turned_2), K, orientation), S
    )
    torch.testing.assert_close(values, turned)


def test_rotations_of_inputs_and_outputs_change_nothing_in_the_papers_orientation():
    """They do in the other orientation, where left and right vectors swap roles."""
    J_1, J_2 = random_pair(8)
    rng = np.random.default_rng(8)
    Q = torch.from_numpy(haar(D, rng))
    R = torch.from_numpy(haar(D, rng))
    S = torch.linalg.svdvals(J_1)
    for orientation, stays in (("ujv", True), ("vju", False)):
        A = tlc.coupling_matrix(J_1, tlc.svd(J_2), K, orientation)
        turned = tlc.coupling_matrix(Q @ J_1 @ R, tlc.svd(Q @ J_2 @ R), K, orientation)
        assert torch.allclose(all_measures(A, S), all_measures(turned, S)) is stays


def test_rotations_within_the_subspaces_change_all_but_the_captured_energy():
    J_1, J_2 = random_pair(9)
    rng = np.random.default_rng(9)
    top = tlc.svd(J_2, K)
    Q = torch.from_numpy(haar(K, rng))
    R = torch.from_numpy(haar(K, rng))
    turned = Spectrum(top.U @ Q, top.S, R @ top.Vh)
    S = torch.linalg.svdvals(J_1)
    before_turning = all_measures(tlc.coupling_matrix(J_1, top, K), S)
    after_turning = all_measures(tlc.coupling_matrix(J_1, turned, K), S)
    changes = (after_turning - before_turning).abs()
    for name, change in zip(MEASURES, changes.tolist(), strict=True):
        if name == "captured_energy":
            assert change == pytest.approx(0, abs=1e-9)
        else:
            assert change > 1e-3


@given(seed=st.integers(0, 2**16), c=st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_scale(seed, c):
    """m is in J's units; the others are ratios: a gain common to A and S leaves them,
    and so does any gain of m̃.
    """
    J_1, J_2 = random_pair(seed)
    A = tlc.coupling_matrix(J_1, tlc.svd(J_2), K)
    S = torch.linalg.svdvals(J_1)
    torch.testing.assert_close(tlc.miscoupling(-c * A), c * tlc.miscoupling(A))
    torch.testing.assert_close(
        tlc.normalized_miscoupling(-c * A), tlc.normalized_miscoupling(A)
    )
    torch.testing.assert_close(all_measures(c * A, c * S)[1:], all_measures(A, S)[1:])
    for p in (1.0, 2.0):
        absolute = tlc.spectral_miscoupling(A, S, p, absolute=True)
        torch.testing.assert_close(
            tlc.spectral_miscoupling(-A, S, p, absolute=True), absolute
        )


@pytest.mark.parametrize("scale", [1e30, 1e19, 1e-19, 1e-30])
def test_squares_beyond_the_range_of_float32_change_no_measure(scale: float) -> None:
    """Against the formulae in float64: numbers, and gradients of what is a ratio."""
    J_1, J_2 = random_pair(3)
    A = (scale * tlc.coupling_matrix(J_1, tlc.svd(J_2), K)).float()
    S = (scale * torch.linalg.svdvals(J_1)).float()
    expected = numpy_measures(A.double().numpy(), S.double().numpy())
    for name, measure in MEASURES.items():
        value = float(measure(A, S))
        assert value == pytest.approx(expected[name], rel=1e-5), name
    gradients = []
    for x in (A.requires_grad_(), A.detach().double().requires_grad_()):
        tlc.normalized_miscoupling(x).backward()
        gradients.append(x.grad.double() * scale)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_an_anticoupled_jacobian_is_far_from_its_singular_values_unless_absolute():
    S = torch.tensor([3.0, 2.0, 1.0])
    A = -torch.diag(S)
    assert float(tlc.normalized_miscoupling(A)) == 0
    assert float(tlc.spectral_miscoupling(A, S)) == pytest.approx(2)
    assert float(tlc.spectral_miscoupling(A, S, absolute=True)) == 0


def test_one_by_one_says_nothing():
    A = torch.tensor([[[3.0]], [[-2.0]], [[1e-20]]])
    assert tlc.normalized_miscoupling(A).tolist() == [0, 0, 0]
    assert tlc.miscoupling(A).tolist() == [0, 0, 0]
    assert float(tlc.random_subspace_null(1, "normalized_miscoupling")) == 0
    assert float(tlc.random_subspace_null(1, "coupling")) == 1


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_spectral_miscoupling_for_other_norms(p):
    A = torch.tensor([[2.0, 1.0], [0.0, -1.0]])
    S = torch.tensor([3.0, 2.0, 1.0])
    norm = max(3.0, 2.0) if p == math.inf else (3**p + 2**p) ** (1 / p)
    assert float(tlc.spectral_miscoupling(A, S, p)) == pytest.approx(
        math.sqrt(1 + 1 + 9) / norm
    )
    assert float(tlc.spectral_miscoupling(A, S, p, absolute=True)) == pytest.approx(
        math.sqrt(1 + 1 + 1) / norm
    )


def test_p_may_be_an_int():
    A = torch.tensor([[2.0, 1.0], [0.0, -1.0]])
    S = torch.tensor([3.0, 2.0])
    assert torch.equal(
        tlc.spectral_miscoupling(A, S, p=1), tlc.spectral_miscoupling(A, S, p=1.0)
    )


def caught(function) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        values = function()
    return values.tolist(), [str(record.message) for record in records]


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_undefined_is_nan_with_a_warning_and_nothing_else_is_touched(name):
    """Three pairs; in the middle one both A and S_1 are zero."""
    weight = torch.tensor([1.0, 0.0, 2.0])
    A = weight[:, None, None] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    S = weight[:, None] * torch.tensor([5.0, 3.0, 1.0])
    values, messages = caught(lambda: MEASURES[name](A, S))
    assert np.isfinite([values[0], values[2]]).all()
    if name == "miscoupling":
        assert values[1] == 0
        assert messages == []
    else:
        assert math.isnan(values[1])
        (message,) = messages
        assert "is 0 for 1 matrices" in message
        assert "NaN" in message
    assert caught(lambda: MEASURES[name](A[::2], S[::2])) == (
        [values[0], values[2]],
        [],
    )


def test_energy_and_spectral_measures_of_a_zero_a_are_defined():
    A = torch.zeros(3, 3)
    S = torch.tensor([3.0, 2.0, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(tlc.captured_energy(A, S)) == 0
        assert float(tlc.spectral_miscoupling(A, S)) == pytest.approx(1)


def test_bad_arguments_have_one_clear_error():
    J_1, J_2 = random_pair(10)
    A = torch.eye(3)
    spectrum = tlc.svd(J_2, 3)
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 3\].*got 4"):
        tlc.coupling_matrix(J_1, spectrum, 4)
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 3\].*got 0"):
        tlc.coupling_matrix(J_1, spectrum, 0)
    for measure in (tlc.spectral_miscoupling, tlc.captured_energy):
        with pytest.raises(ValueError, match=r"`k` must lie in \[1, 2\].*got 3"):
            measure(A, torch.ones(2))
    for p in (0.0, 0.5, -1.0, math.nan):
        with pytest.raises(ValueError, match="`p` must be at least 1"):
            tlc.spectral_miscoupling(A, torch.ones(3), p)
    with pytest.raises(ValueError, match="`k` must be at least 1, got 0"):
        tlc.random_subspace_null(0)
    with pytest.raises(ValueError, match="give d_model, S_1 and frobenius_norm"):
        tlc.random_subspace_null(3, "captured_energy", d_model=8)
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 2\].*got 3"):
        tlc.random_subspace_null(
            3,
            "miscoupling",
            d_model=8,
            S_1=torch.ones(2),
            frobenius_norm=torch.tensor(2.0),
        )


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0)])
@pytest.mark.parametrize(
    "measure",
    ["miscoupling", "normalized_miscoupling", "vector_alignment", "subspace_overlap"],
)
def test_matrices_without_entries_have_no_measure(
    measure: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(
        ValueError, match=r"`A` must have at least one row and one column, got shape \["
    ):
        getattr(tlc.measures, measure)(torch.zeros(shape))
