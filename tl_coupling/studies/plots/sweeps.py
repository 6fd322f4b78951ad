"""Draw one model across its training, from what `checkpoint_sweep` returns.

Several seeds are `xarray.concat([…], "seed")`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from tl_coupling.arguments import Count, Positive, checked
from tl_coupling.measures import AnyMeasure, mean_name, measure_named, null_name
from tl_coupling.pictures import draw_arcs, labels, most_arcs, weighted_pairs
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.statistics import LEVEL, Interval, crossed_mean
from tl_coupling.studies.surveys import null_interval_of_coupling, pairs_of_layers

if TYPE_CHECKING:
    import xarray

# Two rows of four.
_MAX_PANELS = 8
_PANELS_IN_A_ROW = 2
# A band is made at so many steps, in a fraction of a second each.
_MAX_BAND_STEPS = 12
# The dimensions that means and intervals are over.
SAMPLES = ("prompt", "seed")


@checked
def plot_emergence(
    data: "xarray.Dataset | Mapping[str, xarray.Dataset]",
    *,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Draw mean coupling of different layers, and the loss, against the training step.

    Shows when coupling emerges, whether it stays, and what the loss does meanwhile. The
    dashed line is what random subspaces would give, and in the grey band lie 95 % of
    means over pairs that they give; a ring marks step 0, the untrained model. The step
    axis is logarithmic, with a place for 0. Coloured bands are 95 % t intervals of the
    mean over prompts and seeds, see `statistics.crossed_mean`.

    Args:
        data: sweeps by name, one line each; or one sweep. A dim `seed` is averaged
            over.
        k: how many top singular vectors; by default the largest number that all sweeps
            hold.
        measure: as in `CouplingMap.values`.

    Returns the Figure, with Axes for coupling and for loss (if prompts have more than
    one token), a line for each sweep. Raises ValueError for no sweep, a k or measure
    that a sweep does not hold, checkpoints that are not steps. Source: Aubry et al.
    2025, figure 1, without null, loss and interval.

    Example:
        >>> fig = tlc.plots.plot_emergence({"width 16": sweep}, k=4)
    """
    import xarray

    sweeps = labels.named(data, xarray.Dataset)
    measured = measure_named(measure).name
    k = _common_k(sweeps, k, mean_name(measured))
    sweeps = {name: sweep.sel(k=k) for name, sweep in sweeps.items()}
    shown = {
        mean_name(measured): f"mean {labels.measure_label(measure, k)}",
        "loss": "loss (nats per token)",
    }
    if all(bool(sweep["loss"].isnull().all()) for sweep in sweeps.values()):
        # Prompts of one token predict none of their own: they have no loss.
        del shown["loss"]
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 1.8 + 1.9 * len(shown))
    panels = fig.subplots(
        len(shown), 1, sharex=True, squeeze=False, height_ratios=[3, 2][: len(shown)]
    )[:, 0]
    for ax, (variable, text) in zip(panels, shown.items(), strict=True):
        for number, (name, sweep) in enumerate(sweeps.items()):
            # The title names one sweep alone.
            label = name if len(sweeps) > 1 else f"_{name}"
            color = labels.COLORS[number % len(labels.COLORS)]
            draw_line(ax, sweep[variable], color, label)
        ax.set_ylabel(text)
    nulls = {
        name: mean_of(sweep[null_name(measured)]).sortby("checkpoint")
        for name, sweep in sweeps.items()
    }
    if labels.draw_null(panels[0].axhline, np.concatenate(list(nulls.values()))):
        _draw_null_band(panels[0], list(sweeps.values()), k)
    else:
        for number, (name, null) in enumerate(nulls.items()):
            look = labels.NULL_LINE | {
                "color": labels.COLORS[number % len(labels.COLORS)],
                "label": f"{name}: {RANDOM_SUBSPACES}",
            }
            panels[0].plot(null["checkpoint"].values, null.values, **look)
    panels[0].set_ylim(bottom=0)
    step_axis(panels[-1], sweeps.values())
    draw_legend(panels[0])
    pairs = " or ".join(dict.fromkeys(map(pairs_of_layers, sweeps.values())))
    labels.entitle(fig, heading(f"Coupling over {pairs} across training", sweeps))
    return fig


