"""Block functions within somebody else's differentiation: `f` is differentiable in X."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

TOKENS = tiny.TOKENS[:5]


def rows_of_oracle(hf_model: nn.Module, layer: int) -> Tensor:
    """Return `∂f(X)_{t2} / ∂x_{t1}` of all pairs, `[t2 d t1 d]`."""
    pairs = [(t1, t2) for t1 in range(5) for t2 in range(5)]
    jacobians = tiny.oracle_jacobians(hf_model, TOKENS, layer, pairs)
    J = torch.zeros(5, tiny.D_MODEL, 5, tiny.D_MODEL)
    for (t1, t2), matrix in jacobians.items():
        J[t2, :, t1] = matrix
    return J


@pytest.fixture(scope="module")
def oracle() -> Tensor:
    return rows_of_oracle(tiny.huggingface_model("llama"), 1)


@pytest.fixture(params=["bridge", "in memory", "bfloat16", "modules"])
def block(
    request: pytest.FixtureRequest, tokenizer_folder: Path
) -> "tlc.blocks.BlockFunction":
    model = tiny.huggingface_model("llama")
    if request.param == "modules":
        ids = torch.tensor([TOKENS])
        layers = tiny.layers_of(model)
        return tlc.trace_modules(layers, lambda: model(ids)).blocks[1]
    if request.param == "bridge":
        model = tiny.bridge(model, tokenizer_folder)
    if request.param == "bfloat16":
        # Weights that bfloat16 holds exactly would be another model's: only the path
        # is of interest, and the tolerance is that of its rounding.
        model = model.to(torch.bfloat16)
    return tlc.trace(model, TOKENS).blocks[1]


WAYS = {
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "functional": lambda f: lambda X: torch.autograd.functional.jacobian(f, X),
    "vectorized": lambda f: (
        lambda X: torch.autograd.functional.jacobian(f, X, vectorize=True)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_differentiation_sees_the_block(
    way: str, block: "tlc.blocks.BlockFunction", oracle: Tensor
) -> None:
    J = WAYS[way](block)(block.X)
    is_rounded = next(block.call.module.parameters()).dtype == torch.bfloat16
    error = (J - oracle).norm() / oracle.norm()
    assert error <= (0.1 if is_rounded else 1e-5)
    # What tlc measures of the same block is the same.
    own, _ = block.jacobian(3, 4)
    assert torch.allclose(J[4, :, 3], own, atol=1e-4 * float(own.norm()))


def test_backward_and_chains_with_other_functions(
    block: "tlc.blocks.BlockFunction",
) -> None:
    X = block.X.clone().requires_grad_()
    (block(2 * X) ** 2).sum().backward()
    f = block(2 * block.X)
    J = torch.func.jacrev(block)(2 * block.X).reshape(f.numel(), -1)
    expected = 2 * (2 * f.flatten()) @ J
    torch.testing.assert_close(X.grad.flatten(), expected, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in block.call.module.parameters())
    assert not block(block.X).requires_grad


def test_second_derivatives_are_refused_and_not_zero(
    block: "tlc.blocks.BlockFunction",
) -> None:
    def first(X: Tensor) -> Tensor:
        return torch.func.jacrev(lambda Z: block(Z)[-1, 0])(X)

    for second in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match="has first derivatives"):
            second(first)(block.X)
    X = block.X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(block(X).sum(), X, create_graph=True)
    with pytest.raises(NotImplementedError, match="has first derivatives"):
        gradient.sum().backward()
