"""Coupling across models: against a score, what its slope rests on, and by task."""

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.studies.generalization import Generalization
from tl_coupling.studies.plots.model_sizes import ModelSizes, sizes_of
from tl_coupling.studies.plots.point_names import name_points

if TYPE_CHECKING:
    import pandas

# One for each checkpoint, in turn.
_MARKERS = tuple(labels.MARKERS.values())
# With more a legend is not read any more.
_MAX_NAMED = 10
# Columns by which a table of `task_means` is known.
_COLUMNS_OF_TASK_MEANS = {
    "model",
    "checkpoint",
    "task",
    "n_prompts",
    "mean",
    "low",
    "high",
    "null",
}


@runtime_checkable
class _Fit(Protocol):
    """A linear fit, or a row of the table of slopes."""

    @property
    def n(self) -> int: ...
    @property
    def r_squared(self) -> float: ...
    @property
    def p(self) -> float: ...


@checked
def plot_generalization(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Draw the score of each model against its mean coupling, with the fitted line.

    A colour is a width and a shape a depth, where the study knows both and they are
    few. The band is the bootstrap's, pointwise, over models (or families) and prompts,
    if there are enough; the dotted curve is the exponential fit. The dashed line is
    what random subspaces would give; far from all models it is named at the edge
    instead. Where the null differs between models (spectral mis-coupling), each has a
    mark at the foot.

    Args:
        result: a study.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes.

    Source: Aubry et al. 2025, figures 1a and 8, without null and band.

    Example:
        >>> scores = tlc.generalization.read_scores("scores.csv")
        >>> study = tlc.generalization.generalization_study(data, scores, n_resamples=100)
        >>> ax = tlc.plots.plot_generalization(study)
    """
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.8).subplots()
    line = result.association.linear
    bootstrap = result.association.bootstrap
    x = result.table[result.measure].to_numpy(float)
    y = result.table[result.score].to_numpy(float)
    band_x = bootstrap.band_x
    if bootstrap.too_few:
        label = "linear fit, too few for a band"
    else:
        label = "linear fit"
        low = bootstrap.band_low
        high = bootstrap.band_high
        # The band is of lines: models may well lie outside.
        look: dict[str, Any] = {"color": "0.5", "alpha": 0.2, "linewidth": 0}
        ax.fill_between(
            band_x, low, high, label="95 % bootstrap band of the line", **look
        )
        # An outline: on some screens and in print the pale band is not seen.
        for edge in (low, high):
            ax.plot(band_x, edge, color="0.6", linewidth=0.8, label="_edge of the band")
    ax.plot(band_x, line.predict(band_x), label=label, color="0.3")
    if result.exponential is not None:
        fit = result.exponential
        label = f"exponential fit $a\\,e^{{bx}}$, R² = {fit.r_squared:.2f}"
        ax.plot(band_x, fit.predict(band_x), linestyle=":", label=label, color="0.3")
    sizes = sizes_of(result.table)
    _draw_models(ax, x, y, result.table, sizes)
    # Bands of few models are wide: the points decide what is shown.
    room = 0.15 * np.ptp(y)
    ax.set_ylim(y.min() - room, y.max() + room)
    # After the models: it sets the limits of the x-axis around them.
    _draw_nulls(ax, x, result.table.get("null", []))
    ax.set_xlabel(f"mean {labels.measure_label(result.measure, result.k)}")
    y_label = "loss (nats per token)" if result.score == "loss" else result.score
    ax.set_ylabel(y_label, parse_math=False)
    n_tests = len(result.familywise.table)
    corrected = f"{result.familywise.p:.2g} corrected for {n_tests} tests"
    labels.entitle(ax, f"{_heading(result)}\n{_statistics(line)} ({corrected})")
    handles, _ = ax.get_legend_handles_labels()
    if sizes is not None:
        handles += sizes.handles()
    # Fits are named with formulas.
    below = labels.BELOW | {"bbox_to_anchor": (0.5, -0.18)}
    ax.legend(handles=handles, frameon=False, ncols=2, **below)
    name_points(ax, x, y, result.table["model"].tolist())
    return ax


def _draw_models(
    ax: Axes,
    x: Float[np.ndarray, " n_models"],
    y: Float[np.ndarray, " n_models"],
    table: "pandas.DataFrame",
    sizes: ModelSizes | None,
) -> None:
    """Draw a point for each model, of the look of its size."""
    edge: dict[str, Any] = {
        "linestyle": "",
        # Points that overlap are told apart by their edges.
        "markeredgecolor": "white",
        "markersize": 6,
    }
    if sizes is None:
        ax.plot(x, y, "o", color=labels.BLUE, label="_models", **edge)
        return
    widths = table["d_model"].to_numpy(int)
    depths = table["n_layers"].to_numpy(int)
    for width, depth in product(sizes.widths, sizes.depths):
        rows = (widths == width) & (depths == depth)
        look = sizes.look(width, depth)
        ax.plot(x[rows], y[rows], label="_models", **look, **edge)


def _draw_nulls(ax: Axes, x: Float[np.ndarray, " n_points"], nulls: Any) -> None:
    """Limit the axis to the points, and draw or name what random subspaces give.

    One null is a line, different ones are a mark each. Where they lie further away than
    the points spread, they are named at the edge.
    """
    # A single model spans nothing.
    span = float(np.nanmax(x) - np.nanmin(x)) or 0.1
    left = float(np.nanmin(x)) - 0.2 * span
    right = float(np.nanmax(x)) + 0.2 * span
    ax.set_xlim(left, right)
    finite_nulls = np.asarray(nulls, float)
    finite_nulls = finite_nulls[np.isfinite(finite_nulls)]
    if not finite_nulls.size:
        return
    if (
        finite_nulls.max() < np.nanmin(x) - span
        or finite_nulls.min() > np.nanmax(x) + span
    ):
        _name_null_at_the_edge(ax, finite_nulls)
        return
    left = min(left, float(finite_nulls.min()) - 0.05 * span)
    right = max(right, float(finite_nulls.max()) + 0.05 * span)
    ax.set_xlim(left, right)
    if labels.draw_null(ax.axvline, finite_nulls):
        return
    ax.plot(
        finite_nulls,
        np.zeros(len(finite_nulls)),
        "|",
        transform=ax.get_xaxis_transform(),
        color="0.4",
        markersize=14,
        label=RANDOM_SUBSPACES,
    )


def _name_null_at_the_edge(ax: Axes, nulls: Float[np.ndarray, " n_nulls"]) -> None:
    """Write the null beyond the edge that it lies behind."""
    text = f"{RANDOM_SUBSPACES} {nulls.min():.3f}"
    if labels.one_null(nulls) is None:
        text += f" to {nulls.max():.3f}"
    if nulls.max() < ax.get_xlim()[0]:
        place, side, text = 0.01, "left", f"◂ {text}"
    else:
        place, side, text = 0.99, "right", f"{text} ▸"
    words: dict[str, Any] = {"fontsize": "small", "color": "0.3", "va": "bottom"}
    # A band may end behind it.
    words["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    ax.text(place, 0.02, text, ha=side, transform=ax.transAxes, **words)


@checked
def plot_forest(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Draw the slope with its interval, of all models, subsets, and with covariates.

    The picture shows whether the slope keeps its sign. Intervals are t intervals, of
    families cluster-robust, except in the row of the bootstrap.

    Args:
        result: a study.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes, with a row for each slope.

    Example:
        >>> study = tlc.generalization.generalization_study(data, n_resamples=100)
        >>> ax = tlc.plots.plot_forest(study)
    """
    slopes = result.slopes
    places = np.arange(len(slopes))
    is_alone = ax is None
    height = 1.4 + 0.45 * len(slopes)
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, height).subplots()
    ax.hlines(places, slopes["low"], slopes["high"], color=labels.BLUE)
    ax.plot(slopes["slope"], places, "o", color=labels.BLUE, linestyle="")
    ax.axvline(0, **labels.NULL_LINE)
    rows = [
        f"{fit.Index}\n{_what_a_slope_rests_on(fit, result)}"
        for fit in slopes.itertuples()
    ]
    ax.set_yticks(places, rows, fontsize="small", parse_math=False)
    # All models, the first row, stand on top.
    ax.invert_yaxis()
    per_unit = f"per unit of\n{labels.measure_label(result.measure, result.k)}"
    ax.set_xlabel(f"slope, {labels.escape_dollars(result.score)} {per_unit}")
    variables, samples = _heading(result).split("\n", 1)
    level = result.association.linear.level
    title = f"{variables}: slope and {level:.0%} interval"
    # The names of rows leave half of the figure to the Axes.
    drawn = ax.get_figure(root=True) if is_alone else None
    labels.entitle(drawn or ax, f"{title}\n{samples}")
    return ax


