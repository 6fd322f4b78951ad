"""The level of every interval, intervals, permutations and rank correlations: one place
for what is meant by them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

Interval = tuple[float, float]

LEVEL = 0.95
_UPPER = (1 + LEVEL) / 2
# 9! = 362,880 orders take a fifth of a second.
_MOST_ENUMERATED = 9
# Equal up to rounding.
_SAME = 1e-9
# Fourth powers of what is fitted must neither overflow nor vanish: influence takes
# determinants of squares.
_LARGEST = 1e50


def crossed_mean(
    x: Float[np.ndarray, "rows cols ..."],
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Mean over the first two axes, both samples (seeds and prompts), and half its t
    interval.

    Squared standard error: `s²_rows / n_rows + s²_cols / n_cols`, of the means of rows
    and of columns. Degrees of freedom: Welch and Satterthwaite's. Interaction of rows
    and columns counts twice, so intervals are rather too wide. NaN is left out; an axis
    of one is not a sample, and with none the interval is NaN.
    """
    masked = np.ma.masked_invalid(x)
    squares, by_freedom, is_sampled = np.zeros((3, *x.shape[2:]))
    for axis in (0, 1):
        means = masked.mean(1 - axis)
        n = means.count(0)
        square = (
            (means.var(0, ddof=1) / np.maximum(n, 1)).filled(0)
            if len(means) > 1
            else np.zeros(x.shape[2:])
        )
        squares, by_freedom = (
            squares + square,
            by_freedom + square**2 / np.maximum(n - 1, 1),
        )
        is_sampled = is_sampled + (n > 1)
    freedom = np.divide(
        squares**2, by_freedom, out=np.ones(x.shape[2:]), where=squares > 0
    )
    half = stats.t.ppf(_UPPER, freedom) * np.sqrt(squares)
    return np.ma.filled(masked.mean((0, 1)), np.nan), np.where(
        is_sampled > 0, half, np.nan
    )


def rank_correlation_of_rows(
    a: Float[np.ndarray, "n_samples n"], b: Float[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, " n_samples"]:
    """Spearman's ρ of each row: Pearson's r of the ranks, ties at their mean rank; NaN
    where it is undefined.

    A row may end in NaN, in the same places of both, where it is shorter than the
    others.
    """
    if a.shape[1] < 3:
        return np.full(len(a), np.nan)
    there = np.isfinite(a)
    middle = (there.sum(1, keepdims=True) + 1) / 2
    # Infinity has the last ranks.
    a, b = (
        np.where(
            there, stats.rankdata(np.where(there, x, np.inf), axis=1) - middle, 0.0
        )
        for x in (a, b)
    )
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))


@dataclass(frozen=True)
class RankCorrelation:
    """Rank correlations of `n` pairs: Spearman's ρ and Kendall's τ_b, each with its
    two-sided p.

    Up to nine pairs p is exact, the share of all n! orders that correlate as strongly:
    for perfect order of four, 1/12. Above it is scipy's: a t approximation for ρ. Pairs
    in families have p from permutations that keep the families, see
    `block_permutations`.
    """

    n: int
    rho: float
    p: float
    tau: float
    tau_p: float


