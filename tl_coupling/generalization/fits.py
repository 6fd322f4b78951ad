"""Fits of one column of a table against another, a row a model. scipy and statsmodels do the statistics."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tl_coupling.border import checked
from tl_coupling.generalization.expressions import evaluate

if TYPE_CHECKING:
    import pandas

LEVEL = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True)
class LinearFit:
    """Ordinary least squares, `y ≈ intercept + slope · x`.

    Attributes:
        x, y: the columns.
        n: how many rows have both.
        slope, intercept: in units of y per x, and of y; their intervals are t intervals at `level`.
        r_squared: share of the variance of y that the line explains.
        p: two-sided, of slope 0.
        level: of the intervals.
    """

    x: str
    y: str
    n: int
    slope: float
    slope_interval: Interval
    intercept: float
    intercept_interval: Interval
    r_squared: float
    p: float
    level: float = LEVEL


@dataclass(frozen=True)
class ExponentialFit:
    """`y ≈ a · exp(b · x)`, least squares on y itself, not on its logarithm.

    Attributes:
        x, y: the columns.
        n: how many rows have both.
        a, b: a in units of y, b in units of 1/x; the interval of b is a t interval at `level`.
        r_squared: `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`, on y.
        p: two-sided, of b = 0, from the covariance at the solution.
        level: of the interval.
    """

    x: str
    y: str
    n: int
    a: float
    b: float
    b_interval: Interval
    r_squared: float
    p: float
    level: float = LEVEL


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ, with scipy's two-sided p (a t approximation: rough below ten rows).

    Attributes:
        x, y: the columns.
        n: how many rows have both.
        rho: in [−1, 1].
        p: of ρ = 0.
    """

    x: str
    y: str
    n: int
    rho: float
    p: float


@checked
def linear_fit(table: "pandas.DataFrame", x: str, y: str) -> LinearFit:
    """Ordinary least squares of column y on column x.

    Args:
        table: a row a model.
        x, y: columns, or expressions of them, such as `"log10(n_parameters)"`: numbers, `+ - * / **`, comparisons,
            `log`, `log10`, `log2`, `sqrt`, `exp`, `abs`; names of columns that are not Python's in backticks. Rows that
            lack one are left out.

    Raises:
        ValueError: no such column, one that is not numbers, fewer than three rows, x or y constant;
            statsmodels is not installed.

    Example:
        >>> import pandas
        >>> from tl_coupling.generalization import linear_fit
        >>> fit = linear_fit(pandas.DataFrame({"coupling": [1, 2, 3, 4], "score": [2, 4, 5, 9]}), "coupling", "score")
        >>> round(fit.slope, 3), round(fit.r_squared, 3)
        (2.2, 0.931)
    """
    if importlib.util.find_spec("statsmodels") is None:
        raise ValueError('fits across models need statsmodels: pip install "tl-coupling[survey]"')
    import statsmodels.api as sm

    rows = pairs(table, x, y)
    result = sm.OLS(rows[y].to_numpy(), sm.add_constant(rows[x].to_numpy())).fit()
    (intercept_interval, slope_interval) = result.conf_int(1 - LEVEL).tolist()
    intercept, slope = result.params.tolist()
    return LinearFit(
        x=x,
        y=y,
        n=len(rows),
        slope=slope,
        slope_interval=tuple(slope_interval),
        intercept=intercept,
        intercept_interval=tuple(intercept_interval),
        r_squared=float(result.rsquared),
        p=float(result.pvalues[1]),
    )


