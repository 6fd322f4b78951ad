"""What is read off singular values and square matrices: closed forms, and numpy and
scipy beside them.
"""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_coupling as tlc
from tl_coupling.spectra import (
    asymmetry,
    effective_rank,
    inverse_singular_value_fit,
    non_normality,
    participation_ratio,
)

DTYPES = [torch.float32, torch.float64]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def test_the_line_through_inverse_singular_values_is_scipys():
    S = gaussian(7, 5).abs() + 0.1
    layers = [0, 2, 3, 7, 8, 11, 12]
    fit = inverse_singular_value_fit(S, layers)
    for i in range(5):
        line = scipy.stats.linregress(layers, 1 / S[:, i].numpy())
        assert float(fit.slope[i]) == pytest.approx(line.slope)
        assert float(fit.intercept[i]) == pytest.approx(line.intercept)
        assert float(fit.r_squared[i]) == pytest.approx(line.rvalue**2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_values_that_scale_inversely_with_depth_lie_on_a_line(dtype):
    depth = torch.arange(30, dtype=dtype)[:, None]
    fit = inverse_singular_value_fit(
        1 / (torch.tensor([2.0, 5.0]) + torch.tensor([0.5, -0.1]) * depth).to(dtype)
    )
    torch.testing.assert_close(fit.slope, torch.tensor([0.5, -0.1], dtype=dtype))
    torch.testing.assert_close(fit.intercept, torch.tensor([2.0, 5.0], dtype=dtype))
    torch.testing.assert_close(fit.r_squared, torch.ones(2, dtype=dtype))


def test_inverse_singular_values_without_a_line_are_undefined_one_by_one():
    S = gaussian(6, 3).abs() + 0.1
    S[2, 0] = 0.0
    S[:, 1] = 0.3
    with pytest.warns(
        UserWarning, match="of 3 lines .* 1 are undefined .* R² of 1 is undefined"
    ) as caught:
        fit = inverse_singular_value_fit(S)
    assert len(caught) == 1
    assert (
        fit.slope.isnan().tolist()
        == fit.intercept.isnan().tolist()
        == [True, False, False]
    )
    assert fit.r_squared.isnan().tolist() == [True, True, False]
    assert float(fit.slope[1]) == pytest.approx(0, abs=1e-12)
    assert float(fit.intercept[1]) == pytest.approx(1 / 0.3)


@pytest.mark.parametrize(
    ("S", "layers", "message"),
    [
        (torch.ones(1, 3), None, "at least 2 rows of `S` .* got 1 rows"),
        (torch.ones(3, 3), [0, 1], r"3 rows and layers \[0, 1\]"),
        (torch.ones(3, 3), [0, 1, 1], "a layer of its own for each"),
        (-torch.ones(3, 3), None, "finite and at least 0"),
        (torch.full((3, 3), torch.nan), None, "finite and at least 0"),
    ],
)
def test_the_line_refuses(S, layers, message):
    with pytest.raises(ValueError, match=message):
        inverse_singular_value_fit(S, layers)


NORMAL = {
    "identity": torch.eye(6).double(),
    "symmetric": gaussian(6, 6) + gaussian(6, 6).mT,
    "antisymmetric": gaussian(6, 6) - gaussian(6, 6).mT,
    "orthogonal": torch.linalg.qr(gaussian(6, 6)).Q,
    "circulant": torch.stack([gaussian(6).roll(i) for i in range(6)]),
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal_matrices_have_no_non_normality(name):
    assert float(non_normality(NORMAL[name])) < 1e-14
    assert float(non_normality(NORMAL[name].float())) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_normality_is_the_formula_written_out_in_numpy(dtype):
    J = gaussian(2, 3, 7, 7).to(dtype)
    got = non_normality(J)
    assert (got.dtype, got.shape) == (dtype, (2, 3))
    for index in np.ndindex(2, 3):
        M = J[index].double().numpy()
        expected = np.sqrt(((M.T @ M - M @ M.T) ** 2).sum()) / (M**2).sum()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert float(got[index]) == pytest.approx(expected, rel=tolerance)


def test_non_normality_reaches_its_bound_for_one_nilpotent_direction():
    u, v = torch.linalg.qr(gaussian(6, 2)).Q.mT
    assert float(non_normality(torch.outer(u, v))) == pytest.approx(np.sqrt(2))
    # A shift of n directions: JᵀJ − JJᵀ is 1 and −1 at the two ends.
    for n in (2, 3, 6):
        assert float(non_normality(torch.diag(torch.ones(n - 1), 1))) == pytest.approx(
            np.sqrt(2) / (n - 1)
        )


def test_non_normality_against_henricis_departure():
    for seed in range(20):
        M = gaussian(5, 5, seed=seed).numpy() * np.array([3.0, 1, 1, 0.3, 0.1])
        size = np.linalg.norm(M)
        henrici = np.sqrt(size**2 - (np.abs(np.linalg.eigvals(M)) ** 2).sum()) / size
        got = float(non_normality(torch.from_numpy(M)))
        # Elsner and Paardekooper's two inequalities: each bounds the other.
        assert got**2 / 6 <= henrici**2 <= np.sqrt((5**3 - 5) / 12) * got


def test_non_normality_of_gaussian_matrices_is_near_root_2_over_d():
    d = 200
    got = non_normality(gaussian(4, d, d))
    assert got.mean() == pytest.approx(np.sqrt(2 / d), rel=0.02)


@given(
    seed=st.integers(0, 2**32 - 1),
    d=st.integers(1, 6),
    rank=st.integers(1, 6),
    exponent=st.integers(-25, 25),
)
@settings(max_examples=40)
def test_bounds_and_invariances_of_what_is_read_off_a_matrix(seed, d, rank, exponent):
    J = gaussian(d, min(rank, d), seed=seed) @ gaussian(min(rank, d), d, seed=seed + 1)
    Q = torch.linalg.qr(gaussian(d, d, seed=seed + 2)).Q
    for measure, largest in ((non_normality, np.sqrt(2)), (asymmetry, 1.0)):
        value = float(measure(J))
        assert 0 <= value <= largest + 1e-12
        for changed in (Q @ J @ Q.mT, J.mT, -J, 10.0**exponent * J):
            assert float(measure(changed)) == pytest.approx(value, abs=1e-10)
        # Squares of such entries are outside float32's range.
        assert float(measure((10.0**exponent * J).float())) == pytest.approx(
            value, abs=1e-4
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_asymmetry_of_known_parts(dtype):
    symmetric = NORMAL["symmetric"] / NORMAL["symmetric"].norm()
    antisymmetric = NORMAL["antisymmetric"] / NORMAL["antisymmetric"].norm()
    angle = torch.tensor([0.0, 0.3, 1.0, np.pi / 2])
    shares = angle.cos()[:, None, None], angle.sin()[:, None, None]
    J = (shares[0] * symmetric + shares[1] * antisymmetric).to(dtype)
    assert asymmetry(J).dtype == dtype
    torch.testing.assert_close(
        asymmetry(J).double(), angle.sin().double(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("measure", [non_normality, asymmetry])
def test_a_zero_matrix_has_neither(measure):
    with pytest.warns(UserWarning, match=r"is undefined \(NaN\) for 1 of 2 zero `J`"):
        got = measure(torch.stack([torch.zeros(3, 3), torch.ones(3, 3).triu()]))
    assert got.isnan().tolist() == [True, False]


@pytest.mark.parametrize("measure", [non_normality, asymmetry])
def test_what_matrices_are_refused(measure):
    with pytest.raises(ValueError, match="NaN or infinite"):
        measure(torch.full((3, 3), torch.inf))
    with pytest.raises(TypeError, match="must be float32 or float64, got"):
        measure(torch.ones(3, 3, dtype=torch.float16))


def test_ranks_of_known_spectra():
    S = torch.tensor(
        [
            [2.0, 2.0, 2.0, 2.0],
            [5.0, 0.0, 0.0, 0.0],
            [3.0, 3.0, 0.0, 0.0],
            [3.0, 1.0, 0.0, 0.0],
        ]
    )
    torch.testing.assert_close(
        participation_ratio(S), torch.tensor([4.0, 1.0, 2.0, 100 / 82])
    )
    # Shares 3/4 and 1/4 of σ: exp of their entropy is 4 / 3^(3/4).
    torch.testing.assert_close(
        effective_rank(S), torch.tensor([4.0, 1.0, 2.0, 4 / 3**0.75])
    )


def test_the_participation_ratio_is_that_of_the_matrix():
    J = gaussian(3, 6, 5)
    expected = [
        np.linalg.norm(M) ** 4 / np.linalg.norm(M.T @ M) ** 2 for M in J.numpy()
    ]
    np.testing.assert_allclose(participation_ratio(tlc.svd(J).S), expected)


@given(
    values=st.lists(st.floats(0, 1e3), min_size=1, max_size=6).filter(
        lambda values: max(values) > 1e-3
    ),
    exponent=st.integers(-30, 30),
)
def test_bounds_and_invariances_of_ranks(values, exponent):
    S = torch.tensor(values, dtype=torch.float64)
    for rank in (participation_ratio, effective_rank):
        assert 1 <= float(rank(S)) <= len(values)
        assert float(rank(10.0**exponent * S)) == pytest.approx(
            float(rank(S)), rel=1e-9
        )
        assert float(rank(torch.cat([S, S]))) == pytest.approx(
            2 * float(rank(S)), rel=1e-9
        )
    assert float(participation_ratio(S)) <= float(effective_rank(S)) + 1e-9


@pytest.mark.parametrize("rank", [participation_ratio, effective_rank])
def test_no_singular_values_have_no_rank(rank):
    with pytest.warns(UserWarning, match=r"is undefined \(NaN\) for 1 of 2 zero `S`"):
        assert rank(torch.tensor([[0.0, 0.0], [1.0, 0.0]])).isnan().tolist() == [
            True,
            False,
        ]
    with pytest.raises(ValueError, match="finite and at least 0"):
        rank(torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="at least one singular value"):
        rank(torch.ones(2, 0))
