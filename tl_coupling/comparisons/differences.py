"""The difference of two sets of coupling maps, such as of two models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, made_by, warn_caller
from tl_coupling.comparisons.maps import CouplingMap, PerPair
from tl_coupling.comparisons.means import MeanCouplingMap
from tl_coupling.measures import AnyMeasure, facts_of_own, measure_named, words_of
from tl_coupling.results import (
    DIVERGING,
    RANDOM_SUBSPACES,
    DifferentPrompts,
    Saved,
    ShortTable,
    check_alike,
    check_one_model,
    prompt_name,
    small_map_html,
    tidy_table,
)
from tl_coupling.statistics import (
    LEVEL,
    Difference,
    Interval,
    holm,
    paired_difference,
    unpaired_difference,
)

if TYPE_CHECKING:
    import pandas

_SEVERAL_MAPS = "a coupling map, or maps of several prompts in a list or a generator"


@made_by("compare(a, b)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Saved):
    """The difference of two sets of coupling maps, b − a, by pair and in the mean.

    Intervals are over prompts, 95 %, by the t distribution. With one prompt a side
    there are none (NaN).

    Attributes:
        values: mean over prompts of each pair, of a and of b, `[2 n_rows n_cols]`.
        differences: `b − a`, `[n_rows n_cols]`.
        intervals: of the differences, `[2 n_rows n_cols]`: low, high.
        corrected_p: of no difference, two-sided, by Holm's method over all pairs of
            different connections; NaN of other pairs.
        means: mean over pairs of different connections (all pairs where none differ),
            of a and of b, `[2]`.
        mean_interval: of the difference of these means, `[2]`: low, high.
        mean_p: of no difference in the mean, two-sided; not corrected.
        degrees_of_freedom: of that interval.
        nulls: what random subspaces give in the mean, for a and for b, `[2]`.
        paired: whether a and b are of the same prompts, one by one. If not, intervals
            are Welch's.
        n_prompts: of a and of b.
        row_layers, col_layers: of rows and columns.
        orientation, k, measure: what was compared.
        provenance: of a and of b, `first` and `second`, and of one's own measure;
            JSON-able.

    Example:
        >>> maps = [tlc.depth_coupling(tlc.trace(model, prompt), k=4) for prompt in prompts]
        >>> comparison = tlc.compare(maps, maps, k=2)
        >>> comparison.differences.shape, comparison.mean_difference
        (torch.Size([2, 2]), 0.0)
    """

    values: Float[Tensor, "2 n_rows n_cols"]
    differences: Float[Tensor, "n_rows n_cols"]
    intervals: Float[Tensor, "2 n_rows n_cols"]
    corrected_p: Float[Tensor, "n_rows n_cols"]
    means: Float[Tensor, "2"]
    mean_interval: Float[Tensor, "2"]
    mean_p: float
    degrees_of_freedom: float
    nulls: Float[Tensor, "2"]
    paired: bool
    n_prompts: tuple[int, ...]
    row_layers: tuple[int, ...]
    col_layers: tuple[int, ...]
    orientation: str
    k: Count
    measure: str
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "values": "side row col",
        "differences": "row col",
        "intervals": "end row col",
        "corrected_p": "row col",
        "means": "side",
        "mean_interval": "end",
        "nulls": "side",
        "n_prompts": "side",
        "row_layers": "row",
        "col_layers": "col",
    }

    @property
    def mean_difference(self) -> float:
        """The difference of the means over pairs, b − a."""
        return float(self.means[1] - self.means[0])

    @property
    def interval(self) -> Interval:
        """The 95 % interval of `mean_difference`; NaN for one prompt."""
        low, high = self.mean_interval.tolist()
        return low, high

    @checked
    def differing(self, level: float = 1 - LEVEL) -> Bool[Tensor, "n_rows n_cols"]:
        """Say which pairs differ, by `corrected_p` below a level."""
        return self.corrected_p < level

    def table(self) -> ShortTable:
        """Return the means of both and their difference, with its interval."""
        low, high = self.interval
        first_mean, second_mean = self.means.tolist()
        # A layer with itself is not compared.
        n_pairs = int((~self.own_pairs).sum())
        interval = f"{low:+.3f} to {high:+.3f}"
        degrees_of_freedom = f"{self.degrees_of_freedom:.1f}"
        n_first, n_second = self.n_prompts
        p = f"{self.mean_p:.2g}"
        # One prompt has no spread, and hence no interval.
        if min(self.n_prompts) < 2:
            interval = "one prompt: none"
            degrees_of_freedom = p = "none"
        row = [
            self.k,
            f"{first_mean:.3f}",
            f"{second_mean:.3f}",
            f"{self.mean_difference:+.3f}",
            interval,
            degrees_of_freedom,
            p,
            f"{int(self.differing().sum())} of {n_pairs}",
            f"{self.nulls.mean():.3f}",
        ]
        numbers = [
            "k",
            "first",
            "second",
            "difference",
            "95 %",
            "df",
            "p",
            "pairs",
            "null",
        ]
        pairing = "paired, over the same prompts"
        if not self.paired:
            pairing = "of different prompts (Welch)"
        first_name, second_name = self.names
        caption = (
            f"first: {first_name}\nsecond: {second_name}\n"
            f"{n_first} and {n_second} prompts; difference: second − first, {pairing}\n"
            "p: of no difference in the mean, t test over prompts, two-sided\n"
            f"pairs: of layers that differ (Holm, 5 %); null: {RANDOM_SUBSPACES}"
        )
        words = words_of(self.measure)
        title = f"depth {words}, mean over pairs of different layers"
        return ShortTable.of(title, [], numbers, [row], caption)

    def _small_picture(self) -> str:
        """Return the map of differences as HTML."""
        different = self.differences.where(
            ~self.own_pairs.to(self.differences.device), torch.nan
        )
        # 1 where nothing differs, or nothing is defined.
        top = float(different.nan_to_num(0).abs().max()) or 1.0
        caption = (
            f"second − first at k = {self.k}, from −{top:.3f} (blue) to {top:.3f} (red); "
            "row: layer of J₁; column: layer of the singular vectors; grey: a layer with "
            "itself, or undefined"
        )
        pixels = different.detach().cpu().double().numpy()
        return small_map_html(pixels, (-top, top), DIVERGING, caption)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each pair of layers.

        Columns are `first` and `second`, means over the prompts of a and of b,
        `difference` with `low` and `high`, and `corrected_p`.

        Example:
            >>> maps = [tlc.depth_coupling(tlc.trace(model, prompt), k=4) for prompt in prompts]
            >>> table = tlc.compare(maps, maps, k=2).to_dataframe()
            >>> list(table)[:5], len(table)
            (['row_layer', 'col_layer', 'first', 'second', 'difference'], 4)
        """
        pairs = "row_layer col_layer"
        columns = {
            "first": (pairs, self.values[0]),
            "second": (pairs, self.values[1]),
            "difference": (pairs, self.differences),
            "low": (pairs, self.intervals[0]),
            "high": (pairs, self.intervals[1]),
            "corrected_p": (pairs, self.corrected_p),
        }
        axes = {"row_layer": self.row_layers, "col_layer": self.col_layers}
        first, second = self.names
        return tidy_table(columns, axes, {}).assign(
            first_model=first, second_model=second
        )

    @property
    def own_pairs(self) -> Bool[Tensor, "n_rows n_cols"]:
        """Which pairs compare a layer with itself."""
        rows = torch.tensor(self.row_layers)
        return rows[:, None] == torch.tensor(self.col_layers)

    @property
    def names(self) -> tuple[str, str]:
        """What a and b are called: the model, and what tells the two apart."""
        first, second = self.provenance["first"], self.provenance["second"]
        return _name_beside(first, second), _name_beside(second, first)

    def __repr__(self) -> str:
        first, second = self.names
        low, high = self.interval
        how = "paired" if self.paired else "unpaired"
        test = "paired t test" if self.paired else "Welch's t test"
        interval = f"95 % [{low:.3f}, {high:.3f}], p {self.mean_p:.2g} ({test})"
        if min(self.n_prompts) < 2:
            interval = "no interval of a single prompt"
        return (
            f"Comparison({second!r} − {first!r}, k={self.k}, "
            f"{how}, n_prompts={self.n_prompts}: mean {self.measure} "
            f"{self.means[1]:.3f} − {self.means[0]:.3f} = {self.mean_difference:.3f}, "
            f"{interval})"
        )


