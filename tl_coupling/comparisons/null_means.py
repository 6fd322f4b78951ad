"""Means over the pairs of a map whose singular vectors are drawn at random.

The Jacobians J_1 of the rows are held fixed; the frames `U_2, V_2` of the columns are
random, and those of different columns independent. What the pairs of one column have in
common is bounded, not known: their values rise and fall together, and with them those
of every prompt that a mean is over. A sum of given variables spreads most when they do.

Draws say how much means spread. Where they lie is known in closed form, so the draws are
moved to it: a hundred of them know their own mean less well than a mean over many
columns is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.measures import (
    Measure,
    Null,
    draws_of_measure,
    measure_named,
    random_rotations,
    random_subspace_null,
    seeded,
)
from tl_coupling.statistics import LEVEL, Interval

# A 95 % interval has 200 of so many sums beyond each of its ends.
_N_SUMS = 8000
# Numbers in memory at once.
_MOST_NUMBERS = 2**22
# With their middle known, draws leave unknown how far the ends are from it. For a normal
# mean over many columns that is a share `1 / √(8 n)` of the width, and a quantile of one
# column alone has about two times the error of four columns.
_FEWEST_DRAWS = {"space": 400, "spans": 100, "pairs": 100}
_DRAWS_OF_ALL_COLUMNS = 1600
# Of a mean of numbers in float32, with a relative error of 1e-7 each.
ROUNDING = 1e-6
# A layer and a position.
Connection = tuple[int, int]


def draws_needed(n_cols: int, null_kind: Null) -> int:
    """Return how many draws leave the ends known to a twentieth of their distance.

    In the whole space all columns share the same draws, within spans each has its own.
    """
    return max(_FEWEST_DRAWS[null_kind], _DRAWS_OF_ALL_COLUMNS // n_cols)


def draws_of_rows(
    measure: Measure,
    k: int,
    n: int,
    d_model: int,
    S_1: Float[Tensor, "n_rows n_values"],
    frobenius_norms: Float[Tensor, " n_rows"],
    nulls: Float[Tensor, " n_rows"],
    generator: torch.Generator,
) -> Float[Tensor, "n n_rows"]:
    """Draw what each row has in one column of random vectors, smallest first.

    What rows have in common is not known: sorted, their values rise and fall together,
    so that means over them spread most.

    Args:
        measure: of coupling.
        k: size of A.
        n: how many draws.
        d_model, S_1, frobenius_norms: of each row's J_1.
        nulls: of each row, in closed form, which the draws are moved to.
        generator: of the random numbers.
    """
    values = draws_of_measure(
        measure,
        k,
        n,
        d_model=d_model,
        S_1=S_1,
        frobenius_norm=frobenius_norms,
        generator=generator,
    )
    # Moved to the closed form, which knows better where they lie: see above.
    values = values + (nulls - measure.null_of_draws(values))
    return values.sort(0).values


def draws_in_spans(
    measures: Sequence[Measure],
    A: Float[Tensor, "n_rows n_cols k k"],
    S_1: Float[Tensor, "n_rows n_values"],
    nulls: Float[Tensor, "n_measures n_rows n_cols"],
    is_counted: Bool[Tensor, "n_rows n_cols"],
    n: int,
    generator: torch.Generator,
    *,
    paired: bool,
) -> Float[Tensor, "n_measures n n_cols"]:
    """Draw the mean of each column, with its vectors rotated within their spans.

    Args:
        measures: of coupling; all are of the same draws.
        A: coupling matrices, in float64.
        S_1: singular values of each row's J_1.
        nulls: of each measure and pair, in closed form, which the draws are moved to.
        is_counted: the pairs that the mean is over.
        n: how many draws.
        generator: of the random numbers.
        paired: whether left and right are turned alike.
    """
    n_cols, k = A.shape[1:3]
    drawn: list[list[Tensor]] = [[] for _ in measures]
    # Turned alike, a left direction keeps the right one that belongs to it.
    n_sides = 1 if paired else 2
    for some in torch.arange(n).split(max(1, _MOST_NUMBERS // A.numel())):
        # Each draw by itself: its numbers do not depend on how many there are.
        turns = [
            [random_rotations(n_cols, k, generator=generator) for _ in range(n_sides)]
            for _ in some
        ]
        # Columns turn, and all rows with them.
        left = torch.stack([sides[0] for sides in turns])[:, None]
        right = torch.stack([sides[-1] for sides in turns])[:, None]
        turned = left.mT @ A @ right
        for measure, draws in zip(measures, drawn, strict=True):
            values = measure.value(turned, S_1[:, None])
            draws.append(values.where(is_counted, torch.nan))
    column_means = []
    for measure, draws, measure_nulls in zip(measures, drawn, nulls, strict=True):
        values = torch.cat(draws)
        values = values + (measure_nulls - measure.null_of_draws(values))
        column_means.append(values.nanmean(1))
    return torch.stack(column_means)


def rise_together(
    rows: Sequence[Connection],
    cols: Sequence[Connection],
    is_counted: Bool[Tensor, "n_rows n_cols"],
) -> bool:
    """Say whether columns have fewer comparisons between them than they are.

    J_1 in the vectors of J_2 and J_2 in those of J_1 is one comparison: the angles
    between two frames make both. Two layers have one, and two columns.
    """
    compared = {
        frozenset((rows[row], cols[col])) for row, col in is_counted.nonzero().tolist()
    }
    # A column without a counted pair adds nothing to the mean.
    n_used_cols = int(is_counted.any(0).sum())
    return len(compared) < n_used_cols


def means_of_comparisons(
    draws: Float[Tensor, "n n_rows"],
    rows: Sequence[Connection],
    cols: Sequence[Connection],
    is_counted: Bool[Tensor, "n_rows n_cols"],
    generator: torch.Generator,
) -> Float[Tensor, " n_means"]:
    """Combine draws of the rows to means over counted pairs, thousands of times.

    Comparisons are independent, and the two pairs of one rise and fall together, see
    `rise_together`.
    """
    n_pairs = int(is_counted.sum())
    parts: dict[frozenset[Connection], Tensor] = {}
    for row, col in is_counted.nonzero().tolist():
        comparison = frozenset((rows[row], cols[col]))
        parts[comparison] = parts.get(comparison, 0) + draws[:, row] / n_pairs
    return sums_of_draws(torch.stack(list(parts.values()), 1), generator)


def means_of_draws(
    draws: Float[Tensor, "n n_drawn_cols"],
    is_counted: Bool[Tensor, "n_rows n_cols"],
    generator: torch.Generator,
    *,
    together: bool,
) -> Float[Tensor, " n_means"]:
    """Combine draws of the columns to means over all counted pairs, thousands of times.

    Args:
        draws: means over the rows of each column, or of one that stands for all.
        is_counted: the pairs that the mean is over.
        generator: of the random numbers.
        together: whether columns rise and fall together; independent if not.

    Raises ValueError where no pair counts, or all are undefined.
    """
    n_cols = is_counted.shape[1]
    n_counted = reduce(is_counted, "row col -> col", "sum").double()
    # In the whole space one column was drawn, and stands for all.
    drawn_col = torch.arange(n_cols) % draws.shape[1]
    is_undefined = draws.isnan().any(0)[drawn_col]
    is_used = (n_counted > 0) & ~is_undefined
    if not is_used.any():
        raise ValueError(
            "every pair here compares a connection with itself, or is undefined: "
            "nothing is left to chance"
        )
    # A column counts by its pairs, as in the mean over all pairs.
    weights = n_counted[is_used] / n_counted[is_used].sum()
    column_parts = draws[:, drawn_col[is_used]] * weights
    return sums_of_draws(column_parts, generator, together=together)


def sums_of_draws(
    column_parts: Float[Tensor, "n n_cols"],
    generator: torch.Generator,
    *,
    together: bool = False,
) -> Float[Tensor, " n_sums"]:
    """Add up a draw of each column, thousands of times.

    Args:
        column_parts: what each column adds, for every draw.
        generator: of the random numbers.
        together: whether all columns have the same draw; independent ones if not.
    """
    n_draws, n_cols = column_parts.shape
    # A single index is broadcast over the columns: all take the same draw.
    n_independent = 1 if together else n_cols
    cols = torch.arange(n_cols)
    sums = []
    for some in torch.arange(_N_SUMS).split(max(1, _MOST_NUMBERS // n_cols)):
        draw_of_col = torch.randint(
            n_draws, (len(some), n_independent), generator=generator
        )
        sums.append(column_parts[draw_of_col, cols].sum(1))
    return torch.cat(sums)


@dataclass(frozen=True)
class Chance:
    """What random singular vectors would give in place of a mean over pairs.

    Attributes:
        interval: where 95 % of the random means lie, as many below it as above.
        p: how likely a random mean is as large as that which was measured, or larger;
            one-sided, NaN where the mean is.

    Example:
        >>> result = tlc.depth_coupling(trace, k=4)
        >>> chance = result.chance(2)
        >>> chance.interval == result.null_interval(2), chance.p == result.null_p(2)
        (True, True)
    """

    interval: Interval
    p: float

    @classmethod
    def from_means(
        cls, means: Float[Tensor, " n_means"], measured: float, n_draws: int
    ) -> "Chance":
        """Return what random means say of a measured one.

        Args:
            means: with random singular vectors.
            measured: the mean with those of J_2.
            n_draws: how many different means there are. Where columns share a draw,
                thousands repeat hundreds, which know no smaller p.
        """
        # NaN is below everything, and would be the smallest p.
        if math.isnan(measured) or bool(means.isnan().any()):
            return cls(quantile_interval(means), math.nan)
        # Maps are of float32: what is as large but for rounding is as large. At k = 1
        # every coupling is 1.
        rounding = ROUNDING * abs(measured)
        n_at_least = int((means >= measured - rounding).sum())
        p = (1 + n_at_least) / (1 + len(means))
        return cls(quantile_interval(means), max(p, 1 / (1 + n_draws)))


def quantile_interval(means: Float[Tensor, " n_means"]) -> Interval:
    """Return the interval that has 95 % of the means, as many below it as above."""
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2]).to(means)
    low, high = means.quantile(ends).tolist()
    return low, high


def null_interval_of_spectra(
    S_1: Float[Tensor, "n_layers n_values"], k: int, d_model: int
) -> Interval:
    """Return where 95 % of the mean coupling of different layers lies by chance.

    As `CouplingMap.null_interval` of layers with these singular values; those that are
    not given are 0.
    """
    n_layers = len(S_1)
    generator = seeded(0)
    draws = draws_of_rows(
        measure_named("coupling"),
        k,
        draws_needed(n_layers, "space"),
        d_model,
        S_1,
        torch.linalg.vector_norm(S_1, dim=1),
        random_subspace_null(k).expand(n_layers),
        generator,
    )
    layers = [(layer, 0) for layer in range(n_layers)]
    different = ~torch.eye(n_layers, dtype=torch.bool)
    together = rise_together(layers, layers, different)
    column_draws = draws.mean(1, keepdim=True)
    return quantile_interval(
        means_of_draws(column_draws, different, generator, together=together)
    )
