"""Coupling across models: against a score, what its slope rests on and the choice of k;
and from task to task.
"""

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tl_coupling.arguments import checked
from tl_coupling.generalization import Generalization
from tl_coupling.plots import labels

if TYPE_CHECKING:
    import pandas

_POINTS_PER_INCH = 72
# Where a name may stand, seen from its point: beside it first, further away where
# something is in the way.
_DISTANCES = (5.0, 12.0, 20.0, 28.0, 38.0)
_DIRECTIONS = np.array(
    [(x, y) for x, y in product((1, -1, 0), (0, 1, -1)) if (x, y) != (0, 0)]
)
_MARKERS = "osD^v"
# With more a legend is not read any more.
_MAX_NAMED = 10


@checked
def plot_generalization(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Score against mean coupling, one point per model, with the line, its band and
    what random subspaces would give.

    The band is the bootstrap's, pointwise, over models (or families) and prompts, if
    there are enough; the dotted curve is the exponential fit. Where the null differs
    between models (spectral mis-coupling), each has a mark at the foot. Source: Aubry
    et al. 2025, figures 1a and 8, without null and band.

    Example:
        >>> scores = tlc.generalization.read_scores("scores.csv")
        >>> study = tlc.generalization.generalization_study(data, scores, n_resamples=100)
        >>> ax = tlc.plots.plot_generalization(study)
    """
    ax = ax or labels.new_figure(7.0, 5.4).subplots()
    line, drawn = result.association.linear, result.association.bootstrap
    x, y = (
        result.table[name].to_numpy(float) for name in (result.measure, result.score)
    )
    if not drawn.too_few:
        ax.fill_between(
            drawn.band_x,
            drawn.band_low,
            drawn.band_high,
            color="C0",
            alpha=0.15,
            linewidth=0,
        )
    label = (
        "linear fit, too few for a band"
        if drawn.too_few
        else "linear fit, bootstrap band"
    )
    ax.plot(drawn.band_x, line.predict(drawn.band_x), label=label, color="C0")
    if result.exponential is not None:
        label = (
            f"exponential fit $a\\,e^{{bx}}$, R² = {result.exponential.r_squared:.2f}"
        )
        ax.plot(
            drawn.band_x,
            result.exponential.predict(drawn.band_x),
            linestyle=":",
            label=label,
            color="C0",
        )
    ax.plot(x, y, "o", color="C0", markeredgecolor="white", label="_models")
    # Bands of few models are wide: the points decide what is shown.
    room = 0.15 * np.ptp(y)
    ax.set_ylim(y.min() - room, y.max() + room)
    nulls = result.table["null"].dropna() if "null" in result.table else []
    if not labels.draw_null(ax.axvline, nulls) and len(nulls):
        look: dict[str, Any] = {
            "color": "0.4",
            "markersize": 14,
            "label": "random subspaces",
        }
        ax.plot(
            nulls, np.zeros(len(nulls)), "|", transform=ax.get_xaxis_transform(), **look
        )
    ax.set_xlabel(f"mean {labels.measure_label(result.measure, result.k)}")
    ax.set_ylabel(
        "loss (nats per token)" if result.score == "loss" else result.score,
        parse_math=False,
    )
    labels.entitle(ax, f"{_heading(result)}\n{_statistics(line)}")
    # Fits are named with formulas.
    ax.legend(frameon=False, ncols=3, **labels.BELOW | {"bbox_to_anchor": (0.5, -0.14)})
    _name_points(ax, x, y, result.table["model"].tolist())
    return ax


@checked
def plot_forest(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """The slope with its interval, one row each: over all models, over subsets of them,
    and with covariates held fixed.

    Shows whether the slope keeps its sign. Intervals are t intervals, of families
    cluster-robust, except in the row of the bootstrap.

    Example:
        >>> study = tlc.generalization.generalization_study(data, n_resamples=100)
        >>> ax = tlc.plots.plot_forest(study)
    """
    slopes, drawn = result.slopes, result.association.bootstrap
    places = np.arange(len(slopes))
    ax = ax or labels.new_figure(7.0, 1.2 + 0.45 * len(slopes)).subplots()
    ax.hlines(places, slopes["low"], slopes["high"], color="C0")
    ax.plot(slopes["slope"], places, "o", color="C0", linestyle="")
    ax.axvline(0, **labels.NULL_LINE)
    rows = []
    for fit in slopes.itertuples():
        said = _statistics(fit)
        if fit.Index == "all models, corrected" and result.attenuation is not None:
            said = f"for the noise of {drawn.n_prompts} prompts, reliability {result.attenuation.reliability:.2f}"
        elif np.isnan(fit.p):
            resampled = (
                f"{drawn.n_models} models"
                if drawn.n_families is None
                else f"{drawn.n_families} families"
            )
            said = f"over {resampled}, {drawn.n_prompts} prompts"
        elif not np.isnan(fit.vif):
            said = f"{said.replace('R²', 'partial R²')}, VIF = {fit.vif:.1f}"
        rows.append(f"{fit.Index}\n{said}")
    ax.set_yticks(places, rows, fontsize="small", parse_math=False)
    ax.invert_yaxis()
    per_unit = f"per unit of {labels.measure_label(result.measure, result.k)}"
    ax.set_xlabel(f"slope, {labels.beside_formulas(result.score)} {per_unit}")
    # The names of rows leave half of the figure to the Axes.
    what, over = _heading(result).split(" · ", 1)
    labels.entitle(
        ax, f"{what}\n{over}\nslope and {result.association.linear.level:.0%} interval"
    )
    return ax


@checked
def plot_k_sweep(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """R² of the linear fit against the number of singular vectors, with bootstrap
    intervals over models and prompts.

    Shows whether the finding depends on the choice of k. The p of the slope stands
    below each k. Source: Aubry et al. 2025, figure of the correlation for varying K,
    without interval.

    Example:
        >>> study = tlc.generalization.generalization_study(data, n_resamples=100)
        >>> ax = tlc.plots.plot_k_sweep(study)
    """
    ax = ax or labels.new_figure(7.0, 4.2).subplots()
    sweep = result.by_k.values()
    # Evenly spaced: the numbers that people choose are not.
    places = np.arange(len(sweep))
    drawn = result.association.bootstrap
    if not drawn.too_few:
        low, high = np.transpose([one.bootstrap.r_squared for one in sweep])
        ax.vlines(places, low, high, color="C0", alpha=0.5)
    ax.plot(places, [one.linear.r_squared for one in sweep], color="C0", marker="o")
    ax.set_xticks(
        places, [f"{k}\np = {one.linear.p:.2g}" for k, one in result.by_k.items()]
    )
    ax.margins(x=0.1)
    ax.set(
        xlabel="k, number of top singular vectors",
        ylabel="R² of the linear fit",
        ylim=(0, 1),
    )
    linear = _statistics(result.association.linear)
    bars = (
        "too few models for intervals"
        if drawn.too_few
        else f"bars: {drawn.level:.0%} bootstrap interval"
    )
    labels.entitle(ax, f"{_heading(result)}\nk = {result.k}: {linear} · {bars}")
    return ax


@checked
def plot_task_means(table: "pandas.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Mean coupling on each task (a table of `task_means`) with its interval over
    prompts, and the null (dashed).

    A colour is a model, up to ten of them; a marker is a checkpoint, open for untrained
    twins. Rows are the tasks from top to bottom, all prompts last.

    Example:
        >>> ax = tlc.plots.plot_task_means(tlc.generalization.task_means(data, n_resamples=100))
    """
    missing = {
        "model",
        "checkpoint",
        "task",
        "n_prompts",
        "mean",
        "low",
        "high",
        "null",
    } - set(table)
    if missing or not {"k", "measure", "pairs"} <= set(table.attrs) or table.empty:
        raise ValueError(
            "`table` must be what `task_means` returns, with at least one row"
        )
    tasks, models, checkpoints = (
        list(dict.fromkeys(table[name])) for name in ("task", "model", "checkpoint")
    )
    groups = list(table.groupby(["model", "checkpoint"], sort=False))
    ax = (
        ax
        or labels.new_figure(
            7.0, 1.6 + len(tasks) * (0.3 + 0.1 * len(groups))
        ).subplots()
    )
    is_named = len(models) <= _MAX_NAMED

    def look(checkpoint: Any, color: str) -> dict[str, Any]:
        face = "white" if checkpoint == "untrained" else color
        marker = _MARKERS[checkpoints.index(checkpoint) % len(_MARKERS)]
        return {
            "color": color,
            "markerfacecolor": face,
            "marker": marker,
            "linestyle": "",
        }

    # Side by side within a row.
    offsets = np.linspace(-0.35, 0.35, len(groups)) if len(groups) > 1 else [0.0]
    for offset, ((model, checkpoint), rows) in zip(offsets, groups, strict=True):
        heights = np.array([tasks.index(task) for task in rows["task"]]) + offset
        color = f"C{models.index(model)}" if is_named else "C0"
        label = (
            str(model)
            if is_named and checkpoint == checkpoints[0]
            else f"_{model} {checkpoint}"
        )
        ax.hlines(heights, rows["low"], rows["high"], color=color, linewidth=1)
        ax.plot(
            rows["mean"], heights, markersize=5, label=label, **look(checkpoint, color)
        )
    labels.draw_null(ax.axvline, table["null"])
    for row in range(1, len(tasks)):
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    handles, _ = ax.get_legend_handles_labels()
    if not is_named:
        handles.insert(
            0,
            Line2D(
                [],
                [],
                color="C0",
                marker="o",
                linestyle="",
                label=f"each of {len(models)} models",
            ),
        )
    if len(checkpoints) > 1:
        handles += [
            Line2D([], [], label=str(checkpoint), **look(checkpoint, "0.3"))
            for checkpoint in checkpoints
        ]
    of_task = table.groupby("task")["n_prompts"].max()
    ax.set_yticks(
        range(len(tasks)),
        [f"{task} (n = {of_task[task]})" for task in tasks],
        parse_math=False,
    )
    label = f"mean {labels.measure_label(table.attrs['measure'], table.attrs['k'])}"
    ax.set(ylim=(len(tasks) - 0.5, -0.5), xlabel=label)
    labels.entitle(
        ax,
        f"Coupling by task, mean and 95% interval over prompts\n{table.attrs['pairs']}",
    )
    # 0.6 inches below, where the label of the axis ends.
    place = {"bbox_to_anchor": (0.5, -0.6 * ax.figure.dpi / ax.bbox.height)}
    labels.plain_legend(ax, handles=handles, ncols=3, **labels.BELOW | place)
    return ax


def _heading(result: Generalization) -> str:
    n, n_families = result.n_prompts, result.association.linear.n_families
    families = "" if n_families is None else f" · {n_families} families"
    prompts = f"{n} prompt{'s' if n > 1 else ''}"
    return f"{result.score} against {result.measure.replace('_', ' ')} · mean over {prompts}{families}"


def _statistics(fit: Any) -> str:
    return f"n = {fit.n}, R² = {fit.r_squared:.2f}, p = {fit.p:.2g}"


def _name_points(ax: Axes, x: np.ndarray, y: np.ndarray, models: list[str]) -> None:
    """A name at each point, where it covers least of the other names, the points and
    the curves.
    """
    # Without the organisation, unless two models then have the same name.
    short = [model.rsplit("/", 1)[-1] for model in models]
    names = [
        one if short.count(one) == 1 else model
        for one, model in zip(short, models, strict=True)
    ]
    figure = ax.figure.canvas.figure
    # Only after layout is it known how large a name is on the axes.
    figure.draw_without_rendering()
    pixels = figure.dpi / _POINTS_PER_INCH
    points, inside = (
        ax.transData.transform(np.column_stack([x, y])),
        ax.get_window_extent(),
    )
    taken = [Bbox([point - 3 * pixels, point + 3 * pixels]) for point in points]
    for curve in (
        line for line in ax.lines if line.get_linestyle() not in ("None", "--")
    ):
        path = ax.transData.transform_path(curve.get_path()).interpolated(3)
        taken += [
            Bbox([point - pixels, point + pixels])
            for point in np.asarray(path.vertices)
        ]
    for xy, point, name in zip(zip(x, y, strict=True), points, names, strict=True):
        # A thin line leads from a name to its point where they stand apart.
        leader = {
            "arrowstyle": "-",
            "color": "0.6",
            "linewidth": 0.7,
            "shrinkA": 0,
            "shrinkB": 5,
        }
        text: dict[str, Any] = {
            "textcoords": "offset points",
            "fontsize": "small",
            "va": "bottom",
            "parse_math": False,
        }
        label = ax.annotate(name, xy, (0, 0), arrowprops=leader, **text)
        size = np.array(Text.get_window_extent(label).size)
        corners = [
            point + distance * pixels * way + (way - 1) / 2 * size
            for distance, way in product(_DISTANCES, _DIRECTIONS)
        ]
        boxes = [Bbox.from_bounds(*corner, *size) for corner in corners]
        covered = [box.count_overlaps(taken) for box in boxes]
        # The nearest of those that cover least, preferably inside the axes.
        best = min(
            range(len(boxes)),
            key=lambda i: (inside.count_contains(boxes[i].corners()) < 4, covered[i]),
        )
        taken.append(boxes[best])
        label.set_position(tuple((corners[best] - point) / pixels))
