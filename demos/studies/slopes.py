"""Slopes with fixed effects and intervals that hold together: what the studies of
capacity and of the gap print.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas
from jaxtyping import Float, Int
from scipy import stats

from tl_coupling.statistics import cluster_robust


@dataclass(frozen=True)
class Slope:
    """A slope of least squares.

    Attributes:
        estimate, error: the slope and its CR2 standard error.
        freedom: Bell and McCaffrey's degrees of freedom.
        vif: by how much the covariates inflate the slope's variance, the fixed effects
            being there: `1 / (1 − R²)` of x on the covariates within groups.
        n: rows.
    """

    estimate: float
    error: float
    freedom: float
    vif: float
    n: int

    def interval(self, n_looks: int) -> tuple[float, float]:
        """Return the t interval that holds with 95 % together with those of the other
        tests (Bonferroni).
        """
        width = self.error * stats.t.ppf(1 - 0.025 / n_looks, self.freedom)
        return self.estimate - width, self.estimate + width


@dataclass(frozen=True)
class Design:
    """What y is regressed on: x first, covariates, and a constant for each group."""

    columns: Float[np.ndarray, "n n_columns"]
    families: Int[np.ndarray, " n"]
    vif: float

    def slope(self, y: Float[np.ndarray, " n"]) -> Slope:
        """Return the slope of y on x."""
        coefficients = np.linalg.lstsq(self.columns, y)[0]
        residuals = y - self.columns @ coefficients
        errors, freedom = cluster_robust(self.columns, residuals, self.families)
        return Slope(
            float(coefficients[0]),
            float(errors[0]),
            float(freedom[0]),
            self.vif,
            len(y),
        )


def design_of(
    table: pandas.DataFrame,
    x: str,
    covariates: Sequence[str] = (),
    fixed: Sequence[str] = (),
    cluster: str | None = None,
) -> Design:
    """Return the design of rows that are independent, or only between the values of
    `cluster`; every value of the columns `fixed` gets a constant.

    Raises:
        ValueError: x does not vary within groups and beside the covariates, or no
            degree of freedom is left.
    """
    constants = [np.ones((len(table), 1))]
    for name in fixed:
        constants.append(pandas.get_dummies(table[name]).to_numpy(float)[:, 1:])
    groups = np.hstack(constants)
    within = table[[x, *covariates]].to_numpy(float)
    within = within - groups @ np.linalg.lstsq(groups, within)[0]
    left = within[:, 0]
    if covariates:
        left = left - within[:, 1:] @ np.linalg.lstsq(within[:, 1:], left)[0]
    columns = np.hstack([table[[x, *covariates]].to_numpy(float), groups])
    scale = 1e-9 * (1 + np.abs(columns[:, 0]).max())
    if len(table) <= columns.shape[1] or np.abs(left).max(initial=0) < scale:
        raise ValueError(f"too few rows to see a slope of {x!r}: {len(table)}")
    families = (
        np.arange(len(table))
        if cluster is None
        else pandas.factorize(table[cluster])[0]
    )
    vif = float((within[:, 0] ** 2).sum() / (left**2).sum())
    return Design(columns, families, vif)
