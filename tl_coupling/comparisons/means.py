"""The mean over prompts of maps of the same connections."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.comparisons.maps import CouplingMap, Options, PerPair
from tl_coupling.comparisons.null_means import draws_in_spans, draws_needed
from tl_coupling.measures import (
    MEASURES,
    OWN_MEASURES,
    AnyMeasure,
    Measure,
    Null,
    OwnMeasure,
    facts_of_own,
    measure_named,
    measures_of_map,
    nulls_at_every_k,
    own_measures,
    rotation_null,
    seeded,
)
from tl_coupling.results import (
    DifferentPrompts,
    check_alike,
    check_one_model,
    joined_provenance,
    prompt_name,
    prompts_in_words,
)
from tl_coupling.statistics import Interval, t_interval

if TYPE_CHECKING:
    import pandas

_MAP_FACTS = ("d_model", "kind", "orientation", "k", "row_layers", "col_layers")
# Facts that all maps of a mean must share, beside the model.
_ALIKE = ("fixed", "normalising_layers", "is_mean_over_tokens", *_MAP_FACTS)
_POSITIONS = "positions from the beginning"
_END_POSITIONS = "positions from the end"
# The nulls that need the matrices of each prompt, and the fields that hold them.
_WITHIN_NULLS: tuple[Null, ...] = ("spans", "pairs")
_WITHIN = ("nulls_within", "draws_within")
# Facts in which maps may or must agree, by name.
Facts = dict[str, Any]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class MeanCouplingMap(CouplingMap):
    """The mean over prompts of coupling maps, or over tokens of one prompt, and its
    spread.

    Every method of `CouplingMap` gives the mean over the prompts, of each measure with
    its default options, and of functions of one's own that it was made with
    (`measures=`); `spread` and `spread_of_mean` give standard deviations (n − 1
    in the denominator; NaN for one prompt). What is undefined for one prompt is
    undefined (NaN) in the mean. `null_interval` and `null_p` take the spectra to be
    their means, and the values of all prompts to rise and fall together, as they do
    where a model's singular vectors are the same on all: they are those of one prompt,
    however many there are. The nulls within spans need the matrices of each prompt, and
    are held at `within_ks`. `CouplingMap.load` reads such a map too.

    Of a mean over tokens (`depth_coupling` with several positions) read "token" for
    "prompt": `n_prompts` is 1, the provenance has the `positions`, and there is no
    `interval`. The mean over prompts of such means has one.

    Attributes:
        matrices: mean of `|A|`, `[n_rows n_cols k k]` (the signs of singular vectors
            are arbitrary).
        singular_values, frobenius_norms: means.
        row_positions, col_positions: counted from the end, and so negative, where they
            differ from the beginning; of a mean over tokens those of the last one.
        provenance: what all prompts have in common; `prompts` lists their texts.
        means, spreads: mean and standard deviation of each measure, `[n_measures k
            n_rows n_cols]`.
        nulls: mean null of each measure, `[n_measures k]`; of one's own the null of the
            mean spectra.
        spreads_of_mean: standard deviation of a prompt's mean over pairs of different
            connections (all pairs where none differ), `[n_measures k]`.
        measures: names of the measures, in the order of the axis `n_measures`.
        means_of_maps: what `spreads_of_mean` is the deviation of, `[n_measures k
            n_maps]`: see `by_map`; None of what earlier versions saved.
        means_of_all_pairs: the same over all pairs.
        nulls_within: mean null "spans" and "pairs" of each measure at `within_ks`,
            `[2 n_measures n_within_ks n_rows n_cols]`; None where none was asked for.
        draws_within: what columns have in the mean with vectors turned at random within
            their spans, `[2 n_measures n_within_ks n_draws n_cols]`: of each prompt
            the smallest first, and then the mean over prompts.

    Example:
        >>> mean = tlc.mean_depth_coupling((tlc.trace(model, prompt) for prompt in prompts), k=4)
        >>> mean.spread(2).shape, mean.n_prompts
        (torch.Size([2, 2]), 4)
    """

    means: Float[Tensor, "n_measures k n_rows n_cols"]
    spreads: Float[Tensor, "n_measures k n_rows n_cols"]
    nulls: Float[Tensor, "n_measures k"]
    spreads_of_mean: Float[Tensor, "n_measures k"]
    measures: tuple[str, ...] = tuple(MEASURES)
    means_of_maps: Float[Tensor, "n_measures k n_maps"] | None = None
    means_of_all_pairs: Float[Tensor, "n_measures k n_maps"] | None = None
    nulls_within: (
        Float[Tensor, "n_nulls n_measures n_within_ks n_rows n_cols"] | None
    ) = None
    draws_within: (
        Float[Tensor, "n_nulls n_measures n_within_ks n_draws n_cols"] | None
    ) = None
    DIMS: ClassVar = CouplingMap.DIMS | {
        "means": "measure k row col",
        "spreads": "measure k row col",
        "nulls": "measure k",
        "spreads_of_mean": "measure k",
        "means_of_maps": "measure k map",
        "means_of_all_pairs": "measure k map",
        "nulls_within": "within measure within_k row col",
        "draws_within": "within measure within_k draw col",
        "measures": "measure",
    }

    def __post_init__(self) -> None:
        """Raise unless every row, every column and every measure has one name."""
        super().__post_init__()
        if len(set(self.measures)) < len(self.measures):
            raise ValueError(
                f"`measures` must name each once, got {list(self.measures)}"
            )

    @property
    def within_ks(self) -> tuple[int, ...]:
        """The k at which `null`, `null_interval` and `null_p` have a `within` other than
        "space".
        """
        return tuple(self.provenance.get("within_ks", ()))

    @classmethod
    def over(
        cls,
        maps: Iterable[CouplingMap],
        measures: Sequence[AnyMeasure] = (),
        *,
        within_ks: Sequence[int] = (),
    ) -> "MeanCouplingMap":
        """Return the mean over maps of the same connections, one for each prompt.

        An iterator is read one map at a time; `measures` and `within_ks` as in
        `mean_of_maps`.

        Raises:
            ValueError: no map; maps of different models, or traced in several ways; of
                different layers, positions, k or orientation; two of one prompt; a mean
                among them; `within_ks` that the maps do not hold, or of means over
                tokens.

        Example:
            >>> traces = (tlc.trace(model, prompt) for prompt in ("w3 w14 w15", "w9 w2 w6 w5"))
            >>> maps = (tlc.depth_coupling(trace, k=4) for trace in traces)
            >>> result = tlc.comparisons.MeanCouplingMap.over(maps)
            >>> result.coupling(2).shape, result.spread(2).shape, result.n_prompts
            (torch.Size([2, 2]), torch.Size([2, 2]), 2)
        """
        return cls._over(maps, own_measures(measures), within_ks=within_ks)

    @classmethod
    def over_tokens(
        cls,
        maps: Iterable[CouplingMap],
        position: object,
        measures: Sequence[AnyMeasure] = (),
    ) -> "MeanCouplingMap":
        """Return the mean over maps of one prompt, one for each token, as `over` does.

        `position` is what was asked for; it and the `positions` of the maps are in the
        provenance.
        """
        return cls._over(maps, own_measures(measures), position)

    @classmethod
    def _over(
        cls,
        maps: Iterable[CouplingMap],
        own: tuple[OwnMeasure, ...],
        position: object = None,
        within_ks: Sequence[int] = (),
    ) -> "MeanCouplingMap":
        """Return the mean over prompts; over tokens of one where a position is given."""
        prompts: list[str | None] = []
        facts: list[Facts] = []
        reference: Facts = {}
        different = DifferentPrompts("maps")
        means_of_maps: list[Tensor] = []
        means_of_all_pairs: list[Tensor] = []
        moments = _RunningMoments(deviation_names=("means", "mean_over_pairs"))
        generator = seeded(0)
        for result in maps:
            _check_is_of_one_prompt(result)
            # A null that is not known would be left out of means as one that is undefined.
            result.check_finite()
            facts.append(_facts(result))
            reference = check_one_model(reference or facts[0], facts[-1], "maps")
            check_alike(facts[0], facts[-1], _ALIKE, "the maps must have")
            if position is None:
                different.add(
                    result.provenance,
                    prompt_name(result.provenance),
                    # For one prompt at two tokens, the message is that the positions
                    # are wrong.
                    token=facts[-1][_POSITIONS],
                    numbers=result.matrices,
                )
            prompts.append(_named_prompt(result.provenance))
            averaged = _averaged(result, own)
            if within_ks:
                drawn = _drawn_within(result, within_ks, own, generator)
                moments.add(averaged | drawn)
            else:
                moments.add(averaged)
            means_of_maps.append(averaged["mean_over_pairs"])
            means_of_all_pairs.append(averaged["means"].flatten(-2).nanmean(-1))
        if not prompts:
            raise ValueError(
                "there are no maps to take the mean of: wanted at least one"
            )
        # `result` is the last map from here on: it has what all have alike.
        of_tokens = position is not None
        common = joined_provenance(facts, prompts[:1] if of_tokens else prompts)
        names = {*result.provenance, "prompts", "remarks"} - {OWN_MEASURES}
        provenance = {name: fact for name, fact in common.items() if name in names}
        provenance |= facts_of_own(own)
        if within_ks:
            provenance["within_ks"] = list(within_ks)
        if of_tokens:
            row_positions, col_positions = facts[-1][_POSITIONS]
            positions = [fact[_POSITIONS][0][0] for fact in facts]
            provenance |= {"position": position, "positions": positions}
        else:
            row_positions, col_positions = _common_positions(common)
        tensors = moments.means | {
            "spreads": moments.standard_deviation("means"),
            "spreads_of_mean": moments.standard_deviation("mean_over_pairs"),
            "means_of_maps": torch.stack(means_of_maps, dim=-1),
            "means_of_all_pairs": torch.stack(means_of_all_pairs, dim=-1),
        }
        del tensors["mean_over_pairs"]
        if own:
            own_nulls = _nulls_of_own(tensors, result, own)
            tensors["nulls"] = torch.cat([tensors["nulls"], own_nulls])
        # Sums are float64 where a measure is; a mean has the precision of its maps.
        averaged = {
            # Nulls and draws are on the CPU, in float64, as those of maps are.
            name: x if name in _WITHIN else x.to(result.matrices)
            for name, x in tensors.items()
        }
        shared_fields = vars(result) | {
            "row_positions": row_positions,
            "col_positions": col_positions,
            "provenance": provenance,
            "measures": (*_held_names(result), *(measure.name for measure in own)),
        }
        return cls(**shared_fields | averaged)

    @checked
    def values(
        self, k: int | None = None, measure: AnyMeasure = "coupling", **options: Any
    ) -> PerPair:
        """Return the mean over the prompts of a measure, for every pair."""
        return self._held(self.means, k, measure, options)

    @checked
    def spread(self, k: int | None = None, measure: AnyMeasure = "coupling") -> PerPair:
        """Return the standard deviation over the prompts of a measure, for every pair."""
        return self._held(self.spreads, k, measure, {})

    @checked
    def spread_of_mean(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
    ) -> float:
        """Return the standard deviation over the prompts of their `mean(k, measure)`."""
        if off_diagonal:
            return float(self._held(self.spreads_of_mean, k, measure, {}))
        return float(self.by_map(k, measure, off_diagonal=False).std())

    @checked
    def by_map(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
    ) -> Float[Tensor, " n_maps"]:
        """Return `mean(k, measure)` of each prompt, or of each token, over pairs of
        different layers; over all pairs with `off_diagonal=False`.

        Example:
            >>> tokens = tlc.depth_coupling(trace, k=4, position="all")
            >>> tokens.by_map(2).shape, len(tokens.provenance["positions"])
            (torch.Size([8]), 8)
        """
        means = self.means_of_maps if off_diagonal else self.means_of_all_pairs
        if means is None:
            raise ValueError(
                "this mean was saved by an earlier version, without the mean of each "
                "map: measure again"
            )
        return self._held(means, k, measure, {})

    @checked
    def to_dataframe(self, ks: Sequence[int] | None = None) -> "pandas.DataFrame":
        """Return the table of `CouplingMap.to_dataframe`, with `spread`, the standard
        deviation of coupling over the prompts, and `n_prompts`.

        Example:
            >>> traces = (tlc.trace(model, prompt) for prompt in prompts)
            >>> table = tlc.mean_depth_coupling(traces, k=4).to_dataframe([2])
            >>> "spread" in table, int(table["n_prompts"][0])
            (True, 4)
        """
        table = super().to_dataframe(ks)
        spreads = {k: self.spread(k).flatten().tolist() for k in table["k"].unique()}
        # The rows of each k are the pairs, row by row.
        return table.assign(
            spread=[value for k in table["k"].unique() for value in spreads[k]],
            n_prompts=self.n_prompts,
        )

    @checked
    def interval(
        self,
        k: int | None = None,
        measure: AnyMeasure = "coupling",
        *,
        off_diagonal: bool = True,
    ) -> Interval:
        r"""Return the 95 % t interval, over the prompts, of their `mean(k, measure)`.

        .. math:: \bar c \pm t_{n-1} s / \sqrt n

        where `s` is `spread_of_mean`. It is for other prompts of their kind, which were
        drawn independently; NaN for one prompt, of which tokens are not independent.

        Example:
            >>> traces = (tlc.trace(model, prompt) for prompt in prompts)
            >>> mean = tlc.mean_depth_coupling(traces, k=4)
            >>> low, high = mean.interval(2)
            >>> low < mean.mean(2) < high
            True
        """
        n = self.n_prompts
        if n < 2:
            return math.nan, math.nan
        spread = self.spread_of_mean(k, measure, off_diagonal=off_diagonal)
        mean = self.mean(k, measure, off_diagonal=off_diagonal)
        return t_interval(mean, spread / math.sqrt(n), float(n - 1))

    def _test_in_words(self) -> str:
        """Return which test gives p, and that prompts or tokens are not its draws."""
        noun = "tokens" if self.is_mean_over_tokens else "prompts"
        return f"{super()._test_in_words()}, all {noun} as one draw"

    def _pairs_in_words(self, off_diagonal: bool) -> str:
        """Return which pairs a mean is over, and which prompts, where that is known."""
        pairs = super()._pairs_in_words(off_diagonal)
        prompts = prompts_in_words(self.provenance)
        return f"{pairs} and prompts, {prompts}" if prompts else pairs

    def _size_in_words(self) -> str:
        """Return how many layers and prompts, and what `table` shows of the spread."""
        size = super()._size_in_words()
        if self.n_prompts < 2:
            return size
        return f"{size} (mean ± standard deviation [95 % t interval])"

    def _mean_in_words(self, k: int, off_diagonal: bool) -> str:
        """Return the mean with its spread and interval, as `table` shows it."""
        mean = super()._mean_in_words(k, off_diagonal)
        if self.n_prompts < 2:
            return mean
        spread = self.spread_of_mean(k, off_diagonal=off_diagonal)
        low, high = self.interval(k, off_diagonal=off_diagonal)
        return f"{mean} ± {spread:.3f} [{low:.3f}, {high:.3f}]"

    def _values_at_every_k(self) -> dict[str, Float[Tensor, "k n_rows n_cols"]]:
        """Return the mean over the prompts of each."""
        # Read from the means: `matrices` are of |A|, and have no measures of A.
        coupling = self.measures.index("coupling")
        null = self.nulls[coupling]
        return {
            "coupling": self.means[coupling],
            "normalized_miscoupling": self.means[
                self.measures.index("normalized_miscoupling")
            ],
            "null": null[:, None, None].expand(self.means[coupling].shape),
        }

    def _nulls(
        self, k: int, measure: AnyMeasure, null_kind: Null, options: Options
    ) -> PerPair:
        """Return the mean null, for every pair."""
        if null_kind != "space":
            return self._held_within(self.nulls_within, k, measure, null_kind, options)
        null = self._held(self.nulls, k, measure, options).cpu()
        return null.expand(self.matrices.shape[:2])

    def _draws_in_spans(
        self,
        measure: Measure,
        k: int,
        nulls: PerPair,
        within: Null,
        n_draws: int | None,
        generator: torch.Generator,
    ) -> Float[Tensor, "n n_cols"]:
        """Return the draws that were made of each prompt, in the mean."""
        del nulls, generator  # They were needed when the mean was made.
        draws = self._held_within(self.draws_within, k, measure, within, {})
        if n_draws not in (None, len(draws)):
            raise ValueError(
                f"within spans a mean over prompts holds {len(draws)} draws, got "
                f"`n_draws={n_draws}`: leave it out"
            )
        return draws

    def _held_within(
        self,
        values: Float[Tensor, "n_nulls n_measures n_within_ks *shape"] | None,
        k: int,
        measure: AnyMeasure,
        null_kind: Null,
        options: Options,
    ) -> Float[Tensor, "*shape"]:
        """Return what is held of a null within spans, of one measure at one k."""
        if values is None or k not in self.within_ks:
            held = f" and those within spans at k in {list(self.within_ks)}"
            raise ValueError(
                "a mean over prompts holds the null 'space' only"
                f"{held if self.within_ks else ''}, got within={null_kind!r} at "
                f"k = {k}: give `within_ks=[{k}]` when it is made, or ask map by map"
            )
        of_null = values[_WITHIN_NULLS.index(null_kind)]
        name = _name_of_a_mean(measure, options)
        if isinstance(own := measure_named(measure), OwnMeasure):
            self._check_holds_own(own)
        return of_null[self.measures.index(name), self.within_ks.index(k)]

    def _held(
        self,
        values_by_measure: Float[Tensor, "n_measures k *pair"],
        k: int | None,
        measure: AnyMeasure,
        options: Options,
    ) -> Float[Tensor, "*pair"]:
        """Return what is held of one measure at one k."""
        name = _name_of_a_mean(measure, options)
        if isinstance(own := measure_named(measure), OwnMeasure):
            self._check_holds_own(own)
        elif name not in self.measures:
            raise ValueError(
                f"this mean was saved by an earlier version, without {name!r}: "
                "measure again"
            )
        # The axis of k starts at k = 1.
        return values_by_measure[self.measures.index(name), self._k(k) - 1]

    def _check_holds_own(self, measure: OwnMeasure) -> None:
        """Raise ValueError unless the mean was made with this function of the user's."""
        name = measure.name
        if name not in self.measures:
            raise ValueError(
                f"this mean over prompts was made without {name!r}: give "
                f"`measures=[{name}]` where it is made, such as `mean_depth_coupling`"
            )
        measure.check_made(self.provenance[OWN_MEASURES][name])


