"""The Jacobian of a standard MLP in closed form, and the affine map that may replace the MLP while one is computed.

For `mlp(n) = W_outᵀ h(W_gateᵀ n, W_inᵀ n)` with an elementwise h, the Jacobian is one large product,

    W_outᵀ (diag(∂h/∂pre) W_gateᵀ + diag(∂h/∂pre_linear) W_inᵀ),

where reverse mode multiplies every seed through all three matrices. Near `n_0` the MLP is `mlp(n_0) + J (n − n_0)` to
first order, so a block with that map as its MLP has the same Jacobian. Whether a module really has this form is not
decided here: like that of every cheap way, the result is compared with the full sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.attention import BlockError
from tl_coupling.blocks.differentiation import times_constant


def mlp_jacobian(mlp: Any, n: Float[Tensor, "1 1 d_model"]) -> Float[Tensor, "d_model d_model"]:
    """`∂ mlp(n) / ∂ n` from TransformerLens' weights and hook points; rows index outputs.

    Raises:
        BlockError: the module lacks those names, or its hook points do not fire.
    """
    gated = getattr(mlp, "W_gate", None) is not None
    hook_points = ("hook_pre", "hook_pre_linear") if gated else ("hook_pre",)
    if missing := [name for name in ("W_in", "W_out", "hook_post", *hook_points) if getattr(mlp, name, None) is None]:
        raise BlockError(f"the MLP has no {', '.join(missing)}")
    weights = (mlp.W_gate, mlp.W_in) if gated else (mlp.W_in,)

    def hidden(*shifts: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with ExitStack() as stack:
            for name, shift in zip(hook_points, shifts, strict=True):
                hook = getattr(mlp, name).register_forward_hook(lambda _, __, z, shift=shift: z + shift)
                stack.enter_context(hook)
            stack.enter_context(mlp.hook_post.register_forward_hook(lambda _, __, h: seen.append(h)))
            mlp(n)
        if len(seen) != 1:
            raise BlockError("the MLP's hook_post did not fire once")
        return seen[0]

    d_mlp = weights[0].shape[1]
    h, pull_back = torch.func.vjp(hidden, *(n.new_zeros(1, 1, d_mlp) for _ in hook_points))  # type: ignore[misc]
    slopes = pull_back(torch.ones_like(h))
    inner = slopes[0].reshape(d_mlp, 1) * weights[0].T
    if gated:
        inner.addcmul_(slopes[-1].reshape(d_mlp, 1), weights[-1].T)
    return mlp.W_out.T @ inner


def watched_mlp(block: nn.Module, f: Callable[[Tensor], Tensor], X: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`f(X)`, and the input and output of the block's MLP meanwhile, both `[1 n_rows d_model]`.

    `()` for those where the block has no module called `mlp`, or does not call it once, on its input alone.
    """
    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module):
        return f(X), ()
    met: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    with mlp.register_forward_hook(lambda _, args, kwargs, out: met.append((args, kwargs, out)), with_kwargs=True):
        Y = f(X)
    if len(met) != 1 or len(met[0][0]) != 1 or met[0][1] or not isinstance(met[0][2], Tensor):
        return Y, ()
    return Y, (met[0][0][0], met[0][2])


@contextmanager
def mlp_on_rows(block: nn.Module, rows: Sequence[int]) -> Iterator[None]:
    """Context in which the block's MLP computes these rows only, and gives zeros for the others.

    For an MLP that has one argument and treats each row by itself; it is most of a block's work.
    """
    mlp: Any = block.mlp
    n_pos: list[int] = []

    def take(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        n_pos.append(args[0].shape[1])
        return (args[0][:, list(rows)],)

    def put_back(_: nn.Module, __: tuple[Tensor], out: Tensor) -> Tensor:
        return out.new_zeros(1, n_pos.pop(), out.shape[-1]).index_copy(1, torch.tensor(rows, device=out.device), out)

    with mlp.register_forward_pre_hook(take), mlp.register_forward_hook(put_back):
        yield


@contextmanager
def affine_mlp(block: nn.Module, met: Sequence[Float[Tensor, "1 1 d_model"]]) -> Iterator[None]:
    """Context in which the block's MLP is its own first-order expansion about the input and output in `met`.

    Raises:
        BlockError: the block has no MLP of the standard form.
    """
    if len(met) != 2:
        raise BlockError("the block has no module called mlp that it calls once, on its input alone")
    n_0, out_0 = met
    mlp: Any = block.mlp
    J = mlp_jacobian(mlp, n_0)
    with mlp.register_forward_hook(lambda _, args, __: out_0 + times_constant(args[0] - n_0, J.T)):
        yield
