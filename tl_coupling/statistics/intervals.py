"""The level of every interval, intervals, permutations and rank correlations: one place
for what is meant by them.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import factorial, prod

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from tl_coupling.arguments import warn_caller

Interval = tuple[float, float]

LEVEL = 0.95
_UPPER = (1 + LEVEL) / 2
# 9! = 362,880 orders take a fifth of a second.
_MOST_ENUMERATED = 9
_MOST_PAIRS = 4_000_000
_DRAWS_AT_A_TIME = 500
# Draws of a band: each is compared with the spread of the others; with these
# n/(n + 1) is 95 %.
_FEWEST_OF_BAND = 3
_FEWEST_OF_FULL_BAND = 19
# Statistics of the same numbers in another order differ by less, relative to their size:
# they are equal up to rounding.
ROUNDING = 1e-9
# Fourth powers of what is fitted must neither overflow nor vanish: influence takes
# determinants of squares.
_LARGEST = 1e50


def crossed_mean(
    x: Float[np.ndarray, "rows cols ..."],
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Return the mean over the first two axes, and half its t interval.

    Both axes are samples, such as seeds and prompts.

    Squared standard error: `s²_rows / n_rows + s²_cols / n_cols`, of the means of rows
    and of columns. Degrees of freedom: Welch and Satterthwaite's. Interaction of rows
    and columns counts twice, so intervals are rather too wide. NaN is left out; an axis
    of one is not a sample, and with none the interval is NaN.
    """
    if x.ndim == 2:
        # Sums over both axes would be plain numbers, which have no mask.
        mean, half_width = crossed_mean(x[..., None])
        return mean.squeeze(-1), half_width.squeeze(-1)
    masked = np.ma.masked_invalid(x)
    squares = np.zeros(x.shape[2:])
    squares_by_freedom = np.zeros(x.shape[2:])
    is_sampled = np.zeros(x.shape[2:], bool)
    for axis in (0, 1):
        # The means of rows, then those of columns.
        means = masked.mean(1 - axis)
        n = means.count(0)
        square = np.zeros(x.shape[2:])
        if len(means) > 1:
            square = (means.var(0, ddof=1) / np.maximum(n, 1)).filled(0)
        squares = squares + square
        squares_by_freedom = squares_by_freedom + square**2 / np.maximum(n - 1, 1)
        is_sampled = is_sampled | (n > 1)
    # Welch and Satterthwaite. Without any spread the width is 0 for any freedom.
    freedom = np.divide(
        squares**2,
        squares_by_freedom,
        out=np.ones(x.shape[2:]),
        where=squares > 0,
    )
    half_width = stats.t.ppf(_UPPER, freedom) * np.sqrt(squares)
    mean = np.ma.filled(masked.mean((0, 1)), np.nan)
    return mean, np.where(is_sampled, half_width, np.nan)


def rank_correlation_of_rows(
    a: Float[np.ndarray, "n_samples n"], b: Float[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, " n_samples"]:
    """Return Spearman's ρ of each row; NaN where it is undefined.

    It is Pearson's r of the ranks, ties being at their mean rank. A row may end in NaN,
    in the same places of both, where it is shorter than the others.
    """
    # Two pairs correlate by 1 or −1 whatever they are.
    if a.shape[1] < 3:
        return np.full(len(a), np.nan)
    is_known = np.isfinite(a)
    a = _centred_ranks(a, is_known)
    b = _centred_ranks(b, is_known)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))


def _centred_ranks(
    values: Float[np.ndarray, "n_samples n"], is_known: Bool[np.ndarray, "n_samples n"]
) -> Float[np.ndarray, "n_samples n"]:
    """Return the ranks of each row less their mean; 0 where a value is not known."""
    # n known values have the ranks 1 to n: infinity stands for the others, and is last.
    mean_rank = (is_known.sum(1, keepdims=True) + 1) / 2
    ranks = stats.rankdata(np.where(is_known, values, np.inf), axis=1)
    return np.where(is_known, ranks - mean_rank, 0.0)


