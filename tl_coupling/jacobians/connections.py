"""Connections: a block, from one token to another. Each has one Jacobian."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from tl_coupling.blocks import BlockFunction, Trace

# The function of a block that normalises the stream: block(X) − X, or what its residual
# branches add before the norms.
Function = Literal["block", "branches"]
# "frozen" is what the branches add with norms, attention patterns and gates held
# constant.
AnyFunction = Literal["block", "branches", "frozen"]


class Connection(NamedTuple):
    """The name of one `J^l_{t1 t2}`: a block, from one token to another.

    `position` is the token that labels a result.
    """

    layer: int
    input_position: int
    output_position: int
    position: int

    @property
    def read_hook_point(self) -> str:
        """The hook point of TransformerLens where the block reads the stream."""
        return f"blocks.{self.layer}.hook_resid_pre"

    @property
    def write_hook_point(self) -> str:
        """The hook point of TransformerLens behind what the block writes."""
        return f"blocks.{self.layer}.hook_resid_post"

    def __str__(self) -> str:
        if self.input_position == self.output_position:
            return f"layer {self.layer}, token {self.position}"
        return (
            f"layer {self.layer}, tokens {self.input_position}→{self.output_position}"
        )


def connected(
    trace: Trace,
    layer: int,
    position: int,
    input_position: int | None,
    output_position: int | None,
) -> tuple[BlockFunction, int, int]:
    """Return the block, t1 and t2, counted from 0.

    Each token is `position` unless it is given by itself.
    """
    if input_position is None:
        input_position = position
    if output_position is None:
        output_position = position
    t1 = trace.position_index(input_position, "input_position")
    t2 = trace.position_index(output_position, "output_position")
    return trace.blocks[trace.layer_index(layer)], t1, t2


def chosen_layers(
    trace: Trace, layers: Sequence[int] | None, name: str = "layers"
) -> list[int]:
    """Return the layers that are selected, counted from 0, or all."""
    if layers is None:
        return list(range(trace.n_layers))
    if not len(layers):
        raise ValueError(f"`{name}` is empty: wanted at least one layer")
    return [trace.layer_index(layer) for layer in layers]


def named_layers(J: Tensor, layers: Sequence[int] | None) -> list[int]:
    """Return what given Jacobians are called: from 0 on by default.

    Raises ValueError unless each has one name, and there is at least one.
    """
    # Given Jacobians have no trace that would number them.
    names = list(range(len(J)) if layers is None else layers)
    if names and len(names) == len(J):
        return names
    raise ValueError(
        f"`layers` must name each of the {len(J)} matrices of `J`, at least one, "
        f"got {len(names)}"
    )
