"""Eigenvalues of each block's Jacobian, beside those of matrices of the same spectrum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Complex, Float
from scipy.sparse import linalg as sparse
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.blocks import Trace
from tl_coupling.dynamics.conjugation import generator_of, rotated
from tl_coupling.dynamics.usable_jacobians import divisor, usable_jacobians
from tl_coupling.jacobians import (
    block_jacobian,
    block_jacobians,
    block_jvp,
    chosen_layers,
    named_layers,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import eigvalsh, parallel_map

if TYPE_CHECKING:
    import pandas


@made_by("dynamics.eigenvalues(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Eigenvalues(Saved):
    """Eigenvalues of each block's Jacobian J, with those of a null.

    Those of `I + J`, what the block does to the stream, are `1 + values`. The null are
    matrices `Σ R` with the singular values Σ of J and a Haar-random rotation R: all
    matrices with J's singular values and no relation between what they read and what
    they write.

    Attributes:
        real, imaginary: parts of the eigenvalues, by falling modulus.
        null_real, null_imaginary: the same of one matrix of the null.
        henrici: the departure from normality, `√(1 − Σ|λ|²/‖J‖_F²)`, in [0, 1]; 0 for a
            normal matrix.
        null_henrici: that of each matrix of the null.
        complex_share: share of the eigenvalues that are not real.
        null_complex_share: that of each matrix of the null.
        largest_symmetric: the largest eigenvalue of `(J + Jᵀ)/2`: how fast the block
            stretches the stream in the direction that it stretches most.
        layers: the blocks.
        position: the token, from 0.
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.dynamics.eigenvalues(trace)
        >>> result.values.shape, result.henrici.shape
        (torch.Size([2, 32]), torch.Size([2]))
        >>> tlc.dynamics.Eigenvalues.load(result.save("eigenvalues.nc")).layers
        (0, 1)
    """

    real: Float[Tensor, "n_layers d_model"]
    imaginary: Float[Tensor, "n_layers d_model"]
    null_real: Float[Tensor, "n_layers d_model"]
    null_imaginary: Float[Tensor, "n_layers d_model"]
    henrici: Float[Tensor, " n_layers"]
    null_henrici: Float[Tensor, "n_draws n_layers"]
    complex_share: Float[Tensor, " n_layers"]
    null_complex_share: Float[Tensor, "n_draws n_layers"]
    largest_symmetric: Float[Tensor, " n_layers"]
    layers: tuple[int, ...]
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "real": "layer eigenvalue",
        "imaginary": "layer eigenvalue",
        "null_real": "layer eigenvalue",
        "null_imaginary": "layer eigenvalue",
        "henrici": "layer",
        "null_henrici": "draw layer",
        "complex_share": "layer",
        "null_complex_share": "draw layer",
        "largest_symmetric": "layer",
        "layers": "layer",
    }

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each layer and eigenvalue.

        Numbers of a layer, those of the null means over its draws, are the same in all
        its rows.

        Example:
            >>> table = tlc.dynamics.eigenvalues(trace).to_dataframe()
            >>> list(table)[:4], len(table)
            (['layer', 'eigenvalue', 'real', 'imaginary'], 64)
        """
        columns = {
            **{
                name: ("layer eigenvalue", getattr(self, name))
                for name in ("real", "imaginary", "null_real", "null_imaginary")
            },
            "henrici": ("layer", self.henrici),
            "null_henrici": ("layer", self.null_henrici.mean(0)),
            "complex_share": ("layer", self.complex_share),
            "null_complex_share": ("layer", self.null_complex_share.mean(0)),
            "largest_symmetric": ("layer", self.largest_symmetric),
        }
        return tidy_table(columns, {"layer": self.layers}, self.provenance)

    def _summary(self) -> str:
        return (
            f"{len(self.layers)} blocks at token {self.position}; "
            f"mean Henrici {float(self.henrici.mean()):.3f}, "
            f"null {float(self.null_henrici.mean()):.3f}"
        )

    @property
    def values(self) -> Complex[Tensor, "n_layers d_model"]:
        """The eigenvalues of J, by falling modulus."""
        return torch.complex(self.real, self.imaginary)

    @property
    def null_values(self) -> Complex[Tensor, "n_layers d_model"]:
        """The eigenvalues of one matrix of the null, by falling modulus."""
        return torch.complex(self.null_real, self.null_imaginary)


