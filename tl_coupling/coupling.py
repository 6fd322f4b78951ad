"""Coupling matrices, their measures, and what random subspaces would give. Pure tensors.

`A = U_{2,K}ᵀ J_1 V_{2,K}` (Aubry et al. 2025, eq. 9–12) asks how far the top-K singular vectors of one Jacobian
diagonalise another. Every measure here takes `A` with any leading batch axes, is invariant under the sign flips
`(u_k, v_k) → (−u_k, −v_k)`, and for a smaller K takes the corner `A[..., :k, :k]`.
"""

import math
from typing import Annotated, Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import Count, at_least, checked, warn_caller
from tl_coupling.spectra import Spectrum, check_k

Norm = Annotated[int | float, at_least(1)]
Orientation = Literal["ujv", "vju"]
Measure = Literal["coupling", "normalized_miscoupling", "miscoupling", "spectral_miscoupling", "captured_energy"]
BOUNDED_BY_1: tuple[Measure, ...] = ("coupling", "normalized_miscoupling", "captured_energy")


@checked
def coupling_matrix(
    J_1: Float[Tensor, "*batch d_model d_model"], spectrum_2: Spectrum, k: int, orientation: Orientation = "ujv"
) -> Float[Tensor, "*batch k k"]:
    """Coupling matrix `A = U_{2,k}ᵀ J_1 V_{2,k}` (eq. 9–12), or `V_{2,k}ᵀ J_1 U_{2,k}` for `orientation="vju"`.

    Args:
        J_1: the Jacobian that is to be diagonalised.
        spectrum_2: `svd` of the other Jacobian.
        k: how many of its top singular vectors.
        orientation: `"ujv"` is the paper's; `"vju"` swaps the roles of left and right vectors.

    Returns:
        `A[i, j] = u_iᵀ J_1 v_j`. If both Jacobians are the same, `A = diag(S)` for `"ujv"`.
    """
    _check_finite(J_1, "J_1")
    _check_sides(J_1, spectrum_2)
    top = spectrum_2.top(k)
    left, right = top.U, top.Vh.mT
    if orientation == "vju":
        left, right = right, left
    return einsum(left, J_1 @ right, "... out i, ... out j -> ... i j")


@checked
def miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Mis-coupling `m(A) = ‖A − Diag(A)‖_F` (eq. 13). In units of J's gain; 0 for a diagonal A."""
    return _size(_off_diagonal(A), "A")


