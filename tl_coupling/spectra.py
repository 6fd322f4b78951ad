"""Singular value decompositions, and what is read off them alone."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import Count, checked, warn_caller

# The truncated SVD: eigenvectors kept beyond k, the largest residual `Jᵀu − σ v` (that of an SVD in float32), and how
# small σ_k² may be beside σ_1² (rounding in float32 is a ten-thousandth of that).
_OVERSAMPLING, _RESIDUAL_TOLERANCE, _LEAST_SQUARE = 32, 1e-6, 1e-3


@checked
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular triplets of one matrix or a batch: `J ≈ U diag(S) Vh`, largest first, as torch names and shapes them."""

    U: Float[Tensor, "*batch d_out k"]
    S: Float[Tensor, "*batch k"]
    Vh: Float[Tensor, "*batch k d_in"]

    @property
    def k(self) -> int:
        """How many triplets there are."""
        return self.S.shape[-1]

    @checked
    def top(self, k: int) -> "Spectrum":
        """The k largest triplets: a slice, nothing is computed."""
        check_k(k, self.k)
        return Spectrum(self.U[..., :k], self.S[..., :k], self.Vh[..., :k, :])


@dataclass(frozen=True, eq=False)
class InverseSingularValueFit:
    """For each k, a line `1/σ_k ≈ intercept + slope · layer`, in units of 1/σ and layers.

    `r_squared` is the share of the variance of `1/σ_k` over layers that the line explains.
    """

    slope: Float[Tensor, " k"]
    intercept: Float[Tensor, " k"]
    r_squared: Float[Tensor, " k"]


@checked
def svd(J: Float[Tensor, "*batch d_out d_in"], k: int | None = None) -> Spectrum:
    """Singular value decomposition `J = U diag(S) Vh`, batched.

    `k` triplets, the largest first; all by default. Columns of U and rows of Vh are orthonormal, signs are arbitrary
    (in pairs). Raises TypeError unless J is real floating point of 32 or 64 bits; ValueError for k out of range, fewer
    than two axes, or entries that are not finite.

    Cost: a full SVD of every matrix (LAPACK's gesdd). For `k ≤ rank / 3` in float32 on the CPU, an eigendecomposition
    of `JᵀJ`, polished in float64, costs less and is more accurate; it is used if both residuals, `‖J v − σ u‖` and
    `‖Jᵀu − σ v‖`, stay below `10⁻⁶ σ_1`. (`torch.svd_lowrank` is far off on the flat spectra of Jacobians.) On the CPU
    the matrices of a batch take one core each, which is faster than all cores on one small matrix.

    Example:
        >>> J = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> tlc.svd(J, k=1).S
        tensor([4.])
    """
    _check_matrices(J)
    rank = kept = min(J.shape[-2:])
    if k is not None:
        check_k(kept := k, rank)
    is_small_part = kept <= rank // 3 and J.dtype == torch.float32 and J.device.type == "cpu"

    def decompose(matrix: Tensor) -> tuple[Tensor, ...]:
        top = _top_triplets(matrix, kept) if is_small_part else None
        u, s, vh = top or torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :kept], s[:kept], vh[:kept]

    return Spectrum(*_of_each(decompose, J, [(J.shape[-2], kept), (kept,), (kept, J.shape[-1])]))


@checked
def singular_values(J: Float[Tensor, "*batch d_out d_in"]) -> Float[Tensor, "*batch n_singular"]:
    """Singular values alone, largest first. Errors as in `svd`; cheaper.

    Example:
        >>> singular_values(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor([4., 3.])
    """
    _check_matrices(J)
    return _of_each(lambda matrix: (torch.linalg.svdvals(matrix),), J, [(min(J.shape[-2:]),)])[0]


def _of_each(decompose: Callable[[Tensor], tuple[Tensor, ...]], J: Tensor, shapes: Sequence[Any]) -> list[Tensor]:
    """The parts that `decompose` gives for each matrix, batched as J is: on the CPU one core each, else one by one."""
    matrices = J.detach().reshape(-1, *J.shape[-2:])
    parts = [J.new_empty(len(matrices), *shape) for shape in shapes]

    def fill(i: int) -> None:
        for part, found in zip(parts, decompose(matrices[i]), strict=True):
            part[i] = found

    n_threads = min(torch.get_num_threads(), len(matrices)) if J.device.type == "cpu" else 1
    if n_threads > 1:
        with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(fill, range(len(matrices))))
    else:
        list(map(fill, range(len(matrices))))
    return [part.reshape(*J.shape[:-2], *part.shape[1:]) for part in parts]


def _top_triplets(J: Float[Tensor, "d_out d_in"], k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The top k triplets of a float32 matrix in float64, for less than an SVD; None where they may be wrong.

    The eigenvectors of `JᵀJ` in float32 span the top of the spectrum up to rounding, `ε σ_1² / (σ_k² − σ_{k+33}²)`: one
    step of subspace iteration and a Rayleigh–Ritz step in float64 make triplets of them. Rounding moves no `σ²` by more
    than a few `ε σ_1²`, so that none of the top k can be missed unless σ_k is small beside σ_1.
    """
    if J.shape[0] < J.shape[1]:
        top = _top_triplets(J.mT, k)
        return top and (top[2].mT, top[1], top[0].mT)
    scale = J.abs().max().clamp_min(torch.finfo(J.dtype).tiny)
    J = J / scale
    span = torch.linalg.eigh(J.mT @ J).eigenvectors[:, -(k + _OVERSAMPLING) :].double()
    J = J.double()
    Q = torch.linalg.qr(J.mT @ (J @ span)).Q
    images = J @ Q
    squares, within = torch.linalg.eigh(images.mT @ images)
    squares, within = squares[-k:].flip(-1), within[:, -k:].flip(-1)
    if not squares[-1] > _LEAST_SQUARE * squares[0]:
        return None
    S, V = squares.sqrt(), Q @ within
    U = images @ within / S
    residual = torch.linalg.vector_norm(J.mT @ U - V * S, dim=0).max()
    return (U, scale * S, V.mT) if residual <= _RESIDUAL_TOLERANCE * S[0] else None


def check_k(k: int, largest: int) -> None:
    """Raise unless `1 <= k <= largest`."""
    if not 1 <= k <= largest:
        raise ValueError(f"`k` must lie in [1, {largest}] (the number of singular vectors), got {k}")


def check_cut(S: Float[Tensor, "n n_singular"], k: int, names: list[str]) -> None:
    """Warn where `σ_k ≈ σ_{k+1}`: rounding turns the top-k subspace, by about `ε σ_1 / (σ_k − σ_{k+1})` > 1/10."""
    if k >= S.shape[-1]:
        return
    close = S[:, k - 1] - S[:, k] <= 10 * torch.finfo(S.dtype).eps * S[:, 0]
    if close.any():
        where = ", ".join(name for name, hit in zip(names, close.tolist(), strict=True) if hit)
        warn_caller(
            f"σ_{k} and σ_{k + 1} are equal to rounding in {where}: the top-{k} subspace there is arbitrary, and so is "
            "the coupling cut at this k; try another k"
        )


@checked
def inverse_singular_value_fit(
    S: Float[Tensor, "n_layers k"], layers: Sequence[int] | None = None
) -> InverseSingularValueFit:
    """Least-squares line through `1/σ_k` against depth, for each k.

    In residual networks trained to classify, `1/σ_k` grows linearly with depth (Li and Papyan 2023, their RA4); Aubry
    et al. 2025 find no such scaling in language models.

    `layers` are those of S's rows; 0, 1, 2, … by default. R² of two layers is always 1. NaN, with a warning: all three
    where some σ_k is 0, and R² where `1/σ_k` is the same at all layers up to rounding. Raises as `participation_ratio`,
    and ValueError for fewer than 2 rows or layers that are not one for each row.

    Example:
        >>> fit = inverse_singular_value_fit(torch.tensor([[1.0, 0.5], [0.5, 0.25], [0.25, 0.125]]))
        >>> fit.slope, fit.intercept
        (tensor([1.5000, 3.0000]), tensor([0.8333, 1.6667]))
        >>> fit.r_squared
        tensor([0.9643, 0.9643])
    """
    _check_singular_values(S)
    layers = list(range(len(S)) if layers is None else layers)
    if len(S) < 2 or len(layers) != len(S) or len(set(layers)) != len(S):
        got = f"{len(S)} rows and layers {layers}"
        raise ValueError(f"a line needs at least 2 rows of `S` and a layer of its own for each, got {got}")
    y = 1 / S.double().masked_fill((S == 0).any(0), math.nan)
    x = torch.tensor(layers, dtype=y.dtype, device=y.device)
    x_centred, y_centred = x - x.mean(), y - y.mean(0)
    slope = x_centred @ y_centred / x_centred.square().sum()
    residual = y_centred - x_centred[:, None] * slope
    flat = y_centred.norm(dim=0) <= 8 * torch.finfo(S.dtype).eps * y.norm(dim=0)
    r_squared = 1 - residual.square().sum(0) / y_centred.square().sum(0).masked_fill(flat, math.nan)
    n_zero, n_flat = int(y.isnan().any(0).sum()), int(flat.sum())
    if n_zero or n_flat:
        warn_caller(
            f"of {S.shape[1]} lines through 1/σ_k, {n_zero} are undefined (NaN) where σ_k is 0, and R² of {n_flat} "
            "is undefined (NaN) where 1/σ_k does not vary"
        )
    fit = slope, y.mean(0) - slope * x.mean(), r_squared.clamp(0, 1)
    return InverseSingularValueFit(*(part.to(S.dtype) for part in fit))


@checked
def non_normality(J: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Size of the commutator of J with its transpose, `‖JᵀJ − JJᵀ‖_F / ‖J‖_F²`.

    Dimensionless, in [0, √2]: 0 for normal matrices (symmetric, antisymmetric, orthogonal, …), whose left and right
    singular vectors are the same up to signs and rotations within a repeated singular value; √2 for `u vᵀ` with
    `u ⊥ v`. A d×d matrix of independent Gaussian entries has about `√(2/d)`: compare with that, not with √2. Invariant
    under orthogonal similarity, scale and transposition.

    Source: Elsner and Paardekooper 1987. Henrici's better known `√(‖J‖_F² − Σ|λ_i|²)`, of which `‖JᵀJ − JJᵀ‖_F` is at
    most `√6 ‖J‖_F` times, needs eigenvalues, which are ill-conditioned where a matrix is far from normal.

    NaN, with a warning, where J is zero. J must be square, finite, and in 32 or 64 bits. Cost: two matrix products.

    Example:
        >>> non_normality(torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]]]))
        tensor([1.4142, 0.0000])
    """
    J = _unit_matrices(J, "non-normality")
    return torch.linalg.matrix_norm(J.mT @ J - J @ J.mT)


@checked
def asymmetry(J: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Share of J that is antisymmetric, `‖J − Jᵀ‖_F / (2 ‖J‖_F)`.

    Dimensionless, in [0, 1]: 0 for symmetric matrices, 1 for antisymmetric ones, about `1/√2` for independent Gaussian
    entries. Its square and that of the symmetric share add up to 1. Invariances, NaN and errors as in `non_normality`.
    The closed form of Aubry et al. 2025, eq. 24, `J ≈ U S Uᵀ`, is symmetric.

    Example:
        >>> asymmetry(torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]]))
        tensor([0.0000, 1.0000, 0.7071])
    """
    J = _unit_matrices(J, "asymmetry")
    return torch.linalg.matrix_norm(J - J.mT) / 2


@checked
def participation_ratio(S: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Participation ratio of the squared singular values, `(Σ σ_i²)² / Σ σ_i⁴`: how many directions carry the energy.

    Dimensionless, in [1, k]: n for n equal singular values and otherwise zeros. Of all singular values it is
    `‖J‖_F⁴ / ‖JᵀJ‖_F²`; of the top k alone it ignores the others. NaN, with a warning, where all of S is zero. Raises
    TypeError or ValueError unless S is floating point of 32 or 64 bits, finite and at least 0.

    Example:
        >>> participation_ratio(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
        tensor([3., 1.])
    """
    energy = _shares(S, "participation ratio").square()
    return (energy.sum(-1).square() / energy.square().sum(-1)).clamp(1, S.shape[-1]).to(S.dtype)


@checked
def effective_rank(S: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Effective rank `exp(−Σ p_i ln p_i)` with `p_i = σ_i / Σ_j σ_j` (Roy and Vetterli 2007).

    Range, NaN and errors as in `participation_ratio`. (Others take shares of the squares, which gives a smaller rank.)

    Example:
        >>> effective_rank(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])).round(decimals=4)
        tensor([3., 1.])
    """
    p = _shares(S, "effective rank")
    return torch.special.entr(p).sum(-1).exp().clamp(1, S.shape[-1]).to(S.dtype)


@checked
def tail_energy(S: Float[Tensor, "*batch n_singular"], rank: Count) -> Float[Tensor, "*batch"]:
    """Share of the energy beyond the first `rank` singular values, `Σ_{i>rank} σ_i² / Σ_i σ_i²`.

    The part of `‖J‖_F²` that the nearest matrix of that rank leaves out: 0 for a J of that rank or less, at most
    `1 − rank/n_singular`, which is that of equal singular values. Li and Papyan (2023) find a rank of at most C in
    fully connected residual networks for C classes (RA3), that is 0 for `rank=C`. (In floating point hardly any
    singular value is exactly 0, and a count of them depends on a tolerance; this does not.)

    S must hold all singular values. 0 where there are no more than `rank`. NaN and errors as in `participation_ratio`.

    Example:
        >>> tail_energy(torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 1.0]]), rank=1).round(decimals=4)
        tensor([0.1000, 0.6667])
    """
    energy = _shares(S, "tail energy").square()
    return (energy[..., rank:].sum(-1) / energy.sum(-1)).to(S.dtype)


def _unit_matrices(J: Tensor, measure: str) -> Tensor:
    """J over its Frobenius norm; NaN with a warning where that is zero."""
    _check_matrices(J)
    # In two steps: the squares in a norm leave the range of the dtype long before the entries do.
    J = J / _or_nan(J.abs().amax((-2, -1), keepdim=True), measure, "J")
    return J / torch.linalg.matrix_norm(J, keepdim=True)


def _shares(S: Tensor, measure: str) -> Tensor:
    """Each row of S over its sum, in float64; NaN with a warning where that is zero."""
    _check_singular_values(S)
    S = S.double() / _or_nan(S.double().amax(-1, keepdim=True), measure, "S")
    return S / S.sum(-1, keepdim=True)


def _or_nan(size: Tensor, measure: str, name: str) -> Tensor:
    if n_zero := int((size == 0).sum()):
        warn_caller(f"{measure} is undefined (NaN) for {n_zero} of {size.numel()} zero `{name}`")
    return size.masked_fill(size == 0, math.nan)


def _check_matrices(J: Tensor) -> None:
    _check_dtype(J, "J")
    if not J.isfinite().all():
        raise ValueError("`J` has NaN or infinite entries")


def _check_singular_values(S: Tensor) -> None:
    _check_dtype(S, "S")
    if S.shape[-1] == 0:
        raise ValueError(f"`S` must hold at least one singular value, got shape {list(S.shape)}")
    if not (S.isfinite() & (S >= 0)).all():
        raise ValueError("`S` must hold singular values, finite and at least 0, got others")


def _check_dtype(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`{name}` must be float32 or float64, got {x.dtype}: use `.float()` or `.double()`")
