"""What measures of coupling would be if the singular vectors of J_2 were random: closed
forms, draws and intervals.

Three nulls, each with less left to chance. A measure that exceeds one of them is not
explained by what it keeps.

* "space": `U_2`, `V_2` are any orthonormal frames of the whole space (Haar-random,
  independent). Keeps J_1.
* "spans": any orthonormal bases of the spans that J_2's own vectors have, left and
  right independently: `A → Qᵀ A R`. Keeps how much of J_1 those spans hold, and so
  `‖A‖_F`.
* "pairs": both bases turned alike, `A → Qᵀ A Q`. Keeps also which left direction
  belongs to which right one, and leaves to chance only the choice of axes: coupling
  above this null is coupling of singular directions, one by one.

Closed forms are root mean squares, which for m̃ lie above the mean: of `1 − √(1 − 1/k)`
the mean coupling of random subspaces is 1.138 times at k = 2, 1.061 times at k = 3 and
1.005 times at k = 10, where A is Gaussian, as for a flat spectrum in many dimensions.
`draws_of_random_subspaces` gives means and quantiles as well.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.measures.measures import (
    MEASURES,
    Measure,
    Norm,
    finite,
    nan_where_zero,
    top_values,
    with_options,
)
from tl_coupling.spectra import check_k

Null = Literal["space", "spans", "pairs"]
# Gauss-Legendre nodes for integrals over [0, ∞), mapped by a tangent.
_N_NODES = 400
# Numbers in memory at once.
_AT_ONCE = 2**22


class _Moments(NamedTuple):
    """Of a random A: `E ‖A‖_F²`, `E Σ a_ii²`, and `E a_ii`, or `E |a_ii|` where that is
    wanted.
    """

    total: Tensor
    diagonal: Tensor
    entry: Tensor


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
    r"""What a measure would be, in root mean square, if the singular vectors of `J_2`
    were random: the null "space".

    `U_2` and `V_2` are independent Haar-random frames. The entries of A are then
    exchangeable, whatever `J_1` is:

    .. math:: \mathbb{E}[\tilde m^2] = 1 - \frac1k

    and with `E a_ij² = ‖J_1‖_F²/d²`

    * miscoupling: `E[m²] = (k² − k) ‖J_1‖_F² / d²`;
    * captured energy: `k ‖J_1‖_F / (d ‖s_{1,k}‖₂)`;
    * spectral: `E‖A − S_{1,k}‖² = k² ‖J_1‖_F² / d² + ‖s_{1,k}‖₂² − 2 E|a| Σ s_i`, with
      `E|a| = 0` unless `absolute`.

    `E|a| = E|uᵀ J_1 v| = E|u_1| · E‖J_1 v‖` is a one-dimensional integral; the singular
    values that are not given are taken as equal, with the energy that remains of
    `frobenius_norm`. The mean coupling of random subspaces is a little above this root
    mean square: 1.138 times at k = 2, 1.005 times at k = 10 (where A is Gaussian).

    Args:
        k: size of A.
        measure: `"coupling"` gives `1 − √(1 − 1/k)`: 0.051 at k = 10, 0.010 at k = 50.
        d_model, S_1, frobenius_norm: of J_1; needed by the measures that depend on it.
        p, absolute: as in `spectral_miscoupling`.

    Raises:
        ValueError: k above `d_model`, or what the measure needs is missing.

    Example:
        >>> tlc.random_subspace_null(10)
        tensor(0.0513, dtype=torch.float64)
        >>> S_1 = torch.ones(40)
        >>> tlc.random_subspace_null(10, "captured_energy", d_model=40, S_1=S_1, frobenius_norm=S_1.norm())
        tensor(0.5000, dtype=torch.float64)
    """
    if d_model is not None:
        check_k(k, d_model)
    name, options = with_options(measure, p, absolute)
    if name in ("coupling", "normalized_miscoupling"):
        rms = torch.tensor(math.sqrt(1 - 1 / k), dtype=torch.float64)
        return 1 - rms if name == "coupling" else rms
    if d_model is None or S_1 is None or frobenius_norm is None:
        raise ValueError(
            f"the null of {measure!r} depends on J_1: give d_model, S_1 and frobenius_norm"
        )
    s, S_1, norm = top_values(S_1, k).double(), S_1.double(), frobenius_norm.double()
    entry = (
        _mean_absolute_entry(S_1, norm, d_model)
        if options.get("absolute")
        else torch.zeros_like(norm)
    )
    return _root_mean_square(
        name, _in_space(k, norm, d_model, entry), s, options.get("p", 2)
    )


def nulls_at_every_k(
    S_1: Float[Tensor, "*batch k"],
    frobenius_norm: Float[Tensor, "*batch"],
    d_model: int,
) -> Float[Tensor, "n_measures k *batch"]:
    """`random_subspace_null` of every measure (`MEASURES`, in this order, with default
    options) at every k.
    """
    S, norm = finite(S_1, "S_1").double(), frobenius_norm.double()
    entries = {
        True: _mean_absolute_entry(S, norm, d_model),
        False: torch.zeros_like(norm),
    }

    def null(measure: Measure, k: int) -> Tensor:
        if measure in ("coupling", "normalized_miscoupling"):
            return random_subspace_null(k, measure).expand(norm.shape)
        name, options = with_options(measure, 2, False)
        moments = _in_space(k, norm, d_model, entries[options.get("absolute", False)])
        return _root_mean_square(name, moments, S[..., :k], options.get("p", 2))

    return torch.stack(
        [
            torch.stack([null(one, k + 1) for k in range(S.shape[-1])]).cpu()
            for one in MEASURES
        ]
    )


@checked
def rotation_null(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    measure: Measure = "coupling",
    *,
    paired: bool = True,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""What a measure would be, in root mean square, in random bases of J_2's own
    spans: the nulls "pairs" and "spans".

    With a Haar-random rotation Q of the k directions ("pairs"), and with independent Q
    and R ("spans"),

    .. math::

        \mathbb{E} \sum_i (Q^\top A Q)_{ii}^2
        = \frac{\operatorname{tr}(A)^2 + \operatorname{tr}(A^2) + \|A\|_F^2}{k + 2},
        \qquad \mathbb{E} \sum_i (Q^\top A R)_{ii}^2 = \frac{\|A\|_F^2}{k}

    The means of the entries are `tr(A) / k` and 0; `‖A‖_F` does not change. So
    independent bases leave m̃ at `√(1 − 1/k)`, as in the whole space: two blocks that
    share their spans, and no more than that, have the coupling of random subspaces.
    Paired bases leave a multiple of the identity as it is: its coupling is 1, under
    this null too.

    Args:
        A: a coupling matrix, or many.
        S_1: singular values of J_1, at least k of them.
        measure, p, absolute: as in `measure_of`.
        paired: whether left and right are turned alike.

    NaN, with a warning, where `A = 0` or `S_1 = 0` leaves the measure undefined. Cost:
    with `absolute` a decomposition and a one-dimensional integral for each A, else
    nothing.

    Example:
        >>> A, S_1 = torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([2.0, 1.0])
        >>> 1 - tlc.measures.rotation_null(A, S_1, "normalized_miscoupling") ** 2, 1 - 1 / 20
        (tensor(0.9500, dtype=torch.float64), 0.95)
    """
    name, options = with_options(measure, p, absolute)
    k = A.shape[-1]
    s, A = top_values(S_1, k).double(), finite(A, "A").double()
    total, trace = A.square().sum((-2, -1)), A.diagonal(dim1=-2, dim2=-1).sum(-1)
    diagonal, entry = total / k, torch.zeros_like(total)
    if paired:
        diagonal, entry = (
            (trace.square() + (A * A.mT).sum((-2, -1)) + total) / (k + 2),
            trace / k,
        )
    if options.get("absolute"):
        entry = (
            _mean_absolute_form(A)
            if paired
            else _mean_absolute_entry(torch.linalg.svdvals(A), total.sqrt(), k)
        )
    return _root_mean_square(
        name, _Moments(total, diagonal, entry), s, options.get("p", 2)
    )


