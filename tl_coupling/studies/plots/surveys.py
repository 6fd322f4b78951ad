"""Surveys: models over prompts and by depth, coupling by prompt, scores by covariate."""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.measures import (
    AnyMeasure,
    mean_name,
    measure_named,
    measured_in,
    null_name,
)
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_STEPS, RANDOM_SUBSPACES
from tl_coupling.studies.generalization import (
    CovariateLine,
    PromptPoints,
    PromptRelation,
    covariate_lines,
    prompt_relation,
    split_by_task,
)
from tl_coupling.studies.plots.point_names import name_points
from tl_coupling.studies.surveys import UNTRAINED, pairs_of_layers, step_order

if TYPE_CHECKING:
    import pandas
    import xarray

_QUARTILES = (0.25, 0.5, 0.75)
_CHANCE_LINE = {**labels.NULL_LINE, "linestyle": ":"}
_MOST_MODELS = 10
_MOST_ROWS = 4
# So many models of a scatter are named: those furthest from the line.
_MOST_NAMED = 5
# Covariates in words. Axes of logarithms have the numbers themselves at their ticks.
_COVARIATES = {
    "log10(params_billion)": "parameters (billions)",
    "log10(n_parameters)": "parameters",
    "log10(training_tokens)": "training tokens",
    "n_layers": "number of layers",
    "d_model": "width of the stream",
}


class _Variable(NamedTuple):
    """What a survey holds: its name on an axis, and whether it spans decades."""

    label: str
    is_log: bool = False


_SPREADS = {
    "line_shape_score_all_tokens": _Variable("line-shape score"),
    "expodistance_all_tokens": _Variable("expodistance", is_log=True),
    "equidistance_all_tokens": _Variable("equidistance"),
    "norm": _Variable("norm at the end", is_log=True),
}
_PROFILES = {
    "norm": _Variable("norm", is_log=True),
    "line_shape_score_by_depth": _Variable("line-shape score so far"),
    "step_length": _Variable("step length", is_log=True),
    "logit_lens_entropy": _Variable("logit-lens entropy (nats)"),
}


class _Run(NamedTuple):
    """One model at one checkpoint, and what was measured of it on every prompt."""

    model: str
    checkpoint: str
    values: "xarray.Dataset"

    @property
    def is_untrained(self) -> bool:
        return self.checkpoint == UNTRAINED


