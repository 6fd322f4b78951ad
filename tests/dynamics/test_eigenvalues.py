"""Eigenvalues of blocks against scipy, Schur's form and known matrices."""

import numpy as np
import pytest
import scipy.linalg
import torch

import tl_coupling as tlc
from linear_blocks import affine_trace
from random_matrices import gaussian


def test_trace_determinant_and_schurs_form(tiny_trace):
    J = tlc.block_jacobians(tiny_trace).double()
    result = tlc.dynamics.eigenvalues(tiny_trace, n_draws=2)
    for layer, matrix in enumerate(J):
        values = result.values[layer]
        assert float(values.sum().real) == pytest.approx(
            float(matrix.trace()), abs=1e-9
        )
        assert float(values.abs().log().sum()) == pytest.approx(
            float(torch.linalg.slogdet(matrix).logabsdet), abs=1e-6
        )
        triangle, _ = scipy.linalg.schur(matrix.numpy(), output="complex")
        off_diagonal = np.linalg.norm(np.triu(triangle, 1))
        assert float(result.henrici[layer]) == pytest.approx(
            off_diagonal / np.linalg.norm(matrix.numpy()), abs=1e-9
        )
        symmetric = scipy.linalg.eigvalsh((matrix + matrix.mT).numpy() / 2)
        assert float(result.largest_symmetric[layer]) == pytest.approx(symmetric[-1])


def test_known_matrices():
    quarter_turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    shear = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    symmetric = torch.tensor([[2.0, 1.0], [1.0, -3.0]])
    J = torch.stack([quarter_turn, shear, symmetric])
    result = tlc.dynamics.jacobian_eigenvalues(J)
    assert result.complex_share.tolist() == [1, 0, 0]
    assert result.henrici.tolist() == pytest.approx([0, (1 / 3) ** 0.5, 0], abs=1e-7)
    assert result.values[0].abs().tolist() == pytest.approx([1, 1])
    assert result.largest_symmetric[0] == pytest.approx(0)


def test_the_null_keeps_singular_values_and_the_determinant():
    J = gaussian(2, 30, 30, seed=1)
    result = tlc.dynamics.jacobian_eigenvalues(J, n_draws=6)
    determinants = torch.linalg.slogdet(J).logabsdet
    assert torch.allclose(result.null_values.abs().log().sum(-1), determinants)
    # A Gaussian matrix is one of its own null.
    assert result.henrici.mean() == pytest.approx(
        float(result.null_henrici.mean()), abs=0.06
    )
    symmetric = tlc.dynamics.jacobian_eigenvalues(J + J.mT, n_draws=6)
    assert (symmetric.null_henrici > 0.4).all()
    assert (symmetric.henrici < 1e-6).all()


def test_arnoldi_finds_the_largest(tiny_trace):
    result = tlc.dynamics.eigenvalues(tiny_trace, n_draws=1)
    found = tlc.dynamics.leading_eigenvalues(tiny_trace, 0, 4)
    assert found.abs().tolist() == pytest.approx(
        result.values[0, :4].abs().tolist(), rel=1e-4
    )
    with pytest.raises(ValueError, match=r"at most d_model − 2 = 30, got 31"):
        tlc.dynamics.leading_eigenvalues(tiny_trace, 0, 31)


def test_a_zero_jacobian_has_no_departure_from_normality():
    trace = affine_trace(torch.zeros(2, 6, 6).double())
    with pytest.warns(UserWarning, match="zero at layers 0, 1: .* is NaN"):
        result = tlc.dynamics.eigenvalues(trace, n_draws=1)
    assert result.henrici.isnan().all()
    assert (result.values == 0).all()


@pytest.mark.parametrize(
    ("J", "message"),
    [
        (torch.full((2, 4, 4), torch.nan), "NaN or infinite"),
        (torch.full((2, 4, 4), torch.inf), "NaN or infinite"),
        (torch.ones(2, 0, 0), "at least one row and one column"),
        (1e305 * torch.ones(2, 4, 4).double(), "`J` must have entries up to"),
    ],
)
def test_jacobians_without_eigenvalues_are_refused_in_a_line(J, message):
    with pytest.raises(ValueError, match=message) as error:
        tlc.dynamics.jacobian_eigenvalues(J, n_draws=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_the_departure_from_normality_does_not_depend_on_the_size(scale):
    J = gaussian(2, 6, 6, seed=3)
    of_unit = tlc.dynamics.jacobian_eigenvalues(J, n_draws=1)
    scaled = tlc.dynamics.jacobian_eigenvalues(scale * J, n_draws=1)
    assert torch.allclose(scaled.henrici, of_unit.henrici)
    assert torch.allclose(scaled.null_henrici, of_unit.null_henrici)
    assert torch.allclose(scaled.real / scale, of_unit.real)
    assert torch.allclose(scaled.largest_symmetric / scale, of_unit.largest_symmetric)


def test_jacobians_of_16_bits_and_minus_the_identity_have_eigenvalues():
    J = gaussian(2, 6, 6, seed=3).half()
    ours, expected = (tlc.dynamics.jacobian_eigenvalues(M) for M in (J, J.double()))
    assert torch.equal(ours.values, expected.values)
    erasing = tlc.dynamics.jacobian_eigenvalues(-torch.eye(6)[None])
    assert torch.allclose(erasing.real, torch.full((1, 6), -1.0).double())
    assert float(erasing.henrici[0]) < 1e-7


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_leading_eigenvalues_of_blocks_of_low_rank(rank):
    left, right = gaussian(12, rank, seed=4), gaussian(rank, 12, seed=5)
    J = (left @ right)[None]
    found = tlc.dynamics.leading_eigenvalues(affine_trace(J), 0, 3)
    expected = np.zeros(3)
    expected[:rank] = sorted(abs(np.linalg.eigvals((right @ left).numpy())))[::-1]
    assert found.abs().numpy() == pytest.approx(expected, abs=1e-5)