@checked
def exponential_fit(table: "pandas.DataFrame", x: str, y: str) -> ExponentialFit:
    """Least squares of `a · exp(b · x)` on column y, with `scipy.optimize.curve_fit`.

    Args:
        table, x, y: as in `linear_fit`.

    Raises:
        ValueError: as in `linear_fit`; or the fit does not settle.

    Source:
        Aubry et al. 2025, figure 8, which shows such a fit and does not say how it was made.
    """
    import warnings

    from scipy import optimize, stats

    rows = pairs(table, x, y)
    given, wanted = rows[x].to_numpy(), rows[y].to_numpy()
    # In standard units, or a and b are all but collinear.
    centre, scale = given.mean(), given.std()
    z = (given - centre) / scale
    if (wanted > 0).all() or (wanted < 0).all():
        line = stats.linregress(z, np.log(np.abs(wanted)))
        start = (np.sign(wanted[0]) * np.exp(line.intercept), line.slope)
    else:
        start = (wanted.mean() or 1.0, 0.0)
    try:
        with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
            warnings.simplefilter("error", optimize.OptimizeWarning)
            (a, b), covariance = optimize.curve_fit(lambda z, a, b: a * np.exp(b * z), z, wanted, p0=start)
    except (RuntimeError, optimize.OptimizeWarning):
        raise ValueError(f"no a · exp(b · {x}) settles on {y!r} of {len(rows)} rows") from None
    freedom, error = len(rows) - 2, float(np.sqrt(covariance[1, 1]))
    half = stats.t.ppf((1 + LEVEL) / 2, freedom) * error
    residuals = wanted - a * np.exp(b * z)
    return ExponentialFit(
        x=x,
        y=y,
        n=len(rows),
        a=float(a * np.exp(-b * centre / scale)),
        b=float(b / scale),
        b_interval=(float((b - half) / scale), float((b + half) / scale)),
        r_squared=float(1 - residuals @ residuals / ((wanted - wanted.mean()) ** 2).sum()),
        p=float(2 * stats.t.sf(abs(b) / error, freedom)) if error > 0 else 0.0,
    )


@checked
def rank_correlation(table: "pandas.DataFrame", x: str, y: str) -> RankCorrelation:
    """Spearman's ρ of columns x and y; arguments and errors as in `linear_fit`."""
    from scipy import stats

    rows = pairs(table, x, y)
    result = stats.spearmanr(rows[x], rows[y])
    return RankCorrelation(x=x, y=y, n=len(rows), rho=float(result.statistic), p=float(result.pvalue))


@checked
def subset_fits(
    table: "pandas.DataFrame", subsets: "Mapping[str, str | Sequence[bool] | pandas.Series]", x: str, y: str
) -> dict[str, LinearFit]:
    """The linear fit on each subset of the models.

    Args:
        table, x, y: as in `linear_fit`.
        subsets: by name, a query or a mask over the rows. A query is an expression as in `linear_fit` that is true or
            false: `"score > 45 and n_layers <= 32"`, `"family in ['llama', 'gpt2']"`.

    Raises:
        ValueError: as in `linear_fit`, saying which subset; a query that cannot be read.

    Source:
        Aubry et al. 2025, table 4: models of 7 billion parameters only, and those that score above 45.
    """
    fits = {}
    for name, subset in subsets.items():
        try:
            mask = np.asarray(evaluate(table, subset) if isinstance(subset, str) else subset)
            if mask.dtype != bool or mask.shape != (len(table),):
                raise ValueError(f"wanted one of true and false for each of {len(table)} rows")
            fits[name] = linear_fit(table[mask], x, y)
        except ValueError as error:
            raise ValueError(f"subset {name!r}: {error}") from None
    return fits


def pairs(table: "pandas.DataFrame", x: str, y: str) -> "pandas.DataFrame":
    """The rows that hold both x and y.

    Raises:
        ValueError: fewer than three, or one of them is constant.
    """
    rows = complete_rows(table, (x, y))
    if len(rows) < 3:
        raise ValueError(f"a fit of {y!r} on {x!r} wants three models or more that have both, got {len(rows)}")
    for name in (x, y):
        if is_constant(rows[name].to_numpy()):
            raise ValueError(f"{name!r} is the same for all {len(rows)} models, {rows[name].iloc[0]:g}: nothing to fit")
    return rows


def complete_rows(table: "pandas.DataFrame", names: Sequence[str]) -> "pandas.DataFrame":
    """Columns, or expressions of columns, as floats; rows that lack one are left out. The index stays."""
    import pandas

    columns = {}
    for name in names:
        values = table[name] if name in table else evaluate(table, name)
        try:
            columns[name] = pandas.Series(values, index=table.index).astype(float)
        except (TypeError, ValueError):
            raise ValueError(f"column {name!r} is not numbers") from None
    rows = pandas.DataFrame(columns).dropna()
    if infinite := [name for name in names if not np.isfinite(rows[name]).all()]:
        raise ValueError(f"column {infinite[0]!r} holds values that are not finite")
    return rows


def is_constant(values: np.ndarray) -> bool:
    """Whether nothing varies but rounding."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())
