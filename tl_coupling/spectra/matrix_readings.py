"""What is read off a matrix or its singular values alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, warn_caller
from tl_coupling.spectra.checks import check_matrices, check_singular_values


@dataclass(frozen=True, eq=False)
class InverseSingularValueFit:
    """For each k, a line `1/σ_k ≈ intercept + slope · layer`.

    In units of 1/σ and layers. `r_squared` is the share of the variance of `1/σ_k` over
    layers that the line explains; in [0, 1].

    Example:
        >>> fit = tlc.spectra.inverse_singular_value_fit(torch.tensor([[1.0], [0.5]]))
        >>> fit.slope, fit.r_squared
        (tensor([1.]), tensor([1.]))
    """

    slope: Float[Tensor, " k"]
    intercept: Float[Tensor, " k"]
    r_squared: Float[Tensor, " k"]


@checked
def inverse_singular_value_fit(
    S: Float[Tensor, "n_layers k"], layers: Sequence[int] | None = None
) -> InverseSingularValueFit:
    """Return the least-squares line through `1/σ_k` against depth, for each k.

    In residual networks trained to classify, `1/σ_k` grows linearly with depth (Li and
    Papyan 2023, their RA4); Aubry et al. 2025 find no such scaling in language models.

    `layers` are those of S's rows; 0, 1, 2, … by default. R² of two layers is always 1.
    NaN, with a warning: all three where some σ_k is 0, and R² where `1/σ_k` is the same
    at all layers up to rounding. Raises as `participation_ratio`, and ValueError for
    fewer than 2 rows or layers that are not one for each row.

    Example:
        >>> S = torch.tensor([[1.0, 0.5], [0.5, 0.25], [0.25, 0.125]])
        >>> fit = tlc.spectra.inverse_singular_value_fit(S)
        >>> fit.slope, fit.intercept
        (tensor([1.5000, 3.0000]), tensor([0.8333, 1.6667]))
        >>> fit.r_squared
        tensor([0.9643, 0.9643])
    """
    check_singular_values(S)
    n_layers = len(S)
    layers = list(range(n_layers)) if layers is None else list(layers)
    if n_layers < 2 or len(layers) != n_layers or len(set(layers)) != n_layers:
        raise ValueError(
            "a line needs at least 2 rows of `S` and a layer of its own for each, "
            f"got {n_layers} rows and layers {layers}"
        )
    has_zero = (S == 0).any(0)
    y = 1 / S.double().masked_fill(has_zero, math.nan)
    x = torch.tensor(layers, dtype=y.dtype, device=y.device)
    x_centred = x - x.mean()
    y_centred = y - y.mean(0)
    slope = x_centred @ y_centred / x_centred.square().sum()
    intercept = y.mean(0) - slope * x.mean()
    residual = y_centred - x_centred[:, None] * slope
    # Rounding alone makes them vary so much.
    is_flat = y_centred.norm(dim=0) <= 8 * torch.finfo(S.dtype).eps * y.norm(dim=0)
    variation = y_centred.square().sum(0).masked_fill(is_flat, math.nan)
    r_squared = (1 - residual.square().sum(0) / variation).clamp(0, 1)
    n_zero = int(y.isnan().any(0).sum())
    n_flat = int(is_flat.sum())
    if n_zero or n_flat:
        warn_caller(
            f"of {S.shape[1]} lines through 1/σ_k, {n_zero} are undefined (NaN) "
            f"where σ_k is 0, and R² of {n_flat} is undefined (NaN) "
            "where 1/σ_k does not vary"
        )
    return InverseSingularValueFit(
        slope.to(S.dtype), intercept.to(S.dtype), r_squared.to(S.dtype)
    )


@checked
def non_normality(J: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    r"""Return the size of the commutator of J with its transpose.

    .. math:: \frac{\|J^\top J - J J^\top\|_F}{\|J\|_F^2}

    Dimensionless, in [0, √2]: 0 for normal matrices (symmetric, antisymmetric,
    orthogonal, …), whose left and right singular vectors are the same up to signs and
    rotations within a repeated singular value; √2 for `u vᵀ` with `u ⊥ v`. A d×d matrix
    of independent Gaussian entries has about `√(2/d)`: compare with that, not with √2.
    Invariant under orthogonal similarity, scale and transposition.

    Source: Elsner and Paardekooper 1987. Henrici's better known `√(‖J‖_F² − Σ|λ_i|²)`,
    of which `‖JᵀJ − JJᵀ‖_F` is at most `√6 ‖J‖_F` times, needs eigenvalues, which are
    ill-conditioned where a matrix is far from normal.

    NaN, with a warning, where J is zero. J must be square, finite, and in 32 or 64
    bits. Cost: two matrix products.

    Example:
        >>> J = torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]]])
        >>> tlc.spectra.non_normality(J)
        tensor([1.4142, 0.0000])
    """
    J = _unit_matrices(J, "non-normality")
    return torch.linalg.matrix_norm(J.mT @ J - J @ J.mT)


@checked
def asymmetry(J: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    r"""Return the share of J that is antisymmetric.

    .. math:: \frac{\|J - J^\top\|_F}{2\, \|J\|_F}

    Dimensionless, in [0, 1]: 0 for symmetric matrices, 1 for antisymmetric ones, about
    `1/√2` for independent Gaussian entries. Its square and that of the symmetric share
    add up to 1. Invariances, NaN and errors as in `non_normality`. The closed form of
    Aubry et al. 2025, eq. 24, `J ≈ U S Uᵀ`, is symmetric.

    Example:
        >>> symmetric = [[0.0, 1.0], [1.0, 0.0]]
        >>> antisymmetric = [[0.0, 1.0], [-1.0, 0.0]]
        >>> J = torch.tensor([symmetric, antisymmetric, [[0.0, 1.0], [0.0, 0.0]]])
        >>> tlc.spectra.asymmetry(J)
        tensor([0.0000, 1.0000, 0.7071])
    """
    J = _unit_matrices(J, "asymmetry")
    return torch.linalg.matrix_norm(J - J.mT) / 2


@checked
def participation_ratio(S: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    r"""Return the participation ratio: how many directions carry the energy.

    .. math:: \frac{\left(\sum_i \sigma_i^2\right)^2}{\sum_i \sigma_i^4}

    Of the squared singular values. Dimensionless, in [1, k]: n for n equal singular
    values and otherwise zeros. Of all singular values it is `‖J‖_F⁴ / ‖JᵀJ‖_F²`; of the
    top k alone it ignores the others. NaN, with a warning, where all of S is zero.
    Raises TypeError or ValueError unless S is floating point of 32 or 64 bits, finite
    and at least 0.

    Example:
        >>> S = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
        >>> tlc.spectra.participation_ratio(S)
        tensor([3., 1.])
    """
    energy = _shares(S, "participation ratio").square()
    # Between 1 and k but for rounding.
    ratio = energy.sum(-1).square() / energy.square().sum(-1)
    return ratio.clamp(1, S.shape[-1]).to(S.dtype)


@checked
def effective_rank(S: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    r"""Return the effective rank: the exponential of the singular values' entropy.

    .. math:: \exp\Big(-\sum_i p_i \ln p_i\Big), \qquad p_i = \frac{\sigma_i}{\sum_j \sigma_j}

    Source: Roy and Vetterli 2007. Range, NaN and errors as in `participation_ratio`.
    (Others take shares of the squares, which gives a smaller rank.)

    Example:
        >>> S = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
        >>> tlc.spectra.effective_rank(S).round(decimals=4)
        tensor([3., 1.])
    """
    p = _shares(S, "effective rank")
    # `entr` is 0 at 0, where p ln p is not a number.
    entropy = torch.special.entr(p).sum(-1)
    return entropy.exp().clamp(1, S.shape[-1]).to(S.dtype)


@checked
def tail_energy(
    S: Float[Tensor, "*batch n_singular"], rank: Count
) -> Float[Tensor, "*batch"]:
    r"""Return the share of the energy beyond the first r = `rank` singular values.

    .. math:: \frac{\sum_{i > r} \sigma_i^2}{\sum_i \sigma_i^2}

    The part of `‖J‖_F²` that the nearest matrix of that rank leaves out: 0 for a J of
    that rank or less, at most `1 − rank/n_singular`, which is that of equal singular
    values. Li and Papyan (2023) find a rank of at most C in fully connected residual
    networks for C classes (RA3), that is 0 for `rank=C`. (In floating point hardly any
    singular value is exactly 0, and a count of them depends on a tolerance; this does
    not.)

    S must hold all singular values. 0 where there are no more than `rank`. NaN and
    errors as in `participation_ratio`.

    Example:
        >>> S = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        >>> tlc.spectra.tail_energy(S, rank=1).round(decimals=4)
        tensor([0.1000, 0.6667])
    """
    energy = _shares(S, "tail energy").square()
    return (energy[..., rank:].sum(-1) / energy.sum(-1)).to(S.dtype)


def _unit_matrices(J: Tensor, measure: str) -> Tensor:
    """Return J over its Frobenius norm; NaN with a warning where that is zero."""
    check_matrices(J)
    # In two steps: the squares in a norm leave the range of the dtype long before the
    # entries do.
    J = J / _nan_where_zero(J.abs().amax((-2, -1), keepdim=True), measure, "J")
    return J / torch.linalg.matrix_norm(J, keepdim=True)


def _shares(S: Tensor, measure: str) -> Tensor:
    """Return each row of S over its sum, in float64.

    NaN with a warning where that is zero.
    """
    check_singular_values(S)
    S = S.double() / _nan_where_zero(S.double().amax(-1, keepdim=True), measure, "S")
    return S / S.sum(-1, keepdim=True)


def _nan_where_zero(size: Tensor, measure: str, name: str) -> Tensor:
    """Return the sizes with NaN in place of 0, and warn where there is one."""
    is_zero = size == 0
    n_zero = int(is_zero.sum())
    if n_zero:
        warn_caller(
            f"{measure} is undefined (NaN) for {n_zero} of {size.numel()} zero `{name}`"
        )
    return size.masked_fill(is_zero, math.nan)
