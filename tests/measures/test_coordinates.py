"""Coupling without multiples of the identity, and in a metric: closed forms, and Jacobians
that are moved by hand.
"""

import types

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_coupling as tlc
from tl_coupling.measures import in_metric, random_rotations, stream_metric

K = 4
D = 8


@pytest.fixture
def J() -> Tensor:
    return torch.randn(5, D, D, generator=torch.Generator().manual_seed(0)).double()


def a_metric(seed: int = 1) -> Tensor:
    root = torch.randn(D, D, generator=torch.Generator().manual_seed(seed)).double()
    return root @ root.mT + torch.eye(D, dtype=torch.float64)


def coupling(J: Tensor) -> Tensor:
    return tlc.comparisons.jacobian_coupling(J, K).coupling()


def test_a_multiple_of_the_identity_is_taken_away(J):
    rest = J - J.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(D)
    multiples = torch.tensor([3.0, -2.0, 0.5, 0.0, 100.0], dtype=torch.float64)
    planted = rest + multiples[:, None, None] * torch.eye(D)
    torch.testing.assert_close(tlc.measures.without_identity(planted), rest)
    # The nearest in the Frobenius norm: any other multiple leaves more.
    norm = torch.linalg.matrix_norm
    for step in (-1e-3, 1e-3):
        assert (norm(rest + step * torch.eye(D)) > norm(rest)).all()


def test_a_diagonal_metric_scales_entries(J):
    lengths = torch.linspace(0.5, 4, D).double()
    expected = J * lengths[:, None] / lengths
    moved = in_metric(J, torch.diag(lengths.square()))
    torch.testing.assert_close(moved, expected)
    # Its scale does not matter.
    torch.testing.assert_close(in_metric(J, 7 * torch.diag(lengths**2)), expected)


def test_a_metric_turns_with_the_basis(J):
    """`Q J Qᵀ` in `Q M Qᵀ` is coupled as J in M; of M = I nothing changes at all."""
    generator = torch.Generator().manual_seed(3)
    Q = random_rotations(D, generator=generator)
    M = a_metric()
    torch.testing.assert_close(
        coupling(in_metric(Q @ J @ Q.mT, Q @ M @ Q.mT)), coupling(in_metric(J, M))
    )
    assert torch.equal(in_metric(J, torch.eye(D)), J)


def test_maps_that_are_similar_in_one_basis_are_found_in_its_metric():
    """Planted: `T⁻¹ D_l T` with diagonal D_l are coupled fully in `TᵀT`, and less in I."""
    generator = torch.Generator().manual_seed(4)
    T = torch.randn(D, D, generator=generator).double()
    diagonals = torch.rand(5, D, generator=generator).double() + 0.1
    J = torch.linalg.inv(T) @ torch.diag_embed(diagonals) @ T
    found = coupling(in_metric(J, T.mT @ T))
    torch.testing.assert_close(found, torch.ones_like(found), atol=1e-6, rtol=0)
    assert coupling(J).fill_diagonal_(0).mean() < 0.7


def test_the_stream_is_isotropic_in_its_metric(tiny_trace):
    """After `M^{1/2}` the second moment is the identity, by numpy."""
    traces = [
        tlc.trace(tiny_trace.model, f"w{i} w{i + 1} w{2 * i} w3") for i in range(20)
    ]
    rows = np.concatenate([t.residual.flatten(0, 1).double().numpy() for t in traces])
    d = rows.shape[1]
    moment = rows.T @ rows
    moment *= d / np.trace(moment)
    M = stream_metric(traces, shrinkage=0).numpy()
    np.testing.assert_allclose(M @ moment, np.eye(d), atol=1e-6)
    shrunk = stream_metric(iter(traces), shrinkage=0.1).numpy()
    expected = np.linalg.inv(0.9 * moment + 0.1 * np.eye(d))
    np.testing.assert_allclose(shrunk, expected, rtol=1e-8, atol=1e-10)


