"""Block functions: `f(X) = block(X) − X`, and the ways to evaluate one row of it.

To one `J_{t1 t2}` there are four, cheapest first:

* **token_local_linearised**: as the next, with the attention's two products replaced by their first-order expansion
  too. Same value and Jacobian at the traced point, at a fraction of the cost; for Jacobians only.
* **token_local_affine_mlp**: as the next, with the MLP replaced by its first-order expansion.
* **token_local**: the block called on one row, with the keys and values of the earlier rows passed in a read-only
  cache. Costs one token.
* **full_sequence**: the block called on all rows. Always right, and costs the whole prompt.

To many t1 and one t2, **query_local**: the output row is pulled back once, to its own input and to every row's keys and
values, and each row of those to its input. Costs little more than one token. **query_local_affine_mlp** replaces the
MLP as above.

The full sequence itself is checked against the traced step (`gate`), and every other way against the full sequence, at
the same layer and positions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks.attention import BlockError, ProductRule
from tl_coupling.blocks.differentiation import PullBack, for_seeds, vjp
from tl_coupling.blocks.gate import CheckedFunction
from tl_coupling.blocks.mlps import affine_mlp

Path = Literal[
    "token_local_linearised",
    "token_local_affine_mlp",
    "token_local",
    "query_local_affine_mlp",
    "query_local",
    "full_sequence",
]
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]
# A function to `f(X)[t2]`, its inputs, and what turns their gradients into those of each wanted input row.
Differentiable = tuple[Callable[..., Tensor], tuple[Tensor, ...], Callable[..., Iterable[Tensor]]]


class Way(NamedTuple):
    """One way to evaluate `f(X)[t2]`: its name, the context it needs, and how to make the function.

    Its widest activation has `width * d_model` entries for each seed.
    """

    path: Path
    context: AbstractContextManager[None]
    make: Callable[[], Differentiable]
    width: int


class BlockFunction(CheckedFunction):
    """A block function (`CheckedFunction`) with every way to evaluate its rows."""

    def ways(self, input_positions: Sequence[int], output_position: int) -> Iterator[Way]:
        """Every way to evaluate `J_{t1 t2}` of these t1 and one t2, cheapest first."""
        t1, *others = input_positions
        t2, n_pos = output_position, len(self.X)

        def affine() -> AbstractContextManager[None]:
            return affine_mlp(self.call.module, self.reference(t2).met)

        if others:
            query, width = partial(self.query_local, input_positions, t2), max(4, 2 * n_pos)
            yield Way("query_local_affine_mlp", affine(), query, width)
            yield Way("query_local", nullcontext(), query, width)
            rows = list(input_positions)
            whole = (lambda X: self.of_all_rows(X)[t2]), (self.X,), lambda gradient: gradient[:, rows].unbind(1)
            yield Way("full_sequence", nullcontext(), lambda: whole, width)
            return

        def of_row(make: Callable[..., RowFunction], **options: bool) -> Callable[[], Differentiable]:
            return lambda: (make(t1, t2, **options), (self.X[t1],), lambda gradient: [gradient])

        yield Way("token_local_linearised", affine(), of_row(self.token_local, product_rule=True), 4)
        yield Way("token_local_affine_mlp", affine(), of_row(self.token_local), 4)
        yield Way("token_local", nullcontext(), of_row(self.token_local), 4)
        yield Way("full_sequence", nullcontext(), of_row(self.full_sequence), 4 * n_pos)

    def full_sequence(self, input_position: int, output_position: int) -> RowFunction:
        """`x ↦ f(X with row input_position replaced by x)[output_position]`, on all rows."""

        def function(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            X = torch.cat([self.X[:input_position], x[None], self.X[input_position + 1 :]])
            return self.after_norm(self.call(X)[output_position]) - X[output_position]

        return function

    def token_local(self, input_position: int, output_position: int, product_rule: bool = False) -> RowFunction:
        """The same function at the cost of one token, if rows meet in keys and values alone.

        With `product_rule`, it has the same value and derivative at the traced point only.
        """
        if input_position > output_position:
            raise BlockError("a later row is not in the context")
        dim, known, n_keys = self.call.position_dim, self._keys_and_values, output_position + 1
        context = tuple(rows.narrow(dim, 0, output_position) for rows in known)

        def own_row(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            return self._at(x, output_position, context, ProductRule(output_position, n_keys) if product_rule else None)

        def earlier_row(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            new = self.call.keys_and_values(x[None], input_position)
            if product_rule:
                rule = ProductRule(input_position, n_keys).set(*new, dim)
                return self._at(self.X[output_position], output_position, context, rule)
            after = output_position - input_position - 1
            swapped = tuple(
                torch.cat([old.narrow(dim, 0, input_position), row, old.narrow(dim, input_position + 1, after)], dim)
                for old, row in zip(known, new, strict=True)
            )
            return self._at(self.X[output_position], output_position, swapped)

        return own_row if input_position == output_position else earlier_row

    def query_local(self, input_positions: Sequence[int], output_position: int) -> Differentiable:
        """`f(X)[output_position]` of its own row and of the context's keys and values, which each input row feeds."""
        dim = self.call.position_dim
        # The seeds stand in front: a position axis counted from the front moves up by one.
        axis = dim if dim < 0 else dim + 1

        def function(x: Float[Tensor, " d_model"], *context: Tensor) -> Float[Tensor, " d_model"]:
            return self._at(x, output_position, context)

        @cache
        def fed_by(t: int) -> PullBack:
            return vjp(lambda x: self.call.keys_and_values(x[None], t), self.X[t])[1]

        def of_each_input(own: Tensor, *context: Tensor) -> Iterator[Tensor]:
            for t in input_positions:
                if t == output_position:
                    yield own
                else:
                    yield for_seeds(fed_by(t), tuple(gradient.narrow(axis, t, 1) for gradient in context))[0]

        context = (rows.narrow(dim, 0, output_position) for rows in self._keys_and_values)
        return function, (self.X[output_position], *context), of_each_input

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        with self.evaluation():
            return self.call.keys_and_values(self.X)

    def _at(
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...], rule: ProductRule | None = None
    ) -> Float[Tensor, " d_model"]:
        return self.after_norm(self.call.row(x, position, context, rule)) - x
