"""Points and what is said of them, ready to be drawn: models by a covariate, and the
prompts of one model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas
from jaxtyping import Bool, Float

from tl_coupling.statistics import (
    LinearFit,
    RankCorrelation,
    evaluate,
    is_constant,
    linear_fit,
    rank_correlation,
)

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
        table: one model per row.
        y: the column, or the expression of columns, that is to be explained.
        covariates: columns or expressions; by default coupling, parameters, depth,
            width and training tokens, as far as they can be fitted.

    Raises:
        ValueError: a covariate that was asked for cannot be fitted; see `linear_fit`.
    """
    if covariates is not None:
        return [_covariate_line(table, y, name) for name in covariates]
    lines = []
    for name in _USUAL_COVARIATES:
        if name == y:
            continue
        try:
            lines.append(_covariate_line(table, y, name))
        except ValueError:
            # The table lacks the column, or too many of its values.
            continue
    return lines


def _covariate_line(table: pandas.DataFrame, y: str, covariate: str) -> CovariateLine:
    fit = linear_fit(table, covariate, y)
    return CovariateLine(covariate, _numbers(table, covariate), _numbers(table, y), fit)


def _numbers(table: pandas.DataFrame, name: str) -> Float[np.ndarray, " n_models"]:
    # A column's own name need not be an expression.
    values = table[name] if name in table else evaluate(table, name)
    return np.asarray(values, float)


@dataclass(frozen=True, eq=False)
class PromptPoints:
    """Prompts by a property and by their coupling, in the groups of their tasks.

    Attributes:
        x, y: property and coupling of the prompts of each task, by its name; of
            prompts without tasks all stand under "".
        correlation: Spearman's and Kendall's over the prompts of all tasks; `None`
            below three prompts, and where x or y is constant.
    """

    x: dict[str, Float[np.ndarray, " n"]]
    y: dict[str, Float[np.ndarray, " n"]]
    correlation: RankCorrelation | None


@dataclass(frozen=True, eq=False)
class PromptRelation:
    """Coupling against a property of the prompts, over all of them and within tasks.

    Attributes:
        n_prompts: those that have both values.
        pooled: the values as they are.
        within_tasks: the values less the mean of their task; `None` where prompts have
            no task.
    """

    n_prompts: int
    pooled: PromptPoints
    within_tasks: PromptPoints | None


def prompt_relation(
    x: Float[np.ndarray, " n_prompts"],
    y: Float[np.ndarray, " n_prompts"],
    tasks: Mapping[str, Bool[np.ndarray, " n_prompts"]],
) -> PromptRelation:
    """Relate the coupling of one model on each prompt, y, to a property of the prompts.

    Args:
        x, y: NaN where a prompt has none; such prompts are left out.
        tasks: which prompts are of each task, by its name; empty without tasks.
    """
    is_known = np.isfinite(x) & np.isfinite(y)
    members = {task: inside & is_known for task, inside in tasks.items()}
    members = members or {"": is_known}
    pooled = PromptPoints(
        {task: x[inside] for task, inside in members.items()},
        {task: y[inside] for task, inside in members.items()},
        # Also the prompts that have no task.
        _correlation(x[is_known], y[is_known]),
    )
    n_prompts = int(is_known.sum())
    if not tasks:
        return PromptRelation(n_prompts, pooled, None)
    x_within = {task: values - values.mean() for task, values in pooled.x.items()}
    y_within = {task: values - values.mean() for task, values in pooled.y.items()}
    correlation = _correlation(
        np.concatenate(list(x_within.values())), np.concatenate(list(y_within.values()))
    )
    within = PromptPoints(x_within, y_within, correlation)
    return PromptRelation(n_prompts, pooled, within)


def _correlation(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]
) -> RankCorrelation | None:
    if len(x) < 3 or is_constant(x) or is_constant(y):
        return None
    return rank_correlation(x, y)
