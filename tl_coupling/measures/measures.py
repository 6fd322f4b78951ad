"""Coupling matrices and their measures. Pure tensors.

`A = U_{2,K}ᵀ J_1 V_{2,K}` (Aubry et al. 2025, eq. 9–12) says how far the top K singular
vectors of one Jacobian diagonalise another. Every measure takes `A` with any leading
batch axes and is invariant under the sign flips `(u_k, v_k) → (−u_k, −v_k)`; for a
smaller K pass the corner `A[..., :k, :k]`.
"""

import math
from typing import Annotated, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import at_least, checked, warn_caller
from tl_coupling.spectra import Spectrum, check_entries, check_k

Norm = Annotated[int | float, at_least(1)]
Orientation = Literal["ujv", "vju"]
Measure = Literal[
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
    "released_norm",
    "released_trace",
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
BOUNDED_BY_1: tuple[Measure, ...] = (
    "coupling",
    "normalized_miscoupling",
    "captured_energy",
)
# What the authors' released code reports, as `spectral_miscoupling` with these options.
RELEASED: dict[Measure, dict[str, Any]] = {
    "released_norm": {"p": 2, "absolute": True},
    "released_trace": {"p": 1, "absolute": True},
}


@checked
def coupling_matrix(
    J_1: Float[Tensor, "*batch d_model d_model"],
    spectrum_2: Spectrum,
    k: int,
    orientation: Orientation = "ujv",
) -> Float[Tensor, "*batch k k"]:
    r"""Coupling matrix: the Jacobian of one block in the singular vectors of another.

    .. math:: A = U_{2,k}^\top J_1 V_{2,k}, \qquad A_{ij} = u_i^\top J_1 v_j

    A is diagonal where the top k singular vectors of `J_2` diagonalise `J_1`. If both
    Jacobians are the same, `A = diag(S)`. Entries are gains, and have no unit.

    Args:
        J_1: a Jacobian, or a batch of them.
        spectrum_2: `svd` of the other Jacobian, or of a batch that broadcasts with that
            of `J_1`.
        k: how many of its singular vectors are used, from the largest.
        orientation: `"ujv"`, as above and in the paper, or `"vju"`, which swaps left
            and right: `V_{2,k}ᵀ J_1 U_{2,k}`.

    Raises:
        ValueError: k above what the spectrum holds, sizes or batch axes that do not
            fit, NaN or infinite entries.
        TypeError: `J_1` and the spectrum have different dtypes.

    Cost: `2 k d_model²` flops. Source: Aubry et al. 2025, eq. 9–12.

    Example:
        >>> J_1, J_2 = tlc.block_jacobians(trace)
        >>> A = tlc.coupling_matrix(J_1, tlc.svd(J_2), k=4)
        >>> A.shape
        torch.Size([4, 4])
    """
    finite(J_1, "J_1")
    d, sides = J_1.shape[-1], [spectrum_2.U.shape[-2], spectrum_2.Vh.shape[-1]]
    if sides != [d, d]:
        raise ValueError(
            f"`spectrum_2` must be of [{d} {d}] matrices like `J_1`, got {sides}"
        )
    if (dtype := J_1.dtype) != (other := spectrum_2.U.dtype):
        raise TypeError(
            f"`J_1` and `spectrum_2` must have one dtype, got {dtype} and {other}: convert J_1"
        )
    axes = list(J_1.shape[:-2]), list(spectrum_2.S.shape[:-1])
    if any(
        m != n and 1 not in (m, n)
        for m, n in zip(axes[0][::-1], axes[1][::-1], strict=False)
    ):
        raise ValueError(
            f"`J_1` and `spectrum_2` must have batch axes that fit, got {axes[0]} and {axes[1]}"
        )
    top = spectrum_2.top(k)
    left, right = (top.Vh, top.U) if orientation == "vju" else (top.U.mT, top.Vh.mT)
    return left @ (J_1 @ right)


@checked
def miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Mis-coupling: the size of what lies off the diagonal of a coupling matrix.

    .. math:: m(A) = \|A - \operatorname{Diag}(A)\|_F

    0 for a diagonal A, in units of J's gain. `A[..., :k, :k]` is measured for a smaller
    k. Raises ValueError where A has no entries, NaN or infinite ones. Source: Aubry et
    al. 2025, eq. 13.

    Example:
        >>> tlc.miscoupling(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        tensor(1.4142)
    """
    check_entries(A, "A")
    return finite(off_diagonal(A).norm(dim=(-2, -1)), "A")


@checked
def normalized_miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Normalised mis-coupling: the share of a coupling matrix that lies off its
    diagonal.

    .. math:: \tilde m(A) = \frac{\|A - \operatorname{Diag}(A)\|_F}{\|A\|_F}

    Dimensionless, in [0, 1]. Coupling is `1 − m̃`. 0 for a diagonal A, and so for any
    1×1 matrix: k = 1 says nothing. Random subspaces give about `√(1 − 1/k)`, see
    `random_subspace_null`.

    Raises ValueError where A has no entries, NaN or infinite ones. Undefined for `A =
    0`: NaN, with a warning.

    Source: Aubry et al. 2025, eq. 14.

    Example:
        >>> tlc.normalized_miscoupling(torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]))
        tensor([0., 1.])
    """
    check_entries(A, "A")
    return off_diagonal(A).norm(dim=(-2, -1)) / nan_where_zero(
        finite(A.norm(dim=(-2, -1)), "A"), "‖A‖_F"
    )


@checked
def spectral_miscoupling(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""Spectral mis-coupling: how far a coupling matrix is from the singular values of
    its own Jacobian.

    .. math:: m_K(J_1, J_2) = \frac{\|A - S_{1,K}\|_F}{\|s_{1,K}\|_p}

    Dimensionless, at least 0 and not bounded by 1; 0 only where A is exactly what `J_1`
    has in its own singular vectors. The measure of the paper's project page; with
    `absolute=True`, of its released code.

    Args:
        A: a coupling matrix, or a batch of them.
        S_1: singular values of `J_1`, largest first, at least k of them; the top k are
            used.
        p: norm of the singular values in the denominator: 2, or 1 for their sum (the
            "trace").
        absolute: use the absolute value of each entry of A, as the authors' code does.

    Raises ValueError for too few singular values, and for NaN or infinite entries.
    Undefined for `S_1 = 0`: NaN, with a warning.

    Example:
        >>> tlc.spectral_miscoupling(torch.tensor([[2.0, 0.0], [0.0, -1.0]]), torch.tensor([2.0, 1.0]))
        tensor(0.8944)
    """
    s = top_values(S_1, A.shape[-1])
    distance = ((A.abs() if absolute else A) - torch.diag_embed(s)).norm(dim=(-2, -1))
    return finite(distance, "A") / nan_where_zero(
        torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p"
    )


@checked
def captured_energy(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
) -> Float[Tensor, "*batch"]:
    r"""Captured energy: how much of `J_1` lies in the singular subspaces of `J_2`,
    relative to its own.

    .. math:: \frac{\|A\|_F}{\|s_{1,K}\|_2}

    Dimensionless, in [0, 1]; 1 if the subspaces are J_1's own. A high coupling with
    little energy captured says little: `m̃` does not see the difference. Arguments and
    errors as in `spectral_miscoupling`.

    Example:
        >>> tlc.captured_energy(torch.tensor([[1.2, 0.0], [0.0, 0.5]]), torch.tensor([2.4, 1.0]))
        tensor(0.5000)
    """
    s = top_values(S_1, A.shape[-1])
    return finite(A.norm(dim=(-2, -1)), "A") / nan_where_zero(
        s.norm(dim=-1), "‖s_{1,K}‖₂"
    )


@checked
def measure_of(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    measure: Measure = "coupling",
    *,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""A measure of coupling by its name.

    The names are `"coupling"`, which is `1 − m̃`, `"normalized_miscoupling"`,
    `"miscoupling"`, `"spectral_miscoupling"`, `"captured_energy"`, and what the
    authors' released code reports, `"released_norm"` and `"released_trace"`:

    .. math:: \frac{\||A| - S_{1,K}\|_F}{\|s_{1,K}\|_p} \quad \text{with } p = 2 \text{ and } p = 1

    `p` and `absolute` are options of `"spectral_miscoupling"`; ValueError with other
    measures.

    Example:
        >>> tlc.measures.measure_of(torch.tensor([[-2.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 1.0]), "released_norm")
        tensor(0.)
    """
    if measure != "spectral_miscoupling" and (p != 2 or absolute):
        raise ValueError(
            f"`p` and `absolute` are options of 'spectral_miscoupling', not of {measure!r}: leave them out"
        )
    name, options = with_options(measure, p, absolute)
    if name == "spectral_miscoupling":
        return spectral_miscoupling(A, S_1, **options)
    if name == "captured_energy":
        return captured_energy(A, S_1)
    if name == "miscoupling":
        return miscoupling(A)
    return (
        1 - normalized_miscoupling(A)
        if name == "coupling"
        else normalized_miscoupling(A)
    )


def with_options(
    measure: Measure, p: Norm, absolute: bool
) -> tuple[Measure, dict[str, Any]]:
    """What a measure is called and which options it has; those of the released code are
    spectral ones.
    """
    if measure in RELEASED:
        return "spectral_miscoupling", RELEASED[measure]
    return measure, {
        "p": p,
        "absolute": absolute,
    } if measure == "spectral_miscoupling" else {}


def measures_at_every_k(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
) -> Float[Tensor, "n_measures k *batch"]:
    """Every measure (`MEASURES`, in this order, with default options) of every corner
    of A, in float64.
    """
    A, s = A.double(), top_values(S_1, A.shape[-1]).double()
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    off = off_diagonal(A).square().cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
    squares = (diagonal, diagonal - s, diagonal.abs() - s, s)
    on, distance, absolute, energy = (x.square().cumsum(-1) for x in squares)
    size = finite((off + on).sqrt(), "A")
    normalized, length = (
        off.sqrt() / nan_where_zero(size, "‖A‖_F"),
        nan_where_zero(energy.sqrt(), "‖s_{1,K}‖₂"),
    )
    spectral, released = (off + distance).sqrt() / length, (off + absolute).sqrt()
    by_trace = released / s.cumsum(-1)
    values = (
        1 - normalized,
        normalized,
        off.sqrt(),
        spectral,
        size / length,
        released / length,
        by_trace,
    )
    return torch.stack(values).movedim(-1, 1)


def top_values(S_1: Tensor, k: int) -> Tensor:
    """The k largest; ValueError where there are fewer, or one is not finite."""
    check_k(k, S_1.shape[-1])
    return finite(S_1, "S_1")[..., :k]


def finite(values: Tensor, name: str) -> Tensor:
    """The values. (A Frobenius norm is finite where every entry is.)"""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"`{name}` has NaN or infinite entries: it has no measure")
    return values


def off_diagonal(A: Tensor) -> Tensor:
    """`A − Diag(A)`."""
    return A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))


def nan_where_zero(denominator: Tensor, name: str) -> Tensor:
    """The denominator, NaN in place of 0, with a warning."""
    zero = denominator == 0
    if bool(zero.any()):
        warn_caller(
            f"{name} is 0 for {int(zero.sum())} matrices: the measure is undefined there (NaN)"
        )
    return denominator.masked_fill(zero, math.nan)
