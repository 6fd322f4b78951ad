"""Blocks that change the residual stream in place are those that do not, and change
nothing that is stored.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc

D_MODEL, N_POS, N_LAYERS = 8, 5, 2
Change = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A causal block: what it adds to a token depends on the tokens before; `change`
    says how it is added.
    """

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.line = nn.Linear(D_MODEL, D_MODEL)
        self.relu, self.relu_in_place = nn.ReLU(), nn.ReLU(inplace=True)

    def added(self, x: Tensor) -> Tensor:
        weights = torch.tril(torch.ones(N_POS, N_POS, dtype=x.dtype)) / N_POS
        return torch.tanh(self.line(weights @ x))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def add(block: Block, x: Tensor) -> Tensor:
    return x + block.added(x)


def add_in_place(block: Block, x: Tensor) -> Tensor:
    x += block.added(x)
    return x


def add_to_a_view(block: Block, x: Tensor) -> Tensor:
    x.view(N_POS, D_MODEL).add_(block.added(x)[0])
    return x


def add_to_half(block: Block, x: Tensor) -> Tensor:
    half = torch.cat([block.added(x)[..., :4], torch.zeros_like(x[..., 4:])], -1)
    return x + half


def add_to_half_in_place(block: Block, x: Tensor) -> Tensor:
    x[..., :4] += block.added(x)[..., :4]
    return x


def rectify(block: Block, x: Tensor) -> Tensor:
    x = block.relu(x)
    return x + block.added(x)


def rectify_in_place(block: Block, x: Tensor) -> Tensor:
    x = block.relu_in_place(x)
    return x + block.added(x)


def network(change: Change, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(change) for _ in range(N_LAYERS))).to(dtype).eval()


def traced(change: Change, dtype: torch.dtype = torch.float32) -> tlc.Trace:
    net = network(change, dtype)
    x = torch.randn(1, N_POS, D_MODEL, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    return tlc.trace_modules(net, lambda: net(x))


PAIRS = {
    "add": (add_in_place, add),
    "a view": (add_to_a_view, add),
    "half": (add_to_half_in_place, add_to_half),
    "ReLU": (rectify_in_place, rectify),
}


@pytest.fixture(params=PAIRS)
def traces(request: pytest.FixtureRequest) -> tuple[tlc.Trace, tlc.Trace]:
    in_place, expected = PAIRS[request.param]
    return traced(in_place), traced(expected)


def test_the_stream_and_what_each_block_adds(
    traces: tuple[tlc.Trace, tlc.Trace],
) -> None:
    trace, expected = traces
    assert torch.equal(trace.residual, expected.residual)
    for f, g in zip(trace.blocks, expected.blocks, strict=True):
        assert torch.equal(f(f.X), g(g.X))
        assert float(f(f.X).norm()) > 0.1
        torch.testing.assert_close(f(2 * f.X), g(2 * g.X))


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
def test_nothing_that_is_stored_changes(traces: tuple[tlc.Trace, tlc.Trace]) -> None:
    trace, _ = traces
    copies = [trace.residual.clone(), *(f.X.clone() for f in trace.blocks)]
    X = trace.residual[0].clone()
    for layer, f in enumerate(trace.blocks):
        f(trace.residual[layer])
        f(f.X)
        f(X)
        f.call(f.X)
        tlc.block_jacobian(trace, layer)
        tlc.block_jvp(trace, layer, torch.ones(D_MODEL))
    stored = [trace.residual, *(f.X for f in trace.blocks)]
    assert all(map(torch.equal, copies, stored))
    assert torch.equal(X, trace.residual[0])


def test_causality(traces: tuple[tlc.Trace, tlc.Trace]) -> None:
    trace, expected = traces
    assert trace.is_causal
    assert expected.is_causal


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.parametrize(("t1", "t2"), [(-1, -1), (1, 3), (3, 1)])
def test_jacobians_and_products(
    traces: tuple[tlc.Trace, tlc.Trace], t1: int, t2: int
) -> None:
    trace, expected = traces
    v = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(2))
    for layer in range(N_LAYERS):
        positions = {"input_position": t1, "output_position": t2}
        J = tlc.block_jacobian(expected, layer, **positions)
        torch.testing.assert_close(tlc.block_jacobian(trace, layer, **positions), J)
        torch.testing.assert_close(tlc.block_jvp(trace, layer, v, **positions), J @ v)
        torch.testing.assert_close(
            tlc.block_vjp(trace, layer, v, **positions), J.mT @ v
        )


