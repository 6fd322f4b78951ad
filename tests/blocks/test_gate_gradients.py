"""Gradients that somebody changed, by less than the slope along a random direction
tells: autograd gives another derivative than the operations that run.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tl_coupling as tlc
from tl_coupling.blocks import DerivativeError

pytestmark = pytest.mark.both_lines
D = 16


def scaled(share: float) -> Callable[[Tensor], Tensor]:
    """Return a function whose own backward pass is off by a share."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (1 - x.tanh() ** 2) * (1 + share)

    return Scaled.apply


def hooked(x: Tensor) -> Tensor:
    x = x.tanh()
    if x.requires_grad:
        x.register_hook(lambda gradient: 1.004 * gradient)
    return x


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        small = 0.004 * x.sin()
    return x.tanh() + small


CHANGED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a backward pass off by 1 %": (scaled(0.01), "Scaled"),
    "a backward pass off by .5 %": (scaled(-0.005), "Scaled"),
    "a backward pass off by .1 %": (scaled(0.001), "Scaled"),
    "a part without gradient": (lambda x: x.tanh() + 0.004 * x.detach(), "detach"),
    "a part within no_grad": (without_grad, "no_grad"),
    "a hook on a tensor": (hooked, "register_hook"),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "a backward pass of its own": scaled(0.0),
    "a detached copy of nothing that matters": lambda x: (
        x.tanh() * (x.detach().abs() >= 0)
    ),
    "a kink": nn.functional.relu,
    "a steep function": lambda x: torch.tanh(30 * x),
}


class Block(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.mlp_in = nn.Linear(D, 2 * D)
        self.mlp_out = nn.Linear(2 * D, D)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        heads = nn.functional.layer_norm(x, x.shape[-1:])
        q, k, v = (part[:, None] for part in self.qkv(heads).chunk(3, -1))
        x = (
            x
            + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        )
        hidden = self.mlp_in(nn.functional.layer_norm(x, x.shape[-1:]))
        return x + self.mlp_out(self.change(hidden))


def traced(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tlc.Trace:
    torch.manual_seed(0)
    block = Block(change).to(dtype)
    X = torch.randn(1, 6, D, dtype=dtype)
    return tlc.trace_modules([block], lambda: block(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_gradient_is_refused_by_its_name(
    change: str, dtype: torch.dtype
) -> None:
    function, name = CHANGED[change]
    for t1 in (5, 2):
        with pytest.raises(DerivativeError, match=name):
            tlc.block_jacobian(traced(function, dtype), 0, input_position=t1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", RIGHT)
def test_a_right_gradient_is_taken(change: str, dtype: torch.dtype) -> None:
    trace = traced(RIGHT[change], dtype)
    (block,) = trace.blocks

    def added(x: Tensor) -> Tensor:
        replaced = torch.cat([block.X[:5], x[None]])
        return block.call.module(replaced[None])[0, 5] - x

    expected = torch.autograd.functional.jacobian(added, block.X[5])
    J, path = block.jacobian(5, 5)
    assert path == "token_local_recorded"
    assert float((J - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("error", [0.01, 0.001])
def test_a_record_that_is_wrong_is_passed_over(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function changes as autograd says: no gradient was changed."""
    from tl_coupling.blocks.records import Recorded

    right = Recorded.jacobians
    monkeypatch.setattr(
        Recorded, "jacobians", lambda self: [(1 + error) * J for J in right(self)]
    )
    trace = traced(scaled(0.0), torch.float32)
    (block,) = trace.blocks
    _, path = block.jacobian(5, 5)
    assert path == "token_local"