@checked
def plot_quartiles(
    data: "xarray.Dataset",
    *,
    by: Mapping[str, float] | str | None = None,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Draw each model's median over prompts of coupling and of the stream's shape.

    The picture shows which of coupling, line-shape score, expodistance, equidistance
    and norm go with size or score, and how much of a difference between models is one
    between prompts: a bar holds the middle half of the prompts. Open marks are
    untrained twins. Dotted lines mark what random subspaces and steps in random
    directions give. Shapes are means over tokens; the norm is that after the last
    block, of the median token.

    Args:
        data: a survey.
        by: what models are sorted by, smallest on top: a fact that the survey holds, by
            default the number of parameters; or a number for each model, such as its
            score. Those without one come last.
        k: the number of singular vectors of coupling; the largest by default.
        measure: the measure of coupling.
        fig: the figure to draw in; a new one by default.

    Returns the Figure, with an Axes for each variable.

    Raises:
        ValueError: a k or measure that was not measured, or a fact that is not known.

    Source: Aubry et al. 2025, figures 23 and 37 and those of all models' line-shape
    score and expodistance; without nulls.

    Example:
        >>> fig = tlc.plots.plot_quartiles(data, by="d_model", k=4)
    """
    measured = measure_named(measure).name
    coupling = f"{measured.replace('_', ' ')} (k = {_measured_k(data, k, measured)})"
    variables = {mean_name(measured): _Variable(coupling), **_SPREADS}
    variables = {name: look for name, look in variables.items() if name in data}
    runs = _runs(data)
    models, sorted_by = _sorted_models(runs, by)
    n_rows = math.ceil(len(variables) / 2)
    height = 0.9 + n_rows * (0.7 + 0.25 * len(models))
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, height)
    panels = fig.subplots(n_rows, 2, sharey=True, squeeze=False).flat
    for ax in panels[len(variables) :]:
        ax.remove()
    for ax, (name, variable) in zip(panels, variables.items(), strict=False):
        for run in runs:
            _draw_quartiles(ax, run, name, k, models.index(run.model))
        ax.set_xlabel(variable.label, fontsize="small")
        ax.tick_params(axis="x", labelsize="small")
        if variable.is_log:
            ax.set_xscale("log", nonpositive="mask")
            _name_ends(ax)
    names = labels.short_names(models)
    # Each row names them on its left.
    for ax in panels[::2]:
        ax.set_yticks(range(len(models)), names, parse_math=False)
    # Upside down: the smallest model stands on top.
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    _add_legend_of_quartiles(fig, any(run.is_untrained for run in runs))
    prompts = _number_of_prompts(data)
    title = f"Median and middle half over {prompts} · models sorted by {sorted_by}"
    labels.entitle(fig, title)
    return fig


def _draw_quartiles(ax: Axes, run: _Run, name: str, k: int | None, place: int) -> None:
    """Draw the quartiles of one variable of one run at a place, and its null there."""
    last_values = _last_values(_prompt_values(run.values, name, k))
    low, middle, high = np.nanquantile(last_values, _QUARTILES)
    if run.is_untrained:
        color = labels.UNTRAINED
        face_color = "white"
        # A little below its trained twin, whose interval may be the same.
        height = place + 0.18
    else:
        color = face_color = labels.TRAINED
        height = float(place)
    ax.hlines(height, low, high, color=color, linewidth=1.5)
    ax.plot(
        middle,
        height,
        labels.MARKERS[color],
        markersize=5,
        # For whoever reads the lines; the legend has entries of its own.
        label=f"{run.model} {run.checkpoint}",
        color=color,
        markerfacecolor=face_color,
    )
    chance = _chance(run.values, name, k)
    if chance is not None:
        ax.vlines(chance, place - 0.35, place + 0.35, **_CHANCE_LINE)


def _name_ends(ax: Axes) -> None:
    """Name the first and the last tick of a logarithmic axis alone.

    Over less than a decade, names of all would overlap.
    """
    low, high = ax.get_xlim()
    ax.set_xticks([low, high], [labels.signed(low, ".2g"), labels.signed(high, ".2g")])
    first, last = ax.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    ax.minorticks_off()
    ax.set_xlim(low, high)


def _add_legend_of_quartiles(fig: Figure, has_untrained: bool) -> None:
    handles = {"trained": Line2D([], [], color=labels.TRAINED, marker="o")}
    if has_untrained:
        open_mark = labels.marked(labels.UNTRAINED) | {"markerfacecolor": "w"}
        handles["untrained"] = Line2D([], [], **open_mark)
    handles[f"{RANDOM_SUBSPACES}, {RANDOM_STEPS}"] = Line2D([], [], **_CHANCE_LINE)
    labels.plain_legend(
        fig,
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=3,
        fontsize="small",
    )


@checked
def plot_profiles(data: "xarray.Dataset", *, fig: Figure | None = None) -> Figure:
    """Draw norm, line-shape score, step length and entropy of each model by depth.

    The picture shows at which share of the depth the stream changes its ways. Lines are
    medians over tokens and prompts, with the middle half of the prompts; dashed lines
    are untrained twins. At most ten models are drawn, those with the most parameters.

    Args:
        data: a survey.
        fig: the figure to draw in; a new one by default.

    Returns the Figure, with an Axes for each variable that the survey holds.

    Raises:
        ValueError: the survey holds none of these variables.

    Source: Aubry et al. 2025, figure 24.

    Example:
        >>> fig = tlc.plots.plot_profiles(data)
    """
    variables = {
        name: variable
        for name, variable in _PROFILES.items()
        if name in data and bool(data[name].notnull().any())
    }
    if not variables:
        raise ValueError(
            f"wanted a survey that holds {' or '.join(_PROFILES)}, "
            f"got {', '.join(map(str, data.data_vars))}"
        )
    runs = _runs(data)
    models, _ = _sorted_models(runs)
    # Models come from the smallest.
    drawn_models = models[-_MOST_MODELS:]
    names = dict(zip(models, labels.short_names(models), strict=True))
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 5.6)
    fig.subplots(2, 2, sharex=True)
    panels = fig.axes
    for ax, (name, variable) in zip(panels, variables.items(), strict=False):
        for run in runs:
            if run.model in drawn_models:
                look = labels.numbered_look(drawn_models.index(run.model))
                _draw_profile(ax, run, name, look, names[run.model])
        ax.set_ylabel(variable.label, fontsize="small")
        if variable.is_log:
            ax.set_yscale("log", nonpositive="mask")
    for ax in panels[2:]:
        ax.set_xlabel("share of the depth")
    # The survey may hold fewer than four of the variables.
    for ax in panels[len(variables) :]:
        ax.remove()
    labels.legend_below(fig, panels[0])
    title = (
        f"The stream by depth, median and middle half over {_number_of_prompts(data)}"
    )
    if any(run.is_untrained for run in runs):
        title += "; dashed: untrained"
    n_left_out = len(models) - len(drawn_models)
    if n_left_out:
        title += f"\nwithout the {n_left_out} smallest models"
    labels.entitle(fig, title)
    return fig


def _draw_profile(
    ax: Axes, run: _Run, name: str, look: dict[str, Any], label: str
) -> None:
    """Draw one variable of one run by depth, unless nothing is known of it."""
    values = _prompt_values(run.values, name)
    values = values[:, : _length(values)]
    if not values.size:
        return
    low, middle, high = np.nanquantile(values, _QUARTILES, axis=0)
    # Values that are not of every depth are of every step, and stand where the step
    # ends.
    first_depth = 0 if "depth" in run.values[name].dims else 1
    depth = np.arange(len(middle)) + first_depth
    # Models of different depths share one axis, from the embedding to the last block.
    share = depth / depth[-1]
    if run.is_untrained:
        label = f"_{run.model} {run.checkpoint}"
        line_style = "--"
    else:
        line_style = "-"
    points: dict[str, Any] = {"markersize": 4, "markevery": max(1, len(depth) // 5)}
    ax.plot(
        share,
        middle,
        linewidth=1.4,
        label=label,
        linestyle=line_style,
        **look,
        **points,
    )
    if not run.is_untrained and len(values) > 1:
        ax.fill_between(share, low, high, color=look["color"], alpha=0.15, linewidth=0)


@checked
def plot_prompts(
    data: "xarray.Dataset",
    against: Mapping[str, float] | None = None,
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Draw coupling on each prompt against its length or difficulty.

    The picture shows whether a relation over all prompts is one between tasks alone: on
    the right both are deviations from the mean of their task. ρ is Spearman's. A row
    for each model, four at most, those with the most parameters.

    Args:
        data: a survey.
        against: a difficulty by prompt id; without, the length in tokens. Prompts
            without one are left out.
        k: the number of singular vectors of coupling; the largest by default.
        measure: the measure of coupling.
        fig: the figure to draw in; a new one by default.

    Returns the Figure, with two Axes for each model, one where prompts have no task.

    Raises:
        ValueError: a k or measure that was not measured, or fewer than three prompts
            with a difficulty.

    Source: Aubry et al. 2025, figure 10, without tasks.

    Example:
        >>> difficulty = {"p0": 1, "p1": 3, "p2": 2, "p3": 4}
        >>> fig = tlc.plots.plot_prompts(data, difficulty, k=4)
    """
    measured = measure_named(measure).name
    k = _measured_k(data, k, measured)
    runs = [run for run in _runs(data) if not run.is_untrained]
    models, _ = _sorted_models(runs)
    drawn_runs = [
        run for model in models[-_MOST_ROWS:] for run in runs if run.model == model
    ]
    # A mask over prompts for each task.
    prompt_ids = data["prompt"].values.astype(str)
    tasks = {
        task: np.isin(prompt_ids, task_data["prompt"].values.astype(str))
        for task, task_data in split_by_task(data).items()
    }
    n_columns = 2 if tasks else 1
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 0.8 + 2.4 * len(drawn_runs))
    grid = fig.subplots(len(drawn_runs), n_columns, squeeze=False)
    x_label = "length in tokens" if against is None else "difficulty"
    y_label = f"{measured.replace('_', ' ')} (k = {k})"
    names = dict(zip(models, labels.short_names(models), strict=True))
    for run, axes in zip(drawn_runs, grid, strict=True):
        x = _length_or_difficulty(run, against)
        y = _prompt_values(run.values, mean_name(measured), k)
        relation = prompt_relation(x, y, tasks)
        # Two points always lie on a line.
        if relation.n_prompts < 3:
            raise ValueError(
                f"{run.model!r}: wanted at least three prompts with a {x_label}, "
                f"got {relation.n_prompts}"
            )
        _draw_relation(axes, relation, x_label, y_label)
        if len(drawn_runs) > 1:
            title = f"{names[run.model]}\n{axes[0].get_title()}"
            axes[0].set_title(title, fontsize="small", parse_math=False)
    if tasks:
        labels.legend_below(fig, grid[0, 0])
    if len(drawn_runs) == 1:
        models_drawn = drawn_runs[0].model
    else:
        models_drawn = f"{len(drawn_runs)} of {len(models)} models"
    pairs = pairs_of_layers(data)
    property_name = x_label.removesuffix(" in tokens")
    title = f"Coupling of {pairs} against a prompt's {property_name}\n{models_drawn}"
    labels.entitle(fig, title)
    return fig