def test_weights_in_half_precision_which_are_called_again_as_they_are() -> None:
    trace, expected = (traced(change, torch.bfloat16) for change in (add_in_place, add))
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 1), tlc.block_jacobian(expected, 1)
    )


class Cached(nn.Module):
    """Attention that takes its cache as transformers 5.24 does: what stands under the
    older name beside the newer one is ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D_MODEL, 3 * D_MODEL)

    def forward(self, x: Tensor, cache: Any = None, past_key_values: Any = None) -> Any:
        queries, keys, values = self.project(x)[:, None].chunk(3, dim=-1)
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        n_keys, n_rows = keys.shape[2], x.shape[1]
        allowed = torch.ones(n_keys, n_keys, dtype=torch.bool).tril()[-n_rows:]
        scores = (queries @ keys.mT).masked_fill(~allowed, -torch.inf)
        # Not the product that is recognised where a block takes no cache.
        mixed = (scores.softmax(-1)[..., None] * values[:, :, None]).sum(-2)
        return x + mixed[:, 0]


class ReadsAnOlderName(Cached):
    """As attention of TransformerLens 4.3 does, which blocks of transformers 5.24 give
    the cache under the newer name.
    """

    def forward(self, x: Tensor, cache: Any = None, **others: Any) -> Any:
        return super().forward(x, cache=others.get("layer_past"))


class Bridged(nn.Module):
    """A block around one of HuggingFace's, as a bridge has them."""

    def __init__(self) -> None:
        super().__init__()
        self.original_component = ReadsAnOlderName()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_component(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param(Cached, ["cache", "past_key_values"], id="beside the older one"),
        pytest.param(Bridged, ["cache"], id="in a bridge that knows an older one"),
    ],
)
def test_a_cache_under_its_newer_name(kind: type[nn.Module], names: list[str]) -> None:
    torch.manual_seed(0)
    block = kind().eval()
    x = torch.randn(1, N_POS, D_MODEL)

    def run() -> Tensor:
        y: Tensor = block(x, **dict.fromkeys(names))
        return y

    trace = tlc.trace_modules([block], run)
    J, path = trace.blocks[0].jacobian(1, 3)
    assert path.startswith("token_local")
    expected = torch.func.jacrev(lambda x: block(x[None])[0, 3])(x[0])[:, 1]
    torch.testing.assert_close(J, expected)


class FromTheFirst(nn.Module):
    """Takes the embedding beside the stream, and adds to the stream in place."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        added = torch.tanh(self.line(embedded))
        x += added
        return x


def test_an_argument_that_is_the_stream_itself_is_kept_as_it_was() -> None:
    blocks = [FromTheFirst().eval() for _ in range(N_LAYERS)]
    x = torch.randn(1, N_POS, D_MODEL)

    def run() -> Tensor:
        stream = x.clone()
        embedded = stream
        for block in blocks:
            stream = block(stream, embedded)
        return stream

    trace = tlc.trace_modules(blocks, run)
    for layer, f in enumerate(trace.blocks):
        torch.testing.assert_close(
            f(f.X), trace.residual[layer + 1] - trace.residual[layer]
        )


def in_place(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward that leaves its output in the stream that it was given."""

    @functools.wraps(forward)
    def changes_its_input(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden_states.clone(), *args, **kwargs)
        stream, *more = output if isinstance(output, tuple) else (output,)
        hidden_states.copy_(stream)
        return (hidden_states, *more) if isinstance(output, tuple) else hidden_states

    return changes_its_input


def test_blocks_of_a_bridge(tokenizer_folder: Path) -> None:
    hf_model = tiny.huggingface_model("gpt2")
    plain = tlc.trace(
        tiny.bridge(tiny.huggingface_model("gpt2"), tokenizer_folder), tiny.TOKENS
    )
    for layer in tiny.layers_of(hf_model):
        layer.forward = in_place(layer.forward)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    copy = trace.residual.clone()
    torch.testing.assert_close(copy, plain.residual)
    for layer in range(tiny.N_LAYERS):
        f = trace.blocks[layer]
        step = plain.residual[layer + 1] - plain.residual[layer]
        torch.testing.assert_close(f(trace.residual[layer]), step, rtol=1e-4, atol=1e-5)
        for t1, t2 in [(-1, -1), (2, 5)]:
            J, _ = f.jacobian(trace.position_index(t1), trace.position_index(t2))
            expected = tlc.block_jacobian(
                plain, layer, input_position=t1, output_position=t2
            )
            torch.testing.assert_close(J, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(trace.residual, copy)
    assert trace.is_causal
