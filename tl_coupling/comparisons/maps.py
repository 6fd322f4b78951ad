"""The result of comparing connections, of one prompt or as a mean over many."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling import measures
from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.comparisons.nulls import drawn_means
from tl_coupling.measures import MEASURES, RELEASED, Measure, Norm, Null, Orientation
from tl_coupling.saved import Saved
from tl_coupling.spectra import check_k
from tl_coupling.statistics import LEVEL, Interval

if TYPE_CHECKING:
    import xarray

PerPair = Float[Tensor, "n_rows n_cols"]
# What all maps must have in common for a mean; of the provenance, and of the map.
_OF_TRACE = (
    "model",
    "checkpoint",
    "untrained",
    "architecture",
    "weight_processing",
    "final_norm",
    "fixed",
    "normalising_layers",
)
_OF_MAP = ("d_model", "kind", "orientation", "k", "row_layers", "col_layers")


@made_by("depth_coupling(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class CouplingMap(Saved):
    """Coupling matrices of every pair of compared connections, at the largest k; every
    smaller k is a slice of them.

    Attributes:
        matrices: `A = U_{2,k}ᵀ J_1 V_{2,k}` (or "vju"), `[n_rows n_cols k k]`; rows are
            the J_1, columns the J_2 that gave the singular vectors.
        singular_values: of each J_1, `[n_rows k]`, largest first.
        frobenius_norms: of each J_1, `[n_rows]`.
        d_model: size of the Jacobians.
        row_layers, col_layers: the layer of each row's J_1 and each column's J_2.
        row_positions, col_positions: the token position of each.
        kind: what was compared: "depth" (one token, every pair of layers), "self" or
            "context" (tokens).
        orientation: "ujv" or "vju".
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.depth_coupling(trace, k=8)
        >>> result.coupling(4).shape, result.at(4).shape
        (torch.Size([2, 2]), torch.Size([2, 2, 4, 4]))
        >>> tlc.CouplingMap.load(result.save("coupling.nc")).mean(4) == result.mean(4)
        True
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
        **{
            f"{side}_{what}": side
            for side in ("row", "col")
            for what in ("layers", "positions")
        },
    }

    def __post_init__(self) -> None:
        """Raise unless every row and every column has a name."""
        sizes = dict(zip(("row", "col"), self.matrices.shape, strict=False))
        for name, side in self.DIMS.items():
            if side in sizes and (got := len(getattr(self, name))) != sizes[side]:
                raise ValueError(
                    f"`{name}` must name the {sizes[side]} {side}s of `matrices`, got {got}"
                )

    @property
    def k(self) -> int:
        """The largest k that can be asked for."""
        return self.matrices.shape[-1]

    @property
    def n_prompts(self) -> int:
        """How many prompts the values are a mean over."""
        return len(self.provenance.get("prompts", [None]))

    @checked
    def at(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols k k"]:
        """The coupling matrices for the top k singular vectors: a corner of `matrices`
        (`None`: all of it).
        """
        k = self._k(k)
        return self.matrices[..., :k, :k]

    @checked
    def values(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> PerPair:
        """A measure by name, for every pair; `options` (`p`, `absolute`) are those of
        `spectral_miscoupling`.
        """
        return measures.measure_of(
            self.at(k), self.singular_values[:, None], measure, **options
        )

    @checked
    def coupling(self, k: int | None = None) -> PerPair:
        """`1 − m̃(A)` of every pair: 1 where J_2's vectors diagonalise J_1, `1 − √(1 −
        1/k)` for random subspaces.
        """
        return self.values(k)

    @checked
    def miscoupling(self, k: int | None = None) -> PerPair:
        """`m(A)` of every pair; see `tl_coupling.miscoupling`."""
        return self.values(k, "miscoupling")

    @checked
    def normalized_miscoupling(self, k: int | None = None) -> PerPair:
        """`m̃(A)` of every pair; see `tl_coupling.normalized_miscoupling`."""
        return self.values(k, "normalized_miscoupling")

    @checked
    def spectral_miscoupling(
        self, k: int | None = None, p: Norm = 2, absolute: bool = False
    ) -> PerPair:
        """`m_K` of every pair; see `tl_coupling.spectral_miscoupling`. The authors'
        code has `absolute=True`.
        """
        return self.values(k, "spectral_miscoupling", p=p, absolute=absolute)

    @checked
    def captured_energy(self, k: int | None = None) -> PerPair:
        """`‖A‖_F / ‖s_{1,k}‖₂` of every pair; see `tl_coupling.captured_energy`."""
        return self.values(k, "captured_energy")

    @checked
    def mean(
        self,
        k: int | None = None,
        measure: Measure = "coupling",
        off_diagonal: bool = True,
        **options: Any,
    ) -> float:
        """Mean of a measure over the pairs; `off_diagonal` leaves out those that pair a
        connection with itself.

        Aubry et al. 2025 (section 5.4) take all pairs, `off_diagonal=False`. Of a map
        of L layers with mean coupling c that is `c + (1 − c) / L`, which depends on the
        depth of the model, and so is not the default.

        Pairs where the measure is undefined are left out, with a warning that says how
        many; NaN if all are.
        """
        values = self.values(k, measure, **options)
        if off_diagonal:
            values = values[~self.own_pairs()]
            if not len(values):
                raise ValueError(
                    "every pair here compares a connection with itself: use `off_diagonal=False`"
                )
        if n_undefined := int(values.isnan().sum()):
            said = f"{measure} is undefined for {n_undefined} of {values.numel()} pairs, where A or S_1 is 0"
            warn_caller(
                f"{said}: the mean is over the others"
                if n_undefined < values.numel()
                else f"{said}: NaN"
            )
        return float(values.nanmean())

    @checked
    def null(
        self,
        k: int | None = None,
        measure: Measure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        **options: Any,
    ) -> float:
        """What random singular vectors in place of J_2's would give, mean over the
        pairs that `mean` takes.

        Of each pair it is the root mean square over random vectors, in closed form: for
        coupling `1 − √(1 − 1/k)`, somewhat below the mean (by an eighth at k = 2);
        `null_interval` has the mean inside. With `off_diagonal=False` pairs of a
        connection with itself keep their values: chance has no part in them.

        Args:
            within: what stays random: all directions, `"space"`; or those within the
                spans of J_2's own top vectors, left and right by themselves, `"spans"`,
                or turned alike, `"pairs"`. See `coupling.rotation_null`.
            k, measure, off_diagonal, options: as in `mean`.
        """
        nulls, own = (
            self._nulls(self._k(k), measure, within, options),
            self.own_pairs().cpu(),
        )
        if not off_diagonal:
            nulls = nulls.where(
                ~own, self.values(k, measure, **options).cpu().to(nulls)
            )
        return float(
            (nulls if own.all() or not off_diagonal else nulls[~own]).nanmean()
        )

    @checked
    def null_interval(
        self,
        k: int | None = None,
        measure: Measure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        n_draws: Count = 100,
        seed: Seed = 0,
        **options: Any,
    ) -> Interval:
        """Where 95 % of the means over pairs (`mean`) would lie if J_2's singular
        vectors were random.

        By drawing them; each column has its own. Pairs of one column share its vectors:
        within J_2's spans they are rotated together. In the whole space what they have
        in common is not known from the spectra of the J_1, so the values of a column
        are taken to rise and fall together: the interval is then as wide as it can be,
        or wider.

        Args:
            n_draws: for each column; these are combined anew thousands of times. With
                more, which take longer, the ends of the interval are better known.
            k, measure, off_diagonal, within, options: as in `null`.

        Raises ValueError where every pair compares a connection with itself.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> low, high = result.null_interval()
            >>> low < result.null() < high
            True
        """
        k = self._k(k)
        # Refuses what a mean over prompts does not hold.
        self._nulls(k, measure, within, options)
        others = ~self.own_pairs().cpu()
        means = drawn_means(self, k, measure, within, others, n_draws, seed, options)
        if not off_diagonal:
            kept = self.values(k, measure, **options).cpu()[~others].double()
            means = (means * others.sum() + kept.nansum()) / others.numel()
        low, high = means.quantile(
            torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2]).to(means)
        ).tolist()
        return low, high

    def _nulls(
        self, k: int, measure: Measure, within: Null, options: dict[str, Any]
    ) -> Float[Tensor, "n_rows n_cols"]:
        """The null of every pair."""
        S_1 = self.singular_values.cpu()
        if within != "space":
            A = self.at(k).cpu()
            return measures.rotation_null(
                A, S_1[:, None], measure, paired=within == "pairs", **options
            )
        of_J_1: dict[str, Any] = {
            "d_model": self.d_model,
            "S_1": S_1,
            "frobenius_norm": self.frobenius_norms.cpu(),
        }
        null = measures.random_subspace_null(k, measure, **of_J_1, **options)
        return null.expand(len(S_1))[:, None].expand(self.matrices.shape[:2])

    @checked
    def locality_profile(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> Float[Tensor, " n_distances"]:
        """Mean of a measure over pairs of layers `|l − l'|` apart, for distances 0, 1,
        … to the largest.

        NaN where no pair of the chosen layers is that far apart.
        """
        values = self.values(k, measure, **options)
        distance = (
            (torch.tensor(self.row_layers)[:, None] - torch.tensor(self.col_layers))
            .abs()
            .to(values.device)
        )
        return torch.stack(
            [values[distance == d].mean() for d in range(int(distance.max()) + 1)]
        )

    def own_pairs(self) -> Bool[Tensor, "n_rows n_cols"]:
        """Which pairs compare a connection with itself: the diagonal of a depth map."""
        sides = (
            (self.row_layers, self.row_positions),
            (self.col_layers, self.col_positions),
        )
        rows, cols = (
            torch.tensor(side, device=self.matrices.device).T for side in sides
        )
        return (rows[:, None] == cols).all(-1)

    def __repr__(self) -> str:
        n_rows, n_cols = self.matrices.shape[:2]
        mean = f"{self.mean(off_diagonal=not self.own_pairs().all()):.3f}"
        return (
            f"{type(self).__name__}({self.kind}, {self.provenance.get('model')!r}, {n_rows}×{n_cols} pairs, "
            f"{self.orientation}, k≤{self.k}, n_prompts={self.n_prompts}; "
            f"at k={self.k}: mean coupling {mean}, null {self.null():.3f})"
        )

    def _k(self, k: int | None) -> int:
        k = self.k if k is None else k
        check_k(k, self.k)
        return k


@checked
@dataclass(frozen=True, eq=False, repr=False)
class MeanCouplingMap(CouplingMap):
    """The mean over prompts of coupling maps, and its spread.

    Every method of `CouplingMap` gives the mean over the prompts, of each measure with
    its default options; `spread` and `spread_of_mean` give standard deviations (n − 1
    in the denominator; NaN for one prompt). What is undefined for one prompt is
    undefined (NaN) in the mean. `null_interval` takes the spectra to be their means,
    and the subspaces of each prompt to be others. `CouplingMap.load` reads such a map
    too.

    Attributes:
        matrices: mean of `|A|`, `[n_rows n_cols k k]` (the signs of singular vectors
            are arbitrary).
        singular_values, frobenius_norms: means.
        row_positions, col_positions: counted from the end, and so negative, where they
            differ from the beginning.
        provenance: what all prompts have in common; `prompts` lists their texts.
        means, spreads: mean and standard deviation of each measure, `[n_measures k
            n_rows n_cols]`.
        nulls: mean null of each measure, `[n_measures k]`.
        spreads_of_mean: standard deviation of a prompt's mean over pairs of different
            connections (all pairs where none differ), `[n_measures k]`.

    Example:
        >>> mean = tlc.mean_depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=4)
        >>> mean.spread(2).shape, mean.n_prompts
        (torch.Size([2, 2]), 4)
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
        """The mean over maps of the same connections, one for each prompt. An iterator
        is read one map at a time.

        Raises:
            ValueError: no map; maps of different models, layers, positions, k or
                orientation; a mean among them.

        Example:
            >>> traces = (tlc.trace(model, prompt) for prompt in ("w3 w14 w15", "w9 w2 w6 w5"))
            >>> result = tlc.comparisons.MeanCouplingMap.over(tlc.depth_coupling(trace, k=4) for trace in traces)
            >>> result.coupling(2).shape, result.spread(2).shape, result.n_prompts
            (torch.Size([2, 2]), torch.Size([2, 2]), 2)
        """
        prompts: list[Any] = []
        remarks: dict[str, None] = {}
        for n, result in enumerate(maps, start=1):
            if not isinstance(result, CouplingMap) or isinstance(
                result, MeanCouplingMap
            ):
                raise ValueError(
                    f"wanted the coupling map of one prompt, got {type(result).__name__}"
                )
            this, values = _facts(result), _values(result)
            if n == 1:
                common, means = (
                    this,
                    {name: torch.zeros_like(x) for name, x in values.items()},
                )
                squares = {
                    name: torch.zeros_like(values[name])
                    for name in ("means", "of_mean")
                }
            for what in (*_OF_TRACE, "normalising_layers", *_OF_MAP):
                if (one := common.get(what)) != (other := this.get(what)):
                    raise ValueError(
                        f"the maps must have the same {what}, got {one!r} and {other!r}"
                    )
            digests = {common.get("weights_digest"), this.get("weights_digest")} - {
                None
            }
            # Maps of earlier versions, and of streamed models, do not say.
            if len(digests) > 1:
                raise ValueError(
                    f"the maps must be of one model, got two of different weights, both called {this.get('model')!r}: "
                    "take the mean of each alone, and give each a `label` of its own"
                )
            common = {
                key: value
                for key, value in common.items()
                if key in this and this[key] == value
            }
            prompts.append(result.provenance.get("prompt"))
            remarks |= dict.fromkeys(result.provenance.get("remarks", ()))
            # Welford's update: one pass, and no difference of large sums.
            for name, x in values.items():
                deviation = x - means[name]
                means[name] += deviation / n
                if name in squares:
                    squares[name] += deviation * (x - means[name])
        if not prompts:
            raise ValueError(
                "there are no maps to take the mean of: wanted at least one"
            )
        positions = common.get("positions", common.get("positions from the end"))
        if positions is None:
            raise ValueError(
                "the maps must be of the same positions, counted from the beginning or from the end"
            )
        provenance = {
            key: value for key, value in common.items() if key in result.provenance
        }
        provenance |= {"prompts": prompts, "remarks": list(remarks)}
        means["spreads"], means["spreads_of_mean"] = (
            (total / (n - 1)).sqrt() for total in squares.values()
        )
        del means["of_mean"]
        of_all = vars(result) | dict(
            zip(("row_positions", "col_positions"), positions, strict=True)
        )
        return cls(
            **of_all
            | {name: x.to(result.matrices) for name, x in means.items()}
            | {"provenance": provenance}
        )

    @checked
    def values(
        self, k: int | None = None, measure: Measure = "coupling", **options: Any
    ) -> PerPair:
        """Mean over the prompts of a measure, for every pair."""
        return self._kept(self.means, k, measure, options)

    @checked
    def spread(self, k: int | None = None, measure: Measure = "coupling") -> PerPair:
        """Standard deviation over the prompts of a measure, for every pair."""
        return self._kept(self.spreads, k, measure, {})

    @checked
    def spread_of_mean(
        self, k: int | None = None, measure: Measure = "coupling"
    ) -> float:
        """Standard deviation over the prompts of their `mean(k, measure)`."""
        return float(self._kept(self.spreads_of_mean, k, measure, {}))

    def _nulls(
        self, k: int, measure: Measure, within: Null, options: dict[str, Any]
    ) -> Float[Tensor, "n_rows n_cols"]:
        if within != "space":
            raise ValueError(
                f"a mean over prompts holds the null 'space' only, got within={within!r}: ask map by map"
            )
        return (
            self._kept(self.nulls, k, measure, options)
            .cpu()
            .expand(self.matrices.shape[:2])
        )

    def to_dataset(self) -> "xarray.Dataset":
        """The result as an `xarray.Dataset`, with the measures by name and k from 1."""
        return (
            super()
            .to_dataset()
            .assign_coords(measure=list(MEASURES), k=list(range(1, self.k + 1)))
        )

    def _kept(
        self, kept: Tensor, k: int | None, measure: Measure, options: dict[str, Any]
    ) -> Tensor:
        asked = {"p": 2, "absolute": False} | options
        if measure == "spectral_miscoupling" and asked in RELEASED.values():
            measure, options = (
                next(name for name, one in RELEASED.items() if one == asked),
                {},
            )
        if options and (
            measure != "spectral_miscoupling" or asked != {"p": 2, "absolute": False}
        ):
            held = "p=2 and absolute=False, and p=1 or p=2 with absolute=True"
            raise ValueError(
                f"a mean over prompts holds {held}, got {options}: measure map by map"
            )
        if (which := MEASURES.index(measure)) >= len(kept):
            raise ValueError(
                f"this mean was saved by an earlier version, without {measure!r}: measure again"
            )
        return kept[which, self._k(k) - 1]


def _facts(result: CouplingMap) -> dict[str, Any]:
    """What maps over which a mean is taken may or must have in common."""
    n_tokens = len(result.provenance.get("tokens", ()))
    positions = result.row_positions, result.col_positions
    from_the_end = tuple(tuple(t - n_tokens for t in side) for side in positions)
    own = {what: getattr(result, what) for what in _OF_MAP}
    # Maps of earlier versions do not say: they compared block(X) − X.
    layers = {*result.row_layers, *result.col_layers}
    own["normalising_layers"] = sorted(
        layers & set(result.provenance.get("normalising_layers", ()))
    )
    return (
        result.provenance
        | own
        | {"positions": positions, "positions from the end": from_the_end}
    )


def _values(result: CouplingMap) -> dict[str, Tensor]:
    """What is averaged: `|A|` and J_1's spectra, and for every k each measure, its
    null, and its mean over pairs.
    """
    rows = zip(result.matrices, result.singular_values, strict=True)
    values = torch.stack([measures.measures_at_every_k(A, S_1) for A, S_1 in rows], 2)
    others = ~result.own_pairs() if not result.own_pairs().all() else result.own_pairs()
    nulls = measures.nulls_at_every_k(
        result.singular_values.cpu(), result.frobenius_norms.cpu(), result.d_model
    )
    return {
        "matrices": result.matrices.abs(),
        "singular_values": result.singular_values,
        "frobenius_norms": result.frobenius_norms,
        "means": values,
        "of_mean": values[..., others].nanmean(-1),
        "nulls": nulls[..., None]
        .expand(values.shape)[..., others.cpu()]
        .nanmean(-1)
        .to(values),
    }