@checked
def compare(
    a: Annotated[CouplingMap | Iterable[object], _SEVERAL_MAPS],
    b: Annotated[CouplingMap | Iterable[object], _SEVERAL_MAPS],
    k: Count | None = None,
    measure: AnyMeasure = "coupling",
    *,
    paired: bool | None = None,
) -> Comparison:
    """Compare two sets of coupling maps: two models, revisions, prompt sets, or one
    model with and without an ablation.

    Differences are b − a, of each pair of layers and of the mean over pairs. Where both
    are of the same prompts, in the same order, they are paired: the interval is that of
    the mean of one difference for each prompt. Prompts that are there at several
    positions are paired by their positions, too. Where no prompt is in both, the
    interval is Welch's. Intervals are over prompts: they say what other prompts like
    these would give, of these two models.

    Args:
        a, b: one map, or the maps of several prompts; an iterator is read one map at a
            time.
        k: how many top singular vectors; as many as the first map of `a` holds by
            default.
        measure: as in `CouplingMap.values`.
        paired: whether a and b are of the same prompts, one by one; by default their
            texts, images or tokens say.

    Raises:
        ValueError: no map; a mean over prompts, which keeps no single prompts; maps
            of tokens, of different layers or orientations; maps of several models, or
            traced in several ways, on one side; a k that a map does not hold; some
            prompts in both, others not, in another order or at other positions; a
            prompt twice on one side; maps that do not say what they are of, without
            `paired`.

    Warns: where a side has one prompt, of which there is no interval (NaN); where
    prompts are there at several positions, which are not independent.

    Cost: that of the measure, for each map.

    Example:
        >>> a = [tlc.depth_coupling(tlc.trace(model, prompt), k=4) for prompt in prompts]
        >>> hook = ("blocks.0.hook_mlp_out", lambda added, hook: 1.5 * added)
        >>> with model.hooks(fwd_hooks=[hook]):
        ...     b = [tlc.depth_coupling(tlc.trace(model, prompt), k=4) for prompt in prompts]
        >>> comparison = tlc.compare(a, b)
        >>> comparison.paired, comparison.n_prompts
        (True, (4, 4))
    """
    # The first map of `a` says which k is compared, unless the caller does.
    first = _Side.from_maps(a, "a", k, measure)
    second = _Side.from_maps(b, "b", first.k, measure)
    sides = [first, second]
    # Pairs of layers are compared one by one: both sides need the same.
    _check_same_pairs(first, second, "maps to compare must have")
    is_paired = _are_paired(first, second, paired)
    if first.has_several_positions or second.has_several_positions:
        warn_caller(
            "some prompts are there at several positions, which are not independent: "
            "intervals take each of them for a prompt, and may be too narrow"
        )
    # The same statistic for each pair of layers, and for the mean over pairs.
    difference_of = paired_difference if is_paired else unpaired_difference
    pair_difference = difference_of(np.stack(first.values), np.stack(second.values))
    difference_of_means = difference_of(np.array(first.means), np.array(second.means))
    return Comparison(
        values=_tensor([pair_difference.first, pair_difference.second]),
        differences=_tensor(pair_difference.estimate),
        intervals=_tensor([pair_difference.low, pair_difference.high]),
        corrected_p=_corrected_p(pair_difference, first.own_pairs),
        means=_tensor([difference_of_means.first, difference_of_means.second]),
        mean_interval=_tensor([difference_of_means.low, difference_of_means.high]),
        mean_p=float(difference_of_means.p),
        degrees_of_freedom=float(difference_of_means.degrees_of_freedom),
        nulls=_tensor([np.mean(side.nulls) for side in sides]),
        paired=is_paired,
        n_prompts=(len(first.values), len(second.values)),
        row_layers=first.row_layers,
        col_layers=first.col_layers,
        orientation=first.orientation,
        k=first.k,
        measure=measure_named(measure).name,
        provenance={
            "first": first.provenance,
            "second": second.provenance,
            **facts_of_own([measure_named(measure)]),
        },
    )


