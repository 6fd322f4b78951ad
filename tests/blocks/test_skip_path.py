"""What of the stream passes a block: networks with and without a skip connection, norms
of the stream, projections, and hooks that put another stream in its place.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

D = 24
K = 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Block(nn.Module):
    """A residual block, or what `combine` makes of the stream and of what is added."""

    def __init__(
        self,
        combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm = norm(D)
        self.mlp = mlp()
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(x, self.mlp(self.norm(x)))


class NormalisesAfterwards(nn.Module):
    """As BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.mT).mT


def traced(make: Callable[[], nn.Module], n_layers: int = 3) -> tlc.Trace:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*[make() for _ in range(n_layers)]).eval()
        x = torch.randn(1, 5, D)
    return tlc.trace_modules(list(net), lambda: net(x))


def in_place(x: Tensor, added: Tensor) -> Tensor:
    x += added
    return x


def row_by_row(x: Tensor, added: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        out[:, t] = x[:, t] + added[:, t]
    return out


WHOLE = {
    "pre-norm": Block,
    "without norms": lambda: Block(norm=nn.Identity),
    "in place": lambda: Block(in_place),
    "in place, without norms": lambda: Block(in_place, nn.Identity),
    "row by row": lambda: Block(row_by_row, nn.Identity),
    "added and taken": lambda: Block(lambda x, f: 2 * x + f - x, nn.Identity),
    "by addcmul": lambda: Block(
        lambda x, f: torch.addcmul(x, f, torch.full((D,), 0.3)), nn.Identity
    ),
    "by a fused product": lambda: Block(
        lambda x, f: torch.baddbmm(x, f, torch.eye(D)[None]), nn.Identity
    ),
    "by where": lambda: Block(
        lambda x, f: torch.where(f > 0, x + f, x + 0.1 * f), nn.Identity
    ),
    "by parts": lambda: Block(
        lambda x, f: torch.cat(
            [a + b for a, b in zip(x.chunk(2, -1), f.chunk(2, -1), strict=True)], -1
        ),
        nn.Identity,
    ),
    "scaled branch": lambda: Block(lambda x, f: x + 0.22 * f),
    "guarded": lambda: Block(lambda x, f: (x + f).clamp(-65504, 65504)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_no_word_where_the_stream_passes_whole(kind: str) -> None:
    trace = traced(WHOLE[kind])
    tlc.depth_coupling(trace, k=K)
    assert trace.provenance["remarks"] == []


NOTHING = {
    "Linear, GELU": lambda: nn.Sequential(nn.Linear(D, D), nn.GELU()),
    "Linear, tanh": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()),
    "Linear, LayerNorm": lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)),
    "MLP": mlp,
    "pre-norm MLP": lambda: Block(lambda x, f: f),
    "convolution": Convolution,
    "constant": lambda: Block(lambda x, f: torch.ones_like(x)),
    "another stream": lambda: Block(lambda x, f: torch.ones_like(x) + 0 * f),
}


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.parametrize("kind", NOTHING)
def test_blocks_that_pass_nothing_have_no_coupling(kind: str) -> None:
    trace = traced(NOTHING[kind])
    with pytest.raises(ValueError, match="nothing of the stream") as refusal:
        tlc.depth_coupling(trace, k=K)
    assert "\n" not in str(refusal.value)
    # Their Jacobians and trajectories are what they are.
    assert tlc.block_jacobian(trace, 0).shape == (D, D)
    assert not any("normalises" in remark for remark in trace.provenance["remarks"])


def test_post_norm_is_taken_for_what_it_is() -> None:
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        trace = traced(NormalisesAfterwards)
    result = tlc.depth_coupling(trace, k=K)
    assert result.provenance["normalising_layers"] == [0, 1, 2]


def projection(rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(D, rank, generator=generator))[0]
    return basis @ basis.mT


