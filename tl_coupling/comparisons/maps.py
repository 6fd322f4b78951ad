"""The result of comparing connections of one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.comparisons.null_means import (
    ROUNDING,
    Chance,
    Connection,
    draws_in_spans,
    draws_needed,
    draws_of_rows,
    means_of_comparisons,
    means_of_draws,
    quantile_interval,
    rise_together,
)
from tl_coupling.measures import (
    MEASURES,
    AnyMeasure,
    Measure,
    Norm,
    Null,
    Orientation,
    measure_named,
    measures_of_map,
    nulls_at_every_k,
    random_subspace_null,
    rotation_null,
    seeded,
)
from tl_coupling.results import (
    RANDOM_SUBSPACES,
    SEQUENTIAL,
    Saved,
    ShortTable,
    changes_in_words,
    plural,
    small_map_html,
)
from tl_coupling.spectra import check_k
from tl_coupling.statistics import Interval

if TYPE_CHECKING:
    import pandas
    import xarray

PerPair = Float[Tensor, "n_rows n_cols"]
# Measures that are saved and tabulated for every pair at every k.
_TABULATED = ("coupling", "normalized_miscoupling", "null")
# The number of singular vectors that a short table shows, beside the largest, and that
# of the small picture below it.
_SHOWN_K = 10
# `p` and `absolute`, as keywords of a public method.
Options = Mapping[str, Any]


class CoupledPair(NamedTuple):
    """Two connections of a map.

    Attributes:
        jacobian_of: layer and position of J_1.
        vectors_of: layer and position of J_2, whose singular vectors J_1 is seen in.
        value: of the measure that was asked for.

    Example:
        >>> pair = tlc.depth_coupling(trace, k=4).strongest(1)[0]
        >>> sorted([pair.jacobian_of, pair.vectors_of])
        [(0, 7), (1, 7)]
    """

    jacobian_of: Connection
    vectors_of: Connection
    value: float


@made_by("depth_coupling(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class CouplingMap(Saved):
    """Coupling matrices of every pair of compared connections, at the largest k.

    Every smaller k is a slice of them.

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
        "row_layers": "row",
        "row_positions": "row",
        "col_layers": "col",
        "col_positions": "col",
    }

    @property
    def k(self) -> int:
        """The largest k that can be asked for."""
        return self.matrices.shape[-1]

    @property
    def n_prompts(self) -> int:
        """How many prompts the values are a mean over."""
        return len(self.provenance.get("prompts", [None]))

    @property
    def is_mean_over_tokens(self) -> bool:
        """Whether the values are a mean over tokens, of one prompt or of each."""
        position = self.provenance.get("position", -1)
        return self.kind == "depth" and not isinstance(position, int)

    @checked
    def at(self, k: int | None = None) -> Float[Tensor, "n_rows n_cols k k"]:
        """Return the coupling matrices for the top k singular vectors.

        They are a corner of `matrices`; `None` gives all of it.
        """
        k = self._k(k)
        return self.matrices[..., :k, :k]

    @checked
    def values(
        self, k: int | None = None, measure: AnyMeasure = "coupling", **options: Any
    ) -> PerPair:
        """Return a measure of every pair.

        `options` (`p`, `absolute`) are those of `spectral_miscoupling`. In the place of
        a name, here and wherever a measure is asked for, a function of one's own is
        taken: `A, S ↦ value`, with A of shape `[*batch k k]` and S, the k largest
        singular values of each J_1, `[*batch k]`; it returns `[*batch]`. Both have the
        dtype and the device of the map, or are float64, for nulls and means. A value
        that is not finite is undefined, NaN, with a warning.

        Example:
            >>> def trace_share(A, S):
            ...     return A.diagonal(dim1=-2, dim2=-1).sum(-1) / S.sum(-1)
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> result.values(2, trace_share).diagonal()  # of a layer with itself
            tensor([1.0000, 1.0000])
        """
        A = self.at(k)
        named_measure = measure_named(measure, **options)
        return named_measure.value(A, self.singular_values[:, None])

    @checked
    def coupling(self, k: int | None = None) -> PerPair:
        """Return `1 − m̃(A)` of every pair.

        1 where J_2's vectors diagonalise J_1, `1 − √(1 − 1/k)` for random subspaces.
        """
        return self.values(k)

    @checked
    def miscoupling(self, k: int | None = None) -> PerPair:
        """Return `m(A)` of every pair; see `tl_coupling.miscoupling`."""
        return self.values(k, "miscoupling")

    @checked
    def normalized_miscoupling(self, k: int | None = None) -> PerPair:
        """Return `m̃(A)` of every pair; see `tl_coupling.normalized_miscoupling`."""
        return self.values(k, "normalized_miscoupling")

    @checked
    def spectral_miscoupling(
        self, k: int | None = None, p: Norm = 2, absolute: bool = False
    ) -> PerPair:
        """Return `m_K` of every pair; see `tl_coupling.spectral_miscoupling`.

        The authors' code has `absolute=True`.
        """
        return self.values(k, "spectral_miscoupling", p=p, absolute=absolute)

    @checked
    def captured_energy(self, k: int | None = None) -> PerPair:
        """Return the captured energy of every pair; see `tl_coupling.captured_energy`."""
        return self.values(k, "captured_energy")

    @checked
    def mean(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        off_diagonal: bool = True,
        **options: Any,
    ) -> float:
        """Return the mean of a measure over the pairs.

        `off_diagonal` leaves out the pairs of a connection with itself. Aubry et al.
        2025 (section 5.4) take all pairs, `off_diagonal=False`. Of a map of L layers
        with mean coupling c that is `c + (1 − c) / L`, which depends on the depth of
        the model, and so is not the default.

        Pairs where the measure is undefined are left out, with a warning that says how
        many; NaN if all are.
        """
        values = self.values(k, measure, **options)
        name = measure_named(measure).name
        return mean_over_pairs(values, self.own_pairs(), name, off_diagonal)

    @checked
    def null(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        **options: Any,
    ) -> float:
        """Return what `mean` would be with random singular vectors in place of J_2's.

        Of each pair it is the root mean square over random vectors, in closed form: for
        coupling `1 − √(1 − 1/k)`, somewhat below the mean (by an eighth at k = 2);
        `null_interval` has the mean inside. A function of one's own has no closed form:
        its null is the mean of 400 draws, the same at each call. With
        `off_diagonal=False` pairs of a connection with itself keep their values: chance
        has no part in them.

        Args:
            within: what stays random: all directions, `"space"`; or those within the
                spans of J_2's own top vectors, left and right by themselves, `"spans"`,
                or turned alike, `"pairs"`. See `measures.rotation_null`.
            k, measure, off_diagonal, options: as in `mean`.
        """
        nulls = self._nulls(self._k(k), measure, within, options)
        own = self.own_pairs().cpu()
        if not off_diagonal:
            own_values = self.values(k, measure, **options).cpu().to(nulls)
            return float(nulls.where(~own, own_values).nanmean())
        # A map of one connection has no other pairs: its null is that of its own.
        left_to_chance = nulls if own.all() else nulls[~own]
        return float(left_to_chance.nanmean())

    @checked
    def null_interval(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        n_draws: Count | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> Interval:
        """Return where 95 % of `mean` would lie if J_2's singular vectors were random.

        The Jacobians J_1 are held fixed. The vectors of J_2 are drawn, those of each
        column by themselves, and the draws moved to where the closed form says that
        they lie: they say how much the mean spreads, and the mean of what was drawn is
        not in it. Pairs of one column share its vectors: within J_2's spans they are
        rotated together. In the whole space what they have in common is not known from
        the spectra of the J_1, so the values of a column are taken to rise and fall
        together, and so are the prompts of a mean: the frames of one model may be the
        same on all. Of two layers, so are the two columns, which compare the same
        frames. The interval is then as wide as it can be, or wider.

        Args:
            n_draws: for each column; these are combined anew thousands of times. By
                default as many as leave the ends known to a twentieth of the width.
            k, measure, off_diagonal, within, options: as in `null`.

        Raises ValueError where every pair compares a connection with itself.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> low, high = result.null_interval()
            >>> low < result.null() < high
            True
        """
        chance = self.chance(
            k,
            measure,
            off_diagonal=off_diagonal,
            within=within,
            n_draws=n_draws,
            seed=seed,
            **options,
        )
        return chance.interval

    @checked
    def null_p(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        n_draws: Count | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> float:
        r"""Return how likely random singular vectors of J_2 give this `mean` or a larger
        one.

        .. math:: p = \frac{1 + \#\{\text{random means} \ge \text{mean}\}}
            {1 + \#\{\text{random means}\}}

        The test of `chance`: one-sided, of the means that `null_interval` has the middle
        95 % of. There are thousands of them: p is never below .0001, nor below what
        their draws know where columns share them (.0012 of two layers), and not
        corrected for how many k or measures were looked at. NaN where the mean is.

        Args:
            k, measure, off_diagonal, within, n_draws, seed, options: as in
                `null_interval`.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> 0.0001 < result.null_p() <= 1
            True
        """
        chance = self.chance(
            k,
            measure,
            off_diagonal=off_diagonal,
            within=within,
            n_draws=n_draws,
            seed=seed,
            **options,
        )
        return chance.p

    @checked
    def null_p_by_pair(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        n_draws: Count = 2000,
        seed: Seed = 0,
        **options: Any,
    ) -> Float[Tensor, "n_rows n_cols"]:
        r"""Return how likely random singular vectors of J_2 give each pair its value or a
        larger one.

        .. math:: p = \frac{1 + \#\{\text{draws} \ge \text{value}\}}{1 + \#\{\text{draws}\}}

        The null "space" of `null_interval`, of each pair by itself, and not corrected
        for their number: `statistics.holm` does that. Pairs are not independent. NaN for
        pairs of a connection with itself, where nothing is left to chance, and where
        the value is undefined. A mean over prompts is taken to spread as one prompt.

        Args:
            n_draws: p is never below `1 / (1 + n_draws)`. Holm's correction of n pairs
                needs n / .05 draws to call one of them significant at 5 %.
            k, measure, seed, options: as in `null_interval`.

        Cost: as `chance`, for each draw: 8 s for 20,000 draws at d_model = 576, k = 10.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> p = result.null_p_by_pair()
            >>> bool(p[0, 0].isnan()), 1 / 2001 <= float(p[0, 1]) <= 1
            (True, True)
        """
        k = self._k(k)
        nulls = self._nulls(k, measure, "space", options)
        named_measure = measure_named(measure, **options)
        draws = self._draws_of_rows(named_measure, k, n_draws, nulls, seeded(seed))
        values = self.values(k, measure, **options).cpu().double()
        # What is as large but for rounding is as large, as in `Chance`.
        least = values - ROUNDING * values.abs()
        # Draws of a row ascend.
        n_below = torch.searchsorted(draws.mT.contiguous(), least.contiguous())
        p = (1 + n_draws - n_below).double() / (1 + n_draws)
        is_undefined = (
            self.own_pairs().cpu() | values.isnan() | draws.isnan().any(0)[:, None]
        )
        return p.where(~is_undefined, torch.nan)

    @checked
    def chance(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
        within: Null = "space",
        n_draws: Count | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> Chance:
        """Return `null_interval` and `null_p` of the same draws, in one object.

        The hypothesis is that the singular vectors of every J_2 are Haar-random (or,
        within spans, turned at random) and know nothing of the Jacobians J_1, which are
        held fixed; the statistic is `mean`. A small p says that J_2's own vectors are
        no such vectors. It does not say that coupling was learned, which an untrained
        twin is for.

        Prompts of a mean are not counted as draws of that hypothesis: the same weights
        stand behind all of them. Their values are taken to rise and fall together, as
        those of one prompt do, so that p does not become smaller by their number. It
        is of these prompts; what others would give, `interval` says.

        Args:
            k, measure, off_diagonal, within, n_draws, seed, options: as in
                `null_interval`.

        Raises ValueError where every pair compares a connection with itself.

        Cost: two QR decompositions of `[d_model, k]` a draw, whatever the number of
        prompts; some 400 draws by default, 1.5 s for d_model = 576 and k = 50. Within
        spans two rotations of every A a draw; in a mean they are already drawn.

        Example:
            >>> chance = tlc.depth_coupling(trace, k=4).chance(2)
            >>> low, high = chance.interval
            >>> low < high, 0.0001 < chance.p <= 1
            (True, True)
        """
        k = self._k(k)
        # Refuses what a mean over prompts does not hold.
        nulls = self._nulls(k, measure, within, options)
        named_measure = measure_named(measure, **options)
        different = ~self.own_pairs().cpu()
        generator = seeded(seed)
        together = False
        if within == "space":
            n_draws = n_draws or draws_needed(different.shape[1], within)
            row_draws = self._draws_of_rows(named_measure, k, n_draws, nulls, generator)
            draws = row_draws.nanmean(1, keepdim=True)
            together = rise_together(*self._connections(), different)
        else:
            draws = self._draws_in_spans(
                named_measure, k, nulls, within, n_draws, generator
            )
        means = means_of_draws(draws, different, generator, together=together)
        if not off_diagonal:
            values = self.values(k, measure, **options).cpu()
            own_values = values[~different].double()
            # The mean over all pairs: what is left to chance, and the own pairs as
            # measured.
            means = (means * different.sum() + own_values.nansum()) / different.numel()
        has_one_draw = together or int(different.any(0).sum()) == 1
        n_different_means = len(draws) if has_one_draw else len(means)
        measured = self.mean(k, measure, off_diagonal, **options)
        return Chance.from_means(means, measured, n_different_means)

    def _draws_in_spans(
        self,
        measure: Measure,
        k: int,
        nulls: PerPair,
        within: Null,
        n_draws: int | None,
        generator: torch.Generator,
    ) -> Float[Tensor, "n n_cols"]:
        """Return the mean of each column, with its vectors turned within their spans."""
        different = ~self.own_pairs().cpu()
        (draws,) = draws_in_spans(
            [measure],
            self.at(k).cpu().double(),
            self.singular_values.cpu().double(),
            nulls.double()[None],
            different,
            n_draws or draws_needed(different.shape[1], within),
            generator,
            paired=within == "pairs",
        )
        return draws

    @checked
    def null_interval_by_distance(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        n_draws: Count | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> Float[Tensor, "n_distances 2"]:
        """Return where 95 % of `locality_profile` would lie with random vectors.

        The null "space" of `null_interval`, for distances 0, 1, … each by itself. Pairs
        of one distance that are of different layers are independent: they join layers
        `l`, `l + d`, `l + 2d`, …, and the frames along such a chain have independent
        angles. Both orders of a pair are taken to rise and fall together. NaN for
        distance 0, where nothing is left to chance, and where no pair is that far
        apart.

        Args:
            n_draws: for each Jacobian, combined anew thousands of times; by default
                those of `null_interval`.
            k, measure, options: as in `null`.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> low, high = result.null_interval_by_distance()[1]
            >>> bool(low < result.null() < high)
            True
        """
        k = self._k(k)
        named_measure = measure_named(measure, **options)
        nulls = self._nulls(k, measure, "space", options)
        generator = seeded(seed)
        n_draws = n_draws or draws_needed(nulls.shape[1], "space")
        draws = self._draws_of_rows(named_measure, k, n_draws, nulls, generator)
        distances = self._distances()
        intervals = torch.full((int(distances.max()) + 1, 2), torch.nan).double()
        for distance in distances[distances > 0].unique().tolist():
            means = means_of_comparisons(
                draws, *self._connections(), distances == distance, generator
            )
            intervals[distance] = torch.tensor(quantile_interval(means))
        return intervals

    def _draws_of_rows(
        self,
        measure: Measure,
        k: int,
        n_draws: int,
        nulls: PerPair,
        generator: torch.Generator,
    ) -> Float[Tensor, "n n_rows"]:
        """Return `draws_of_rows`, moved to the nulls of the pairs."""
        return draws_of_rows(
            measure,
            k,
            n_draws,
            self.d_model,
            self.singular_values.cpu().double(),
            self.frobenius_norms.cpu(),
            # In the whole space the null depends on J_1 alone: one column has them all.
            nulls[:, 0].double(),
            generator,
        )

    def _connections(self) -> tuple[list[Connection], list[Connection]]:
        """Return the layers and positions of rows and columns."""
        rows = list(zip(self.row_layers, self.row_positions, strict=True))
        cols = list(zip(self.col_layers, self.col_positions, strict=True))
        return rows, cols

    def _distances(self) -> Int[Tensor, "n_rows n_cols"]:
        """Return how many layers the two of each pair are apart."""
        if self.kind != "depth":
            raise ValueError(
                "distances are of layers, and this map is of tokens: group "
                "`to_dataframe()` by `row_position` and `col_position`"
            )
        row_layers = torch.tensor(self.row_layers)
        col_layers = torch.tensor(self.col_layers)
        return (row_layers[:, None] - col_layers).abs()

    def _nulls(
        self, k: int, measure: AnyMeasure, null_kind: Null, options: Options
    ) -> PerPair:
        """Return the null of every pair, on the CPU."""
        # A null that is not known would be left out of means as one that is undefined.
        self.check_finite()
        S_1 = self.singular_values.cpu()
        if null_kind != "space":
            A = self.at(k).cpu()
            paired = null_kind == "pairs"
            # Rows are the J_1: every column of a row has the same singular values.
            return rotation_null(A, S_1[:, None], measure, paired=paired, **options)
        row_nulls = random_subspace_null(
            k,
            measure,
            d_model=self.d_model,
            S_1=S_1,
            frobenius_norm=self.frobenius_norms.cpu(),
            **options,
        )
        # A measure whose null is the same for every J_1 has one number for all rows.
        # One row of nulls serves all columns: frames of the null do not depend on them.
        return row_nulls.expand(len(S_1))[:, None].expand(self.matrices.shape[:2])

    @checked
    def strongest(
        self, n: Count = 10, k: int | None = None, measure: AnyMeasure = "coupling"
    ) -> list[CoupledPair]:
        """Return the n pairs of different connections with the largest values.

        They are coupled most, unless the measure is of miscoupling. Values that are
        undefined (NaN) are left out. Of many pairs the largest is large by chance as
        well: compare it with that of an untrained twin.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> pair = result.strongest(1)[0]
            >>> pair.value == float(result.coupling()[pair.jacobian_of[0], pair.vectors_of[0]])
            True
        """
        values = self.values(k, measure).cpu()
        is_counted = ~self.own_pairs().cpu() & ~values.isnan()
        # Below any value, so that pairs that do not count are never among the n.
        counted_values = values.where(is_counted, -torch.inf).flatten()
        n_pairs = min(n, int(is_counted.sum()))
        places = counted_values.topk(n_pairs).indices.tolist()
        rows, cols = self._connections()
        n_cols = values.shape[1]
        return [
            CoupledPair(
                rows[place // n_cols],
                cols[place % n_cols],
                float(counted_values[place]),
            )
            for place in places
        ]

    @checked
    def locality_profile(
        self, k: int | None = None, measure: AnyMeasure = "coupling", **options: Any
    ) -> Float[Tensor, " n_distances"]:
        """Return the mean of a measure over pairs of layers `|l − l'|` apart.

        For distances 0, 1, … to the largest; NaN where no pair of the chosen layers is
        that far apart. Of all L layers, 2 (L − d) pairs are d > 0 apart; at distance 0
        each layer is compared with itself.

        Raises ValueError for a map of tokens: its table has `row_position` and
        `col_position`.

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> by_hand = (result.coupling()[0, 1] + result.coupling()[1, 0]) / 2
            >>> torch.allclose(result.locality_profile()[1], by_hand)
            True
        """
        values = self.values(k, measure, **options)
        distances = self._distances().to(values.device)
        means = [
            # The mean over no pair is NaN.
            values[distances == distance].mean()
            for distance in range(int(distances.max()) + 1)
        ]
        return torch.stack(means)

    @checked
    def profile(
        self,
        layer: int,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        of: Literal["jacobian", "vectors"] = "jacobian",
        **options: Any,
    ) -> Float[Tensor, " n_layers"]:
        """Return a measure of one layer with every other layer; NaN with itself.

        In the order of `col_layers`, or of `row_layers` for `of="vectors"`.

        Args:
            layer: which one; negative ones are no layers of a map.
            of: "jacobian" for this layer's Jacobian in the singular vectors of every
                layer, a row; "vectors" for every layer's Jacobian in its singular
                vectors, a column.
            k, measure, options: as in `values`.

        Raises:
            ValueError: a layer that the map does not have, or has more than once
                (tokens).

        Example:
            >>> result = tlc.depth_coupling(trace, k=4)
            >>> result.profile(0).shape, result.profile(0).isnan().tolist()
            (torch.Size([2]), [True, False])
        """
        layers = self.row_layers if of == "jacobian" else self.col_layers
        # A map of tokens has the same layer in every row, and so no profile.
        if layers.count(layer) != 1:
            side = "rows" if of == "jacobian" else "columns"
            raise ValueError(
                f"`layer` must be one of the layers of the map's {side}, each of which "
                f"has one, got {layer}; there are {sorted(set(layers))}"
            )
        values = self.values(k, measure, **options)
        values = values.where(~self.own_pairs(), torch.nan)
        place = layers.index(layer)
        return values[place] if of == "jacobian" else values[:, place]

    @checked
    def to_dataset(self) -> "xarray.Dataset":
        """Return the result as an `xarray.Dataset`: what `save` writes.

        Beside the matrices it has `coupling`, `normalized_miscoupling` and `null` of
        every pair at every k, `[k row col]`, with layers and positions as coordinates:
        a saved file can be read without this package. Whatever is not an array is an
        attribute (the provenance as JSON). Matrices that are not finite have no
        measure: then there are the matrices alone.

        Example:
            >>> data = tlc.depth_coupling(trace, k=4).to_dataset()
            >>> data["coupling"].sel(k=2).shape
            (2, 2)
        """
        dataset = super().to_dataset()
        if not self._is_finite():
            return dataset
        dataset = dataset.assign_coords(k=list(range(1, self.k + 1)))
        values = {
            name: (["k", "row", "col"], pair_values.cpu().numpy())
            for name, pair_values in self._values_at_every_k().items()
        }
        return dataset.assign(values)

    @checked
    def to_dataframe(self, ks: Sequence[int] | None = None) -> "pandas.DataFrame":
        """Return a tidy table: one row for each k and pair.

        Columns are `k`, `row_layer`, `row_position`, `col_layer`, `col_position`,
        `coupling`, `normalized_miscoupling`, `null`, and `model` and `prompt`. A map of
        tokens has their texts as well, `row_token` and `col_token`.

        Args:
            ks: numbers of singular vectors; all that the map holds by default.

        Example:
            >>> table = tlc.depth_coupling(trace, k=4).to_dataframe([2, 4])
            >>> len(table), round(float(table["null"].min()), 3)
            (8, 0.134)
        """
        # These are coordinates of the dataset, and become columns of the table.
        names = ["row_layer", "row_position", "col_layer", "col_position"]
        self.check_finite()
        data = self.to_dataset()
        if ks is not None:
            data = data.sel(k=[self._k(k) for k in ks])
        columns = [*_TABULATED, *names]
        table = data.reset_coords()[columns].to_dataframe().reset_index()
        table = table[["k", *names, *_TABULATED]]
        str_tokens = self.provenance.get("str_tokens")
        # One token has one text, which a map of layers would repeat.
        if str_tokens and self.kind != "depth":
            for side in ("row", "col"):
                positions = table[f"{side}_position"]
                table[f"{side}_token"] = [str_tokens[place] for place in positions]
        return table.assign(
            model=self.provenance.get("model"), prompt=self.provenance.get("prompt")
        )

    @checked
    def table(
        self,
        ks: Sequence[int] | None = None,
        *,
        off_diagonal: bool = True,
        null_intervals: Mapping[int, Interval] | None = None,
        chances: Mapping[int, Chance] | None = None,
    ) -> ShortTable:
        """Return the mean coupling at some k, beside the null and its p.

        Args:
            ks: numbers of singular vectors; by default 10 and all that the map holds.
                1 says nothing, and is shown only if it is given.
            off_diagonal: leaves out the pairs of a connection with itself.
            null_intervals: what `null_interval` gave, by k, for the caption; those of
                `chances` by default.
            chances: what `chance` gave, by k; drawn by default. With none, `{}`, the
                table says no p.

        Cost: that of `chance`, for each k.

        Example:
            >>> print(tlc.depth_coupling(trace, k=4).table([2]))
            local/tiny: depth coupling 1 − m̃, mean over pairs of different layers
            k  coupling   null
            2     0.170  0.293
            2 layers, 1 prompt
            95 % of random subspaces: 0.006 to 0.814 (k = 2)
            null: random subspaces
            p of so large a mean: 0.69 (k = 2); random subspaces, one-sided
        """
        if ks is None:
            ks = sorted({min(_SHOWN_K, self.k), self.k})
        # A map of one connection has its own pair only.
        has_other_pairs = not bool(self.own_pairs().all())
        off_diagonal = off_diagonal and has_other_pairs
        # And leaves nothing to chance.
        if chances is None and has_other_pairs:
            chances = {k: self.chance(k, off_diagonal=off_diagonal) for k in ks}
        chances = chances or {}
        rows = [
            (
                k,
                self._mean_in_words(k, off_diagonal),
                f"{self.null(k, off_diagonal=off_diagonal):.3f}",
            )
            for k in ks
        ]
        changes = changes_in_words(self.provenance)
        subject = " ".join([f"{self.kind} coupling", *changes])
        title = (
            f"{self.provenance.get('model')}: {subject} 1 − m̃, mean over "
            f"{self._pairs_in_words(off_diagonal)}"
        )
        lines = [self._size_in_words()]
        if 1 in ks:
            lines.append(
                "k = 1 says nothing: a 1 × 1 matrix is diagonal, coupling is 1"
            )
        intervals = null_intervals or {k: chances[k].interval for k in chances}
        if intervals:
            texts = [
                f"{low:.3f} to {high:.3f} (k = {k})"
                for k, (low, high) in intervals.items()
            ]
            lines.append(f"95 % of {RANDOM_SUBSPACES}: {', '.join(texts)}")
        lines.append(f"null: {RANDOM_SUBSPACES}")
        if chances:
            lines.append(
                f"p of so large a mean: {p_in_words(chances)}; {self._test_in_words()}"
            )
        caption = "\n".join(lines)
        return ShortTable.of(title, [], ["k", "coupling", "null"], rows, caption)

    def _small_picture(self) -> str:
        """Return the map of coupling at k = 10, or at the largest k below, as HTML."""
        k = min(_SHOWN_K, self.k)
        own = self.own_pairs()
        values = self.coupling(k)
        # A map of one connection has its own pair only.
        different = values if own.all() else values.where(~own, torch.nan)
        # 1 for a map in which nothing is coupled, or defined.
        top = float(different.nan_to_num(0).max()) or 1.0
        side = "layer" if self.kind == "depth" else "token"
        caption = (
            f"coupling of every pair at k = {k}, from 0 (dark) to {top:.3f} (bright); "
            f"row: {side} of J₁; column: {side} of the singular vectors; grey: a {side} "
            "with itself, or undefined"
        )
        pixels = different.detach().cpu().double().numpy()
        return small_map_html(pixels, (0.0, top), SEQUENTIAL, caption)

    def _test_in_words(self) -> str:
        """Return which test gives p."""
        return f"{RANDOM_SUBSPACES}, one-sided"

    def _mean_in_words(self, k: int, off_diagonal: bool) -> str:
        """Return the mean coupling as `table` shows it."""
        return f"{self.mean(k, off_diagonal=off_diagonal):.3f}"

    def _size_in_words(self) -> str:
        """Return how many layers or tokens, and prompts, a table is of."""
        noun = "layer" if self.kind == "depth" else "token"
        size = plural(len(self.row_layers), noun)
        return f"{size}, {plural(self.n_prompts, 'prompt')}"

    def _pairs_in_words(self, off_diagonal: bool) -> str:
        """Return which pairs a mean is over."""
        if self.kind == "depth":
            return describe_pairs(not off_diagonal)
        return "pairs of different tokens" if off_diagonal else "all pairs of tokens"

    def _values_at_every_k(self) -> dict[str, Float[Tensor, "k n_rows n_cols"]]:
        """Return each of `_TABULATED`, of every pair at every k."""
        values = measures_of_map(self.matrices, self.singular_values)
        nulls = nulls_at_every_k(
            self.singular_values.cpu(), self.frobenius_norms.cpu(), self.d_model
        )
        # Nulls are `[n_measures k n_rows]`, the same for every column.
        return _tabulated_values(values, nulls[..., None].expand(values.shape))

    def check_finite(self) -> None:
        """Raise ValueError for a map with NaN or infinite entries, which has no measures."""
        if not self._is_finite():
            raise ValueError(
                "the map has NaN or infinite entries, in its matrices, singular values or "
                "norms: it has no measure"
            )

    def _is_finite(self) -> bool:
        tensors = (self.matrices, self.singular_values, self.frobenius_norms)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def own_pairs(self) -> Bool[Tensor, "n_rows n_cols"]:
        """Say which pairs compare a connection with itself.

        They are the diagonal of a depth map.
        """
        device = self.matrices.device
        # A connection is named by its layer and position, `[2 n_rows]`.
        rows = torch.tensor((self.row_layers, self.row_positions), device=device)
        cols = torch.tensor((self.col_layers, self.col_positions), device=device)
        is_same = rows[:, :, None] == cols[:, None, :]
        # Layer and position.
        return is_same.all(0)

    def _summary(self) -> str:
        n_rows, n_cols = self.matrices.shape[:2]
        # A single connection meets itself alone, and has a mean over that pair only.
        has_other_pairs = not bool(self.own_pairs().all())
        changes = "".join(f"{words}, " for words in changes_in_words(self.provenance))
        return (
            f"{self.kind}, {n_rows}×{n_cols} pairs, {self.orientation}, {changes}k≤{self.k}, "
            f"n_prompts={self.n_prompts}; at k={self.k}: "
            f"mean coupling {self.mean(off_diagonal=has_other_pairs):.3f}, "
            f"null {self.null():.3f}"
        )

    def _k(self, k: int | None) -> int:
        """Return k, by default the largest; ValueError for one that is not held."""
        k = self.k if k is None else k
        check_k(k, self.k, self.d_model)
        return k


def _tabulated_values(
    values: Float[Tensor, "n_measures k n_rows n_cols"],
    nulls: Float[Tensor, "n_measures k n_rows n_cols"],
) -> dict[str, Float[Tensor, "k n_rows n_cols"]]:
    """Return each of `_TABULATED` from all measures and their nulls."""
    names = list(MEASURES)
    coupling = names.index("coupling")
    return {
        "coupling": values[coupling],
        "normalized_miscoupling": values[names.index("normalized_miscoupling")],
        "null": nulls[coupling],
    }


def p_in_words(chances: Mapping[int, Chance]) -> str:
    """Return the p of each k, as a caption has them."""
    return ", ".join(f"{chance.p:.2g} (k = {k})" for k, chance in chances.items())


def describe_pairs(diagonal: bool) -> str:
    """Say which pairs of layers: all of them, or different ones."""
    if diagonal:
        return "all pairs of layers, l = l' among them"
    return "pairs of different layers"


def mean_over_pairs(
    values: PerPair,
    own_pairs: Bool[Tensor, "n_rows n_cols"],
    name: str,
    off_diagonal: bool,
) -> float:
    """Return the mean of a value of every pair, as `CouplingMap.mean` does.

    Args:
        values: of every pair.
        own_pairs: which pairs compare a connection with itself.
        name: what the values are, for a warning.
        off_diagonal: whether those pairs are left out.
    """
    if off_diagonal:
        values = values[~own_pairs]
        if not len(values):
            raise ValueError(
                "every pair here compares a connection with itself: "
                "use `off_diagonal=False`"
            )
    n_undefined = int(values.isnan().sum())
    if n_undefined:
        result = "NaN"
        if n_undefined < values.numel():
            result = "the mean is over the others"
        # Of the user's own function the reason is not known.
        reason = ", where A or S_1 is 0" if name in MEASURES else ""
        warn_caller(
            f"{name} is undefined for {n_undefined} of {values.numel()} pairs{reason}: "
            f"{result}"
        )
    return float(values.nanmean())
