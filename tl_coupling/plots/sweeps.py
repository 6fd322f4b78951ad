"""One model across its training, of what `checkpoint_sweep` returns or, over seeds, `xarray.concat([…], "seed")`."""

from collections.abc import Iterable, Mapping, Sequence
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
from tl_coupling.plots import labels
from tl_coupling.statistics import LEVEL, crossed_mean

if TYPE_CHECKING:
    import xarray

_MAX_PANELS, _PANELS_IN_A_ROW = 8, 4
_SAMPLES = ("prompt", "seed")


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

    Returns the Figure, with Axes for coupling and for loss (if prompts have more than one token), a line for each
    sweep. Raises ValueError for no sweep, a k or measure that a sweep does not hold, checkpoints that are not steps.
    Source: Aubry et al. 2025, figure 1, without null, loss and interval.

    Example:
        >>> from tl_coupling.surveys import Settings, measure_prompts
        >>> data = measure_prompts(model, ["w1 w2 w3", "w4 w5 w6"], Settings(k=(4,), n_singular_values=4))
        >>> fig = tlc.plots.plot_emergence(data.expand_dims(checkpoint=[0]))
    """
    import xarray

    by = labels.named(data, xarray.Dataset)
    k = _common_k(by, k, f"mean_{measure}")
    by = {name: sweep.sel(k=k) for name, sweep in by.items()}
    shown = {f"mean_{measure}": f"mean {labels.measure_label(measure, k)}", "loss": "loss (nats per token)"}
    if all(bool(sweep["loss"].isnull().all()) for sweep in by.values()):
        del shown["loss"]
    fig = fig or labels.new_figure(7.0, 2.0 + 2.2 * len(shown))
    panels = fig.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=[3, 2][: len(shown)])[:, 0]
    for ax, (variable, text) in zip(panels, shown.items(), strict=True):
        for number, (name, sweep) in enumerate(by.items()):
            _line(ax, sweep[variable], f"C{number}", name)
        ax.set_ylabel(text)
    nulls = {name: _mean(sweep[f"null_{measure}"]).sortby("checkpoint") for name, sweep in by.items()}
    if not labels.draw_null(panels[0].axhline, np.concatenate(list(nulls.values()))):
        for number, (name, null) in enumerate(nulls.items()):
            look = labels.NULL_LINE | {"color": f"C{number}", "label": f"{name}: random subspaces"}
            panels[0].plot(null["checkpoint"].values, null.values, **look)
    panels[0].set_ylim(bottom=0)
    _step_axis(panels[-1], by.values())
    _legend(panels[0])
    labels.entitle(fig, _heading("Coupling of different layers across training", by))
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
        checkpoints: which, in this order; by default at most eight, evenly spread over those measured.
        k, measure: as in `plot_emergence`.

    Returns the Figure: an Axes with one image for each checkpoint, then the colour bar. Raises ValueError for a
    checkpoint, k or measure that the sweep does not hold, and for checkpoints that are not steps.
    """
    k = _common_k({"data": data}, k, measure)
    steps = _chosen(data, checkpoints)
    chosen = data.sel(k=k, checkpoint=steps)
    maps = _mean(chosen[measure]).transpose("checkpoint", "layer", "other_layer").values.copy()
    # Every layer is coupled with itself: on one scale with that, the rest would be dark.
    maps[:, np.eye(maps.shape[1], dtype=bool)] = np.nan
    n_cols = min(len(steps), _PANELS_IN_A_ROW)
    n_rows = -(-len(steps) // n_cols)
    fig = fig or labels.new_figure(1.5 * n_cols + 1.2, 1.65 * n_rows + 1.2, "compressed")
    grid = fig.subplots(n_rows, n_cols, sharex=True, sharey=True, squeeze=False)
    cmap = colormaps.get_cmap(rcParams["image.cmap"]).with_extremes(bad=labels.UNDEFINED)
    vmax = float(np.nanmax(maps)) if maps.shape[1] > 1 else 1.0
    for ax, step, panel in zip(grid.flat, steps, maps, strict=False):
        image = ax.imshow(panel, vmin=0, vmax=vmax, cmap=cmap)
        ax.set_title(f"step {step}" if step else "step 0, untrained", fontsize="small")
        for axis in (ax.xaxis, ax.yaxis):
            labels.name_ticks(axis, data["layer"].values.tolist(), 6, fontsize="small")
    for ax in grid.flat[len(steps) :]:
        ax.remove()
    fig.supylabel("layer of J₁", fontsize="medium")
    fig.supxlabel("layer of the singular vectors", fontsize="medium")
    bar = fig.colorbar(image, ax=fig.axes, label=labels.measure_label(measure, k))
    if (null := labels.one_null(chosen[f"null_{measure}"])) is not None:
        labels.mark_null(bar.ax, null)
        bar.set_label(f"{labels.measure_label(measure, k)}\nline: random subspaces")
    labels.entitle(fig, _heading("Depth coupling across training", {"data": data}, "mean"))
    return fig


@checked
def plot_shapes(
    data: "xarray.Dataset", *, checkpoints: Sequence[int] | None = None, fig: Figure | None = None
) -> Figure:
    """Line-shape score against the training step, and over a window of layers against depth.

    Shows when trajectories straighten, and where in depth. 1 is a straight line; the dashed line is what steps in
    random directions score, √(number of steps). Means over tokens, prompts and seeds; bands as in `plot_emergence`. The
    right panel has the `checkpoints`, chosen as in `plot_coupling_strip`.

    Returns the Figure: Axes of the score against the step and of the windowed score against depth, then the colour bar.
    Raises ValueError for a checkpoint that the sweep does not hold, and for checkpoints that are not steps. Source:
    Aubry et al. 2025, eqs. 15 and 16.
    """
    _check(data, "data", "line_shape_score_all_tokens")
    steps = _chosen(data, checkpoints)
    window, n_layers = int(data.attrs["window"]), data.sizes["layer"]
    fig = fig or labels.new_figure(7.4, 4.0)
    left, right = fig.subplots(1, 2)
    _line(left, data["line_shape_score_all_tokens"], "C0", "mean over tokens")
    left.set_ylabel(f"line-shape score, {n_layers} steps")
    _step_axis(left, [data])
    curves = _mean(data["windowed_line_shape_score"].sel(checkpoint=steps)).transpose("checkpoint", "window").values
    shades = colormaps["viridis"].resampled(len(steps))
    for i, curve in enumerate(curves):
        right.plot(data["window"].values, curve, marker="o", markersize=3, color=shades(i), label=f"_{steps[i]}")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    # All layers: a model of few has one window.
    right.set(xlabel=f"middle layer of {window} steps", xlim=(-0.5, n_layers - 0.5))
    scale = ScalarMappable(BoundaryNorm(np.arange(len(steps) + 1) - 0.5, len(steps)), shades)
    bar = fig.colorbar(scale, ax=right, label="training step", ticks=range(len(steps)))
    bar.set_ticklabels([_short(step) for step in steps])
    for ax, n_steps in ((left, n_layers), (right, window)):
        ax.axhline(n_steps**0.5, **labels.NULL_LINE, label=f"random steps, {n_steps**0.5:.2f}")
        ax.set_ylim(bottom=1)
        _legend(ax)
    labels.entitle(fig, _heading("Line-shape score across training", {"data": data}))
    return fig


def _line(ax: Axes, values: "xarray.DataArray", color: str, name: str) -> None:
    """Mean and band against the step; a ring at step 0."""
    values = values.expand_dims([dim for dim in _SAMPLES if dim not in values.dims]).sortby("checkpoint")
    steps = values["checkpoint"].values
    mean, half = crossed_mean(values.transpose("seed", "prompt", "checkpoint").values.astype(float))
    ax.plot(steps, mean, color=color, marker="o", markersize=3, label=name)
    if not np.isnan(half).all():
        ax.fill_between(steps, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
    if steps[0] == 0:
        ax.plot(0, mean[0], "o", color=color, markerfacecolor="white", markersize=7, label="_untrained")


def _step_axis(ax: Axes, sweeps: "Iterable[xarray.Dataset]") -> None:
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
    handles, _ = ax.get_legend_handles_labels()
    if any(line.get_label() == "_untrained" for line in ax.lines):
        ring: dict[str, Any] = {"marker": "o", "linestyle": "", "markerfacecolor": "white", "markersize": 7}
        handles.append(Line2D([], [], color="0.3", label="untrained, step 0", **ring))
    labels.plain_legend(ax, handles=handles, **labels.ABOVE)


def _heading(what: str, by: "Mapping[str, xarray.Dataset]", drawn: str = f"mean and {LEVEL:.0%} interval") -> str:
    """What was measured, on which model, and over what the mean and its interval are."""
    counts = {tuple(sweep.sizes.get(dim, 1) for dim in _SAMPLES) for sweep in by.values()}
    over = [f"{n} {dim}s" for n, dim in zip(*counts, _SAMPLES, strict=True) if n > 1] if len(counts) == 1 else []
    model = labels.heading("", [{"model": sweep.attrs.get("model")} for sweep in by.values()])
    return "\n".join(filter(None, (what, model, f"{drawn} over {' and '.join(over)}" if over else "")))


def _mean(values: "xarray.DataArray") -> "xarray.DataArray":
    """Over prompts and seeds, where there are any."""
    return values.mean([dim for dim in _SAMPLES if dim in values.dims])


def _short(step: int) -> str:
    return str(step) if step % 1000 or not step else f"{step // 1000}k"


def _common_k(by: "Mapping[str, xarray.Dataset]", k: int | None, variable: str) -> int:
    """`k`, or the largest that all sweeps hold; raises where a sweep does not hold it, or the variable."""
    for name, sweep in by.items():
        _check(sweep, name, "k", variable)
    held = [{int(one) for one in np.atleast_1d(sweep["k"].values)} for sweep in by.values()]
    common = set.intersection(*held)
    if k is None and common:
        return max(common)
    if k not in common:
        wanted = "the sweeps have no k in common" if k is None else f"`k` must be held by all sweeps, got {k}"
        raise ValueError(f"{wanted}; they hold {', '.join(str(sorted(one)) for one in held)}")
    return k


def _check(sweep: "xarray.Dataset", name: str, *variables: str) -> None:
    if "checkpoint" not in sweep.dims or not np.issubdtype(sweep["checkpoint"].dtype, np.integer):
        raise ValueError(f"{name!r}: wanted a sweep along `checkpoint`, training steps as whole numbers")
    for variable in variables:
        if variable not in sweep:
            raise ValueError(f"{name!r} holds no {variable!r}; it holds {', '.join(map(str, sweep.data_vars))}")


def _chosen(sweep: "xarray.Dataset", checkpoints: Sequence[int] | None) -> list[int]:
    there = sweep["checkpoint"].values.tolist()
    if checkpoints is None:
        return [there[round(i)] for i in np.linspace(0, len(there) - 1, min(_MAX_PANELS, len(there)))]
    if not checkpoints or any(step not in there for step in checkpoints):
        raise ValueError(f"`checkpoints` must be among {there}, one or more, got {list(checkpoints)}")
    return list(checkpoints)