@pytest.mark.parametrize("rank", [1, 2, 5, D // 2])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.Identity])
@pytest.mark.parametrize("by", ["difference", "product"])
def test_projections_are_counted(rank: int, norm: type[nn.Module], by: str) -> None:
    """By a difference, `X − XP`, or by one product, `X (I − P)`; −I is on the directions
    that are left out: eigenvalues of J, by another routine.
    """
    P = projection(rank)

    def combine(x: Tensor, f: Tensor) -> Tensor:
        y = x + f
        return y - y @ P if by == "difference" else y @ (torch.eye(D) - P)

    trace = traced(lambda: Block(combine, norm))
    with pytest.warns(UserWarning, match="holds a part of −I"):
        tlc.depth_coupling(trace, k=K)
    remark = f"{rank} of {D} directions of the stream do not pass the block"
    assert sum(remark in text for text in trace.provenance["remarks"]) == 3
    eigenvalues = torch.linalg.eigvals(tlc.block_jacobian(trace, 1).double())
    assert int(((eigenvalues + 1).abs() < 1e-5).sum()) == rank


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_stream_that_is_scaled(factor: float) -> None:
    trace = traced(lambda: Block(lambda x, f: factor * x + f))
    with pytest.warns(UserWarning, match=f"multiplies the stream by {factor:.2g}"):
        tlc.depth_coupling(trace, k=K)


@pytest.fixture
def bridge(tokenizer_folder: Path) -> nn.Module:
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


def remarks_with(model: nn.Module, place: str, change: Callable[[Tensor], Tensor]):
    for layer in range(tiny.N_LAYERS):
        model.add_hook(f"blocks.{layer}.{place}", lambda stream, hook: change(stream))
    trace = tlc.trace(model, tiny.TOKENS)
    tlc.depth_coupling(trace, k=K)
    return trace.provenance["remarks"]


@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale/hook_normalized")
@pytest.mark.filterwarnings("ignore:layer")
def test_hooks_on_the_stream_and_beside_it(bridge: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(tiny.D_MODEL, 3, generator=generator))[0]
    P = basis @ basis.mT

    def without(x: Tensor) -> Tensor:
        return x - x @ P

    for place in ("hook_resid_pre", "hook_resid_post"):
        found = remarks_with(bridge, place, without)
        bridge.reset_hooks()
        assert any("3 of 32 directions" in text for text in found), place
    for place in ("hook_attn_out", "hook_mlp_out", "ln1.hook_normalized"):
        assert remarks_with(bridge, place, without) == [], place
        bridge.reset_hooks()
    # Adding a direction cuts nothing.
    assert remarks_with(bridge, "hook_resid_post", lambda x: x + basis[:, 0]) == []
    bridge.reset_hooks()
    # The safe way to the same end.
    trace = tlc.trace(bridge, tiny.TOKENS)
    subspace = tlc.directions.Subspace.of(basis, 1, "write")
    with bridge.hooks(fwd_hooks=subspace.hooks(bridge, side="write")):
        hooked = tlc.trace(bridge, tiny.TOKENS)
        tlc.depth_coupling(hooked, k=K)
    assert hooked.provenance["remarks"] == trace.provenance["remarks"] == []


def test_a_patched_stream_is_refused_and_the_hook_is_named(bridge: nn.Module) -> None:
    other = torch.linspace(-1, 1, tiny.D_MODEL)
    bridge.add_hook(
        "blocks.1.hook_resid_pre", lambda stream, hook: other.expand(stream.shape)
    )
    trace = tlc.trace(bridge, tiny.TOKENS)
    identity = torch.eye(tiny.D_MODEL)
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        assert torch.allclose(tlc.block_jacobian(trace, 1), -identity, atol=1e-6)
    with pytest.raises(ValueError, match=r"nothing of the stream.*hook_resid_pre"):
        tlc.depth_coupling(trace, k=K)


class Autoencoder(nn.Module):
    """An SAE that reconstructs what is in its dictionary."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        W = torch.randn(tiny.D_MODEL, tiny.D_MODEL, generator=generator)
        self.W = nn.Parameter(torch.linalg.qr(W)[0][:, :n_features])

    def forward(self, x: Tensor) -> Tensor:
        features = x @ self.W
        return (features.relu() - (-features).relu()) @ self.W.mT


@pytest.mark.filterwarnings("ignore:layer")
def test_an_autoencoder_in_the_stream(bridge: nn.Module) -> None:
    bridge.blocks[0].hook_out = Autoencoder(n_features=24)
    trace = tlc.trace(bridge, tiny.TOKENS)
    tlc.depth_coupling(trace, k=K)
    texts = trace.provenance["remarks"]
    assert any("8 of 32 directions" in text for text in texts)
    bridge.blocks[0].hook_out = Autoencoder(n_features=4)
    trace = tlc.trace(bridge, tiny.TOKENS)
    with pytest.raises(ValueError, match="nothing of the stream"):
        tlc.depth_coupling(trace, k=K)


@pytest.mark.parametrize("architecture", tiny.in_tiers(tiny._CLASSES))
def test_no_architecture_cuts_its_stream(architecture: str) -> None:
    trace = tlc.trace(tiny.huggingface_model(architecture), tiny.TOKENS)
    try:
        tlc.depth_coupling(trace, k=K)
    except tlc.gradients.DerivativeError:
        pytest.skip("has no derivative")
    cuts = [text for text in trace.provenance["remarks"] if "holds a part of" in text]
    assert cuts == []
