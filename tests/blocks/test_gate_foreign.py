"""Blocks that torch.func cannot differentiate: plain autograd gives their Jacobian, and
where that cannot either, one line says which block and why.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import DerivativeError, StepError

D_MODEL = 8
N_POS = 5
LAST = 7


class Block(nn.Module):
    """A causal block, whose parts are called by `added`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.q = nn.Linear(D_MODEL, D_MODEL)
        self.v = nn.Linear(D_MODEL, D_MODEL)
        self.w = nn.Linear(D_MODEL, D_MODEL)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(D_MODEL))
        self.kept: list[object] = []

    def added(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.q(h) @ h.mT
        hidden = torch.full_like(scores, -1e4).triu(1)
        return (scores + hidden).softmax(-1) @ self.v(h) + torch.tanh(self.w(h))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x)


class KeepsNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach().cpu().numpy())
        return x + self.added(x)


class CountsInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x + self.added(x)


class NumpyStatistic(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(float(abs(x.detach().numpy()).max()))
        return x + self.added(x)


class Checkpoints(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.added, x, use_reentrant=self.reentrant)


class Reenters(Checkpoints):
    reentrant = True


class SavesOnCpu(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x + self.added(x)


class AddsInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.added(x)
        return x


class AsksForGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x).requires_grad_()


RUN_ANYWAY = [
    KeepsNumpy,
    CountsInPlace,
    NumpyStatistic,
    Checkpoints,
    Reenters,
    SavesOnCpu,
    AddsInPlace,
    AsksForGradients,
]


def traced(block: nn.Module) -> tlc.Trace:
    x = torch.randn(1, N_POS, D_MODEL, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return tlc.trace_modules([block], lambda: block(x.clone()))


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def expected_jacobian(X: Tensor, t1: int, t2: int) -> Tensor:
    """By plain autograd through the same weights, written without what torch.func does
    not know.
    """
    plain = seeded(Block)

    def output(x: Tensor) -> Tensor:
        return plain.added(torch.cat([X[:t1], x[None], X[t1 + 1 :]])[None])[0, t2]

    return torch.autograd.functional.jacobian(output, X[t1])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", RUN_ANYWAY)
def test_what_plain_autograd_differentiates_is_measured(
    kind: Callable[[], nn.Module],
) -> None:
    block = seeded(kind)
    trace = traced(block)
    X = trace.residual[0]
    J = expected_jacobian(X, 4, 4)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(tlc.block_jacobian(trace, 0), J, **close)
    of_another = tlc.block_jacobian(trace, 0, input_position=1, output_position=3)
    torch.testing.assert_close(of_another, expected_jacobian(X, 1, 3), **close)
    v = torch.arange(D_MODEL).float()
    torch.testing.assert_close(tlc.block_jvp(trace, 0, v), J @ v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tlc.block_vjp(trace, 0, v), v @ J, rtol=1e-4, atol=1e-4)
    # Nothing of ours stays on the block.
    assert all(p.requires_grad and p.grad is None for p in block.parameters())
    assert not any(buffer.requires_grad for buffer in block.buffers())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_changes_nothing(
    reentrant: bool,
) -> None:
    model = tiny.huggingface_model("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.tensor([tiny.TOKENS])
    trace = tlc.trace_modules(
        list(tiny.layers_of(model)), lambda: model(ids, use_cache=False)
    )
    J = tlc.block_jacobian(trace, 1)
    original = tiny.huggingface_model("llama")
    expected = tiny.oracle_jacobian(original, tiny.TOKENS, 1, LAST, LAST)
    torch.testing.assert_close(J, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # Of torch's compiler itself.
def test_compiled_layers_are_measured_as_they_were_written(
    tokenizer_folder: Path,
) -> None:
    original = tiny.huggingface_model("llama")
    model = tiny.bridge(original, tokenizer_folder)
    expected = tlc.block_jacobian(tlc.trace(model, tiny.TOKENS), 1)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    trace = tlc.trace(model, tiny.TOKENS)
    assert torch.equal(tlc.block_jacobian(trace, 1), expected)
    assert trace.provenance["remarks"] == []


def test_a_hook_that_goes_to_numpy_is_no_hindrance(tokenizer_folder: Path) -> None:
    original = tiny.huggingface_model("llama")
    model = tiny.bridge(original, tokenizer_folder)
    kept = []
    model.add_hook(
        "blocks.1.hook_mlp_out", lambda z, hook: kept.append(z.detach().cpu().numpy())
    )
    trace = tlc.trace(model, tiny.TOKENS)
    expected = tiny.oracle_jacobian(original, tiny.TOKENS, 1, LAST, LAST)
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 1), expected, rtol=1e-5, atol=1e-5
    )
    assert trace.provenance["remarks"] == []
    assert kept


# Refusals name the block and the cause


class GoesToNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.numpy())
        return x + self.added(x)


class RefusesGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise TypeError("only inference\nis supported")
        return x + self.added(x)


class ErrorTerm(Block):
    """Its output is exact and its gradient that of a reconstruction."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.added(x)
        reconstructed = self.w(torch.relu(self.v(y)))
        return x + reconstructed + (y - reconstructed).detach()


class ErrorTermWithoutGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.added(x)
        reconstructed = self.w(torch.relu(self.v(y)))
        with torch.no_grad():
            error = y - reconstructed
        return x + reconstructed + error


class DetachedFactor(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x) * x.detach().std()


class ItemAsFactor(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x) * x.std().item()


class HookOnTensor(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.added(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 3 * gradient)
        return x + y


class BackwardHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.w.register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (GoesToNumpy, "block 0 cannot be differentiated.*Can't call numpy"),
        (RefusesGradients, "TypeError: only inference is supported"),
        (ErrorTerm, "gradients .`detach`."),
        (ErrorTermWithoutGradients, "gradients .`no_grad`."),
        (DetachedFactor, "gradients .`detach`."),
        (ItemAsFactor, "gradients .`item`."),
        (HookOnTensor, "gradients .`register_hook`."),
        (BackwardHook, r"Backward hooks change its gradients \(w\).*Active hooks: w"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_refusals_name_the_cause(
    kind: Callable[[], nn.Module], cause: str, seed: int
) -> None:
    torch.manual_seed(seed)
    trace = traced(kind())
    with pytest.raises(DerivativeError, match=cause) as refused:
        tlc.block_jacobian(trace, 0)
    message = str(refused.value)
    assert message.startswith("block 0 ")
    assert "\n" not in message
    assert "quantization" not in message


def test_a_backward_hook_that_changes_nothing_is_measured_and_named() -> None:
    block = seeded(Block)
    block.w.register_full_backward_hook(lambda *_: None)
    trace = traced(block)
    expected = expected_jacobian(trace.residual[0], 4, 4)
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 0), expected, rtol=1e-4, atol=1e-5
    )
    assert trace.provenance["hooks"] == ["0.w"]


def test_active_hooks_are_listed_where_one_hides_a_slope(
    tokenizer_folder: Path,
) -> None:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    model.add_hook("blocks.1.hook_mlp_out", lambda z, hook: z.detach())
    trace = tlc.trace(model, tiny.TOKENS)
    with pytest.raises(
        DerivativeError, match=r"`detach`.*Active hooks: blocks\.1\.hook_mlp_out$"
    ):
        tlc.block_jacobian(trace, 1)


def test_a_pad_token_in_eager_mode_is_named() -> None:
    """Every key is hidden from it: all its scores become the lowest number."""
    model = tiny.huggingface_model("llama")
    model.set_attn_implementation("eager")
    ids = torch.tensor([tiny.TOKENS])
    is_text = torch.ones_like(ids)
    is_text[0, :2] = 0
    trace = tlc.trace_modules(
        list(tiny.layers_of(model)), lambda: model(ids, attention_mask=is_text)
    )
    with pytest.raises(DerivativeError, match=r"at token 0 .*mask hides every key"):
        tlc.block_jacobian(trace, 1, position=0)
    assert tlc.block_jacobian(trace, 1).isfinite().all()


# Caches


def prefixed(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    cached = {tiny.cache_argument(model): DynamicCache(config=model.config)}
    with torch.no_grad():
        model(ids[:, :3], use_cache=True, **cached)
    return lambda: model(ids[:, 3:], use_cache=True, **cached)


def with_static_cache(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    cache = StaticCache(config=model.config, max_cache_len=16)
    cached = {tiny.cache_argument(model): cache}
    return lambda: model(ids, use_cache=True, **cached)


@pytest.mark.parametrize("make_run", [prefixed, with_static_cache])
def test_a_cache_that_a_block_needs_is_named(make_run) -> None:
    model = tiny.huggingface_model("llama")
    run = make_run(model, torch.tensor([tiny.TOKENS]))
    trace = tlc.trace_modules(list(tiny.layers_of(model)), run)
    name = tiny.cache_argument(model)
    with pytest.raises(
        StepError, match=rf"block 1 .*key/value cache \(`{name}`\)"
    ) as refused:
        tlc.block_jacobian(trace, 1)
    assert "\n" not in str(refused.value)


def test_an_empty_cache_is_no_cause() -> None:
    model = tiny.huggingface_model("llama")
    ids = torch.tensor([tiny.TOKENS])
    trace = tlc.trace_modules(
        list(tiny.layers_of(model)), lambda: model(ids, use_cache=True)
    )
    assert all(block.call.dropped_cache is None for block in trace.blocks)
    expected = tiny.oracle_jacobian(model, tiny.TOKENS, 1, LAST, LAST)
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 1), expected, rtol=1e-5, atol=1e-5
    )


# Packed weights


class Int8(Tensor):
    """A weight as torchao keeps it: a tensor that holds others, and knows few functions."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole = whole
        self.scale = scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        return cls(tensors["whole"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(f"attempting to run {func}, this is not supported")


def test_weights_that_torchao_packs_are_refused_in_a_line() -> None:
    block = seeded(Block)
    scale = block.w.weight.detach().abs().amax(1, keepdim=True) / 127
    whole = (block.w.weight.detach() / scale).round().to(torch.int8)
    block.w.weight = nn.Parameter(Int8(whole, scale), requires_grad=False)
    with pytest.raises(ValueError, match=r"`weight` of 0\.w is a Int8 .*torchao"):
        tlc.trace_modules([block], lambda: block(torch.randn(1, N_POS, D_MODEL)))