class _Side:
    """What is compared of one set of maps: an entry for each prompt."""

    def __init__(self, first_map: CouplingMap, name: str, k: int | None) -> None:
        self.orientation = first_map.orientation
        self.row_layers = first_map.row_layers
        self.col_layers = first_map.col_layers
        self.k = first_map.k if k is None else k
        self.own_pairs = first_map.own_pairs().cpu().numpy()
        # A copy: prompts and positions are written into it.
        self.provenance = dict(first_map.provenance)
        self.different = DifferentPrompts(name)
        self.prompts: list[object] = []
        self.positions: list[int] = []
        self.values: list[Float[np.ndarray, "n_rows n_cols"]] = []
        self.means: list[float] = []
        self.nulls: list[float] = []

    @classmethod
    def from_maps(
        cls,
        maps: CouplingMap | Iterable[object],
        name: str,
        k: int | None,
        measure: AnyMeasure,
    ) -> "_Side":
        """Return one side, read one map at a time."""
        side: _Side | None = None
        if isinstance(maps, CouplingMap):
            maps = [maps]
        for result in maps:
            if not isinstance(result, CouplingMap):
                kind = type(result).__name__
                raise TypeError(f"`{name}` must be {_SEVERAL_MAPS}, got a {kind} in it")
            if result.kind != "depth":
                raise ValueError(
                    f"`{name}` must hold maps of layers, kind 'depth' "
                    f"(`depth_coupling`), got one of kind {result.kind!r}"
                )
            is_mean = isinstance(result, MeanCouplingMap)
            if is_mean and not result.is_mean_over_tokens:
                raise ValueError(
                    f"`{name}` is a mean over prompts, which keeps no single "
                    "prompts: give the maps of the prompts, in a list"
                )
            # All other maps must be as the first is.
            side = side or cls(result, name, k)
            side.provenance = check_one_model(side.provenance, result.provenance, name)
            side.add(result, name, measure)
        if side is None:
            raise ValueError(f"`{name}` is empty: wanted {_SEVERAL_MAPS}")
        side.provenance["prompts"] = side.prompts
        side.provenance["positions"] = side.positions
        return side

    @property
    def prompts_and_positions(self) -> list[tuple[object, int]]:
        """Which token each map is of."""
        return list(zip(self.prompts, self.positions, strict=True))

    @property
    def has_several_positions(self) -> bool:
        """Whether a prompt is there at more than one position."""
        known = [prompt for prompt in self.prompts if prompt is not None]
        return any(known.count(prompt) > 1 for prompt in known)

    def add(self, result: CouplingMap, name: str, measure: AnyMeasure) -> None:
        """Take the map of one more prompt."""
        _check_same_pairs(self, result, f"maps in `{name}` must have")
        # A single layer meets itself alone.
        off_diagonal = not self.own_pairs.all()
        prompt, position = _prompt_of(result), result.row_positions[0]
        self.different.add(
            result.provenance,
            prompt_name(result.provenance),
            token=position,
            numbers=result.matrices,
        )
        self.prompts.append(prompt)
        self.positions.append(position)
        self.values.append(
            result.values(self.k, measure).detach().cpu().double().numpy()
        )
        # The mean is taken of each prompt, so that its spread over prompts is known.
        self.means.append(result.mean(self.k, measure, off_diagonal=off_diagonal))
        self.nulls.append(result.null(self.k, measure, off_diagonal=off_diagonal))