@checked
def eigenvalues(
    trace: Trace,
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    n_draws: Count = 4,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Eigenvalues:
    """Return the eigenvalues of each block's Jacobian at one token, with a null.

    Args:
        trace: a traced prompt.
        layers: the blocks; all by default.
        position: the token; the last by default.
        n_draws: how many matrices of the null are drawn for each block.
        seed: of the draws.
        progress: as in `depth_coupling`.

    Raises:
        ValueError: a layer or position out of range.

    Warns where a Jacobian is exactly zero: its departure from normality is NaN.

    Cost: as `block_jacobians`; then for each block `1 + n_draws` times all eigenvalues
    of a d×d matrix in float64, about 25 d³ flops each, on the CPU.

    Example:
        >>> result = tlc.dynamics.eigenvalues(trace, layers=[1])
        >>> J = tlc.block_jacobian(trace, 1).double()
        >>> torch.allclose(result.values.sum().real, J.trace())
        True

    Source: Henrici 1962 for the departure from normality.
    """
    selected_layers = chosen_layers(trace, layers)
    t = trace.position_index(position)
    J = block_jacobians(trace, selected_layers, position=t, progress=progress)
    return jacobian_eigenvalues(
        J,
        layers=selected_layers,
        position=t,
        n_draws=n_draws,
        seed=seed,
        provenance=trace.provenance,
        progress=progress,
    )


@checked
def jacobian_eigenvalues(
    J: Float[Tensor, "n_layers d_model d_model"],
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    n_draws: Count = 4,
    seed: Seed = 0,
    provenance: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Eigenvalues:
    """Return the eigenvalues of given Jacobians, as `eigenvalues` does.

    Args:
        J: Jacobians of blocks without their skip connections.
        layers: what they are called; from 0 on by default.
        position: the token that they are of.
        n_draws: as in `eigenvalues`.
        seed: as in `eigenvalues`.
        provenance: what the result should say of where they are from.
        progress: as in `eigenvalues`.

    Raises:
        ValueError: no Jacobians, without entries or with some that are not finite, more
            or fewer layers.

    Warns as `eigenvalues`.

    Example:
        >>> J = tlc.block_jacobians(trace)
        >>> tlc.dynamics.jacobian_eigenvalues(J, n_draws=1).complex_share.shape
        torch.Size([2])
    """
    names = named_layers(J, layers)
    J = usable_jacobians(J).double().cpu()
    measure = partial(_decompose_block, n_draws=n_draws, seed=seed)
    numbered = with_progress(list(enumerate(J)), progress, "eigenvalues")
    blocks = parallel_map(measure, numbered, J.device)
    # `[layer eigenvalue]`, and `[draw layer eigenvalue]` of the null.
    block_values = torch.stack([block.values for block in blocks])
    null_values = torch.stack([block.null_values for block in blocks], dim=1)
    sizes = _sizes(J, names)
    norms = torch.stack(
        [
            torch.linalg.matrix_norm(matrix / size)
            for matrix, size in zip(J, sizes, strict=True)
        ]
    )
    return Eigenvalues(
        real=block_values.real,
        imaginary=block_values.imag,
        null_real=null_values[0].real,
        null_imaginary=null_values[0].imag,
        henrici=_henrici(block_values / sizes[:, None], norms),
        null_henrici=_henrici(null_values / sizes[:, None], norms),
        complex_share=_complex_share(block_values),
        null_complex_share=_complex_share(null_values),
        largest_symmetric=torch.tensor(
            [block.largest_symmetric for block in blocks], dtype=torch.float64
        ),
        layers=tuple(names),
        position=position,
        provenance={**(provenance or {}), "seed": seed, "n_draws": n_draws},
    )


def _sizes(
    J: Float[Tensor, "n_layers d d"], layers: Sequence[int]
) -> Float[Tensor, " n_layers"]:
    """Return what to divide each J by, so that squares neither overflow nor vanish.

    It is 1 but for very large and very small ones. Warns of zeros.
    """
    zeros = [
        layer for layer, matrix in zip(layers, J, strict=True) if not bool(matrix.any())
    ]
    if zeros:
        warn_caller(
            "the Jacobian is zero at "
            f"layer{'s' * (len(zeros) > 1)} {', '.join(map(str, zeros))}: "
            "the departure from normality there is NaN"
        )
    # A zero J has size 1, and its departure is 0 / 0.
    return J.new_tensor([divisor(matrix) for matrix in J])


class _BlockEigenvalues(NamedTuple):
    """Eigenvalues of one Jacobian, and of the draws of its null."""

    values: Complex[Tensor, " d"]
    null_values: Complex[Tensor, "n_draws d"]
    largest_symmetric: float


def _decompose_block(
    numbered: tuple[int, Float[Tensor, "d d"]], n_draws: int, seed: int
) -> _BlockEigenvalues:
    """Decompose one Jacobian: the same whichever thread does."""
    number, matrix = numbered
    generator = generator_of(seed, number)
    S = torch.linalg.svdvals(matrix)
    drawn = [
        _sorted_eigenvalues(S[:, None] * rotated(torch.eye(len(S)).double(), generator))
        for _ in range(n_draws)
    ]
    # Each half by itself: the sum of the largest entries would overflow.
    symmetric = eigvalsh(matrix / 2 + matrix.mT / 2)
    return _BlockEigenvalues(
        _sorted_eigenvalues(matrix), torch.stack(drawn), float(symmetric[-1])
    )


@checked
def leading_eigenvalues(
    trace: Trace, layer: int, n: Count = 6, *, position: int = -1
) -> Complex[Tensor, " n"]:
    """Return the eigenvalues of largest modulus of one block's Jacobian.

    By Arnoldi's iteration on products with J, which is not built: for wide models,
    where `eigenvalues` takes long. Where the iteration cannot begin, as where J is zero,
    J is built.

    Args:
        trace: a traced prompt.
        layer: the block.
        n: how many; at most `d_model − 2`.
        position: the token; the last by default.

    Raises:
        ValueError: a layer or position out of range, n too large.
        ArpackNoConvergence: the iteration did not converge.

    Cost: some tens of `block_jvp`.

    Example:
        >>> leading = tlc.dynamics.leading_eigenvalues(trace, 1, n=2)
        >>> every = tlc.dynamics.eigenvalues(trace, layers=[1]).values[0]
        >>> torch.allclose(leading.abs(), every[:2].abs(), rtol=1e-4)
        True
    """
    d = trace.d_model
    # ARPACK takes fewer than d − 1 eigenvalues of a matrix that is not symmetric.
    if n > d - 2:
        raise ValueError(f"`n` must be at most d_model − 2 = {d - 2}, got {n}")
    X = trace.blocks[trace.layer_index(layer)].X

    def times(vector: np.ndarray) -> np.ndarray:
        tangent = torch.from_numpy(vector.ravel()).to(X)
        product = block_jvp(
            trace, layer, tangent, input_position=position, output_position=position
        )
        return product.double().cpu().numpy()

    operator = sparse.LinearOperator((d, d), matvec=times, dtype=np.float64)
    # A fixed start, so that each call gives the same numbers.
    start = np.random.default_rng(0).standard_normal(d)
    try:
        found = sparse.eigs(
            operator, n, which="LM", v0=start, tol=1e-6, return_eigenvectors=False
        )
    # It is an `ArpackError` too, but none of a bad start: the caller is told.
    except sparse.ArpackNoConvergence:
        raise
    except sparse.ArpackError:
        # Where J takes the start to zero ARPACK refuses to begin.
        J = block_jacobian(trace, layer, position=position)
        return _sorted_eigenvalues(J.double().cpu())[:n]
    return _sorted(torch.from_numpy(found))


def _sorted_eigenvalues(matrix: Float[Tensor, "d d"]) -> Complex[Tensor, " d"]:
    return _sorted(torch.linalg.eigvals(matrix))


def _sorted(values: Complex[Tensor, " n"]) -> Complex[Tensor, " n"]:
    return values[values.abs().argsort(descending=True)]


def _henrici(
    values: Complex[Tensor, "*batch n_layers d"], norms: Float[Tensor, " n_layers"]
) -> Float[Tensor, "*batch n_layers"]:
    energy = values.abs().square().sum(-1)
    # Rounding may leave a normal matrix below 0.
    return (1 - energy / norms.square()).clamp(min=0).sqrt()


def _complex_share(
    values: Complex[Tensor, "*batch n_layers d"],
) -> Float[Tensor, "*batch n_layers"]:
    # LAPACK gives real eigenvalues of a real matrix an imaginary part of exactly 0.
    return (values.imag != 0).double().mean(-1)
