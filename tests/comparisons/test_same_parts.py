"""Coupling of one part with the same part of other blocks."""

import warnings

import numpy as np
import pytest
import torch

import tl_coupling as tlc
from tl_coupling.comparisons import part_coupling


def test_matrices_are_those_of_the_parts_own_singular_vectors(tiny_trace):
    result = part_coupling(tiny_trace, "mlp_out", k=5)
    M = [
        tlc.block_parts(tiny_trace, layer, function="branches")[f"{layer}_mlp_out"]
        for layer in range(2)
    ]
    U, _, Vh = np.linalg.svd(M[1].double().numpy())
    A = U[:, :5].T @ M[0].double().numpy() @ Vh[:5].T
    # Signs of singular vectors cancel on the diagonal, and in sizes off it.
    assert np.allclose(np.diag(A), result.matrices[0, 1].diagonal(), atol=1e-5)
    assert np.allclose(np.abs(A), result.matrices[0, 1].abs(), atol=1e-5)


def test_attention_is_the_sum_of_its_heads(tiny_trace):
    result = part_coupling(tiny_trace, "attn_out", k=3)
    parts = tlc.block_parts(tiny_trace, 1, function="branches")
    heads = torch.stack([parts[f"L1H{head}"] for head in range(4)]).sum(0)
    assert float(result.frobenius_norms[1]) == pytest.approx(float(heads.norm()))
    one_head = part_coupling(tiny_trace, "H2", k=3)
    assert float(one_head.frobenius_norms[1]) == pytest.approx(
        float(parts["L1H2"].norm())
    )


def test_a_part_that_a_block_does_not_have_is_named(tiny_trace):
    with pytest.raises(ValueError, match="got 'H9': layer 0 has attn_out, H0, H1"):
        part_coupling(tiny_trace, "H9", k=2)


def test_vectors_beyond_the_rank_of_a_head_are_said_to_be_arbitrary(tiny_trace):
    """A head of 32 dimensions has 8 singular values: at every k above they are."""
    for k in (32, 31, 9):
        with pytest.warns(UserWarning, match="arbitrary"):
            part_coupling(tiny_trace, "H2", k=k)
    with pytest.warns(
        UserWarning, match=r"k = 32 is above the rank of layer 0, layer 1"
    ):
        part_coupling(tiny_trace, "attn_out", k=32)


def test_what_has_all_its_singular_values_is_not_warned_of(tiny_trace):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part_coupling(tiny_trace, "H2", k=8)
        part_coupling(tiny_trace, "mlp_out", k=32)
        tlc.depth_coupling(tiny_trace, k=32)
