"""Fits of one column of a table against another, one model per row; statsmodels and
scipy do the statistics.
"""

import contextlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    level: float = LEVEL

    def predict(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The line at x."""
        return self.intercept + self.slope * x


@dataclass(frozen=True)
class ExponentialFit:
    """`y ≈ a · exp(b · x)`, least squares on y itself, not on its logarithm.

    a is in units of y, b in units of 1/x, with a t interval; R² is `1 − Σ(y − ŷ)² / Σ(y
    − ȳ)²`; p is two-sided, of b = 0, from the covariance at the solution, or of
    families cluster-robust, as if the curve were straight there.
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


@checked
def linear_fit(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    controls: Sequence[str] = (),
    families: str | None = None,
    within: str | None = None,
) -> LinearFit:
    """Ordinary least squares of column y on column x, with the controls held fixed.

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

    Raises:
        ValueError: no such column, one that is not numbers, constant or given twice, or
            whose values are above 1e50 in size, or all below 1e-50; too few rows for
            the columns; columns that determine each other; statsmodels is not
            installed.

    Example:
        >>> import pandas
        >>> columns = {"coupling": [1, 2, 3, 4, 5], "n_layers": [2, 1, 4, 3, 9], "score": [3, 3, 7, 8, 13]}
        >>> fit = tlc.statistics.linear_fit(pandas.DataFrame(columns), "coupling", "score", controls=["n_layers"])
        >>> round(fit.slope, 3), round(fit.vif, 3)
        (1.433, 2.939)
    """
    names, held = [x, *controls], [*controls, *([] if within is None else [within])]
    if len({x, y, *held}) < len(held) + 2:
        raise ValueError(
            f"`x`, `y` and `controls` must be different columns, got {[x, y, *held]}"
        )
    if within is not None:
        own = family_codes(table, within)
        table = table[np.bincount(own)[own] > 1]
    rows = rows_to_fit(
        table, names, y, [name for name in (families, within) if name is not None]
    )
    design = rows[names].to_numpy()
    if within is not None:
        levels = np.unique(rows[within])
        design = np.column_stack([design, rows[[within]].to_numpy() == levels[1:]])
        if len(rows) < (needed := design.shape[1] + 2):
            raise ValueError(
                f"a fit within {len(levels)} values of {within!r} needs {needed} models, got {len(rows)}"
            )
    # In standard units: parameters are counted in billions, coupling in hundredths.
    scale = design.std(0)
    standard = (design - design.mean(0)) / scale
    if (
        np.linalg.matrix_rank(standard, tol=1e-10 * np.linalg.norm(standard, 2))
        < design.shape[1]
    ):
        raise ValueError(
            f"{', '.join([x, *held])} determine each other over {len(rows)} models: leave out a control"
        )
    # x is not centred, so that the intercept is at x = 0.
    result = least_squares(
        rows[y].to_numpy(), np.column_stack([design[:, 0] / scale[0], standard[:, 1:]])
    )
    codes = None if families is None else rows[families].to_numpy(int)
    errors, freedom, n_families = _errors(
        result.model.exog, result.resid, codes, result.bse, float(result.df_resid)
    )
    (intercept, slope), t = result.params[:2], result.tvalues[1]
    return LinearFit(
        x=x,
        y=y,
        controls=tuple(held),
        n=len(rows),
        slope=float(slope / scale[0]),
        slope_interval=t_interval(slope / scale[0], errors[1] / scale[0], freedom[1]),
        intercept=float(intercept),
        intercept_interval=t_interval(intercept, errors[0], freedom[0]),
        r_squared=float(t**2 / (t**2 + result.df_resid) if held else result.rsquared),
        p=_p(slope, errors[1], freedom[1]),
        # The diagonal of the inverse correlations.
        vif=float(np.linalg.inv(standard.T @ standard / len(rows))[0, 0]),
        condition_number=float(np.linalg.cond(standard)),
        freedom=float(freedom[1]),
        n_families=n_families,
    )


def exponential_fit(
    table: pandas.DataFrame, x: str, y: str, *, families: str | None = None
) -> ExponentialFit:
    """Least squares of `a · exp(b · x)`; arguments and errors as in `linear_fit`, and
    where it does not converge.

    Source: Aubry et al. 2025, figure 8, which shows such a fit without saying how it
    was made.
    """
    from scipy import optimize

    rows = rows_to_fit(table, (x,), y, [] if families is None else [families])
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
            (a, b), covariance = optimize.curve_fit(
                lambda z, a, b: a * np.exp(b * z), z, wanted, p0=start
            )
    except (RuntimeError, optimize.OptimizeWarning):
        raise ValueError(
            f"the fit of a · exp(b · {x}) to {y!r} does not converge on {len(rows)} rows"
        ) from None
    curve = np.exp(b * z)
    residuals = wanted - a * curve
    codes = None if families is None else rows[families].to_numpy(int)
    derivatives = np.column_stack([curve, a * z * curve])
    errors, freedom, _ = _errors(
        derivatives,
        residuals,
        codes,
        np.sqrt(np.diag(covariance)),
        float(len(rows) - 2),
    )
    return ExponentialFit(
        x=x,
        y=y,
        n=len(rows),
        a=float(a * np.exp(-b * centre / scale)),
        b=float(b / scale),
        b_interval=t_interval(b / scale, errors[1] / scale, freedom[1]),
        r_squared=float(
            1 - residuals @ residuals / ((wanted - wanted.mean()) ** 2).sum()
        ),
        p=_p(b, errors[1], freedom[1]),
    )


def subset_fits(
    table: pandas.DataFrame,
    x: str,
    y: str,
    *,
    subsets: Mapping[str, str | Sequence[bool] | pandas.Series],
    families: str | None = None,
) -> dict[str, LinearFit]:
    """The linear fit on each subset of the models: by name, a mask over the rows or a
    query. Errors name the subset.

    Source: Aubry et al. 2025, table 4: only models of 7 billion parameters, only those
    that score above 45.
    """
    fits = {}
    for name, subset in subsets.items():
        try:
            fits[name] = linear_fit(
                table[subset_mask(table, subset)], x, y, families=families
            )
        except ValueError as error:
            raise ValueError(f"subset {name!r}: {error}") from None
    return fits


def subset_mask(table: pandas.DataFrame, subset: Any) -> Bool[np.ndarray, " n"]:
    """Which rows a query or a mask chooses; ValueError where it does not say so of
    each.
    """
    mask = np.asarray(evaluate(table, subset) if isinstance(subset, str) else subset)
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
    """Each covariate alone against y, beside x on the same models: R² can only be
    compared on the same models.

    One row per covariate: `n`, `slope`, `r_squared`, `p` of its linear fit;
    `x_r_squared`, `x_p` of x beside it.

    Source: Aubry et al. 2025, section 4: coupling correlates with the score more than
    size, depth and width do.
    """
    fits = []
    for name in covariates:
        rows = table[table.index.isin(complete_rows(table, (x, y, name)).index)]
        alone, beside = (
            linear_fit(rows, one, y, families=families) for one in (name, x)
        )
        fits.append(
            (alone.n, alone.slope, alone.r_squared, alone.p, beside.r_squared, beside.p)
        )
    columns = ["n", "slope", "r_squared", "p", "x_r_squared", "x_p"]
    return pandas.DataFrame(
        fits, pandas.Index(list(covariates), name="covariate"), columns
    )


def complete_rows(table: pandas.DataFrame, names: Sequence[str]) -> pandas.DataFrame:
    """Columns, or expressions of columns, as floats; rows that lack a value are left
    out. The index stays.
    """
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
    for name in names:
        check_size(rows[name].to_numpy(), repr(name))
    return rows


def fits_within(
    table: pandas.DataFrame, x: str, y: str, *, families: str
) -> dict[str, LinearFit]:
    """The linear fit inside each family of at least three models, by its name, where
    there is something to fit.
    """
    codes, fits = family_codes(table, families), {}
    for code in np.flatnonzero(np.bincount(codes) > 2):
        own = table[codes == code]
        with contextlib.suppress(ValueError):
            fits[str(own[families].iloc[0])] = linear_fit(own, x, y)
    return fits


def family_codes(table: pandas.DataFrame, column: str) -> Int[np.ndarray, " n"]:
    """A number for each value of a column, in the order in which they come; a number of
    its own where it is missing.
    """
    if column not in table:
        raise ValueError(
            f"no column {column!r}; the columns are {', '.join(map(str, table))}"
        )
    labels = (
        table[column]
        .astype(str)
        .str.strip()
        .mask(table[column].isna(), "")
        .to_numpy(object)
    )
    alone = labels == ""
    return pandas.factorize(np.where(alone, np.arange(len(table)), labels))[0]


def rows_to_fit(
    table: pandas.DataFrame, names: Sequence[str], y: str, families: Sequence[str] = ()
) -> pandas.DataFrame:
    """The rows that have y and all those columns; there are enough of them, and no
    column is constant.

    Columns of families are numbered.
    """
    table = table.assign(**{name: family_codes(table, name) for name in families})
    rows = complete_rows(table, list(dict.fromkeys((*names, y, *families))))
    if len(rows) < (needed := len(names) + 2):
        raise ValueError(
            f"a fit of {y!r} on {', '.join(names)} needs at least {needed} models, got {len(rows)}"
        )
    for name in (*names, y):
        if is_constant(rows[name].to_numpy()):
            raise ValueError(
                f"{name!r} is the same for all {len(rows)} models, {rows[name].iloc[0]:g}: nothing to fit"
            )
    return rows


def least_squares(y: Float[np.ndarray, " n"], x: np.ndarray) -> Any:
    """What statsmodels finds; the first coefficient is the intercept."""
    if importlib.util.find_spec("statsmodels") is None:
        raise ValueError(
            'fits across models need statsmodels: pip install "tl-coupling[survey]"'
        )
    import statsmodels.api as sm

    return sm.OLS(y, sm.add_constant(x)).fit()


def _errors(
    design: Float[np.ndarray, "n n_columns"],
    residuals: Float[np.ndarray, " n"],
    families: np.ndarray | None,
    errors: Float[np.ndarray, " n_columns"],
    freedom: float,
) -> tuple[
    Float[np.ndarray, " n_columns"], Float[np.ndarray, " n_columns"], int | None
]:
    """Standard errors and degrees of freedom: as given, or of families, and then how
    many these are.
    """
    n_families = 1 if families is None else len(np.unique(families))
    if families is None or not 1 < n_families < len(families):
        return errors, np.full(len(errors), freedom), None
    return *cluster_robust(design, residuals, families), n_families


def _p(estimate: float, error: float, freedom: float) -> float:
    """Two-sided, of 0."""
    return float(2 * stats.t.sf(abs(estimate) / error, freedom)) if error > 0 else 0.0
