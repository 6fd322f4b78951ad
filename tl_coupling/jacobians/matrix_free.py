"""Singular triplets of a block's Jacobian from products with vectors, without J."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import (
    BlockFunction,
    Path,
    Trace,
    chunk_that_fits,
    is_out_of_memory,
)
from tl_coupling.jacobians.connections import Connection, connected
from tl_coupling.jacobians.jacobians import measured
from tl_coupling.jacobians.products import (
    Differentiated,
    differentiated,
    forward_mode,
    twice_backward,
)
from tl_coupling.spectra import (
    Matrix,
    Products,
    Spectrum,
    check_k,
    svd,
    triplets_of_products,
)

# Residuals, as shares of σ_1. Products have the rounding of the block's own arithmetic.
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-10}
WAY = "block Krylov of products"
# Random vectors that ‖J‖ is estimated from: half a per cent of it where what the
# triplets leave is spread over some hundred directions.
N_PROBES = 64
# Columns up to which a second backward pass takes less than forward mode, on two cores.
_NARROW = 12


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
    the block at one token, for `k + min(8, k + 1)` vectors at a time. Both residuals of
    every triplet are at most `4·10⁻⁶ σ_1` (`10⁻¹⁰` in float64), or J is computed and
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

    Raises as `block_jacobian` where the block is not the function that was traced.

    Cost: `2 (k + min(8, k + 1))` products for each step, usually about ten steps; J
    itself takes `d_model` of them, or, where its block is linear in parts, less
    (`plan` says what it takes). Memory for some `(k + 8) · steps` vectors.

    Example:
        >>> spectrum = tlc.block_spectrum(trace, layer=1, k=2)
        >>> exact = tlc.svd(tlc.block_jacobian(trace, 1), k=2)
        >>> torch.allclose(spectrum.S, exact.S, rtol=1e-4)
        True
    """
    check_k(k, trace.d_model)
    block, t1, t2 = connected(trace, layer, position, input_position, output_position)
    block.refer_to([t2])
    with block.evaluation():
        spectrum = _triplets(_products(differentiated(block, t1, t2)), k)
    if spectrum is None:
        J, _ = block.jacobian(t1, t2)
        return svd(J, k)
    return spectrum


class MatrixFree(NamedTuple):
    """What is known of the Jacobian of one connection without forming it.

    Attributes:
        spectrum: its top triplets, a batch of one.
        frobenius_norm: `‖J‖_F`, estimated from products with random vectors.
        J: its products with vectors; J itself where they do not reach the triplets.
        path: the way in which the block is evaluated.
    """

    spectrum: Spectrum
    frobenius_norm: Float[Tensor, " 1"]
    J: Matrix
    path: Path


def matrix_free(
    trace: Trace, connection: Connection, k: int, chunk_size: int | None = None
) -> MatrixFree:
    """Return triplets, norm and products of the Jacobian of a block's branches.

    J is computed and decomposed where products do not reach its triplets. `chunk_size`
    is how many vectors go through the block at a time.
    """
    block = trace.blocks[connection.layer]
    t1 = connection.input_position
    t2 = connection.output_position
    block.refer_to([t2])
    block = measured(block, "branches")
    block.refer_to([t2])
    with block.evaluation():
        t1_to_t2 = differentiated(block, t1, t2)
        J = _products(t1_to_t2, chunk_size)
        spectrum = _triplets(J, k)
        if spectrum is not None:
            norm = _estimated_norm(J, spectrum)
            later = _later_products(block, t1, t2, chunk_size)
            return MatrixFree(spectrum[None], norm[None], later, t1_to_t2.path)
    matrix, path = block.jacobian(t1, t2, chunk_size)
    norm = torch.linalg.matrix_norm(matrix)
    return MatrixFree(svd(matrix[None], k), norm[None], matrix, path)