def _in_space(k: int, frobenius_norm: Tensor, d: int, entry: Tensor) -> _Moments:
    total = (k / d * frobenius_norm).square()
    return _Moments(total, total / k, entry)


def _root_mean_square(measure: Measure, of: _Moments, s: Tensor, p: Norm) -> Tensor:
    off = (of.total - of.diagonal).clamp_min(0)
    if measure == "miscoupling":
        return off.sqrt()
    if measure == "captured_energy":
        return of.total.sqrt() / nan_where_zero(s.norm(dim=-1), "‖s_{1,K}‖₂")
    if measure == "spectral_miscoupling":
        squared = (of.total + s.square().sum(-1) - 2 * of.entry * s.sum(-1)).clamp_min(
            0
        )
        return squared.sqrt() / nan_where_zero(
            torch.linalg.vector_norm(s, ord=p, dim=-1), "‖s_{1,K}‖_p"
        )
    rms = (off / nan_where_zero(of.total, "‖A‖_F")).sqrt()
    return 1 - rms if measure == "coupling" else rms


def random_rotations(
    *shape: int, columns: int | None = None, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Independent Haar-random orthogonal matrices in float64, `shape` ending in their
    size d; or their first columns.

    From the QR decomposition of Gaussians (Mezzadri 2007). The last of `shape` is d;
    the others are a batch.

    Args:
        shape: that of the result, without `columns`: `2, 5` for two 5×5 matrices.
        columns: how many columns of each, all by default.
        generator: of the random numbers.

    Example:
        >>> Q = tlc.measures.random_rotations(2, 5, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(Q.mT @ Q, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))
        True
    """
    *batch, d = shape
    Q, R = torch.linalg.qr(
        torch.randn(*batch, d, columns or d, generator=generator, dtype=torch.float64)
    )
    # LAPACK's signs are a convention; those of R's diagonal make Q uniform.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


@checked
def draws_of_random_subspaces(
    k: Count,
    n: Count,
    *,
    d_model: Count,
    S_1: Float[Tensor, "*batch n_values"],
    frobenius_norm: Float[Tensor, "*batch"],
    generator: torch.Generator,
) -> Float[Tensor, "n *batch k k"]:
    """Coupling matrices of n draws of random `U_2, V_2`, for what closed forms of the
    null "space" do not say.

    `A = Uᵀ S V`, where the singular values that are not given are equal, as in
    `random_subspace_null`. All J_1 of a batch meet the same frames of their own
    singular vectors. Cost: two QR decompositions of `[d_model, k]` a draw.

    Example:
        >>> S_1, generator = torch.ones(40), torch.Generator().manual_seed(0)
        >>> J_1 = {"d_model": 40, "S_1": S_1, "frobenius_norm": S_1.norm()}
        >>> A = tlc.measures.draws_of_random_subspaces(2, 4000, **J_1, generator=generator)
        >>> m = tlc.normalized_miscoupling(A)
        >>> round(float(m.square().mean().sqrt()), 2), round(float(m.mean()), 2)
        (0.71, 0.67)
    """
    check_k(k, d_model)
    s, rest = (
        finite(S_1, "S_1").double(),
        _evenly(S_1.double(), frobenius_norm.double(), d_model),
    )
    found = s.new_empty(n, *s.shape[:-1], k, k)
    for A in found:
        U, V = random_rotations(2, d_model, columns=k, generator=generator).to(s.device)
        top = (
            U[: s.shape[-1]].mT * (s - rest[..., None])[..., None, :] @ V[: s.shape[-1]]
        )
        A[:] = top + rest[..., None, None] * (U.mT @ V)
    return found


def _evenly(S: Tensor, frobenius_norm: Tensor, d: int) -> Tensor:
    """What each of the singular values that are not given is, if they are equal."""
    left_over = (frobenius_norm.square() - S.square().sum(-1)).clamp_min(0)
    return (left_over / max(1, d - S.shape[-1])).sqrt() * (d > S.shape[-1])


def _mean_absolute_entry(S: Tensor, frobenius_norm: Tensor, d: int) -> Tensor:
    """`E|uᵀ J v|` for independent uniform unit vectors: `E|u_1| · E‖J g‖ / E‖g‖` with a
    Gaussian g.

    `E √q = (1/√π) ∫ (1 − E e^{−q r²}) r⁻² dr` of the quadratic form `q = Σ σ_i² g_i²`,
    whose moment generating function is a product over i.
    """
    log_u = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    # E|u_1| / E‖g‖
    factor = math.exp(2 * log_u) / math.sqrt(2 * math.pi)
    rest, scale = (
        _evenly(S, frobenius_norm, d).square(),
        frobenius_norm.clamp_min(torch.finfo(S.dtype).tiny),
    )
    weights, rest, n_rest = (
        (S / scale[..., None]).square(),
        rest / scale.square(),
        d - S.shape[-1],
    )

    def integrand(r: Tensor) -> Tensor:
        squares = 2 * r.square()
        logs = torch.log1p(squares[..., None] * weights).sum(-1) + n_rest * torch.log1p(
            squares * rest
        )
        return -2 * torch.expm1(-0.5 * logs) / squares

    return (
        factor
        * frobenius_norm
        / math.sqrt(math.pi)
        * _over_half_line(integrand, weights)
    )


def _mean_absolute_form(A: Tensor) -> Tensor:
    """`E|qᵀ A q|` for a uniform unit vector: `E|x| / k` of `x = Σ λ_i g_i²`, with the
    symmetric part's eigenvalues.

    `E|x| = (2/π) ∫ (1 − Re E e^{itx}) t⁻² dt`, where the characteristic function is a
    product over i.
    """
    eigenvalues = torch.linalg.eigvalsh((A + A.mT) / 2)
    scale = eigenvalues.abs().amax(-1)
    scaled = eigenvalues / scale.clamp_min(torch.finfo(A.dtype).tiny)[..., None]

    def integrand(t: Tensor) -> Tensor:
        x = 2 * t[..., None] * scaled
        modulus, phase = -0.25 * torch.log1p(x * x).sum(-1), 0.5 * x.atan().sum(-1)
        return (1 - modulus.exp() * phase.cos()) / t.square()

    return 2 / (math.pi * A.shape[-1]) * scale * _over_half_line(integrand, scaled)


def _over_half_line(integrand: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The integral over `[0, ∞)` of a function of places `[n, 1 …]`, for weights like
    these, `[*batch, m]`.
    """
    nodes = np.stack(np.polynomial.legendre.leggauss(_N_NODES)) * math.pi / 4
    places, weights = (
        torch.from_numpy(nodes).to(like.device).reshape(2, -1, *[1] * (like.ndim - 1))
    )
    angles = places + math.pi / 4
    dr = weights / angles.cos().square()
    at_once = max(1, _AT_ONCE // max(1, like.numel()))
    parts = zip(angles.tan().split(at_once), dr.split(at_once), strict=True)
    return torch.stack([(integrand(r) * w).sum(0) for r, w in parts]).sum(0)