def _check_same_pairs(
    first: "_Side", other: "_Side | CouplingMap", wanted: str
) -> None:
    check_alike(vars(first), vars(other), ("orientation",), wanted)
    hint = (
        "for models of different depths only means can be compared: "
        "`statistics.paired_difference` of `result.mean(k)` of each prompt"
    )
    check_alike(vars(first), vars(other), ("row_layers", "col_layers"), wanted, hint)


def _prompt_of(result: CouplingMap) -> object:
    """Return what tells a prompt from others: its text, or else its image or tokens."""
    # The first that is known tells: text, name, pixels, tokens.
    image = result.provenance.get("image", {})
    # Two models may prepare one image in different ways.
    told_by = [
        result.provenance.get("prompt"),
        image.get("name"),
        image.get("pixels_sha256"),
        result.provenance.get("tokens"),
    ]
    return next((value for value in told_by if value is not None), None)


def _are_paired(first: _Side, second: _Side, paired: bool | None) -> bool:
    """Say whether both sides are of the same prompts, one by one.

    Raises ValueError where only some are the same, or it is not known.
    """
    if paired and len(first.prompts) != len(second.prompts):
        raise ValueError(
            "paired maps must be as many on both sides, got "
            f"{len(first.prompts)} and {len(second.prompts)}"
        )
    if paired is not None:
        return paired
    if None in (*first.prompts, *second.prompts):
        raise ValueError(
            "these maps do not say what prompt they are of: say whether they are "
            "`paired`"
        )
    are_same = first.prompts == second.prompts
    if first.has_several_positions or second.has_several_positions:
        # A prompt's text does not tell which of its maps is meant.
        are_same = first.prompts_and_positions == second.prompts_and_positions
    if are_same:
        return True
    # Half paired is neither: Welch's interval takes the samples to be independent.
    shared_prompts = [prompt for prompt in first.prompts if prompt in second.prompts]
    if shared_prompts:
        raise ValueError(
            f"`a` and `b` share {len(shared_prompts)} of {len(first.prompts)} and "
            f"{len(second.prompts)} prompts, or have them in another order or at other "
            "positions: give the same prompts and positions in the same order, or sets "
            "without a common prompt"
        )
    return False


