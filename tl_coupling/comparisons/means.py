"""Coupling over many prompts: the mean map and its spread, in constant memory."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import checked
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.coupling import MEASURES, Measure, measures_at_every_k

if TYPE_CHECKING:
    import xarray

# What all maps must have in common; of the provenance, and of the map.
_OF_TRACE = ("model", "checkpoint", "untrained", "architecture", "weight_processing", "final_norm", "fixed")
_SAME = (*_OF_TRACE, "d_model", "kind", "orientation", "k", "row_layers", "col_layers")


@checked
@dataclass(frozen=True, eq=False, repr=False)
class MeanCouplingMap(CouplingMap):
    """The mean over prompts of coupling maps, and its spread.

    Every method of `CouplingMap` gives the mean over the prompts, of each measure with its default options; `spread`
    and `spread_of_mean` give standard deviations (n − 1 in the denominator; NaN for one prompt). What is undefined for
    one prompt is undefined (NaN) in the mean. `CouplingMap.load` reads such a map too.

    Attributes:
        matrices: mean of `|A|`, `[n_rows n_cols k k]` (the signs of singular vectors are arbitrary).
        singular_values, frobenius_norms: means.
        row_positions, col_positions: counted from the end, and so negative, where they differ from the beginning.
        provenance: what all prompts have in common; `prompts` lists their texts.
        means, spreads: mean and standard deviation of each measure, `[n_measures k n_rows n_cols]`.
        nulls: mean null of each measure, `[n_measures k]`.
        spreads_of_mean: standard deviation of a prompt's mean over pairs of different connections (all pairs where
            none differ), `[n_measures k]`.
    """

    means: Float[Tensor, "n_measures k n_rows n_cols"]
    spreads: Float[Tensor, "n_measures k n_rows n_cols"]
    nulls: Float[Tensor, "n_measures k"]
    spreads_of_mean: Float[Tensor, "n_measures k"]
    DIMS: ClassVar = CouplingMap.DIMS | {
        **dict.fromkeys(("means", "spreads"), "measure k row col"),
        **dict.fromkeys(("nulls", "spreads_of_mean"), "measure k"),
    }

    @classmethod
    def over(cls, maps: Iterable[CouplingMap]) -> "MeanCouplingMap":
        """The mean over maps of the same connections, one for each prompt. An iterator is read one map at a time.

        Raises:
            ValueError: no map; maps of different models, layers, positions, k or orientation; a mean among them.

        Example:
            >>> traces = (tlc.trace(model, prompt) for prompt in ("w3 w14 w15", "w9 w2 w6 w5"))
            >>> result = MeanCouplingMap.over(tlc.depth_coupling(trace, k=4) for trace in traces)
            >>> result.coupling(2).shape, result.spread(2).shape, result.n_prompts
            (torch.Size([2, 2]), torch.Size([2, 2]), 2)
        """
        n, prompts = 0, []
        remarks: dict[str, None] = {}
        for n, result in enumerate(maps, start=1):
            if not isinstance(result, CouplingMap) or isinstance(result, MeanCouplingMap):
                raise ValueError(f"wanted the coupling map of one prompt, got {type(result).__name__}")
            this, values = _facts(result), _values(result)
            if n == 1:
                common, means = this, {name: torch.zeros_like(x) for name, x in values.items()}
                squares = {name: torch.zeros_like(values[name]) for name in ("means", "of_mean")}
            for what in _SAME:
                if common[what] != this[what]:
                    raise ValueError(f"the maps must have the same {what}, got {common[what]!r} and {this[what]!r}")
            common = {key: value for key, value in common.items() if key in this and this[key] == value}
            prompts.append(result.provenance.get("prompt"))
            remarks |= dict.fromkeys(result.provenance.get("remarks", ()))
            # Welford's update: one pass, and no difference of large sums.
            for name, x in values.items():
                deviation = x - means[name]
                means[name] += deviation / n
                if name in squares:
                    squares[name] += deviation * (x - means[name])
        if not n:
            raise ValueError("there are no maps to take the mean of: wanted at least one")
        positions = common.get("positions", common.get("positions from the end"))
        if positions is None:
            raise ValueError("the maps must be of the same positions, counted from the beginning or from the end")
        provenance = {key: value for key, value in common.items() if key in result.provenance}
        of_all = {one.name: getattr(result, one.name) for one in fields(CouplingMap)}
        of_all |= {"row_positions": positions[0], "col_positions": positions[1]}
        of_all |= {"provenance": provenance | {"prompts": prompts, "remarks": list(remarks)}}
        means["spreads"], means["spreads_of_mean"] = ((total / (n - 1)).sqrt() for total in squares.values())
        del means["of_mean"]
        return cls(**of_all | {name: x.to(result.matrices) for name, x in means.items()})

    @property
    def n_prompts(self) -> int:
        """How many prompts the values are a mean over."""
        return len(self.provenance["prompts"])

    @checked
    def values(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, "n_rows n_cols"]:
        """Mean over the prompts of a measure, for every pair."""
        return self._kept(self.means, k, measure, options)

    @checked
    def spread(self, k: int | None = None, measure: Measure = "coupling") -> Float[Tensor, "n_rows n_cols"]:
        """Standard deviation over the prompts of a measure, for every pair."""
        return self._kept(self.spreads, k, measure, {})

    @checked
    def spread_of_mean(self, k: int | None = None, measure: Measure = "coupling") -> float:
        """Standard deviation over the prompts of their `mean(k, measure)`."""
        return float(self._kept(self.spreads_of_mean, k, measure, {}))

    @checked
    def null(self, k: int | None = None, measure: Measure = "coupling", **options: Any) -> float:
        """Mean over the prompts of a measure's null."""
        return float(self._kept(self.nulls, k, measure, options))

    def to_dataset(self) -> "xarray.Dataset":
        """The result as an `xarray.Dataset`, with the measures by name and k from 1."""
        return super().to_dataset().assign_coords(measure=list(MEASURES), k=list(range(1, self.k + 1)))

    def _kept(self, kept: Tensor, k: int | None, measure: Measure, options: dict[str, Any]) -> Tensor:
        held = {"p": 2, "absolute": False}
        if options and (measure != "spectral_miscoupling" or held | options != held):
            raise ValueError(f"a mean over prompts holds p=2 and absolute=False, got {options}: measure map by map")
        return kept[MEASURES.index(measure), self._k(k) - 1]


