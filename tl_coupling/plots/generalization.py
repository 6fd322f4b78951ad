"""Coupling against a score across models: the models and the line, what the slope rests on, and the choice of k.

All of them take what `generalization_study` returns.
"""

from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tl_coupling.border import checked
from tl_coupling.generalization import Generalization
from tl_coupling.generalization.fits import LinearFit
from tl_coupling.plots.labels import measure_label, own_axes

_POINTS_PER_INCH = 72
# Where a name may stand, seen from its point: beside it first, further away where something is in the way.
_DISTANCES = (5.0, 12.0, 20.0, 28.0, 38.0)
_DIRECTIONS = np.array([(x, y) for x, y in product((1, -1, 0), (0, 1, -1)) if (x, y) != (0, 0)])
_NULL: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}


@checked
def plot_generalization(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """Score against mean coupling, one point per model, with the line, its band and what random subspaces would give.

    The band is the bootstrap's, pointwise, over models and prompts; the dotted curve is the exponential fit. Where the
    null differs between models (spectral mis-coupling), each has a mark at the foot.

    Args:
        result: from `generalization_study`.
        ax: where to draw; a new Figure by default.

    Source:
        Aubry et al. 2025, figures 1a and 8: without null and band.
    """
    ax = own_axes(7.0, 5.4) if ax is None else ax
    line, drawn = result.association.linear, result.association.bootstrap
    x, y = (result.table[name].to_numpy(float) for name in (result.measure, result.score))
    ax.fill_between(drawn.band_x, drawn.band_low, drawn.band_high, color="C0", alpha=0.15, linewidth=0)
    ax.plot(drawn.band_x, line.predict(drawn.band_x), label="linear fit, bootstrap band", color="C0")
    if result.exponential is not None:
        label = f"exponential fit $a\\,e^{{bx}}$, R² = {result.exponential.r_squared:.2f}"
        ax.plot(drawn.band_x, result.exponential.predict(drawn.band_x), linestyle=":", label=label, color="C0")
    ax.plot(x, y, "o", color="C0", markeredgecolor="white", label="_models")
    # Bands of few models are wide: the points decide what is shown.
    room = 0.15 * np.ptp(y)
    ax.set_ylim(y.min() - room, y.max() + room)
    null = result.table["null"].dropna().to_numpy(float) if "null" in result.table else np.array([])
    if null.size and np.ptp(null) <= 1e-6 * abs(null[0]):
        ax.axvline(null[0], label=f"random subspaces, {null[0]:.3f}", **_NULL)
    elif null.size:
        foot = ax.get_xaxis_transform()
        ax.plot(null, np.zeros_like(null), "|", color="0.4", markersize=14, transform=foot, label="random subspaces")
    ax.set_xlabel(f"mean {measure_label(result.measure, result.k)}")
    ax.set_ylabel("loss (nats per token)" if result.score == "loss" else result.score, parse_math=False)
    ax.set_title(f"{_heading(result)}\n{_statistics(line)}", fontsize="medium", parse_math=False)
    # Below the axes, where it covers nothing.
    ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    _name_points(ax, x, y, _short(result.table["model"].tolist()))
    return ax


@checked
def plot_forest(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """The slope with its interval, one row each: over all models, over subsets of them, and with covariates held fixed.

    Shows whether the slope keeps its sign. Intervals are t intervals except in the second row, the bootstrap.

    Args:
        result: from `generalization_study`.
        ax: where to draw; a new Figure by default.
    """
    slopes, drawn = result.slopes, result.association.bootstrap
    places = np.arange(len(slopes))
    ax = own_axes(7.0, 1.2 + 0.45 * len(slopes)) if ax is None else ax
    ax.hlines(places, slopes["low"], slopes["high"], color="C0")
    ax.plot(slopes["slope"], places, "o", color="C0", linestyle="")
    ax.axvline(0, **_NULL)
    labels = []
    for fit in slopes.itertuples():
        said = f"n = {fit.n}, R² = {fit.r_squared:.2f}, p = {fit.p:.2g}"
        if np.isnan(fit.p):
            said = f"over {drawn.n_models} models, {drawn.n_prompts} prompts"
        elif not np.isnan(fit.vif):
            said = f"n = {fit.n}, partial R² = {fit.r_squared:.2f}, p = {fit.p:.2g}, VIF = {fit.vif:.1f}"
        labels.append(f"{fit.Index}\n{said}")
    ax.set_yticks(places, labels, fontsize="small", parse_math=False)
    ax.invert_yaxis()
    ax.set_xlabel(f"slope, {result.score} per unit of {measure_label(result.measure, result.k)}")
    heading = f"{_heading(result)}\nslope and {result.association.linear.level:.0%} interval"
    ax.set_title(heading, fontsize="medium", parse_math=False)
    return ax


@checked
def plot_k_sweep(result: Generalization, *, ax: Axes | None = None) -> Axes:
    """R² of the linear fit against the number of singular vectors, with bootstrap intervals over models and prompts.

    Shows whether the finding depends on the choice of k. The p of the slope stands below each k.

    Args:
        result: from `generalization_study`.
        ax: where to draw; a new Figure by default.

    Source:
        Aubry et al. 2025, figure of the correlation for varying K: without interval.
    """
    ax = own_axes(7.0, 4.2) if ax is None else ax
    sweep = result.by_k.values()
    # Evenly spaced: the numbers that people choose are not.
    places = np.arange(len(sweep))
    low, high = np.transpose([one.bootstrap.r_squared for one in sweep])
    ax.vlines(places, low, high, color="C0", alpha=0.5)
    ax.plot(places, [one.linear.r_squared for one in sweep], color="C0", marker="o")
    ax.set_xticks(places, [f"{k}\np = {one.linear.p:.2g}" for k, one in result.by_k.items()])
    ax.margins(x=0.1)
    ax.set(xlabel="k, number of top singular vectors", ylabel="R² of the linear fit", ylim=(0, 1))
    level = f"bars: {result.association.bootstrap.level:.0%} bootstrap interval"
    chosen = f"k = {result.k}: {_statistics(result.association.linear)} · {level}"
    ax.set_title(f"{_heading(result)}\n{chosen}", fontsize="medium", parse_math=False)
    return ax


def _heading(result: Generalization) -> str:
    n = result.n_prompts
    return f"{result.score} against {result.measure.replace('_', ' ')} · mean over {n} prompt{'s' if n > 1 else ''}"


def _statistics(fit: LinearFit) -> str:
    return f"n = {fit.n}, R² = {fit.r_squared:.2f}, p = {fit.p:.2g}"


def _short(names: list[str]) -> list[str]:
    """Without the organisation, unless two models then have the same name."""
    short = [name.rsplit("/", 1)[-1] for name in names]
    return [one if short.count(one) == 1 else name for one, name in zip(short, names, strict=True)]


def _name_points(ax: Axes, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """A name at each point, where it covers least of the other names, the points and the curves."""
    figure = ax.figure.canvas.figure
    # Only after layout is it known how large a name is on the axes.
    figure.draw_without_rendering()
    pixels = figure.dpi / _POINTS_PER_INCH
    points, inside = ax.transData.transform(np.column_stack([x, y])), ax.get_window_extent()
    taken = [Bbox([point - 3 * pixels, point + 3 * pixels]) for point in points]
    for curve in (line for line in ax.lines if line.get_linestyle() not in ("None", "--")):
        path = ax.transData.transform_path(curve.get_path()).interpolated(3)
        taken += [Bbox([point - pixels, point + pixels]) for point in np.asarray(path.vertices)]
    for xy, point, name in zip(zip(x, y, strict=True), points, names, strict=True):
        # A thin line leads from a name to its point where they stand apart.
        leader = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        text: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small", "va": "bottom", "parse_math": False}
        label = ax.annotate(name, xy, (0, 0), arrowprops=leader, **text)
        size = np.array(Text.get_window_extent(label).size)
        corners = [
            point + distance * pixels * way + (way - 1) / 2 * size for distance, way in product(_DISTANCES, _DIRECTIONS)
        ]
        boxes = [Bbox.from_bounds(*corner, *size) for corner in corners]
        covered = [box.count_overlaps(taken) for box in boxes]
        # The nearest of those that cover least, preferably inside the axes.
        best = min(range(len(boxes)), key=lambda i: (inside.count_contains(boxes[i].corners()) < 4, covered[i]))
        taken.append(boxes[best])
        label.set_position(tuple((corners[best] - point) / pixels))