def test_depth_coupling_is_that_of_moved_jacobians(tiny_trace):
    J = tlc.block_jacobians(tiny_trace)
    M = stream_metric([tiny_trace])
    moved = tlc.depth_coupling(tiny_trace, K, metric=M)
    torch.testing.assert_close(moved.coupling(), coupling(in_metric(J, M)))
    rest = tlc.depth_coupling(tiny_trace, K, without="identity")
    by_hand = J - J.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(
        J.shape[-1]
    )
    torch.testing.assert_close(rest.coupling(), coupling(by_hand))
    both = tlc.depth_coupling(tiny_trace, K, without="identity", metric=M)
    torch.testing.assert_close(both.coupling(), coupling(in_metric(by_hand, M)))
    row = tlc.depth_coupling(tiny_trace, K, rows=[1], metric=M)
    torch.testing.assert_close(row.coupling()[0], moved.coupling()[1])
    other = tlc.trace(tiny_trace.model, tiny_trace.tokens[:4])
    other_map = tlc.depth_coupling(other, K, without="identity", metric=M)
    mean = tlc.mean_depth_coupling([tiny_trace, other], K, metric=M, without="identity")
    expected = (both.coupling() + other_map.coupling()) / 2
    torch.testing.assert_close(mean.coupling(), expected)


def test_the_metric_of_today_changes_no_bit(tiny_trace):
    plain = tlc.depth_coupling(tiny_trace, K)
    in_identity = tlc.depth_coupling(
        tiny_trace, K, metric=torch.eye(tiny_trace.d_model)
    )
    assert torch.equal(in_identity.matrices, plain.matrices)
    assert not {"without", "metric"} & set(plain.provenance)


def test_results_say_it_and_do_not_mix(tiny_trace, tmp_path):
    rest = tlc.depth_coupling(tiny_trace, K, without="identity")
    loaded = tlc.CouplingMap.load(rest.save(tmp_path / "rest.nc"))
    assert loaded.provenance["without"] == "identity"
    with pytest.raises(ValueError, match="without"):
        tlc.mean_of_maps([rest, tlc.depth_coupling(tiny_trace, K)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_singular_metric_is_refused_whatever_the_sign_of_its_rounding(dtype):
    """Of rank d − 1: its smallest eigenvalue is rounding, above 0 in about every other."""
    J = torch.eye(32).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        root = torch.randn(32, 31, generator=generator).double()
        with pytest.raises(ValueError, match="positive definite"):
            in_metric(J, (root @ root.mT).to(dtype))


def test_axes_of_very_different_lengths_are_a_metric(J):
    lengths = torch.logspace(-5, 5, D).double()
    expected = J * lengths[:, None] / lengths
    moved = in_metric(J, torch.diag(lengths.square()).float())
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=0)


def test_a_map_takes_a_metric_that_requires_a_gradient(tiny_trace):
    M = stream_metric([tiny_trace])
    moved = tlc.depth_coupling(tiny_trace, K, metric=M.clone().requires_grad_())
    expected = tlc.depth_coupling(tiny_trace, K, metric=M)
    assert torch.equal(moved.matrices, expected.matrices)
    assert moved.provenance["metric"] == expected.provenance["metric"]


def test_bad_metrics_are_refused(tiny_trace, J):
    cases = [
        (torch.eye(D + 1), "d_model = 8"),
        (torch.triu(torch.ones(D, D)), "symmetric"),
        (-torch.eye(D), "positive definite"),
    ]
    for metric, message in cases:
        with pytest.raises(ValueError, match=message):
            in_metric(J, metric)
    with pytest.raises(ValueError, match="as wide as the model"):
        tlc.depth_coupling(tiny_trace, K, metric=torch.eye(D + 1))
    with pytest.raises(ValueError, match="is empty"):
        stream_metric([])
    with pytest.raises(TypeError, match="traced prompts"):
        stream_metric(["text"])
    with pytest.raises(TypeError, match="got Trace: a list of traced prompts"):
        stream_metric(tiny_trace)
    with pytest.raises(ValueError, match="shrinkage"):
        stream_metric([tiny_trace], shrinkage=2)
    with pytest.raises(ValueError, match="no extent"):
        stream_metric(
            [tlc.trace(tiny_trace.model, "w1", prepend_bos=False)], shrinkage=0
        )


@pytest.mark.parametrize("scale", [0.0, 1e-200, 1e200])
def test_a_stream_without_a_size_has_no_metric(scale):
    """Zeros, and squares that vanish or overflow: decomposed, they were NaN."""
    stream = scale * torch.ones(3, 9, 4).double()
    with pytest.raises(ValueError, match="whose squares have a sum, above 0") as error:
        stream_metric([types.SimpleNamespace(residual=stream)])
    assert "\n" not in str(error.value)
