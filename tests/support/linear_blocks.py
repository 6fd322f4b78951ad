"""Traces of models whose blocks are linear: their answers are known."""

import torch
from torch import Tensor, nn

from random_matrices import gaussian
from tl_coupling.blocks import BlockCall, BlockFunction, Trace

D, L, N_POS = 6, 4, 3


class Affine(nn.Linear):
    """A block that adds an affine map of the stream to it."""

    def forward(self, X: Tensor) -> Tensor:
        return X + super().forward(X)


def affine_trace(A: Tensor, b: Tensor | None = None, x: Tensor | None = None) -> Trace:
    """Return a trace of a model whose block `l` adds `A[layer] x + b[l]` to every
    token, and nothing else.
    """
    X = gaussian(N_POS, A.shape[-1], seed=9) if x is None else x
    stream, blocks = [X], []
    for layer, matrix in enumerate(A):
        d = len(matrix)
        module = Affine(d, d, dtype=A.dtype)
        module.weight.data = matrix
        module.bias.data = torch.zeros(d, dtype=A.dtype) if b is None else b[layer]
        call = BlockCall(module, {}, (), False, -2)
        stream.append(module(stream[-1]).detach())
        blocks.append(BlockFunction(layer, call, stream[-2], stream[-1] - stream[-2]))
    n_pos = len(X)
    return Trace(
        model=nn.Identity(),
        tokens=torch.arange(n_pos),
        str_tokens=tuple("abc"[:n_pos]),
        residual=torch.stack(stream),
        blocks=tuple(blocks),
        final_norm=False,
        provenance={"model": "affine"},
    )


def coupled() -> tuple[Tensor, Tensor, Tensor]:
    """`A_l = U S_l Uᵀ` with one U, singular values in the same order at every layer;
    and U and S.
    """
    U = torch.linalg.qr(gaussian(D, D, seed=3)).Q
    S = (gaussian(L, D, seed=4).abs() + 0.1).sort(dim=1, descending=True).values
    return U * S[:, None] @ U.mT, U, S
