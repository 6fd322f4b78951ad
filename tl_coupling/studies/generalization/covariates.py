"""What else goes with a score: models by each covariate, with the line through them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas
from jaxtyping import Float

from tl_coupling.statistics import LinearFit, evaluate, linear_fit
from tl_coupling.studies.generalization.model_tables import add_families

# Beside coupling itself; sizes that span decades by their logarithms.
_USUAL_COVARIATES = (
    "coupling",
    "log10(params_billion)",
    "log10(n_parameters)",
    "n_layers",
    "d_model",
    "log10(training_tokens)",
)


@dataclass(frozen=True, eq=False)
class CovariateLine:
    """Models by one covariate and by what it should explain, with the line through
    them.

    Attributes:
        covariate: the column, or the expression of columns.
        x, y: values of every row of the table; NaN where one is missing.
        fit: the line through the rows that have both.
    """

    covariate: str
    x: Float[np.ndarray, " n_models"]
    y: Float[np.ndarray, " n_models"]
    fit: LinearFit


def covariate_lines(
    table: pandas.DataFrame, y: str, covariates: Sequence[str] | None = None
) -> list[CovariateLine]:
    """Fit y on each covariate alone, on the rows that have both.

    Args:
        table: one model per row. Where it has a column `family`, and only some models
            are related, intervals and p are cluster-robust, as in a study.
        y: the column, or the expression of columns, that is to be explained.
        covariates: columns or expressions; by default coupling, parameters, depth,
            width and training tokens, as far as they can be fitted. Parameters in
            billions are left out where their number is a column, too.

    Raises:
        ValueError: a covariate that was asked for cannot be fitted; see `linear_fit`.
    """
    table, families = add_families(table, None)
    if covariates is not None:
        return [_covariate_line(table, y, name, families) for name in covariates]
    lines = []
    for name in _USUAL_COVARIATES:
        # One column in two units would be two points of evidence.
        is_given_twice = name == "log10(params_billion)" and "n_parameters" in table
        if name == y or is_given_twice:
            continue
        try:
            lines.append(_covariate_line(table, y, name, families))
        except ValueError:
            # The table lacks the column, or too many of its values.
            continue
    return lines


def _covariate_line(
    table: pandas.DataFrame, y: str, covariate: str, families: str | None
) -> CovariateLine:
    fit = linear_fit(table, covariate, y, families=families)
    return CovariateLine(covariate, _numbers(table, covariate), _numbers(table, y), fit)


def _numbers(table: pandas.DataFrame, name: str) -> Float[np.ndarray, " n_models"]:
    # A column's own name need not be an expression.
    values = table[name] if name in table else evaluate(table, name)
    return np.asarray(values, float)