@dataclass(frozen=True)
class RankCorrelation:
    """Rank correlations of `n` pairs: Spearman's ρ and Kendall's τ_b, each with its
    two-sided p.

    Up to nine pairs p is exact, the share of all n! orders that correlate as strongly:
    for perfect order of four, 1/12. Above it is scipy's: a t approximation for ρ. Pairs
    in families have p from permutations that keep the families, see `orders_of_blocks`.
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
    """Return Spearman's ρ and Kendall's τ_b of paired values, each with its p.

    Ties are at their mean rank. NaN where they are undefined.

    Args:
        x, y: paired values.
        families: the number of the family of each pair.
        n_permutations, seed: of the permutations that keep families; all of them where
            there are no more.
    """
    n = len(x)
    spearman = stats.spearmanr(x, y)
    kendall = stats.kendalltau(x, y)
    rho = float(spearman.statistic)
    tau = float(kendall.statistic)
    if families is not None:
        rng = np.random.default_rng(seed)
        orders, _ = orders_of_blocks(families, n_permutations, rng)
    elif 2 <= n <= _MOST_ENUMERATED:
        orders = _all_orders(n)
    else:
        return RankCorrelation(
            n, rho, float(spearman.pvalue), tau, float(kendall.pvalue)
        )
    if np.isnan(rho) or np.isnan(tau):
        return RankCorrelation(n, np.nan, np.nan, np.nan, np.nan)
    return RankCorrelation(
        n, rho, _p_of_rho(x, y, orders), tau, _p_of_tau(x, y, orders)
    )


def _p_of_rho(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    orders: Int[np.ndarray, "n_orders n"],
) -> float:
    # The statistic leaves out what permutations do not change.
    middle = (len(x) + 1) / 2
    ranks_x = stats.rankdata(x) - middle
    ranks_y = stats.rankdata(y) - middle
    permuted = [np.abs(ranks_y[part] @ ranks_x) for part in _parts(orders)]
    observed = float(abs(ranks_x @ ranks_y))
    return _share(np.concatenate(permuted), observed)


def _p_of_tau(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    orders: Int[np.ndarray, "n_orders n"],
) -> float:
    # The statistic leaves out what permutations do not change.
    i, j = np.triu_indices(len(x), 1)
    signs_x = np.sign(x[:, None] - x).astype(np.float32)
    signs_y = np.sign(y[:, None] - y).astype(np.float32)
    permuted = [
        np.abs(signs_y[part[:, i], part[:, j]] @ signs_x[i, j])
        for part in _parts(orders)
    ]
    observed = float(abs(signs_x[i, j] @ signs_y[i, j]))
    return _share(np.concatenate(permuted), observed)


def block_permutations(
    families: Int[np.ndarray, " n"], n_permutations: int, rng: np.random.Generator
) -> Int[np.ndarray, "n_permutations n"]:
    """Return random permutations under which models in families can be exchanged.

    A row is one permutation: whose value each model takes. Members change places within
    their family, and whole families with others of their size. Where no family has two
    members these are all permutations. A p from them is exact if, under the null
    hypothesis, families are alike and independent, and members of a family alike: the
    members may be correlated. Source: Winkler et al. 2015, *Multi-level block
    permutation*, NeuroImage 123.
    """
    permuted = np.empty((n_permutations, len(families)), int)
    names, sizes = np.unique(families, return_counts=True)
    for size in np.unique(sizes):
        # One row per family of that size.
        members = np.stack(
            [np.flatnonzero(families == name) for name in names[sizes == size]]
        )
        own_order = np.tile(np.arange(len(members)), (n_permutations, 1))
        order_of_families = rng.permuted(own_order, axis=1)
        exchanged = rng.permuted(members[order_of_families], axis=2)
        permuted[:, members.ravel()] = exchanged.reshape(n_permutations, -1)
    return permuted


def orders_of_blocks(
    families: Int[np.ndarray, " n"], n_permutations: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, "n_orders n"], bool]:
    """Return whose value each model takes: its own in the first row, then permuted as in
    `block_permutations`; and whether these are all orders that there are.

    All of them where there are no more than so many permutations and the first.
    """
    _, sizes = np.unique(families, return_counts=True)
    # Python's integers: NumPy's overflow from 21 families.
    families_of_size = Counter(sizes.tolist())
    n_orders = prod(
        factorial(n_families) * factorial(size) ** n_families
        for size, n_families in families_of_size.items()
    )
    if n_orders <= 1 + n_permutations:
        return _all_block_orders(families), True
    own = np.arange(len(families))
    return np.vstack([own, block_permutations(families, n_permutations, rng)]), False


def _all_block_orders(
    families: Int[np.ndarray, " n"],
) -> Int[np.ndarray, "n_orders n"]:
    names, sizes = np.unique(families, return_counts=True)
    orders = np.arange(len(families))[None]
    for size in np.unique(sizes):
        members = [np.flatnonzero(families == name) for name in names[sizes == size]]
        # All orders in which these members may take each other's places.
        own_orders = [list(itertools.permutations(family)) for family in members]
        taken = [
            np.concatenate([chosen[family] for family in family_order])
            for chosen in itertools.product(*own_orders)
            for family_order in itertools.permutations(range(len(members)))
        ]
        # Each way beside each of the families of other sizes.
        orders = np.repeat(orders, len(taken), axis=0)
        n_before = len(orders) // len(taken)
        orders[:, np.concatenate(members)] = np.tile(taken, (n_before, 1))
    return orders


@cache
def _all_orders(n: int) -> Int[np.ndarray, "n_orders n"]:
    return np.array(list(itertools.permutations(range(n))))


def _parts(
    orders: Int[np.ndarray, "n_orders n"],
) -> Iterator[Int[np.ndarray, "some n"]]:
    """Yield some orders at a time, to bound the memory: all pairs of each are held."""
    step = max(1, _MOST_PAIRS // orders.shape[1] ** 2)
    return (orders[start : start + step] for start in range(0, len(orders), step))


def _share(permuted: Float[np.ndarray, " n_orders"], observed: float) -> float:
    """Return the share of the orders, the observed one among them, in which a statistic
    is at least as large.
    """
    return float((permuted >= observed * (1 - ROUNDING)).mean())


def cluster_robust(
    design: Float[np.ndarray, "n n_columns"],
    residuals: Float[np.ndarray, " n"],
    families: Int[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " n_columns"], Float[np.ndarray, " n_columns"]]:
    """Return standard errors of least squares, and their degrees of freedom, where rows
    are correlated within families.

    `V = B (Σ_g X_gᵀ A_g e_g e_gᵀ A_g X_g) B`, with `B = (XᵀX)⁻¹`, residuals e and `A_g
    = (I − X_g B X_gᵀ)^(−1/2)`: CR2, unbiased for independent rows. Degrees of freedom:
    Bell and McCaffrey's, `(Σ λ)² / Σ λ²`, Satterthwaite's for the weighted sum of χ²
    that an element of V then is. They are small with few families, or where few have
    different x. With each row a family of its own V is HC2.

    Why this one: of slopes of 12 and 24 models in families of 4, its 95 % intervals
    cover .95. Those of CR1, and of CR2 with G − 1 degrees of freedom and six families,
    cover too little; those of CR3, and of the wild cluster bootstrap of three families,
    too much; the means of families hold too, and are wider. `make bench-statistics`
    prints all of them.

    Source: Bell and McCaffrey 2002, *Bias reduction in standard errors*, Survey
    Methodology 28; Pustejovsky and Tipton 2018, *Small-sample methods for
    cluster-robust variance estimation*, JBES 36. statsmodels has CR1 only.
    """
    # By QR: the inverse of XᵀX squares the condition number.
    orthonormal, triangular = np.linalg.qr(design)
    coefficients_of = np.linalg.solve(triangular, orthonormal.T)
    annihilator = np.eye(len(design)) - orthonormal @ orthonormal.T
    weights = []
    for family in np.unique(families):
        is_member = families == family
        annihilator_block = annihilator[np.ix_(is_member, is_member)]
        adjustment = _inverse_root(annihilator_block)
        weights.append(
            coefficients_of[:, is_member] @ adjustment @ annihilator[is_member]
        )
    # `[column family n]`: what a family adds to the error of an estimate, of each error.
    parts = np.stack(weights, 1)
    squares = ((parts @ residuals) ** 2).sum(1)
    products = parts @ parts.transpose(0, 2, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Σ λ is the trace, and Σ λ² the squared Frobenius norm: no eigenvalue is
        # needed.
        freedom = np.trace(products, axis1=1, axis2=2) ** 2 / (products**2).sum((1, 2))
    return np.sqrt(squares), freedom


def _inverse_root(matrix: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Return `matrix^(−1/2)` of a symmetric matrix, 0 in its null space.

    Directions that the fit takes up whole hold no residual.
    """
    values, vectors = np.linalg.eigh(matrix)
    roots = [value**-0.5 if value > ROUNDING else 0.0 for value in values]
    return vectors @ np.diag(roots) @ vectors.T


