"""Blocks that normalise the stream itself, against what their residual branches add,
written out by hand.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import model_folders
import tiny
import tl_coupling as tlc
from vision_models import NETWORKS, Network, bert, pixels, torch_encoder, vit

D_MODEL = 8
TOLERANCE = 1e-5
# Norms on the branch, before it, behind it, or both; parallel branches; a stream that
# is scaled; states.
PRE_NORM = sorted(tiny.CONFIGS.keys() - {"bert", "openai-gpt", "rwkv"})


def attention(
    X: Tensor, q: nn.Linear, k: nn.Linear, v: nn.Linear, n_heads: int, causal: bool
) -> Tensor:
    """What the heads give, side by side."""
    Q, K, V = (
        rows(X).unflatten(-1, (n_heads, -1)).transpose(0, 1) for rows in (q, k, v)
    )
    scores = Q @ K.mT / Q.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    return (scores.softmax(-1) @ V).transpose(0, 1).flatten(1)


def branches_of_bert(layer: Any, X: Tensor) -> Tensor:
    own = layer.attention.self
    z = attention(
        X, own.query, own.key, own.value, own.num_attention_heads, causal=False
    )
    attended = layer.attention.output.dense(z)
    H = layer.attention.output.LayerNorm(X + attended)
    return attended + layer.output.dense(
        nn.functional.gelu(layer.intermediate.dense(H))
    )


def branches_of_opt(layer: Any, X: Tensor) -> Tensor:
    own = layer.self_attn
    attended = own.out_proj(
        attention(X, own.q_proj, own.k_proj, own.v_proj, own.num_heads, causal=True)
    )
    H = layer.self_attn_layer_norm(X + attended)
    return attended + layer.fc2(layer.fc1(H).relu())


def branches_of_torch(layer: Any, X: Tensor) -> Tensor:
    attended = layer.self_attn(X[None], X[None], X[None], need_weights=False)[0][0]
    H = layer.norm1(X + attended)
    return attended + layer.linear2(layer.linear1(H).relu())


def assert_every_pair(
    trace: tlc.Trace, layer: int, branches: Callable[[Tensor], Tensor]
) -> set[str]:
    """That each `J_{t1 t2}` of the branches is the derivative of what was written by
    hand; the ways that were taken.
    """
    X = trace.residual[layer]
    expected = torch.func.jacrev(branches)(X)
    block, ways = trace.blocks[layer].branches(), set()
    torch.testing.assert_close(block(X), branches(X).detach(), atol=1e-5, rtol=1e-4)
    for t1, t2 in itertools.product(range(trace.n_pos), repeat=2):
        J, way = block.jacobian(t1, t2)
        assert (J - expected[t2, :, t1]).norm() <= TOLERANCE * expected[
            t2, :, t2
        ].norm()
        ways.add(way)
    t2, t1s = trace.n_pos - 1, list(range(trace.n_pos))
    for t1, J in zip(t1s, block.jacobians(t1s, t2)[0], strict=True):
        assert (J - expected[t2, :, t1]).norm() <= TOLERANCE * expected[
            t2, :, t2
        ].norm()
    return ways


def traced(network: Network) -> tlc.Trace:
    with pytest.warns(
        UserWarning,
        match=r"layer 0: the block normalises the stream itself \(as post-norm does\)",
    ):
        return tlc.trace_modules(network.blocks, network.run)


def test_every_pair_of_a_bert() -> None:
    network = bert()
    trace = traced(network)
    for layer, block in enumerate(network.blocks):
        ways = assert_every_pair(
            trace, layer, lambda X, block=block: branches_of_bert(block, X)
        )
        assert ways == {"token_local_recorded"}


def test_every_pair_of_a_torch_encoder_that_normalises_after_adding() -> None:
    network = torch_encoder(norm_first=False)
    trace = traced(network)
    for layer, block in enumerate(network.blocks):
        assert_every_pair(
            trace, layer, lambda X, block=block: branches_of_torch(block, X)
        )


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
def test_every_pair_of_a_post_norm_opt_on_a_bridge(tokenizer_folder: Path) -> None:
    original = tiny.huggingface_model("opt", do_layer_norm_before=False)
    trace = tlc.trace(tiny.bridge(original, tokenizer_folder), tiny.TOKENS)
    for layer, block in enumerate(tiny.layers_of(original)):
        assert_every_pair(
            trace, layer, lambda X, block=block: branches_of_opt(block, X)
        )
    assert trace.provenance["normalising_layers"] == [0, 1]
    of_layer_0, _ = trace.provenance["remarks"]
    assert "block(X) − X holds −I" in of_layer_0
    # The chain rule needs the whole block.
    torch.testing.assert_close(
        trace.residual[0] + trace.blocks[0](trace.residual[0]), trace.residual[1]
    )


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bridge_gives_what_the_modules_give(
    dtype: torch.dtype, tokenizer_folder: Path
) -> None:
    original = tiny.huggingface_model("bert").to(dtype)
    ids = torch.tensor([tiny.TOKENS])
    through_bridge = tlc.trace(tiny.bridge(original, tokenizer_folder), ids)
    through_modules = tlc.trace_modules(
        list(original.bert.encoder.layer), lambda: original(ids)
    )
    ours, theirs = (
        tlc.depth_coupling(trace, k=4) for trace in (through_bridge, through_modules)
    )
    torch.testing.assert_close(
        ours.singular_values, theirs.singular_values, atol=1e-4, rtol=1e-3
    )
    torch.testing.assert_close(ours.coupling(), theirs.coupling(), atol=1e-3, rtol=1e-3)
    for result in (ours, theirs):
        assert result.provenance["normalising_layers"] == [0, 1]
        assert (
            sum("normalises" in remark for remark in result.provenance["remarks"]) == 2
        )


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
def test_a_streamed_bert_is_the_resident_one(tmp_path: Path) -> None:
    model_folders.save("bert", tmp_path)
    maps = [
        tlc.depth_coupling(
            tlc.trace(tlc.load_model(str(tmp_path), memory=memory), "w1 w2 w3"), k=4
        )
        for memory in ("resident", "stream")
    ]
    torch.testing.assert_close(
        maps[1].matrices.abs(), maps[0].matrices.abs(), atol=1e-5, rtol=1e-4
    )
    assert (
        maps[1].provenance["normalising_layers"]
        == maps[0].provenance["normalising_layers"]
        == [0, 1]
    )


class NormalisesFirst(nn.Module):
    """What several small ViT repositories do: `x = norm(x); x = x + f(x)`."""

    def __init__(self, in_place: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.norm_1, self.f, self.g = (
            nn.LayerNorm(D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
        )
        self.norm_2 = self.norm_1 if shared else nn.RMSNorm(D_MODEL)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in ((self.norm_1, self.f), (self.norm_2, self.g)):
            x = norm(x)
            if self.in_place:
                x += branch(x).tanh()
            else:
                x = x + branch(x).tanh()
        return x


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"shared": True}])
def test_blocks_that_normalise_before_adding_to_what_they_normalised(
    options: dict[str, bool],
) -> None:
    blocks = [NormalisesFirst(**options) for _ in range(2)]

    def branches(X: Tensor) -> Tensor:
        H = blocks[1].norm_1(X)
        first = blocks[1].f(H).tanh()
        return first + blocks[1].g(blocks[1].norm_2(H + first)).tanh()

    x = torch.randn(1, 3, D_MODEL)
    trace = traced(Network(nn.Sequential(*blocks), "", {"input": x}))
    assert_every_pair(trace, 1, branches)


class NormalisesInAFunction(nn.Module):
    """A post-norm block with a norm that is no module; alone, or behind one that is."""

    def __init__(self, with_module: bool) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(D_MODEL, D_MODEL), nn.LayerNorm(D_MODEL)
        self.with_module = with_module

    def forward(self, x: Tensor) -> Tensor:
        if self.with_module:
            x = self.norm(x + self.f(x))
        return nn.functional.layer_norm(x + self.f(x).relu(), (D_MODEL,))


@pytest.mark.parametrize("with_module", [False, True])
def test_branches_that_cannot_be_told_are_refused(with_module: bool) -> None:
    blocks, x = (
        [NormalisesInAFunction(with_module) for _ in range(2)],
        torch.randn(1, 3, D_MODEL),
    )
    trace = traced(Network(nn.Sequential(*blocks), "", {"input": x}))
    with pytest.raises(
        ValueError,
        match=r"^layer 0: the block normalises the stream itself, not by modules[^\n]*$",
    ):
        tlc.depth_coupling(trace, k=4)
    # block(X) − X has a Jacobian all the same.
    expected = torch.func.jacrev(blocks[0])(x[0, -1]) - torch.eye(D_MODEL)
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        torch.testing.assert_close(
            tlc.block_jacobian(trace, 0), expected, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("architecture", PRE_NORM)
def test_no_pre_norm_block_is_taken_for_one_that_normalises(
    architecture: str, tokenizer_folder: Path
) -> None:
    trace = tlc.trace(
        tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder), tiny.TOKENS
    )
    assert_plain(trace)


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
def test_the_norm_of_the_embedding_in_the_first_block_of_rwkv_is_one(
    tokenizer_folder: Path,
) -> None:
    trace = tlc.trace(
        tiny.bridge(tiny.huggingface_model("rwkv"), tokenizer_folder), tiny.TOKENS
    )
    tlc.depth_coupling(trace, k=4)
    assert trace.provenance["normalising_layers"] == [0]
    assert isinstance(
        trace.blocks[0].branches().stream_norms.calls[0].module, nn.LayerNorm
    )


@pytest.mark.parametrize("name", ["torch", "dinov2", "clip"])
def test_no_pre_norm_block_of_a_network_is(name: str) -> None:
    network = NETWORKS[name]()
    assert_plain(tlc.trace_modules(network.blocks, network.run))


def test_no_block_of_a_vit_is() -> None:
    assert_plain(tlc.trace(vit("ViTForImageClassification")[0], pixels()))


def assert_plain(trace: tlc.Trace) -> None:
    assert all(block.branches() is block for block in trace.blocks)
    assert not trace.provenance["normalising_layers"]
    assert not trace.provenance["remarks"]


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e5])
def test_a_pre_norm_block_of_massive_activations_is_none(factor: float) -> None:
    network = torch_encoder()
    for block in network.blocks:
        block.linear2.weight.data *= factor
    trace = tlc.trace_modules(network.blocks, network.run)
    assert_plain(trace)


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
def test_an_untrained_bert_is_at_the_null() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_attention_heads": 4,
            "vocab_size": 100,
        }
        model = BertModel(BertConfig(num_hidden_layers=4, **sizes)).eval()
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    trace = tlc.trace_modules(list(model.encoder.layer), lambda: model(ids))
    result = tlc.depth_coupling(trace, k=30)
    for k in (10, 30):
        assert result.mean(k) == pytest.approx(result.null(k), abs=0.02)
    # While block(X) − X, which is what was compared, couples by its −I.
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        J = tlc.block_jacobians(trace)
    A = tlc.coupling_matrix(J[0], tlc.svd(J[2]), 10)
    assert 1 - tlc.normalized_miscoupling(A) > 0.8


@pytest.mark.filterwarnings("ignore:layer 0. the block normalises")
def test_the_function_of_a_single_jacobian_is_chosen() -> None:
    trace = traced(bert())
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        by_name = {
            function: tlc.block_jacobians(trace, function=function)
            for function in ("block", "branches")
        }
    J = tlc.block_jacobian(trace, 1, function="branches")
    torch.testing.assert_close(by_name["branches"][1], J)
    torch.testing.assert_close(tlc.block_jacobians(trace), by_name["block"])
    assert not torch.allclose(by_name["block"], by_name["branches"], atol=0.1)
    influence = tlc.cross_token_influence(trace, -1, layers=[1])
    assert float(influence.frobenius_norm[0, -1]) == pytest.approx(
        float(J.norm()), rel=1e-4
    )


def test_maps_of_block_and_of_branches_have_no_mean() -> None:
    result = tlc.depth_coupling(traced(bert()), k=4)
    facts = {
        key: value
        for key, value in result.provenance.items()
        if key != "normalising_layers"
    }
    of_an_earlier_version = dataclasses.replace(result, provenance=facts)
    with pytest.raises(
        ValueError, match=r"the same normalising_layers, got \[0, 1, 2\] and \[\]"
    ):
        tlc.comparisons.MeanCouplingMap.over([result, of_an_earlier_version])
    of_another_input = dataclasses.replace(
        result, provenance=result.provenance | {"input_digest": "another"}
    )
    mean = tlc.comparisons.MeanCouplingMap.over([result, of_another_input])
    assert mean.provenance["normalising_layers"] == [0, 1, 2]


def test_weights_that_change_after_the_trace_are_noticed() -> None:
    network = bert()
    trace = traced(network)
    network.blocks[1].intermediate.dense.weight.data.mul_(2)
    with pytest.raises(
        tlc.gradients.StepError, match="block 1 is not the function that was traced"
    ):
        tlc.depth_coupling(trace, k=4)


def test_a_norm_that_is_replaced_after_the_first_measurement_is_noticed() -> None:
    network = torch_encoder(norm_first=False)
    trace = traced(network)
    tlc.depth_coupling(trace, k=4, position=1)
    network.blocks[1].norm1 = nn.LayerNorm(network.blocks[1].norm1.weight.numel())
    with pytest.raises(tlc.gradients.StepError, match="block 1"):
        tlc.depth_coupling(trace, k=4, position=2)


class Guarded(nn.Module):
    """A block whose stream is kept within what a dtype can hold: in a function, or by a
    module, as T5's and OpenAI's blocks do in float16.
    """

    def __init__(self, guard: Callable[[Tensor], Tensor], post_norm: bool) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.guard, self.post_norm = guard, post_norm

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            return self.guard(self.norm(x + self.f(x).tanh()))
        return self.guard(x + self.f(self.norm(x)).tanh())


GUARDS = {
    "clamp": lambda x: x.clamp(-65504, 65504),
    "module": nn.Hardtanh(-65504, 65504),
    "soft cap": lambda x: 1000 * (x / 1000).tanh(),
    "of bfloat16": lambda x: x.clamp(-3e38, 3e38),
}


@pytest.mark.parametrize("size", [0.01, 1, 50])
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_is_no_norm(guard: str, size: float) -> None:
    blocks = [Guarded(GUARDS[guard], post_norm=False) for _ in range(2)]
    network = nn.Sequential(*blocks)
    x = size * torch.randn(1, 3, D_MODEL, generator=torch.Generator().manual_seed(0))
    trace = tlc.trace_modules(blocks, lambda: network(x))
    assert_plain(trace)
    expected = torch.func.jacrev(lambda row: blocks[0](row) - row)(x[0, -1])
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 0), expected, atol=1e-5, rtol=1e-3
    )


@pytest.mark.parametrize("guard", ["clamp", "module", "of bfloat16"])
def test_a_guard_behind_a_norm_hides_it_from_no_one(guard: str) -> None:
    blocks = [Guarded(GUARDS[guard], post_norm=True) for _ in range(2)]
    x = torch.randn(1, 3, D_MODEL, generator=torch.Generator().manual_seed(0))
    trace = traced(Network(nn.Sequential(*blocks), "", {"input": x}))
    assert_every_pair(trace, 1, lambda X: blocks[1].f(X).tanh())


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1, 100])
@pytest.mark.parametrize("gain", [1e-2, 1, 30])
def test_a_norm_is_one_at_every_size(size: float, gain: float) -> None:
    """Also of a stream so small that ε matters."""
    blocks = [Guarded(nn.Identity(), post_norm=True) for _ in range(2)]
    for block in blocks:
        nn.init.constant_(block.norm.weight, gain)
    x = size * torch.randn(1, 3, D_MODEL, generator=torch.Generator().manual_seed(0))
    trace = traced(Network(nn.Sequential(*blocks), "", {"input": x}))
    assert all(block.branches() is not block for block in trace.blocks)
