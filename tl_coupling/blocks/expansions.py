"""First-order expansions of a block's parts about the traced point, where they have the same value and Jacobian.

**Attention** of one query is two products, `q Kᵀ` and `P V`. Reverse mode yields a gradient for every row of K and V
and every seed, although one row moves. Here K and V are constants, and that row enters by the product rule,
`d(q kᵀ) = dq kᵀ + q dkᵀ`: terms of value zero with the right derivative.

**A standard MLP** `mlp(n) = W_outᵀ h(W_gateᵀ n, W_inᵀ n)`, h elementwise, becomes `mlp(n_0) + J (n − n_0)`, with one
large product, `J = W_outᵀ (diag(∂h/∂pre) W_gateᵀ + diag(∂h/∂pre_linear) W_inᵀ)`.

Whether a block has such parts is not decided here: like every cheap way, the result is compared with the full sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class BlockError(RuntimeError):
    """A block does not have the form that a cheap way to evaluate it needs."""


class ProductRule(TorchFunctionMode):
    """Context in which a block's two attention products carry the derivative of the row at `position`, of `n_keys`.

    `moved` holds the row's keys, and then its values, `[1 n_kv_heads 1 d_head]` each, once the block has computed them.
    Raises BlockError on exit if the block did not compute `q Kᵀ` and then `P V` in these shapes.
    """

    def __init__(self, position: int, n_keys: int) -> None:
        super().__init__()
        self.position, self.n_keys, self.products = position, n_keys, 0
        self.moved: list[Tensor] = []

    @staticmethod
    def in_layout(rows: Tensor, position_dim: int) -> Tensor:
        """Keys or values with heads before positions; HookedTransformer has them the other way round."""
        return rows if position_dim == -2 else rows.transpose(1, 2)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in PRODUCTS and self.products < len(self.moved):
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
    """Rows `[1 n_kv_heads 1 d_head]`, repeated for the query heads that share them, if `used` is the same."""
    n_heads, n_kv_heads = used.shape[1], rows.shape[1]
    if n_heads % n_kv_heads == 0:
        repeated = rows.repeat_interleave(n_heads // n_kv_heads, dim=1)
        if repeated.shape[-1] == used.shape[-1] and bool((used == repeated.detach()[..., 0, :]).all()):
            return repeated
    raise BlockError("keys or values are changed between the cache and the attention's products")


@contextmanager
def affine_mlp(block: nn.Module, met: Sequence[Float[Tensor, "1 1 d_model"]]) -> Iterator[None]:
    """Context in which the block's MLP is its own first-order expansion about the input and output in `met`."""
    if len(met) != 2:
        raise BlockError("the block has no module called mlp that it calls once, on its input alone")
    mlp: Any = block.mlp
    n_0, out_0 = met
    J = _mlp_jacobian(mlp, n_0)
    with mlp.register_forward_hook(lambda _, args, __: out_0 + times_constant(args[0] - n_0, J.T)):
        yield


def _mlp_jacobian(mlp: Any, n: Float[Tensor, "1 1 d_model"]) -> Float[Tensor, "d_model d_model"]:
    """`∂ mlp(n) / ∂ n` from TransformerLens' weights and hook points."""
    gated = getattr(mlp, "W_gate", None) is not None
    hook_points = ("hook_pre", "hook_pre_linear") if gated else ("hook_pre",)
    if missing := [name for name in ("W_in", "W_out", "hook_post", *hook_points) if getattr(mlp, name, None) is None]:
        raise BlockError(f"the MLP has no {', '.join(missing)}")
    weights = (mlp.W_gate, mlp.W_in) if gated else (mlp.W_in,)

    def hidden(*shifts: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with ExitStack() as stack:
            for name, shift in zip(hook_points, shifts, strict=True):
                stack.enter_context(getattr(mlp, name).register_forward_hook(lambda _, __, z, s=shift: z + s))
            stack.enter_context(mlp.hook_post.register_forward_hook(lambda _, __, h: seen.append(h)))
            mlp(n)
        if len(seen) != 1:
            raise BlockError("the MLP's hook_post did not fire once")
        return seen[0]

    d_mlp = weights[0].shape[1]
    h, pull_back = torch.func.vjp(hidden, *(n.new_zeros(1, 1, d_mlp) for _ in hook_points))  # type: ignore[misc]
    slopes = [slope.reshape(d_mlp, 1) for slope in pull_back(torch.ones_like(h))]
    inner = slopes[0] * weights[0].T
    if gated:
        inner.addcmul_(slopes[-1], weights[-1].T)
    return mlp.W_out.T @ inner


def watched_mlp(block: nn.Module, f: Callable[[Tensor], Tensor], X: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`f(X)`; and input and output, `[1 n_rows d_model]`, of the block's `mlp` if it was called once, on one tensor."""
    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module):
        return f(X), ()
    met: list[tuple[Any, ...]] = []
    with mlp.register_forward_hook(lambda _, *call: met.append(call), with_kwargs=True):
        Y = f(X)
    match met:
        case [((Tensor() as n,), kwargs, Tensor() as out)] if not kwargs and n.shape[:-1] == out.shape[:-1] == (
            1,
            len(X),
        ):
            return Y, (n, out)
    return Y, ()


@contextmanager
def mlp_on_rows(block: nn.Module, rows: list[int], n_pos: int) -> Iterator[None]:
    """Context in which the block's MLP, most of its work, computes these rows only and gives zeros for the others."""
    mlp: Any = block.mlp

    def put_back(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.new_zeros(1, n_pos, out.shape[-1]).index_copy(1, torch.tensor(rows, device=out.device), out)

    with mlp.register_forward_pre_hook(lambda _, args: args[0][:, rows]), mlp.register_forward_hook(put_back):
        yield


class _TimesConstant(torch.autograd.Function):
    """`left @ right`, `[… 1 n] [… n m]`, for a constant `right`, which the backward pass does not copy for every seed.

    PyTorch's own rule for a batched matmul expands the factor without a batch; here the seeds become rows of `left`.
    Seeds that are rows of the identity select rows of `right` without a product.
    """

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (right,) = ctx.saved_tensors
        return _TimesConstant.apply(grad, right.mT), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], left: Tensor, right: Tensor) -> tuple[Tensor, int]:
        rows = left.movedim(in_dims[0], -2).squeeze(-3)
        picked = _rows_of_identity(rows[0]) if right.ndim == 2 else None
        product = rows @ right if picked is None else right[None, picked]
        return product.unsqueeze(-3), -2


times_constant = _TimesConstant.apply


def _rows_of_identity(seeds: Tensor) -> slice | None:
    """Which consecutive rows of the identity these are, if they are."""
    start = int(seeds[0].argmax())
    diagonal = seeds.diagonal(start)
    if len(diagonal) == len(seeds) == int(seeds.count_nonzero()) and bool((diagonal == 1).all()):
        return slice(start, start + len(seeds))
    return None
