"""What a reader must know before believing that coupling goes with a score."""

from typing import TYPE_CHECKING, Any

import pandas

from tl_coupling.generalization.leaving_out import ALPHA
from tl_coupling.statistics.attenuation import LEAST, WANTED
from tl_coupling.statistics.expressions import columns_of
from tl_coupling.statistics.fits import LinearFit, subset_mask

if TYPE_CHECKING:
    from tl_coupling.generalization.study import Generalization


def of(result: "Generalization") -> list[str]:
    """All remarks on a study, the strength of the association first."""
    line, drawn, rank = (
        result.association.linear,
        result.association.bootstrap,
        result.association.spearman,
    )
    r_squared, rho = (
        ("", "") if drawn.too_few else (_range(drawn.r_squared), _range(drawn.rho))
    )
    draws = (
        ""
        if drawn.too_few
        else f"; {drawn.n_resamples} draws, {drawn.n_dropped} of them degenerate"
    )
    lines = [
        f"R² = {line.r_squared:.3f}{r_squared}, Spearman's ρ = {rank.rho:.3f}{rho}, p = {rank.p:.3g}, Kendall's τ = "
        f"{rank.tau:.3f}, p = {rank.tau_p:.3g}{draws}"
    ]
    if not drawn.too_few and drawn.n_dropped > 0.1 * drawn.n_resamples:
        lines.append("many draws are degenerate: the bootstrap intervals mean little")
    looks = result.familywise
    lines.append(
        f"p = {looks.p:.3g} by permutation of the scores, over {len(looks.table)} looks (k, measures, tasks, subsets)"
    )
    if (fit := result.exponential) is not None:
        lines.append(
            f"exponential fit, score = a exp(b coupling): R² = {fit.r_squared:.3f}, p = {fit.p:.3g}"
        )
    if (
        "family" in result.table
        and result.table["family"].nunique() == 1
        and not result.table["family"].isna().any()
    ):
        lines.append(
            f"all models are of one family, {result.table['family'].iloc[0]}: nothing is known of others"
        )
    return (
        lines
        + _noise(result)
        + _reversals(result)
        + _selection(result)
        + _influence(result)
    )


def is_by_outcome(table: pandas.DataFrame, scores: set[str], subset: Any) -> bool:
    """Whether a subset is chosen by a score: its query names one, or its mask cuts one
    in two.
    """
    if isinstance(subset, str):
        return not columns_of(subset).isdisjoint(scores)
    mask = subset_mask(table, subset)
    if mask.all() or not mask.any():
        return False
    cut = (
        (values[mask], values[~mask])
        for values in (table[score].to_numpy(float) for score in scores & {*table})
    )
    return any(
        chosen.min() > rest.max() or chosen.max() < rest.min() for chosen, rest in cut
    )


def _noise(result: "Generalization") -> list[str]:
    found = result.attenuation
    if found is None or found.reliability >= WANTED:
        return []
    wanted = "more" if found.n_wanted is None else f"about {found.n_wanted}"
    size = f"{found.n_prompts} prompts are too few: reliability of the models' means {found.reliability:.2f}, {WANTED} "
    size += f"needs {wanted}"
    if found.reliability < LEAST:
        return [f"{size}; below {LEAST} the slope is not corrected for it"]
    return [
        f"{size}; corrected for it the slope is {found.slope:.4g} instead of {result.association.linear.slope:.4g}"
    ]


def _reversals(result: "Generalization") -> list[str]:
    """Simpson's paradox: a slope inside groups against that over all."""
    line, lines = result.association.linear, []

    def against(fits: dict[str, LinearFit]) -> list[str]:
        return [name for name, fit in fits.items() if fit.slope * line.slope < 0]

    if (
        inside := result.partial.get("family")
    ) is not None and inside.slope * line.slope < 0:
        low, high = inside.slope_interval
        lines.append(
            f"Simpson: inside families the slope is {inside.slope:.4g} ({low:.4g} to {high:.4g}), over all models "
            f"{line.slope:.4g}"
        )
    for where, names in (
        ("inside the families", against(result.within_families)),
        (
            "on the tasks",
            against({task: one.linear for task, one in result.by_task.items()}),
        ),
        ("across the tasks of the models", against(result.across_tasks)),
    ):
        if names:
            lines.append(
                f"Simpson: the slope has the other sign {where} {', '.join(names)}"
            )
    for what, found in (
        ("length", result.prompt_length),
        ("difficulty", result.prompt_difficulty),
    ):
        if names := [
            model for model, one in found.items() if one.within_tasks * one.rho < 0
        ]:
            lines.append(
                f"Simpson: ρ with prompt {what} has the other sign within tasks for {', '.join(names)}"
            )
    return lines


def _selection(result: "Generalization") -> list[str]:
    if not result.selected:
        return []
    names = ", ".join(result.selected)
    return [
        f"chosen by the score: {names}; that pulls slope and R² towards 0, and they compare with no others"
    ]


def _influence(result: "Generalization") -> list[str]:
    lines = []
    for kind, influence in (
        ("model", result.influence),
        ("family", result.family_influence),
    ):
        if influence is None:
            continue
        low, high = influence.r_squared_range
        most = influence.most_influential
        lines.append(
            f"without one {kind} R² is {low:.3f} to {high:.3f}; {most} changes it most"
        )
        if influence.sign_changes:
            lines.append(
                f"the slope changes its sign without {' or '.join(influence.sign_changes)}"
            )
        if influence.not_significant:
            lines.append(
                f"p exceeds {ALPHA} without {' or '.join(influence.not_significant)}"
            )
    return lines


def _range(interval: tuple[float, float]) -> str:
    return " ({:.3f} to {:.3f})".format(*interval)
