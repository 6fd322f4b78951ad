"""What else could explain a score, and how far one model carries the fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tl_coupling.border import checked
from tl_coupling.generalization.fits import LEVEL, Interval, complete_rows, is_constant, linear_fit, pairs

if TYPE_CHECKING:
    import pandas

# By the column that must be known. Parameters and tokens span decades: as they are, the largest model decides.
COVARIATES = {
    "n_parameters": "log10(n_parameters)",
    "n_layers": "n_layers",
    "d_model": "d_model",
    "training_tokens": "log10(training_tokens)",
}


@dataclass(frozen=True)
class PartialRegression:
    """Least squares of y on x with other columns held fixed.

    Attributes:
        x, y, controls: the columns.
        n: how many rows have all of them.
        coefficient: of x, in units of y per x; its interval is a t interval at `level`.
        p: two-sided, of coefficient 0.
        partial_r_squared: share of the variance that the controls leave in y that x explains.
        vif: variance inflation factor of x: by how much the controls inflate the variance of the coefficient. 1 where
            they are uncorrelated with x; above 10, x and the controls can hardly be told apart.
        condition_number: of the standardised columns, x and controls.
        level: of the interval.
    """

    x: str
    y: str
    controls: tuple[str, ...]
    n: int
    coefficient: float
    interval: Interval
    p: float
    partial_r_squared: float
    vif: float
    condition_number: float
    level: float = LEVEL


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The linear fit without each model in turn.

    Attributes:
        table: a row a model, indexed by its name: `cooks_distance`; `dfbetas`, how many standard errors the slope
            moves; and `slope`, `r_squared`, `p` of the fit without it.
        most_influential: the model without which R² changes most.
        r_squared_range: smallest and largest R² without one model.
        sign_changes: models without which the slope has the other sign.
        not_significant: models without which p exceeds 0.05, though it does not with all of them.
    """

    table: "pandas.DataFrame"
    most_influential: str
    r_squared_range: Interval
    sign_changes: tuple[str, ...]
    not_significant: tuple[str, ...]


@checked
def partial_regression(table: "pandas.DataFrame", y: str, x: str, controls: Sequence[str]) -> PartialRegression:
    """Regress y on x with the controls held fixed.

    Args:
        table: a row a model.
        y, x, controls: columns, or expressions of them such as `"log10(n_parameters)"`. Rows that lack one are left
            out.

    Raises:
        ValueError: no more models than columns, with that of the intercept; a column that is constant, or given twice;
            columns that determine each other.

    Example:
        >>> import pandas
        >>> from tl_coupling.generalization import partial_regression
        >>> columns = {"coupling": [1, 2, 3, 4, 5], "n_layers": [2, 1, 4, 3, 9], "score": [3, 3, 7, 8, 13]}
        >>> fit = partial_regression(pandas.DataFrame(columns), "score", "coupling", ["n_layers"])
        >>> round(fit.coefficient, 3), round(fit.vif, 3)
        (1.433, 2.939)
    """
    import statsmodels.api as sm
    from statsmodels.stats.outliers_influence import variance_inflation_factor

    names = (x, *controls)
    if len({*names, y}) < len(names) + 1 or not controls:
        raise ValueError(f"`y`, `x` and one control or more must be different columns, got {[y, x, *controls]}")
    rows = complete_rows(table, (y, *names))
    if len(rows) <= len(names) + 1:
        raise ValueError(
            f"{len(names) + 1} columns ({', '.join(names)}, intercept) want {len(names) + 2} models or more that have "
            f"all of them, got {len(rows)}: name fewer controls"
        )
    for name in (y, *names):
        if is_constant(rows[name].to_numpy()):
            raise ValueError(
                f"{name!r} is the same for all {len(rows)} models: it can neither explain nor be explained"
            )
    design = rows[list(names)].to_numpy()
    scale = design.std(0)
    # In standard units: parameters are counted in billions, coupling in hundredths.
    standard = (design - design.mean(0)) / scale
    if np.linalg.matrix_rank(standard, tol=1e-10 * np.linalg.norm(standard, 2)) < len(names):
        raise ValueError(f"{', '.join(names)} determine each other over {len(rows)} models: leave out a control")
    with_intercept = sm.add_constant(standard)
    result = sm.OLS(rows[y].to_numpy(), with_intercept).fit()
    low, high = result.conf_int(1 - LEVEL)[1] / scale[0]
    t = result.tvalues[1]
    return PartialRegression(
        x=x,
        y=y,
        controls=tuple(controls),
        n=len(rows),
        coefficient=float(result.params[1] / scale[0]),
        interval=(float(low), float(high)),
        p=float(result.pvalues[1]),
        partial_r_squared=float(t**2 / (t**2 + result.df_resid)),
        vif=float(variance_inflation_factor(with_intercept, 1)),
        condition_number=float(np.linalg.cond(standard)),
    )


