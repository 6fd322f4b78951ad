"""What the checks of a block function are made of: what they find, how they look, and
what they say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.contexts import BlockError

# Functions without a slope, and casts: where their steps are wider than the moves, only
# their names reveal them.
_STAIRS = {
    "round",
    "floor",
    "ceil",
    "trunc",
    "fix",
    "quantize_per_tensor",
    "quantize_per_channel",
}
_CASTS = {"to", "type", "long", "int", "short", "char"}


class StepError(ValueError):
    """A block, called again, is not the function that was traced: its weights or hooks
    changed, or it draws at random.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.PReLU(init=0.9))
        >>> changed = tlc.trace_modules(net, lambda: net(-torch.ones(1, 3, 4)))
        >>> _ = torch.nn.init.zeros_(net[0].weight)
        >>> try:
        ...     J = tlc.block_jacobian(changed, 0)
        ... except tlc.gradients.StepError:
        ...     print("trace it again")
        trace it again
    """


class DerivativeError(ValueError):
    """A block function has no derivative, or another one than automatic differentiation
    gives.

    Example:
        >>> class Rounds(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + (8 * x).round() / 8
        >>> net = torch.nn.Sequential(Rounds())
        >>> rounded = tlc.trace_modules(net, lambda: net(torch.rand(1, 3, 4)))
        >>> try:
        ...     J = tlc.block_jacobian(rounded, 0)
        ... except tlc.gradients.DerivativeError:
        ...     print("a step function has no Jacobian")
        a step function has no Jacobian
    """


class Reference(NamedTuple):
    """The full sequence's `f(X)[t]`, a seeded random u, and `uᵀ J_{· t}` of every input
    row, `[n_pos d_model]`.
    """

    y: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_model"]
    rows: Float[Tensor, "n_pos d_model"]


@contextmanager
def mlp_on_rows(block: nn.Module, rows: list[int], n_pos: int) -> Iterator[None]:
    """Context in which the block's MLP computes these rows only and gives zeros for the
    others.
    """

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        match args:
            case (Tensor() as n,) if not kwargs and n.shape[:-1] == (1, n_pos):
                return (n[:, rows],), {}
        raise BlockError("the MLP's input is not all rows, alone")

    def put_back(_: nn.Module, __: Any, out: Any) -> Tensor:
        if not isinstance(out, Tensor):
            raise BlockError("the MLP gives more than its rows")
        at = torch.tensor(rows, device=out.device)
        return out.new_zeros(1, n_pos, out.shape[-1]).index_copy(1, at, out)

    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module) or len(rows) == n_pos:
        raise BlockError("there is no MLP, or no row without interest")
    with (
        mlp.register_forward_pre_hook(take, with_kwargs=True, prepend=True),
        mlp.register_forward_hook(put_back),
    ):
        yield


class Stairs(TorchFunctionMode):
    """Notes a function with zero slope that is applied to something differentiated."""

    found: str | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        quantized = isinstance(func, OpOverloadPacket) and str(func).startswith(
            "quantized."
        )
        to_integers = (
            name in _CASTS
            and isinstance(output, Tensor)
            and not output.is_floating_point()
        )
        if (
            (quantized or to_integers or name in _STAIRS)
            and isinstance(args[0], Tensor)
            and args[0].requires_grad
        ):
            self.found = str(func) if quantized else name
        return output


def in_words(chosen: Tensor) -> str:
    """The positions that are chosen."""
    positions = chosen.nonzero().flatten().tolist()
    some = ", ".join(map(str, positions[:8])) + (", …" if len(positions) > 8 else "")
    return f"token{'s' if len(positions) > 1 else ''} {some}"


def in_percent(difference: Tensor, step: Tensor, chosen: Tensor) -> str:
    """The largest share of the step that a difference is, where chosen."""
    percent = 100 * float((difference.to(step) / step)[chosen].max())
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"
