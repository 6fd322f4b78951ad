"""Coupling matrices, and what they are measured by. Pure tensors.

`A = U_{2,K}ᵀ J_1 V_{2,K}` (Aubry et al. 2025, eq. 9–12) says how far the top K singular
vectors of one Jacobian diagonalise another. Every function here takes `A` with any
leading batch axes and is invariant under the sign flips `(u_k, v_k) → (−u_k, −v_k)`;
for a smaller K pass the corner `A[..., :k, :k]`.
"""

import math
from typing import Annotated, Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import at_least, checked, warn_caller
from tl_coupling.spectra import Spectrum, check_cut, check_entries, check_k

Norm = Annotated[int | float, at_least(1)]
Orientation = Literal["ujv", "vju"]
# The axes of a matrix.
_MATRIX = (-2, -1)


@checked
def coupling_matrix(
    J_1: Float[Tensor, "*batch d_model d_model"],
    spectrum_2: Spectrum,
    k: int,
    orientation: Orientation = "ujv",
) -> Float[Tensor, "*batch k k"]:
    r"""Return the Jacobian of one block in the singular vectors of another.

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

    Warns where k is above the rank of `J_2`, or its σ_k and σ_{k+1} are equal to
    rounding: the top k are arbitrary there, and so is A.

    Cost: `2 k d_model²` flops. Source: Aubry et al. 2025, eq. 9–12.

    Example:
        >>> J_1, J_2 = tlc.block_jacobians(trace)
        >>> A = tlc.coupling_matrix(J_1, tlc.svd(J_2), k=4)
        >>> A.shape
        torch.Size([4, 4])
    """
    _check_fit(J_1, spectrum_2)
    # The frame on the left has shape `[k d_model]`, that on the right `[d_model k]`.
    top = spectrum_2.top(k)
    _check_cut(spectrum_2, k)
    left = top.U.mT
    right = top.Vh.mT
    if orientation == "vju":
        left = top.Vh
        right = top.U
    return left @ (J_1 @ right)


def _check_fit(J_1: Tensor, spectrum_2: Spectrum) -> None:
    """Raise unless the singular vectors can be applied to the Jacobians."""
    require_finite(J_1, "J_1")
    d_model = J_1.shape[-1]
    lengths = [spectrum_2.U.shape[-2], spectrum_2.Vh.shape[-1]]
    if lengths != [d_model, d_model]:
        raise ValueError(
            f"`spectrum_2` must be of [{d_model} {d_model}] matrices like `J_1`, "
            f"got {lengths}"
        )
    if J_1.dtype != spectrum_2.U.dtype:
        raise TypeError(
            "`J_1` and `spectrum_2` must have one dtype, "
            f"got {J_1.dtype} and {spectrum_2.U.dtype}: convert J_1"
        )
    batch_1 = list(J_1.shape[:-2])
    batch_2 = list(spectrum_2.S.shape[:-1])
    # Sizes broadcast from the last axis on.
    sizes = zip(reversed(batch_1), reversed(batch_2), strict=False)
    if any(m != n and 1 not in (m, n) for m, n in sizes):
        raise ValueError(
            "`J_1` and `spectrum_2` must have batch axes that fit, "
            f"got {batch_1} and {batch_2}"
        )


def _check_cut(spectrum: Spectrum, k: int) -> None:
    """Warn of the matrices of `spectrum_2` whose top k singular vectors are arbitrary."""
    batch = spectrum.S.shape[:-1]
    names = [f"spectrum_2{list(index)}" for index in np.ndindex(*batch)]
    if not batch:
        names = ["spectrum_2"]
    check_cut(spectrum.S.reshape(-1, spectrum.S.shape[-1]), k, names)


