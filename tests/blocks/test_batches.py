"""Jacobians of blocks and prompts that are computed together: against plain autograd
over the whole model, and as each has them alone.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import DerivativeError, StepError, batches, jacobians_together
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.graphs import Graph
from tl_coupling.jacobians import jacobians

pytestmark = pytest.mark.both_lines

OTHER_TOKENS = [7, 3, 22, 51, 8, 90, 12, 33]
LAST = len(tiny.TOKENS) - 1
# A norm of the stream, rows that meet in a state, experts.
ALONE = {"bert", "mamba", "rwkv", "mixtral"}
TOGETHER = set(tiny.COMMON) - ALONE
N = 4


def assert_close(J: Tensor, expected: Tensor) -> None:
    assert float((J - expected).norm()) <= 5e-6 * max(float(expected.norm()), 0.1)


@pytest.mark.parametrize("architecture", tiny.in_tiers(tiny.CONFIGS))
def test_jacobians_equal_autograd_over_the_whole_model(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = tiny.huggingface_model(architecture)
    model = tiny.bridge(hf_model, tokenizer_folder)
    traces = [tlc.trace(model, tokens) for tokens in (tiny.TOKENS, OTHER_TOKENS)]
    for t in (LAST, 3, 0):
        blocks = [
            [trace.blocks[layer] for trace in traces] for layer in range(tiny.N_LAYERS)
        ]
        jacobians = jacobians_together(blocks, t)
        for layer, of_prompts in enumerate(jacobians):
            for tokens, J in zip((tiny.TOKENS, OTHER_TOKENS), of_prompts, strict=True):
                assert J is not None or architecture not in TOGETHER
                if J is not None:
                    expected = tiny.oracle_jacobian(hf_model, tokens, layer, t, t)
                    assert_close(J, expected)


@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "bert"])
def test_maps_are_those_of_blocks_alone(
    architecture: str, tokenizer_folder: Path
) -> None:
    """Of prompts of two lengths, in any order, and of blocks that go singly."""
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    prompts = [tiny.TOKENS, OTHER_TOKENS, tiny.TOKENS[:5], OTHER_TOKENS[::-1]]

    def maps(batch: int) -> list[Tensor]:
        traces = [tlc.trace(model, tokens) for tokens in prompts]
        mean = tlc.mean_depth_coupling(traces, 4, batch=batch)
        both = tlc.comparisons.depth_coupling_by_orientation(
            tlc.trace(model, tiny.TOKENS), 4, batch=batch
        )
        tokens = tlc.depth_coupling(
            tlc.trace(model, tiny.TOKENS), 4, "all", batch=batch
        )
        singular_values = [one.singular_values for one in both.values()]
        return [mean.coupling(), tokens.coupling(), *singular_values]

    for alone, together in zip(maps(1), maps(6), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


# Blocks of one kind, one of which was changed


class Block(nn.Module):
    """Attention of one head, and an MLP, by matrix products."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.mlp_in = nn.Linear(d, 2 * d)
        self.mlp_out = nn.Linear(2 * d, d)
        self.change: Callable[[Tensor], Tensor] = torch.Tensor.contiguous

    def forward(self, x: Tensor) -> Tensor:
        heads = nn.functional.layer_norm(x, x.shape[-1:])
        q, k, v = (part[:, None] for part in self.qkv(heads).chunk(3, -1))
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        )
        hidden = self.mlp_in(nn.functional.layer_norm(x, x.shape[-1:]))
        return x + self.mlp_out(nn.functional.gelu(self.change(hidden)))


def traced(blocks: list[Block]) -> tlc.Trace:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(1, 6, 16, generator=generator)

    def run() -> None:
        stream = X
        for block in blocks:
            stream = block(stream)

    return tlc.trace_modules(blocks, run)


def made() -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(N)]


def together(trace: tlc.Trace) -> list[Tensor | None]:
    return [J for (J,) in jacobians_together([[block] for block in trace.blocks], 5)]


def expected(block: Block, X: Tensor) -> Tensor:
    """Return `J_{55}` by plain autograd."""

    def added(x: Tensor) -> Tensor:
        replaced = torch.cat([X[:5], x[None]])
        return block(replaced[None])[0, 5] - x

    return torch.autograd.functional.jacobian(added, X[5])


def test_modules_of_anybodys_go_together() -> None:
    blocks = made()
    trace = traced(blocks)
    for layer, J in enumerate(together(trace)):
        assert J is not None
        assert_close(J, expected(blocks[layer], trace.blocks[layer].X))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another function": torch.tanh,
    "another number": lambda x: x * 1.5,
    "a value that is read": lambda x: x * float(x.detach().abs().max() > 0),
    "its own gradient": lambda x: x.clamp(max=float("inf")).abs() + x,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_of_another_kind_goes_alone(change: str) -> None:
    blocks = made()
    blocks[2].change = CHANGES[change]
    trace = traced(blocks)
    jacobians = together(trace)
    assert [J is None for J in jacobians] == [False, False, True, False]
    # What the map holds of it is its own.
    map_of_all = tlc.depth_coupling(trace, 4, batch=N)
    alone = tlc.depth_coupling(traced(blocks), 4, batch=1)
    torch.testing.assert_close(
        map_of_all.coupling(), alone.coupling(), rtol=1e-4, atol=1e-5
    )


