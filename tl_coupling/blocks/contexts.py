"""Stand-ins for the rows of a sequence that are not computed: their keys and values, as
a cache or within attention.
"""

from collections.abc import Iterator
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
    them. With `moved`, a list that collects them, the new ones are constants there.
    """

    moved: list[Tensor] | None = None

    def __init__(self, rows: tuple[Tensor, ...] | None, dim: int, before: int) -> None:
        self.rows, self.dim, self.before = rows, dim, before
        self.seen: list[Tensor] = []

    @contextmanager
    def entered(self, n_rows: int = 1) -> Iterator[None]:
        """Context in which attention of `n_rows` new rows meets these, once, if it
        takes no cache.
        """
        self.seen.clear()
        with WithoutCache(self, n_rows):
            yield

    def completed(self, new: Tensor) -> Tensor:
        """The keys, and then the values, of all rows, from those that the block has
        just computed.
        """
        part = len(self.seen)
        self.seen.append(new)
        if self.rows is None:
            if part:
                raise KeysAndValues(*self.seen)
            return new
        if self.moved is not None:
            self.moved.append(new)
            new = new.detach()
        old, dim, at = self.rows[part], self.dim, self.before
        return torch.cat(
            [old.narrow(dim, 0, at), new, old.narrow(dim, at, old.shape[dim] - at)], dim
        )


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
        """Keys and values of all rows."""
        return self.context.completed(keys), self.context.completed(values)

    append = update

    @property
    def past_keys(self) -> Tensor:
        """The keys of the rows before."""
        known = self.context.rows
        return (
            torch.empty(1, 0, 0, 1)
            if known is None
            else known[0].narrow(self.context.dim, 0, self.context.before)
        )

    def get_seq_length(self, *_: object) -> int:
        """How many rows are before."""
        return self.past_keys.shape[self.context.dim]

    def get_max_cache_shape(self, *_: object) -> int:
        """No limit."""
        return -1

    def __getattr__(self, name: str) -> Any:
        raise _UnknownToCache(f"the block asks its key/value cache for {name!r}")


class WithoutCache(TorchFunctionMode):
    """A context for blocks that take no cache, put into attention itself: `q Kᵀ` and `P
    V`, or torch's own function.
    """

    def __init__(self, context: Context, n_rows: int) -> None:
        super().__init__()
        self.context, self.n_rows = context, n_rows

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if len(self.context.seen) < 2:
            if func is nn.functional.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            if func in PRODUCTS and (completed := self._product(*args)) is not None:
                return completed
        return func(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *_: Any,
        **options: Any,
    ) -> Tensor:
        """As two products, which every kind of differentiation knows."""
        if options.get("is_causal") or options.get("enable_gqa"):
            raise BlockError("the attention hides its mask or repeats its keys")
        keys, values = self.context.completed(k), self.context.completed(v)
        scale = options.get("scale") or q.shape[-1] ** -0.5
        scores = torch.matmul(scale * q, keys.mT)
        if attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, -torch.inf)
                if attn_mask.dtype == torch.bool
                else scores + attn_mask
            )
        return torch.matmul(scores.softmax(-1), values)

    def _product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """`q Kᵀ`, and then `P V`; any other product is not attention's."""
        values = bool(self.context.seen)
        if (
            not left.ndim == right.ndim == 4
            or right.shape[-2 if values else -1] != self.n_rows
        ):
            return None
        if values:
            return torch.matmul(left, self.context.completed(right))
        return torch.matmul(left, self.context.completed(right.mT).mT)