def _draw_null_band(ax: Axes, sweeps: "Sequence[xarray.Dataset]", k: int) -> None:
    """Draw the band that holds the null intervals of all sweeps, at some of the steps.

    The null is the same for all, as it is a line. How far means spread depends on the
    singular values: sweeps that do not keep them have no band.
    """
    ends: dict[int, list[Interval]] = {}
    for sweep in sweeps:
        if "singular_values" in sweep:
            for step in _some_steps(sweep):
                interval = null_interval_of_coupling(sweep.sel(checkpoint=step), k)
                ends.setdefault(step, []).append(interval)
    steps = sorted(ends)
    low = [min(low for low, _ in ends[step]) for step in steps]
    high = [max(high for _, high in ends[step]) for step in steps]
    if steps:
        labels.draw_null_band(ax, steps, low, high)


def _some_steps(sweep: "xarray.Dataset") -> list[int]:
    """Return about a dozen steps, the last among them: spectra change slowly."""
    steps = sorted(sweep["checkpoint"].values.tolist(), reverse=True)
    kept = steps[:: math.ceil(len(steps) / _MAX_BAND_STEPS)]
    return sorted({*kept, steps[-1]})


@checked
def plot_coupling_strip(
    data: "xarray.Dataset",
    *,
    checkpoints: Sequence[int] | None = None,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Draw a heat map of all pairs of layers for each checkpoint, on one colour scale.

    Shows which layers couple first, and whether only neighbours do. Means over prompts
    and seeds. The diagonal, a layer with itself, is grey; a line on the colour bar
    marks what random subspaces would give.

    Args:
        checkpoints: which, in this order; by default at most eight, evenly spread over
            those measured.
        k, measure: as in `plot_emergence`.

    Returns the Figure: an Axes with one image for each checkpoint, then the colour bar.
    Raises ValueError for a checkpoint, k or measure that the sweep does not hold, and
    for checkpoints that are not steps.

    Example:
        >>> fig = tlc.plots.plot_coupling_strip(sweep, k=4)
    """
    measured = measure_named(measure).name
    k = _common_k({"data": data}, k, measured)
    steps, maps = _maps(data, checkpoints, k, measured)
    # One set of axes: panels are compared cell by cell.
    fig, grid = _grid(len(steps), 1.5, 1.4, fig, shared=True)
    cmap = colormaps.get_cmap(rcParams["image.cmap"]).with_extremes(
        bad=labels.UNDEFINED
    )
    # A model of one layer has no pairs, and NaN alone.
    vmax = float(np.nanmax(maps)) if maps.shape[1] > 1 else 1.0
    for ax, step, panel in zip(grid.flat, steps, maps, strict=False):
        image = ax.imshow(panel, vmin=0, vmax=vmax, cmap=cmap)
        ax.set_title(_step_name(step), fontsize="small")
        for axis in (ax.xaxis, ax.yaxis):
            labels.name_ticks(axis, data["layer"].values.tolist(), 6, fontsize="small")
    fig.supylabel("layer of J₁", fontsize="medium")
    fig.supxlabel("layer of the singular vectors", fontsize="medium")
    bar = fig.colorbar(image, ax=fig.axes, label=labels.measure_label(measure, k))
    if (
        null := labels.one_null(data[null_name(measured)].sel(k=k, checkpoint=steps))
    ) is not None:
        labels.mark_null(bar.ax, null)
        bar.set_label(f"{labels.measure_label(measure, k)}\nline: {RANDOM_SUBSPACES}")
    labels.entitle(
        fig, heading("Depth coupling across training", {"data": data}, "mean")
    )
    return fig


@checked
def animate_coupling(
    data: "xarray.Dataset",
    *,
    checkpoints: Sequence[int] | None = None,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    seconds: Positive = 0.6,
) -> FuncAnimation:
    """Animate the heat map of all pairs of layers over the checkpoints.

    Shows in which order layers couple. One colour scale; otherwise as in
    `plot_coupling_strip`. In a notebook: `HTML(animation.to_jshtml())`.

    Args:
        checkpoints: which, in this order; all by default.
        k, measure: as in `plot_coupling_strip`, with the same errors.
        seconds: for each checkpoint.

    Example:
        >>> animation = tlc.plots.animate_coupling(sweep, k=4)
        >>> animation.save("emergence.gif", writer="pillow")
    """
    measured = measure_named(measure).name
    k = _common_k({"data": data}, k, measured)
    every_step = data["checkpoint"].values.tolist()
    steps, maps = _maps(data, checkpoints or every_step, k, measured)
    # Its own: pyplot would show the first frame beside the animation.
    fig = Figure(figsize=(4.4, 4), layout="constrained")
    ax = fig.subplots()
    cmap = colormaps.get_cmap(rcParams["image.cmap"]).with_extremes(
        bad=labels.UNDEFINED
    )
    # A model of one layer has no pairs, and NaN alone.
    vmax = float(np.nanmax(maps)) if maps.shape[1] > 1 else 1.0
    image = ax.imshow(maps[0], vmin=0, vmax=vmax, cmap=cmap)
    for axis in (ax.xaxis, ax.yaxis):
        labels.name_ticks(axis, data["layer"].values.tolist(), 8)
    ax.set_xlabel("layer of the singular vectors")
    ax.set_ylabel("layer of J₁")
    fig.colorbar(image, ax=ax, label=labels.measure_label(measure, k))
    title = ax.set_title(_step_name(steps[0]))

    def show(frame: int) -> tuple[Artist, ...]:
        image.set_data(maps[frame])
        title.set_text(_step_name(steps[frame]))
        return image, title

    # A bare figure has no canvas that can save frames.
    FigureCanvasAgg(fig)
    return FuncAnimation(fig, show, frames=len(steps), interval=1000 * seconds)


@checked
def plot_adjacency_strip(
    data: "xarray.Dataset",
    *,
    checkpoints: Sequence[int] | None = None,
    k: int | None = None,
    measure: AnyMeasure = "coupling",
    strongest: Count | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw the strongest couplings as arcs at several checkpoints, side by side.

    All have one scale; see `plot_adjacency`.

    Shows which layers couple first, and whether neighbours do. Means over prompts and
    seeds, and over both orders of a pair. An arc is at full width and darkest at the
    largest weight in any panel.

    Args:
        checkpoints, k, measure: as in `plot_coupling_strip`; the paper has steps 1,
            4000 and 143000.
        strongest: how many arcs in each panel, those of the largest weights; by default
            as in `plot_adjacency`.

    Returns the Figure, with an Axes for each checkpoint, then the colour bar. Raises as
    `plot_coupling_strip`. Source: Aubry et al. 2025, figure 1c–e, as graphs on a
    circle.

    Example:
        >>> fig = tlc.plots.plot_adjacency_strip(sweep, checkpoints=[0, 2])
    """
    measured = measure_named(measure).name
    k = _common_k({"data": data}, k, measured)
    steps, maps = _maps(data, checkpoints, k, measured)
    layers = data["layer"].values.tolist()
    n_arcs = strongest or most_arcs(layers)
    # Pairs come from the lightest.
    pairs = [weighted_pairs(values, layers)[-n_arcs:] for values in maps]
    # The last pair of each panel is its strongest.
    full = max((weight for panel in pairs for weight, *_ in panel[-1:]), default=1.0)
    fig, grid = _grid(len(steps), 1.55, 1.2, fig, shared=True)
    for ax, step, panel in zip(grid.flat, steps, pairs, strict=False):
        arcs = draw_arcs(ax, layers, panel, full, most_ticks=6)
        ax.set_title(_step_name(step), fontsize="small")
        # Below each: a title without them would seem to belong to the panel above it.
        ax.tick_params(labelbottom=True)
    # Room for the highest arc of any panel.
    every_pair = [pair for panel in pairs for pair in panel]
    furthest = max((abs(i - j) for _, i, j in every_pair), default=1)
    fig.axes[0].set_ylim(0, 0.53 * furthest)
    n_pairs = len(layers) * (len(layers) - 1) // 2
    drawn = f"{len(pairs[0])} of {n_pairs} pairs, the strongest"
    fig.supxlabel(f"layer ({drawn})", fontsize="medium")
    name = f"{labels.short_measure(measure)} (k = {k}),\nmean of both orders"
    bar = fig.colorbar(arcs, ax=fig.axes, label=name).ax
    null = labels.one_null(data[null_name(measured)].sel(k=k, checkpoint=steps))
    if null is not None and null <= full:
        labels.mark_and_name_null(bar, null)
    labels.entitle(
        fig, heading("Depth coupling across training", {"data": data}, "mean")
    )
    return fig


def _maps(
    data: "xarray.Dataset", checkpoints: Sequence[int] | None, k: int, measure: str
) -> tuple[list[int], np.ndarray]:
    """Return the checkpoints that are drawn, and their mean maps.

    The diagonal, which would outshine the rest, is NaN.
    """
    steps = chosen_steps(data, checkpoints)
    means = mean_of(data[measure].sel(k=k, checkpoint=steps))
    maps = means.transpose("checkpoint", "layer", "other_layer").values.copy()
    maps[:, np.eye(maps.shape[1], dtype=bool)] = np.nan
    return steps, maps


def _grid(
    n: int, width: float, height: float, fig: Figure | None, shared: bool = False
) -> tuple[Figure, np.ndarray]:
    """Make a figure with n panels of that many inches, four in a row."""
    n_cols = min(n, _PANELS_IN_A_ROW)
    # Rounded up.
    n_rows = -(-n // n_cols)
    fig = fig or labels.new_figure(
        width * n_cols + 1.2, height * n_rows + 1.2, "compressed"
    )
    grid = fig.subplots(n_rows, n_cols, sharex=shared, sharey=shared, squeeze=False)
    for ax in grid.flat[n:]:
        ax.remove()
    return fig, grid


def _step_name(step: int) -> str:
    return f"step {step}" if step else "step 0, untrained"


def _mean_and_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mean, half = crossed_mean(values)
    return mean, mean - half, mean + half


def draw_line(
    ax: Axes,
    values: "xarray.DataArray",
    color: str,
    name: str,
    summary: Callable[
        [np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]
    ] = _mean_and_interval,
) -> None:
    """Draw middle and band against the step, with a ring at step 0."""
    # A sweep without seeds, or of one prompt, is one with a single one.
    values = values.expand_dims(
        [dim for dim in SAMPLES if dim not in values.dims]
    ).sortby("checkpoint")
    steps = values["checkpoint"].values
    middle, low, high = summary(
        values.transpose("seed", "prompt", "checkpoint").values.astype(float)
    )
    ax.plot(steps, middle, label=name, **labels.marked(color))
    # One prompt of one seed has no interval.
    if not np.isnan(high).all():
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    if steps[0] == 0:
        ax.plot(
            0,
            middle[0],
            "o",
            color=color,
            markerfacecolor="white",
            markersize=7,
            label="_untrained",
        )


def step_axis(ax: Axes, sweeps: "Iterable[xarray.Dataset]") -> None:
    """Make the axis of steps logarithmic, with a place for step 0.

    Ticks stand at steps that were measured, as many as have room.
    """
    steps = np.unique(np.concatenate([sweep["checkpoint"].values for sweep in sweeps]))
    # The axis is linear up to the first step after 0, and logarithmic from there.
    first = max(int(steps[steps > 0].min(initial=steps.max())), 1)
    # Where steps stand, in decades: the linear part takes half of one (`linscale`).
    places = np.where(steps > 0, np.log10(np.maximum(steps, 1) / first) + 0.5, 0)
    shown: list[int] = []
    # From the last step down, as that is what a reader looks for: a step has a tick
    # where it is an eighth of the axis away from the one before.
    for i in reversed(range(len(steps))):
        if not shown or places[shown[0]] - places[i] >= np.ptp(places) / 8:
            shown.insert(0, i)
    if steps[0] == 0:
        ax.set_xscale("symlog", linthresh=first, linscale=0.5)
        ax.set_xlim(left=-0.3 * first)
    else:
        ax.set_xscale("log")
    ax.set_xticks(steps[shown], [short_step(int(step)) for step in steps[shown]])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("training step")


def draw_legend(ax: Axes) -> None:
    """Add a legend of the lines, and of the ring of step 0."""
    handles, _ = ax.get_legend_handles_labels()
    if any(line.get_label() == "_untrained" for line in ax.lines):
        ring: dict[str, Any] = {
            "marker": "o",
            "linestyle": "",
            "markerfacecolor": "white",
            "markersize": 7,
        }
        handles.append(Line2D([], [], color="0.3", label="untrained, step 0", **ring))
    labels.plain_legend(ax, handles=handles, **labels.ABOVE)


def heading(
    subject: str,
    sweeps: "Mapping[str, xarray.Dataset]",
    drawn: str = f"mean and {LEVEL:.0%} interval",
) -> str:
    """Return what was measured, on which model, and what mean and interval are over."""
    counts = {
        tuple(sweep.sizes.get(dim, 1) for dim in SAMPLES) for sweep in sweeps.values()
    }
    samples = (
        [f"{n} {dim}s" for n, dim in zip(*counts, SAMPLES, strict=True) if n > 1]
        if len(counts) == 1
        else []
    )
    model = labels.heading(
        "", [{"model": sweep.attrs.get("model")} for sweep in sweeps.values()]
    )
    return "\n".join(
        filter(
            None,
            (
                subject,
                model,
                f"{drawn} over {' and '.join(samples)}" if samples else "",
            ),
        )
    )


def mean_of(values: "xarray.DataArray") -> "xarray.DataArray":
    """Return the mean over prompts and seeds, where there are any."""
    return values.mean([dim for dim in SAMPLES if dim in values.dims])


def short_step(step: int) -> str:
    """Write a step, thousands as "4k"."""
    return str(step) if step % 1000 or not step else f"{step // 1000}k"


def _common_k(
    sweeps: "Mapping[str, xarray.Dataset]", k: int | None, variable: str
) -> int:
    """Return `k`, by default the largest that all sweeps hold.

    Raises ValueError where a sweep does not hold it, or the variable.
    """
    for name, sweep in sweeps.items():
        check_sweep(sweep, name, "k", variable)
    ks_of_sweeps = [
        {int(number) for number in np.atleast_1d(sweep["k"].values)}
        for sweep in sweeps.values()
    ]
    common = set.intersection(*ks_of_sweeps)
    if k is None and common:
        return max(common)
    if k not in common:
        problem = (
            "the sweeps have no k in common"
            if k is None
            else f"`k` must be held by all sweeps, got {k}"
        )
        raise ValueError(
            f"{problem}; they hold {', '.join(str(sorted(ks)) for ks in ks_of_sweeps)}"
        )
    return k


def check_sweep(sweep: "xarray.Dataset", name: str, *variables: str) -> None:
    """Raise unless it is a sweep along training steps that holds these variables."""
    if "checkpoint" not in sweep.dims or not np.issubdtype(
        sweep["checkpoint"].dtype, np.integer
    ):
        raise ValueError(
            f"{name!r}: wanted a sweep along `checkpoint`, training steps as whole numbers"
        )
    for variable in variables:
        if variable not in sweep:
            raise ValueError(
                f"{name!r} holds no {variable!r}; it holds {', '.join(map(str, sweep.data_vars))}"
            )


def chosen_steps(
    sweep: "xarray.Dataset", checkpoints: Sequence[int] | None
) -> list[int]:
    """Return the checkpoints to draw, by default at most eight, evenly spread.

    Raises ValueError for one that is not in the sweep.
    """
    measured_steps = sweep["checkpoint"].values.tolist()
    if checkpoints is None:
        return [
            measured_steps[round(i)]
            # First and last are always among them.
            for i in np.linspace(
                0, len(measured_steps) - 1, min(_MAX_PANELS, len(measured_steps))
            )
        ]
    if not checkpoints or any(step not in measured_steps for step in checkpoints):
        raise ValueError(
            f"`checkpoints` must be among {measured_steps}, one or more, got {list(checkpoints)}"
        )
    return list(checkpoints)
