"""Jacobians of networks that see, or read both ways, against plain autograd over the
whole original model.
"""

import itertools

import accelerate
import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc
from vision_models import N_LAYERS, NETWORKS, NO_ADAPTER, pixels, torch_encoder, vit
from zoo.models import original_model
from zoo.oracle import Oracle

pytestmark = pytest.mark.both_lines
LARGE = pytest.mark.long("differentiates a network between all patches")

TOLERANCE = 1e-5


def worst_error(trace: tlc.Trace, oracle: Oracle) -> tuple[float, set[str]]:
    """Over all pairs of tokens at every layer, relative to the output's own Jacobian;
    and the ways that were taken.
    """
    pairs = list(itertools.product(range(trace.n_pos), repeat=2))
    worst, ways = 0.0, set()
    for layer in range(trace.n_layers):
        expected = oracle.jacobians(layer, pairs)
        for t1, t2 in pairs:
            J, way = trace.blocks[layer].jacobian(t1, t2)
            worst = max(
                worst, float((J - expected[t1, t2]).norm() / expected[t2, t2].norm())
            )
            ways.add(way)
    return worst, ways


@LARGE
@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "DeiTForImageClassification"]
)
def test_every_pair_of_a_bridge_is_that_of_the_huggingface_model(name: str) -> None:
    model, original = vit(name)
    trace = tlc.trace(model, pixels())
    path = next(
        path for path, m in original.named_modules() if isinstance(m, nn.ModuleList)
    )
    error, ways = worst_error(trace, Oracle(original, path, {"pixel_values": pixels()}))
    assert error <= TOLERANCE
    # Each at the cost of one token, in both directions of time.
    assert ways <= {"token_local_recorded", "token_local"}


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=LARGE)
        if name in ("timm", "deit with teacher")
        else name
        for name in NETWORKS
    ],
)
def test_every_pair_of_traced_modules_is_that_of_the_original_model(name: str) -> None:
    network = NETWORKS[name]()
    with torch.no_grad():
        trace = tlc.trace_modules(network.blocks, network.run)
    assert trace.n_layers == N_LAYERS
    error, _ = worst_error(trace, Oracle(network.model, network.path, network.inputs))
    assert error <= TOLERANCE


@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.parametrize("name", ["timm", "bert", *NO_ADAPTER])
def test_modules_with_attention_of_two_products_are_measured_at_the_cost_of_one_token(
    name: str,
) -> None:
    network = NETWORKS[name]()
    trace = tlc.trace_modules(network.blocks, network.run)
    _, way = trace.blocks[1].jacobian(4, 2)
    assert way.startswith("token_local")


def test_a_bert_through_its_modules_is_the_bert_of_a_bridge(tokenizer_folder) -> None:
    original = original_model("BertForMaskedLM", N_LAYERS)
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    through_bridge = tlc.trace(tiny.bridge(original, tokenizer_folder), ids)
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        through_modules = tlc.trace_modules(
            list(original.bert.encoder.layer), lambda: original(ids)
        )
    torch.testing.assert_close(
        through_modules.residual, through_bridge.residual, atol=1e-5, rtol=1e-5
    )
    # Remarks on a trace are made once.
    with (
        pytest.warns(UserWarning, match="normalises the stream itself"),
        pytest.warns(
            UserWarning, match="directions of the stream do not pass the block"
        ),
    ):
        jacobians = [
            [tlc.block_jacobian(traced, layer) for layer in range(N_LAYERS)]
            for traced in (through_modules, through_bridge)
        ]
    for ours, theirs in zip(*jacobians, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_stream_may_have_positions_first_or_no_batch() -> None:
    expected = tlc.trace_modules((one := torch_encoder()).blocks, one.run)
    for layout in ("positions first", "no batch"):
        network = torch_encoder(batch_first=layout != "positions first")
        if layout == "no batch":
            network = network._replace(inputs={"src": network.inputs["src"][0]})
        trace = tlc.trace_modules(network.blocks, network.run)
        torch.testing.assert_close(
            trace.residual, expected.residual, atol=1e-5, rtol=1e-5
        )
        J = tlc.block_jacobian(trace, 1, input_position=2, output_position=5)
        torch.testing.assert_close(
            J, tlc.block_jacobian(expected, 1, input_position=2, output_position=5)
        )


def shuffled(blocks: list[nn.Module]) -> list[nn.Module]:
    return [blocks[1], blocks[0], *blocks[2:]]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (
            shuffled,
            r"one after the other, this one called them in the order \[1, 0, 2\]",
        ),
        (
            lambda blocks: blocks[::2],
            "the output of block 0 is changed before the next block: not one residual stream",
        ),
        (
            lambda blocks: [block.self_attn for block in blocks],
            "the output of block 0 is changed",
        ),
        (
            lambda blocks: [block.linear1 for block in blocks],
            r"takes \[1, 7, 32\] and gives \[1, 7, 64\]",
        ),
        (lambda blocks: [*blocks, nn.Linear(32, 32)], r"in the order \[0, 1, 2\]"),
        (
            lambda blocks: [nn.Identity()],
            "its 1 blocks one after the other, this one called none of them: give",
        ),
        (lambda blocks: [], "`blocks` is empty"),
    ],
)
def test_a_wrong_list_of_modules_is_refused(choose, message: str) -> None:
    network = torch_encoder()

    def run() -> None:
        # With gradients, because without them torch's fused kernel calls no inner
        # module.
        with torch.enable_grad():
            network.model(network.inputs["src"].clone().requires_grad_())

    with pytest.raises(ValueError, match=message):
        tlc.trace_modules(choose(network.blocks), run)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda network: [network.run(), network.run()],
            "changed before the next block, where the model runs its blocks",
        ),
        (
            lambda network: network.model(network.inputs["src"].repeat(2, 1, 1)),
            r"run it on one input.* gives \[2, 7, 32\]$",
        ),
        (
            lambda network: network.model(torch.nan * network.inputs["src"]),
            "NaN or infinite entries",
        ),
    ],
)
def test_a_run_that_is_not_of_one_input_is_refused(run, message: str) -> None:
    network = torch_encoder()
    with pytest.raises(ValueError, match=message):
        tlc.trace_modules(network.blocks, lambda: run(network))


