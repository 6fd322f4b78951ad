"""The Jacobian of a standard MLP in closed form, and the affine map that may stand in for the MLP while one is taken.

For `mlp(n) = W_outᵀ h(W_gateᵀ n, W_inᵀ n)` with an elementwise h, the Jacobian is one large product,

    W_outᵀ (diag(∂h/∂pre) W_gateᵀ + diag(∂h/∂pre_linear) W_inᵀ),

where reverse mode multiplies every seed through all three matrices. Near `n_0` the MLP is `mlp(n_0) + J (n − n_0)` to
first order, so a block with that map in the MLP's place has the same Jacobian. Whether a module really is of this form
is not decided here: the result is compared with the full sequence like every other cheap path.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.attention import BlockError
from tl_coupling.blocks.differentiation import times_constant


@contextmanager
def _forward_hook(module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> Iterator[None]:
    handle = module.register_forward_hook(hook, with_kwargs=with_kwargs)
    try:
        yield
    finally:
        handle.remove()


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
                stack.enter_context(_forward_hook(getattr(mlp, name), lambda _, __, z, shift=shift: z + shift))
            stack.enter_context(_forward_hook(mlp.hook_post, lambda _, __, h: seen.append(h)))
            mlp(n)
        if len(seen) != 1:
            raise BlockError("the MLP's hook_post did not fire once")
        return seen[0]

    d_mlp = weights[0].shape[1]
    zeros = [n.new_zeros(1, 1, d_mlp) for _ in hook_points]
    h, pull_back = torch.func.vjp(hidden, *zeros)  # type: ignore[misc]
    slopes = pull_back(torch.ones_like(h))
    inner = slopes[0].reshape(d_mlp, 1) * weights[0].T
    if gated:
        inner.addcmul_(slopes[-1].reshape(d_mlp, 1), weights[-1].T)
    return mlp.W_out.T @ inner


def watched_mlp(block: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`forward()`, and what the block's MLP got and gave meanwhile, both `[1 n_rows d_model]`.

    Nothing where the block has no MLP by that name, or does not call it once, on its input alone.
    """
    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module):
        return forward(), ()
    met: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    with _forward_hook(mlp, lambda _, args, kwargs, out: met.append((args, kwargs, out)), with_kwargs=True):
        Y = forward()
    if len(met) != 1 or len(met[0][0]) != 1 or met[0][1] or not isinstance(met[0][2], Tensor):
        return Y, ()
    return Y, (met[0][0][0], met[0][2])


@contextmanager
def mlp_on_rows(block: nn.Module, rows: Sequence[int]) -> Iterator[None]:
    """While the context lasts, the block's MLP, which takes its input alone, computes these rows; the others are zero.

    The MLP is most of a block's work, and gives no row anything of another.
    """
    mlp: Any = block.mlp
    n_pos: list[int] = []

    def take(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        n_pos.append(args[0].shape[1])
        return (args[0][:, list(rows)],)

    def put_back(_: nn.Module, __: tuple[Tensor], out: Tensor) -> Tensor:
        return out.new_zeros(1, n_pos.pop(), out.shape[-1]).index_copy(1, torch.tensor(rows, device=out.device), out)

    with ExitStack() as stack:
        stack.callback(mlp.register_forward_pre_hook(take).remove)
        stack.enter_context(_forward_hook(mlp, put_back))
        yield


@contextmanager
def affine_mlp(block: nn.Module, met: Sequence[Float[Tensor, "1 1 d_model"]]) -> Iterator[None]:
    """While the context lasts, the block's MLP is its own first-order expansion where it got and gave `met`.

    Raises:
        BlockError: the block has no MLP of the standard form.
    """
    if len(met) != 2:
        raise BlockError("the block has no module called mlp that it calls once, on its input alone")
    n_0, out_0 = met
    mlp: Any = block.mlp
    J = mlp_jacobian(mlp, n_0)
    with _forward_hook(mlp, lambda _, args, __: out_0 + times_constant(args[0] - n_0, J.T)):
        yield