def _what_a_slope_rests_on(fit: Any, result: Generalization) -> str:  # a row of pandas
    """Write the second line of a row of the forest plot."""
    bootstrap = result.association.bootstrap
    # The row corrected for attenuation rests on the reliability of the means, not on a
    # fit of its own.
    if fit.Index == "all models, corrected" and result.attenuation is not None:
        reliability = result.attenuation.reliability
        n_prompts = bootstrap.n_prompts
        return f"for the noise of {n_prompts} prompts, reliability {reliability:.2f}"
    # The row of the bootstrap has an interval and no p.
    if np.isnan(fit.p):
        resampled = f"{bootstrap.n_families} families"
        if bootstrap.n_families is None:
            resampled = f"{bootstrap.n_models} models"
        return f"over {resampled}, {bootstrap.n_prompts} prompts"
    # With covariates the R² is that of coupling beside them, and a variance inflation
    # factor (VIF) says how far they explain it.
    statistics = _statistics(fit)
    if np.isnan(fit.vif):
        return statistics
    return f"{statistics.replace('R²', 'partial R²')}, VIF = {fit.vif:.1f}"


@checked
def plot_k_sweep(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Draw R² of the linear fit against k, with bootstrap intervals.

    The picture shows whether the finding depends on the choice of k, the number of
    singular vectors. Intervals are over models and prompts. The p of the slope stands
    below each k. Points are joined where there are at least three.

    Args:
        result: a study.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes.

    Source: Aubry et al. 2025, figure of the correlation for varying K, without
    interval.

    Example:
        >>> study = tlc.generalization.generalization_study(data, n_resamples=100)
        >>> ax = tlc.plots.plot_k_sweep(study)
    """
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    associations = result.by_k.values()
    # Evenly spaced: the numbers that people choose are not.
    places = np.arange(len(associations))
    bootstrap = result.association.bootstrap
    if not bootstrap.too_few:
        intervals = [association.bootstrap.r_squared for association in associations]
        low, high = np.transpose(intervals)
        ax.vlines(places, low, high, color=labels.BLUE, alpha=0.5)
    r_squared = [association.linear.r_squared for association in associations]
    # A line through two points would say nothing.
    line_style = "-" if len(places) > 2 else ""
    ax.plot(places, r_squared, color=labels.BLUE, marker="o", linestyle=line_style)
    names = [
        f"{k}\np = {association.linear.p:.2g}" for k, association in result.by_k.items()
    ]
    ax.set_xticks(places, names)
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.set_xlabel("k, number of top singular vectors")
    ax.set(ylabel="R² of the linear fit", ylim=(0, 1))
    linear = _statistics(result.association.linear)
    bars = f"bars: {bootstrap.level:.0%} bootstrap interval"
    if bootstrap.too_few:
        bars = "too few models for intervals"
    labels.entitle(ax, f"{_heading(result)}\nk = {result.k}: {linear} · {bars}")
    return ax


@checked
def plot_task_means(table: "pandas.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Draw mean coupling on each task with its interval over prompts, and the null.

    A colour is a width and a shape a depth, where the table knows both and they are
    few: then models are named beside their mean over all prompts. Otherwise a colour is
    a model, up to ten of them, and a marker is a checkpoint. Marks of untrained twins
    are open. Rows are the tasks from top to bottom, all prompts last. The dashed line
    is the null, named at the edge where it lies far away.

    Args:
        table: what `task_means` returns.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes.

    Raises:
        ValueError: another table, or one without a row.

    Example:
        >>> means = tlc.generalization.task_means(data, n_resamples=100)
        >>> ax = tlc.plots.plot_task_means(means)
    """
    missing = _COLUMNS_OF_TASK_MEANS - set(table)
    if missing or not {"k", "measure", "pairs"} <= set(table.attrs) or table.empty:
        raise ValueError(
            "`table` must be what `task_means` returns, with at least one row"
        )
    tasks = table["task"].unique().tolist()
    models = table["model"].unique().tolist()
    looks = _Looks(models, table["checkpoint"].unique().tolist(), sizes_of(table))
    runs = list(table.groupby(["model", "checkpoint"], sort=False))
    height = 1.6 + len(tasks) * (0.3 + 0.13 * len(runs))
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, height).subplots()
    # Side by side within a row.
    offsets = np.linspace(-0.35, 0.35, len(runs)) if len(runs) > 1 else [0.0]
    for offset, ((model, checkpoint), rows) in zip(offsets, runs, strict=True):
        places = np.array([tasks.index(task) for task in rows["task"]]) + offset
        look = looks.mark(model, checkpoint, rows)
        ax.hlines(places, rows["low"], rows["high"], color=look["color"], linewidth=1)
        label = looks.label(model, checkpoint)
        ax.plot(rows["mean"], places, markersize=5, label=label, **look)
        if looks.sizes is not None and looks.names_models:
            _name_run(ax, rows.iloc[-1], places[-1], looks)
    # Intervals are wider than the means are apart: they decide how wide the axis is.
    drawn_values = table[["mean", "low", "high"]].to_numpy(float)
    _draw_nulls(ax, drawn_values.ravel(), table["null"])
    for row in range(1, len(tasks)):
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    # Models may lack some of a task's prompts.
    n_prompts = table.groupby("task")["n_prompts"].max()
    names = [f"{task} (n = {n_prompts[task]})" for task in tasks]
    ax.set_yticks(range(len(tasks)), names, parse_math=False)
    measure = labels.measure_label(table.attrs["measure"], table.attrs["k"])
    # Upside down: the first task stands on top.
    ax.set(ylim=(len(tasks) - 0.5, -0.5), xlabel=f"mean {measure}")
    title = "Coupling by task\nmean and 95% interval over prompts"
    labels.entitle(ax, f"{title} · {table.attrs['pairs']}")
    handles, _ = ax.get_legend_handles_labels()
    # 0.6 inches below, where the label of the axis ends.
    anchor = (0.5, -0.6 * ax.figure.dpi / ax.bbox.height)
    labels.plain_legend(
        ax,
        handles=looks.legend(handles),
        ncols=2,
        **labels.BELOW | {"bbox_to_anchor": anchor},
    )
    return ax


