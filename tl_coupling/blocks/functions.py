"""The ways to evaluate one row of a block function `f(X) = block(X) − X`.

For one `J_{t1 t2}`, cheapest first:

* **token_local_linearised**: the next, with the attention's two products replaced by their first-order expansion too.
  Same value and Jacobian at the traced point, at a fraction of the cost; for Jacobians only.
* **token_local_affine_mlp**: the next, with the MLP replaced by its first-order expansion.
* **token_local**: the block on one row, with the keys and values of the earlier rows in a read-only cache. Costs one
  token.
* **full_sequence**: the block on all rows. Always right, and costs the whole prompt.

For many t1 and one t2, **query_local**: the output row is pulled back once, to its own input and to every row's keys
and values, and each row of those to its input, for little more than the cost of one token; **query_local_affine_mlp**
replaces the MLP as above.

The full sequence is checked against the traced step (`gate`), every other way against the full sequence, at the same
layer and positions.
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

    def full_sequence(self, t1: int, t2: int) -> RowFunction:
        """`x ↦ f(X with row t1 replaced by x)[t2]`, on all rows."""

        def function(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            X = torch.cat([self.X[:t1], x[None], self.X[t1 + 1 :]])
            return self.after_norm(self.call(X)[t2]) - X[t2]

        return function

    def token_local(self, t1: int, t2: int, product_rule: bool = False) -> RowFunction:
        """The same function at the cost of one token, if rows meet in keys and values alone.

        With `product_rule`, it has the same value and derivative at the traced point only.
        """
        if t1 > t2:
            raise BlockError("a later row is not in the context")
        dim, known = self.call.position_dim, self._keys_and_values
        context = tuple(rows.narrow(dim, 0, t2) for rows in known)

        def function(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            rule = ProductRule(t1, n_keys=t2 + 1) if product_rule else None
            if t1 == t2:
                return self._at(x, t2, context, rule)
            new = self.call.keys_and_values(x[None], t1)
            if rule is not None:
                return self._at(self.X[t2], t2, context, rule.set(*new, dim))
            swapped = tuple(
                torch.cat([old.narrow(dim, 0, t1), row, old.narrow(dim, t1 + 1, t2 - t1 - 1)], dim)
                for old, row in zip(known, new, strict=True)
            )
            return self._at(self.X[t2], t2, swapped)

        return function

    def query_local(self, input_positions: Sequence[int], t2: int) -> Differentiable:
        """`f(X)[t2]` of its own row and of the context's keys and values, which the other input rows feed."""
        dim = self.call.position_dim
        # The seeds stand in front: a position axis counted from the front moves up by one.
        axis = dim if dim < 0 else dim + 1

        @cache
        def fed_by(t1: int) -> PullBack:
            return vjp(lambda x: self.call.keys_and_values(x[None], t1), self.X[t1])[1]

        def of_each_input(own: Tensor, *context: Tensor) -> Iterator[Tensor]:
            for t1 in input_positions:
                rows = tuple(gradient.narrow(axis, t1, 1) for gradient in context if t1 != t2)
                yield for_seeds(fed_by(t1), rows)[0] if rows else own

        context = (rows.narrow(dim, 0, t2) for rows in self._keys_and_values)
        return (lambda x, *context: self._at(x, t2, context)), (self.X[t2], *context), of_each_input

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        with self.evaluation():
            return self.call.keys_and_values(self.X)

    def _at(
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...], rule: ProductRule | None = None
    ) -> Float[Tensor, " d_model"]:
        return self.after_norm(self.call.row(x, position, context, rule)) - x
