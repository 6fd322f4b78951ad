"""Stand-ins for the rows of a sequence that are not computed: their keys and values, as
a cache or within attention.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
BATCHED_PRODUCTS = (torch.bmm, Tensor.bmm)
PRODUCTS_AND_SUMS = (torch.baddbmm, Tensor.baddbmm)


class BlockError(RuntimeError):
    """A block does not have the form that a cheap way to evaluate it needs.

    `block_jacobian` then takes the next way; you meet this error only if you evaluate a
    `BlockFunction` yourself.

    Example:
        >>> try:
        ...     f = trace.blocks[0].token_local(0, 1)
        ... except tlc.blocks.BlockError:
        ...     f = trace.blocks[0].full_sequence(0, 1)
        >>> f(trace.residual[0, 0]).shape
        torch.Size([32])
    """


class KeysAndValues(Exception):
    """What a recording context raises, with keys and values: the rest of the block need
    not run.
    """


class _UnknownToCache(BlockError, AttributeError):
    """A block asks its cache for more than keys and values; an AttributeError too, so
    that `hasattr` works on it.
    """


class Context:
    """Keys and values of the rows that are not computed, along the position axis `dim`;
    without `rows` it records.

    `completed` puts them around the new ones, which have `before` rows in front of
    them. A recording context ends the block's run when it has both, unless `runs_on`.
    """

    runs_on = False

    def __init__(self, rows: tuple[Tensor, ...] | None, dim: int, before: int) -> None:
        self.rows = rows
        self.dim = dim
        self.before = before
        # The new keys, and then the new values, of the block that runs.
        self.seen: list[Tensor] = []
        # How many of attention's two products there were.
        self.n_products = 0
        # The output of attention's second product, once there is one.
        self.attended: Tensor | None = None
        # The keys and values of other rows that are differentiated, by their place.
        self.others: Mapping[int, tuple[Tensor, ...]] = {}
        # Makes tensors constants, where some rows are kept apart from all.
        self.constant: Callable[[Tensor], Tensor] | None = None

    @contextmanager
    def entered(self, n_rows: int = 1) -> Iterator[None]:
        """Have attention of `n_rows` new rows meet these, once, if it takes no cache."""
        self.seen.clear()
        self.n_products = 0
        with AttentionProducts(self, n_rows):
            yield

    @contextmanager
    def rows_apart(
        self,
        constant: Callable[[Tensor], Tensor],
        others: Mapping[int, tuple[Tensor, ...]],
    ) -> Iterator[None]:
        """Have attention depend on the keys and values of the token's own row, and of
        some others, apart from those of all rows, which are constants.

        Args:
            constant: makes a tensor one that is not differentiated.
            others: keys and values of one row each, in the axes of the context, by
                their place among all rows.

        Raises:
            BlockError: attention is not two matrix products.
        """
        self.constant = constant
        self.others = others
        try:
            yield
        finally:
            self.constant = None
            self.others = {}
        if self.n_products != 2:
            raise BlockError(
                "the block's attention is not q Kᵀ and P V by two matrix products"
            )

    def completed(self, new: Tensor) -> Tensor:
        """Return the keys, and then the values, of all rows, from those that the block
        has just computed.
        """
        part = len(self.seen)  # 0 for keys, 1 for values.
        self.seen.append(new)
        if self.rows is None:
            if part and not self.runs_on:
                raise KeysAndValues(*self.seen)
            return new
        if self.constant is not None:
            new = self.constant(new)
        other_rows = self.rows[part]
        if len(new) != len(other_rows):
            # Several sequences with the same rows around the new ones.
            other_rows = other_rows.expand(len(new), *other_rows.shape[1:])
        n_after = other_rows.shape[self.dim] - self.before
        rows_before = other_rows.narrow(self.dim, 0, self.before)
        rows_after = other_rows.narrow(self.dim, self.before, n_after)
        return torch.cat([rows_before, new, rows_after], self.dim)


class ReadOnlyCache:
    """A context as a key/value cache that never changes; HuggingFace calls `update`,
    TransformerLens `append`.
    """

    is_compileable = False
    frozen = True

    def __init__(self, context: Context) -> None:
        self.context = context

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all rows."""
        return self.context.completed(keys), self.context.completed(values)

    append = update

    @property
    def past_keys(self) -> Tensor:
        """The keys of the rows before."""
        rows = self.context.rows
        if rows is None:
            return torch.empty(1, 0, 0, 1)
        return rows[0].narrow(self.context.dim, 0, self.context.before)

    def get_seq_length(self, *_: object) -> int:
        """Return how many rows are before."""
        return self.past_keys.shape[self.context.dim]

    def get_max_cache_shape(self, *_: object) -> int:
        """Return −1: there is no limit."""
        return -1

    def __getattr__(self, name: str) -> Any:
        raise _UnknownToCache(f"the block asks its key/value cache for {name!r}")


