"""One model across its training: coupling, loss and shapes of trajectories against the step, and maps side by side.

All take what `checkpoint_sweep` returns, or several seeds of it along a further dim: `xarray.concat([…], "seed")`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from tl_coupling.border import checked
from tl_coupling.coupling import Measure
from tl_coupling.plots.labels import heading, measure_label, named, new_figure, short_path
from tl_coupling.statistics import LEVEL, crossed_mean

if TYPE_CHECKING:
    import xarray

_MAX_PANELS, _PANELS_IN_A_ROW = 8, 4
_SAMPLES = ("seed", "prompt")
_NULL: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}


@checked
def plot_emergence(
    data: "xarray.Dataset | Mapping[str, xarray.Dataset]",
    *,
    k: int | None = None,
    measure: Measure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Mean coupling of different layers against the training step, above the loss on the same prompts.

    Shows when coupling emerges, whether it stays, and what the loss does meanwhile. The dashed line is what random
    subspaces would give; a ring marks step 0, the untrained model. The step axis is logarithmic, with a place for 0.
    Bands are 95 % t intervals of the mean over prompts and seeds, see `statistics.crossed_mean`.

    Args:
        data: sweeps by name, one line each; or one sweep. A dim `seed` is averaged over.
        k: how many top singular vectors; by default the largest number that all sweeps hold.
        measure: as in `CouplingMap.values`.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure, with Axes for coupling and for loss (if prompts have more than one token), a line for each sweep.

    Raises:
        ValueError: no sweep, a k or measure that a sweep does not hold, checkpoints that are not steps.

    Example:
        >>> from tl_coupling.surveys import Settings, measure_prompts
        >>> data = measure_prompts(model, ["w1 w2 w3", "w4 w5 w6"], Settings(k=(4,), n_singular_values=4))
        >>> fig = tlc.plots.sweeps.plot_emergence(data.expand_dims(checkpoint=[0]))

    Source:
        Aubry et al. 2025, figure 1: without null, loss and interval.
    """
    import xarray

    # Attributes of a Dataset can be read like fields, `provenance` too.
    if isinstance(data, xarray.Dataset):
        data = {short_path(data.attrs.get("model") or "sweep"): data}
    by = named(data, xarray.Dataset)
    k = _common_k(by, k)
    variable = f"mean_{measure}"
    for name, sweep in by.items():
        _check(sweep, name, variable)
    with_loss = not all(bool(sweep["loss"].isnull().all()) for sweep in by.values())
    fig = new_figure(7.0, 6.4 if with_loss else 4.2) if fig is None else fig
    ratios = {"height_ratios": [3, 2]} if with_loss else {}
    panels = fig.subplots(1 + with_loss, 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for number, (name, sweep) in enumerate(by.items()):
        _line(panels[0], sweep[variable].sel(k=k), f"C{number}", name)
        if with_loss:
            _line(panels[1], sweep["loss"], f"C{number}", name)
    _nulls(panels[0], {name: sweep[f"null_{measure}"].sel(k=k) for name, sweep in by.items()})
    panels[0].set_ylabel(f"mean {measure_label(measure, k)}")
    panels[0].set_ylim(bottom=0)
    if with_loss:
        panels[1].set_ylabel("loss (nats per token)")
    _step_axis(panels[-1], list(by.values()))
    _legend(panels[0])
    fig.suptitle(_heading("Coupling of different layers across training", by), fontsize="medium", parse_math=False)
    return fig


@checked
def plot_coupling_strip(
    data: "xarray.Dataset",
    *,
    checkpoints: Sequence[int] | None = None,
    k: int | None = None,
    measure: Measure = "coupling",
    fig: Figure | None = None,
) -> Figure:
    """Heat maps of all pairs of layers side by side, one for each checkpoint, on one colour scale.

    Shows which layers couple first, and whether only neighbours do. Means over prompts and seeds. The diagonal, a layer
    with itself, is grey; a line on the colour bar marks what random subspaces would give.

    Args:
        data: a sweep.
        checkpoints: which, in this order; by default at most eight, evenly spread over those measured.
        k, measure, fig: as in `plot_emergence`.

    Returns:
        the Figure: an Axes with one image for each checkpoint, then the colour bar.

    Raises:
        ValueError: a checkpoint, k or measure that the sweep does not hold, checkpoints that are not steps.
    """
    by = {"data": data}
    k = _common_k(by, k)
    _check(data, "data", measure)
    steps = _chosen(data, checkpoints)
    values = data[measure].sel(k=k, checkpoint=steps)
    maps = values.mean(_samples(values)).transpose("checkpoint", "layer", "other_layer").values.copy()
    # Every layer is coupled with itself: on one scale with that, the rest would be dark.
    maps[:, np.eye(maps.shape[1], dtype=bool)] = np.nan
    layers = [str(layer) for layer in data["layer"].values]

    n_cols = min(len(steps), _PANELS_IN_A_ROW)
    n_rows = -(-len(steps) // n_cols)
    fig = new_figure(1.5 * n_cols + 1.2, 1.65 * n_rows + 1.2, "compressed") if fig is None else fig
    grid = fig.subplots(n_rows, n_cols, sharex=True, sharey=True, squeeze=False)
    cmap = colormaps.get_cmap(rcParams["image.cmap"]).with_extremes(bad="0.8")
    vmax = float(np.nanmax(maps)) if len(layers) > 1 else 1.0
    for ax, step, panel in zip(grid.flat, steps, maps, strict=False):
        image = ax.imshow(panel, vmin=0, vmax=vmax, cmap=cmap)
        ax.set_title(_step(step), fontsize="small")
        shown = range(0, len(layers), -(-len(layers) // 6))
        ax.set_xticks(list(shown), [layers[i] for i in shown], fontsize="small")
        ax.set_yticks(list(shown), [layers[i] for i in shown], fontsize="small")
    for ax in grid.flat[len(steps) :]:
        ax.remove()
    fig.supylabel("layer of J₁", fontsize="medium")
    fig.supxlabel("layer of the singular vectors", fontsize="medium")
    bar = fig.colorbar(image, ax=fig.axes)
    null = data[f"null_{measure}"].sel(k=k, checkpoint=steps).values
    if is_marked := np.ptp(null) <= 1e-6 * abs(null.flat[0]):
        bar.ax.axhline(null.flat[0], color="white", linewidth=3)
        bar.ax.axhline(null.flat[0], color="black", linewidth=1)
    bar.set_label(measure_label(measure, k) + ("\nline: random subspaces" if is_marked else ""))
    fig.suptitle(_heading("Depth coupling across training", by, "mean"), fontsize="medium", parse_math=False)
    return fig


@checked
def plot_shapes(
    data: "xarray.Dataset", *, checkpoints: Sequence[int] | None = None, fig: Figure | None = None
) -> Figure:
    """Line-shape score against the training step, and over a window of layers against depth.

    Shows when trajectories straighten, and where in depth. 1 is a straight line; the dashed line is what steps in
    random directions score, √(number of steps). Means over tokens, prompts and seeds; bands as in `plot_emergence`.

    Args:
        data: a sweep.
        checkpoints: those of the right panel; by default at most eight, evenly spread over those measured.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure: Axes of the score against the step and of the windowed score against depth, then the colour bar.

    Raises:
        ValueError: a checkpoint that the sweep does not hold, checkpoints that are not steps.

    Source:
        Aubry et al. 2025, eqs. 15 and 16.
    """
    _check(data, "data", "line_shape_score_all_tokens")
    steps = _chosen(data, checkpoints)
    window, n_layers = int(data.attrs["window"]), data.sizes["layer"]
    fig = new_figure(7.4, 4.0) if fig is None else fig
    left, right = fig.subplots(1, 2)
    _line(left, data["line_shape_score_all_tokens"], "C0", "mean over tokens")
    left.set(ylabel=f"line-shape score, {n_layers} steps")
    _step_axis(left, [data])

    windowed = data["windowed_line_shape_score"].sel(checkpoint=steps)
    curves = windowed.mean(_samples(windowed)).transpose("checkpoint", "window").values
    shades = colormaps["viridis"].resampled(len(steps))
    for i, (step, curve) in enumerate(zip(steps, curves, strict=True)):
        right.plot(data["window"].values, curve, marker="o", markersize=3, color=shades(i), label=f"_{_step(step)}")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    # All layers: a model of few has one window.
    right.set(xlabel=f"middle layer of {window} steps", xlim=(-0.5, n_layers - 0.5))
    scale = ScalarMappable(BoundaryNorm(np.arange(len(steps) + 1) - 0.5, len(steps)), shades)
    bar = fig.colorbar(scale, ax=right, label="training step", ticks=range(len(steps)))
    bar.set_ticklabels([_short(step) for step in steps])
    for ax, n_steps in ((left, n_layers), (right, window)):
        ax.axhline(n_steps**0.5, **_NULL, label=f"random steps, {n_steps**0.5:.2f}")
        ax.set_ylim(bottom=1)
        _legend(ax)
    fig.suptitle(_heading("Line-shape score across training", {"data": data}), fontsize="medium", parse_math=False)
    return fig


def _line(ax: Axes, values: "xarray.DataArray", color: str, name: str) -> None:
    """Mean and band against the step; a ring at step 0."""
    values = values.expand_dims([dim for dim in _SAMPLES if dim not in values.dims]).sortby("checkpoint")
    steps = values["checkpoint"].values
    mean, half = crossed_mean(values.transpose(*_SAMPLES, "checkpoint").values.astype(float))
    ax.plot(steps, mean, color=color, marker="o", markersize=3, label=name)
    if not np.isnan(half).all():
        ax.fill_between(steps, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
    if steps[0] == 0:
        ax.plot(0, mean[0], "o", color=color, markerfacecolor="white", markersize=7, label="_untrained")


def _nulls(ax: Axes, nulls: "Mapping[str, xarray.DataArray]") -> None:
    """What random subspaces give: one line where it is the same for all, which it is for all measures but one."""
    curves = {name: null.mean(_samples(null)).sortby("checkpoint") for name, null in nulls.items()}
    every = np.concatenate([curve.values for curve in curves.values()])
    if np.ptp(every) <= 1e-6 * abs(every[0]):
        ax.axhline(every[0], label=f"random subspaces, {every[0]:.3f}", **_NULL)
        return
    for number, (name, curve) in enumerate(curves.items()):
        look = _NULL | {"color": f"C{number}", "label": f"{name}: random subspaces"}
        ax.plot(curve["checkpoint"].values, curve.values, **look)


def _step_axis(ax: Axes, sweeps: "Sequence[xarray.Dataset]") -> None:
    """Logarithmic, with a place for step 0; ticks at steps that were measured, as many as have room."""
    steps = np.unique(np.concatenate([sweep["checkpoint"].values for sweep in sweeps]))
    first = max(int(steps[steps > 0].min(initial=steps.max())), 1)
    places = np.where(steps > 0, np.log10(np.maximum(steps, 1) / first) + 0.5, 0)
    shown: list[int] = []
    for i in reversed(range(len(steps))):
        if not shown or places[shown[0]] - places[i] >= np.ptp(places) / 8:
            shown.insert(0, i)
    if steps[0] == 0:
        ax.set_xscale("symlog", linthresh=first, linscale=0.5)
        ax.set_xlim(left=-0.3 * first)
    else:
        ax.set_xscale("log")
    ax.set_xticks(steps[shown], [_short(int(step)) for step in steps[shown]])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("training step")


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    rings = [line for line in ax.lines if line.get_label() == "_untrained"]
    if rings:
        ring = Line2D([], [], marker="o", linestyle="", color="0.3", markerfacecolor="white", markersize=7)
        handles, labels = [*handles, ring], [*labels, "untrained, step 0"]
    # Above the axes: no corner of a curve that rises and falls is always free.
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    for text in ax.legend(handles, labels, frameon=False, fontsize="small", **above).get_texts():
        text.set_parse_math(False)


def _heading(what: str, by: "Mapping[str, xarray.Dataset]", drawn: str = f"mean and {LEVEL:.0%} interval") -> str:
    """What was measured, on which model, and over what the mean and its interval are."""
    counts = {(sweep.sizes.get("prompt", 1), sweep.sizes.get("seed", 1)) for sweep in by.values()}
    over = []
    if len(counts) == 1:
        n_prompts, n_seeds = counts.pop()
        over = [f"{n} {samples}" for n, samples in ((n_prompts, "prompts"), (n_seeds, "seeds")) if n > 1]
    model = heading("", [{"model": sweep.attrs.get("model")} for sweep in by.values()])
    return "\n".join(filter(None, (what, model, f"{drawn} over {' and '.join(over)}" if over else "")))


def _samples(values: "xarray.DataArray") -> list[str]:
    return [dim for dim in _SAMPLES if dim in values.dims]


def _step(step: int) -> str:
    return f"step {step}" if step else "step 0, untrained"


def _short(step: int) -> str:
    return str(step) if step % 1000 or not step else f"{step // 1000}k"


def _common_k(by: "Mapping[str, xarray.Dataset]", k: int | None) -> int:
    for name, sweep in by.items():
        if "k" not in sweep.coords:
            raise ValueError(f"{name!r} holds no `k`: wanted what `checkpoint_sweep` returns")
    held = [{int(one) for one in np.atleast_1d(sweep["k"].values)} for sweep in by.values()]
    common = set.intersection(*held)
    if k is None and common:
        return max(common)
    if k not in common:
        wanted = "the sweeps have no k in common" if k is None else f"`k` must be held by all sweeps, got {k}"
        raise ValueError(f"{wanted}; they hold {', '.join(str(sorted(one)) for one in held)}")
    return k


def _check(sweep: "xarray.Dataset", name: str, variable: str) -> None:
    if "checkpoint" not in sweep.dims or not np.issubdtype(sweep["checkpoint"].dtype, np.integer):
        raise ValueError(f"{name!r}: wanted a sweep along `checkpoint`, training steps as whole numbers")
    if variable not in sweep:
        raise ValueError(f"{name!r} holds no {variable!r}; it holds {', '.join(map(str, sweep.data_vars))}")


def _chosen(sweep: "xarray.Dataset", checkpoints: Sequence[int] | None) -> list[int]:
    there = [int(step) for step in sweep["checkpoint"].values]
    if checkpoints is None:
        spread = np.linspace(0, len(there) - 1, min(_MAX_PANELS, len(there)))
        return [there[round(i)] for i in spread]
    if not checkpoints or any(step not in there for step in checkpoints):
        raise ValueError(f"`checkpoints` must be among {there}, one or more, got {list(checkpoints)}")
    return list(checkpoints)
