"""Cross-token influence, against singular values of Jacobians that plain autograd gives
over whole sequences.
"""

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from pair_jacobians import all_jacobians

pytestmark = pytest.mark.both_lines

N = len(tiny.TOKENS)


@pytest.fixture(scope="module")
def llama(tokenizer_folder):
    hf_model = tiny.huggingface_model("llama", dtype=torch.float64)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    return trace, [
        all_jacobians(hf_model, layer, tiny.TOKENS)
        for layer in tiny.layers_of(hf_model)
    ]


def test_influence(llama):
    trace, J = llama
    result = tlc.cross_token_influence(trace, 5, layers=[1, 0])
    assert (result.layers, result.source_positions, result.output_position) == (
        (1, 0),
        tuple(range(6)),
        5,
    )
    for row, layer in enumerate(result.layers):
        for t1 in result.source_positions:
            s = np.linalg.svd(J[layer][t1, 5], compute_uv=False)
            # HuggingFace normalises in float32, which leaves 1e-9 where a J between two
            # tokens, through keys and values, has zeros.
            p = s[s > 1e-8 * s[0]] / s.sum()
            expected = [
                np.sqrt((s**2).sum()),
                s[0],
                (s**2).sum() ** 2 / (s**4).sum(),
                np.exp(-(p * np.log(p)).sum()),
            ]
            values = [
                result.frobenius_norm,
                result.largest_singular_value,
                result.participation_ratio,
                result.effective_rank,
            ]
            # HuggingFace normalises in float32 (units of 1.2e-7), whatever the model is in.
            assert [float(value[row, t1]) for value in values] == pytest.approx(
                expected, rel=3e-7
            )


def test_influence_as_a_dataset(llama, tmp_path):
    import xarray

    result = tlc.cross_token_influence(llama[0], layers=[1])
    path = result.save(tmp_path / "influence.nc")
    with xarray.open_dataset(path) as data:
        assert data["effective_rank"].dims == ("layer", "source_position")
        np.testing.assert_array_equal(data["frobenius_norm"], result.frobenius_norm)
        assert data.attrs["output_position"] == N - 1
    loaded = tlc.influence.Influence.load(path)
    assert repr(loaded) == repr(result)
    for name in tlc.influence.INFLUENCE_MEASURES:
        assert torch.equal(getattr(loaded, name), getattr(result, name))
    assert (loaded.layers, loaded.source_positions, loaded.output_position) == (
        (1,),
        tuple(range(N)),
        N - 1,
    )
    assert loaded.provenance == result.provenance