def _products(t1_to_t2: Differentiated, chunk_size: int | None = None) -> Products:
    """Return a block's Jacobian as its products, to be taken within `evaluation()`."""
    x = t1_to_t2.x
    d_model = len(x)
    # The MLP, usually four times as wide as the stream, is the widest activation.
    chunk_size = chunk_size or chunk_that_fits(4, d_model)

    @cache
    def twice_backward_map() -> Callable[[Tensor], tuple[Tensor]]:
        """Return the derivative of `u ↦ Jᵀu`, which is linear: `v ↦ J v`."""
        vjp: Any = torch.func.vjp
        y, pull_back = vjp(t1_to_t2.function, x)
        push_forward: Callable[[Tensor], tuple[Tensor]]
        _, push_forward = vjp(lambda u: pull_back(u)[0], torch.zeros_like(y))
        return push_forward

    def twice_backward_of_each(V: Tensor) -> Tensor:
        push_forward = twice_backward_map()
        return torch.func.vmap(lambda v: push_forward(v)[0], 1, 1)(V)

    def forward_mode_of_each(V: Tensor) -> Tensor:
        product = partial(forward_mode, t1_to_t2.function, x)
        return torch.func.vmap(product, 1, 1)(V)

    def one_by_one(V: Tensor) -> Tensor:
        product = partial(twice_backward, t1_to_t2.function, x)
        return torch.stack([product(v) for v in V.mT], 1)

    def product_of_chunk(V: Tensor) -> Tensor:
        ways = [forward_mode_of_each, twice_backward_of_each]
        # Forward mode runs the block's own code at each call, which costs more than few
        # columns do.
        if V.shape[1] <= _NARROW:
            ways.reverse()
        for multiply in ways:
            try:
                return multiply(V)
            except Exception as error:
                # A foreign block may raise anything.
                if is_out_of_memory(error):
                    raise
        # For blocks that call functions unknown to torch.func.
        return one_by_one(V)

    def multiply(V: Tensor) -> Tensor:
        return torch.cat(
            [product_of_chunk(chunk) for chunk in V.split(chunk_size, 1)], 1
        )

    def multiply_transposed(U: Tensor) -> Tensor:
        products = []
        for chunk in U.mT.contiguous().split(chunk_size):
            products.append(t1_to_t2.pull_back.batched(chunk)[0])
        return torch.cat(products).mT

    return Products(
        multiply, multiply_transposed, (d_model, d_model), x.dtype, x.device
    )


def _later_products(
    block: BlockFunction, t1: int, t2: int, chunk_size: int | None
) -> Products:
    """Return products that evaluate the block when they are taken.

    Between them nothing is held: neither activations nor weights that were converted
    or read from disk.
    """

    def product(V: Tensor, *, is_transposed: bool) -> Tensor:
        block.refer_to([t2])
        with block.evaluation():
            J = _products(differentiated(block, t1, t2), chunk_size)
            return (J.mT if is_transposed else J) @ V

    d_model = block.X.shape[1]
    return Products(
        partial(product, is_transposed=False),
        partial(product, is_transposed=True),
        (d_model, d_model),
        block.X.dtype,
        block.X.device,
    )


def _triplets(J: Products, k: int) -> Spectrum | None:
    """Return the triplets; None where the block has no products, or the iteration does
    not reach them.
    """
    try:
        triplets = triplets_of_products(J, k, TOLERANCE[J.dtype])
    except Exception as error:
        # A foreign block may raise anything.
        if is_out_of_memory(error):
            raise
        return None
    if triplets is None:
        return None
    return Spectrum(
        triplets.U.to(J.dtype),
        triplets.S.to(J.dtype),
        triplets.V.mT.to(J.dtype),
        triplets.residuals.to(J.dtype),
        torch.tensor(triplets.steps, dtype=torch.int32, device=J.device),
        way=WAY,
    )


def _estimated_norm(J: Products, spectrum: Spectrum) -> Float[Tensor, ""]:
    """Return `‖J‖_F`: exact in the span of the triplets, estimated beside it."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(J.shape[1], N_PROBES, generator=generator, dtype=J.dtype)
    probes = probes.to(J.device)
    probes = probes - spectrum.read @ (spectrum.Vh @ probes)
    beside = (J @ probes).square().sum() / N_PROBES
    return (spectrum.S.square().sum() + beside).sqrt()
