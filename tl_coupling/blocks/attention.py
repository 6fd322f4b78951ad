"""Attention of one query where a single row of the context moves, without gradients for the other rows.

Scores and outputs are products, `q Kᵀ` and `P V`. Reverse mode through them yields a gradient for every row of K and V
and every seed, `[d_model n_heads n_pos d_head]` numbers, although one row is wanted. Here K and V are constants, and
the moving row enters by the product rule, `d(q kᵀ) = dq kᵀ + q dkᵀ`: terms of value zero with the right derivative are
added to the two products as the block computes them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.differentiation import times_constant

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class BlockError(RuntimeError):
    """A block does not have the form that a cheap way to evaluate it needs."""


class ProductRule(TorchFunctionMode):
    """Context in which a block's two attention products carry the derivative of the row at `position`, of `n_keys`.

    `moved` is the row's keys and values, `[1 n_kv_heads 1 d_head]` each; `None` until the block has computed them.

    Raises:
        BlockError: on exit, if the block did not compute `q Kᵀ` and then `P V` in the expected shapes (attention by
            other operations, keys that are rotated after they are cached).
    """

    def __init__(self, position: int, n_keys: int) -> None:
        super().__init__()
        self.position, self.n_keys, self.products = position, n_keys, 0
        self.moved: tuple[Tensor, ...] | None = None

    def set(self, keys: Tensor, values: Tensor, position_dim: int) -> "ProductRule":
        """Store keys and values in the block's own layout (HookedTransformer has positions before heads)."""
        self.moved = tuple(z if position_dim == -2 else z.transpose(1, 2) for z in (keys, values))
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _PRODUCTS and self.moved is not None and self.products < 2:
            (left, right), at = args, self.position
            one_query = left.ndim == right.ndim == 4 and left.shape[-2] == 1
            if one_query and right.shape[-1 - self.products] == self.n_keys:
                self.products += 1
                if self.products == 1:
                    keys = _for_heads(self.moved[0], right[..., at])
                    scores = (left.detach() * (keys - keys.detach())).sum(-1, keepdim=True)
                    change = torch.nn.functional.pad(scores, (at, self.n_keys - 1 - at))
                else:
                    values = _for_heads(self.moved[1], right[..., at, :])
                    change = left[..., at : at + 1].detach() * (values - values.detach())
                return times_constant(left, right) + change
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None and self.products != 2:
            raise BlockError("the block's attention is not q Kᵀ and P V by two matrix products")


def _for_heads(rows: Tensor, used: Tensor) -> Tensor:
    """Rows `[1 n_kv_heads 1 d_head]`, repeated for the query heads that share them.

    Raises:
        BlockError: they are not what the block multiplies, `used` `[1 n_heads d_head]`: it has changed them since.
    """
    n_heads, n_kv_heads = used.shape[1], rows.shape[1]
    if n_heads % n_kv_heads == 0:
        repeated = rows.repeat_interleave(n_heads // n_kv_heads, dim=1)
        if repeated.shape[-1] == used.shape[-1] and bool((used == repeated.detach()[..., 0, :]).all()):
            return repeated
    raise BlockError("keys or values are changed between the cache and the attention's products")