def _corrected_p(
    difference: Difference, own_pairs: Bool[np.ndarray, "n_rows n_cols"]
) -> PerPair:
    # A layer with itself is no comparison, and must not count in the correction.
    corrected = np.full(own_pairs.shape, np.nan)
    corrected[~own_pairs] = holm(difference.p[~own_pairs])
    return _tensor(corrected)


def _name_beside(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a model's name, with what tells it from the other."""
    name = str(own.get("model"))
    parts = []
    if own.get("untrained"):
        parts.append("untrained")
    if own.get("checkpoint") != other.get("checkpoint"):
        parts.append(f"checkpoint {own.get('checkpoint')}")
    if own.get("hooks") != other.get("hooks"):
        hooks: Sequence[str] = own.get("hooks") or ()
        parts.append(f"hooks on {', '.join(hooks)}" if hooks else "no hooks")
    if own.get("prompts") != other.get("prompts"):
        parts.append(f"{len(own['prompts'])} prompts")
    elif own.get("positions") != other.get("positions"):
        positions = sorted(set(own["positions"]))
        parts.append(f"token {', '.join(map(str, positions))}")
    return f"{name} ({', '.join(parts)})" if parts else name


def _tensor(values: Any) -> Float[Tensor, "..."]:
    return torch.as_tensor(np.asarray(values, float))