def straight_through(x: Tensor) -> Tensor:
    return x + (torch.round(x) - x).detach()


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / 2


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "rounding": lambda x: torch.round(8 * x) / 8,
    "a straight-through estimator": straight_through,
    "a value without its gradient": torch.Tensor.detach,
    "a custom backward pass": _Halved.apply,
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("changed", [[1], list(range(N))], ids=["one", "all"])
def test_what_is_refused_alone_is_refused_together(
    change: str, changed: list[int]
) -> None:
    blocks = made()
    for layer in changed:
        blocks[layer].change = REFUSED[change]
    with pytest.raises(DerivativeError):
        tlc.depth_coupling(traced(blocks), 4, batch=N)


def test_weights_that_changed_after_the_trace_are_noticed() -> None:
    blocks = made()
    trace = traced(blocks)
    with torch.no_grad():
        blocks[2].mlp_out.weight.mul_(1.01)
    assert [J is None for J in together(trace)] == [False, False, True, False]
    with pytest.raises(StepError, match="block 2 is not the function"):
        tlc.depth_coupling(trace, 4, batch=N)


def test_weights_in_16_bits_that_changed_by_little_are_noticed(
    tokenizer_folder: Path,
) -> None:
    """By less than the step in float32 tells: the model's own call does."""
    hf_model = tiny.huggingface_model("llama", dtype=torch.bfloat16)
    model = tiny.bridge(hf_model, tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    again = tlc.trace(model, OTHER_TOKENS)

    def jacobians() -> list[list[bool]]:
        blocks = [
            [one.blocks[layer] for one in (trace, again)]
            for layer in range(tiny.N_LAYERS)
        ]
        return [[J is None for J in row] for row in jacobians_together(blocks, LAST)]

    assert jacobians() == [[False, False]] * tiny.N_LAYERS
    weight = next(p for p in trace.blocks[1].call.module.parameters() if p.ndim > 1)
    # One unit in the last place; kernels of older versions of torch round that away.
    smallest = 2**-7 if Version(torch.__version__) >= Version("2.13") else 2**-5
    with torch.no_grad():
        weight.mul_(1 + smallest)
    assert jacobians() == [[False, False], [True, True]]
    with pytest.raises(StepError, match="block 1 "):
        tlc.depth_coupling(trace, 4, batch=N)


def test_a_hook_on_gradients_goes_alone() -> None:
    blocks = made()
    blocks[1].mlp_in.register_full_backward_hook(lambda *_: None)
    assert [J is None for J in together(traced(blocks))] == [False, True, False, False]


def test_nothing_of_the_blocks_differs_afterwards() -> None:
    blocks = made()
    before = [p.clone() for block in blocks for p in block.parameters()]
    state = torch.get_rng_state()
    together(traced(blocks))
    assert torch.equal(torch.get_rng_state(), state)
    after = [p for block in blocks for p in block.parameters()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
        assert new.requires_grad
        assert new.grad is None


def test_a_wrong_jacobian_of_one_block_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error that only one of those computed together has."""
    right = batches._Together._recorded

    def wrong(self, sequence, is_apart):
        y, J = right(self, sequence, is_apart)
        J = J.clone()
        J[3] *= 1.001
        return y, J

    monkeypatch.setattr(batches._Together, "_recorded", wrong)
    assert [J is None for J in together(traced(made()))] == [False, False, False, True]


def test_fewer_go_together_where_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    right = jacobians.jacobians_together

    def filled(blocks, t):
        sizes.append(len(blocks))
        if len(blocks) > 2:
            raise torch.OutOfMemoryError
        return right(blocks, t)

    monkeypatch.setattr(jacobians, "jacobians_together", filled)
    together = tlc.depth_coupling(traced(made()), 4, batch=N)
    assert sizes == [4, 2, 2]
    alone = tlc.depth_coupling(traced(made()), 4, batch=1)
    torch.testing.assert_close(
        together.coupling(), alone.coupling(), rtol=1e-4, atol=1e-5
    )


# Graphs


def test_graphs_say_what_differs() -> None:
    x, y = torch.randn(3), torch.randn(3)

    def graph(function: Callable[[Tensor], Tensor], x: Tensor = x) -> Graph:
        return Graph(lambda x, _: (function(x),), [x])

    doubled = graph(lambda x: 2 * x + y)
    assert doubled.signature == graph(lambda z: 2 * z + x, y).signature
    for other in (
        lambda x: 3 * x + y,
        lambda x: 2 * y + x,
        lambda x: 2 * x - y,
        lambda x: (2 * x + y).sin(),
        lambda x: 2 * x + x,
        lambda x: 2 * x + y.double(),
    ):
        assert doubled.signature != graph(other).signature
    assert doubled.signature != graph(lambda x: 2 * x + y, torch.ones(1)).signature
    _, (repeated,) = doubled.repeated({id(x): y, id(y): x})
    assert torch.equal(repeated, 2 * y + x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x + torch.randn_like(x),
        lambda x: x[x > 0].sum() + x,
        torch.round,
        torch.Tensor.detach,
    ],
)
def test_what_cannot_be_repeated_is_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(BlockError):
        Graph(lambda x, _: (function(x),), [torch.randn(4)])
