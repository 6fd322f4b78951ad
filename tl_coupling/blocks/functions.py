"""Block functions: `f(X) = block(X) − X`, one row of it at a time, the cheapest way that is right.

Three ways to one `J_{t1 t2}`, cheapest first:

* **token_local_linearised**: as the next, with the MLP replaced by its first-order expansion and the attention's two
  products by theirs. Same value and Jacobian at the traced point, at a fraction of the cost; for Jacobians only.
* **token_local**: the block called on one row, with the keys and values of the earlier rows handed in through a
  read-only cache. Costs one token.
* **full_sequence**: the block called on all rows. Always right, and costs the whole prompt.

For many t1 and one t2, **query_local**: the output row is pulled back once, to its own input and to every row's keys
and values, and each row of those to its input. Costs little more than one token.

All but the full sequence are trusted only after their forward value and a random vector–Jacobian product agreed with
the full sequence's at this layer and this pair of positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_coupling.blocks.attention import BlockError, MovedRow
from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.mlps import affine_mlp

Path = Literal["token_local_linearised", "token_local", "query_local_linearised", "query_local", "full_sequence"]
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]

GATE_TOLERANCE = 1e-4
_MOST_REFERENCES = 32


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """No gradients into parameters, no TF32, and attention in plain operations that every kind of AD can follow."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _weights_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The module's floating-point weights in `dtype`, for as long as the context lasts.

    Not `torch.func.functional_call`: a bridge reaches one module under two names, and is left with foreign weights.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point() and t.dtype != dtype]
    originals = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.to(dtype)
        yield
    finally:
        for t, original in zip(tensors, originals, strict=True):
            t.data = original


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """`f^l` at a trace: what the block at `layer` adds to the residual stream that entered it, `X`.

    `f(X) = block(X) − X`; with `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with `final_norm=True`).
    """

    layer: int
    call: BlockCall
    X: Float[Tensor, "n_pos d_model"]
    norm: nn.Module | None = None
    _references: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __call__(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """f on the full sequence."""
        with self.evaluation():
            return self.of_all_rows(X)

    def of_all_rows(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """f on the full sequence, to be differentiated inside `evaluation()`."""
        return self._after_norm(self.call(X)) - X

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The context in which the block is evaluated and differentiated: exact arithmetic, weights in X's dtype."""
        with ExitStack() as stack:
            stack.enter_context(_exact_arithmetic())
            stack.enter_context(_weights_in(self.call.module, self.X.dtype))
            if self.norm is not None:
                stack.enter_context(_weights_in(self.norm, self.X.dtype))
            yield

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

        def forward() -> Tensor:
            function, inputs = self.query_local(output_position)
            return function(*inputs)

        yield "query_local_linearised", affine_mlp(self.call.module, forward)
        yield "query_local", nullcontext()
        yield "full_sequence", nullcontext()

    def ways(
        self, input_position: int, output_position: int
    ) -> Iterator[tuple[Path, Callable[[], RowFunction], AbstractContextManager[None]]]:
        """Every way to evaluate the pair, cheapest first: its name, how to make it, the context it is evaluated in."""
        pair = (input_position, output_position)

        def forward() -> Tensor:
            return self.token_local(*pair)(self.X[input_position])

        for product_rule in (True, False):
            expanded = affine_mlp(self.call.module, forward)
            yield "token_local_linearised", partial(self.token_local, *pair, product_rule), expanded
        yield "token_local", partial(self.token_local, *pair), nullcontext()
        yield "full_sequence", lambda: self.full_sequence(*pair), nullcontext()

    def reference(self, output_position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Full-sequence `(f(X)[t], u, uᵀ J_{· t})` for a seeded random u: what every cheaper way is held against.

        Shapes `[d_model]`, `[d_model]`, `[n_pos d_model]`. One forward and one backward pass of the block; kept.
        """
        if output_position not in self._references:
            self.refer_to([output_position])
        return self._references[output_position]

    def refer_to(self, output_positions: Sequence[int]) -> None:
        """Make `reference` of several positions ready: one forward pass for all. Older ones are forgotten."""
        missing = set(output_positions) - self._references.keys()
        if not missing:
            return
        if len(self._references) + len(missing) > _MOST_REFERENCES:
            self._references.clear()
            missing = set(output_positions)
        with self.evaluation():
            Y, pull_back = vjp(self.of_all_rows, self.X)
            for t in sorted(missing):
                generator = torch.Generator().manual_seed(t)
                u = torch.randn(self.X.shape[1], generator=generator, dtype=torch.float64).to(Y)
                seed = torch.zeros_like(Y)
                seed[t] = u
                self._references[t] = Y[t], u, pull_back(seed)[0]

    def agrees(
        self, y: Float[Tensor, " d_model"], uJ: Float[Tensor, " d_model"], input_position: int, output_position: int
    ) -> bool:
        """Whether a forward value and a candidate for `uᵀ J_{t1 t2}` equal the full sequence's to 1e-4."""
        y_full, _, rows = self.reference(output_position)
        # f is a difference: its rounding error grows with the residual stream, and a vanishing J_{t1 t2} has no norm.
        value_scale = y_full.norm() + 1e-2 * self.X[output_position].norm()
        product_scale = rows[input_position].norm() + 1e-2 * rows.norm()
        return bool(
            (y - y_full).norm() <= GATE_TOLERANCE * value_scale
            and (uJ - rows[input_position]).norm() <= GATE_TOLERANCE * product_scale
        )

    def reaches_back(self, input_position: int, output_position: int) -> bool:
        """Whether a later row moves an earlier one (never in a causal model: its products there are exact zeros)."""
        return bool(self.reference(output_position)[2][input_position].any())

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        with self.evaluation():
            return self.call.keys_and_values(self.X)

    def _after_norm(self, Y: Float[Tensor, "n_rows d_model"]) -> Float[Tensor, "n_rows d_model"]:
        return Y if self.norm is None else self.norm(Y[None]).reshape(Y.shape)

    def _minus_skip(self, y: Float[Tensor, " d_model"], x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        return self._after_norm(y[None]).reshape(-1) - x


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """`torch.func.vjp`, by plain autograd where a custom autograd Function keeps torch.func out (BLOOM's GELU)."""
    try:
        return torch.func.vjp(function, *inputs)  # type: ignore[return-value]
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = function(*leaves)

    def by_autograd(u: Any) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(y, leaves, u, retain_graph=True, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))

    return y.detach() if isinstance(y, Tensor) else tuple(part.detach() for part in y), by_autograd
