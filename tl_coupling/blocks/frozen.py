"""A block with what makes it nonlinear held constant: what it adds to the stream is then
an affine function,

    f⁺(X')_t = Σ_s J⁺_{ts} x'_s + b_t, with f⁺(X) = f(X) at the stream X that was traced.

It is the block's own code within `Freezing`, so that it is evaluated in the same ways
as the block, and a cheap way is compared with the full sequence as the block's is. The
full sequence is compared with the function itself: an affine one changes by exactly
what its Jacobian says, however far the stream is moved.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import cached_property
from tl_coupling.blocks.errors import DerivativeError
from tl_coupling.blocks.freezing import Freezing
from tl_coupling.blocks.function import BlockFunction
from tl_coupling.blocks.gate import Reference

# How far the frozen function may be from an affine one, relative to its changes; float32
# gives 1e-7. And how far the stream is moved, in its own lengths: what is of second
# order shows more the farther.
_TOLERANCE = 1e-5
_MOVES = (1, 16)


@dataclass(eq=False)
class FrozenFunction(BlockFunction):
    """What a block adds to the stream, with norms, attention and gates held constant.

    `f⁺` of `X` is `f(X)`; its Jacobian is J⁺, and it must be affine. `is_entered` says
    whether the context of `evaluation` has been entered.
    """

    freezing: Freezing = field(default_factory=Freezing, init=False, repr=False)
    is_entered: bool = field(default=False, init=False, repr=False)

    @classmethod
    def from_block(cls, block: BlockFunction) -> "FrozenFunction":
        """Return a block's function with its coefficients held constant."""
        values: dict[str, Any] = {
            part.name: getattr(block, part.name)
            for part in fields(BlockFunction)
            if part.init
        }
        return cls(**values)

    def affine(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return `f⁺` of another stream, with the coefficients of the traced one.

        Of zeros it is the bias.
        """
        with self.evaluation(), self.freezing.replayed(self.constants):
            return self._added_to_differentiated(X)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Enter the context in which the block is evaluated, its coefficients constant."""
        with super().evaluation(), ExitStack() as stack:
            if not self.is_entered:
                stack.enter_context(self.freezing)
                stack.callback(setattr, self, "is_entered", False)
                self.is_entered = True
            yield

    @cached_property
    def constants(self) -> list[Tensor]:
        """The coefficients at X, in the order of the block's code."""
        with self.freezing.recorded() as constants:
            self._added_to_differentiated(self.X)
        return constants

    def recordable(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that a record sees with its coefficients held constant."""

        def frozen(*arguments: Any) -> Tensor:
            *inputs, record = arguments
            with torch.enable_grad(), self.freezing.holding(record.constant):
                # Only what is differentiated has coefficients.
                return function(*(x.requires_grad_() for x in inputs), record)

        return frozen

    def remark_on_norms(self) -> bool:
        """Say that nothing normalises the stream: norms divide by constants."""
        return False

    def _added_to_differentiated(self, X: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.added(X.detach().clone().requires_grad_()).detach()

    def _check_slopes(self, forward: Any, references: dict[int, Reference]) -> None:
        """Raise DerivativeError unless f⁺ changes by J⁺ as the stream does.

        It is moved to zero, and along a random direction V.
        """
        X = self.X
        generator = torch.Generator().manual_seed(self.layer)
        V = torch.randn(X.shape, generator=generator, dtype=torch.float64).to(X)
        V = V * X.norm(dim=1, keepdim=True) / V.norm(dim=1, keepdim=True)
        positions = list(references)
        u = torch.stack([reference.u for reference in references.values()])
        uJ = torch.stack([reference.rows for reference in references.values()])
        size = X.norm(dim=1) + forward.Y.norm(dim=1)
        eps = torch.finfo(torch.float32).eps
        rounding = eps * size[positions] * u.norm(dim=1)
        # For large moves, terms of second order outweigh rounding.
        for moved in (torch.zeros_like(X), *(X + move * V for move in _MOVES)):
            change = (self._affine(moved) - forward.Y)[positions]
            change_along_u = einsum(
                change, u, "output d_model, output d_model -> output"
            )
            predicted_by_rows = einsum(
                uJ, moved - X, "output n_pos d_model, n_pos d_model -> output n_pos"
            )
            scale = predicted_by_rows.norm(dim=1) + change.norm(dim=1) * u.norm(dim=1)
            deviation = (change_along_u - predicted_by_rows.sum(1)).abs()
            if not bool((deviation <= _TOLERANCE * scale + rounding).all()):
                raise self._not_affine()

    def _affine(self, X: Tensor) -> Tensor:
        try:
            return self.affine(X)
        except (RuntimeError, StopIteration):
            raise self._not_affine() from None

    def _not_affine(self) -> DerivativeError:
        return DerivativeError(
            f"block {self.layer} has no frozen Jacobian: with norm scales, attention "
            "patterns and gates held constant it is not an affine function of the "
            "stream (it multiplies activations with each other in another way, as "
            "recurrent layers do, or computes them by a function that is not known)"
        )