def t_interval(estimate: float, error: float, freedom: float) -> Interval:
    """Return `estimate ± t · error`, with `t` of that many degrees of freedom."""
    half_width = float(stats.t.ppf(_UPPER, freedom) * error)
    return float(estimate) - half_width, float(estimate) + half_width


def prediction_interval(
    draws: Float[np.ndarray, "draws ..."],
) -> Float[np.ndarray, "2 ..."]:
    """Return the ends of the interval in which one more draw lies with 95 %.

    `mean ± t s √(1 + 1/n)`, of n draws along the first axis, at least 2, that are about
    normal; t has n − 1 degrees of freedom.
    """
    n = len(draws)
    mean = draws.mean(0)
    half_width = stats.t.ppf(_UPPER, n - 1) * np.sqrt(1 + 1 / n) * draws.std(0, ddof=1)
    return np.stack([mean - half_width, mean + half_width])


def simultaneous_band(
    draws: Float[np.ndarray, "draws points"],
) -> Float[np.ndarray, "2 points"]:
    """Return the ends of the band in which one more curve lies whole with 95 %.

    `mean ± c s √(1 + 1/n)` at every point. c is what the draws themselves call for: each
    is compared with the n − 1 others, its largest distance over the points is taken, in
    standard deviations as above, and c is the largest of these distances, or the
    ⌈.95 (n + 1)⌉-th where there are more than 20 draws. Of fewer than 19 draws the band
    holds one more with n/(n + 1), not 95 %, which is warned of. Points where all draws
    are equal have no width and do not count.

    Points of one curve go together: at a single point 5 % of curves leave the interval
    of `prediction_interval`, at one point or more of many far more do.

    Raises ValueError for fewer than three draws: one alone has no spread with which the
    other could be compared.
    """
    n = len(draws)
    if n < _FEWEST_OF_BAND:
        raise ValueError(
            f"a band in which whole lines stay needs at least {_FEWEST_OF_BAND} draws, "
            f"got {n}: ask for {_FEWEST_OF_FULL_BAND} or more"
        )
    if n < _FEWEST_OF_FULL_BAND:
        warn_caller(
            f"the band of {n} draws holds one more line with {n / (n + 1):.0%}, not "
            f"{LEVEL:.0%}: ask for {_FEWEST_OF_FULL_BAND} draws or more"
        )
    distances = [_distances(draws[i], np.delete(draws, i, 0)).max() for i in range(n)]
    rank = min(n, math.ceil(0.95 * (n + 1)))
    half_width = np.sort(distances)[rank - 1] * _spread_of_new(draws)
    return np.stack([draws.mean(0) - half_width, draws.mean(0) + half_width])