def rank_correlation(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    *,
    families: Int[np.ndarray, " n"] | None = None,
    n_permutations: int = 2000,
    seed: int = 0,
) -> RankCorrelation:
    """Spearman's ρ and Kendall's τ_b of paired values, ties at their mean rank; NaN
    where they are undefined.

    `families` numbers the family of each pair; `n_permutations` and `seed` are of the
    permutations that keep them.
    """
    rho, tau = stats.spearmanr(x, y), stats.kendalltau(x, y)
    found = float(rho.statistic), float(tau.statistic)
    if families is not None:
        orders = block_permutations(
            families, n_permutations, np.random.default_rng(seed)
        )
    elif 2 <= len(x) <= _MOST_ENUMERATED:
        orders = _all_orders(len(x))
    else:
        return RankCorrelation(
            len(x), found[0], float(rho.pvalue), found[1], float(tau.pvalue)
        )
    if np.isnan(found).any():
        return RankCorrelation(len(x), np.nan, np.nan, np.nan, np.nan)
    # What permutations do not change is left out of both.
    ranks_x, ranks_y = (stats.rankdata(values) - (len(x) + 1) / 2 for values in (x, y))
    i, j = np.triu_indices(len(x), 1)
    signs_x, signs_y = (
        np.sign(values[:, None] - values).astype(np.float32) for values in (x, y)
    )
    with_rho = [np.abs(ranks_y[some] @ ranks_x) for some in _parts(orders)]
    with_tau = [
        np.abs(signs_y[some[:, i], some[:, j]] @ signs_x[i, j])
        for some in _parts(orders)
    ]
    p, tau_p = (
        _share(np.concatenate(permuted), float(abs(observed)), families is None)
        for permuted, observed in (
            (with_rho, ranks_x @ ranks_y),
            (with_tau, signs_x[i, j] @ signs_y[i, j]),
        )
    )
    return RankCorrelation(len(x), found[0], p, found[1], tau_p)


def block_permutations(
    families: Int[np.ndarray, " n"], n_permutations: int, rng: np.random.Generator
) -> Int[np.ndarray, "n_permutations n"]:
    """Random permutations under which models in families can be exchanged: row by row,
    whose value each one takes.

    Members change places within their family, and whole families with others of their
    size. Where no family has two members these are all permutations. A p from them is
    exact if, under the null hypothesis, families are alike and independent, and members
    of a family alike: the members may be correlated. Source: Winkler et al. 2015,
    *Multi-level block permutation*, NeuroImage 123.
    """
    permuted = np.empty((n_permutations, len(families)), int)
    names, sizes = np.unique(families, return_counts=True)
    for size in np.unique(sizes):
        # One row per family of that size.
        members = np.stack(
            [np.flatnonzero(families == name) for name in names[sizes == size]]
        )
        order = rng.permuted(
            np.tile(np.arange(len(members)), (n_permutations, 1)), axis=1
        )
        permuted[:, members.ravel()] = rng.permuted(members[order], axis=2).reshape(
            n_permutations, -1
        )
    return permuted


@cache
def _all_orders(n: int) -> Int[np.ndarray, "n_orders n"]:
    return np.array(list(itertools.permutations(range(n))))


