"""Least squares where errors may differ in variance, from statsmodels' HC2 and the
quadratic form of a variance: no code is shared with the package.
"""

import numpy as np
import statsmodels.api as sm
from scipy import stats


def of_unequal_variance(
    design: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return coefficients, HC2 errors and Bell and McCaffrey's degrees of freedom.

    The estimated variance of a coefficient is a form `yᵀ Q y`; of normal errors with
    one variance its mean goes with tr Q, and its variance with 2 tr Q².
    """
    fit = sm.OLS(y, design).fit(cov_type="HC2")
    pseudoinverse = np.linalg.pinv(design)
    annihilator = np.eye(len(y)) - design @ pseudoinverse
    freedom = []
    for row in pseudoinverse:
        Q = annihilator @ np.diag(row**2 / np.diag(annihilator)) @ annihilator
        freedom.append(np.trace(Q) ** 2 / np.trace(Q @ Q))
    return fit.params, fit.bse, np.array(freedom)


def line_of_unequal_variance(x, y) -> tuple[float, float, float, float]:
    """Return the slope of a line, its error, degrees of freedom and p."""
    design = np.column_stack([np.ones(len(x)), x])
    coefficients, errors, freedom = of_unequal_variance(design, np.asarray(y))
    p = 2 * stats.t.sf(abs(coefficients[1]) / errors[1], freedom[1])
    return coefficients[1], errors[1], freedom[1], p
