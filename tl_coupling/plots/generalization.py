"""Coupling against a score across models: the models and the line, what the slope rests on, and the choice of k.

All of them take what `generalization_study` returns.
"""

from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox, BboxBase

from tl_coupling.border import checked
from tl_coupling.generalization import Generalization, LinearFit
from tl_coupling.plots.labels import measure_label, own_axes

_POINTS_PER_INCH = 72
# Where a name may stand, seen from its point: beside it first, further away where others are in the way.
_DISTANCES = (5.0, 14.0, 26.0)
_DIRECTIONS = tuple((x, y) for x, y in product((1, -1, 0), (0, 1, -1)) if (x, y) != (0, 0))


@checked
def plot_generalization(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Score against mean coupling, a point a model, with the line, its band and what random subspaces would give.

    The band is the bootstrap's, pointwise, over models and prompts; the dotted curve is the exponential fit. Where the
    null differs between models (spectral mis-coupling), it is a mark at the foot for each.

    Args:
        result: of `generalization_study`.
        ax: where to draw; a new Figure by default.

    Returns:
        the Axes, with a label at each point.

    Source:
        Aubry et al. 2025, figures 1a and 8: without null and band.
    """
    ax = own_axes(7.2, 5.2) if ax is None else ax
    line, drawn = result.association.linear, result.association.bootstrap
    x, y = (result.table[name].to_numpy(float) for name in (result.measure, result.score))
    ends = np.array([x.min(), x.max()])
    ax.fill_between(drawn.band_x, drawn.band_low, drawn.band_high, color="C0", alpha=0.15, linewidth=0)
    ax.plot(ends, line.intercept + line.slope * ends, color="C0", label="linear fit, bootstrap band")
    if result.exponential is not None:
        fit = result.exponential
        label = f"exponential fit $a\\,e^{{bx}}$, R² = {fit.r_squared:.2f}"
        ax.plot(drawn.band_x, fit.a * np.exp(fit.b * drawn.band_x), color="C1", linestyle=":", label=label)
    ax.plot(x, y, "o", color="C0", markeredgecolor="white", label="_models")
    # Bands of few models are wide: the points decide what is shown.
    ax.set_ylim(*_around(y))
    if "null" in result.table:
        _draw_null(ax, result.table["null"].dropna().to_numpy(float))
    ax.set_xlabel(f"mean {measure_label(result.measure, result.k)}")
    ax.set_ylabel("loss (nats per token)" if result.score == "loss" else result.score, parse_math=False)
    ax.set_title(f"{_heading(result)}\n{_statistics(line)}", fontsize="medium", parse_math=False)
    ax.legend(frameon=False, fontsize="small")
    _name_points(ax, x, y, _short(result.table["model"].tolist()))
    return ax


@checked
def plot_forest(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """The slope with its interval: over all models, over subsets of them, and with covariates held fixed.

    Read off whether the slope keeps its sign. Intervals are t intervals, but for the second row.

    Args:
        result: of `generalization_study`.
        ax: where to draw; a new Figure by default.

    Returns:
        the Axes, a row from top to bottom for all models, the bootstrap, each subset, each set of covariates.
    """
    line, drawn = result.association.linear, result.association.bootstrap
    rows = [("all models", line.slope, line.slope_interval, _statistics(line))]
    sampled = f"over {drawn.n_models} models, {drawn.n_prompts} prompts"
    rows.append(("all models, bootstrap", line.slope, drawn.slope, sampled))
    rows += [(name, fit.slope, fit.slope_interval, _statistics(fit)) for name, fit in result.subsets.items()]
    for name, fit in result.partial.items():
        statistics = f"n = {fit.n}, partial R² = {fit.partial_r_squared:.2f}, p = {fit.p:.2g}, VIF = {fit.vif:.1f}"
        rows.append((f"given {name}", fit.coefficient, fit.interval, statistics))
    ax = own_axes(8.4, 1.2 + 0.48 * len(rows)) if ax is None else ax
    places = np.arange(len(rows))
    values, ends = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    ax.hlines(places, ends[:, 0], ends[:, 1], color="C0")
    ax.plot(values, places, "o", color="C0", linestyle="")
    ax.axvline(0, color="0.4", linestyle="--", linewidth=1)
    labels = [f"{name}\n{statistics}" for name, _, _, statistics in rows]
    ax.set_yticks(places, labels, fontsize="small", parse_math=False)
    ax.invert_yaxis()
    ax.set_xlabel(f"slope, {result.score} per unit of {measure_label(result.measure, result.k)}")
    ax.set_title(f"{_heading(result)}\nslope and {line.level:.0%} interval", fontsize="medium", parse_math=False)
    return ax


@checked
def plot_k_sweep(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """R² of the linear fit against the number of singular vectors, with bootstrap intervals over models and prompts.

    Read off whether the finding hangs on the choice of k. p of the slope stands below each k.

    Args:
        result: of `generalization_study`.
        ax: where to draw; a new Figure by default.

    Returns:
        the Axes.

    Source:
        Aubry et al. 2025, figure of the correlation for varying K: without interval.
    """
    ax = own_axes(6.4, 4.2) if ax is None else ax
    ks = list(result.by_k)
    r_squared = np.array([one.linear.r_squared for one in result.by_k.values()])
    ends = np.array([one.bootstrap.r_squared for one in result.by_k.values()])
    # Evenly spaced: the numbers people choose stand in no common distance.
    places = np.arange(len(ks))
    ax.vlines(places, ends[:, 0], ends[:, 1], color="C0", alpha=0.5)
    ax.plot(places, r_squared, color="C0", marker="o")
    ax.set_xticks(places, [f"{k}\np = {one.linear.p:.2g}" for k, one in result.by_k.items()])
    ax.margins(x=0.1)
    ax.set(xlabel="k, number of top singular vectors", ylabel="R² of the linear fit", ylim=(0, 1))
    statistics = f"chosen k = {result.k}: {_statistics(result.association.linear)}"
    ax.set_title(f"{_heading(result)}\n{statistics}", fontsize="medium", parse_math=False)
    return ax


def _heading(result: Generalization) -> str:
    n = result.n_prompts
    against = "loss" if result.score == "loss" else result.score
    return f"{against} against {result.measure.replace('_', ' ')} · mean over {n} prompt{'s' if n > 1 else ''}"


def _statistics(fit: LinearFit) -> str:
    return f"n = {fit.n}, R² = {fit.r_squared:.2f}, p = {fit.p:.2g}"


def _around(values: np.ndarray) -> tuple[float, float]:
    room = 0.15 * np.ptp(values)
    return float(values.min() - room), float(values.max() + room)


def _draw_null(ax: Axes, null: np.ndarray) -> None:
    if not null.size:
        return
    if np.ptp(null) <= 1e-6 * abs(null[0]):
        label = f"random subspaces, {null[0]:.3f}"
        ax.axvline(null[0], color="0.4", linestyle="--", linewidth=1, label=label)
    else:
        foot = ax.get_xaxis_transform()
        ax.plot(null, np.zeros_like(null), "|", color="0.4", markersize=14, transform=foot, label="random subspaces")


def _short(names: list[str]) -> list[str]:
    """Without the organisation, unless two models then have one name."""
    short = [name.rsplit("/", 1)[-1] for name in names]
    return [one if short.count(one) == 1 else name for one, name in zip(short, names, strict=True)]


def _name_points(ax: Axes, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """A name at each point, where it covers least of the other names, the points and the legend."""
    figure = ax.figure.canvas.figure
    # Only a layout that is done knows how large a name is on the axes.
    figure.draw_without_rendering()
    pixels = figure.dpi / _POINTS_PER_INCH
    points = ax.transData.transform(np.column_stack([x, y]))
    taken: list[BboxBase] = [
        Bbox.from_bounds(px - 3 * pixels, py - 3 * pixels, 6 * pixels, 6 * pixels) for px, py in points
    ]
    legend = ax.get_legend()
    taken += [legend.get_window_extent()] if legend is not None else []
    inside = ax.get_window_extent()
    for xy, point, name in zip(zip(x, y, strict=True), points, names, strict=True):
        label = ax.annotate(name, xy, (0, 0), textcoords="offset points", fontsize="x-small", parse_math=False)
        size = label.get_window_extent()
        boxes = []
        for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
            left, bottom = (
                at + way * distance * pixels + (way - 1) / 2 * extent
                for at, way, extent in zip(point, (right, up), (size.width, size.height), strict=True)
            )
            boxes.append(Bbox.from_bounds(left, bottom, size.width, size.height))
        outside = (size.width * size.height - _overlap(box, inside) for box in boxes)
        covered = [
            sum(_overlap(box, other) for other in taken) + rest for box, rest in zip(boxes, outside, strict=True)
        ]
        # The nearest of those that are equally good, whatever pixels are rounded to.
        box = boxes[int(np.argmin(np.round(covered, 3)))]
        taken.append(box)
        label.set_position(tuple((np.array([box.x0, box.y0]) - point) / pixels))


def _overlap(one: BboxBase, other: BboxBase) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else float(common.width * common.height)