def _name_run(ax: Axes, row: "pandas.Series", place: float, looks: "_Looks") -> None:
    """Write the model beside the mean over all prompts."""
    name = labels.short_path(str(row["model"])).rsplit("/", 1)[-1]
    if len(looks.checkpoints) > 1:
        name += f" {row['checkpoint']}"
    # The interval of a single prompt is NaN: the name then stands beside the mean.
    end = np.nanmax([row["mean"], row["high"]])
    words: dict[str, Any] = {
        "xytext": (6, 0),
        "textcoords": "offset points",
        "va": "center",
        "fontsize": 7,
        "color": "0.3",
    }
    ax.annotate(name, (end, place), parse_math=False, **words)


class _Looks(NamedTuple):
    """How models and checkpoints are told apart: by colours, and by markers."""

    models: list[object]
    checkpoints: list[object]
    sizes: ModelSizes | None

    @property
    def names_models(self) -> bool:
        """Whether every model is named."""
        return len(self.models) <= _MAX_NAMED

    def label(self, model: object, checkpoint: object) -> str:
        """Name a model once; a leading underscore keeps a line out of the legend."""
        is_in_legend = self.names_models and self.sizes is None
        if is_in_legend and checkpoint == self.checkpoints[0]:
            return str(model)
        return f"_{model} {checkpoint}"

    def mark(
        self, model: object, checkpoint: object, rows: "pandas.DataFrame"
    ) -> dict[str, Any]:
        """Return matplotlib's options for the marks of one model and checkpoint."""
        if self.sizes is not None:
            first = rows.iloc[0]
            look = self.sizes.look(int(first["d_model"]), int(first["n_layers"]))
        else:
            look = self._checkpoint_look(checkpoint)
            # With too many models to name, all have one colour, which the legend
            # explains.
            index = self.models.index(model) if self.names_models else 0
            look["color"] = labels.COLORS[index % len(labels.COLORS)]
        is_untrained = checkpoint == "untrained"
        look["markerfacecolor"] = "white" if is_untrained else look["color"]
        return look | {"linestyle": ""}

    def _checkpoint_look(self, checkpoint: object) -> dict[str, Any]:
        index = self.checkpoints.index(checkpoint)
        return {"color": "0.3", "marker": _MARKERS[index % len(_MARKERS)]}

    def legend(self, handles: list[Any]) -> list[Any]:
        """Return what the legend shows: what is drawn, sizes or models, checkpoints."""
        if self.sizes is not None:
            handles = self.sizes.handles() + handles
        elif not self.names_models:
            label = f"each of {len(self.models)} models"
            mark = Line2D(
                [], [], color=labels.BLUE, marker="o", linestyle="", label=label
            )
            handles = [mark, *handles]
        if len(self.checkpoints) == 1:
            return handles
        if self.sizes is None:
            named = self.checkpoints
        else:
            # Markers are taken by depths: of the checkpoints only open marks are
            # explained.
            named = [name for name in self.checkpoints if name == "untrained"]
        for checkpoint in named:
            look = self._checkpoint_look(checkpoint)
            if self.sizes is not None:
                look["marker"] = "o"
            face = "white" if checkpoint == "untrained" else look["color"]
            look |= {"markerfacecolor": face, "linestyle": ""}
            handles.append(Line2D([], [], label=str(checkpoint), **look))
        return handles


def _heading(result: Generalization) -> str:
    n_prompts = result.n_prompts
    title = f"{result.score} against {result.measure.replace('_', ' ')}"
    title += f"\nmean over {n_prompts} prompt{'s' if n_prompts > 1 else ''}"
    if result.common_prompts is not None:
        title += f" (of {result.common_prompts.n_all}; some models lack the others)"
    n_families = result.association.linear.n_families
    return title if n_families is None else f"{title} · {n_families} families"


def _statistics(fit: _Fit) -> str:
    return f"n = {fit.n}, R² = {fit.r_squared:.2f}, p = {fit.p:.2g}"
