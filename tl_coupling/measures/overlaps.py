"""What singular vectors of two layers have in common, on one side or across."""

from typing import Literal

import torch
from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.measures.matrices import nan_where_zero, require_finite, top_values
from tl_coupling.measures.nulls import random_rotations
from tl_coupling.spectra import Spectrum, check_entries, check_k

Sides = Literal["uv", "uu", "vv"]


@checked
def alignment_matrices(
    spectra: Spectrum, k: Count | None = None, sides: Sides = "uv"
) -> Float[Tensor, "n_layers n_layers k k"]:
    """Return cosines between the top k singular vectors of every two layers.

    They are `U_lᵀ V_{l'}`, `U_lᵀ U_{l'}` or `V_lᵀ V_{l'}`. `spectra` is `svd` of a
    stack of square matrices, one for each layer. With `sides="uv"`, entry
    `[l, l', i, j]` is `u_iᵀ v_j` with `u_i` of layer l and `v_j` of layer l'; the
    matrices `[l, l]` compare the left and right vectors of one layer (those of "uu" and
    "vv" are identities). k is all of them by default. ValueError for other than square
    matrices, and for k out of range.

    Li and Papyan (2023) find the top singular vectors aligned in all three ways (RA2):
    then the matrices are diagonal, with entries of ±1. The signs on the diagonal of
    `U_lᵀ V_l` mean something, + for a direction that the block stretches and − for one
    that it shrinks; signs between layers are arbitrary. All singular vectors of J_1
    with the top k of J_2 make up the coupling matrix, `A = (U_2ᵀ U_1) S_1 (V_1ᵀ V_2)`,
    which shows alignment across blocks, but not that of left with right.

    Example:
        >>> J = torch.tensor([[[2.0, 0.0], [0.0, -1.0]], [[0.0, 1.0], [2.0, 0.0]]])
        >>> A = tlc.measures.alignment_matrices(tlc.svd(J))
        >>> A[0, 0].abs(), A[1, 1].abs()
        (tensor([[1., 0.],
                [0., 1.]]), tensor([[0., 1.],
                [1., 0.]]))
    """
    if spectra.S.ndim != 2 or spectra.U.shape[-2] != spectra.Vh.shape[-1]:
        raise ValueError(
            "`spectra` must be those of square matrices, one for each layer, "
            f"got U of shape {list(spectra.U.shape)} and "
            f"Vh of shape {list(spectra.Vh.shape)}: use `svd(J)`"
        )
    # Singular vectors are columns here, whichever side they are of.
    top = spectra.top(spectra.k if k is None else k)
    vectors = {"u": top.U, "v": top.Vh.mT}
    first_side, second_side = sides
    return einsum(
        vectors[first_side],
        vectors[second_side],
        "layer d i, other_layer d j -> layer other_layer i j",
    )


