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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks import BlockError, Context, forwards_replaced
from tl_coupling.gradients.parts import (
    Attention,
    Jacobian,
    Norm,
    Part,
    jacobian_of_part,
)


class Linearisation:
    """A block at one token, as parts with Jacobians and the function `run` that calls
    the block on any rows.
    """

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        parts: Sequence[Part],
        context: Context,
        chunk_size: int | None,
    ) -> None:
        self.run, self.context = run, context
        self.maps: dict[nn.Module, list[tuple[Part, Jacobian]]] = defaultdict(list)
        for part in parts:
            self.maps[part.module].append(
                (part, jacobian_of_part(part, context, chunk_size))
            )

    @classmethod
    def at(
        cls,
        x: Float[Tensor, " d_model"],
        run: Callable[[Tensor], Tensor],
        modules: Iterable[nn.Module],
        context: Context,
        chunk_size: int | None,
    ) -> tuple["Linearisation", Float[Tensor, " d_model"]]:
        """That of `run` at a row, of those modules that it calls, and the value
        there.
        """
        parts: list[Part] = []

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            part = Part(module, args, kwargs, output, context.entered)
            # Not those without rows (rotations), or that give what they got (dropout,
            # hook points).
            if part.inputs and part.value.data_ptr() not in [
                x.data_ptr() for x in part.inputs.values()
            ]:
                parts.append(part)

        with ExitStack() as hooks:
            for module in dict.fromkeys(modules):
                hooks.enter_context(
                    module.register_forward_hook(leave, with_kwargs=True)
                )
            # A copy: the block may add to it in place.
            y = run(x[None].clone())[0]
        return cls(run, parts, context, chunk_size), y

    @property
    def attention(self) -> Attention:
        """The one attention part."""
        found = [
            J
            for calls in self.maps.values()
            for _, J in calls
            if isinstance(J, Attention)
        ]
        if len(found) != 1:
            raise BlockError(
                "the block has not one attention part with TransformerLens' weights and hook points"
            )
        return found[0]

    def heads(self, *rows: Tensor) -> Float[Tensor, " d_z"]:
        """What attention's heads give with other keys and values in its context."""
        self.context.rows = rows
        return self.attention.part.between((), "hook_z")()

    def of_rows(
        self,
        rows: Float[Tensor, "n d_model"],
        from_attention: Float[Tensor, "n d_model"] | None = None,
    ) -> Float[Tensor, "n d_model"]:
        """What the block's derivative makes of tangents in the stream; with others in
        place of attention's output.
        """
        return self._through_parts(rows, _Known(), from_attention)

    def jacobian(
        self, like: Float[Tensor, " d_model"]
    ) -> Float[Tensor, "d_model d_model"]:
        """`∂ block(X)[t] / ∂ x_t`."""
        eye = torch.eye(len(like), dtype=like.dtype, device=like.device)
        return self._through_parts(eye, _Known(eye)).mT

    def _through_parts(
        self, rows: Tensor, known: "_Known", from_attention: Tensor | None = None
    ) -> Tensor:
        def forward(
            calls: Iterator[tuple[Part, Any]], *args: Any, **kwargs: Any
        ) -> Any:
            part, J = next(calls, (None, None))
            if part is None:
                raise BlockError(
                    "a part was called more often on tangents than on the token"
                )
            given = [
                args[at] if isinstance(at, int) else kwargs[at] for at in part.inputs
            ]
            instead = from_attention if isinstance(J, Attention) else None
            found = (
                known.through(J, [one.flatten(0, -2) for one in given])
                if instead is None
                else instead
            )
            out = found.reshape(*given[0].shape[:-1], -1)
            return (
                type(part.output)((out, *part.output[1:]))
                if isinstance(part.output, tuple | list)
                else out
            )

        with forwards_replaced(
            {
                module: partial(forward, iter(calls))
                for module, calls in self.maps.items()
            }
        ):
            return self.run(rows)


class _Known:
    """Tangents with which no product is needed: the identity, and what a norm makes of
    it.

    They are known by their memory, which is kept, and by not having been changed since.
    """

    def __init__(self, *identities: Tensor) -> None:
        self.kept: dict[int, tuple[Tensor, int, Norm | None]] = {}
        for eye in identities:
            self._keep(eye, None)

    def _keep(self, rows: Tensor, norm: Norm | None) -> None:
        self.kept[rows.data_ptr()] = rows, rows._version, norm

    def _is_kept(self, rows: Tensor) -> bool:
        kept, version, _ = self.kept.get(rows.data_ptr(), (None, 0, None))
        return (
            kept is not None and kept.shape == rows.shape and rows._version == version
        )

    def through(self, J: Jacobian, given: Sequence[Tensor]) -> Tensor:
        """The rows that a part makes of those that it gets."""
        if isinstance(J, Norm):
            (rows,) = given
            out = J.of_rows(rows)
            if self._is_kept(rows) and self.kept[rows.data_ptr()][-1] is None:
                self._keep(out, J)
            return out
        if isinstance(J, Attention):
            return self._product(given[0], J.dz) @ J.W_O
        return reduce(torch.add, map(self._product, given, J))

    def _product(
        self, rows: Float[Tensor, "n d"], J: Float[Tensor, "d_out d"]
    ) -> Float[Tensor, "n d_out"]:
        if not self._is_kept(rows):
            return rows @ J.mT
        norm = self.kept[rows.data_ptr()][-1]
        return (J if norm is None else norm.before(J)).mT
