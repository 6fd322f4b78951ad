"""Frozen Jacobians: a block with norm scales, attention patterns and gates held
constant is an affine function of the stream, and this is its matrix.
"""

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks import BlockFunction, FrozenFunction, Trace
from tl_coupling.jacobians import Function, connected


@checked
def frozen_jacobian(
    trace: Trace,
    layer: int,
    *,
    position: int = -1,
    input_position: int | None = None,
    output_position: int | None = None,
    chunk_size: Count | None = None,
    function: Function = "block",
) -> Float[Tensor, "d_model d_model"]:
    r"""Jacobian of a block whose norms, attention pattern and gates are held constant.

    .. math:: f^l(X)_t = \sum_s J^{+}_{ts} x_s + b_t

    J⁺ is the linear map by which the block made its output from this very stream, and
    the sum is exact; `frozen_bias` gives b. `block_jacobian` also has how the map itself
    changes with the stream. This is the detached Jacobian of Golden 2025
    (arXiv 2505.24293), of a block instead of the whole model. Constant are:

    * the number by which a norm divides (LayerNorm still subtracts the mean);
    * the attention pattern, and the weights of a mixture's experts;
    * the ratio `φ(x) / x` of an activation; zero where x is;
    * in a gated MLP `φ(g) · y`, the gate `φ(g)`: its input g has no derivative. A
      logistic gate is held in the same way.

    Rows index outputs, columns inputs; an entry is a dimensionless gain.

    Args:
        trace, layer, position, input_position, output_position, chunk_size, function:
            as in `block_jacobian`, with the same errors. J⁺ of a block that normalises
            the stream itself (post-norm: BERT) holds `−I` unless `function` is
            "branches".

    Raises:
        DerivativeError: with all that held constant the block is still no affine
            function of the stream, because it multiplies activations with each other in
            another way: recurrent blocks (Mamba; not RWKV-4), gates without an
            activation (LFM2's convolutions), MLPs without any (bilinear), an activation
            with a backward pass of its own (BLOOM).

    Cost: as `block_jacobian`, and four forward passes of the block on the whole prompt,
    which check that it is affine.

    Example:
        >>> J_frozen = [
        ...     tlc.dynamics.frozen_jacobian(trace, 1, input_position=s)
        ...     for s in range(trace.n_pos)
        ... ]
        >>> total = tlc.dynamics.frozen_bias(trace, 1)
        >>> for J, x in zip(J_frozen, trace.residual[1]):
        ...     total = total + J @ x
        >>> added = trace.residual[2, -1] - trace.residual[1, -1]
        >>> torch.allclose(total, added, atol=1e-4)
        True
    """
    block, t1, t2 = connected(trace, layer, position, input_position, output_position)
    J, _ = _frozen(block, function).jacobian(t1, t2, chunk_size)
    return J


@checked
def frozen_bias(
    trace: Trace,
    layer: int,
    position: int = -1,
    *,
    function: Function = "block",
) -> Float[Tensor, " d_model"]:
    r"""What a frozen block adds at one token whatever the stream is.

    The b of `frozen_jacobian`: what the block's biases come to, with the same things
    held constant. Zero in a block without biases (Llama), up to rounding.

    Args:
        trace, layer, function: as there.
        position: the token that is read; the last by default.

    Raises:
        DerivativeError: as there.

    Cost: a few forward passes of the block on the whole prompt, and one backward pass.

    Example:
        >>> tlc.dynamics.frozen_bias(trace, 1).shape
        torch.Size([32])
    """
    t = trace.position_index(position)
    block = _frozen(trace.blocks[trace.layer_index(layer)], function)
    block.refer_to([t])
    # At a stream of zeros an affine function has its constant.
    return block.affine(block.X.new_zeros(block.X.shape))[t]


def _frozen(block: BlockFunction, function: Function) -> FrozenFunction:
    if function == "branches":
        return FrozenFunction.from_block(block.branches())
    block.remark_on_norms()
    return FrozenFunction.from_block(block)