def _length_or_difficulty(
    run: _Run, difficulty: Mapping[str, float] | None
) -> Float[np.ndarray, " n_prompts"]:
    """Return the difficulty of each prompt, NaN where it has none; or its length."""
    if difficulty is None:
        return run.values["n_pos"].values.astype(float)
    prompt_ids = run.values["prompt"].values.astype(str)
    return np.array([difficulty.get(prompt, np.nan) for prompt in prompt_ids])


def _draw_relation(
    axes: np.ndarray, relation: PromptRelation, x_label: str, y_label: str
) -> None:
    """Draw the prompts as they are, and beside them less the mean of their task."""
    _draw_prompts(axes[0], relation.pooled, "all prompts", x_label, y_label)
    if relation.within_tasks is not None:
        _draw_prompts(
            axes[1],
            relation.within_tasks,
            "within tasks",
            f"{x_label}, less its task's mean",
            f"{y_label} less mean",
        )


def _draw_prompts(
    ax: Axes, points: PromptPoints, title: str, x_label: str, y_label: str
) -> None:
    """Draw the prompts of every task, and say how they are correlated."""
    for i, (task, x) in enumerate(points.x.items()):
        ax.plot(
            x,
            points.y[task],
            linestyle="",
            markersize=3.5,
            alpha=0.6,
            **labels.numbered_look(i),
            # Prompts without a task have no entry in the legend.
            label=task or "_prompts",
        )
    ranked = points.correlation
    if ranked is None:
        correlation = "ρ is undefined"
    else:
        rho = labels.signed(ranked.rho, "+.2f")
        correlation = f"ρ = {rho}, p = {ranked.p:.2g}\nn = {ranked.n}"
    # Half of the width has no room for them in one line.
    ax.set_title(f"{title}:\n{correlation}", fontsize="small")
    ax.set_xlabel(fill(x_label, 24), fontsize="small")
    ax.set_ylabel(fill(y_label, 24), fontsize="small")
    ax.tick_params(labelsize="small")


