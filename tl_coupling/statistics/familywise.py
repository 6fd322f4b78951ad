"""One p for everything that a study looked at: every k, measure, task and subset."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas
import xarray
from jaxtyping import Bool, Float, Int
from scipy import stats

from tl_coupling.measures import mean_name, measured_in
from tl_coupling.statistics.expressions import columns_of
from tl_coupling.statistics.fits import subset_mask
from tl_coupling.statistics.intervals import block_permutations

ALL_PROMPTS, ALL_MODELS = "all prompts", "all models"
_LOOK = ["k", "measure", "task", "subset"]
_SAME = 1e-9


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
        n_permutations: the scores as they are count as one more.
    """

    p: float
    smallest_p: float
    table: pandas.DataFrame = field(repr=False)
    n_permutations: int


def familywise(
    rows: xarray.Dataset,
    table: pandas.DataFrame,
    tasks: Mapping[str, Bool[np.ndarray, " n_prompts"]],
    scores: Mapping[str, str] | None,
    subsets: Mapping[str, Any],
    families: Int[np.ndarray, " n"] | None,
    *,
    look: tuple[int, str],
    n_permutations: int,
    seed: int,
) -> Familywise:
    """Permute scores among models, and compare the smallest p over all looks with that
    of each look.

    A look is Pearson's r of one k, measure, task and subset; its p by the t
    distribution makes looks at different numbers of models comparable (minP). Scores of
    tasks and losses are permuted together, those of families as in
    `statistics.block_permutations`; subsets by the score are chosen again from permuted
    scores, and a mask goes with the models.

    Args:
        rows, table: of `in_rows`, with all means and k; one row per model, its place
            along `row` as the index.
        tasks, scores: which prompts, and the score's column, by task and for all;
            `None` for the loss on those prompts.
        subsets: queries over the table, or masks.
        look: k and measure of the study.

    Cost: `n_permutations · n_looks · n_models` operations.

    Source: Westfall and Young 1993, *Resampling-based multiple testing*.
    """
    rng = np.random.default_rng(seed)
    unrelated = np.arange(len(table))
    permuted = block_permutations(
        unrelated if families is None else families, n_permutations, rng
    )
    orders = np.vstack([unrelated, permuted])
    measures = measured_in(rows)
    names = [(int(k), measure) for measure in measures for k in rows["k"].values]
    moved = ["loss"] if scores is None else list(dict.fromkeys(scores.values()))
    kept = {
        name: _kept(table, subset, moved, orders) for name, subset in subsets.items()
    }
    kept |= {ALL_MODELS: np.ones(orders.shape, bool)}
    labels, found, smallest = [], [], np.ones(len(orders))
    for task, prompts in tasks.items():
        x = np.concatenate(
            [_means(rows[mean_name(measure)], table, prompts).T for measure in measures]
        )
        y = (
            table[scores[task]].to_numpy(float)
            if scores
            else _means(rows["loss"], table, prompts)
        )
        for subset, chosen in kept.items():
            r, n = _correlations(x, y[orders], chosen)
            with np.errstate(invalid="ignore", divide="ignore"):
                p = np.where(
                    np.isfinite(r),
                    2 * stats.t.sf(np.abs(r) * np.sqrt((n - 2) / (1 - r**2)), n - 2),
                    np.nan,
                )
            smallest = np.fmin(smallest, np.fmin.reduce(p, axis=1))
            labels += [(*name, task, subset) for name in names]
            found.append((n[0], r[0], p[0]))
    n, r, own = np.concatenate(found, axis=1)
    as_small = (smallest[:, None] <= own * (1 + _SAME)).mean(0)
    looks = pandas.DataFrame(labels, columns=_LOOK)
    looks = looks.assign(
        n=n.astype(int),
        r=r,
        p=own,
        familywise_p=np.where(np.isnan(own), np.nan, as_small),
    )
    main = looks.set_index(_LOOK)["familywise_p"][(*look, ALL_PROMPTS, ALL_MODELS)]
    return Familywise(
        float(main), float(looks["familywise_p"].min()), looks, n_permutations
    )


def _means(
    values: xarray.DataArray,
    table: pandas.DataFrame,
    prompts: Bool[np.ndarray, " n_prompts"],
) -> np.ndarray:
    """Means over prompts of the models of the table, `[n …]`; NaN where nothing was
    measured.
    """
    chosen = values.transpose("row", "prompt", ...).values[table.index][:, prompts]
    known = np.isfinite(chosen)
    with np.errstate(invalid="ignore"):
        return np.where(known, chosen, 0.0).sum(1) / known.sum(1)


def _kept(
    table: pandas.DataFrame,
    subset: Any,
    moved: list[str],
    orders: Int[np.ndarray, "n_orders n"],
) -> Bool[np.ndarray, "n_orders n"]:
    """Which models are in a subset under each order of the scores."""
    if not isinstance(subset, str) or columns_of(subset).isdisjoint(moved):
        return np.broadcast_to(subset_mask(table, subset), orders.shape)
    # All orders at once, one below the other.
    below = table.iloc[np.tile(np.arange(len(table)), len(orders))]
    permuted = {name: table[name].to_numpy()[orders].ravel() for name in moved}
    return subset_mask(below.assign(**permuted), subset).reshape(orders.shape)


def _correlations(
    x: Float[np.ndarray, "n_looks n"],
    y: Float[np.ndarray, "n_orders n"],
    kept: Bool[np.ndarray, "n_orders n"],
) -> tuple[
    Float[np.ndarray, "n_orders n_looks"], Float[np.ndarray, "n_orders n_looks"]
]:
    """Pearson's r under each order and over how many models; NaN below three, or where
    x or y is constant.
    """
    known_x, known = np.isfinite(x), kept & np.isfinite(y)
    x, y = _standard(x), _standard(y)
    y = np.where(known, y, 0.0)
    n = known @ known_x.T.astype(float)
    sum_x, sum_xx, sum_y, sum_yy = (
        known @ x.T,
        known @ (x**2).T,
        y @ known_x.T,
        y**2 @ known_x.T,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        spread_x, spread_y = sum_xx - sum_x**2 / n, sum_yy - sum_y**2 / n
        r = (y @ x.T - sum_x * sum_y / n) / np.sqrt(spread_x * spread_y)
    defined = (n >= 3) & (spread_x > _SAME) & (spread_y > _SAME)
    return np.where(defined, np.clip(r, -1, 1), np.nan), n


def _standard(values: Float[np.ndarray, "rows n"]) -> Float[np.ndarray, "rows n"]:
    """Each row centred and in standard units, so that nothing is lost in sums of
    squares; 0 for NaN, or if constant.
    """
    known = np.isfinite(values)
    n = np.maximum(known.sum(1, keepdims=True), 1)
    mean = np.where(known, values, 0.0).sum(1, keepdims=True) / n
    centred = np.where(known, values - mean, 0.0)
    spread = np.sqrt((centred**2).sum(1, keepdims=True) / n)
    return np.divide(
        centred, spread, out=np.zeros(values.shape), where=spread > 1e-12 * np.abs(mean)
    )