class GivesADict(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + x.tanh()}


class Convolution(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.tanh()


@pytest.mark.parametrize(
    ("block", "shape", "message"),
    [
        (
            GivesADict(),
            (1, 5, 8),
            "wanted blocks that return the residual stream, .* got a dict",
        ),
        (
            Convolution(),
            (1, 3, 4, 4),
            r"block 0 takes \[1, 3, 4, 4\] .* feature maps of convolutions are not measured",
        ),
        (Convolution(), (8,), r"block 0 takes \[8\]"),
        (
            nn.Linear(8, 100),
            (1, 5, 8),
            r"block 0 takes \[1, 5, 8\] and gives \[1, 5, 100\]: leave it out, a Linear",
        ),
    ],
)
def test_what_is_no_stream_of_tokens_is_refused(
    block: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.trace_modules([block], lambda: block(torch.randn(shape)))


def test_a_run_in_inference_mode_is_measured() -> None:
    network = torch_encoder()
    plain, inferred = (
        tlc.trace_modules(network.blocks, run)
        for run in (network.run, torch.inference_mode()(network.run))
    )
    torch.testing.assert_close(
        tlc.block_jacobian(inferred, 1), tlc.block_jacobian(plain, 1)
    )


def test_dropout_in_train_mode_is_refused() -> None:
    network = torch_encoder()
    network.model.train()
    with pytest.raises(
        ValueError,
        match=r"`blocks` must draw no random numbers, 0.* with .* = 0\.1: call \.eval\(\)",
    ):
        tlc.trace_modules(network.blocks, network.run)


class NormalisesABatch(nn.Module):
    """A block with BatchNorm, whose channels are the tokens."""

    def __init__(self, keeps_statistics: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, track_running_stats=keeps_statistics)
        self.f = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(self.norm(x))


def test_batch_norm_in_train_mode_is_refused_and_keeps_its_statistics() -> None:
    blocks, x = [NormalisesABatch() for _ in range(2)], torch.randn(1, 5, 8)
    net = nn.Sequential(*blocks)
    mean_before = blocks[0].norm.running_mean.clone()
    with pytest.raises(
        ValueError,
        match=r"`blocks` must be the same .* 0\.norm is a BatchNorm1d .* call \.eval\(\)",
    ):
        tlc.trace_modules(blocks, lambda: net(x))
    assert torch.equal(blocks[0].norm.running_mean, mean_before)
    net.eval()
    J = tlc.block_jacobian(tlc.trace_modules(blocks, lambda: net(x)), 0)
    torch.testing.assert_close(J, blocks[0].f.weight / (1 + 1e-5) ** 0.5)


def test_batch_norm_without_statistics_is_measured_in_train_mode() -> None:
    blocks, x = (
        [NormalisesABatch(keeps_statistics=False) for _ in range(2)],
        torch.randn(1, 5, 8),
    )
    J = tlc.block_jacobian(
        tlc.trace_modules(blocks, lambda: nn.Sequential(*blocks)(x)), 0
    )
    expected = torch.func.jacrev(blocks[0])(x)[0, -1, :, 0, -1] - torch.eye(8)
    torch.testing.assert_close(J, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("whole", [True, False])
def test_what_torch_jit_compiled_is_refused(whole: bool) -> None:
    block = NormalisesABatch().eval()
    if whole:
        block, compiled = torch.jit.script(block), "0"
    else:
        block.f, compiled = torch.jit.script(block.f), r"0\.f"
    with pytest.raises(
        ValueError,
        match=rf"must be modules in Python, {compiled} is compiled by torch\.jit: give",
    ):
        tlc.trace_modules([block], lambda: block(torch.randn(1, 5, 8)))


class NormalisesTheStream(nn.Module):
    """What several small ViT repositories do: `x = norm(x); x = x + f(x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.f(x)


def test_a_block_that_normalises_the_stream_is_measured_and_remarked_on() -> None:
    blocks, x = [NormalisesTheStream() for _ in range(2)], torch.randn(1, 5, 8)
    with pytest.warns(
        UserWarning, match="layer 0: the block normalises the stream itself"
    ):
        trace = tlc.trace_modules(blocks, lambda: nn.Sequential(*blocks)(x))
    assert len(trace.provenance["remarks"]) == 2
    # block(X) − X all the same: J of norm and f, less the identity.
    expected = torch.func.jacrev(blocks[0])(x[0, -1]) - torch.eye(8)
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        torch.testing.assert_close(
            tlc.block_jacobian(trace, 0), expected, atol=1e-5, rtol=1e-4
        )
    assert not tlc.trace_modules((one := torch_encoder()).blocks, one.run).provenance[
        "remarks"
    ]
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        tlc.trace_modules((post := torch_encoder(norm_first=False)).blocks, post.run)


def test_what_is_said_of_modules() -> None:
    network = torch_encoder()
    names = [f"x{i}" for i in range(7)]
    trace = tlc.trace_modules(
        network.blocks, network.run, name="encoder", str_tokens=names
    )
    facts = trace.provenance
    assert (facts["model"], facts["backend"], facts["architecture"]) == (
        "encoder",
        "modules",
        "TransformerEncoderLayer",
    )
    assert facts["n_params"] == sum(
        p.numel() for p in network.model.layers.parameters()
    )
    assert trace.str_tokens == tuple(names)
    assert trace.tokens is None
    assert "encoder" in repr(trace)
    with pytest.raises(ValueError, match="modules were traced, not a model"):
        trace.logits(trace.residual[-1])
    with pytest.raises(
        ValueError, match="`str_tokens` must name 7 tokens, got 1 names"
    ):
        tlc.trace_modules(network.blocks, network.run, str_tokens=["x"])


def test_weights_that_change_after_the_trace_are_noticed() -> None:
    network = torch_encoder()
    trace = tlc.trace_modules(network.blocks, network.run)
    network.blocks[1].linear1.weight.data.mul_(2)
    with pytest.raises(
        tlc.gradients.StepError, match="block 1 is not the function that was traced"
    ):
        tlc.block_jacobian(trace, 1)


def test_weights_that_accelerate_leaves_on_disk(tmp_path):
    """They are on no device until a block is called."""
    model = tiny.huggingface_model("llama")
    blocks = tiny.layers_of(model)
    ids = torch.tensor([tiny.TOKENS])
    expected = tlc.block_jacobians(tlc.trace_modules(blocks, lambda: model(ids)))
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert {parameter.device.type for parameter in blocks.parameters()} == {"meta"}
    found = tlc.block_jacobians(tlc.trace_modules(blocks, lambda: model(ids)))
    torch.testing.assert_close(found, expected)


def test_a_head_among_blocks_is_named() -> None:
    """One line, whoever asks: it is no residual block."""
    network = torch_encoder()
    head = nn.Linear(32, 100)
    blocks = [*network.blocks, head]

    def run() -> torch.Tensor:
        return head(network.run())

    for measure in (
        tlc.trace_modules,
        tlc.training.measure,
        tlc.training.coupling,
        tlc.training.jacobians,
    ):
        with pytest.raises(ValueError, match="a Linear of these sizes is no") as error:
            measure(blocks, run)
        assert f"block {len(network.blocks)} takes" in str(error.value)
        assert "\n" not in str(error.value)
