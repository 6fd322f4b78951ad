"""Block functions: `f(X) = block(X) − X`, one row of it at a time, the cheapest way that is right.

Four ways to one `J_{t1 t2}`, cheapest first:

* **token_local_linearised**: as the next, with the attention's two products replaced by their first-order expansion
  as well. Same value and Jacobian at the traced point, at a fraction of the cost; for Jacobians only.
* **token_local_affine_mlp**: as the next, with the MLP replaced by its first-order expansion.
* **token_local**: the block called on one row, with the keys and values of the earlier rows handed in through a
  read-only cache. Costs one token.
* **full_sequence**: the block called on all rows. Always right, and costs the whole prompt.

For many t1 and one t2, **query_local**: the output row is pulled back once, to its own input and to every row's keys
and values, and each row of those to its input. Costs little more than one token; **query_local_affine_mlp** is to it
what the second way is to the third.

The full sequence itself is held against the traced step (`gate`), and every other way against the full sequence, at
this layer and this pair of positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.attention import BlockError, MovedRow
from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.evaluation import exact_arithmetic
from tl_coupling.blocks.gate import Gate, Recording, Remarks
from tl_coupling.blocks.mlps import affine_mlp, mlp_on_rows, watched_mlp

Path = Literal[
    "token_local_linearised",
    "token_local_affine_mlp",
    "token_local",
    "query_local_affine_mlp",
    "query_local",
    "full_sequence",
]
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """`f^l` at a trace: what the block at `layer` adds to the residual stream that entered it, `X`.

    `f(X) = block(X) − X`; with `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with `final_norm=True`).
    `step` is what the block added when it was traced, `recording` that call where the model is in another dtype than X.
    """

    layer: int
    call: BlockCall
    X: Float[Tensor, "n_pos d_model"]
    step: Float[Tensor, "n_pos d_model"] = field(repr=False)
    norm: nn.Module | None = None
    recording: Recording | None = field(default=None, repr=False)
    remarks: Remarks = field(default_factory=Remarks, repr=False)

    def __call__(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """f on the full sequence."""
        with self.evaluation():
            return self.of_all_rows(X)

    def of_all_rows(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """f on the full sequence, to be differentiated inside `evaluation()`."""
        return self._after_norm(self.call(X)) - X

    def with_mlp(self, X: Float[Tensor, "n_pos d_model"]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`of_all_rows`, and what the block's MLP got and gave; nothing where it has none of the usual form."""
        return watched_mlp(self.call.module, lambda: self.of_all_rows(X))

    def of_some_rows(self, X: Float[Tensor, "n_pos d_model"], rows: Sequence[int]) -> Float[Tensor, "n_rows d_model"]:
        """f of these rows, where the block's MLP takes its input alone and gives no row anything of another."""
        with mlp_on_rows(self.call.module, rows):
            return self.of_all_rows(X)[list(rows)]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The context in which the block is evaluated and differentiated: exact arithmetic, weights in X's dtype."""
        modules = [self.call.module] if self.norm is None else [self.call.module, self.norm]
        with exact_arithmetic(self.X.device, modules, self.X.dtype):
            yield

    @cached_property
    def gate(self) -> Gate:
        """What every way is held against."""
        return Gate(
            self.layer,
            self.with_mlp,
            self.of_some_rows,
            self.X,
            self.step,
            self.evaluation,
            self.recording,
            self.remarks,
        )

    def full_sequence(self, input_position: int, output_position: int) -> RowFunction:
        """`x ↦ f(X with row input_position replaced by x)[output_position]`, on all rows."""

        def function(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            X = torch.cat([self.X[:input_position], x[None], self.X[input_position + 1 :]])
            return self._minus_skip(self.call(X)[output_position], X[output_position])

        return function

    def token_local(self, input_position: int, output_position: int, product_rule: bool = False) -> RowFunction:
        """The same function for the cost of one token, if rows meet in keys and values alone.

        With `product_rule`, it has the same value and derivative at the traced point, and there only.
        """
        if input_position > output_position:
            raise BlockError("a later row is not in the context")
        keys, values = self._keys_and_values
        dim = self.call.position_dim

        def rows(old: Tensor, start: int, stop: int) -> Tensor:
            return old.narrow(dim, start, stop - start)

        context = rows(keys, 0, output_position), rows(values, 0, output_position)

        def own_row(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            moved = MovedRow(output_position) if product_rule else None
            return self._minus_skip(self.call.row(x, output_position, context, moved), x)

        def earlier_row(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            x_out = self.X[output_position]
            new = self.call.keys_and_values(x[None], position=input_position)
            if product_rule:
                moved = MovedRow(input_position).set(*new, dim)
                return self._minus_skip(self.call.row(x_out, output_position, context, moved), x_out)
            parts = [
                [rows(old, 0, input_position), row, rows(old, input_position + 1, output_position)]
                for old, row in zip((keys, values), new, strict=True)
            ]
            swapped = torch.cat(parts[0], dim), torch.cat(parts[1], dim)
            return self._minus_skip(self.call.row(x_out, output_position, swapped), x_out)

        return own_row if input_position == output_position else earlier_row

    def query_local(self, output_position: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """`(x, keys, values) ↦ f(X)[output_position]` of its own row and the context's keys and values; and those."""
        dim = self.call.position_dim
        keys, values = (rows.narrow(dim, 0, output_position) for rows in self._keys_and_values)

        def function(x: Float[Tensor, " d_model"], *context: Tensor) -> Float[Tensor, " d_model"]:
            keys, values = context
            return self._minus_skip(self.call.row(x, output_position, (keys, values)), x)

        return function, (self.X[output_position], keys, values)

    def keys_and_values(self, position: int) -> Callable[[Float[Tensor, " d_model"]], tuple[Tensor, Tensor]]:
        """`x ↦` what a row at `position` gives the queries after it."""
        return lambda x: self.call.keys_and_values(x[None], position=position)

    def query_ways(self, output_position: int) -> Iterator[tuple[Path, AbstractContextManager[None]]]:
        """Every way to evaluate all inputs of one output, cheapest first; see `ways`."""
        yield "query_local_affine_mlp", self._affine_mlp(output_position)
        yield "query_local", nullcontext()
        yield "full_sequence", nullcontext()

    def ways(
        self, input_position: int, output_position: int
    ) -> Iterator[tuple[Path, Callable[[], RowFunction], AbstractContextManager[None]]]:
        """Every way to evaluate the pair, cheapest first: its name, how to make it, the context it is evaluated in."""
        pair = (input_position, output_position)
        affine = partial(self._affine_mlp, output_position)
        yield "token_local_linearised", partial(self.token_local, *pair, product_rule=True), affine()
        yield "token_local_affine_mlp", partial(self.token_local, *pair), affine()
        yield "token_local", partial(self.token_local, *pair), nullcontext()
        yield "full_sequence", lambda: self.full_sequence(*pair), nullcontext()

    def _affine_mlp(self, output_position: int) -> AbstractContextManager[None]:
        return affine_mlp(self.call.module, self.gate.reference(output_position).met)

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        with self.evaluation():
            return self.call.keys_and_values(self.X)

    def _after_norm(self, Y: Float[Tensor, "n_rows d_model"]) -> Float[Tensor, "n_rows d_model"]:
        return Y if self.norm is None else self.norm(Y[None]).reshape(Y.shape)

    def _minus_skip(self, y: Float[Tensor, " d_model"], x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        return self._after_norm(y[None]).reshape(-1) - x
