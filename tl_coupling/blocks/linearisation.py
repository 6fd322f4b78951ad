"""The Jacobian of a block at one token: the block's own code, run on tangents, with its
parts replaced by Jacobians.

A block is a few parts (norms, attention, an MLP) and what its code does with them:
sums, scales, the order. That code is linear. So the block is called once on the token,
to see what each part gets, and then on the rows of the identity, where each part does
to a row what its Jacobian does: out come the rows of `(I + J)ᵀ`.

Rows of the identity, and of a norm's Jacobian, go through a matrix without a product.
Whether a block is made in this way is not decided here: like every cheap way, the
result is compared with the full sequence.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import forwards_replaced
from tl_coupling.blocks.contexts import BlockError, Context
from tl_coupling.blocks.parts import (
    Attention,
    Jacobian,
    Norm,
    Part,
    jacobian_of_part,
    rows_in,
)
from tl_coupling.blocks.rows import EvaluatedBlock

# From a part, its Jacobian and the tangents that it gets, to those that it gives.
Replaced = Callable[[Part, Jacobian, Sequence[Tensor]], Tensor | None]


class Linearisation:
    """A block at the token t, as parts with Jacobians; `y` is its output there.

    `keys_and_values` are those of the rows that act on the token.
    """

    def __init__(
        self,
        block: EvaluatedBlock,
        t: int,
        keys_and_values: tuple[Tensor, ...],
        chunk_size: int | None,
    ) -> None:
        self.block = block
        context = block.call.context(t, keys_and_values)
        self.context = context
        self.y, parts = _called_parts(block, t, context)
        # The calls of each module, in order.
        self.calls: dict[nn.Module, list[tuple[Part, Jacobian]]] = defaultdict(list)
        for part in parts:
            J = jacobian_of_part(part, context, chunk_size)
            self.calls[part.module].append((part, J))

    @property
    def attention(self) -> Attention:
        """The one attention part."""
        attentions = [
            J
            for calls in self.calls.values()
            for _, J in calls
            if isinstance(J, Attention)
        ]
        if len(attentions) != 1:
            raise BlockError(
                "the block has not one attention part with TransformerLens' weights "
                "and hook points"
            )
        return attentions[0]

    def heads(self, *rows: Tensor) -> Float[Tensor, " d_z"]:
        """Return what heads give with other keys and values in their context."""
        self.context.rows = rows
        return self.attention.part.hook_function((), "hook_z")()

    def derivative_rows(
        self,
        rows: Float[Tensor, "n d_model"],
        attention_rows: Float[Tensor, "n d_model"] | None = None,
    ) -> Float[Tensor, "n d_model"]:
        """Return what the block's derivative makes of tangents in the stream.

        `attention_rows` takes the place of attention's output.
        """

        def replaced(
            _: Part, J: Jacobian, __: Sequence[Tensor]
        ) -> Float[Tensor, "n d_model"] | None:
            return attention_rows if isinstance(J, Attention) else None

        return self.apply(rows, replaced)

    def jacobian(self) -> Float[Tensor, "d_model d_model"]:
        """Return `∂ block(X)[t] / ∂ x_t`."""
        y = self.y
        identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
        return self.apply(identity, is_identity=True).mT

    def apply(
        self,
        rows: Float[Tensor, "n d_model"],
        replaced: "Replaced | None" = None,
        *,
        is_identity: bool = False,
    ) -> Float[Tensor, "n d_model"]:
        """Return what the block's code makes of rows, with Jacobians for its parts.

        Args:
            rows: tangents in the stream.
            replaced: gives what a part makes of its rows, or None for what its
                Jacobian makes of them.
            is_identity: whether the rows are the identity, with which no product is
                computed.
        """
        tangents = _Tangents(*([rows] if is_identity else []))

        def forward(
            calls: Iterator[tuple[Part, Jacobian]], *args: Any, **kwargs: Any
        ) -> Any:
            call = next(calls, None)
            if call is None:
                raise BlockError(
                    "a part was called more often on tangents than on the token"
                )
            part, J = call
            inputs: list[Tensor] = [
                args[key] if isinstance(key, int) else kwargs[key]
                for key in part.inputs
            ]
            tangents_in = [x.flatten(0, -2) for x in inputs]
            moved = None
            if replaced is not None:
                moved = replaced(part, J, tangents_in)
            if moved is None:
                moved = tangents.image(J, tangents_in)
            output = moved.reshape(*inputs[0].shape[:-1], -1)
            if isinstance(part.output, tuple | list):
                return type(part.output)((output, *part.output[1:]))
            return output

        forwards = {
            module: partial(forward, iter(calls))
            for module, calls in self.calls.items()
        }
        # The block's own code adds, scales and orders what the parts give.
        with forwards_replaced(forwards):
            return self.block.row_output(rows, self.context)


def _called_parts(
    block: EvaluatedBlock, t: int, context: Context
) -> tuple[Float[Tensor, " d_model"], list[Part]]:
    """Return the block's output at t, and the calls of its modules on the way."""
    parts: list[Part] = []

    def note(
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> None:
        # The part in which keys and values were both asked for is attention.
        has_met_context = len(context.seen) == 2 and not any(
            earlier.meets_context for earlier in parts
        )
        inputs = rows_in(args, kwargs)
        part = Part(
            module, args, kwargs, inputs, output, context.entered, has_met_context
        )
        # Not those without rows (rotations), or that give what they got (dropout,
        # hook points).
        places = [row.data_ptr() for row in inputs.values()]
        if places and part.value.data_ptr() not in places:
            parts.append(part)

    module = block.call.module
    # A bridge's block wraps the original one, whose parts are called.
    modules = list((getattr(module, "original_component", None) or module).children())
    if block.norm is not None:
        modules.append(block.norm)
    with shared_changes() as hooks:
        for part in dict.fromkeys(modules):
            hooks.enter_context(part.register_forward_hook(note, with_kwargs=True))
        # A copy: the block may add to it in place.
        y = block.row_output(block.X[t, None].clone(), context)[0]
    return y, parts


class _Noted(NamedTuple):
    """Rows that are the identity, or what a norm made of it.

    `version` is that of the tensor when it was noted: in-place changes raise it.
    """

    rows: Tensor
    version: int
    norm: Norm | None


class _Tangents:
    """Products of tangents with Jacobians, without those with the identity.

    The identity, and what a norm makes of it, are known by their memory, which is kept,
    and by not having been changed since.
    """

    def __init__(self, *identities: Tensor) -> None:
        self.noted: dict[int, _Noted] = {}
        for identity in identities:
            self._note(identity, None)

    def _note(self, rows: Tensor, norm: Norm | None) -> None:
        self.noted[rows.data_ptr()] = _Noted(rows, rows._version, norm)

    def _as_noted(self, rows: Tensor) -> _Noted | None:
        """Return what is noted of these rows, if they are still what they were."""
        noted = self.noted.get(rows.data_ptr())
        if noted is None or noted.rows.shape != rows.shape:
            return None
        return noted if rows._version == noted.version else None

    def image(self, J: Jacobian, inputs: Sequence[Tensor]) -> Tensor:
        """Return the rows that a part makes of those that it gets."""
        if isinstance(J, Norm):
            (rows,) = inputs
            output = J.image(rows)
            noted = self._as_noted(rows)
            if noted is not None and noted.norm is None:
                self._note(output, J)
            return output
        if isinstance(J, Attention):
            return self._product(inputs[0], J.dz) @ J.W_O
        return reduce(torch.add, map(self._product, inputs, J))

    def _product(
        self, rows: Float[Tensor, "n d"], J: Float[Tensor, "d_out d"]
    ) -> Float[Tensor, "n d_out"]:
        """Return `rows Jᵀ`."""
        noted = self._as_noted(rows)
        if noted is None:
            return rows @ J.mT
        return (J if noted.norm is None else noted.norm.composed(J)).mT