@checked
def mean_of_maps(
    maps: Annotated[Iterable[object], "a list of maps, or an iterator over them"],
    measures: Sequence[AnyMeasure] = (),
    *,
    within_ks: Sequence[int] = (),
) -> MeanCouplingMap:
    """Return the mean over maps that were measured before, one for each prompt.

    Args:
        maps: of the same connections of one model, such as saved ones:
            `map(tlc.CouplingMap.load, paths)`. An iterator is read one map at a time.
        measures: functions of one's own that the mean is to hold, see
            `CouplingMap.values`; it holds all that have names.
        within_ks: the k at which the mean has the nulls `within="spans"` and `"pairs"`
            too, with their intervals. They need every prompt's own matrices, which a
            mean does not keep, and some 100 draws of each prompt: of 30 layers 1.5 s
            on one core at k = 10, 16 s at k = 50.

    Raises:
        ValueError: no map; maps of different models, or traced in several ways; of
            different layers, positions, k or orientation; two of one prompt, which
            would count as two; a mean among them; `within_ks` that the maps do not
            hold, or of means over tokens.

    Example:
        >>> maps = [tlc.depth_coupling(tlc.trace(model, p), k=4) for p in prompts]
        >>> paths = [m.save(f"map{i}.nc") for i, m in enumerate(maps)]
        >>> mean = tlc.mean_of_maps([tlc.CouplingMap.load(path) for path in paths])
        >>> mean.n_prompts, mean.coupling(2).shape
        (4, torch.Size([2, 2]))
        >>> within = tlc.mean_of_maps(maps, within_ks=[2])
        >>> low, high = within.null_interval(2, within="pairs")
        >>> low < within.null(2, within="pairs") < high
        True
    """
    return MeanCouplingMap.over(map(_as_map, maps), measures, within_ks=within_ks)


