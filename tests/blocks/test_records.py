"""Jacobians from records of operations, against torch's own of the same function."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tl_coupling as tlc
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.records import Record, Recorded

D = 12


def _recorded_jacobian(
    function: Callable[[Tensor, Record], Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    recorded = Recorded(function, [x])
    (J,) = recorded.jacobians()
    return recorded.y, J


def _weights(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / 3


W, V, U = _weights(D, 30), _weights(30, D), _weights(D, D)
GAIN = _weights(D) + 1
KEYS, VALUES = _weights(3, 5, 4), _weights(3, 5, 4)


def _rms_norm(x: Tensor) -> Tensor:
    return GAIN * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def _attention(x: Tensor) -> Tensor:
    q = (x @ U).view(1, 3, 4).transpose(0, 1)
    weights = (q @ KEYS.mT).softmax(-1)
    return (weights @ VALUES).transpose(0, 1).reshape(1, D) @ U


def _block(x: Tensor) -> Tensor:
    x = x + _attention(_rms_norm(x))
    hidden = _rms_norm(x) @ W
    return x + (F.silu(hidden) * (hidden.roll(1, -1) + 1)) @ V


def _experts(x: Tensor) -> Tensor:
    weights, chosen = F.softmax(x @ U, dim=1).topk(2, dim=1)
    weights = weights / weights.sum(1, keepdim=True)
    outputs = [F.gelu(x @ W * (1 + int(i))) @ V for i in chosen[0]]
    return sum(w * y for w, y in zip(weights[0], outputs, strict=True))


def _rotated(x: Tensor) -> Tensor:
    first, second = x.view(1, 3, 4).chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.view(1, 3, 4) * GAIN[:4] + turned * GAIN[4:8]).flatten(1)


def _rotated_as_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(3, 2, 2))
    turns = torch.polar(GAIN[:2], GAIN[2:4])
    return torch.view_as_real(pairs * turns + pairs.conj() * pairs.abs()).reshape(1, -1)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :4] *= x[:, 4:8]
    y += U[0]
    return y.clamp_(min=0.1)


def _norm_of_heads(x: Tensor) -> Tensor:
    heads = (x @ U).view(1, 3, 4)
    return F.layer_norm(heads, (4,)).flatten(1) @ U + F.rms_norm(heads, (4,)).flatten(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pre-norm block": _block,
    "experts": _experts,
    "rotation": _rotated,
    "rotation of complex numbers": _rotated_as_complex,
    "in place": _in_place,
    "norms of heads": _norm_of_heads,
    "post-norm": lambda x: F.layer_norm(x + _rms_norm(x) @ U, (D,), GAIN, U[1]),
    "softmax over rows": lambda x: F.softmax(x.view(3, 4), dim=0).flatten()[None] @ U,
    "softmax over columns": lambda x: F.softmax(x.view(3, 4), dim=-1).flatten()[None],
    "one entry": lambda x: x[:, :1] * x + x.sum() + x.mean(-1, keepdim=True) ** 2,
    "outer product": lambda x: (x.mT @ x).reshape(1, -1),
    "bias that depends": lambda x: torch.addmm(x, x.sin(), U, beta=0.5, alpha=2),
    "product of two": lambda x: x.exp() * x.cos() / (x**2 + 1) - x,
    "itself twice": lambda x: x * x + x + x - (x - x) + x / x.abs().sum(),
    "convolution": lambda x: F.conv1d(x[None], W[:1, :3][None]).reshape(1, -1),
    "selection": lambda x: x[:, torch.tensor([3, 1, 1])].sort(-1).values,
    "where": lambda x: torch.where(x > 0, x, U[:1] * x.tanh()),
    "stacked and split": lambda x: torch.stack([x, x.sin()]).split([1, 1])[1].mT.mT[0],
    "expanded": lambda x: (
        x.view(1, 3, 1, 4).expand(2, 3, 5, 4).sum((0, 2)).flatten(0)[None]
    ),
    "constants": lambda x: x * torch.ones_like(x) + x.new_full((1, D), 2.0) * x.sign(),
    "overwritten": lambda x: x.clone().fill_(3.0) * x + x.clone().copy_(x[:, :1]),
    "two precisions": lambda x: (_rms_norm(x).float() @ W.float()).double() @ V + x @ U,
    "two precisions, added": lambda x: torch.zeros_like(x).index_add(
        0, torch.tensor([0]), x.sin() * (x.float() @ U.float()).softmax(-1)[:, :1]
    ),
    "detached": lambda x: x.detach() * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_record_has_the_jacobian_that_torch_gives(name: str) -> None:
    """`torch.func.jacfwd`, which shares no code with it; what is detached is seen."""
    function = FUNCTIONS[name]
    whole = torch.square if name == "detached" else function
    x = _weights(D)

    y, J = _recorded_jacobian(lambda x, _: function(x[None]).reshape(-1), x)

    expected = torch.func.jacfwd(lambda x: whole(x[None]).reshape(-1))(x)
    torch.testing.assert_close(y, whole(x[None]).reshape(-1))
    tolerance = 1e-6 if name.startswith("two precisions") else 1e-10
    torch.testing.assert_close(J, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(12))
def test_networks_drawn_at_random(seed: int) -> None:
    """Layers of torch in random order, with and without skip connections."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(D, D),
        lambda: nn.LayerNorm(D),
        lambda: nn.RMSNorm(D),
        lambda: nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D)),
        nn.Tanh,
        lambda: nn.GroupNorm(3, D),
        lambda: nn.Softmax(-1),
        lambda: nn.Bilinear(D, D, D),
    ]
    layers = []
    for choice in torch.randint(len(makers), (7,), generator=generator).tolist():
        layers.append(makers[choice]().double())
    is_skipped = torch.rand(7, generator=generator) < 0.6

    def function(x: Tensor) -> Tensor:
        for layer, skip in zip(layers, is_skipped.tolist(), strict=True):
            added = layer(x, x) if isinstance(layer, nn.Bilinear) else layer(x)
            x = x + added if skip else added
        return x

    x = torch.randn(1, D, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        _, J = _recorded_jacobian(lambda x, _: function(x[None])[0], x[0])

    expected = torch.func.jacrev(lambda x: function(x[None])[0])(x[0])
    torch.testing.assert_close(J, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.round() * x,
        lambda x: x * x[0].item(),
        lambda x: x.to(torch.int64).to(x),
        lambda x: torch.ones(3),
    ],
)
def test_what_has_no_slope_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(BlockError):
        _recorded_jacobian(lambda x, _: function(x), _weights(D) * 5)


