"""How much of a matrix each of its terms makes: signed shares that sum to 1."""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.measures.matrices import nan_where_zero


def energy_shares(
    terms: Float[Tensor, "*batch term n m"], whole: Float[Tensor, "*batch n m"]
) -> Float[Tensor, "*batch term"]:
    """Return `⟨A_c, A⟩ / ‖A‖²` of each term of `A = Σ_c A_c`.

    NaN, with a warning, where A is zero.
    """
    # Inner products of each term with the whole.
    pattern = "... term i j, ... i j -> ... term"
    size = nan_where_zero(whole.square().sum((-2, -1)), "‖A‖²")
    return einsum(terms, whole, pattern) / size[..., None]


def diagonal_shares(
    terms: Float[Tensor, "*batch term k k"], whole: Float[Tensor, "*batch k k"]
) -> Float[Tensor, "*batch term"]:
    """Return `⟨diag A_c, diag A⟩ / ‖diag A‖²` of each term of `A = Σ_c A_c`.

    NaN, with a warning, where the diagonal is zero. In frames that are random, and as
    many as make A's entries Gaussian, its mean is the term's share of the whole matrix,
    `⟨J_c, J⟩ / ‖J‖²`: each entry of A_c is then that share of A's, and an independent
    rest.
    """
    diagonal = whole.diagonal(dim1=-2, dim2=-1)
    term_diagonals = terms.diagonal(dim1=-2, dim2=-1)
    size = nan_where_zero(diagonal.square().sum(-1), "‖diag A‖²")
    pattern = "... term i, ... i -> ... term"
    return einsum(term_diagonals, diagonal, pattern) / size[..., None]
