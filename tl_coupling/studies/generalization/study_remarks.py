"""What a reader must know before believing that coupling goes with a score.

Each function returns lines of one kind, or none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas

from tl_coupling.statistics import (
    WANTED,
    Attenuation,
    ExponentialFit,
    Familywise,
    Interval,
    LinearFit,
    Subset,
    columns_of,
    subset_mask,
)
from tl_coupling.studies.generalization.associations import Association
from tl_coupling.studies.generalization.leaving_out import ALPHA, LeaveOneOut
from tl_coupling.studies.generalization.model_tables import FAMILY
from tl_coupling.studies.generalization.prompt_correlations import PromptCorrelation

# Above this share of degenerate draws the bootstrap says little.
_MANY_DROPPED = 0.1


def remark_on_strength(
    association: Association, looks: Familywise, exponential: ExponentialFit | None
) -> list[str]:
    """Say how strong the association is, and what is left of p after all tests."""
    line = association.linear
    bootstrap = association.bootstrap
    rank = association.spearman
    r_squared = f"R² = {line.r_squared:.3f}"
    rho = f"Spearman's ρ = {rank.rho:.3f}"
    # A bootstrap of too few models does not hold, and none is printed.
    draws = ""
    if not bootstrap.too_few:
        r_squared += _range(bootstrap.r_squared)
        rho += _range(bootstrap.rho)
        draws = (
            f"; {bootstrap.n_resamples} draws, {bootstrap.n_dropped} of them degenerate"
        )
    lines = [
        f"{r_squared}, {rho}, p = {rank.p:.3g}, "
        f"Kendall's τ = {rank.tau:.3f}, p = {rank.tau_p:.3g}{draws}"
    ]
    many = _MANY_DROPPED * bootstrap.n_resamples
    if not bootstrap.too_few and bootstrap.n_dropped > many:
        lines.append("many draws are degenerate: the bootstrap intervals mean little")
    # No permuted scores did as well: with more of them p could be smaller.
    is_smallest = looks.p <= 1 / (1 + looks.n_permutations)
    sign = "≤" if is_smallest and not looks.is_exact else "="
    which = (
        f"all {1 + looks.n_permutations} orders" if looks.is_exact else "permutation"
    )
    lines.append(
        f"p {sign} {looks.p:.3g} by {which} of the scores, "
        f"over {len(looks.table)} tests (k, measures, tasks, subsets)"
    )
    if exponential is not None:
        lines.append(
            "exponential fit, score = a exp(b coupling): "
            f"R² = {exponential.r_squared:.3f}, p = {exponential.p:.3g}"
        )
    return lines


@dataclass(frozen=True)
class CommonPrompts:
    """The prompts that all models were measured on, where some models lack others.

    Attributes:
        n_prompts, models: how many these are; the models that lack some of the others.
        n_all: how many prompts there are with the others.
        line: coupling, and a loss, being means over these prompts alone: that of the
            study; `None` where there are none.
        mixed_line: the means of each model being over all prompts that it has, so that
            they may differ for that reason alone; `None` where it cannot be fitted.
    """

    n_prompts: int
    models: tuple[str, ...]
    n_all: int
    line: LinearFit | None
    mixed_line: LinearFit | None


def remark_on_different_prompts(common: CommonPrompts | None) -> list[str]:
    """Say that models were measured on different prompts, and which are compared."""
    if common is None:
        return []
    lacking = f"{', '.join(common.models)} lack some of {common.n_all} prompts"
    if common.line is None:
        return [
            f"means are over different prompts ({lacking}, and none was measured in all "
            "models), and may differ for that reason alone"
        ]
    start = f"{lacking}: models are compared on the {common.n_prompts} that all have"
    if common.mixed_line is None:
        return [start]
    fits = [
        f"{fit.slope:.4g} (R² = {fit.r_squared:.3f})"
        for fit in (common.mixed_line, common.line)
    ]
    return [
        f"{start}; means over different prompts, all of each model, would give the slope "
        f"{fits[0]} instead of {fits[1]}"
    ]


def remark_on_single_family(table: pandas.DataFrame) -> list[str]:
    """Say that all models are of one family, if they are."""
    # A model of unknown family may be of another.
    if FAMILY not in table or table[FAMILY].isna().any():
        return []
    if table[FAMILY].nunique() != 1:
        return []
    family = table[FAMILY].iloc[0]
    return [f"all models are of one family, {family}: nothing is known about others"]


def remark_on_noise(attenuation: Attenuation | None, line: LinearFit) -> list[str]:
    """Say that prompts are too few to tell the models apart, if they are."""
    if attenuation is None or attenuation.reliability >= WANTED:
        return []
    n_wanted = "more"
    if attenuation.n_wanted is not None:
        n_wanted = f"about {attenuation.n_wanted}"
    size = (
        f"{attenuation.n_prompts} prompts are too few: reliability of the models' "
        f"means {attenuation.reliability:.2f}, {WANTED} needs {n_wanted}"
    )
    if np.isnan(attenuation.slope):
        low, high = attenuation.reliability_interval
        return [
            f"{size}; its interval, {low:.2f} to {high:.2f}, is too wide to correct the "
            "slope for it"
        ]
    low, high = attenuation.slope_interval
    return [
        f"{size}; corrected for it the slope is {attenuation.slope:.4g} "
        f"({low:.4g} to {high:.4g}) instead of {line.slope:.4g}"
    ]


def remark_on_slopes_inside_families(
    line: LinearFit, family_line: LinearFit | None
) -> list[str]:
    """Say that the slope of differences inside families has the other sign, if it
    has.
    """
    if family_line is None or not _is_reversed(family_line, line):
        return []
    low, high = family_line.slope_interval
    return [
        f"Simpson: inside families the slope is {family_line.slope:.4g} "
        f"({low:.4g} to {high:.4g}), over all models {line.slope:.4g}"
    ]


def remark_on_reversed_slopes(
    line: LinearFit, groups: Mapping[str, Mapping[str, LinearFit]]
) -> list[str]:
    """Name the groups of models or tasks inside which the slope has the other sign
    (Simpson's paradox).
    """
    lines = []
    for place, fits in groups.items():
        names = [name for name, fit in fits.items() if _is_reversed(fit, line)]
        if names:
            lines.append(
                f"Simpson: the slope has the other sign {place} {', '.join(names)}"
            )
    return lines


def remark_on_reversed_correlations(
    correlations: Mapping[str, Mapping[str, PromptCorrelation]],
) -> list[str]:
    """Name the models whose ρ over prompts has the other sign within tasks."""
    lines = []
    for property_of_prompts, model_correlations in correlations.items():
        models = [
            model
            for model, correlation in model_correlations.items()
            # NaN, where a task has too few prompts, is below nothing.
            if correlation.within_tasks * correlation.rho < 0
        ]
        if models:
            lines.append(
                f"Simpson: ρ with prompt {property_of_prompts} has the other sign "
                f"within tasks for {', '.join(models)}"
            )
    return lines


def remark_on_selection(selected: Sequence[str]) -> list[str]:
    """Name the subsets that were chosen by the score."""
    if not selected:
        return []
    return [
        f"chosen by the score: {', '.join(selected)}; that pulls slope and R² "
        "towards 0, and they cannot be compared with others"
    ]


def remark_on_influence(kind: str, influence: LeaveOneOut | None) -> list[str]:
    """Say how much the line depends on a single model or family."""
    if influence is None:
        return []
    low, high = influence.r_squared_range
    lines = [
        f"without one {kind} R² is {low:.3f} to {high:.3f}; "
        f"{influence.most_influential} changes it most"
    ]
    if influence.sign_changes:
        names = " or ".join(influence.sign_changes)
        lines.append(f"the slope changes its sign without {names}")
    if influence.not_significant:
        names = " or ".join(influence.not_significant)
        lines.append(f"p exceeds {ALPHA} without {names}")
    return lines


def is_by_outcome(
    table: pandas.DataFrame,
    scores: set[str],
    subset: Subset,
) -> bool:
    """Say whether a subset is chosen by a score.

    Its query names one, or its mask cuts the models in two by one.
    """
    if isinstance(subset, str):
        return not columns_of(subset).isdisjoint(scores)
    mask = subset_mask(table, subset)
    # All models, or none, are no choice.
    if mask.all() or not mask.any():
        return False
    columns = [table[score].to_numpy(float) for score in scores & {*table}]
    return any(_is_cut(values[mask], values[~mask]) for values in columns)


def _is_cut(member_scores: np.ndarray, nonmember_scores: np.ndarray) -> bool:
    # A model without a score (NaN) would be neither above nor below.
    member_scores = member_scores[~np.isnan(member_scores)]
    nonmember_scores = nonmember_scores[~np.isnan(nonmember_scores)]
    if not len(member_scores) or not len(nonmember_scores):
        return False
    is_above = member_scores.min() > nonmember_scores.max()
    is_below = member_scores.max() < nonmember_scores.min()
    return bool(is_above or is_below)


def _is_reversed(fit: LinearFit, line: LinearFit) -> bool:
    # A slope of 0 has no sign to be reversed.
    return fit.slope * line.slope < 0


def _range(interval: Interval) -> str:
    low, high = interval
    return f" ({low:.3f} to {high:.3f})"