@checked
def plot_covariates(
    table: "pandas.DataFrame",
    y: str = "score",
    x: Sequence[str] | None = None,
    *,
    fig: Figure | None = None,
) -> Figure:
    """Draw a score, or coupling, against each of several facts about models.

    The picture shows which facts go with the score at all, and on how many models: rows
    that lack a value are left out, panel by panel. Each panel has its line, R² and p.
    Where the table has a column `family`, p is cluster-robust, as in a study, and the
    title says how many families there are.

    Args:
        table: one model per row, such as `paper_table1()` or the table of a
            `Generalization`.
        y: what is explained.
        x: columns, or expressions of them, as in `linear_fit`; by default coupling,
            parameters, depth, width and training tokens, as far as the table has them
            for three models that differ.
        fig: the figure to draw in; a new one by default.

    Returns the Figure, with an Axes for each x.

    Raises:
        ValueError: as in `linear_fit`, or nothing to draw.

    Source: Aubry et al. 2025, figure 9 and the figure of correlations with
    hyperparameters.

    Example:
        >>> table = tlc.generalization.paper_table1()
        >>> x = ["n_layers", "log10(params_billion)"]
        >>> fig = tlc.plots.plot_covariates(table, x=x)
    """
    lines = covariate_lines(table, y, x)
    if not lines:
        raise ValueError(
            f"`x` is empty: wanted columns to draw {y!r} against; "
            f"there are {', '.join(table)}"
        )
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 0.7 + 2.2 * len(lines))
    grid = fig.subplots(len(lines), 1, sharey=True, squeeze=False)
    for ax, line in zip(grid.flat, lines, strict=True):
        # The line is drawn no further than the points that it was fitted to.
        x_where_y_is_known = line.x[np.isfinite(line.y)]
        ends = np.array([np.nanmin(x_where_y_is_known), np.nanmax(x_where_y_is_known)])
        ax.plot(
            line.x,
            line.y,
            "o",
            markersize=5,
            color=labels.BLUE,
            markeredgecolor="white",
            label="_models",
        )
        ax.plot(ends, line.fit.predict(ends), color=labels.BLUE)
        fit = line.fit
        title = f"R² = {fit.r_squared:.3f}, p of the slope {fit.p:.2g}, n = {fit.n}"
        if fit.n_families is not None:
            title += f" of {fit.n_families} families"
        ax.set_title(title, fontsize="small")
        ax.set_xlabel(_COVARIATES.get(line.covariate, line.covariate), parse_math=False)
        if line.covariate.startswith("log10(") and line.covariate in _COVARIATES:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.xaxis.set_major_formatter(_format_power)
        ax.tick_params(labelsize="small")
    for ax in grid[:, 0]:
        ax.set_ylabel(y, parse_math=False)
    title = f"{y[:1].upper()}{y[1:]} of models by size and training, each with its linear fit"
    if "model" in table:
        title += "\nnamed: the models furthest from the line"
    if "family" in table:
        title += "\np is cluster-robust, by family"
    labels.entitle(fig, title)
    if "model" in table:
        for ax, line in zip(grid.flat, lines, strict=True):
            _name_furthest(ax, line, table["model"].astype(str).tolist())
    return fig


