"""Moments of a coupling matrix whose singular vectors are random, in closed form.

Every null of a measure is read off them: `‖A‖_F²` and `Σ a_ii²` in the mean, and the
mean of an entry on the diagonal, or of its absolute value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from tl_coupling.spectra import eigvalsh

# Gauss-Legendre nodes for integrals over [0, ∞), mapped by a tangent.
_N_NODES = 400
# Numbers in memory at once.
_MOST_NUMBERS = 2**22


@dataclass(frozen=True)
class Moments:
    """What is known of a random A, and the singular values of its J_1; in float64.

    Attributes:
        total: `E ‖A‖_F²`.
        diagonal: `E Σ a_ii²`.
        entry: `E a_ii`, or `E |a_ii|` for a measure of absolute values.
        s: the top k singular values of J_1.
    """

    total: Float[Tensor, "*batch"]
    diagonal: Float[Tensor, "*batch"]
    entry: Float[Tensor, "*batch"]
    s: Float[Tensor, "*#batch k"]

    @property
    def off_diagonal(self) -> Float[Tensor, "*batch"]:
        """`E Σ_{i≠j} a_ij²`."""
        return (self.total - self.diagonal).clamp_min(0)


def moments_in_space(
    s: Float[Tensor, "*#batch k"],
    d_model: int,
    frobenius_norm: Float[Tensor, "*batch"],
    entry: Float[Tensor, "*batch"],
) -> Moments:
    """Return the moments for random frames of the whole space.

    Args:
        s: the top k singular values of J_1.
        d_model: size of J_1.
        frobenius_norm: of J_1.
        entry: `E a_ii`, which is 0, or `E |a_ii|`, which is `mean_absolute_entry`.
    """
    k = s.shape[-1]
    # `E a_ij² = ‖J_1‖_F² / d²` of each of k² entries, of which k are the diagonal.
    total = (k / d_model * frobenius_norm).square()
    return Moments(total, total / k, entry, s)


def moments_in_spans(
    A: Float[Tensor, "*batch k k"],
    s: Float[Tensor, "*#batch k"],
    *,
    paired: bool,
    absolute: bool,
) -> Moments:
    """Return the moments for random bases of A's own spans; see `rotation_null`.

    Args:
        A: a coupling matrix, or many.
        s: the top k singular values of J_1.
        paired: whether left and right are turned alike.
        absolute: whether the mean is wanted of the absolute value of an entry.
    """
    k = A.shape[-1]
    total = reduce(A.square(), "... i j -> ...", "sum")
    trace = reduce(A.diagonal(dim1=-2, dim2=-1), "... i -> ...", "sum")
    trace_of_square = reduce(A * A.mT, "... i j -> ...", "sum")
    # `rotation_null` states these formulas.
    if paired:
        diagonal = (trace.square() + trace_of_square + total) / (k + 2)
        entry = _mean_absolute_form(A) if absolute else trace / k
        return Moments(total, diagonal, entry, s)
    entry = torch.zeros_like(total)
    if absolute:
        entry = mean_absolute_entry(torch.linalg.svdvals(A), total.sqrt(), k)
    return Moments(total, total / k, entry, s)


def remaining_value(
    S: Float[Tensor, "*batch n"], frobenius_norm: Float[Tensor, "*batch"], d_model: int
) -> Float[Tensor, "*batch"]:
    """Return what each singular value that is not in S is, if they are all equal."""
    n_known = S.shape[-1]
    # Rounding may leave less than nothing.
    energy_left = (frobenius_norm.square() - S.square().sum(-1)).clamp_min(0)
    # Where all are known there is no other, and nothing is divided by 0.
    n_unknown = max(1, d_model - n_known)
    return (energy_left / n_unknown).sqrt() * (d_model > n_known)


def mean_absolute_entry(
    S: Float[Tensor, "*batch n"], frobenius_norm: Float[Tensor, "*batch"], d_model: int
) -> Float[Tensor, "*batch"]:
    """Return `E|uᵀ J v|` for independent uniform unit vectors u and v.

    It is `E|u_1| · E‖J g‖ / E‖g‖` with a Gaussian g. `E √q = (1/√π) ∫ (1 − E e^{−q r²})
    r⁻² dr` of the quadratic form `q = Σ σ_i² g_i²`, whose moment generating function is
    a product over i.

    Args:
        S: the largest singular values of J, or all; the others are taken as equal.
        frobenius_norm: of J.
        d_model: size of J.
    """
    log_mean_u = math.lgamma(d_model / 2) - math.lgamma((d_model + 1) / 2)
    # E|u_1| / E‖g‖
    factor = math.exp(2 * log_mean_u) / math.sqrt(2 * math.pi)
    # The integrand is of a J with ‖J‖_F = 1, whatever its scale.
    scale = frobenius_norm.clamp_min(torch.finfo(S.dtype).tiny)
    weights = (S / scale[..., None]).square()
    weight_of_others = (
        remaining_value(S, frobenius_norm, d_model).square() / scale.square()
    )
    n_others = d_model - S.shape[-1]

    def integrand(r: Tensor) -> Tensor:
        squares = 2 * r.square()
        logs = torch.log1p(squares[..., None] * weights).sum(-1)
        logs = logs + n_others * torch.log1p(squares * weight_of_others)
        # `E e^{−q r²} = Π (1 + 2 σ_i² r²)^{−1/2}`. `expm1` is exact for a small r,
        # where 1 minus it would cancel.
        return -2 * torch.expm1(-0.5 * logs) / squares

    integral = _half_line_integral(integrand, weights)
    return factor * frobenius_norm / math.sqrt(math.pi) * integral


def _mean_absolute_form(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch"]:
    """Return `E|qᵀ A q|` for a uniform unit vector q.

    It is `E|x| / k` of `x = Σ λ_i g_i²`, with the eigenvalues of the symmetric part.
    `E|x| = (2/π) ∫ (1 − Re E e^{itx}) t⁻² dt`, where the characteristic function is a
    product over i.
    """
    eigenvalues = eigvalsh((A + A.mT) / 2)
    scale = eigenvalues.abs().amax(-1)
    # The largest becomes 1, so that the nodes suit every A.
    scaled = eigenvalues / scale.clamp_min(torch.finfo(A.dtype).tiny)[..., None]

    def integrand(t: Tensor) -> Tensor:
        x = 2 * t[..., None] * scaled
        # `E e^{itx} = Π (1 − 2 i t λ_i)^{−1/2}`, by modulus and phase.
        log_modulus = -0.25 * torch.log1p(x * x).sum(-1)
        phase = 0.5 * x.atan().sum(-1)
        return (1 - log_modulus.exp() * phase.cos()) / t.square()

    integral = _half_line_integral(integrand, scaled)
    return 2 / (math.pi * A.shape[-1]) * scale * integral


@cache
def _gauss_legendre(n: int) -> Float[np.ndarray, "2 n"]:
    """Return n nodes on `[−1, 1]` and their weights, `[2 n]`."""
    return np.stack(np.polynomial.legendre.leggauss(n))


def _half_line_integral(
    integrand: Callable[[Tensor], Tensor], like: Float[Tensor, "*batch m"]
) -> Float[Tensor, "*batch"]:
    """Return the integral over `[0, ∞)` of a function of places `[n 1 …]`.

    `like` are the m weights that the function holds: they say how many axes the places
    need, and how many fit into memory at once.
    """
    batch_axes = [1] * (like.ndim - 1)
    nodes = torch.from_numpy(_gauss_legendre(_N_NODES)) * (math.pi / 4)
    places, weights = nodes.to(like.device).reshape(2, -1, *batch_axes)
    # The nodes lie on [−π/4, π/4]; moved to [0, π/2], their tangents are on [0, ∞).
    angles = places + math.pi / 4
    r = angles.tan()
    dr = weights / angles.cos().square()
    # The function holds m numbers for each place.
    n_at_once = max(1, _MOST_NUMBERS // max(1, like.numel()))
    parts = [
        (integrand(some_r) * some_dr).sum(0)
        for some_r, some_dr in zip(r.split(n_at_once), dr.split(n_at_once), strict=True)
    ]
    return torch.stack(parts).sum(0)