@checked
def miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Return the mis-coupling: how large A is off its diagonal.

    .. math:: m(A) = \|A - \operatorname{Diag}(A)\|_F

    0 for a diagonal A, in units of J's gain. `A[..., :k, :k]` is measured for a smaller
    k. Raises ValueError where A has no entries, NaN or infinite ones. Source: Aubry et
    al. 2025, eq. 13.

    Example:
        >>> tlc.miscoupling(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        tensor(1.4142)
    """
    check_entries(A, "A")
    return require_finite(norm(off_diagonal(A), _MATRIX), "A")


@checked
def normalized_miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    r"""Return the normalised mis-coupling: the share of A that is off its diagonal.

    .. math:: \tilde m(A) = \frac{\|A - \operatorname{Diag}(A)\|_F}{\|A\|_F}

    Dimensionless, in [0, 1]. Coupling is `1 − m̃`. 0 for a diagonal A, and so for any
    1×1 matrix: k = 1 says nothing. Random subspaces give about `√(1 − 1/k)`, see
    `random_subspace_null`.

    Raises ValueError where A has no entries, NaN or infinite ones. Undefined for `A =
    0`: NaN, with a warning.

    Source: Aubry et al. 2025, eq. 14.

    Example:
        >>> A = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
        >>> tlc.normalized_miscoupling(A)
        tensor([0., 1.])
    """
    check_entries(A, "A")
    size = require_finite(norm(A, _MATRIX), "A")
    return norm(off_diagonal(A), _MATRIX) / nan_where_zero(size, "‖A‖_F")


@checked
def spectral_miscoupling(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""Return the spectral mis-coupling: how far A is from J_1's singular values.

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
        >>> A = torch.tensor([[2.0, 0.0], [0.0, -1.0]])
        >>> tlc.spectral_miscoupling(A, torch.tensor([2.0, 1.0]))
        tensor(0.8944)
    """
    s = top_values(S_1, A.shape[-1])
    entries = A.abs() if absolute else A
    # Only the entries of A are made absolute; singular values are at least 0.
    distance = norm(entries - torch.diag_embed(s), _MATRIX)
    length = norm(s, -1, p)
    return require_finite(distance, "A") / nan_where_zero(length, "‖s_{1,K}‖_p")


@checked
def captured_energy(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
) -> Float[Tensor, "*batch"]:
    r"""Return the captured energy: how much of `J_1` lies in the subspaces of `J_2`.

    .. math:: \frac{\|A\|_F}{\|s_{1,K}\|_2}

    Dimensionless, in [0, 1]; 1 if the subspaces are J_1's own. A high coupling with
    little energy captured says little: `m̃` does not see the difference. Arguments and
    errors as in `spectral_miscoupling`.

    Example:
        >>> A = torch.tensor([[1.2, 0.0], [0.0, 0.5]])
        >>> tlc.captured_energy(A, torch.tensor([2.4, 1.0]))
        tensor(0.5000)
    """
    s = top_values(S_1, A.shape[-1])
    size = require_finite(norm(A, _MATRIX), "A")
    return size / nan_where_zero(norm(s, -1), "‖s_{1,K}‖₂")


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


def top_values(S_1: Tensor, k: int) -> Tensor:
    """Return the k largest singular values.

    Raises ValueError where there are fewer, or one is not finite.
    """
    check_k(k, S_1.shape[-1])
    return require_finite(S_1, "S_1")[..., :k]


def require_finite(values: Tensor, name: str) -> Tensor:
    """Return the values; raise ValueError unless all are finite.

    (A Frobenius norm is finite where every entry is.)
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"`{name}` has NaN or infinite entries: it has no measure")
    return values


def norm(x: Tensor, axes: int | tuple[int, ...], p: Norm = 2) -> Tensor:
    """Return a norm along some axes; the squares of entries may leave the dtype's range."""
    scale = safe_scale(x, axes)
    return torch.linalg.vector_norm(x / scale, p, axes) * scale.squeeze(axes)


def safe_scale(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """Return a number by which to divide x, so that its squares are in the dtype's range.

    1 where they are, so that usual numbers keep every bit; else the largest entry.
    """
    largest = x.detach().abs().amax(axes, keepdim=True)
    limits = torch.finfo(x.dtype)
    # If the largest entry were smaller, the squares of entries that still count would
    # underflow.
    smallest = limits.tiny**0.5 / limits.eps
    is_safe = (largest >= smallest) & (largest <= 1 / smallest)
    return largest.masked_fill(is_safe | (largest == 0), 1)


def off_diagonal(A: Tensor) -> Tensor:
    """Return `A − Diag(A)`."""
    return A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))


def nan_where_zero(denominator: Tensor, name: str) -> Tensor:
    """Return the denominator with NaN in place of 0, and warn where there is one."""
    is_zero = denominator == 0
    if bool(is_zero.any()):
        warn_caller(
            f"{name} is 0 for {int(is_zero.sum())} matrices: "
            "the measure is undefined there (NaN)"
        )
    # NaN, and not an infinity that a mean would carry on in silence.
    return denominator.masked_fill(is_zero, math.nan)
