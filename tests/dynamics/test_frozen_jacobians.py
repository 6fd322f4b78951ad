"""Frozen Jacobians against blocks written by hand with explicit detaches, and by the
identity `Σ_s J⁺_{ts} x_s + b_t = f(X)_t`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
import tl_coupling as tlc
from linear_blocks import affine_trace
from random_matrices import gaussian
from tl_coupling.blocks import DerivativeError, FrozenFunction
from tl_coupling.dynamics import frozen_bias, frozen_jacobian

pytestmark = pytest.mark.both_lines

LAST = len(tiny.TOKENS) - 1
D_HEAD = 8


def assert_close(value: Tensor, expected: Tensor, rel: float = 5e-6) -> None:
    assert float((value - expected).norm()) <= rel * max(float(expected.norm()), 0.1)


# Blocks by hand: of their own weights, the stream, and the pattern that the model's own
# attention returned. What they add is f(X).


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt().detach() * norm.weight + norm.bias


def rms_norm(norm: Any, x: Tensor, offset: float = 0.0) -> Tensor:
    variance = x.square().mean(-1, keepdim=True)
    return x / (variance + 1e-6).sqrt().detach() * (offset + norm.weight)


def ratio(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return x * (activation(x) / x).detach()


def mixed(values: Tensor, pattern: Tensor) -> Tensor:
    """Mix rows by each head's pattern; neighbouring heads share values."""
    n_heads, n_pos, _ = pattern.shape
    heads = values.reshape(n_pos, -1, D_HEAD).transpose(0, 1)
    heads = heads.repeat_interleave(n_heads // len(heads), dim=0)
    return (pattern @ heads).transpose(0, 1).reshape(n_pos, -1)


def gated(mlp: Any, x: Tensor) -> Tensor:
    gate = mlp.act_fn(mlp.gate_proj(x)).detach()
    return mlp.down_proj(gate * mlp.up_proj(x))


def llama(block: Any, X: Tensor, pattern: Tensor) -> Tensor:
    values = block.self_attn.v_proj(rms_norm(block.input_layernorm, X))
    attention = block.self_attn.o_proj(mixed(values, pattern))
    H = X + attention
    return attention + gated(block.mlp, rms_norm(block.post_attention_layernorm, H))


def gemma2(block: Any, X: Tensor, pattern: Tensor) -> Tensor:
    values = block.self_attn.v_proj(rms_norm(block.input_layernorm, X, 1.0))
    attention = block.self_attn.o_proj(mixed(values, pattern))
    attention = rms_norm(block.post_attention_layernorm, attention, 1.0)
    normalised = rms_norm(block.pre_feedforward_layernorm, X + attention, 1.0)
    after = gated(block.mlp, normalised)
    return attention + rms_norm(block.post_feedforward_layernorm, after, 1.0)


def gpt2(block: Any, X: Tensor, pattern: Tensor) -> Tensor:
    values = block.attn.c_attn(layer_norm(block.ln_1, X))[..., -tiny.D_MODEL :]
    attention = block.attn.c_proj(mixed(values, pattern))
    pre = block.mlp.c_fc(layer_norm(block.ln_2, X + attention))
    return attention + block.mlp.c_proj(ratio(block.mlp.act, pre))


def gpt_neox(block: Any, X: Tensor, pattern: Tensor) -> Tensor:
    qkv = block.attention.query_key_value(layer_norm(block.input_layernorm, X))
    values = qkv.reshape(len(X), -1, 3, D_HEAD)[:, :, 2].reshape(len(X), -1)
    pre = block.mlp.dense_h_to_4h(layer_norm(block.post_attention_layernorm, X))
    mlp = block.mlp.dense_4h_to_h(ratio(block.mlp.act, pre))
    return block.attention.dense(mixed(values, pattern)) + mlp


BY_HAND = {"llama": llama, "gemma2": gemma2, "gpt2": gpt2, "gpt_neox": gpt_neox}


@pytest.mark.parametrize("architecture", BY_HAND)
def test_frozen_jacobians_are_those_of_a_block_with_explicit_detaches(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model: Any = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    hf_model.set_attn_implementation("eager")
    recorded = hf_model(torch.tensor([tiny.TOKENS]), output_attentions=True)
    pattern = recorded.attentions[1][0].detach()
    block = tiny.layers_of(hf_model)[1]
    X = trace.residual[1].clone().requires_grad_()
    added = BY_HAND[architecture](block, X, pattern)
    assert_close(added.detach(), trace.residual[2] - trace.residual[1], 1e-5)
    for t1, t2 in [(LAST, LAST), (4, LAST), (0, 4)]:
        rows = [
            torch.autograd.grad(entry, X, retain_graph=True)[0][t1]
            for entry in added[t2]
        ]
        J = frozen_jacobian(trace, 1, input_position=t1, output_position=t2)
        assert_close(J, torch.stack(rows))


IDENTITY = [
    *("gpt2", "gpt_neox", "llama", "gemma2", "qwen3", "olmo2", "mixtral", "gpt_oss"),
    *("nemotron", "rwkv"),
]


@pytest.mark.parametrize("architecture", IDENTITY)
def test_frozen_jacobians_of_all_tokens_and_the_bias_give_the_step(
    architecture: str, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    total = frozen_bias(trace, 1, 3)
    block = FrozenFunction.from_block(trace.blocks[1])
    J, _ = block.jacobians(range(4), 3)
    for J_s, x in zip(J, trace.residual[1, :4], strict=True):
        total = total + J_s @ x
    assert_close(total, trace.residual[2, 3] - trace.residual[1, 3])
    later = frozen_jacobian(trace, 1, input_position=4, output_position=3)
    assert torch.equal(later, torch.zeros_like(later))


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.parametrize("function", ["block", "branches"])
def test_the_identity_holds_where_the_block_normalises_the_stream(
    function: Any, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model("bert"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    with pytest.warns(UserWarning, match="normalises the stream"):
        total = frozen_bias(trace, 0, 3, function=function)
    block = trace.blocks[0]
    block = block.branches() if function == "branches" else block
    J, _ = FrozenFunction.from_block(block).jacobians(range(LAST + 1), 3)
    for J_s, x in zip(J, trace.residual[0], strict=True):
        total = total + J_s @ x
    assert_close(total, block.step[3], 1e-5)
    expected = frozen_jacobian(
        trace, 0, input_position=LAST, output_position=3, function=function
    )
    assert_close(J[-1], expected)
    assert expected.any()


@pytest.mark.filterwarnings("ignore:.*token_local_recorded failed")
@tiny.needs_hooked_transformer
@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-14m"])
def test_both_backends_have_the_same_frozen_jacobians(name: str, hub: Path) -> None:
    J = {}
    for backend in ("bridge", "hooked"):
        trace = tlc.trace(tlc.load_model(name, backend=backend), tiny.TOKENS)
        J[backend] = [frozen_jacobian(trace, 1, input_position=s) for s in (4, LAST)]
    assert_close(J["hooked"][0], J["bridge"][0], 1e-5)
    assert_close(J["hooked"][1], J["bridge"][1], 1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_every_way_gives_the_same(architecture: str, tokenizer_folder: Path) -> None:
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    block = FrozenFunction.from_block(trace.blocks[1])
    expected, cheapest = block.jacobian(LAST, LAST)
    assert cheapest == "token_local_recorded"
    with block.evaluation():
        for path, evaluate in block.ways([LAST], LAST):
            if path == "token_local_recorded":
                continue
            assert_close(evaluate()[1][0], expected)
        several = [
            dict(block.ways([2, LAST], LAST))[path]()[1]
            for path in ("query_local_recorded", "query_local", "full_sequence")
        ]
    for J_2, J_last in several:
        assert_close(J_2, several[0][0])
        assert_close(J_last, expected)


def test_a_frozen_function_is_affine_and_leaves_the_model_alone(
    tokenizer_folder: Path,
) -> None:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    before = tlc.block_jacobian(trace, 1)
    required = [p.requires_grad for p in model.parameters()]
    block = FrozenFunction.from_block(trace.blocks[1])
    X = trace.residual[1]
    zeros = torch.zeros_like(X)
    assert_close(block.affine(X), block.step, 1e-5)
    # Llama has no biases.
    assert_close(block.affine(zeros), zeros)
    V = gaussian(*X.shape, seed=1).to(X)
    assert_close(block.affine(X + 8 * V) - block.affine(X), 8 * block.affine(V), 1e-5)
    J = frozen_jacobian(trace, 1, input_position=3)
    moved = zeros.clone()
    moved[3] = V[3]
    assert_close(block.affine(moved)[-1], J @ V[3], 1e-5)
    assert [p.requires_grad for p in model.parameters()] == required
    assert torch.equal(tlc.block_jacobian(trace, 1), before)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_s_own_encoder(batch_first: bool) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        16, 2, 24, norm_first=True, batch_first=batch_first
    ).eval()
    X = gaussian(1, 5, 16).float()
    trace = tlc.trace_modules(
        [block], lambda: block(X if batch_first else X.transpose(0, 1))
    )
    total = frozen_bias(trace, 0, 2)
    J, _ = FrozenFunction.from_block(trace.blocks[0]).jacobians(range(5), 2)
    for J_s, x in zip(J, trace.residual[0], strict=True):
        total = total + J_s @ x
    assert_close(total, trace.blocks[0].step[2], 1e-5)
    # It reads both ways.
    assert J[4].any()


class Network(nn.Module):
    """One block, `Y = X + f(X)`."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, X: Tensor) -> Tensor:
        return X + self.f(X)


def network_trace(f: Callable[[Tensor], Tensor]) -> tlc.Trace:
    block = Network(f)
    return tlc.trace_modules([block], lambda: block(gaussian(1, 3, 6, seed=7)))


W_IN, W_OUT = gaussian(6, 8, seed=1), gaussian(8, 6, seed=2)


def test_where_nothing_is_held_constant_it_is_the_jacobian() -> None:
    A, b = gaussian(2, 6, 6, seed=3), gaussian(2, 6, seed=4)
    trace = affine_trace(A, b)
    assert_close(frozen_jacobian(trace, 1), A[1], 1e-12)
    assert_close(frozen_bias(trace, 1), b[1], 1e-12)
    # So it is for ReLU, whose slope is its ratio.
    trace = network_trace(lambda X: torch.relu(X @ W_IN) @ W_OUT)
    assert_close(frozen_jacobian(trace, 0), tlc.block_jacobian(trace, 0), 1e-12)
    assert not frozen_bias(trace, 0).any()


def test_an_activation_of_bias_alone_is_in_the_bias() -> None:
    b = gaussian(8, 1, seed=5)[:, 0]
    trace = network_trace(lambda X: torch.tanh(X @ W_IN + b) @ W_OUT)
    pre = trace.residual[0, -1] @ W_IN + b
    ratios = torch.tanh(pre) / pre
    assert_close(frozen_jacobian(trace, 0), ((W_IN * ratios) @ W_OUT).mT, 1e-12)
    assert_close(frozen_bias(trace, 0), (b * ratios) @ W_OUT, 1e-12)


NOT_AFFINE: dict[str, Callable[[Tensor], Tensor]] = {
    "a bilinear MLP": lambda X: ((X @ W_IN) * (X @ W_IN.flip(0))) @ W_OUT,
    "two gates": lambda X: (
        (functional.silu(X @ W_IN) * torch.tanh(X @ W_IN.flip(0))) @ W_OUT
    ),
    "attention without softmax": lambda X: X @ X.mT @ X,
    "an unknown function": lambda X: torch.sin(X @ W_IN) @ W_OUT,
    "a maximum": lambda X: torch.cummax(X @ W_IN, 1).values.cumprod(1) @ W_OUT,
}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_what_is_not_affine_is_refused_in_a_sentence(name: str) -> None:
    trace = network_trace(NOT_AFFINE[name])
    assert tlc.block_jacobian(trace, 0).any()
    with pytest.raises(DerivativeError, match="block 0 has no frozen Jacobian: with"):
        frozen_jacobian(trace, 0)
    with pytest.raises(DerivativeError, match="not an affine function of the stream"):
        frozen_bias(trace, 0)


@pytest.mark.parametrize("architecture", ["mamba", "bloom"])
def test_architectures_that_are_refused(
    architecture: str, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    with pytest.raises(DerivativeError, match="block 1 has no frozen Jacobian"):
        frozen_jacobian(trace, 1)
