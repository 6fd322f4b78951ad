"""What becomes of a direction on its way to the logits, to first order."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import (
    DerivativeError,
    Trace,
    is_out_of_memory,
    own_arithmetic,
)
from tl_coupling.jacobians import block_jacobians
from tl_coupling.models import refuse_offloaded

# Directions whose logits are differentiated at once.
_BATCH_SIZE = 16


def carry_to_end(
    trace: Trace,
    vectors: Float[Tensor, "n d_model"],
    first_layer: int,
    position: int,
) -> Float[Tensor, "n d_model"]:
    """Return `(I + J^{L−1}) ⋯ (I + J^{first})` times each vector, at one token."""
    layers = range(first_layer, trace.n_layers)
    if not layers:
        return vectors
    J = block_jacobians(trace, layers, position=position, progress=False)
    return carry(J, vectors)


def carry(
    J: Float[Tensor, "n_layers d_model d_model"], vectors: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """Return the product of `I + J` of all layers, the first one first, times vectors."""
    moved = vectors.to(J)
    for J_of_layer in J:
        # Vectors are rows: `(I + J) v` of each.
        moved = moved + moved @ J_of_layer.mT
    return moved


def change_of_logits(
    trace: Trace, vectors: Float[Tensor, "n d_model"], position: int
) -> Float[Tensor, "n d_vocab"]:
    """Return the derivative of one token's logits along directions of the last stream.

    Norm, unembedding and soft cap are the model's own, differentiated at the stream that
    left the last block.

    Raises DerivativeError where torch.func fails on them, and ModelError where
    accelerate brings in their weights.
    """
    # Within torch.func no weights can be brought in.
    refuse_offloaded(trace.model, "the derivative of the logits")
    x = trace.residual[-1, position]

    def logits(row: Tensor) -> Tensor:
        return trace.logits(row, normalised=trace.final_norm)

    def logits_change(vector: Tensor) -> Tensor:
        change: Tensor = torch.func.jvp(logits, (x,), (vector,))[1]
        return change

    # The first call runs the whole model once, which need not be differentiable forwards.
    logits(x)
    rows: Sequence[Tensor] = vectors.to(x).split(_BATCH_SIZE)
    try:
        with own_arithmetic(trace.model, fills_at_once=True):
            return torch.cat([torch.func.vmap(logits_change)(some) for some in rows])
    except Exception as error:
        # A foreign norm or unembedding may raise anything within torch.func.
        if is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise DerivativeError(
            "the model's final norm or unembedding cannot be differentiated: it runs, but "
            f"not within torch.func ({type(error).__name__}: {message}). Take away what "
            "fails there, such as a hook that keeps numbers"
        ) from error
