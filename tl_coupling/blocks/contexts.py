"""Stand-ins for the rows of a sequence that are not computed: their keys and values, as
a cache or within attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


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
    them. With `moved`, a list that collects them, the new ones are constants there. A
    recording context ends the block's run when it has both, unless `runs_on`.
    """

    moved: list[Tensor] | None = None
    runs_on = False

    def __init__(self, rows: tuple[Tensor, ...] | None, dim: int, before: int) -> None:
        self.rows = rows
        self.dim = dim
        self.before = before
        # The new keys, and then the new values, of the block that runs.
        self.seen: list[Tensor] = []

    @contextmanager
    def entered(self, n_rows: int = 1) -> Iterator[None]:
        """Have attention of `n_rows` new rows meet these, once, if it takes no cache."""
        self.seen.clear()
        with WithoutCache(self, n_rows):
            yield

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
        if self.moved is not None:
            self.moved.append(new)
            new = new.detach()
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


# A mode, because these blocks have no argument by which keys and values could come in.
class WithoutCache(TorchFunctionMode):
    """A context for blocks that take no cache, put into attention itself: `q Kᵀ` and `P
    V`, or torch's own function.
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
        options = kwargs or {}
        # Once it has met the keys and the values, attention is over.
        if len(self.context.seen) < 2:
            if func is nn.functional.scaled_dot_product_attention:
                return self._attention(*args, **options)
            if func in PRODUCTS:
                product = self._product(*args)
                if product is not None:
                    return product
        return func(*args, **options)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *_: object,
        **options: Any,
    ) -> Tensor:
        """Compute attention as two products, which every kind of differentiation
        knows.
        """
        if options.get("is_causal") or options.get("enable_gqa"):
            raise BlockError("the attention hides its mask or repeats its keys")
        keys = self.context.completed(k)
        values = self.context.completed(v)
        # torch's default of `scaled_dot_product_attention`.
        scale = options.get("scale") or q.shape[-1] ** -0.5
        scores = _masked(torch.matmul(scale * q, keys.mT), attn_mask)
        return torch.matmul(scores.softmax(-1), values)

    def _product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Compute `q Kᵀ`, and then `P V`; None for a product that is not attention's."""
        # Projections multiply by matrices of two axes.
        if not left.ndim == right.ndim == 4:
            return None
        has_keys = bool(self.context.seen)
        # Kᵀ is [batch head d_head row], V is [batch head row d_head].
        # Attention's product is the one whose right factor has one column for each new row.
        n_rows = right.shape[-2] if has_keys else right.shape[-1]
        if n_rows != self.n_rows:
            return None
        if has_keys:
            return torch.matmul(left, self.context.completed(right))
        return torch.matmul(left, self.context.completed(right.mT).mT)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention scores with torch's mask: what may be attended to, or what is
    added.
    """
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask
