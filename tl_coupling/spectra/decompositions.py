"""Singular value decompositions: all of a matrix, or the top of it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.spectra.iteration import (
    TOLERANCE,
    Products,
    block_width,
    krylov_width,
    top_triplets,
)
from tl_coupling.spectra.readings import check_k, check_matrices

# U, S, Vh, residuals and steps.
Parts = tuple[Tensor, ...]
_KRYLOV, _FILTER = "block Krylov space", "filtered subspace iteration"

# Iteration is tried where its block has at most this share of J's columns. `JᵀJ` is
# formed where it has at most so many times the columns of the block: about as many
# steps are taken, and then it pays for itself.
_LARGEST_BLOCK, _FORM_SQUARE = 1 / 5, 30
# Products of `JᵀJ` with a block that the spectra of SmolLM2's Jacobians take, on
# average: Krylov, filter.
_TYPICAL_STEPS = 12, 16


@made_by("svd(J)")
@checked
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular triplets of one matrix or a batch: `J ≈ U diag(S) Vh`, largest first, as
    torch names and shapes them.

    `svd` makes one, and adds how the triplets were found. An index or slice takes some
    of a batch.

    Attributes:
        U, S, Vh: columns of U and rows of Vh are singular vectors; S, at least 0, has
            the unit of J.
        residuals: the larger of `‖J v − σ u‖` and `‖Jᵀu − σ v‖` of each triplet, as
            shares of σ_1.
        steps: products of `JᵀJ` with a block that an iteration took; 0 is a full SVD.
        norm: `‖J‖_F`.
        way: the name of the iteration.

    Example:
        >>> spectrum = tlc.svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        >>> spectrum.S, spectrum.k, spectrum.top(1).S
        (tensor([3., 2., 1.]), 3, tensor([3.]))
        >>> spectrum.top(2).uncaptured  # 1 of 9 + 4 + 1
        tensor(0.0714, dtype=torch.float64)
    """

    U: Float[Tensor, "*batch d_out k"]
    S: Float[Tensor, "*batch k"]
    Vh: Float[Tensor, "*batch k d_in"]
    residuals: Float[Tensor, "*batch k"] | None = None
    steps: Int[Tensor, "*batch"] | None = None
    norm: Float[Tensor, "*batch"] | None = None
    way: str = field(default="", kw_only=True)

    @property
    def k(self) -> int:
        """How many triplets there are."""
        return self.S.shape[-1]

    @property
    def uncaptured(self) -> Float[Tensor, "*batch"]:
        """Energy that these triplets leave out, `(‖J‖_F² − Σ σ_i²) / ‖J‖_F²`, in [0,
        1]; 0 for a zero J.

        A bound of every other singular value: `σ_{k+1} ≤ ‖J‖_F √uncaptured`. Raises
        ValueError where `‖J‖_F` is not known.
        """
        if self.norm is None:
            raise ValueError(
                "the energy of J is not known: use `svd(J, k)`, or give `svd_of_products` a `norm`"
            )
        shares = (
            self.S.double()
            / self.norm.double().where(self.norm > 0, torch.inf)[..., None]
        )
        return (self.norm > 0) * (1 - shares.square().sum(-1)).clamp(0, 1)

    @property
    def method(self) -> str:
        """How many matrices were decomposed in which way, in words."""
        if self.steps is None or self.residuals is None:
            return "not known"
        by_iteration = self.steps > 0
        words = []
        if by_iteration.any():
            steps, worst = (
                self.steps[by_iteration],
                float(self.residuals[by_iteration].max()),
            )
            words.append(
                f"{len(steps)} by {self.way} in {int(steps.min())} to {int(steps.max())} steps, "
                f"residuals up to {worst:.1e} σ_1"
            )
        if not by_iteration.all():
            words.append(f"{int((~by_iteration).sum())} by full SVD")
        return "; ".join(words) or "of no matrices"

    @checked
    def top(self, k: int) -> "Spectrum":
        """The k largest triplets: a slice, nothing is computed."""
        check_k(k, self.k)
        residuals = None if self.residuals is None else self.residuals[..., :k]
        triplets = self.U[..., :k], self.S[..., :k], self.Vh[..., :k, :]
        return Spectrum(*triplets, residuals, self.steps, self.norm, way=self.way)

    def __getitem__(self, index: Any) -> "Spectrum":
        """Some of the batch."""
        parts = (
            getattr(self, name)
            for name in ("U", "S", "Vh", "residuals", "steps", "norm")
        )
        some: Any = [None if part is None else part[index] for part in parts]
        return Spectrum(*some, way=self.way)

    @staticmethod
    @checked
    def cat(spectra: "Sequence[Spectrum]") -> "Spectrum":
        """Batches of spectra as one batch; what is not known of one is not known of
        all.
        """
        parts = (
            [getattr(one, name) for one in spectra]
            for name in ("U", "S", "Vh", "residuals", "steps", "norm")
        )
        joined: Any = [
            None if any(one is None for one in part) else torch.cat(part)
            for part in parts
        ]
        return Spectrum(
            *joined, way=" or ".join(sorted({one.way for one in spectra} - {""}))
        )