def test_constants_of_a_record_stay_out_of_the_derivative() -> None:
    x = _weights(D)
    _, J = _recorded_jacobian(lambda x, record: record.constant(x) * x, x)
    torch.testing.assert_close(J, torch.diag(x))


def test_a_jacobian_is_no_view_of_a_weight() -> None:
    _, J = _recorded_jacobian(lambda x, _: (x[None] @ U)[0], _weights(D))
    J.zero_()
    assert bool(U.any())


class _Attention(nn.Module):
    """Causal attention of four heads, the keys and values of which are shared by two."""

    def __init__(self, repeats_keys: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.q = nn.Linear(D, 16)
        self.kv = nn.Linear(D, 16)
        self.out = nn.Linear(16, D)
        self.repeats_keys = repeats_keys

    def forward(self, X: Tensor) -> Tensor:
        return X + self.out(self.heads(X))

    def heads(self, X: Tensor) -> Tensor:
        Z = self.norm(X)
        q = self.q(Z).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(Z).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.repeats_keys:
            # Heads 0 and 2 share keys, and not neighbours.
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        z = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=not self.repeats_keys
        )
        return z.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("repeats_keys", [False, True])
def test_attention_of_ones_own_goes_by_the_record(repeats_keys: bool) -> None:
    """As nanoGPT writes it: the mask and the sharing of keys are torch's."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(_Attention(repeats_keys) for _ in range(2))).double()
    X = torch.randn(1, 6, D, dtype=torch.float64)
    trace = tlc.trace_modules(list(blocks), lambda: blocks(X))
    for layer, block in enumerate(blocks):
        stream = trace.residual[layer][None]
        whole = torch.func.jacrev(block)(stream)[0, :, :, 0]
        for t in range(6):
            J, path = trace.blocks[layer].jacobian(t, t)
            assert path == "token_local_recorded"
            expected = whole[t, :, t] - torch.eye(D)
            torch.testing.assert_close(J, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("repeats_keys", [False, True])
def test_other_inputs_and_heads_of_attention_of_ones_own(repeats_keys: bool) -> None:
    """Keys and values of other rows are recorded too, and heads are found in attention's
    second product: by `torch.func` of the whole block, and of its heads.
    """
    torch.manual_seed(1)
    block = _Attention(repeats_keys).double()
    X = torch.randn(1, 6, D, dtype=torch.float64)
    trace = tlc.trace_modules([block], lambda: block(X))
    whole = torch.func.jacrev(block)(X)[0, 5, :, 0].transpose(0, 1).detach().clone()

    some, path = trace.blocks[0].jacobians([0, 3, 5], 5)
    one, path_of_one = trace.blocks[0].jacobian(2, 5)
    assert (path, path_of_one) == ("query_local_recorded", "token_local_recorded")
    whole[5] -= torch.eye(D)
    for J, t1 in zip([*some, one], [0, 3, 5, 2], strict=True):
        torch.testing.assert_close(J, whole[t1], rtol=1e-9, atol=1e-10)

    parts = tlc.block_parts(trace, 0)
    assert parts.labels == ("L0H0", "L0H1", "L0H2", "L0H3")
    read = torch.func.jacrev(block.heads)(X)[0, 5, :, 0, 5].unflatten(0, (4, 4))
    write = block.out.weight.unflatten(1, (4, 4)).movedim(1, 0)
    torch.testing.assert_close(
        parts.matrices, (write @ read).detach(), rtol=1e-9, atol=1e-10
    )
