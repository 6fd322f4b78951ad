"""The result of comparing connections."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling import coupling as measures
from tl_coupling.border import Count, checked
from tl_coupling.comparisons.saving import Saved
from tl_coupling.coupling import Measure, Norm, Orientation
from tl_coupling.spectra import check_k


@checked
@dataclass(frozen=True, eq=False, repr=False)
class CouplingMap(Saved):
    """Coupling matrices of every pair of compared connections, at the largest k; every smaller k is a slice of them.

    Attributes:
        matrices: `A = U_{2,k}ᵀ J_1 V_{2,k}` (or "vju"), `[n_rows n_cols k k]`; rows are the J_1, columns the J_2 that
            gave the singular vectors.
        singular_values: of each J_1, `[n_rows k]`, largest first.
        frobenius_norms: of each J_1, `[n_rows]`.
        d_model: size of the Jacobians.
        row_layers, col_layers: the layer of each row's J_1 and each column's J_2.
        row_positions, col_positions: the token position of each.
        kind: what was compared: "depth" (one token, every pair of layers), "self" or "context" (tokens).
        orientation: "ujv" or "vju".
        provenance: how it was made; JSON-able.
    """

    matrices: Float[Tensor, "n_rows n_cols k k"]
    singular_values: Float[Tensor, "n_rows k"]
    frobenius_norms: Float[Tensor, " n_rows"]
    d_model: Count
    row_layers: tuple[int, ...]
    col_layers: tuple[int, ...]
    row_positions: tuple[int, ...]
    col_positions: tuple[int, ...]
    kind: str
    orientation: Orientation
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "matrices": "row col i j",
        "singular_values": "row i",
        "frobenius_norms": "row",
        **{f"{side}_{what}": side for side in ("row", "col") for what in ("layers", "positions")},
    }

    def __post_init__(self) -> None:
        """Raise unless every row and every column has a name."""
        for i, side in enumerate(("row", "col")):
            n = self.matrices.shape[i]
            for what in (f"{side}_layers", f"{side}_positions"):
                if (got := len(getattr(self, what))) != n:
                    raise ValueError(f"`{what}` must name the {n} {side}s of `matrices`, got {got}")

    @property
    def k(self) -> int:
        """The largest k that can be asked for."""
        return self.matrices.shape[-1]

    @property
    def n_prompts(self) -> int:
        """How many prompts the values are a mean over."""
        return 1

    @checked
    def at(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols k k"]:
        """The coupling matrices for the top k singular vectors: a corner of `matrices` (`None`: all of it)."""
        k = self._k(k)
        return self.matrices[..., :k, :k]

    @checked
    def values(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, "n_rows n_cols"]:
        """A measure by name, for every pair; `options` (`p`, `absolute`) go to `spectral_miscoupling`."""
        if measure == "coupling":
            return 1 - measures.normalized_miscoupling(self.at(k), **options)
        of_S_1 = [self.singular_values[:, None]] if measure in ("spectral_miscoupling", "captured_energy") else []
        return getattr(measures, measure)(self.at(k), *of_S_1, **options)

    @checked
    def coupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`1 − m̃(A)` of every pair: 1 where J_2's vectors diagonalise J_1, `1 − √(1 − 1/k)` for random subspaces."""
        return self.values(k)

    @checked
    def miscoupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`m(A)` of every pair; see `tl_coupling.miscoupling`."""
        return self.values(k, "miscoupling")

    @checked
    def normalized_miscoupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`m̃(A)` of every pair; see `tl_coupling.normalized_miscoupling`."""
        return self.values(k, "normalized_miscoupling")

    @checked
    def spectral_miscoupling(
        self, k: int | None = None, p: Norm = 2, absolute: bool = False
    ) -> Float[Tensor, "n_rows n_cols"]:
        """`m_K` of every pair; see `tl_coupling.spectral_miscoupling`. The authors' code has `absolute=True`."""
        return self.values(k, "spectral_miscoupling", p=p, absolute=absolute)

    @checked
    def captured_energy(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`‖A‖_F / ‖s_{1,k}‖₂` of every pair; see `tl_coupling.captured_energy`."""
        return self.values(k, "captured_energy")

    @checked
    def mean(
        self, k: int | None = None, measure: Measure = "coupling", off_diagonal: bool = True, **options: Any
    ) -> float:
        """Mean of a measure over the pairs; `off_diagonal` leaves out those that pair a connection with itself."""
        values = self.values(k, measure, **options)
        if off_diagonal:
            values = values[~self._same_connection()]
            if not len(values):
                raise ValueError("every pair here compares a connection with itself: use `off_diagonal=False`")
        return float(values.mean())

    @checked
    def null(self, k: int | None = None, measure: Measure = "coupling", **options: Any) -> float:
        """The measure for random subspaces in place of J_2's, mean over the rows; see `random_subspace_null`."""
        options |= {"S_1": self.singular_values.cpu(), "frobenius_norm": self.frobenius_norms.cpu()}
        return float(measures.random_subspace_null(self._k(k), measure, d_model=self.d_model, **options).mean())

    @checked
    def locality_profile(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, " n_distances"]:
        """Mean of a measure over pairs of layers `|l − l'|` apart, for distances 0, 1, … to the largest.

        NaN where no pair of the chosen layers is that far apart.
        """
        values = self.values(k, measure, **options)
        distance = (torch.tensor(self.row_layers)[:, None] - torch.tensor(self.col_layers)).abs().to(values.device)
        return torch.stack([values[distance == d].mean() for d in range(int(distance.max()) + 1)])

    def __repr__(self) -> str:
        n_rows, n_cols = self.matrices.shape[:2]
        mean = f"{self.mean(off_diagonal=not bool(self._same_connection().all())):.3f}"
        return (
            f"{type(self).__name__}({self.kind}, {self.provenance.get('model')!r}, {n_rows}×{n_cols} pairs, "
            f"{self.orientation}, k≤{self.k}, n_prompts={self.n_prompts}; "
            f"at k={self.k}: mean coupling {mean}, null {self.null():.3f})"
        )

    def _k(self, k: int | None) -> int:
        k = self.k if k is None else k
        check_k(k, self.k)
        return k

    def _same_connection(self) -> Tensor:
        rows = torch.tensor(list(zip(self.row_layers, self.row_positions, strict=True)))
        cols = torch.tensor(list(zip(self.col_layers, self.col_positions, strict=True)))
        return (rows[:, None] == cols[None]).all(-1).to(self.matrices.device)
