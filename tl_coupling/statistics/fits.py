"""Fits of one column of a table against another, one model per row; statsmodels and
scipy do the statistics.
"""

import contextlib
import importlib.util
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas
from jaxtyping import Bool, Float, Int
from scipy import stats

from tl_coupling.arguments import checked
from tl_coupling.statistics.expressions import evaluate
from tl_coupling.statistics.intervals import (
    LEVEL,
    Interval,
    check_size,
    cluster_robust,
    is_constant,
    t_interval,
)

# 1 less a leverage that is 1 up to rounding.
_ROUNDING = 1e-8

# A query over the columns, or true or false for each row.
Subset: TypeAlias = str | Sequence[bool] | np.ndarray | pandas.Series


@dataclass(frozen=True)
class LinearFit:
    """Ordinary least squares, `y ≈ intercept + slope · x`, of n rows, with the controls
    held fixed.

    Attributes:
        slope, intercept: in units of y per x, and of y (where the controls are at their
            mean); with t intervals.
        r_squared: share of the variance of y that x explains; with controls, of the
            variance that they leave.
        vif: by how much the controls inflate the variance of the slope. 1 where they
            are uncorrelated with x; above 10, x and the controls can hardly be told
            apart.
        p, condition_number: two-sided, of slope 0; of x and the controls, standardised.
        freedom, n_families: degrees of freedom of the slope's interval and p; the
            families that these take account of, `None` where models count as
            independent.
        has_equal_variance: whether interval and p are of errors of equal variance.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"coupling": [0.1, 0.2, 0.3, 0.4], "score": [30, 36, 38, 44]})
        >>> fit = tlc.statistics.linear_fit(table, "coupling", "score")
        >>> round(fit.slope, 2), round(fit.r_squared, 3), fit.n
        (44.0, 0.968, 4)
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
    freedom: float
    n_families: int | None = None
    has_equal_variance: bool = False
    level: float = LEVEL

    @property
    def correlation(self) -> float:
        """Pearson's r of x and y; with controls, or within families, the partial one.

        It is the root of `r_squared`, with the sign of the slope.
        """
        return float(np.sign(self.slope)) * math.sqrt(self.r_squared)

    def predict(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the line at x."""
        return self.intercept + self.slope * x


