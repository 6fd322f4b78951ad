"""Functions of torch with their coefficients held constant: the closed form of each
kind, and that a block is left as it was.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from random_matrices import gaussian
from tl_coupling.blocks.freezing import Freezing

Function = Callable[[Tensor], Tensor]
X = gaussian(3, 6, seed=1)
W = gaussian(6, 6, seed=2)


def frozen_derivative(function: Function, direction: Tensor) -> Tensor:
    """Return what the frozen function's derivative at X makes of a direction, by its
    pull-back along every axis.
    """

    def of_flat(x: Tensor) -> Tensor:
        return function(x.reshape(X.shape)).reshape(-1)

    with Freezing():
        y, pull_back = torch.func.vjp(of_flat, X.reshape(-1))
        rows = torch.stack([pull_back(seed)[0] for seed in torch.eye(len(y)).to(y)])
    torch.testing.assert_close(y, of_flat(X.reshape(-1)), rtol=1e-12, atol=1e-12)
    return (rows @ direction.reshape(-1)).reshape(function(X).shape)


def by_hand_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Function] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu, approximated": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu by hand": by_hand_gelu,
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "silu by division": lambda x: x / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
    "relu squared": lambda x: torch.relu(x).square(),
    "relu squared by product": lambda x: torch.relu(x) ** 2,
    "a module in place": nn.ReLU(inplace=True),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_multiplies_by_its_ratio(name: str) -> None:
    function = ACTIVATIONS[name]

    def block(x: Tensor) -> Tensor:
        return function(x @ W)

    V = gaussian(3, 6, seed=3)
    pre = X @ W
    ratio = function(pre.clone()) / pre
    torch.testing.assert_close(frozen_derivative(block, V), ratio * (V @ W))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() - {"clamp"}))
@pytest.mark.parametrize("gate_comes_first", [True, False])
def test_a_gate_is_constant(name: str, gate_comes_first: bool) -> None:
    function = ACTIVATIONS[name]
    W_in = gaussian(6, 6, seed=4)

    def block(x: Tensor) -> Tensor:
        gate = function(x @ W)
        return gate * (x @ W_in) if gate_comes_first else (x @ W_in) * gate

    V = gaussian(3, 6, seed=3)
    expected = function((X @ W).clone()) * (V @ W_in)
    torch.testing.assert_close(frozen_derivative(block, V), expected)


def rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


LAYER_NORM = nn.LayerNorm(6, eps=1e-3, dtype=torch.float64)
LAYER_NORM.weight.data = gaussian(6, 1, seed=5)[:, 0]
LAYER_NORM.bias.data = gaussian(6, 1, seed=6)[:, 0]
RMS_NORM = nn.RMSNorm(6, eps=1e-3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("norm", "linear", "scale"),
    [
        (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3), torch.clone, rms),
        (lambda x: x / rms(x), torch.clone, rms),
        (RMS_NORM, torch.clone, rms),
        (
            lambda x: x * torch.pow(x.pow(2).mean(-1, True) + 1e-3, -0.5),
            torch.clone,
            rms,
        ),
        (
            LAYER_NORM,
            lambda x: LAYER_NORM.weight.detach() * centred(x),
            lambda x: rms(centred(x)),
        ),
        (
            lambda x: x / x.norm(dim=-1, keepdim=True),
            torch.clone,
            lambda x: x.norm(dim=-1, keepdim=True),
        ),
    ],
)
def test_a_norm_divides_by_a_constant(
    norm: Function, linear: Function, scale: Function
) -> None:
    V = gaussian(3, 6, seed=3)
    torch.testing.assert_close(frozen_derivative(norm, V), linear(V) / scale(X))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_mixes_values_by_a_constant_pattern(fused: bool) -> None:
    W_V = gaussian(6, 6, seed=4)

    def attention(x: Tensor) -> Tensor:
        if fused:
            q, k, v = [rows[None, None] for rows in (x @ W, x, x @ W_V)]
            return functional.scaled_dot_product_attention(q, k, v)[0, 0]
        scores = (x @ W) @ x.mT / 6**0.5
        return scores.softmax(-1) @ (x @ W_V)

    pattern = ((X @ W) @ X.mT / 6**0.5).softmax(-1)
    V = gaussian(3, 6, seed=3)
    torch.testing.assert_close(frozen_derivative(attention, V), pattern @ V @ W_V)


def test_what_is_not_differentiated_is_left_alone() -> None:
    calls: list[Function] = [functional.gelu, torch.sqrt, functional.softmax]
    x = X.abs()
    expected = [
        call(x, dim=-1) if call is functional.softmax else call(x) for call in calls
    ]
    with Freezing():
        values = [
            call(x, dim=-1) if call is functional.softmax else call(x) for call in calls
        ]
    assert all(map(torch.equal, values, expected))
