"""One p for everything that a study looked at: every k, measure, task and subset."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas
import xarray
from jaxtyping import Bool, Float, Int
from scipy import stats

from tl_coupling.statistics.expressions import columns_of
from tl_coupling.statistics.fits import Subset, subset_mask
from tl_coupling.statistics.intervals import ROUNDING, orders_of_blocks

ALL_PROMPTS = "all prompts"
ALL_MODELS = "all models"
_LOOK = ["k", "measure", "task", "subset"]


@dataclass(frozen=True, eq=False)
class Familywise:
    """The familywise error of looking at several k, measures, tasks and subsets, by
    permutation of the scores.

    Attributes:
        p: of the association that the study is about: how often permuted scores give a
            smaller p at any look.
        smallest_p: the same of the look that correlates most.
        table: one row per look: `k`, `measure`, `task`, `subset`, `n` models, `r`, its
            own `p` by the t distribution, and `familywise_p`. NaN where there are too
            few models.
        n_permutations, is_exact: the scores as they are count as one more; whether
            these are all the orders that there are.
    """

    p: float
    smallest_p: float
    table: pandas.DataFrame = field(repr=False)
    n_permutations: int
    is_exact: bool


def familywise(
    rows: xarray.Dataset,
    measures: Mapping[str, str],
    table: pandas.DataFrame,
    tasks: Mapping[str, Bool[np.ndarray, " n_prompts"]],
    scores: Mapping[str, str] | None,
    subsets: Mapping[str, Subset],
    families: Int[np.ndarray, " n"] | None,
    *,
    look: tuple[int, str],
    n_permutations: int,
    seed: int,
) -> Familywise:
    """Permute scores among models, to correct p for the number of tests.

    Compares the smallest p over all tests, of permuted scores, with that of each test.

    A test is of Pearson's r of one k, measure, task and subset; its p by the t
    distribution makes tests of different numbers of models comparable (minP). Scores of
    tasks and losses are permuted together, those of families as in
    `statistics.block_permutations`, in all orders where there are no more than asked
    for; subsets by the score are chosen again from permuted
    scores, and a mask goes with the models.

    Args:
        rows, table: of `stack_rows`, with all means and k; one row per model, its place
            along `row` as the index.
        measures: by the name of each measure, the variable of `rows` with its means.
        tasks, scores: which prompts, and the score's column, by task and for all;
            `None` for the loss on those prompts.
        subsets: queries over the table, or masks.
        look: k and measure of the study.

    Cost: `n_permutations · n_looks · n_models` operations.

    Source: Westfall and Young 1993, *Resampling-based multiple testing*.
    """
    orders, is_exact = orders_of_blocks(
        np.arange(len(table)) if families is None else families,
        n_permutations,
        np.random.default_rng(seed),
    )
    columns = ["loss"] if scores is None else list(dict.fromkeys(scores.values()))
    members = {
        name: _members(table, subset, columns, orders)
        for name, subset in subsets.items()
    }
    members[ALL_MODELS] = np.ones(orders.shape, bool)
    labels = []
    looks = []
    smallest_p = np.ones(len(orders))
    for task, prompts in tasks.items():
        means = [_means(rows[name], table, prompts) for name in measures.values()]
        # One row for each look at this task, `[n_measures · n_k, n_models]`.
        x = np.concatenate([measure_means.T for measure_means in means])
        if scores is None:
            y = _means(rows["loss"], table, prompts)
        else:
            y = table[scores[task]].to_numpy(float)
        for subset, is_member in members.items():
            r, n = _correlations(x, y[orders], is_member)
            p = _p_of(r, n)
            smallest_p = np.fmin(smallest_p, np.fmin.reduce(p, axis=1))
            # The first order is that of the scores as they are.
            looks.append((n[0], r[0], p[0]))
            labels += [
                (int(k), measure, task, subset)
                for measure in measures
                for k in rows["k"].values
            ]
    n, r, p = np.concatenate(looks, axis=1)
    looked_at = pandas.DataFrame(labels, columns=_LOOK).assign(
        n=n.astype(int), r=r, p=p, familywise_p=_corrected(p, smallest_p)
    )
    corrected = looked_at.set_index(_LOOK)["familywise_p"]
    return Familywise(
        p=float(corrected[(*look, ALL_PROMPTS, ALL_MODELS)]),
        smallest_p=float(corrected.min()),
        table=looked_at,
        n_permutations=len(orders) - 1,
        is_exact=is_exact,
    )


def _corrected(
    p: Float[np.ndarray, " n_looks"], smallest_p: Float[np.ndarray, " n_orders"]
) -> Float[np.ndarray, " n_looks"]:
    """Return the share of orders whose smallest p is no larger; NaN where p is."""
    is_as_small = smallest_p[:, None] <= p * (1 + ROUNDING)
    return np.where(np.isnan(p), np.nan, is_as_small.mean(0))


def _p_of(
    r: Float[np.ndarray, "n_orders n_looks"], n: Float[np.ndarray, "n_orders n_looks"]
) -> Float[np.ndarray, "n_orders n_looks"]:
    """Return the p of Pearson's r of n models by the t distribution; NaN where r is."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.abs(r) * np.sqrt((n - 2) / (1 - r**2))
        return np.where(np.isfinite(r), 2 * stats.t.sf(t, n - 2), np.nan)


