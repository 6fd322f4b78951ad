"""Jacobians without what may couple them for a simple reason.

That is their own largest gains, or directions that all share. An outlier direction of
the stream, or an attention sink, is the leading pair of singular directions of many
blocks: one pair can couple all of them. `comparisons.jacobian_coupling` of what is left
here says whether the rest is coupled.
"""

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.measures.matrices import require_finite
from tl_coupling.spectra import eigh, svd


@checked
def without_top(
    J: Float[Tensor, "*batch d_model d_model"], r: Count
) -> Float[Tensor, "*batch d_model d_model"]:
    r"""Return Jacobians without their own first r singular pairs.

    .. math:: J - \sum_{i \le r} \sigma_i u_i v_i^\top

    Its leading singular values are then those from the (r+1)-th on. ValueError for r
    above `d_model`. Cost: an SVD of each.

    Example:
        >>> J = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> tlc.svd(tlc.measures.without_top(J, 1)).S
        tensor([2., 1., 0.])
    """
    _check_r(J, r)
    top = svd(J, r)
    return J - top.U * top.S[..., None, :] @ top.Vh


@checked
def without_identity(
    J: Float[Tensor, "*batch d_model d_model"],
) -> Float[Tensor, "*batch d_model d_model"]:
    r"""Return Jacobians without their best multiple of the identity.

    .. math:: J - \frac{\operatorname{tr} J}{d} I

    It is what is left when the multiple that is nearest in the Frobenius norm is taken
    away: the part of a block that only scales the stream. A block that erases what it
    reads has a negative multiple.

    Example:
        >>> J = torch.tensor([[3.0, 1.0], [0.0, 1.0]])
        >>> tlc.measures.without_identity(J)
        tensor([[ 1.,  1.],
                [ 0., -1.]])
    """
    rest = J.clone()
    diagonal = rest.diagonal(dim1=-2, dim2=-1)
    diagonal -= diagonal.mean(-1, keepdim=True)
    return rest


@checked
def without_shared(
    J: Float[Tensor, "n_layers d_model d_model"], r: Count
) -> Float[Tensor, "n_layers d_model d_model"]:
    r"""Return Jacobians without the r directions that all layers share most.

    .. math:: (1 - P P^\top)\, J_l\, (1 - Q Q^\top)

    On either side: P holds the leading eigenvectors of `Σ_l J_l J_lᵀ / ‖J_l‖_F²`, Q
    those of `Σ_l J_lᵀ J_l / ‖J_l‖_F²`: every layer has the same weight. ValueError for
    r above `d_model`, and for a Jacobian that is zero. Cost: two products and a share
    of two symmetric eigenvalue problems for each layer.

    Example:
        >>> J = tlc.block_jacobians(trace)
        >>> rest = tlc.measures.without_shared(J, 2)
        >>> torch.linalg.matrix_norm(rest) < torch.linalg.matrix_norm(J)
        tensor([True, True])
    """
    _check_r(J, r)
    norms = torch.linalg.matrix_norm(require_finite(J, "J"), keepdim=True)
    if not bool(norms.all()):
        raise ValueError(
            "a Jacobian in `J` is zero: it shares no directions, leave it out"
        )
    # At length 1 every layer has the same weight.
    unit = J / norms
    left_gram = reduce(unit @ unit.mT, "layer i j -> i j", "sum")
    right_gram = reduce(unit.mT @ unit, "layer i j -> i j", "sum")
    # Eigenvalues ascend.
    P = eigh(left_gram)[1][:, -r:]
    Q = eigh(right_gram)[1][:, -r:]
    # With d × r products: the projectors themselves are never formed.
    J = J - P @ (P.mT @ J)
    return J - (J @ Q) @ Q.mT


def _check_r(J: Tensor, r: int) -> None:
    """Raise unless so many directions can be left out."""
    d_model = J.shape[-1]
    if r > d_model:
        raise ValueError(
            f"`r` must lie in [1, {d_model}] (the number of directions), got {r}"
        )
