"""The result of comparing connections."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import AnyPath, Count, checked
from tl_coupling.coupling import (
    Measure,
    Norm,
    Orientation,
    captured_energy,
    miscoupling,
    normalized_miscoupling,
    random_subspace_null,
    spectral_miscoupling,
)
from tl_coupling.files import write_atomically
from tl_coupling.spectra import check_k

if TYPE_CHECKING:
    import xarray


@checked
@dataclass(frozen=True, eq=False)
class CouplingMap:
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
    provenance: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        """Raise unless every row and every column has a name."""
        for i, side in enumerate(("row", "col")):
            for what in (f"{side}_layers", f"{side}_positions"):
                if len(getattr(self, what)) != self.matrices.shape[i]:
                    raise ValueError(
                        f"`{what}` must name the {self.matrices.shape[i]} {side}s of `matrices`, got "
                        f"{len(getattr(self, what))}"
                    )

    @property
    def k(self) -> int:
        """The largest k that can be asked for."""
        return self.matrices.shape[-1]

    @checked
    def at(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols k k"]:
        """The coupling matrices for the top k singular vectors: a corner of `matrices` (`None`: all of it)."""
        check_k(self.k if k is None else k, self.k)
        return self.matrices[..., :k, :k]

    @checked
    def miscoupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`m(A)` of every pair; see `tl_coupling.miscoupling`."""
        return miscoupling(self.at(k))

    @checked
    def normalized_miscoupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`m̃(A)` of every pair; see `tl_coupling.normalized_miscoupling`."""
        return normalized_miscoupling(self.at(k))

    @checked
    def spectral_miscoupling(
        self, k: int | None = None, p: Norm = 2, absolute: bool = False
    ) -> Float[Tensor, "n_rows n_cols"]:
        """`m_K` of every pair; see `tl_coupling.spectral_miscoupling`. `absolute=True` is the authors' code."""
        return spectral_miscoupling(self.at(k), self.singular_values[:, None], p, absolute)

    @checked
    def captured_energy(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`‖A‖_F / ‖s_{1,k}‖₂` of every pair; see `tl_coupling.captured_energy`."""
        return captured_energy(self.at(k), self.singular_values[:, None])

    @checked
    def coupling(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols"]:
        """`1 − m̃(A)` of every pair: 1 where J_2's vectors diagonalise J_1, `1 − √(1 − 1/k)` for random subspaces."""
        return 1 - self.normalized_miscoupling(k)

    @checked
    def values(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, "n_rows n_cols"]:
        """A measure by name, for every pair; `options` (`p`, `absolute`) go to `spectral_miscoupling`."""
        return getattr(self, measure)(k, **options)

    @checked
    def mean(
        self, k: int | None = None, measure: Measure = "coupling", off_diagonal: bool = True, **options: Any
    ) -> float:
        """Mean of a measure over the pairs; without those that compare a connection with itself if `off_diagonal`."""
        values = self.values(k, measure, **options)
        if off_diagonal:
            values = values[~self._same_connection()]
            if not len(values):
                raise ValueError("every pair here compares a connection with itself: use `off_diagonal=False`")
        return float(values.mean())

    @checked
    def null(self, k: int | None = None, measure: Measure = "coupling", **options: Any) -> float:
        """What random subspaces would give instead of J_2's, mean over the rows; see `random_subspace_null`."""
        k = self.k if k is None else k
        check_k(k, self.k)
        value = random_subspace_null(
            k,
            measure,
            d_model=self.d_model,
            S_1=self.singular_values.cpu(),
            frobenius_norm=self.frobenius_norms.cpu(),
            **options,
        )
        return float(value.mean())

    @checked
    def locality_profile(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, " n_distances"]:
        """Mean of a measure over pairs of layers `|l − l'|` apart, for distances 0, 1, … to the largest.

        A distance that no pair has is NaN (only where `layers` was a selection).
        """
        values = self.values(k, measure, **options)
        distance = (torch.tensor(self.row_layers)[:, None] - torch.tensor(self.col_layers)).abs()
        means = [values[distance.to(values.device) == d].mean() for d in range(int(distance.max()) + 1)]
        return torch.stack(means)

    def to_dataset(self) -> "xarray.Dataset":
        """The map as an `xarray.Dataset`, every array named and the provenance in the attributes."""
        import xarray

        pair = ("row", "col", "i", "j")
        return xarray.Dataset(
            {
                "matrices": (pair, self.matrices.cpu().numpy()),
                "singular_values": (("row", "i"), self.singular_values.cpu().numpy()),
                "frobenius_norms": ("row", self.frobenius_norms.cpu().numpy()),
            },
            coords={
                "row_layer": ("row", list(self.row_layers)),
                "row_position": ("row", list(self.row_positions)),
                "col_layer": ("col", list(self.col_layers)),
                "col_position": ("col", list(self.col_positions)),
            },
            attrs={
                "kind": self.kind,
                "orientation": self.orientation,
                "d_model": self.d_model,
                "provenance": json.dumps(self.provenance),
            },
        )

    @checked
    def save(self, path: AnyPath) -> Path:
        """Write the map as netCDF, whole or not at all."""
        return write_atomically(path, lambda unfinished: self.to_dataset().to_netcdf(unfinished, engine="netcdf4"))

    @classmethod
    @checked
    def load(cls, path: AnyPath) -> "CouplingMap":
        """Read what `save` wrote."""
        import xarray

        try:
            with xarray.open_dataset(path, engine="netcdf4") as file:
                data = file.load()
            provenance = json.loads(data.attrs["provenance"])
            if not isinstance(provenance, dict):
                raise TypeError("the provenance is not an object")
            return cls(
                matrices=torch.from_numpy(data["matrices"].values),
                singular_values=torch.from_numpy(data["singular_values"].values),
                frobenius_norms=torch.from_numpy(data["frobenius_norms"].values),
                d_model=int(data.attrs["d_model"]),
                **{
                    f"{side}_{what}s": tuple(int(i) for i in data[f"{side}_{what}"].values)
                    for side in ("row", "col")
                    for what in ("layer", "position")
                },
                kind=data.attrs["kind"],
                orientation=data.attrs["orientation"],
                provenance=provenance,
            )
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a coupling map that `CouplingMap.save` wrote, or is damaged") from error

    def __repr__(self) -> str:
        n_rows, n_cols = self.matrices.shape[:2]
        off_diagonal = not bool(self._same_connection().all())
        return (
            f"CouplingMap(kind={self.kind!r}, model={self.provenance.get('model')!r}, {n_rows}×{n_cols} pairs, "
            f"k≤{self.k}, orientation={self.orientation!r}, mean coupling {self.mean(off_diagonal=off_diagonal):.3f}, "
            f"null {self.null():.3f})"
        )

    def _same_connection(self) -> Tensor:
        rows = torch.tensor(list(zip(self.row_layers, self.row_positions, strict=True)))
        cols = torch.tensor(list(zip(self.col_layers, self.col_positions, strict=True)))
        return (rows[:, None] == cols[None]).all(-1).to(self.matrices.device)