def _means(
    values: xarray.DataArray,
    table: pandas.DataFrame,
    prompts: Bool[np.ndarray, " n_prompts"],
) -> Float[np.ndarray, "n ..."]:
    """Return the means over prompts of the models of the table; NaN where nothing was
    measured.
    """
    model_values = values.transpose("row", "prompt", ...).values[table.index]
    prompt_values = model_values[:, prompts]
    is_known = np.isfinite(prompt_values)
    with np.errstate(invalid="ignore"):
        return np.where(is_known, prompt_values, 0.0).sum(1) / is_known.sum(1)


def _members(
    table: pandas.DataFrame,
    subset: Subset,
    scores: list[str],
    orders: Int[np.ndarray, "n_orders n"],
) -> Bool[np.ndarray, "n_orders n"]:
    """Say which models are in a subset under each order of the scores."""
    # A mask, or a query without scores, goes with the models.
    if not isinstance(subset, str) or columns_of(subset).isdisjoint(scores):
        return np.broadcast_to(subset_mask(table, subset), orders.shape)
    # All orders at once, one below the other.
    repeated = table.iloc[np.tile(np.arange(len(table)), len(orders))]
    permuted = {name: table[name].to_numpy()[orders].ravel() for name in scores}
    mask = subset_mask(repeated.assign(**permuted), subset)
    return mask.reshape(orders.shape)


def _correlations(
    x: Float[np.ndarray, "n_looks n"],
    y: Float[np.ndarray, "n_orders n"],
    is_member: Bool[np.ndarray, "n_orders n"],
) -> tuple[
    Float[np.ndarray, "n_orders n_looks"], Float[np.ndarray, "n_orders n_looks"]
]:
    """Return Pearson's r under each order, and over how many models; NaN below three,
    or where x or y is constant.
    """
    known_x = np.isfinite(x)
    known_y = is_member & np.isfinite(y)
    x = _standard(x)
    y = np.where(known_y, _standard(y), 0.0)
    # Sums over the models of which x and y are known, for all orders and tests by one
    # product each.
    n = known_y @ known_x.T.astype(float)
    sum_x = known_y @ x.T
    sum_xx = known_y @ (x**2).T
    sum_y = y @ known_x.T
    sum_yy = y**2 @ known_x.T
    with np.errstate(invalid="ignore", divide="ignore"):
        spread_x = sum_xx - sum_x**2 / n
        spread_y = sum_yy - sum_y**2 / n
        r = (y @ x.T - sum_x * sum_y / n) / np.sqrt(spread_x * spread_y)
    is_defined = (n >= 3) & (spread_x > ROUNDING) & (spread_y > ROUNDING)
    return np.where(is_defined, np.clip(r, -1, 1), np.nan), n


def _standard(values: Float[np.ndarray, "rows n"]) -> Float[np.ndarray, "rows n"]:
    """Centre each row and bring it to standard units; 0 for NaN, or if constant.

    Nothing is then lost in sums of squares.
    """
    is_known = np.isfinite(values)
    n = np.maximum(is_known.sum(1, keepdims=True), 1)
    mean = np.where(is_known, values, 0.0).sum(1, keepdims=True) / n
    centred = np.where(is_known, values - mean, 0.0)
    spread = np.sqrt((centred**2).sum(1, keepdims=True) / n)
    is_varied = spread > 1e-12 * np.abs(mean)
    return np.divide(centred, spread, out=np.zeros(values.shape), where=is_varied)