def _drawn_within(
    result: CouplingMap,
    ks: Sequence[int],
    own: tuple[OwnMeasure, ...],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return one prompt's nulls within spans, and its draws, by measure and k.

    What columns of different prompts have in common is not known, as their frames may
    be the same: sorted, their draws rise and fall together, so that the mean over
    prompts spreads most.
    """
    if isinstance(result, MeanCouplingMap):
        raise ValueError(
            "`within_ks` are of maps at one token, got means over tokens: leave it out"
        )
    different = ~result.own_pairs().cpu()
    S_1 = result.singular_values.cpu().double()
    measures: list[Measure] = [*MEASURES.values(), *own]
    nulls: list[Tensor] = []
    draws: list[Tensor] = []
    for null_kind in _WITHIN_NULLS:
        n = draws_needed(different.shape[1], null_kind)
        for k in ks:
            A = result.at(k).cpu().double()
            paired = null_kind == "pairs"
            k_nulls = torch.stack(
                [
                    rotation_null(A, S_1[:, None], measure, paired=paired)
                    for measure in measures
                ]
            )
            k_draws = draws_in_spans(
                measures, A, S_1, k_nulls, different, n, generator, paired=paired
            )
            nulls.append(k_nulls)
            draws.append(k_draws.sort(1).values)
    shape = "(null k) measure ... -> null measure k ..."
    n_nulls = len(_WITHIN_NULLS)
    return {
        "nulls_within": rearrange(torch.stack(nulls), shape, null=n_nulls),
        "draws_within": rearrange(torch.stack(draws), shape, null=n_nulls),
    }


def _as_map(item: object) -> CouplingMap:
    """Return a map; raise TypeError for anything else."""
    if not isinstance(item, CouplingMap):
        raise TypeError(
            f"`maps` must be maps of coupling, got {type(item).__name__} among them: "
            "`CouplingMap.load(path)` reads one"
        )
    return item


class _RunningMoments:
    """Means of tensors by name, and their standard deviations, over one pass.

    By Welford's update: no difference of large sums is taken.
    """

    def __init__(self, deviation_names: Collection[str]) -> None:
        self.n = 0
        self.means: dict[str, Tensor] = {}
        self._deviation_names = deviation_names
        self._squared_deviations: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Count the tensors of one more prompt."""
        self.n += 1
        for name, x in tensors.items():
            if self.n == 1:
                self.means[name] = torch.zeros_like(x)
            deviation = x - self.means[name]
            self.means[name] += deviation / self.n
            if name in self._deviation_names:
                # The deviation from the old mean times that from the new one.
                squared = deviation * (x - self.means[name])
                total = self._squared_deviations.get(name, 0)
                self._squared_deviations[name] = total + squared

    def standard_deviation(self, name: str) -> Tensor:
        """Return that of the tensors of a name; NaN of one prompt."""
        return (self._squared_deviations[name] / (self.n - 1)).sqrt()


def _name_of_a_mean(measure: AnyMeasure, options: Options) -> str:
    """Return under which name a mean over prompts holds a measure with its options."""
    if isinstance(measure_named(measure), OwnMeasure):
        return measure_named(measure, **options).name
    has_options = measure_named(measure).takes_options
    if not options or (has_options and options.keys() <= {"p", "absolute"}):
        formula = measure_named(measure, **options).formula
        # Options may spell a measure that is held under a name of its own: p = 1 and
        # absolute values are "released_trace".
        for name, registered in MEASURES.items():
            if registered.formula == formula:
                return name
    raise ValueError(
        "a mean over prompts holds p=2 and absolute=False, and p=1 or p=2 with "
        f"absolute=True, got {options}: measure map by map"
    )


def _named_prompt(provenance: Mapping[str, Any]) -> str | None:
    """Return what a prompt is called; None of modules, whose input is not known."""
    is_known = any(provenance.get(fact) for fact in ("prompt", "image", "tokens"))
    return prompt_name(provenance) if is_known else None


def _check_is_of_one_prompt(result: object) -> None:
    is_mean = isinstance(result, MeanCouplingMap) and not result.is_mean_over_tokens
    if not isinstance(result, CouplingMap) or is_mean:
        raise ValueError(
            f"wanted the coupling map of one prompt, got {type(result).__name__}"
        )


def _facts(result: CouplingMap) -> Facts:
    """Return what maps over which a mean is taken may or must have in common."""
    # Prompts of several lengths agree where tokens are counted from the end.
    n_tokens = len(result.provenance.get("tokens", ()))
    positions = result.row_positions, result.col_positions
    end_positions = tuple(tuple(t - n_tokens for t in side) for side in positions)
    # Maps of earlier versions do not say: they compared block(X) − X.
    normalising = set(result.provenance.get("normalising_layers", ()))
    compared_layers = {*result.row_layers, *result.col_layers}
    return result.provenance | {
        **{name: getattr(result, name) for name in _MAP_FACTS},
        "is_mean_over_tokens": result.is_mean_over_tokens,
        # Layers that are not compared may differ between the traces.
        "normalising_layers": sorted(compared_layers & normalising),
        _POSITIONS: positions,
        _END_POSITIONS: end_positions,
    }


def _common_positions(common: Facts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of rows and columns, from the beginning or from the end."""
    positions = common.get(_POSITIONS, common.get(_END_POSITIONS))
    if positions is None:
        raise ValueError(
            "the maps must be of the same positions, "
            "counted from the beginning or from the end; `depth_coupling` with several "
            "positions averages over tokens of one prompt"
        )
    row_positions, col_positions = positions
    return row_positions, col_positions


def _held_names(result: CouplingMap) -> list[str]:
    """Return the names of measures that a mean over maps like this one holds, but those
    of the user's own.
    """
    if not isinstance(result, MeanCouplingMap):
        return list(MEASURES)
    return [name for name in result.measures if name in MEASURES]


def _averaged(
    result: CouplingMap, own: tuple[OwnMeasure, ...] = ()
) -> dict[str, Tensor]:
    """Return what is averaged: `|A|`, J_1's spectra and, for every k, each measure.

    Of each measure also its mean over pairs, `mean_over_pairs`, and the null of those
    that have names.
    """
    is_counted = _counted_pairs(result)
    if isinstance(result, MeanCouplingMap):
        # The mean over the tokens of one prompt.
        for measure in own:
            result._check_holds_own(measure)
        named = [result.measures.index(name) for name in _held_names(result)]
        held = [*named, *(result.measures.index(measure.name) for measure in own)]
        means = result.means[held]
        return {
            "matrices": result.matrices,
            "singular_values": result.singular_values,
            "frobenius_norms": result.frobenius_norms,
            "means": means,
            "mean_over_pairs": means[..., is_counted].nanmean(-1),
            "nulls": result.nulls[named],
        }
    measures = (*MEASURES.values(), *own)
    values = measures_of_map(result.matrices, result.singular_values, measures)
    nulls_of_rows = nulls_at_every_k(
        result.singular_values.cpu(), result.frobenius_norms.cpu(), result.d_model
    )
    return {
        "matrices": result.matrices.abs(),
        "singular_values": result.singular_values,
        "frobenius_norms": result.frobenius_norms,
        "means": values,
        "mean_over_pairs": values[..., is_counted].nanmean(-1),
        "nulls": _mean_nulls(nulls_of_rows, is_counted).to(values),
    }


def _counted_pairs(result: CouplingMap) -> Bool[Tensor, "n_rows n_cols"]:
    """Say which pairs a mean over pairs is of."""
    own = result.own_pairs()
    # A map of one connection has its own pair only.
    return own if own.all() else ~own


def _mean_nulls(
    nulls_of_rows: Float[Tensor, "n_measures k n_rows"],
    is_counted: Bool[Tensor, "n_rows n_cols"],
) -> Float[Tensor, "n_measures k"]:
    """Return the mean over pairs of nulls, which are the same for all pairs of a row."""
    # A view, measure k row col: summed in the order of its memory.
    shape = (*nulls_of_rows.shape[:2], *is_counted.shape)
    nulls = nulls_of_rows[..., None].expand(shape)
    return nulls[..., is_counted.cpu()].nanmean(-1)


def _nulls_of_own(
    means: Mapping[str, Tensor], result: CouplingMap, own: tuple[OwnMeasure, ...]
) -> Float[Tensor, "n_own k"]:
    """Return the nulls of the user's own measures, of the mean spectra: drawn once.

    Args:
        means: over the maps, of singular values and norms.
        result: one of the maps.
        own: the measures.
    """
    nulls_of_rows = nulls_at_every_k(
        means["singular_values"].cpu(),
        means["frobenius_norms"].cpu(),
        result.d_model,
        own,
    )
    return _mean_nulls(nulls_of_rows, _counted_pairs(result)).to(means["nulls"])
