"""Fits of one column of a table against another, one model per row; statsmodels and scipy do the statistics."""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas
from jaxtyping import Float

from tl_coupling.border import checked
from tl_coupling.generalization.expressions import evaluate
from tl_coupling.statistics import LEVEL, Interval, is_constant, t_interval

_ALPHA = 0.05


@dataclass(frozen=True)
class LinearFit:
    """Ordinary least squares, `y ≈ intercept + slope · x`, of n rows, with the controls held fixed.

    Attributes:
        slope, intercept: in units of y per x, and of y (where the controls are at their mean); with t intervals.
        r_squared: share of the variance of y that x explains; with controls, of the variance that they leave.
        vif: by how much the controls inflate the variance of the slope. 1 where they are uncorrelated with x; above 10,
            x and the controls can hardly be told apart.
        p, condition_number: two-sided, of slope 0; of x and the controls, standardised.
    """

    x: str
    y: str
    controls: tuple[str, ...]
    n: int
    slope: float
    slope_interval: Interval
    intercept: float
    intercept_interval: Interval
    r_squared: float
    p: float
    vif: float
    condition_number: float
    level: float = LEVEL

    def predict(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The line at x."""
        return self.intercept + self.slope * x


@dataclass(frozen=True)
class ExponentialFit:
    """`y ≈ a · exp(b · x)`, least squares on y itself, not on its logarithm.

    a is in units of y, b in units of 1/x, with a t interval; R² is `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`; p is two-sided, of
    b = 0, from the covariance at the solution.
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

    def predict(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The curve at x."""
        return self.a * np.exp(self.b * x)


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The linear fit without each model in turn.

    Attributes:
        table: by model, `cooks_distance`; `dfbetas`, by how many standard errors it moves the slope; `slope`,
            `r_squared` and `p` of the fit without it.
        most_influential, r_squared_range: the model without which R² changes most; smallest and largest R² without one.
        sign_changes, not_significant: models without which the slope has the other sign, or p first exceeds 0.05.
    """

    table: pandas.DataFrame = field(repr=False)
    most_influential: str
    r_squared_range: Interval
    sign_changes: tuple[str, ...]
    not_significant: tuple[str, ...]


@checked
def linear_fit(table: pandas.DataFrame, x: str, y: str, *, controls: Sequence[str] = ()) -> LinearFit:
    """Ordinary least squares of column y on column x, with the controls held fixed.

    Args:
        table: one model per row; rows that lack a value are left out.
        x, y, controls: columns, or expressions of them such as `"log10(n_parameters)"`: numbers, `+ - * / **`,
            comparisons, `log`, `log10`, `log2`, `sqrt`, `exp`, `abs`; names that are not valid in Python in backticks.

    Raises:
        ValueError: no such column, one that is not numbers, constant or given twice; too few rows for the columns;
            columns that determine each other; statsmodels is not installed.

    Example:
        >>> import pandas
        >>> from tl_coupling.generalization import linear_fit
        >>> columns = {"coupling": [1, 2, 3, 4, 5], "n_layers": [2, 1, 4, 3, 9], "score": [3, 3, 7, 8, 13]}
        >>> fit = linear_fit(pandas.DataFrame(columns), "coupling", "score", controls=["n_layers"])
        >>> round(fit.slope, 3), round(fit.vif, 3)
        (1.433, 2.939)
    """
    names = [x, *controls]
    if len({*names, y}) < len(names) + 1:
        raise ValueError(f"`x`, `y` and `controls` must be different columns, got {[x, y, *controls]}")
    rows = _rows_to_fit(table, names, y)
    design = rows[names].to_numpy()
    # In standard units: parameters are counted in billions, coupling in hundredths.
    scale = design.std(0)
    standard = (design - design.mean(0)) / scale
    if np.linalg.matrix_rank(standard, tol=1e-10 * np.linalg.norm(standard, 2)) < len(names):
        raise ValueError(f"{', '.join(names)} determine each other over {len(rows)} models: leave out a control")
    # x is not centred, so that the intercept is at x = 0.
    result = _least_squares(rows[y].to_numpy(), np.column_stack([design[:, 0] / scale[0], standard[:, 1:]]))
    low_high, t = result.conf_int(1 - LEVEL), result.tvalues[1]
    slope = float(result.params[1] / scale[0]), tuple((low_high[1] / scale[0]).tolist())
    intercept = float(result.params[0]), tuple(low_high[0].tolist())
    r_squared = t**2 / (t**2 + result.df_resid) if controls else result.rsquared
    # The diagonal of the inverse correlations.
    vif = np.linalg.inv(standard.T @ standard / len(rows))[0, 0]
    numbers = map(float, (r_squared, result.pvalues[1], vif, np.linalg.cond(standard)))
    return LinearFit(x, y, tuple(controls), len(rows), *slope, *intercept, *numbers)


def exponential_fit(table: pandas.DataFrame, x: str, y: str) -> ExponentialFit:
    """Least squares of `a · exp(b · x)`; arguments and errors as in `linear_fit`, and where it does not converge.

    Source: Aubry et al. 2025, figure 8, which shows such a fit without saying how it was made.
    """
    from scipy import optimize, stats

    rows = _rows_to_fit(table, (x,), y)
    given, wanted = rows[x].to_numpy(), rows[y].to_numpy()
    # In standard units: otherwise a and b are nearly collinear.
    centre, scale = given.mean(), given.std()
    z = (given - centre) / scale
    start = (wanted.mean() or 1.0, 0.0)
    if (wanted > 0).all() or (wanted < 0).all():
        line = stats.linregress(z, np.log(np.abs(wanted)))
        start = (np.sign(wanted[0]) * np.exp(line.intercept), line.slope)
    try:
        with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
            warnings.simplefilter("error", optimize.OptimizeWarning)
            (a, b), covariance = optimize.curve_fit(lambda z, a, b: a * np.exp(b * z), z, wanted, p0=start)
    except (RuntimeError, optimize.OptimizeWarning):
        raise ValueError(f"the fit of a · exp(b · {x}) to {y!r} does not converge on {len(rows)} rows") from None
    slope, error, freedom = float(b / scale), float(np.sqrt(covariance[1, 1])), len(rows) - 2
    interval = t_interval(slope, float(error / scale), freedom)
    residuals = wanted - a * np.exp(b * z)
    r_squared = float(1 - residuals @ residuals / ((wanted - wanted.mean()) ** 2).sum())
    p = float(2 * stats.t.sf(abs(b) / error, freedom)) if error > 0 else 0.0
    return ExponentialFit(x, y, len(rows), float(a * np.exp(-b * centre / scale)), slope, interval, r_squared, p)


def subset_fits(
    table: pandas.DataFrame, x: str, y: str, *, subsets: Mapping[str, str | Sequence[bool] | pandas.Series]
) -> dict[str, LinearFit]:
    """The linear fit on each subset of the models: by name, a mask over the rows or a query. Errors name the subset.

    Source: Aubry et al. 2025, table 4: only models of 7 billion parameters, only those that score above 45.
    """
    fits = {}
    for name, subset in subsets.items():
        try:
            mask = np.asarray(evaluate(table, subset) if isinstance(subset, str) else subset)
            if mask.dtype != bool or mask.shape != (len(table),):
                raise ValueError(f"it must be true or false for each of {len(table)} rows")
            fits[name] = linear_fit(table[mask], x, y)
        except ValueError as error:
            raise ValueError(f"subset {name!r}: {error}") from None
    return fits


def covariate_fits(table: pandas.DataFrame, x: str, y: str, *, covariates: Sequence[str]) -> pandas.DataFrame:
    """Each covariate alone against y, beside x on the same models: R² can only be compared on the same models.

    One row per covariate: `n`, `slope`, `r_squared`, `p` of its linear fit; `x_r_squared`, `x_p` of x beside it.

    Source: Aubry et al. 2025, section 4: coupling correlates with the score more than size, depth and width do.
    """
    fits = []
    for name in covariates:
        rows = complete_rows(table, (x, y, name))
        alone, beside = linear_fit(rows, name, y), linear_fit(rows, x, y)
        fits.append((alone.n, alone.slope, alone.r_squared, alone.p, beside.r_squared, beside.p))
    columns = ["n", "slope", "r_squared", "p", "x_r_squared", "x_p"]
    return pandas.DataFrame(fits, pandas.Index(list(covariates), name="covariate"), columns)


def leave_one_out(table: pandas.DataFrame, x: str, y: str) -> LeaveOneOut:
    """How much the linear fit of y on x depends on each model: the column `model` if there is one, else the index.

    Errors as in `linear_fit`, also of the fits without a model, and for fewer than four models.
    """
    rows = _rows_to_fit(table, (x,), y)
    if len(rows) < 4:
        raise ValueError(f"leaving one model out needs at least four, got {len(rows)}")
    names = [str(name) for name in (table.loc[rows.index, "model"] if "model" in table else rows.index)]
    without = []
    for name, index in zip(names, rows.index, strict=True):
        try:
            without.append(linear_fit(rows.drop(index), x, y))
        except ValueError as error:
            raise ValueError(f"without {name!r}: {error}") from None
    found = pandas.DataFrame(without, pandas.Index(names, name="model"))[["slope", "r_squared", "p"]]
    result = _least_squares(rows[y].to_numpy(), rows[x].to_numpy())
    influence = result.get_influence()
    # A model alone at its x has leverage 1: without it there is no slope, and its distance is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        found.insert(0, "cooks_distance", influence.cooks_distance[0])
        found.insert(1, "dfbetas", influence.dfbetas[:, 1])
    r_squared = found["r_squared"].to_numpy()
    most = names[int(abs(r_squared - result.rsquared).argmax())]
    sign_changes = tuple(found.index[np.sign(found["slope"]) != np.sign(result.params[1])])
    not_significant = tuple(found.index[(found["p"] > _ALPHA) & (result.pvalues[1] <= _ALPHA)])
    return LeaveOneOut(found, most, (float(r_squared.min()), float(r_squared.max())), sign_changes, not_significant)


def complete_rows(table: pandas.DataFrame, names: Sequence[str]) -> pandas.DataFrame:
    """Columns, or expressions of columns, as floats; rows that lack a value are left out. The index stays."""
    columns = {}
    for name in names:
        values = table[name] if name in table else evaluate(table, name)
        try:
            columns[name] = pandas.Series(values, index=table.index).astype(float)
        except (TypeError, ValueError):
            raise ValueError(f"column {name!r} does not hold numbers") from None
    rows = pandas.DataFrame(columns).dropna()
    if infinite := [name for name in names if not np.isfinite(rows[name]).all()]:
        raise ValueError(f"column {infinite[0]!r} has infinite values")
    return rows


def _rows_to_fit(table: pandas.DataFrame, names: Sequence[str], y: str) -> pandas.DataFrame:
    """The rows that have y and all those columns; there are enough of them, and no column is constant."""
    rows = complete_rows(table, (*names, y))
    if len(rows) < (needed := len(names) + 2):
        raise ValueError(f"a fit of {y!r} on {', '.join(names)} needs at least {needed} models, got {len(rows)}")
    for name in (*names, y):
        if is_constant(rows[name].to_numpy()):
            raise ValueError(f"{name!r} is the same for all {len(rows)} models, {rows[name].iloc[0]:g}: nothing to fit")
    return rows


def _least_squares(y: Float[np.ndarray, " n"], x: np.ndarray) -> Any:
    """What statsmodels finds; the first coefficient is the intercept."""
    if importlib.util.find_spec("statsmodels") is None:
        raise ValueError('fits across models need statsmodels: pip install "tl-coupling[survey]"')
    import statsmodels.api as sm

    return sm.OLS(y, sm.add_constant(x)).fit()