def _format_power(exponent: float, _: int) -> str:
    """Write a power of ten, large ones as such."""
    if abs(exponent) < 4:
        return f"{10**exponent:g}"
    return f"$10^{{{exponent:g}}}$"


def _name_furthest(ax: Axes, line: CovariateLine, models: Sequence[str]) -> None:
    """Name the models whose points lie furthest from the line."""
    distance = np.abs(line.y - line.fit.predict(line.x))
    known = np.flatnonzero(np.isfinite(distance))
    furthest = known[np.argsort(distance[known])][-_MOST_NAMED:]
    names = [models[place] for place in furthest]
    name_points(ax, line.x[furthest], line.y[furthest], names)


def _number_of_prompts(data: "xarray.Dataset") -> str:
    n_prompts = data.sizes["prompt"]
    return f"{n_prompts} prompt{'s' if n_prompts > 1 else ''}"


def _runs(data: "xarray.Dataset") -> list[_Run]:
    """Return the last checkpoint of each model, and its untrained twin."""
    # A survey of one model, or one checkpoint, need not have the dimension.
    if "model" not in data.dims:
        data = data.expand_dims({"model": [str(data.attrs.get("model") or "model")]})
    if "checkpoint" not in data.dims:
        data = data.expand_dims({"checkpoint": ["main"]})
    runs = []
    for model in data["model"].values.tolist():
        model_data = data.sel(model=model)
        measured = [
            checkpoint
            for checkpoint in data["checkpoint"].values.tolist()
            if bool(model_data["n_pos"].sel(checkpoint=checkpoint).notnull().any())
        ]
        # Axes of a survey hold every checkpoint of any model: those of this one have
        # values.
        trained = [checkpoint for checkpoint in measured if checkpoint != UNTRAINED]
        untrained = [checkpoint for checkpoint in measured if checkpoint == UNTRAINED]
        for checkpoint in sorted(trained, key=step_order)[-1:] + untrained:
            values = model_data.sel(checkpoint=checkpoint)
            runs.append(_Run(str(model), str(checkpoint), values))
    return runs


