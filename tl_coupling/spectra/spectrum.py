"""The singular triplets of matrices, and how they were found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.spectra.checks import check_k

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix


@made_by("svd(J)")
@checked
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular triplets of one matrix or a batch: `J ≈ U diag(S) Vh`, largest first.

    Named and shaped as torch does. `svd` makes one, and adds how the triplets were
    found. An index or slice takes some of a batch.

    Attributes:
        U, S, Vh: columns of U and rows of Vh are singular vectors; S, at least 0, has
            the unit of J.
        residuals: the larger of `‖J v − σ u‖` and `‖Jᵀu − σ v‖` of each triplet, as
            shares of σ_1.
        steps: products of `JᵀJ` with a block that an iteration took; 0 is a full SVD.
        norm: `‖J‖_F`.
        way: the name of the iteration, where one was tried.

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
    def read(self) -> Float[Tensor, "*batch d_in k"]:
        """Directions that J reads, as columns: V, of `J V = U diag(S)`.

        Along column i of `read`, an input of length 1 gives an output of length `S[i]`
        along column i of `write`. The names do not depend on how matrices are applied:
        TransformerLens multiplies rows, `x @ A @ B`, so that its `U` is what is read
        and its `V` what is written.
        """
        return self.Vh.mT

    @property
    def write(self) -> Float[Tensor, "*batch d_out k"]:
        """Directions that J writes, as columns: U. See `read`."""
        return self.U

    def factored(self) -> "FactoredMatrix":
        """Return the triplets as a `FactoredMatrix` of TransformerLens.

        It multiplies rows: `x @ spectrum.factored()` is `J x`, of the triplets that
        there are. Of its `svd()`, `U` is `read` and `V` is `write`, up to signs.

        Example:
            >>> J = tlc.block_jacobian(trace, layer=1)
            >>> factored = tlc.svd(J, k=4).factored()
            >>> factored.shape, factored.mdim
            (torch.Size([32, 32]), 4)
        """
        # Inside, so that a spectrum alone does not load TransformerLens.
        from tl_coupling.models import factored_matrix

        return factored_matrix(self.read * self.S[..., None, :], self.write.mT)

    @property
    def uncaptured(self) -> Float[Tensor, "*batch"]:
        """Energy that these triplets leave out, `(‖J‖_F² − Σ σ_i²) / ‖J‖_F²`.

        In [0, 1]; 0 for a zero J. It bounds every other singular value: `σ_{k+1} ≤
        ‖J‖_F √uncaptured`. Raises ValueError where `‖J‖_F` is not known.
        """
        if self.norm is None:
            raise ValueError("the energy of J is not known: use `svd(J, k)`")
        norm = self.norm.double()
        is_zero = norm == 0
        # Every share of a zero J is 0, and nothing is left out.
        shares = self.S.double() / norm.where(~is_zero, torch.inf)[..., None]
        return (1 - shares.square().sum(-1)).clamp(0, 1).where(~is_zero, 0.0)

    @property
    def method(self) -> str:
        """How many matrices were decomposed in which way, and in which dtype, in words."""
        if self.steps is None or self.residuals is None:
            return "not known"
        is_iterated = self.steps > 0
        ways = []
        if is_iterated.any():
            steps = self.steps[is_iterated]
            largest_residual = float(self.residuals[is_iterated].max())
            ways.append(
                f"{len(steps)} by {self.way} in {int(steps.min())} to "
                f"{int(steps.max())} steps, residuals up to {largest_residual:.1e} σ_1"
            )
        if not is_iterated.all():
            ways.append(f"{int((~is_iterated).sum())} by full SVD")
        dtype = str(self.S.dtype).removeprefix("torch.")
        return f"{'; '.join(ways)}, in {dtype}" if ways else "of no matrices"

    @checked
    def top(self, k: int) -> "Spectrum":
        """Return the k largest triplets: a slice, nothing is computed."""
        check_k(k, self.k)
        return Spectrum(
            self.U[..., :k],
            self.S[..., :k],
            self.Vh[..., :k, :],
            None if self.residuals is None else self.residuals[..., :k],
            self.steps,
            self.norm,
            way=self.way,
        )

    def __getitem__(self, index: Any) -> "Spectrum":
        """Return some of the batch."""
        return Spectrum(
            self.U[index],
            self.S[index],
            self.Vh[index],
            None if self.residuals is None else self.residuals[index],
            None if self.steps is None else self.steps[index],
            None if self.norm is None else self.norm[index],
            way=self.way,
        )

    @staticmethod
    @checked
    def cat(spectra: "Sequence[Spectrum]") -> "Spectrum":
        """Return batches of spectra as one batch.

        What is not known of one is not known of all.
        """
        # A full SVD has no way to name.
        ways = {spectrum.way for spectrum in spectra} - {""}
        return Spectrum(
            torch.cat([spectrum.U for spectrum in spectra]),
            torch.cat([spectrum.S for spectrum in spectra]),
            torch.cat([spectrum.Vh for spectrum in spectra]),
            _concatenated_if_known([spectrum.residuals for spectrum in spectra]),
            _concatenated_if_known([spectrum.steps for spectrum in spectra]),
            _concatenated_if_known([spectrum.norm for spectrum in spectra]),
            way=" or ".join(sorted(ways)),
        )


def _concatenated_if_known(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the parts as one; None unless all are known."""
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return None
    return torch.cat(tensors)