def _parts(
    orders: Int[np.ndarray, "n_orders n"],
) -> Iterator[Int[np.ndarray, "some n"]]:
    """Some at a time, to bound the memory, which is that of all pairs in each."""
    step = max(1, 4_000_000 // orders.shape[1] ** 2)
    return (orders[start : start + step] for start in range(0, len(orders), step))


def _share(
    permuted: Float[np.ndarray, " n_orders"], observed: float, is_all: bool
) -> float:
    """Share of the orders in which a statistic is at least as large; of a sample, the
    order observed counts as one.
    """
    as_large = int((permuted >= observed * (1 - _SAME)).sum())
    return as_large / len(permuted) if is_all else (1 + as_large) / (1 + len(permuted))


def cluster_robust(
    design: Float[np.ndarray, "n n_columns"],
    residuals: Float[np.ndarray, " n"],
    families: Int[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " n_columns"], Float[np.ndarray, " n_columns"]]:
    """Standard errors of least squares whose rows are correlated within families, and
    their degrees of freedom.

    `V = B (Σ_g X_gᵀ A_g e_g e_gᵀ A_g X_g) B`, with `B = (XᵀX)⁻¹`, residuals e and `A_g
    = (I − X_g B X_gᵀ)^(−1/2)`: CR2, unbiased for independent rows. Degrees of freedom:
    Bell and McCaffrey's, `(Σ λ)² / Σ λ²`, Satterthwaite's for the weighted sum of χ²
    that an element of V then is. They are small with few families, or where few have
    different x.

    Why this one: of slopes of 12 and 24 models in families of 4, its 95 % intervals
    cover .95. Those of CR1, and of CR2 with G − 1 degrees of freedom and six families,
    cover too little; those of CR3, and of the wild cluster bootstrap of three families,
    too much; the means of families hold too, and are wider. `make bench-statistics`
    prints all of them.

    Source: Bell and McCaffrey 2002, *Bias reduction in standard errors*, Survey
    Methodology 28; Pustejovsky and Tipton 2018, *Small-sample methods for
    cluster-robust variance estimation*, JBES 36. statsmodels has CR1 only.
    """
    bread = np.linalg.inv(design.T @ design)
    rest = np.eye(len(design)) - design @ bread @ design.T
    weights = []
    for family in np.unique(families):
        own = families == family
        values, vectors = np.linalg.eigh(rest[np.ix_(own, own)])
        # Directions that the fit takes up whole hold no residual.
        root = (
            vectors
            @ np.diag([value**-0.5 if value > _SAME else 0.0 for value in values])
            @ vectors.T
        )
        weights.append(bread @ design[own].T @ root @ rest[own])
    # Of each family and column, what its part of the estimate is of the errors.
    parts = np.stack(weights, 1)
    squares = ((parts @ residuals) ** 2).sum(1)
    products = parts @ parts.transpose(0, 2, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = np.trace(products, axis1=1, axis2=2) ** 2 / (products**2).sum((1, 2))
    return np.sqrt(squares), freedom


def t_interval(estimate: float, error: float, freedom: float) -> Interval:
    """`estimate ± t · error`, with `t` of that many degrees of freedom."""
    half = float(stats.t.ppf(_UPPER, freedom) * error)
    return float(estimate) - half, float(estimate) + half


def percentile_interval(
    draws: Float[np.ndarray, "draws ..."], n_resampled: int | None = None
) -> Float[np.ndarray, "2 ..."]:
    """Lower and upper end of the interval that holds the middle 95 % of the draws
    (first axis).

    Of `n_resampled` models or prompts, draws vary by too little and with too light
    tails: the ends are then the quantiles at `Φ(∓ t √(n / (n − 1)))`, with `t` of n − 1
    degrees of freedom, so that the interval of a mean of normal values is the t
    interval. Source: Hesterberg 2015, *What teachers should know about the bootstrap*,
    The American Statistician 69 ("expanded percentile"). What both cover: `make
    bench-statistics`.
    """
    upper = _UPPER
    if n_resampled is not None and n_resampled > 1:
        upper = stats.norm.cdf(
            stats.t.ppf(_UPPER, n_resampled - 1)
            * np.sqrt(n_resampled / (n_resampled - 1))
        )
    return np.quantile(draws, [1 - upper, upper], axis=0)


def resamples(
    n: int, n_resamples: int, rng: np.random.Generator
) -> Iterator[Int[np.ndarray, "draws n"]]:
    """Indices of bootstrap samples, n of n with replacement, some hundred samples at a
    time to bound the memory.
    """
    for start in range(0, n_resamples, 500):
        yield rng.integers(n, size=(min(500, n_resamples - start), n))


def check_size(values: Float[np.ndarray, "..."], name: str) -> None:
    """Raise ValueError where the squares of values, NaN aside, would overflow, or all
    of them vanish.
    """
    # In float32 the limit itself would overflow.
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    if largest > _LARGEST:
        raise ValueError(
            f"{name} has a value of {largest:.3g} in size, and fits overflow; give it in another unit"
        )
    if 0 < largest < 1 / _LARGEST:
        raise ValueError(
            f"{name} has no value above {largest:.3g} in size, and fits vanish; give it in another unit"
        )


def is_constant(
    values: Float[np.ndarray, "... n"],
) -> Bool[np.ndarray, "..."] | np.bool_:
    """Whether values along the last axis differ by no more than rounding."""
    return np.ptp(values, axis=-1) <= 1e-12 * np.abs(values).max(-1)