@checked
def covariate_fits(
    table: "pandas.DataFrame", y: str, x: str, covariates: Sequence[str] = tuple(COVARIATES.values())
) -> "pandas.DataFrame":
    """Each covariate alone against y, beside x on the same models.

    Args:
        table, y, x: as in `partial_regression`.
        covariates: columns, or expressions of them.

    Returns:
        a row a covariate, indexed by it: `n`, `slope`, `r_squared`, `p` of its linear fit; `x_r_squared` and `x_p`, of
        x on the models that have the covariate.

    Raises:
        ValueError: as in `linear_fit`.

    Source:
        Aubry et al. 2025, section 4: coupling correlates with the score more than size, depth and width do.
    """
    import pandas

    fits = {}
    for name in covariates:
        # Two R² can be compared only on the same models.
        rows = complete_rows(table, (x, y, name))
        alone, beside = linear_fit(rows, name, y), linear_fit(rows, x, y)
        fits[name] = {"n": alone.n, "slope": alone.slope, "r_squared": alone.r_squared, "p": alone.p} | {
            "x_r_squared": beside.r_squared,
            "x_p": beside.p,
        }
    columns = ["n", "slope", "r_squared", "p", "x_r_squared", "x_p"]
    return pandas.DataFrame.from_dict(fits, orient="index", columns=columns).rename_axis("covariate")


@checked
def leave_one_out(table: "pandas.DataFrame", x: str, y: str) -> LeaveOneOut:
    """How far each model carries the linear fit of y on x.

    Args:
        table: a row a model, named by its column `model` if it has one, by its index otherwise.
        x, y: as in `linear_fit`.

    Raises:
        ValueError: as in `linear_fit`; fewer than four models, or x or y constant without one of them.

    Source:
        Cook's distance and DFBETAS as statsmodels' `OLSInfluence` gives them.
    """
    import pandas
    import statsmodels.api as sm
    from statsmodels.stats.outliers_influence import OLSInfluence

    rows = pairs(table, x, y)
    if len(rows) < 4:
        raise ValueError(f"leaving one model out wants four models or more, got {len(rows)}")
    names = [str(name) for name in (table.loc[rows.index, "model"] if "model" in table else rows.index)]
    result = sm.OLS(rows[y].to_numpy(), sm.add_constant(rows[x].to_numpy())).fit()
    influence = OLSInfluence(result)
    without = []
    for name, index in zip(names, rows.index, strict=True):
        try:
            without.append(linear_fit(rows.drop(index), x, y))
        except ValueError as error:
            raise ValueError(f"without {name!r}: {error}") from None
    # A model alone at its x has leverage 1: without it there is no slope, and its distance is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = {
            "cooks_distance": influence.cooks_distance[0],
            "dfbetas": influence.dfbetas[:, 1],
            "slope": [fit.slope for fit in without],
            "r_squared": [fit.r_squared for fit in without],
            "p": [fit.p for fit in without],
        }
    found = pandas.DataFrame(columns, index=pandas.Index(names, name="model"))
    change = (found["r_squared"] - result.rsquared).abs().to_numpy()
    slope, p = result.params[1], result.pvalues[1]
    return LeaveOneOut(
        table=found,
        most_influential=names[int(change.argmax())],
        r_squared_range=(float(found["r_squared"].min()), float(found["r_squared"].max())),
        sign_changes=tuple(found.index[np.sign(found["slope"]) != np.sign(slope)]),
        not_significant=tuple(found.index[found["p"] > 0.05]) if p <= 0.05 else (),
    )
