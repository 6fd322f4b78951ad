"""Coupling and alignment matrices, their measures, and what random subspaces would give. Pure tensors.

`A = U_{2,K}ᵀ J_1 V_{2,K}` (Aubry et al. 2025, eq. 9–12) says how far the top K singular vectors of one Jacobian
diagonalise another. Every measure takes `A` with any leading batch axes and is invariant under the sign flips
`(u_k, v_k) → (−u_k, −v_k)`; for a smaller K pass the corner `A[..., :k, :k]`.

Alignment leaves the singular values out: `U_lᵀ V_{l'}` alone says how far the vectors themselves agree.
"""

import math
from functools import partial
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import Count, at_least, checked, warn_caller
from tl_coupling.spectra import Spectrum, check_k

Norm = Annotated[int | float, at_least(1)]
Orientation = Literal["ujv", "vju"]
Sides = Literal["uv", "uu", "vv"]
Measure = Literal["coupling", "normalized_miscoupling", "miscoupling", "spectral_miscoupling", "captured_energy"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
BOUNDED_BY_1: tuple[Measure, ...] = ("coupling", "normalized_miscoupling", "captured_energy")


@checked
def coupling_matrix(
    J_1: Float[Tensor, "*batch d_model d_model"], spectrum_2: Spectrum, k: int, orientation: Orientation = "ujv"
) -> Float[Tensor, "*batch k k"]:
    """Coupling matrix `A = U_{2,k}ᵀ J_1 V_{2,k}` (eq. 9–12): `A[i, j] = u_iᵀ J_1 v_j`.

    `spectrum_2` is `svd` of the other Jacobian, whose top k singular vectors are used; `orientation="vju"` swaps left
    and right ones, `V_{2,k}ᵀ J_1 U_{2,k}`. If both Jacobians are the same, `A = diag(S)` for the paper's `"ujv"`.
    """
    _finite(J_1, "J_1")
    d, sides = J_1.shape[-1], [spectrum_2.U.shape[-2], spectrum_2.Vh.shape[-1]]
    if sides != [d, d]:
        raise ValueError(f"`spectrum_2` must be of [{d} {d}] matrices like `J_1`, got {sides}")
    if (dtype := J_1.dtype) != (other := spectrum_2.U.dtype):
        raise TypeError(f"`J_1` and `spectrum_2` must have one dtype, got {dtype} and {other}: convert J_1")
    axes = list(J_1.shape[:-2]), list(spectrum_2.S.shape[:-1])
    if any(m != n and 1 not in (m, n) for m, n in zip(axes[0][::-1], axes[1][::-1], strict=False)):
        raise ValueError(f"`J_1` and `spectrum_2` must have batch axes that fit, got {axes[0]} and {axes[1]}")
    top = spectrum_2.top(k)
    left, right = (top.Vh, top.U) if orientation == "vju" else (top.U.mT, top.Vh.mT)
    return left @ (J_1 @ right)


@checked
def miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Mis-coupling `m(A) = ‖A − Diag(A)‖_F` (eq. 13), in units of J's gain; 0 for a diagonal A."""
    return _finite(_off_diagonal(A).norm(dim=(-2, -1)), "A")


@checked
def normalized_miscoupling(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Normalised mis-coupling `m̃(A) = ‖A − Diag(A)‖_F / ‖A‖_F` (eq. 14), in [0, 1].

    0 for a diagonal A, and so for any 1×1: K = 1 says nothing. Undefined for `A = 0`: NaN, with a warning.
    """
    return _off_diagonal(A).norm(dim=(-2, -1)) / _nan_where_zero(_finite(A.norm(dim=(-2, -1)), "A"), "‖A‖_F")


@checked
def spectral_miscoupling(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"], p: Norm = 2, absolute: bool = False
) -> Float[Tensor, "*batch"]:
    """`m_K(J_1, J_2) = ‖A − S_{1,K}‖_F / ‖s_{1,K}‖_p`, the measure of the project page; not bounded by 1.

    Args:
        S_1: singular values of `J_1`, largest first, at least k of them; the top k are used.
        p: norm of the singular values in the denominator: 2, or 1 for their sum (the "trace").
        absolute: use `|A|` elementwise, as the authors' code does.

    Undefined for `S_1 = 0`: NaN, with a warning.
    """
    s = _top(S_1, A.shape[-1])
    distance = ((A.abs() if absolute else A) - torch.diag_embed(s)).norm(dim=(-2, -1))
    return _finite(distance, "A") / _nan_where_zero(torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p")


@checked
def captured_energy(A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """`‖A‖_F / ‖s_{1,K}‖₂`, in [0, 1]: the share of J_1's top-K energy that the subspaces of J_2 capture.

    1 if they are J_1's own. A high coupling with little energy captured says little: `m̃` does not see the difference.
    """
    s = _top(S_1, A.shape[-1])
    return _finite(A.norm(dim=(-2, -1)), "A") / _nan_where_zero(s.norm(dim=-1), "‖s_{1,K}‖₂")


def measures_at_every_k(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
) -> Float[Tensor, "n_measures k *batch"]:
    """Every measure (`MEASURES`, in this order, with default options) of every corner of A, in float64."""
    A, s = A.double(), _top(S_1, A.shape[-1]).double()
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    off = _off_diagonal(A).square().cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
    on, distance, energy = (x.square().cumsum(-1) for x in (diagonal, diagonal - s, s))
    size = _finite((off + on).sqrt(), "A")
    normalized, length = off.sqrt() / _nan_where_zero(size, "‖A‖_F"), _nan_where_zero(energy.sqrt(), "‖s_{1,K}‖₂")
    values = (1 - normalized, normalized, off.sqrt(), (off + distance).sqrt() / length, size / length)
    return torch.stack(values).movedim(-1, 1)


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
    """Root mean square of a measure for independent Haar-random `U_2, V_2`, in closed form.

    The entries of A are then exchangeable, so `E[m̃²] = 1 − 1/k` whatever J_1 is; and with `E a_ij² = ‖J_1‖_F²/d²`

    * miscoupling: `E[m²] = (k² − k) ‖J_1‖_F² / d²`;
    * captured energy: `k ‖J_1‖_F / (d ‖s_{1,k}‖₂)`;
    * spectral: `E‖A − S_{1,k}‖² = k² ‖J_1‖_F² / d² + ‖s_{1,k}‖₂² − 2 E|a| Σ s_i`, with `E|a| = 0` unless `absolute`.

    `E|a| = E|uᵀ J_1 v| = E|u_1| · E‖J_1 v‖` is a one-dimensional integral; the singular values that are not given are
    taken as equal, with the energy that remains of `frobenius_norm`.

    Args:
        k: size of A.
        measure: `"coupling"` gives `1 − √(1 − 1/k)`: 0.051 at k = 10, 0.010 at k = 50.
        d_model, S_1, frobenius_norm: of J_1; needed by the measures that depend on it.
        p, absolute: as in `spectral_miscoupling`.

    Raises:
        ValueError: k above `d_model`, or what the measure needs is missing.
    """
    if d_model is not None:
        check_k(k, d_model)
    rms = torch.tensor(math.sqrt(1 - 1 / k), dtype=torch.float64)
    if measure in ("coupling", "normalized_miscoupling"):
        return 1 - rms if measure == "coupling" else rms
    if d_model is None or S_1 is None or frobenius_norm is None:
        raise ValueError(f"the null of {measure!r} depends on J_1: give d_model, S_1 and frobenius_norm")
    s, S_1, norm = _top(S_1, k).double(), S_1.double(), frobenius_norm.double()
    if measure == "miscoupling":
        return math.sqrt(k * k - k) / d_model * norm
    if measure == "captured_energy":
        return k / d_model * norm / _nan_where_zero(s.norm(dim=-1), "‖s_{1,K}‖₂")
    squared = (k / d_model * norm) ** 2 + s.norm(dim=-1) ** 2
    if absolute:
        squared = (squared - 2 * _mean_absolute_entry(S_1, norm, d_model) * s.sum(-1)).clamp_min(0)
    return squared.sqrt() / _nan_where_zero(torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p")


@checked
def alignment_matrices(
    spectra: Spectrum, k: Count | None = None, sides: Sides = "uv"
) -> Float[Tensor, "n_layers n_layers k k"]:
    """Cosines between the top k singular vectors of every two layers: `U_lᵀ V_{l'}`, `U_lᵀ U_{l'}` or `V_lᵀ V_{l'}`.

    `spectra` is `svd` of a stack of square matrices, one for each layer. With `sides="uv"`, entry `[l, l', i, j]` is
    `u_iᵀ v_j` with `u_i` of layer l and `v_j` of layer l'; the matrices `[l, l]` compare the left and right vectors of
    one layer (those of "uu" and "vv" are identities). k is all of them by default.

    Li and Papyan (2023) find the top singular vectors aligned in all three ways (RA2): then the matrices are diagonal,
    with entries of ±1. The signs on the diagonal of `U_lᵀ V_l` mean something, + for a direction that the block
    stretches and − for one that it shrinks; signs between layers are arbitrary. All singular vectors of J_1 with the
    top k of J_2 make up the coupling matrix, `A = (U_2ᵀ U_1) S_1 (V_1ᵀ V_2)`, which shows alignment across blocks, but
    not that of left with right.

    Example:
        >>> J = torch.tensor([[[2.0, 0.0], [0.0, -1.0]], [[0.0, 1.0], [2.0, 0.0]]])
        >>> A = alignment_matrices(tlc.svd(J))
        >>> A[0, 0].abs(), A[1, 1].abs()
        (tensor([[1., 0.],
                [0., 1.]]), tensor([[0., 1.],
                [1., 0.]]))
    """
    if spectra.S.ndim != 2 or spectra.U.shape[-2] != spectra.Vh.shape[-1]:
        got = f"U of shape {list(spectra.U.shape)} and Vh of shape {list(spectra.Vh.shape)}"
        raise ValueError(f"`spectra` must be those of square matrices, one for each layer, got {got}: use `svd(J)`")
    top = spectra.top(spectra.k if k is None else k)
    vectors = {"u": top.U, "v": top.Vh.mT}
    return einsum(vectors[sides[0]], vectors[sides[1]], "layer d i, other d j -> layer other i j")


@checked
def vector_alignment(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Mean squared cosine between vectors of the same rank, `Σ_i a_ii² / k` of an alignment matrix; in [0, 1].

    1 where every vector is the other's up to sign, in the same order; `1/d_model` expected for independent Haar-random
    vectors. It changes under rotations inside a (nearly) repeated singular value, to which `subspace_overlap` is blind.

    Example:
        >>> vector_alignment(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor(0.)
    """
    return _cosines(A).diagonal(dim1=-2, dim2=-1).square().mean(-1)


@checked
def subspace_overlap(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Mean squared cosine of the principal angles, `‖A‖_F² / k` of an alignment matrix; in [0, 1].

    1 where both sets of k vectors span the same subspace, however they are turned or ordered within it; `k/d_model`
    expected for independent Haar-random subspaces, which makes it say nothing for k near `d_model`. At least as large
    as `vector_alignment`.

    Example:
        >>> subspace_overlap(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor(1.)
    """
    return _cosines(A).square().sum((-2, -1)) / A.shape[-1]


def _cosines(A: Tensor) -> Tensor:
    if not (A.abs() <= 1 + 1e-3).all():
        raise ValueError("`A` must hold cosines, as `alignment_matrices` gives; got entries beyond 1, or NaN")
    return A


def _top(S_1: Tensor, k: int) -> Tensor:
    check_k(k, S_1.shape[-1])
    return _finite(S_1, "S_1")[..., :k]


def _finite(values: Tensor, name: str) -> Tensor:
    """The values. (A Frobenius norm is finite where every entry is.)"""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"`{name}` has NaN or infinite entries: it has no measure")
    return values


def _off_diagonal(A: Tensor) -> Tensor:
    return A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))


def _nan_where_zero(denominator: Tensor, name: str) -> Tensor:
    zero = denominator == 0
    if bool(zero.any()):
        warn_caller(f"{name} is 0 for {int(zero.sum())} matrices: the measure is undefined there (NaN)")
    return denominator.masked_fill(zero, math.nan)


def _mean_absolute_entry(S: Tensor, frobenius_norm: Tensor, d: int) -> Tensor:
    """`E|uᵀ J v|` for independent uniform unit vectors: `E|u_1| · E‖J g‖ / E‖g‖` with a Gaussian g."""
    log_u = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    # E|u_1| / E‖g‖
    factor = math.exp(2 * log_u) / math.sqrt(2 * math.pi)
    given = S.square()
    left_over = (frobenius_norm.square() - given.sum(-1)).clamp_min(0)
    norms = np.vectorize(partial(_mean_norm, d), [float], signature="(n),()->()")(given.cpu(), left_over.cpu())
    return factor * torch.as_tensor(norms, device=S.device)


def _mean_norm(d: int, weights: np.ndarray, left_over: float) -> float:
    """`E √(Σ w_i g_i²)`, by `√q = (1/2√π) ∫ (1 − e^{−qt}) t^{−3/2} dt` with the χ² moment generating function."""
    from scipy import integrate

    scale, n_rest = float(weights.sum()) + left_over, d - len(weights)
    if scale == 0:
        return 0.0
    weights, rest = weights / scale, (left_over / scale / n_rest if n_rest else 0.0)

    def integrand(r: float) -> float:
        # t = r² removes the singularity at 0.
        t = r * r
        log_mgf = -0.5 * (np.log1p(2 * t * weights).sum() + n_rest * math.log1p(2 * t * rest))
        return -math.expm1(log_mgf) / t if t else 1.0

    return math.sqrt(scale / math.pi) * integrate.quad(integrand, 0, math.inf, limit=200)[0]