# A mode, because the products are those of the block's own code: it is not rewritten,
# and a block without a cache has no argument by which keys and values could come in.
class AttentionProducts(TorchFunctionMode):
    """Attention's `q Kᵀ` and `P V`, or torch's own function, within a block's code.

    Where the block takes no cache, they meet the rows of the context here. Where the
    context keeps rows apart, all rows are constants in them, and what those change is
    added, by the product rule `d(q kᵀ) = dq kᵀ + q dkᵀ`, as terms of value zero.
    """

    def __init__(self, context: Context, n_rows: int) -> None:
        super().__init__()
        self.context = context
        self.n_rows = n_rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace attention's products, and call every other function as it is."""
        options = kwargs or {}
        # Once it has met the keys and the values, attention has its factors. Of a cache,
        # it has the keys and values of all rows already.
        meets_rows = len(self.context.seen) < 2
        is_attention = func is nn.functional.scaled_dot_product_attention
        if is_attention and (meets_rows or self.context.n_products == 0):
            return self._attention(*args, **options)
        is_before_products = not meets_rows and self.context.n_products < 2
        if is_before_products and func in BATCHED_PRODUCTS:
            return self._batched_product(*args, **options)
        if is_before_products and func in PRODUCTS_AND_SUMS:
            return self._product_and_sum(*args, **options)
        # Projections multiply by matrices of two axes.
        is_product = func in PRODUCTS and len(args) == 2
        if is_product and args[0].ndim == args[1].ndim == 4:
            left, right = args
            if meets_rows:
                right = self._completed(right)
            if right is not None:
                return self._product(left, right)
        return func(*args, **options)

    def _completed(self, right: Tensor) -> Tensor | None:
        """Return the right factor with all rows, Kᵀ and then V.

        None of a product that is not attention's.
        """
        has_keys = bool(self.context.seen)
        # Kᵀ is [batch head d_head row], V is [batch head row d_head].
        # Attention's product is the one whose right factor has one column for each new row.
        n_rows = right.shape[-2] if has_keys else right.shape[-1]
        if n_rows != self.n_rows:
            return None
        if has_keys:
            return self.context.completed(right)
        return self.context.completed(right.mT).mT

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *_: object,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **__: object,
    ) -> Tensor:
        """Compute attention as two products, which every kind of differentiation
        knows.
        """
        keys, values = key, value
        if len(self.context.seen) < 2:
            keys = self.context.completed(key)
            values = self.context.completed(value)
        if enable_gqa:
            keys, values = (
                rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)
                for rows in (keys, values)
            )
        # torch's default of `scaled_dot_product_attention`.
        scores = self._product((scale or query.shape[-1] ** -0.5) * query, keys.mT)
        if is_causal:
            # Query i stands behind the rows before; torch would count from the first.
            allowed = torch.ones_like(scores, dtype=torch.bool)
            attn_mask = allowed.tril(self.context.before)
        return self._product(_masked(scores, attn_mask).softmax(-1), values)

    def _batched_product(self, input: Tensor, mat2: Tensor) -> Tensor:
        """Return a product of heads without an axis for sequences, of which there is
        one (BLOOM).
        """
        return self._product(input[None], mat2[None])[0]

    def _product_and_sum(
        self,
        input: Tensor,
        batch1: Tensor,
        batch2: Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> Tensor:
        """Return such a product with what is added to it."""
        return beta * input + alpha * self._batched_product(batch1, batch2)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ right`, with rows apart where they must be."""
        context = self.context
        part = context.n_products
        product = torch.matmul(left, right)
        if part == len(context.seen):
            return product
        context.n_products += 1
        if context.constant is not None:
            rows = {context.before: context.seen[part]}
            for place, keys_and_values in context.others.items():
                rows[place] = keys_and_values[part]
            for place, row in rows.items():
                change = self._change(left, right, place, row, context.constant)
                product = product + change
        if part == 1:
            context.attended = product
        return product

    def _change(
        self,
        left: Tensor,
        right: Tensor,
        place: int,
        row: Tensor,
        constant: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return what the row at a place among all changes in a product: a term whose
        value is zero, `q dkᵀ` or `P dv`.
        """
        if self.context.dim != -2:
            row = row.transpose(1, 2)
        n_heads = left.shape[1]
        is_value = self.context.n_products == 2
        d_head = right.shape[-1] if is_value else left.shape[-1]
        if n_heads % row.shape[1] or row.shape[-1] != d_head:
            raise BlockError(
                "keys or values are changed between the cache and the attention's "
                "products"
            )
        # As often as heads share it.
        n_sharing = n_heads // row.shape[1]
        if n_sharing > 1:
            row = row[:, :, None].expand(-1, -1, n_sharing, -1, -1).flatten(1, 2)
        zero = row - constant(row)
        if is_value:
            return constant(left[..., place : place + 1]) * zero
        scores = (constant(left) * zero).sum(-1, keepdim=True)
        n_after = right.shape[-1] - 1 - place
        return nn.functional.pad(scores, (place, n_after))


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention scores with torch's mask: what may be attended to, or what is
    added.
    """
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask
