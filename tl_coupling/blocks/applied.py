"""A block function within somebody else's differentiation."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks.evaluation import vjp

if TYPE_CHECKING:
    from tl_coupling.blocks.rows import EvaluatedBlock


class Applied(torch.autograd.Function):
    """`f(X)` of a block, with derivatives in X, by reverse and by forward mode.

    The block's weights are in the precision of X, and in memory, only while it is
    evaluated. So it is evaluated again for each derivative, instead of a graph that
    outlives them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        X: Float[Tensor, "n_pos d_model"], block: "EvaluatedBlock"
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return f(X)."""
        with block.evaluation():
            return block.added(X)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        """Keep X."""
        X, ctx.block = inputs
        ctx.save_for_backward(X)
        ctx.save_for_forward(X)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of X, which has no derivative itself."""
        (X,) = ctx.saved_tensors
        with ctx.block.evaluation():
            _, pull_back = vjp(ctx.block.added, X.detach())
            (gradient_of_X,) = pull_back(gradient.detach())
        return _once(gradient_of_X, X, gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _block: None) -> Tensor:
        """Return the change of f along a change of X, which has no derivative itself."""
        (X,) = ctx.saved_tensors
        with ctx.block.evaluation():
            moved: Any = torch.func.jvp(
                ctx.block.added, (X.detach(),), (tangent.detach(),)
            )
        return _once(moved[1], X, tangent)


class _Once(torch.autograd.Function):
    """A derivative, as a function of what it was computed from: it refuses to be
    differentiated, where zero would be wrong without a word.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *_: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(_ctx: Any, *_gradient: Tensor) -> tuple[None, ...]:
        raise _second_derivative()

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Tensor) -> Tensor:
        raise _second_derivative()


def _once(value: Tensor, *origins: Tensor) -> Tensor:
    result: Tensor = _Once.apply(value, *origins)
    return result


def _second_derivative() -> NotImplementedError:
    return NotImplementedError(
        "a block function has first derivatives: for second ones, differentiate "
        "`block.call.module` itself"
    )
