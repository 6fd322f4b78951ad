"""The coupling of frozen Jacobians beside that of the blocks' own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tl_coupling as tlc
from linear_blocks import D, affine_trace
from random_matrices import gaussian
from tl_coupling.comparisons import FrozenCoupling, frozen_coupling
from tl_coupling.dynamics import frozen_jacobian

K = 4


@pytest.fixture(scope="module")
def result(tiny_trace: tlc.Trace) -> FrozenCoupling:
    return frozen_coupling(tiny_trace, k=K, progress=False)


def coupling(J_1: Tensor, J_2: Tensor) -> float:
    """`1 − ‖A − diag A‖ / ‖A‖` at k = 4, by numpy's route: one pair at a time."""
    U, _, Vh = torch.linalg.svd(J_2.double())
    A = U[:, :K].mT @ J_1.double() @ Vh[:K].mT
    return float(1 - (A - A.diag().diag()).norm() / A.norm())


def test_maps_are_those_of_the_jacobians(
    result: FrozenCoupling, tiny_trace: tlc.Trace
) -> None:
    expected = tlc.depth_coupling(tiny_trace, k=K)
    torch.testing.assert_close(result.full.matrices, expected.matrices)
    assert result.full.provenance["paths"] == expected.provenance["paths"]
    frozen = [frozen_jacobian(tiny_trace, layer) for layer in range(2)]
    assert result.frozen.coupling()[0, 1] == pytest.approx(coupling(*frozen), abs=1e-4)
    assert result.frozen.coupling()[1, 0] == pytest.approx(
        coupling(*reversed(frozen)), abs=1e-4
    )
    assert result.frozen.provenance["function"] == "frozen"
    for layer, J_frozen in enumerate(frozen):
        J = tlc.block_jacobian(tiny_trace, layer)
        difference = float((J - J_frozen).norm() / J.norm())
        assert float(result.differences[layer]) == pytest.approx(difference, rel=1e-4)


def test_it_is_saved_and_says_what_it_is(
    result: FrozenCoupling, tmp_path: Path
) -> None:
    loaded = FrozenCoupling.load(result.save(tmp_path / "frozen.nc"))
    assert torch.equal(loaded.frozen.coupling(2), result.frozen.coupling(2))
    assert torch.equal(loaded.differences, result.differences)
    assert loaded.layers == (0, 1)
    assert repr(loaded) == repr(result)
    assert f"mean coupling {result.full.mean():.3f}" in repr(result)
    assert f"frozen {result.frozen.mean():.3f}" in repr(result)


def test_a_block_that_adds_nothing_has_no_difference_and_warns() -> None:
    A = torch.stack([gaussian(D, D, seed=layer) for layer in range(3)])
    A[1] = 0
    with (
        pytest.warns(UserWarning, match="‖J‖_F is 0 for 1 matrices") as warned,
        pytest.warns(UserWarning, match="is above the rank"),
    ):
        result = frozen_coupling(affine_trace(A), k=D, progress=False)
    assert result.differences.isnan().tolist() == [False, True, False]
    assert {record.filename for record in warned} == {__file__}


def test_layers_and_positions_are_chosen(tiny_trace: tlc.Trace) -> None:
    chosen = frozen_coupling(
        tiny_trace, k=2, position=3, layers=[1], orientation="vju", progress=False
    )
    assert chosen.frozen.row_layers == (1,)
    assert chosen.frozen.row_positions == (3,)
    J = frozen_jacobian(tiny_trace, 1, position=3)
    U, _, Vh = torch.linalg.svd(J)
    A = Vh[:2] @ J @ U[:, :2]
    torch.testing.assert_close(
        chosen.frozen.at()[0, 0].abs(), A.abs(), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(ValueError, match="layer"):
        frozen_coupling(tiny_trace, k=2, layers=[2])
