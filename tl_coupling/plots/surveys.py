"""Surveys: every model's spread over prompts, its stream by depth, coupling against
prompts, score against sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tl_coupling.arguments import checked
from tl_coupling.generalization import linear_fit
from tl_coupling.generalization.associations import by_task
from tl_coupling.measures import Measure
from tl_coupling.plots import labels
from tl_coupling.statistics import is_constant, rank_correlation
from tl_coupling.statistics.expressions import evaluate
from tl_coupling.surveys.checkpoints import step_order
from tl_coupling.surveys.readings import pairs_of_layers
from tl_coupling.surveys.survey import UNTRAINED

if TYPE_CHECKING:
    import pandas
    import xarray

_QUARTILES = (0.25, 0.5, 0.75)
# What is drawn of every prompt, and whether it spans decades.
_SPREADS = {
    "line_shape_score_all_tokens": ("line-shape score", False),
    "expodistance_all_tokens": ("expodistance", True),
    "equidistance_all_tokens": ("equidistance", False),
    "norm": ("norm at the end", True),
}
_PROFILES = {
    "norm": ("norm", True),
    "line_shape_score_by_depth": ("line-shape score so far", False),
    "step_length": ("step length", True),
    "logit_lens_entropy": ("logit-lens entropy (nats)", False),
}
_MOST_MODELS = 10
_MOST_ROWS = 4
_COVARIATES = (
    "coupling",
    "log10(params_billion)",
    "log10(n_parameters)",
    "n_layers",
    "d_model",
    "log10(training_tokens)",
)


@checked
def plot_quartiles(
    data: "xarray.Dataset",
    *,
    by: Mapping[str, float] | str | None = None,
    k: int | None = None,
    measure: Measure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Median over prompts of coupling, line-shape score, expodistance, equidistance and
    norm of each model, sorted.

    Shows which of these go with size or score, and how much of a difference between
    models is one between prompts: a bar holds the middle half of the prompts. Open
    marks are untrained twins. Dotted lines mark what random subspaces and steps in
    random directions give. Shapes are means over tokens; the norm is that after the
    last block, of the median token.

    Args:
        data: a survey.
        by: what models are sorted by, smallest on top: a fact that the survey holds, by
            default the number of parameters; or a number for each model, such as its
            score. Those without one come last.
        k, measure: of coupling; by default the largest k.

    Returns the Figure, with an Axes for each variable. Raises ValueError for a k or
    measure that was not measured, and a fact that is not known. Source: Aubry et al.
    2025, figures 23 and 37 and those of all models' line-shape score and expodistance;
    without nulls.

    Example:
        >>> fig = tlc.plots.plot_quartiles(data, by="d_model", k=4)
    """
    shown = {
        f"mean_{measure}": (
            f"{measure.replace('_', ' ')} (k = {_k(data, k, measure)})",
            False,
        ),
        **_SPREADS,
    }
    shown = {name: look for name, look in shown.items() if name in data}
    runs = list(_runs(data))
    order, said = _sorted_models(runs, by)
    fig = fig or labels.new_figure(2.2 + 1.75 * len(shown), 1.5 + 0.3 * len(order))
    panels = fig.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, (name, (text, is_log)) in zip(panels, shown.items(), strict=True):
        for model, checkpoint, of_run in runs:
            twin, place = checkpoint == UNTRAINED, order.index(model)
            low, middle, high = np.nanquantile(
                _at_the_end(_of_prompts(of_run, name, k)), _QUARTILES
            )
            look = (
                {"color": "C1", "markerfacecolor": "white"} if twin else {"color": "C0"}
            )
            height = place + (0.18 if twin else 0)
            ax.hlines(height, low, high, color=look["color"], linewidth=1.5)
            ax.plot(
                middle, height, "o", markersize=5, label=f"{model} {checkpoint}", **look
            )
            if (chance := _chance(of_run, name, k)) is not None:
                ax.vlines(
                    chance,
                    place - 0.35,
                    place + 0.35,
                    **{**labels.NULL_LINE, "linestyle": ":"},
                )
        ax.set_xlabel(text, fontsize="small")
        ax.tick_params(axis="x", labelsize="small")
        if is_log:
            ax.set_xscale("log", nonpositive="mask")
    panels[0].set_yticks(
        range(len(order)), _short_names(order).values(), parse_math=False
    )
    panels[0].set_ylim(len(order) - 0.5, -0.5)
    trained, untrained = (
        Line2D([], [], color=f"C{i}", marker="o", markerfacecolor=c)
        for i, c in enumerate(("C0", "w"))
    )
    handles = {"trained": trained} | (
        {"untrained": untrained} if any(c == UNTRAINED for _, c, _ in runs) else {}
    )
    handles["random subspaces, random steps"] = Line2D(
        [], [], **{**labels.NULL_LINE, "linestyle": ":"}
    )
    labels.plain_legend(
        fig,
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=3,
        fontsize="small",
    )
    n = data.sizes["prompt"]
    labels.entitle(
        fig,
        f"Median and middle half over {n} prompt{'s' if n > 1 else ''}, models sorted by {said}",
    )
    return fig