def _sorted_models(
    runs: Sequence[_Run], criterion: Mapping[str, float] | str | None = None
) -> tuple[list[str], str]:
    """Return models from the smallest number up, and what the number is.

    Models without a number come last.
    """
    # Reversed twice, here and below: a trained model's facts count before its twin's,
    # and models with the same number keep their order.
    values_of = {run.model: run.values for run in reversed(runs)}
    if isinstance(criterion, Mapping):
        numbers = {model: criterion.get(model, np.nan) for model in values_of}
        name = "score"
    else:
        fact = criterion or "n_parameters"
        numbers = {}
        for model, values in values_of.items():
            is_known = fact in values and (criterion is None or not values[fact].ndim)
            numbers[model] = float(values[fact]) if is_known else np.nan
            if criterion and not is_known:
                raise ValueError(
                    "`by` must be a number for each model, or a fact such as "
                    f"'n_parameters'; {model!r} has no {criterion!r}"
                )
        name = fact.replace("n_", "number of ")
    models = sorted(
        reversed(values_of),
        key=lambda model: (np.isnan(numbers[model]), numbers[model]),
    )
    return models, name


def _measured_k(data: "xarray.Dataset", k: int | None, measure: str) -> int:
    """Return k, by default the largest that the survey measured.

    Raises:
        ValueError: the measure or k was not measured.
    """
    name = mean_name(measure)
    if name not in data:
        raise ValueError(
            f"no {name!r} in the survey; it holds {', '.join(map(str, data.data_vars))}"
        )
    measured = sorted(data["k"].values.tolist())
    if k is not None and k not in measured:
        raise ValueError(f"`k` = {k} was not measured; there are {measured}")
    return int(measured[-1] if k is None else k)


def _prompt_values(
    values: "xarray.Dataset", name: str, k: int | None = None
) -> Float[np.ndarray, "n_prompts ..."]:
    """Return a variable of each prompt; coupling at k, by default the largest."""
    variable = values[name]
    if "k" in variable.dims:
        variable = variable.sel(k=int(variable["k"].max()) if k is None else k)
    return variable.transpose("prompt", ...).values.astype(float)


def _length(values: Float[np.ndarray, "n_prompts n_depths"]) -> int:
    """Count the entries along depth that are this model's.

    Axes of a survey are as long as its deepest model needs.
    """
    is_known = ~np.isnan(values).all(0)
    return int(np.flatnonzero(is_known).max(initial=-1)) + 1


def _last_values(
    values: Float[np.ndarray, "n_prompts ..."],
) -> Float[np.ndarray, " n_prompts"]:
    """Return the last value by depth, of what is known by depth."""
    if values.ndim == 1:
        return values
    # The depth of this model, not of the deepest one.
    return values[:, _length(values) - 1]


def _chance(values: "xarray.Dataset", name: str, k: int | None) -> float | None:
    """Return what a variable is where nothing is learnt, if that is known."""
    if name == "line_shape_score_all_tokens":
        if "n_layers" not in values:
            return None
        # Steps in random directions add up like √n, and the score is n over that.
        return float(values["n_layers"]) ** 0.5
    measures = measured_in([name])
    if not measures or null_name(measures[0]) not in values:
        return None
    return labels.one_null(_prompt_values(values, null_name(measures[0]), k))