def _facts(result: CouplingMap) -> dict[str, Any]:
    """What maps over which a mean is taken may or must have in common."""
    n_tokens = len(result.provenance.get("tokens", ()))
    positions = result.row_positions, result.col_positions
    own = {what: result.provenance.get(what) if what in _OF_TRACE else getattr(result, what) for what in _SAME}
    from_the_end = tuple(tuple(t - n_tokens for t in side) for side in positions)
    return result.provenance | own | {"positions": positions, "positions from the end": from_the_end}


def _values(result: CouplingMap) -> dict[str, Tensor]:
    """What is averaged: `|A|` and J_1's spectra, and for every k each measure, its null, and its mean over pairs."""
    rows = zip(result.matrices, result.singular_values, strict=True)
    values = torch.stack([measures_at_every_k(A, S_1) for A, S_1 in rows], 2)
    others = ~result._same_connection()
    pairs = values[..., others] if others.any() else values.flatten(2)
    return {
        "matrices": result.matrices.abs(),
        "singular_values": result.singular_values,
        "frobenius_norms": result.frobenius_norms,
        "means": values,
        "of_mean": pairs.mean(-1),
        "nulls": torch.tensor([[result.null(k, what) for k in range(1, result.k + 1)] for what in MEASURES]).to(values),
    }
