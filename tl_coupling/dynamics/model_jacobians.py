"""The derivative of the whole model: of one token after the last block by every token
before some block, by way of all tokens in between.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import pulled_back


@checked
def model_jacobian(
    trace: Trace,
    layer: int = 0,
    *,
    position: int = -1,
    function: Literal["block", "frozen"] = "block",
) -> Float[Tensor, "n_pos d_model d_model"]:
    r"""Derivative of the stream after the last block by the stream before a block.

    .. math::

        D_t = \frac{\partial h^L_{t'}}{\partial x^l_t}
        = \sum_{t = s_l \le \dots \le s_L = t'} \prod_{m = l}^{L - 1}
          \big(\delta_{s_m s_{m+1}} I + J^m_{s_m s_{m+1}}\big)

    for one token t' and every token t: the sum over all paths through tokens in
    between, where `block_product` has the one that stays at t'. Gradients are pulled
    back through one block after the other, so that no product is computed; each block
    is compared with its full sequence and its own slope, as for `block_jacobian`.

    Rows index outputs, columns inputs; an entry is a dimensionless gain.

    Args:
        trace: a traced prompt.
        layer: the block before which the stream is moved; the first by default.
        position: t', the token that is read; the last by default.
        function: "block", or "frozen" with norms, attention patterns and gates held
            constant (see `frozen_jacobian`): the detached Jacobian of Golden 2025
            (arXiv 2505.24293). In a model without biases (Llama) `Σ_t D_t x_t` is then
            the stream that leaves the last block.

    Returns:
        D of every token of the prompt; zeros for tokens that do not act on t'.

    Raises:
        ValueError: a layer or position out of range.
        DerivativeError: as `block_jacobian`; of frozen blocks as `frozen_jacobian`.

    Cost: `d_model` backward passes of the blocks from `layer` on over the tokens up to
    t'; memory for `n_pos d_model²` numbers, twice.

    Example:
        >>> D = tlc.dynamics.model_jacobian(trace, function="frozen")
        >>> made = (D @ trace.residual[0, :, :, None]).sum(0)[:, 0]
        >>> torch.allclose(made, trace.residual[-1, -1], atol=1e-4)
        True
    """
    first_layer = trace.layer_index(layer)
    t = trace.position_index(position)
    # In a causal model, later tokens do not act on t'.
    n_acting = t + 1 if trace.is_causal else trace.n_pos
    X = trace.blocks[0].X
    d_model = trace.d_model
    gradients = X.new_zeros(d_model, n_acting, d_model)
    gradients[:, t] = torch.eye(d_model, dtype=X.dtype, device=X.device)
    for _ in pulled_back(trace, gradients, 0, first_layer, function):
        pass
    D = X.new_zeros(trace.n_pos, d_model, d_model)
    D[:n_acting] = gradients.movedim(1, 0)
    return D
