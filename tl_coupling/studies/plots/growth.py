"""Draw how straight trajectories are, and how they grow, across training.

The data are those of `checkpoint_sweep`, as in `sweeps.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_STEPS
from tl_coupling.studies.plots.sweeps import (
    SAMPLES,
    check_sweep,
    chosen_steps,
    draw_legend,
    draw_line,
    heading,
    mean_of,
    short_step,
    step_axis,
)

if TYPE_CHECKING:
    import xarray


@checked
def plot_shapes(
    data: "xarray.Dataset | Mapping[str, xarray.Dataset]",
    *,
    checkpoints: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw line-shape scores against the training step, and by depth.

    Shows when trajectories straighten, and where in depth. 1 is a straight line; the
    dashed line is what steps in random directions score, √(number of steps). Means over
    tokens, prompts and seeds; bands as in `plot_emergence`.

    Args:
        data: sweeps by name, one line each; or one sweep.
        checkpoints: of the panel below, which is of the first sweep; chosen as in
            `plot_coupling_strip`.

    Returns the Figure: Axes of the score against the step and of the windowed score
    against depth, then the colour bar. Raises ValueError for a checkpoint that the
    sweep does not hold, and for checkpoints that are not steps. Source: Aubry et al.
    2025, eqs. 15 and 16, figure 25.

    Example:
        >>> fig = tlc.plots.plot_shapes({"width 16": sweep})
    """
    sweeps, name, steps = _sweeps(data, checkpoints, "line_shape_score_all_tokens")
    first = sweeps[name]
    window, n_layers = int(first.attrs["window"]), first.sizes["layer"]
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 6.4)
    above, below = fig.subplots(2, 1)
    for number, (sweep_name, sweep) in enumerate(sweeps.items()):
        label = sweep_name if len(sweeps) > 1 else "mean over tokens"
        color = labels.COLORS[number % len(labels.COLORS)]
        draw_line(above, sweep["line_shape_score_all_tokens"], color, label)
    # Random steps score √(number of steps): models of different depths have a line
    # each.
    depths = {sweep.sizes["layer"] for sweep in sweeps.values()}
    above.set_ylabel(
        f"line-shape score, {n_layers} steps"
        if len(depths) == 1
        else "line-shape score"
    )
    step_axis(above, sweeps.values())
    curves = (
        mean_of(first["windowed_line_shape_score"].sel(checkpoint=steps))
        .transpose("checkpoint", "window")
        .values
    )
    _profiles(below, first["window"].values, curves, steps)
    # All layers: a model of few has one window.
    below.set(xlabel=f"middle layer of {window} steps", xlim=(-0.5, n_layers - 0.5))
    for ax, n_steps in [(above, n) for n in sorted(depths)] + [(below, window)]:
        ax.axhline(
            n_steps**0.5,
            **labels.NULL_LINE,
            label=f"{RANDOM_STEPS}, {n_steps**0.5:.2f}",
        )
        ax.set_ylim(bottom=1)
    for ax in (above, below):
        draw_legend(ax)
    _name_first(below, sweeps)
    labels.entitle(fig, heading("Line-shape score across training", sweeps))
    return fig


@checked
def plot_growth(
    data: "xarray.Dataset | Mapping[str, xarray.Dataset]",
    *,
    checkpoints: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw expodistance against the training step, and the norm of the stream by depth.

    Shows whether norms come to grow by the same factor at every layer: then
    expodistance falls to 0, and the norm is a straight line on its logarithmic axis.
    Both are medians over prompts and seeds, as expodistance has outliers, and the upper
    band holds the middle half of them.

    Args:
        data: sweeps by name, one line each; or one sweep.
        checkpoints: of the panel below, which is of the first sweep; chosen as in
            `plot_coupling_strip`.

    Returns the Figure: Axes of expodistance of the measured token, and of the norm
    (median over tokens), then the colour bar. Raises as `plot_shapes`. Source: Aubry et
    al. 2025, eqs. 17 and 18, figure of expodistance and norms across training.

    Example:
        >>> fig = tlc.plots.plot_growth(sweep)
    """
    sweeps, name, steps = _sweeps(data, checkpoints, "expodistance", "norm")
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 6.4)
    above, below = fig.subplots(2, 1)
    for number, (sweep_name, sweep) in enumerate(sweeps.items()):
        color = labels.COLORS[number % len(labels.COLORS)]
        draw_line(above, sweep["expodistance"], color, sweep_name, _middle_half)
    above.set_yscale("log")
    above.set_ylabel("expodistance")
    step_axis(above, sweeps.values())
    norms = sweeps[name]["norm"].sel(checkpoint=steps)
    curves = (
        norms.median([dim for dim in SAMPLES if dim in norms.dims])
        .transpose("checkpoint", "depth")
        .values
    )
    _profiles(below, norms["depth"].values, curves, steps)
    below.set_yscale("log", nonpositive="mask")
    below.set(xlabel="depth", ylabel="norm of the stream")
    if len(sweeps) > 1:
        draw_legend(above)
    _name_first(below, sweeps)
    labels.entitle(
        fig,
        heading(
            "Growth of the stream across training", sweeps, "median and middle half"
        ),
    )
    return fig


def _sweeps(
    data: Any, checkpoints: Sequence[int] | None, *variables: str
) -> "tuple[dict[str, xarray.Dataset], str, list[int]]":
    """Return sweeps by name, the first name, and the steps of the first that are drawn."""
    import xarray

    sweeps = labels.named(data, xarray.Dataset)
    for name, sweep in sweeps.items():
        check_sweep(sweep, name, *variables)
    first = next(iter(sweeps))
    return sweeps, first, chosen_steps(sweeps[first], checkpoints)


def _profiles(
    ax: Axes, depth: np.ndarray, curves: np.ndarray, steps: Sequence[int]
) -> None:
    """Draw a curve by depth for each checkpoint, and a colour bar that names them."""
    # One shade for each step, evenly spaced: steps themselves are spaced by powers of
    # 2.
    shades = colormaps["viridis"].resampled(len(steps))
    for i, curve in enumerate(curves):
        ax.plot(
            depth,
            curve,
            marker="o",
            markersize=3,
            color=shades(i),
            label=f"_{steps[i]}",
        )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    scale = ScalarMappable(
        # Step i has the shade from i − 0.5 to i + 0.5, with its tick in the middle.
        BoundaryNorm(np.arange(len(steps) + 1) - 0.5, len(steps)),
        shades,
    )
    bar = ax.figure.colorbar(
        scale, ax=ax, label="training step", ticks=range(len(steps))
    )
    bar.set_ticklabels([short_step(step) for step in steps])


def _name_first(ax: Axes, sweeps: "Mapping[str, xarray.Dataset]") -> None:
    """Say whose profiles these are, where there are several sweeps."""
    if len(sweeps) > 1:
        name = labels.plain(next(iter(sweeps)))
        ax.set_xlabel(f"{ax.get_xlabel()} ({name})", parse_math=False)


def _middle_half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # `values` are `[seed prompt checkpoint]`.
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=(0, 1))
    return middle, low, high