@checked
def svd(J: Float[Tensor, "*batch d_out d_in"], k: int | None = None) -> Spectrum:
    r"""Singular value decomposition, batched.

    .. math:: J = U \operatorname{diag}(S)\, V^\top = \sum_i \sigma_i u_i v_i^\top

    `k` triplets, the largest first; all by default. Columns of U and rows of Vh are
    orthonormal, signs are arbitrary (in pairs). Raises TypeError unless J is real
    floating point of 32 or 64 bits; ValueError for k out of range, fewer than two axes,
    no rows or columns, or entries that are not finite.

    For all triplets, or a k that is not much smaller than J, a full SVD (LAPACK's
    gesdd). Else the top of the spectrum, from products with a block of vectors, until
    both residuals, `‖J v − σ u‖` and `‖Jᵀu − σ v‖`, of all k triplets are at most
    `2·10⁻⁶ σ_1` (`10⁻¹² σ_1` in float64):

    * as a block Krylov space of `JᵀJ` with full reorthogonalisation, the right half of
      block Golub–Kahan bidiagonalisation (Golub and Kahan 1965; Golub, Luk and Overton
      1981; from a random block, Musco and Musco 2015);
    * where it costs less to form `JᵀJ`, by subspace iteration with Chebyshev
      polynomials of it (Zhou, Saad, Tiago and Chelikowsky 2006): on flat spectra a
      Krylov space grows to most of a small J before it holds the k triplets.

    Both end with a Rayleigh–Ritz step in float64, so that neither the squares nor
    float32 cost accuracy; where the residuals are not reached, the result is a full
    SVD. Residuals say that triplets are right, not that none is missed. That none is,
    is certain only where `Spectrum.uncaptured` says so. Elsewhere it rests on the
    block, which is random and wider than k: it has a share of every direction, also
    within a repeated singular value, and a very small one with a probability that falls
    exponentially with the surplus (Halko, Martinsson and Tropp 2011). A spectrum that
    is flat from σ_k to the end of the block, so that residuals tell nothing apart, gets
    a full SVD.

    Cost: on the spectra of SmolLM2's Jacobians, 9 to 14 products of `JᵀJ` with `k + 8`
    vectors (Krylov), or 12 to 50 with `3k/2` (`python -m benchmarks.truncated_svd`
    prints them). `torch.svd_lowrank`, with its fixed number of steps, is far off on
    flat spectra. On the CPU the matrices of a batch take one core each, which is faster
    than all cores on one small matrix.

    Example:
        >>> J = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> tlc.svd(J, k=1).S
        tensor([4.])
    """
    check_matrices(J)
    rank = kept = min(J.shape[-2:])
    if k is not None:
        check_k(kept := k, rank)
    pays = _pays(J.shape[-2:], kept)

    def decompose(matrix: Tensor) -> Parts:
        if pays and (found := _iterated(matrix, kept)):
            return found
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        u, s, vh = u[:, :kept], s[:kept], vh[:kept]
        return u, s, vh, _residuals(matrix, u, s, vh), s.new_zeros(())

    shapes = [(J.shape[-2], kept), (kept,), (kept, J.shape[-1]), (kept,), ()]
    U, S, Vh, residuals, steps = _of_each(decompose, J, shapes)
    norm = torch.linalg.vector_norm(J, dim=(-2, -1), dtype=torch.float64)
    way = (_FILTER if _forms_square(rank, kept) else _KRYLOV) if steps.any() else ""
    return Spectrum(U, S, Vh, residuals, steps.int(), norm, way=way)