@checked
def plot_profiles(data: "xarray.Dataset", *, fig: Figure | None = None) -> Figure:
    """Norm, line-shape score, step length and logit-lens entropy against depth, a line
    for each model.

    Shows at which share of the depth the stream changes its ways. Medians over tokens
    and prompts, with the middle half of the prompts; dashed lines are untrained twins.
    At most ten models are drawn, those with the most parameters.

    Returns the Figure, with an Axes for each variable that the survey holds. Raises
    ValueError where it holds none. Source: Aubry et al. 2025, figure 24.

    Example:
        >>> fig = tlc.plots.plot_profiles(data)
    """
    shown = {
        name: look
        for name, look in _PROFILES.items()
        if name in data and bool(data[name].notnull().any())
    }
    if not shown:
        raise ValueError(
            f"wanted a survey that holds {' or '.join(_PROFILES)}, got {', '.join(map(str, data.data_vars))}"
        )
    runs = list(_runs(data))
    order, _ = _sorted_models(runs)
    drawn, names = order[-_MOST_MODELS:], _short_names(order)
    fig = fig or labels.new_figure(7.4, 5.6)
    panels = fig.subplots(2, 2, sharex=True).flat
    for ax, (name, (text, is_log)) in zip(panels, shown.items(), strict=False):
        for model, checkpoint, of_run in runs:
            if model not in drawn:
                continue
            values = _of_prompts(of_run, name)
            values = values[:, : _length(values)]
            if not values.size:
                continue
            low, middle, high = np.nanquantile(values, _QUARTILES, axis=0)
            depth = np.arange(len(middle)) + (0 if "depth" in of_run[name].dims else 1)
            share, twin = depth / depth[-1], checkpoint == UNTRAINED
            look: dict[str, Any] = {
                "color": f"C{drawn.index(model)}",
                "linestyle": "--" if twin else "-",
            }
            label = f"_{model} {checkpoint}" if twin else names[model]
            ax.plot(share, middle, linewidth=1.4, label=label, **look)
            if not twin and len(values) > 1:
                ax.fill_between(
                    share, low, high, color=look["color"], alpha=0.15, linewidth=0
                )
        ax.set_ylabel(text)
        if is_log:
            ax.set_yscale("log", nonpositive="mask")
    panels = fig.axes
    for ax in panels[2:]:
        ax.set_xlabel("share of the depth")
    for ax in panels[len(shown) :]:
        ax.remove()
    named_lines = panels[0].get_legend_handles_labels()
    labels.plain_legend(
        fig, *named_lines, loc="outside lower center", ncols=5, fontsize="small"
    )
    n, left_out = data.sizes["prompt"], len(order) - len(drawn)
    what = f"The stream by depth, median and middle half over {n} prompt{'s' if n > 1 else ''}"
    what += "; dashed: untrained" if any(c == UNTRAINED for _, c, _ in runs) else ""
    labels.entitle(
        fig, what + (f"\nwithout the {left_out} smallest models" if left_out else "")
    )
    return fig


