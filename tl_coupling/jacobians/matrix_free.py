"""Singular triplets of a block's Jacobian from products with vectors, without J."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace, is_out_of_memory
from tl_coupling.jacobians.jacobians import block_jacobian
from tl_coupling.jacobians.products import (
    Differentiated,
    differentiated,
    forward_mode,
    twice_backward,
)
from tl_coupling.spectra import (
    Products,
    Spectrum,
    check_k,
    svd,
    triplets_of_products,
)

# Residuals, as shares of σ_1. Products have the rounding of the block's own arithmetic.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WAY = "block Krylov of products"


@checked
def block_spectrum(
    trace: Trace,
    layer: int,
    k: int = 1,
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
) -> Spectrum:
    r"""Return the k largest singular triplets of a block's Jacobian, without forming it.

    .. math:: J^l_{t_1 t_2} v_i = \sigma_i u_i, \qquad (J^l_{t_1 t_2})^\top u_i = \sigma_i v_i

    A block Krylov space of `JᵀJ` from a random start (Golub, Luk and Overton 1981;
    Musco and Musco 2015) needs `J V` and `Jᵀ U` alone: forward and backward passes of
    the block at one token, for `k + 8` vectors at a time. Both residuals of every
    triplet are at most `10⁻⁵ σ_1` (`10⁻¹⁰ σ_1` in float64), or J is computed and
    decomposed in full, as it is where a block has no products. As for `svd`, residuals
    say that triplets are right; that none is missed rests on the random start.

    Args:
        trace: a traced prompt.
        layer: which block.
        k: how many triplets; the largest singular value by default.
        position, input_position, output_position: as in `block_jacobian`.

    Returns:
        a `Spectrum`: `U` `[d_model k]`, `S` `[k]`, `Vh` `[k d_model]`, the residuals
        and the steps; `norm` is not known without J.

    Raises:
        ValueError: k outside `[1, d_model]`, a layer or position out of range.
        As `block_jacobian`, where the block is not the function that was traced.

    Cost: `2 (k + 8)` products for each step, usually fewer than ten steps; J itself
    takes `d_model` of them, or, where its block is linear in parts, less
    (`plan` says what it takes). Memory for some `(k + 8) · steps` vectors.

    Example:
        >>> spectrum = tlc.block_spectrum(trace, layer=1, k=2)
        >>> exact = tlc.svd(tlc.block_jacobian(trace, 1), k=2)
        >>> torch.allclose(spectrum.S, exact.S, rtol=1e-4)
        True
    """
    t1_to_t2 = differentiated(trace, layer, position, input_position, output_position)
    x = t1_to_t2.x
    check_k(k, len(x))
    with t1_to_t2.block.evaluation():
        for multiply in (_forward_mode, _twice_backward, _one_by_one):
            try:
                found = _triplets(t1_to_t2, multiply, k)
            except Exception as error:
                # A foreign block may raise anything.
                if is_out_of_memory(error):
                    raise
                continue
            if found is not None:
                return found
            break
    J = block_jacobian(
        trace,
        layer,
        position=position,
        input_position=input_position,
        output_position=output_position,
    )
    return svd(J, k)


def _triplets(
    t1_to_t2: Differentiated,
    multiply: Callable[[Differentiated, Tensor], Tensor],
    k: int,
) -> Spectrum | None:
    """Return the triplets; None where the iteration does not reach them."""
    x = t1_to_t2.x
    J = Products(
        lambda V: multiply(t1_to_t2, V),
        lambda U: t1_to_t2.pull_back.batched(U.mT.contiguous())[0].mT,
        (len(x), len(x)),
        x.dtype,
        x.device,
    )
    triplets = triplets_of_products(J, k, TOLERANCE[x.dtype])
    if triplets is None:
        return None
    return Spectrum(
        triplets.U.to(x.dtype),
        triplets.S.to(x.dtype),
        triplets.V.mT.to(x.dtype),
        triplets.residuals.to(x.dtype),
        torch.tensor(triplets.steps, dtype=torch.int32, device=x.device),
        way=WAY,
    )


def _forward_mode(t1_to_t2: Differentiated, V: Tensor) -> Tensor:
    """Return `J V` by forward mode, all columns at once."""
    product = partial(forward_mode, t1_to_t2.function, t1_to_t2.x)
    return torch.func.vmap(product, 1, 1)(V)


def _twice_backward(t1_to_t2: Differentiated, V: Tensor) -> Tensor:
    """Return `J V` as the derivative of `u ↦ Jᵀu`, which is linear, all at once."""
    vjp: Any = torch.func.vjp
    y, pull_back = vjp(t1_to_t2.function, t1_to_t2.x)
    _, twice = vjp(lambda u: pull_back(u)[0], torch.zeros_like(y))
    return torch.func.vmap(lambda v: twice(v)[0], 1, 1)(V)


def _one_by_one(t1_to_t2: Differentiated, V: Tensor) -> Tensor:
    """Return `J V` column by column, for blocks that call functions unknown to
    torch.func.
    """
    product = partial(twice_backward, t1_to_t2.function, t1_to_t2.x)
    return torch.stack([product(v) for v in V.mT], 1)
