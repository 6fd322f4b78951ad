"""Block Jacobians of every architecture against plain autograd over the whole
HuggingFace model.
"""

from pathlib import Path

import pytest
import torch

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

FIRST, MIDDLE, LAST = 0, 4, 7
# A window of 4 hides position 2 from position 6: there the sliding-window models'
# Jacobian is exactly zero.
PAIRS = [
    (FIRST, FIRST),
    (MIDDLE, MIDDLE),
    (LAST, LAST),
    (MIDDLE, LAST),
    (FIRST, LAST),
    (2, 6),
]
# Rows that meet in a state.
NOT_RECORDED = {"mamba", "rwkv"}
# Every token sees every other.
NOT_CAUSAL = {"bert"}


def assert_close(J: torch.Tensor, expected: torch.Tensor, rel: float = 5e-6) -> None:
    assert float((J - expected).norm()) <= rel * max(float(expected.norm()), 0.1)


@pytest.mark.parametrize("architecture", tiny.in_tiers(tiny.CONFIGS))
def test_jacobians_and_products_equal_autograd_over_the_whole_model(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    paths = set()
    for layer in range(tiny.N_LAYERS):
        for (t1, t2), expected in tiny.oracle_jacobians(
            hf_model, tiny.TOKENS, layer, PAIRS
        ).items():
            J, path = trace.blocks[layer].jacobian(t1, t2)
            paths.add(path)
            assert_close(J, expected)
            v = torch.randn(tiny.D_MODEL, generator=torch.Generator().manual_seed(t2))
            assert_close(
                tlc.block_jvp(trace, layer, v, input_position=t1, output_position=t2),
                expected @ v,
                1e-5,
            )
            assert_close(
                tlc.block_vjp(trace, layer, v, input_position=t1, output_position=t2),
                v @ expected,
                1e-5,
            )
        assert_close(
            trace.blocks[layer].full_sequence(3, 3)(trace.blocks[layer].X[3]),
            trace.residual[layer + 1, 3] - trace.residual[layer, 3],
            1e-5,
        )
    assert ("token_local_recorded" in paths) == (architecture not in NOT_RECORDED)


@pytest.mark.parametrize(
    "architecture", tiny.in_tiers(sorted(tiny.CONFIGS.keys() - NOT_CAUSAL))
)
def test_a_later_token_reaches_no_earlier_one(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    J = tlc.block_jacobian(trace, 1, input_position=5, output_position=3)
    assert torch.equal(J, torch.zeros_like(J))
    assert not tiny.oracle_jacobian(hf_model, tiny.TOKENS, 1, 5, 3).any()


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_finite_differences_in_float64(
    architecture: str, tokenizer_folder: Path
) -> None:
    """For two architectures whose every operation really is in float64 (HuggingFace's
    RMSNorm, for one, is not).
    """
    hf_model = tiny.huggingface_model(architecture, dtype=torch.float64)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    assert trace.residual.dtype == torch.float64
    step = 1e-5
    for t1, t2 in PAIRS:
        f = trace.blocks[1]
        columns = []
        for i in range(tiny.D_MODEL):
            nudge = torch.zeros_like(f.X)
            nudge[t1, i] = step
            columns.append((f(f.X + nudge)[t2] - f(f.X - nudge)[t2]) / (2 * step))
        J = tlc.block_jacobian(trace, 1, input_position=t1, output_position=t2)
        assert J.dtype == torch.float64
        assert_close(J, torch.stack(columns, dim=1), 1e-8)


@tiny.needs_hooked_transformer
@pytest.mark.parametrize(
    ("architecture", "name"), [("gpt2", "gpt2"), ("gpt_neox", "EleutherAI/pythia-14m")]
)
def test_both_backends_give_the_same_jacobians(
    architecture: str, name: str, hub: Path
) -> None:
    models = {
        backend: tlc.load_model(name, backend=backend)
        for backend in ("bridge", "hooked")
    }
    traces = {
        backend: tlc.trace(model, tiny.TOKENS) for backend, model in models.items()
    }
    hf_model = tiny.huggingface_model(architecture)
    for layer in range(tiny.N_LAYERS):
        for t1, t2 in PAIRS:
            expected = tiny.oracle_jacobian(hf_model, tiny.TOKENS, layer, t1, t2)
            J = {b: t.blocks[layer].jacobian(t1, t2) for b, t in traces.items()}
            assert_close(J["bridge"][0], J["hooked"][0], 1e-5)
            assert_close(J["hooked"][0], expected, 1e-5)
            assert J["hooked"][1] != "full_sequence"
    coupling = {b: tlc.depth_coupling(t, k=8).coupling() for b, t in traces.items()}
    torch.testing.assert_close(
        coupling["bridge"], coupling["hooked"], rtol=0, atol=1e-5
    )


def test_a_bfloat16_model_is_linearised_in_float32_and_left_as_it_was(
    tokenizer_folder: Path,
) -> None:
    """At the residual stream that the bfloat16 model has, with its weights in
    float32.
    """
    hf_model = tiny.huggingface_model("gpt2", dtype=torch.bfloat16)
    model = tiny.bridge(hf_model, tokenizer_folder)
    weights_before = {name: p.clone() for name, p in model.named_parameters()}
    trace = tlc.trace(model, tiny.TOKENS)
    J, path = trace.blocks[1].jacobian(LAST, LAST)
    assert (J.dtype, path) == (torch.float32, "token_local_recorded")
    after = dict(model.named_parameters())
    assert all(
        p.dtype == torch.bfloat16 and torch.equal(p, weights_before[name])
        for name, p in after.items()
    )

    X = trace.residual[1][None]
    stream = tiny.layers_of(upcast := hf_model.float())[1].register_forward_pre_hook(
        lambda _, args, kwargs: ((X, *args[1:]), kwargs), with_kwargs=True
    )
    expected = tiny.oracle_jacobian(upcast, tiny.TOKENS, 1, LAST, LAST)
    stream.remove()
    assert_close(J, expected, 1e-5)


def test_float64_on_request_agrees_with_float32(tokenizer_folder: Path) -> None:
    model = tiny.bridge(tiny.huggingface_model("gpt2"), tokenizer_folder)
    J32 = tlc.block_jacobian(tlc.trace(model, tiny.TOKENS), 1)
    J64 = tlc.block_jacobian(tlc.trace(model, tiny.TOKENS, dtype=torch.float64), 1)
    assert (J32.dtype, J64.dtype) == (torch.float32, torch.float64)
    assert_close(J32.double(), J64, 1e-5)
    assert not torch.equal(J32.double(), J64)


def test_a_block_that_is_wrong_when_called_on_one_row_falls_back_to_the_full_sequence(
    tokenizer_folder: Path,
) -> None:
    """A block that scales its output by the number of rows it is given: token-local
    values and products are wrong.
    """
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    model.blocks[1].mlp.register_forward_hook(
        lambda _, args, out: out * args[0].shape[1]
    )
    trace = tlc.trace(model, tiny.TOKENS)
    J, path = trace.blocks[1].jacobian(LAST, LAST)
    assert path == "full_sequence"
    assert trace.blocks[0].jacobian(LAST, LAST)[1] == "token_local_recorded"
    v = torch.ones(tiny.D_MODEL)
    assert_close(tlc.block_vjp(trace, 1, v), v @ J, 1e-5)
    assert_close(tlc.block_jvp(trace, 1, v), J @ v, 1e-5)
    result = tlc.depth_coupling(trace, k=4)
    assert result.provenance["paths"] == {
        "layer 0, token 7": "token_local_recorded",
        "layer 1, token 7": "full_sequence",
    }