@checked
def normalized_miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Normalised mis-coupling `m̃(A) = ‖A − Diag(A)‖_F / ‖A‖_F` (eq. 14), in [0, 1].

    0 for a diagonal A, and so for any 1×1: K = 1 says nothing. `A = 0` has no m̃: NaN, with a warning.
    """
    return _off_diagonal(A).norm(dim=(-2, -1)) / _masked_where_zero(_size(A, "A"), "‖A‖_F")


@checked
def spectral_miscoupling(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"], p: Norm = 2, absolute: bool = False
) -> Float[Tensor, "*batch"]:
    """`m_K(J_1, J_2) = ‖A − S_{1,K}‖_F / ‖s_{1,K}‖_p`, the project page's measure; not bounded by 1.

    Args:
        A: coupling matrix.
        S_1: singular values of `J_1`, at least k of them, largest first; the top k are used.
        p: norm of the singular values below the fraction; 2, or 1 for their sum (the "trace").
        absolute: take `|A|` elementwise first, as the authors' code does.

    `S_1 = 0` has no m_K: NaN, with a warning.
    """
    _check_finite(S_1, "S_1")
    k = A.shape[-1]
    check_k(k, S_1.shape[-1])
    s = S_1[..., :k]
    distance = _size((A.abs() if absolute else A) - torch.diag_embed(s), "A")
    return distance / _masked_where_zero(torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p")


@checked
def captured_energy(A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """`‖A‖_F / ‖s_{1,K}‖₂`, in [0, 1]: how much of J_1's top-K energy the subspaces of J_2 see at all.

    1 if they are J_1's own. A high coupling with little energy captured says little (`m̃` is blind to it).
    """
    _check_finite(S_1, "S_1")
    k = A.shape[-1]
    check_k(k, S_1.shape[-1])
    return _size(A, "A") / _masked_where_zero(S_1[..., :k].norm(dim=-1), "‖s_{1,K}‖₂")


@checked
def random_subspace_null(
    k: Count,
    measure: Measure = "coupling",
    *,
    d_model: Count | None = None,
    S_1: Float[Tensor, "*batch n"] | None = None,
    frobenius_norm: Float[Tensor, "*batch"] | None = None,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "..."]:
    """What Haar-random, independent `U_2, V_2` would give: the root mean square of a measure, in closed form.

    All entries of A are then exchangeable, so `E[m̃²] = 1 − 1/k` whatever J_1 is; and with `E a_ij² = ‖J_1‖_F²/d²`

    * miscoupling: `E[m²] = (k² − k) ‖J_1‖_F² / d²`;
    * captured energy: `k ‖J_1‖_F / (d ‖s_{1,k}‖₂)`;
    * spectral: `E‖A − S_{1,k}‖² = k² ‖J_1‖_F² / d² + ‖s_{1,k}‖₂² − 2 E|a| Σ s_i`, with `E|a| = 0` unless `absolute`.

    `E|a| = E|uᵀ J_1 v|` is `E|u_1| · E‖J_1 v‖`, a one-dimensional integral; singular values that are not given are
    taken as equal, with the energy that `frobenius_norm` leaves over.

    Args:
        k: size of A.
        measure: `"coupling"` is `1 − √(1 − 1/k)`: 0.051 at k = 10, 0.010 at k = 50.
        d_model, S_1, frobenius_norm: of J_1; wanted by the measures that depend on it.
        p, absolute: as in `spectral_miscoupling`.
    """
    if d_model is not None:
        check_k(k, d_model)
    rms = torch.tensor(math.sqrt(1 - 1 / k), dtype=torch.float64)
    if measure == "coupling":
        return 1 - rms
    if measure == "normalized_miscoupling":
        return rms
    if d_model is None or S_1 is None or frobenius_norm is None:
        raise ValueError(f"the null of {measure!r} depends on J_1: give d_model, S_1 and frobenius_norm")
    check_k(k, S_1.shape[-1])
    S_1, norm = S_1.double(), frobenius_norm.double()
    s = S_1[..., :k]
    if measure == "miscoupling":
        return math.sqrt(k * k - k) / d_model * norm
    if measure == "captured_energy":
        return k / d_model * norm / _masked_where_zero(s.norm(dim=-1), "‖s_{1,K}‖₂")
    squared = (k / d_model * norm) ** 2 + s.norm(dim=-1) ** 2
    if absolute:
        squared = (squared - 2 * _mean_absolute_entry(S_1, norm, d_model) * s.sum(-1)).clamp_min(0)
    return squared.sqrt() / _masked_where_zero(torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p")


def _size(matrices: Float[Tensor, "*batch k k"], name: str) -> Float[Tensor, "*batch"]:
    """Frobenius norms. They are finite where every entry is, and fewer."""
    norms = matrices.norm(dim=(-2, -1))
    _check_finite(norms, name)
    return norms


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"`{name}` has NaN or infinite entries: it has no measure")


def _check_sides(J_1: Tensor, spectrum_2: Spectrum) -> None:
    """Raise unless singular vectors and Jacobian can be multiplied."""
    d, sides = J_1.shape[-1], (spectrum_2.U.shape[-2], spectrum_2.Vh.shape[-1])
    if sides != (d, d):
        raise ValueError(f"`spectrum_2` must be of [{d} {d}] matrices like `J_1`, got {list(sides)}")
    if J_1.dtype != spectrum_2.U.dtype:
        raise TypeError(
            f"`J_1` and `spectrum_2` must have one dtype, got {J_1.dtype} and {spectrum_2.U.dtype}: convert J_1"
        )
    try:
        torch.broadcast_shapes(J_1.shape[:-2], spectrum_2.S.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"`J_1` and `spectrum_2` must have batch axes that fit, got {list(J_1.shape[:-2])} and "
            f"{list(spectrum_2.S.shape[:-1])}"
        ) from None


def _off_diagonal(A: Tensor) -> Tensor:
    return A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))


def _masked_where_zero(denominator: Tensor, name: str) -> Tensor:
    zero = denominator == 0
    if bool(zero.any()):
        warn_caller(f"{name} is 0 for {int(zero.sum())} matrices: the measure is undefined there (NaN)")
    return denominator.masked_fill(zero, math.nan)


def _mean_absolute_entry(S: Tensor, frobenius_norm: Tensor, d: int) -> Tensor:
    """`E|uᵀ J v|` for independent uniform unit vectors: `E|u_1| · E‖J g‖ / E‖g‖` with a Gaussian g."""
    log_u = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    mean_u = math.exp(log_u) / math.sqrt(math.pi)
    mean_g = math.sqrt(2) * math.exp(-log_u)
    given, n_rest = S.square(), d - S.shape[-1]
    left_over = (frobenius_norm.square() - given.sum(-1)).clamp_min(0)
    rows = zip(given.reshape(-1, given.shape[-1]).numpy(), left_over.reshape(-1).tolist(), strict=True)
    means = [mean_u * _mean_norm(weights, rest, n_rest) / mean_g for weights, rest in rows]
    return torch.tensor(means, dtype=frobenius_norm.dtype).reshape(frobenius_norm.shape)


def _mean_norm(weights: np.ndarray, left_over: float, n_rest: int) -> float:
    """`E √(Σ w_i g_i²)`, by `√q = (1/2√π) ∫ (1 − e^{−qt}) t^{−3/2} dt` with the χ² moment generating function."""
    from scipy import integrate

    scale = float(weights.sum()) + left_over
    if scale == 0:
        return 0.0
    weights, rest = weights / scale, (left_over / scale / n_rest if n_rest else 0.0)

    def integrand(r: float) -> float:
        # t = r²: the singularity at 0 is gone.
        t = r * r
        log_mgf = -0.5 * (np.log1p(2 * t * weights).sum() + n_rest * math.log1p(2 * t * rest))
        return -math.expm1(log_mgf) / t if t else 1.0

    return math.sqrt(scale / math.pi) * integrate.quad(integrand, 0, math.inf, limit=200)[0]