@checked
def plot_prompts(
    data: "xarray.Dataset",
    against: Mapping[str, float] | None = None,
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Coupling on each prompt against its length or difficulty: all prompts together,
    and within their tasks.

    Shows whether a relation over all prompts is one between tasks alone: on the right
    both are deviations from the mean of their task. ρ is Spearman's. A row for each
    model, four at most, those with the most parameters.

    Args:
        data: a survey.
        against: a difficulty by prompt id; without, the length in tokens. Prompts
            without one are left out.
        k, measure: of coupling; by default the largest k.

    Returns the Figure, with two Axes for each model, one where prompts have no task.
    Raises ValueError for a k or measure that was not measured, and fewer than three
    prompts with a difficulty. Source: Aubry et al. 2025, figure 10, without tasks.

    Example:
        >>> fig = tlc.plots.plot_prompts(data, {"p0": 1, "p1": 3, "p2": 2, "p3": 4}, k=4)
    """
    name, k = f"mean_{measure}", _k(data, k, measure)
    runs = [run for run in _runs(data) if run[1] != UNTRAINED]
    order, _ = _sorted_models(runs)
    drawn = [run for model in order[-_MOST_ROWS:] for run in runs if run[0] == model]
    ids, names = [str(prompt) for prompt in data["prompt"].values], _short_names(order)
    parts = {
        task: np.isin(ids, part["prompt"].values.astype(str))
        for task, part in by_task(data).items()
    }
    columns = 2 if parts else 1
    fig = fig or labels.new_figure(3.9 * columns, 0.8 + 2.9 * len(drawn))
    grid = fig.subplots(len(drawn), columns, squeeze=False)
    text = "length in tokens" if against is None else "difficulty"
    for (model, _, of_run), axes in zip(drawn, grid, strict=True):
        y = _of_prompts(of_run, name, k)
        x = (
            of_run["n_pos"].values.astype(float)
            if against is None
            else np.array([against.get(i, np.nan) for i in ids])
        )
        known = np.isfinite(x) & np.isfinite(y)
        if known.sum() < 3:
            raise ValueError(
                f"{model!r}: wanted at least three prompts with a {text}, got {known.sum()}"
            )
        groups = {task: inside & known for task, inside in parts.items()} or {"": known}
        within = [
            (x[one] - x[one].mean(), y[one] - y[one].mean()) for one in groups.values()
        ]
        panels = [
            (
                "all prompts",
                [(x[one], y[one]) for one in groups.values()],
                x[known],
                y[known],
            )
        ]
        panels += (
            [("within tasks", within, *np.concatenate(within, axis=1))] if parts else []
        )
        for ax, (what, points, all_x, all_y) in zip(axes, panels, strict=True):
            for i, (task, (of_x, of_y)) in enumerate(zip(groups, points, strict=True)):
                ax.plot(
                    of_x,
                    of_y,
                    "o",
                    markersize=3.5,
                    alpha=0.6,
                    color=f"C{i % 10}",
                    label=task or "_prompts",
                )
            said = "ρ is undefined"
            if not (is_constant(all_x) or is_constant(all_y)):
                ranked = rank_correlation(all_x, all_y)
                said = f"ρ = {ranked.rho:+.2f}, p = {ranked.p:.2g}, n = {ranked.n}"
            ax.set_title(f"{what}: {said}", fontsize="small")
        for ax, (less, of) in zip(
            axes, (("", ""), (", less its task's mean", " less mean")), strict=False
        ):
            ax.set_xlabel(text + less, fontsize="small")
            ax.set_ylabel(
                f"{measure.replace('_', ' ')} (k = {k}){of}", fontsize="small"
            )
            ax.tick_params(labelsize="small")
        if len(drawn) > 1:
            axes[0].set_title(
                f"{names[model]}\n{axes[0].get_title()}",
                fontsize="small",
                parse_math=False,
            )
    if parts:
        named_lines = grid[0, 0].get_legend_handles_labels()
        labels.plain_legend(
            fig, *named_lines, loc="outside lower center", ncols=4, fontsize="small"
        )
    models = drawn[0][0] if len(drawn) == 1 else f"{len(drawn)} of {len(order)} models"
    against_what = text.removesuffix(" in tokens")
    labels.entitle(
        fig,
        f"Coupling of {pairs_of_layers(data)} against a prompt's {against_what}\n{models}",
    )
    return fig


@checked
def plot_covariates(
    table: "pandas.DataFrame",
    y: str = "score",
    x: Sequence[str] | None = None,
    *,
    fig: Figure | None = None,
) -> Figure:
    """A score, or coupling, against each of several facts about models, with its line,
    R² and p.

    Shows which facts go with the score at all, and on how many models: rows that lack a
    value are left out, panel by panel.

    Args:
        table: one model per row, such as `paper_table1()` or the table of a
            `Generalization`.
        y: what is explained.
        x: columns, or expressions of them, as in `linear_fit`; by default coupling,
            parameters, depth, width and training tokens, as far as the table has them
            for three models that differ.

    Returns the Figure, with an Axes for each x. Raises ValueError as `linear_fit`, and
    where there is nothing to draw. Source: Aubry et al. 2025, figure 9 and the figure
    of correlations with hyperparameters.

    Example:
        >>> fig = tlc.plots.plot_covariates(tlc.generalization.paper_table1(), x=["n_layers", "log10(params_billion)"])
    """
    x = (
        [name for name in _COVARIATES if name != y and _can_be_fitted(table, name, y)]
        if x is None
        else x
    )
    if not x:
        raise ValueError(
            f"`x` is empty: wanted columns to draw {y!r} against; there are {', '.join(table)}"
        )
    fig = fig or labels.new_figure(
        2.5 * min(len(x), 4) + 0.6, 0.9 + 2.6 * -(-len(x) // 4)
    )
    grid = fig.subplots(-(-len(x) // 4), min(len(x), 4), sharey=True, squeeze=False)
    for ax, name in zip(grid.flat, x, strict=False):
        fit = linear_fit(table, name, y)
        across, up = (
            # A column's own name need not be an expression.
            np.asarray(table[one] if one in table else evaluate(table, one), float)
            for one in (name, y)
        )
        ends = np.array(
            [np.nanmin(across[np.isfinite(up)]), np.nanmax(across[np.isfinite(up)])]
        )
        ax.plot(
            across,
            up,
            "o",
            markersize=4,
            color="C0",
            markeredgecolor="white",
            label="_models",
        )
        ax.plot(ends, fit.predict(ends), color="C0")
        ax.set_title(
            f"R² = {fit.r_squared:.3f}, p = {fit.p:.2g}, n = {fit.n}", fontsize="small"
        )
        ax.set_xlabel(name, parse_math=False)
        ax.tick_params(labelsize="small")
    for ax in grid.flat[len(x) :]:
        ax.remove()
    for ax in grid[:, 0]:
        ax.set_ylabel(y, parse_math=False)
    labels.entitle(fig, f"{y} of models against what is known of them")
    return fig


def _can_be_fitted(table: "pandas.DataFrame", x: str, y: str) -> bool:
    try:
        linear_fit(table, x, y)
    except ValueError:
        return False
    return True


def _runs(data: "xarray.Dataset") -> "Iterator[tuple[str, str, xarray.Dataset]]":
    """Model, checkpoint and its prompts: of each model its last checkpoint, and its
    untrained twin.
    """
    for dim, name in (
        ("model", str(data.attrs.get("model") or "model")),
        ("checkpoint", "main"),
    ):
        data = data if dim in data.dims else data.expand_dims({dim: [name]})
    for model in data["model"].values.tolist():
        of_model = data.sel(model=model)
        there = [
            c
            for c in data["checkpoint"].values.tolist()
            if bool(of_model["n_pos"].sel(checkpoint=c).notnull().any())
        ]
        trained = sorted((c for c in there if c != UNTRAINED), key=step_order)[-1:]
        for checkpoint in trained + [c for c in there if c == UNTRAINED]:
            yield str(model), str(checkpoint), of_model.sel(checkpoint=checkpoint)


def _sorted_models(
    runs: list[Any], by: Mapping[str, float] | str | None = None
) -> tuple[list[str], str]:
    """Models from the smallest number up, those without one last; and what the number
    is.
    """
    first = {model: of_run for model, _, of_run in reversed(runs)}
    if isinstance(by, Mapping):
        numbers, said = {model: by.get(model, np.nan) for model in first}, "score"
    else:
        fact = by or "n_parameters"
        if by and (
            missing := [
                model
                for model, of_run in first.items()
                if by not in of_run or of_run[by].ndim
            ]
        ):
            raise ValueError(
                f"`by` must be a number for each model, or a fact such as 'n_parameters'; {missing[0]!r} has no {by!r}"
            )
        numbers = {
            model: float(of_run[fact]) if fact in of_run else np.nan
            for model, of_run in first.items()
        }
        said = fact.replace("n_", "number of ")
    return sorted(
        reversed(first), key=lambda model: (np.isnan(numbers[model]), numbers[model])
    ), said


def _short_names(models: Sequence[str]) -> dict[str, str]:
    """Without the organisation or the folder, unless two models then have the same
    name.
    """
    short = [model.rsplit("/", 1)[-1] for model in models]
    return {
        model: one if short.count(one) == 1 else model
        for model, one in zip(models, short, strict=True)
    }


def _k(data: "xarray.Dataset", k: int | None, measure: str) -> int:
    if (name := f"mean_{measure}") not in data:
        raise ValueError(
            f"no {name!r} in the survey; it holds {', '.join(map(str, data.data_vars))}"
        )
    held = sorted(data["k"].values.tolist())
    if k is not None and k not in held:
        raise ValueError(f"`k` = {k} was not measured; there are {held}")
    return int(held[-1] if k is None else k)


def _of_prompts(
    of_run: "xarray.Dataset", name: str, k: int | None = None
) -> np.ndarray:
    """A variable of each prompt, `[prompt …]`; coupling at k, by default the
    largest.
    """
    values = of_run[name]
    if "k" in values.dims:
        values = values.sel(k=int(values["k"].max()) if k is None else k)
    return values.transpose("prompt", ...).values.astype(float)


def _length(values: np.ndarray) -> int:
    """Entries along depth that are this model's: axes of a survey are as long as the
    deepest model needs.
    """
    return int(np.flatnonzero(~np.isnan(values).all(0)).max(initial=-1)) + 1


def _at_the_end(values: np.ndarray) -> np.ndarray:
    """Of what is known at every depth, the last."""
    return values[:, _length(values) - 1] if values.ndim > 1 else values


def _chance(of_run: "xarray.Dataset", name: str, k: int | None) -> float | None:
    """What a variable is where nothing is learnt, if that is known."""
    if name == "line_shape_score_all_tokens":
        return float(of_run["n_layers"]) ** 0.5 if "n_layers" in of_run else None
    if (null := name.replace("mean_", "null_")) != name and null in of_run:
        return labels.one_null(_of_prompts(of_run, null, k))
    return None