def _distances(
    curve: Float[np.ndarray, " points"], others: Float[np.ndarray, "draws points"]
) -> Float[np.ndarray, " points"]:
    """Return how far a curve lies from the mean of others, in standard deviations."""
    spread = _spread_of_new(others)
    distance = np.abs(curve - others.mean(0))
    return np.divide(distance, spread, out=np.zeros_like(distance), where=spread > 0)


def _spread_of_new(
    draws: Float[np.ndarray, "draws points"],
) -> Float[np.ndarray, " points"]:
    """Return the standard deviation of a new draw minus the mean of these."""
    n = len(draws)
    spread: Float[np.ndarray, " points"] = draws.std(0, ddof=1) * np.sqrt(1 + 1 / n)
    # Rounding apart, equal draws have no spread.
    return np.where(spread > 1e-6 * np.abs(draws).max(0), spread, 0.0)


def percentile_interval(
    draws: Float[np.ndarray, "draws ..."], n_resampled: int | None = None
) -> Float[np.ndarray, "2 ..."]:
    """Return the ends of the interval that holds the middle 95 % of the draws.

    Draws stand along the first axis. Of `n_resampled` models or prompts, draws vary by
    too little and with too light tails: the ends are then the quantiles at `Φ(∓ t √(n /
    (n − 1)))`, with `t` of n − 1 degrees of freedom, so that the interval of a mean of
    normal values is the t interval. Source: Hesterberg 2015, *What teachers should know
    about the bootstrap*, The American Statistician 69 ("expanded percentile"). What
    both cover: `make bench-statistics`.
    """
    upper = _UPPER
    if n_resampled is not None and n_resampled > 1:
        t = stats.t.ppf(_UPPER, n_resampled - 1)
        # `Φ(t √(n / (n − 1)))` takes the place of .975.
        upper = stats.norm.cdf(t * np.sqrt(n_resampled / (n_resampled - 1)))
    return np.quantile(draws, [1 - upper, upper], axis=0)


def resamples(
    n: int, n_resamples: int, rng: np.random.Generator
) -> Iterator[Int[np.ndarray, "draws n"]]:
    """Yield indices of bootstrap samples, n of n with replacement.

    Some hundred samples come at a time, to bound the memory.
    """
    for start in range(0, n_resamples, _DRAWS_AT_A_TIME):
        n_draws = min(_DRAWS_AT_A_TIME, n_resamples - start)
        yield rng.integers(n, size=(n_draws, n))


def check_size(values: Float[np.ndarray, "..."], name: str) -> None:
    """Raise ValueError where the squares of values, NaN aside, would overflow, or all
    of them vanish.
    """
    # In float32 the limit itself would overflow. Infinity is no value that is missing.
    largest = float(np.abs(values[~np.isnan(values)]).max(initial=0.0))
    if largest > _LARGEST:
        raise ValueError(
            f"{name} has a value of {largest:.3g} in size, and fits overflow; "
            "give it in another unit"
        )
    if 0 < largest < 1 / _LARGEST:
        raise ValueError(
            f"{name} has no value above {largest:.3g} in size, and fits vanish; "
            "give it in another unit"
        )


def is_constant(
    values: Float[np.ndarray, "... n"],
) -> Bool[np.ndarray, "..."] | np.bool_:
    """Say whether values along the last axis differ by no more than rounding."""
    return np.ptp(values, axis=-1) <= 1e-12 * np.abs(values).max(-1)