@checked
def svd_of_products(
    times: Callable[[Tensor], Tensor],
    transposed: Callable[[Tensor], Tensor],
    shape: tuple[Count, Count],
    k: Count,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    norm: float | None = None,
) -> Spectrum:
    """The k largest singular triplets of a matrix of which only products are known, as
    `svd` finds them.

    Args:
        times: gives `J V` for V of shape `[d_in n]`.
        transposed: gives `Jᵀ U` for U of shape `[d_out n]`.
        shape: that of J, `[d_out d_in]`.
        k: how many.
        dtype: of the blocks that are given to the two, float32 or float64.
        device: where the blocks are.
        norm: `‖J‖_F`, if known.

    Raises as `svd`, and ValueError where products are not finite or `transposed` is not
    the transpose of `times`. Where the tolerance is not reached, which rounding in the
    two may prevent, J is formed from `d_in` products.

    Example:
        >>> J = torch.diag(torch.arange(1.0, 301.0))
        >>> tlc.spectra.svd_of_products(lambda V: J @ V, lambda U: J.mT @ U, (300, 300), k=2).S
        tensor([300., 299.])
    """
    check_k(k, min(shape))
    if dtype not in TOLERANCE:
        raise TypeError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")
    generator = torch.Generator().manual_seed(0)
    u, v = (
        torch.randn(n, 1, generator=generator, dtype=dtype).to(device) for n in shape
    )
    image, pullback = times(v).double(), transposed(u).double()
    if not (image.isfinite().all() and pullback.isfinite().all()):
        raise ValueError("products with J have NaN or infinite entries")
    if (
        u.double().mT @ image - pullback.mT @ v.double()
    ).abs() > 1e-3 * u.norm() * image.norm():
        raise ValueError(
            "`transposed` must give products with Jᵀ: uᵀ(J v) and (Jᵀu)ᵀv differ for random u and v"
        )
    scale = image.abs().max().to(dtype)

    def scaled(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        # The block rather than the product: either may be near the end of the dtype's
        # range.
        return lambda block: product(block.to(dtype) / scale).to(block.dtype)

    forth, back, found = scaled(times), scaled(transposed), None
    tried = _pays(shape, k) and scale > 0
    if tried and shape[0] < shape[1]:
        found = _flipped(
            _top(Products(shape[::-1], dtype, v.device, back, forth), k, scale)
        )
    elif tried:
        found = _top(Products(shape, dtype, v.device, forth, back), k, scale)
    known = (
        None if norm is None else torch.tensor(norm, dtype=torch.float64, device=device)
    )
    if found is None:
        formed = svd(times(torch.eye(shape[1], dtype=dtype, device=device)), k)
        return replace(formed, norm=known)
    *parts, steps = (part.to(device) for part in found)
    U, S, Vh, residuals = (part.to(dtype) for part in parts)
    return Spectrum(U, S, Vh, residuals, steps.int(), known, way=_KRYLOV)


@checked
def singular_values(
    J: Float[Tensor, "*batch d_out d_in"],
) -> Float[Tensor, "*batch n_singular"]:
    """Singular values alone, largest first. Errors as in `svd`; cheaper.

    Example:
        >>> tlc.spectra.singular_values(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor([4., 3.])
    """
    check_matrices(J)
    return _of_each(
        lambda matrix: (torch.linalg.svdvals(matrix),), J, [(min(J.shape[-2:]),)]
    )[0]


def flops_of_svd(d: int, k: int) -> float:
    """What `svd` of k triplets of a square J of width d typically takes; `22 d³` for a
    full one, the classic count.
    """
    if not _pays((d, d), k):
        return 22.0 * d**3
    krylov, filtered = _TYPICAL_STEPS
    # The last step's three products are with J.
    last = 2.0 * d**2 * (2 * block_width(k) + k)
    if _forms_square(d, k):
        return 2.0 * d**3 + filtered * 2.0 * d**2 * block_width(k) + last
    return krylov * 4.0 * d**2 * krylov_width(k) + last


def _of_each(
    decompose: Callable[[Tensor], tuple[Tensor, ...]], J: Tensor, shapes: Sequence[Any]
) -> list[Tensor]:
    """The parts that `decompose` gives for each matrix, batched as J is: on the CPU one
    core each, else one by one.
    """
    matrices = J.detach().reshape(-1, *J.shape[-2:])
    parts = [J.new_empty(len(matrices), *shape) for shape in shapes]

    def fill(i: int) -> None:
        for part, found in zip(parts, decompose(matrices[i]), strict=True):
            part[i] = found

    n_threads = (
        min(torch.get_num_threads(), len(matrices)) if J.device.type == "cpu" else 1
    )
    if n_threads > 1:
        with ThreadPoolExecutor(
            n_threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(fill, range(len(matrices))))
    else:
        list(map(fill, range(len(matrices))))
    return [part.reshape(J.shape[:-2] + part.shape[1:]) for part in parts]


def _iterated(J: Float[Tensor, "d_out d_in"], k: int) -> Parts | None:
    """The top k triplets of a matrix by iteration, on its shorter side; None where a
    full SVD should be taken.
    """
    if J.shape[0] < J.shape[1]:
        return _flipped(_iterated(J.mT, k))
    scale = J.abs().max().clamp_min(torch.finfo(J.dtype).tiny)
    J = J / scale
    exact = J.double()

    def times(V: Tensor) -> Tensor:
        return (exact if V.dtype == torch.float64 else J) @ V

    def transposed(U: Tensor) -> Tensor:
        return (exact if U.dtype == torch.float64 else J).mT @ U

    square = J.mT @ J if _forms_square(J.shape[1], k) else None
    return _top(
        Products(
            (J.shape[0], J.shape[1]), J.dtype, J.device, times, transposed, square
        ),
        k,
        scale,
    )


def _top(J: Products, k: int, scale: Tensor) -> Parts | None:
    """The top k triplets of J times its scale, where the iteration reaches them for
    less than a full SVD.
    """
    if (found := top_triplets(J, k)) is None:
        return None
    return (
        found.U,
        found.S * scale,
        found.V.mT,
        found.residuals,
        torch.tensor(found.steps),
    )


def _flipped(parts: Parts | None) -> Parts | None:
    """Those of Jᵀ, as those of J."""
    return parts and (parts[2].mT, parts[1], parts[0].mT, *parts[3:])


def _pays(shape: Sequence[int], k: int) -> bool:
    """Whether the top k triplets are tried by iteration."""
    return block_width(k) <= _LARGEST_BLOCK * min(shape)


def _forms_square(width: int, k: int) -> bool:
    return width <= _FORM_SQUARE * block_width(k)


def _residuals(J: Tensor, U: Tensor, S: Tensor, Vh: Tensor) -> Tensor:
    """The larger of `‖J v − σ u‖` and `‖Jᵀu − σ v‖` of each triplet, as shares of
    σ_1.
    """
    both = torch.stack(
        [
            torch.linalg.vector_norm(off, dim=0, dtype=torch.float64)
            for off in (J @ Vh.mT - U * S, J.mT @ U - Vh.mT * S)
        ]
    )
    return both.amax(0) / S[0].double().where(S[0] > 0, 1)