@checked
def vector_alignment(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Return the mean squared cosine between singular vectors of the same rank.

    .. math:: \frac1k \sum_i a_{ii}^2

    A is an alignment matrix. In [0, 1]: 1 where every vector is the other's up to sign,
    in the same order; `1/d_model` expected for independent Haar-random vectors. It
    changes under rotations inside a (nearly) repeated singular value, to which
    `subspace_overlap` is blind.

    Example:
        >>> tlc.measures.vector_alignment(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor(0.)
    """
    matched_cosines = _cosines(A).diagonal(dim1=-2, dim2=-1)
    return reduce(matched_cosines.square(), "... i -> ...", "mean")


@checked
def subspace_overlap(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Return the mean squared cosine of the principal angles between two subspaces.

    .. math:: \frac{\|A\|_F^2}{k}

    A is an alignment matrix. In [0, 1]: 1 where both sets of k vectors span the same
    subspace, however they are turned or ordered within it; `k/d_model` expected for
    independent Haar-random subspaces, which makes it say nothing for k near `d_model`.
    At least as large as `vector_alignment`.

    Example:
        >>> tlc.measures.subspace_overlap(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor(1.)
    """
    return reduce(_cosines(A).square(), "... i j -> ...", "sum") / A.shape[-1]


def _cosines(A: Tensor) -> Tensor:
    """Return A; raise ValueError unless its entries can be cosines."""
    check_entries(A, "A")
    if not (A.abs() <= 1 + 1e-3).all():
        raise ValueError(
            "`A` must hold cosines, as `alignment_matrices` gives; "
            "got entries beyond 1, or NaN"
        )
    return A


@checked
def nuclear_overlap(
    cosines: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n_1"],
    S_2: Float[Tensor, "*#batch n_2"],
) -> Float[Tensor, "*batch"]:
    r"""Return how far two Jacobians share singular vectors on one side.

    .. math::

        \frac{\|S_1 U_1^\top U_2 S_2\|_*}{\|s_1\|_2 \, \|s_2\|_2}

    Dimensionless, in [0, 1]: 1 where both have the same top k vectors with proportional
    singular values, 0 where the spans are orthogonal. The nuclear norm `‖·‖_*`, the sum
    of singular values, does not depend on the signs of singular vectors, nor on how
    those of one repeated singular value are turned. With `U`, the write side, this is
    what the code of arXiv 2604.19018 calls coupling. It sees one side at a time: which
    read direction goes with which write direction has no part in it, and in the
    coupling matrix `A = U_2ᵀ J_1 V_2` it has.

    Args:
        cosines: `U_1ᵀ U_2` of the top k vectors, or `V_1ᵀ V_2`, the read side.
        S_1, S_2: singular values, largest first, at least k of each; the top k count.

    Raises ValueError for too few singular values, and for NaN or infinite entries.
    Undefined where all singular values of one are 0: NaN, with a warning.

    Cost: the singular values of a k×k matrix for each.

    Example:
        >>> cosines = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> S = torch.tensor([2.0, 1.0])
        >>> tlc.measures.nuclear_overlap(torch.eye(2), S, S)
        tensor(1.)
        >>> tlc.measures.nuclear_overlap(cosines, S, S)  # 2 · 2 · 1 of 2² + 1²
        tensor(0.8000)
    """
    check_entries(cosines, "cosines")
    k = cosines.shape[-1]
    s_1 = top_values(S_1, k)
    s_2 = top_values(S_2, k)
    lengths = s_1.norm(dim=-1) * s_2.norm(dim=-1)
    nuclear_norm = _nuclear_norm(require_finite(cosines, "cosines"), s_1, s_2)
    return nuclear_norm / nan_where_zero(lengths, "‖s_1‖ ‖s_2‖")


@checked
def draws_of_nuclear_overlap(
    S_1: Float[Tensor, "*batch k"],
    S_2: Float[Tensor, "*batch k"],
    n: Count,
    *,
    d_model: Count,
    generator: torch.Generator,
) -> Float[Tensor, "*draws_and_batch"]:
    r"""Draw `nuclear_overlap` of independent Haar-random bases, n times: its null.

    The singular values stay as they are. For k = 1 the mean is known,

    .. math::

        \mathbb{E}\,|u_1^\top u_2|
        = \frac{\Gamma(d/2)}{\sqrt{\pi}\,\Gamma((d+1)/2)}

    For other k there is no closed form, but bounds for the mean of squares: it lies in
    `[1/d, k/d]`. All pairs of a batch meet the same bases in one draw, so that means
    over a batch vary more than those of independent pairs.

    Args:
        S_1, S_2: the top k singular values of each pair.
        n: how many draws.
        d_model: size of the Jacobians.
        generator: of the random numbers.

    Raises ValueError for a k above `d_model`, and for NaN or infinite singular values.

    Cost: a QR decomposition of `[d_model, k]` a draw, and the singular values of a k×k
    matrix for each pair and draw, in float64.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> draws = tlc.measures.draws_of_nuclear_overlap(
        ...     torch.ones(1), torch.ones(1), 4000, d_model=3, generator=generator
        ... )
        >>> round(float(draws.mean()), 2)  # 1/2 in three dimensions
        0.5
    """
    k = S_1.shape[-1]
    check_k(k, d_model)
    s_1 = require_finite(S_1, "S_1").double()
    s_2 = require_finite(S_2, "S_2").double()
    draws = []
    for _ in range(n):
        # The first basis is that of the coordinates: only their relation is random.
        second_basis = random_rotations(d_model, columns=k, generator=generator)
        cosines = second_basis[:k].to(s_1.device)
        draws.append(_nuclear_norm(cosines, s_1, s_2))
    lengths = s_1.norm(dim=-1) * s_2.norm(dim=-1)
    return torch.stack(draws) / nan_where_zero(lengths, "‖s_1‖ ‖s_2‖")


def _nuclear_norm(cosines: Tensor, s_1: Tensor, s_2: Tensor) -> Tensor:
    """Return `‖S_1 C S_2‖_*` of each pair."""
    # The diagonal matrices S_1 and S_2 scale rows and columns.
    weighted = s_1[..., :, None] * cosines * s_2[..., None, :]
    return torch.linalg.svdvals(weighted).sum(-1)
