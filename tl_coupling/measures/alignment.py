"""Alignment of singular vectors of two layers, without the singular values."""

from typing import Literal

from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.spectra import Spectrum, check_entries

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