@dataclass(frozen=True)
class ExponentialFit:
    """`y ≈ a · exp(b · x)`, least squares on y itself, not on its logarithm.

    a is in units of y, b in units of 1/x, with a t interval; R² is `1 − Σ(y − ŷ)² / Σ(y
    − ȳ)²`; p is two-sided, of b = 0. Interval and p are those of `linear_fit`, as if
    the curve were straight at the solution.
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
        """Return the curve at x."""
        return self.a * np.exp(self.b * x)


@checked
def linear_fit(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    controls: Sequence[str] = (),
    families: str | None = None,
    within: str | None = None,
    equal_variance: bool = False,
) -> LinearFit:
    """Fit column y to column x by ordinary least squares, with the controls held fixed.

    Standard errors of the slope are HC2's, with the degrees of freedom of Bell and
    McCaffrey: scores of some models may vary more than those of others, as they do
    above a floor, and intervals that take the variance to be equal then hold the slope
    in too few studies. Where a model is fitted whatever its score is (leverage 1),
    nothing is known of its variance, and the variance is taken to be equal.

    Args:
        table: one model per row; rows that lack a value are left out.
        x, y, controls: columns, or expressions of them such as `"log10(n_parameters)"`:
            numbers, `+ - * / **`, comparisons, `log`, `log10`, `log2`, `sqrt`, `exp`,
            `abs`; names that are not valid in Python in backticks.
        families: column that says which models are related, such as Pythia's: their
            errors may be correlated, and intervals and p are cluster-robust
            (`statistics.cluster_robust`). A model without a family is one of its own.
            Where all models are of one family, or each of its own, they count as
            independent.
        within: column whose values have an intercept each (fixed effects): only
            differences inside a family count, and families of one model are left out.
        equal_variance: whether the errors of independent models have one variance: the
            t interval and p of textbooks, such as the paper's. Families have no such
            errors.

    Raises:
        ValueError: no such column, one that is not numbers, constant or given twice, or
            whose values are above 1e50 in size, or all below 1e-50; too few rows for
            the columns; columns that determine each other; statsmodels is not
            installed.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"coupling": [1, 2, 3, 4, 5], "score": [3, 3, 7, 8, 13]})
        >>> table["n_layers"] = [2, 1, 4, 3, 9]
        >>> fit = tlc.statistics.linear_fit(table, "coupling", "score", controls=["n_layers"])
        >>> round(fit.slope, 3), round(fit.vif, 3)
        (1.433, 2.939)
    """
    covariates = [x, *controls]
    fixed = list(controls) if within is None else [*controls, within]
    if len({x, y, *fixed}) < len(fixed) + 2:
        raise ValueError(
            f"`x`, `y` and `controls` must be different columns, got {[x, y, *fixed]}"
        )
    if within is not None:
        codes = family_codes(table, within)
        # A family of one model has an intercept for itself, and no slope to tell.
        table = table[np.bincount(codes)[codes] > 1]
    numbered = [name for name in (families, within) if name is not None]
    rows = rows_to_fit(table, covariates, y, numbered)
    design = rows[covariates].to_numpy()
    if within is not None:
        design = _add_intercepts(design, rows[within], within)
    # In standard units: parameters are counted in billions, coupling in hundredths.
    scale = design.std(0)
    standard = (design - design.mean(0)) / scale
    _check_independent(standard, [x, *fixed])
    # x is not centred, so that the intercept is at x = 0.
    predictors = np.column_stack([design[:, 0] / scale[0], standard[:, 1:]])
    result = least_squares(rows[y].to_numpy(), predictors)
    errors = _standard_errors(
        result.model.exog,
        result.resid,
        None if families is None else rows[families].to_numpy(int),
        _StandardErrors(result.bse, np.full(len(result.bse), float(result.df_resid))),
        equal_variance=equal_variance,
    )
    intercept, slope = result.params[:2]
    intercept_error, slope_error = errors.errors[:2]
    intercept_freedom, slope_freedom = errors.freedom[:2]
    correlations = standard.T @ standard / len(rows)
    return LinearFit(
        x=x,
        y=y,
        controls=tuple(fixed),
        n=len(rows),
        slope=float(slope / scale[0]),
        slope_interval=t_interval(
            slope / scale[0], slope_error / scale[0], slope_freedom
        ),
        intercept=float(intercept),
        intercept_interval=t_interval(intercept, intercept_error, intercept_freedom),
        r_squared=_r_squared_given(result) if fixed else float(result.rsquared),
        p=_p(slope, slope_error, slope_freedom),
        # The variance inflation of x: the first diagonal entry of the inverse of the
        # correlations.
        vif=float(np.linalg.inv(correlations)[0, 0]),
        condition_number=float(np.linalg.cond(standard)),
        freedom=float(slope_freedom),
        n_families=errors.n_families,
        has_equal_variance=errors.has_equal_variance,
    )


def _add_intercepts(
    design: Float[np.ndarray, "n n_columns"], groups: pandas.Series, column: str
) -> Float[np.ndarray, "n more_columns"]:
    """Add an intercept for each group but the first, whose intercept is that of the
    fit.
    """
    levels = np.unique(groups)
    is_in_group = groups.to_numpy()[:, None] == levels[1:]
    design = np.column_stack([design, is_in_group])
    n_needed = design.shape[1] + 2
    if len(design) < n_needed:
        raise ValueError(
            f"a fit within {len(levels)} values of {column!r} needs {n_needed} models, "
            f"got {len(design)}"
        )
    return design


def _check_independent(
    standard: Float[np.ndarray, "n n_columns"], names: Sequence[str]
) -> None:
    """Raise ValueError where columns in standard units determine each other."""
    n_models, n_columns = standard.shape
    # Columns that determine each other leave rounding, 1e-16 of the largest value.
    tolerance = 1e-10 * np.linalg.norm(standard, 2)
    if np.linalg.matrix_rank(standard, tol=tolerance) < n_columns:
        raise ValueError(
            f"{', '.join(names)} determine each other over {n_models} models: "
            "leave out a control"
        )


def _r_squared_given(result: Any) -> float:
    """Return the share that x explains of the variance that the controls leave."""
    # The squared partial correlation of x follows from its t.
    t_squared = result.tvalues[1] ** 2
    return float(t_squared / (t_squared + result.df_resid))


def exponential_fit(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    families: str | None = None,
    equal_variance: bool = False,
) -> ExponentialFit:
    """Fit column y to `a · exp(b · x)` by least squares; arguments as in `linear_fit`.

    Raises:
        ValueError: as in `linear_fit`; the fit does not converge.

    Source: Aubry et al. 2025, figure 8, which shows such a fit without saying how it
    was made.
    """
    rows = rows_to_fit(table, (x,), y, [] if families is None else [families])
    x_values = rows[x].to_numpy()
    y_values = rows[y].to_numpy()
    # In standard units: otherwise a and b are nearly collinear.
    centre = x_values.mean()
    scale = x_values.std()
    z = (x_values - centre) / scale
    try:
        (a, b), covariance = _exponential(z, y_values)
    except RuntimeError:
        raise ValueError(
            f"the fit of a · exp(b · {x}) to {y!r} does not converge "
            f"on {len(rows)} rows"
        ) from None
    curve = np.exp(b * z)
    residuals = y_values - a * curve
    errors = _standard_errors(
        # The derivatives of the curve by a and by b, at the solution.
        np.column_stack([curve, a * z * curve]),
        residuals,
        None if families is None else rows[families].to_numpy(int),
        _StandardErrors(np.sqrt(np.diag(covariance)), np.full(2, float(len(rows) - 2))),
        equal_variance=equal_variance,
    )
    error = errors.errors[1]
    freedom = errors.freedom[1]
    squares = ((y_values - y_values.mean()) ** 2).sum()
    return ExponentialFit(
        x=x,
        y=y,
        n=len(rows),
        # Back from standard units of x.
        a=float(a * np.exp(-b * centre / scale)),
        b=float(b / scale),
        b_interval=t_interval(b / scale, error / scale, freedom),
        r_squared=float(1 - residuals @ residuals / squares),
        p=_p(b, error, freedom),
    )


def _exponential(
    z: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "2"], Float[np.ndarray, "2 2"]]:
    """Return a and b of `y ≈ a · exp(b · z)` and their covariance; RuntimeError where
    there is no such fit.
    """
    from scipy import optimize

    # At a = 0 the curve does not depend on b: no search can start there.
    start = (y.mean() or 1.0, 0.0)
    has_one_sign = (y > 0).all() or (y < 0).all()
    if has_one_sign:
        # Where y has one sign, `log |y|` is about a line in z.
        line = stats.linregress(z, np.log(np.abs(y)))
        start = (np.sign(y[0]) * np.exp(line.intercept), line.slope)
    with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
        # scipy warns where it cannot estimate the covariance: there is no interval
        # then.
        warnings.simplefilter("error", optimize.OptimizeWarning)
        try:
            parameters, covariance = optimize.curve_fit(
                lambda z, a, b: a * np.exp(b * z), z, y, p0=start
            )
        except optimize.OptimizeWarning as warning:
            raise RuntimeError(str(warning)) from None
    return parameters, covariance


def subset_fits(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    subsets: Mapping[str, Subset],
    families: str | None = None,
) -> dict[str, LinearFit]:
    """Fit the line on each subset of the models, by its name; errors name the subset.

    Source: Aubry et al. 2025, table 4: only models of 7 billion parameters, only those
    that score above 45.
    """
    fits = {}
    for name, subset in subsets.items():
        try:
            members = table[subset_mask(table, subset)]
            fits[name] = linear_fit(members, x, y, families=families)
        except ValueError as error:
            raise ValueError(f"subset {name!r}: {error}") from None
    return fits


def subset_mask(table: pandas.DataFrame, subset: Subset) -> Bool[np.ndarray, " n"]:
    """Say which rows are in a subset; ValueError where it does not say so of each."""
    values = evaluate(table, subset) if isinstance(subset, str) else subset
    mask = np.asarray(values)
    if mask.dtype != bool or mask.shape != (len(table),):
        raise ValueError(f"it must be true or false for each of {len(table)} rows")
    return mask


def covariate_fits(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    covariates: Sequence[str],
    families: str | None = None,
) -> pandas.DataFrame:
    """Fit y on each covariate alone, and on x beside it on the same models.

    R² can only be compared on the same models. One row per covariate: `n`, `slope`,
    `r_squared`, `p` of its linear fit; `x_r_squared`, `x_p` of x beside it.

    Source: Aubry et al. 2025, section 4: coupling correlates with the score more than
    size, depth and width do.
    """
    rows = []
    for name in covariates:
        complete = complete_rows(table, (x, y, name)).index
        # Both fits are on the models that have all three values.
        models = table[table.index.isin(complete)]
        fit = linear_fit(models, name, y, families=families)
        x_fit = linear_fit(models, x, y, families=families)
        rows.append((fit.n, fit.slope, fit.r_squared, fit.p, x_fit.r_squared, x_fit.p))
    index = pandas.Index(list(covariates), name="covariate")
    columns = ["n", "slope", "r_squared", "p", "x_r_squared", "x_p"]
    return pandas.DataFrame(rows, index, columns)


def complete_rows(table: pandas.DataFrame, names: Sequence[str]) -> pandas.DataFrame:
    """Return columns, or expressions of columns, as floats.

    Rows that lack a value are left out; the index stays.

    Raises:
        ValueError: a column that is not there, does not hold numbers, or holds infinite
            ones, or values above 1e50 in size, or none above 1e-50.
    """
    columns = {}
    for name in names:
        values = table[name] if name in table else evaluate(table, name)
        try:
            columns[name] = pandas.Series(values, index=table.index).astype(float)
        except (TypeError, ValueError):
            raise ValueError(f"column {name!r} does not hold numbers") from None
    rows = pandas.DataFrame(columns).dropna()
    for name in names:
        if not np.isfinite(rows[name]).all():
            raise ValueError(f"column {name!r} has infinite values")
    for name in names:
        check_size(rows[name].to_numpy(), repr(name))
    return rows


def check_not_repeated(rows: pandas.DataFrame, name: str) -> None:
    """Raise ValueError where columns repeat each other, as "z" and "2 * z" do.

    Columns that are the same in all rows say nothing, and are not looked at.

    Args:
        rows: without missing values.
        name: the argument that holds the columns, for the error.
    """
    varied = [column for column in rows if not is_constant(rows[column].to_numpy())]
    if len(rows) < 3 or len(varied) < 2:
        return
    values = rows[varied].to_numpy(float)
    standard = (values - values.mean(0)) / values.std(0)
    pairs = list(itertools.combinations(range(len(varied)), 2))
    # More columns than the rows can tell apart are a lack of models.
    together = [range(len(varied))] if len(rows) > len(varied) + 1 else []
    for places in [*pairs, *together]:
        try:
            _check_independent(standard[:, list(places)], [varied[i] for i in places])
        except ValueError as error:
            raise ValueError(f"`{name}` must not repeat each other: {error}") from None


def fits_within(
    table: pandas.DataFrame, x: str, y: str, *, families: str
) -> dict[str, LinearFit]:
    """Fit the line inside each family of at least three models, by its name.

    Families in which there is nothing to fit are left out.
    """
    codes = family_codes(table, families)
    fits = {}
    for code in np.flatnonzero(np.bincount(codes) > 2):
        members = table[codes == code]
        family = str(members[families].iloc[0])
        with contextlib.suppress(ValueError):
            fits[family] = linear_fit(members, x, y)
    return fits


def family_codes(table: pandas.DataFrame, column: str) -> Int[np.ndarray, " n"]:
    """Return a number for each value of a column, in the order in which they come.

    Each row where the value is missing has a number of its own.
    """
    if column not in table:
        columns = ", ".join(map(str, table))
        raise ValueError(f"no column {column!r}; the columns are {columns}")
    values = table[column]
    # Names are compared as text without spaces around it, as tables are typed by hand.
    texts = values.astype(str).str.strip().mask(values.isna(), "")
    labels = texts.to_numpy(object)
    places = np.arange(len(table))
    return pandas.factorize(np.where(labels == "", places, labels))[0]


def rows_to_fit(
    table: pandas.DataFrame, names: Sequence[str], y: str, families: Sequence[str] = ()
) -> pandas.DataFrame:
    """Return the rows that have y and all those columns; columns of families are
    numbered.

    Raises:
        ValueError: too few rows; a constant column; as in `complete_rows`.
    """
    table = table.assign(**{name: family_codes(table, name) for name in families})
    # A column that is asked for twice is read once.
    rows = complete_rows(table, list(dict.fromkeys((*names, y, *families))))
    n_needed = len(names) + 2
    if len(rows) < n_needed:
        raise ValueError(
            f"a fit of {y!r} on {', '.join(names)} needs at least {n_needed} models, "
            f"got {len(rows)}"
        )
    for name in (*names, y):
        if is_constant(rows[name].to_numpy()):
            raise ValueError(
                f"{name!r} is the same for all {len(rows)} models, "
                f"{rows[name].iloc[0]:g}: nothing to fit"
            )
    return rows


def least_squares(y: Float[np.ndarray, " n"], x: Float[np.ndarray, "n ..."]) -> Any:
    """Return the results of statsmodels, which have no types; the first coefficient is
    the intercept.
    """
    if importlib.util.find_spec("statsmodels") is None:
        raise ValueError(
            'fits across models need statsmodels: pip install "tl-coupling[survey]"'
        )
    import statsmodels.api as sm

    return sm.OLS(y, sm.add_constant(x)).fit()


@dataclass(frozen=True, eq=False)
class _StandardErrors:
    """Standard errors of coefficients and their degrees of freedom; how many families
    they take account of, `None` where rows count as independent.
    """

    errors: Float[np.ndarray, " n_columns"]
    freedom: Float[np.ndarray, " n_columns"]
    n_families: int | None = None
    has_equal_variance: bool = True


def _standard_errors(
    design: Float[np.ndarray, "n n_columns"],
    residuals: Float[np.ndarray, " n"],
    families: np.ndarray | None,
    equal_variance_errors: _StandardErrors,
    *,
    equal_variance: bool,
) -> _StandardErrors:
    """Return errors that are robust to families and to unequal variance, or those of
    equal variance where these are asked for, or where a row has leverage 1.

    Rows count as independent where all are of one family or each of its own.
    """
    if families is not None:
        n_families = len(np.unique(families))
        if 1 < n_families < len(design):
            robust = cluster_robust(design, residuals, families)
            return _StandardErrors(*robust, n_families, has_equal_variance=False)
    # The diagonal of the hat matrix. HC2 divides by 1 minus it.
    leverage = np.square(np.linalg.qr(design)[0]).sum(1)
    if equal_variance or leverage.max() > 1 - _ROUNDING:
        return equal_variance_errors
    each_its_own = np.arange(len(design))
    robust = cluster_robust(design, residuals, each_its_own)
    return _StandardErrors(*robust, has_equal_variance=False)


def _p(estimate: float, error: float, freedom: float) -> float:
    """Return the two-sided p of 0."""
    # A perfect fit has no error; one that is NaN is no error either.
    if not error > 0:
        return 0.0
    return float(2 * stats.t.sf(abs(estimate) / error, freedom))
