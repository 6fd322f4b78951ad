"""One model with its weights at several precisions (`surveys.precision_sweep`)."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES

if TYPE_CHECKING:
    import xarray

_SHAPES = {
    "line_shape_score": "line-shape score",
    "line_shape_score_all_tokens": "of all tokens",
    "expodistance": "expodistance",
    "expodistance_all_tokens": "of all tokens",
}


@checked
def plot_precision(
    data: "xarray.Dataset", *, k: int | None = None, fig: Figure | None = None
) -> Figure:
    """Draw what rounding the weights changes, against the first precision.

    Panels are coupling at each k, shapes of trajectories, and by layer subspaces and
    gains. Small dots are prompts; large ones, and lines, are means over them.

    Args:
        data: what `surveys.precision_sweep` returns.
        k: top singular vectors that span the subspaces; by default the largest that was
            measured.
        fig: the figure to draw in; a new one by default.

    Returns the Figure, with Axes of the change in mean coupling against k, of the
    relative change in line-shape score and expodistance, of what subspaces lose of
    their overlap, 1 for the same ones, against the layer (left solid, right dashed; the
    dashed grey line is that of random subspaces), and of the relative change in the
    largest singular value against the layer.

    Raises:
        ValueError: a k that was not measured, or one precision alone.

    Example:
        >>> weights = ("models/width16/step2", ["float32", "bfloat16"])
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded"}
        >>> data = tlc.surveys.precision_sweep(*weights, prompts, **how, progress=False)
        >>> fig = tlc.plots.plot_precision(data)
    """
    if data.sizes.get("precision", 0) < 2:
        raise ValueError(
            "`data` must hold two precisions or more, as `surveys.precision_sweep` "
            "returns"
        )
    if k is not None and k not in data["k"]:
        raise ValueError(f"`k` must be one of {data['k'].values.tolist()}, got {k}")
    k = int(data["k"].max()) if k is None else k
    # The first precision is what all others are compared with.
    reference, *precisions = data["precision"].values.tolist()
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 7.0)
    (coupling, shapes), (overlap, gains) = fig.subplots(2, 2)
    unrounded = data.sel(precision=reference)
    for number, precision in enumerate(precisions):
        rounded = data.sel(precision=precision)
        color = labels.COLORS[number % len(labels.COLORS)]
        # Precisions stand side by side.
        shift = (number - (len(precisions) - 1) / 2) * 0.6 / len(precisions)
        _draw_dots(coupling, _change_in_coupling(rounded, unrounded), shift, color)
        _draw_dots(shapes, _relative_changes(rounded, unrounded), shift, color)
        _draw_overlap(overlap, rounded.sel(k=k), color)
        # In percent, as the shapes are.
        gain = 100 * rounded["largest_singular_value_change"].mean("prompt")
        gains.plot(
            gain["layer"],
            gain,
            label=precision,
            **labels.marked(color, len(gain)),
        )
    coupling.set(xlabel="top singular vectors k", ylabel="change in mean coupling")
    labels.name_ticks(coupling.xaxis, data["k"].values.tolist(), labels.MAX_LAYER_TICKS)
    shapes.set_ylabel("change (%)")
    labels.name_ticks(
        shapes.xaxis,
        list(_SHAPES.values()),
        len(_SHAPES),
        fontsize="small",
        rotation=90,
    )
    # Random k-dimensional subspaces of R^d overlap by k/d in the mean.
    _label_overlap(overlap, k, null=1 - k / data.attrs["d_model"])
    gains.set(xlabel="layer", ylabel="largest σ, |change| (%)", yscale="log")
    for ax in (overlap, gains):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels.legend_below(fig, gains, overlap)
    plural = "s" if len(precisions) > 1 else ""
    title = f"Weights at {len(precisions)} precision{plural} against {reference}"
    title = labels.heading(title, [{"model": data.attrs["model"]}])
    n_prompts = data.sizes["prompt"]
    if n_prompts > 1:
        title += f"\nmean over {n_prompts} prompts"
    labels.entitle(fig, title)
    return fig


def _change_in_coupling(
    rounded: "xarray.Dataset", unrounded: "xarray.Dataset"
) -> Float[np.ndarray, "n_ks n_prompts"]:
    change = rounded["mean_coupling"] - unrounded["mean_coupling"]
    return change.transpose("k", "prompt").values


def _relative_changes(
    rounded: "xarray.Dataset", unrounded: "xarray.Dataset"
) -> Float[np.ndarray, "n_shapes n_prompts"]:
    """Return the change in each measure of shape, in percent."""
    import xarray

    changes = [100 * (rounded[name] / unrounded[name] - 1) for name in _SHAPES]
    return xarray.concat(changes, "shape").transpose("shape", "prompt").values


def _draw_overlap(ax: Axes, rounded: "xarray.Dataset", color: str) -> None:
    """Draw by layer what subspaces lose of their overlap: left solid, right dashed."""
    for side, line_style in (("left", "-"), ("right", "--")):
        lost = 1 - rounded[f"{side}_overlap"].mean("prompt")
        ax.plot(lost["layer"], lost, line_style, color=color, label=f"_{side}")


def _label_overlap(ax: Axes, k: int, null: float) -> None:
    ax.axhline(null, **labels.NULL_LINE, label=f"{RANDOM_SUBSPACES}, {null:.3f}")
    # Rounding changes overlaps by less than is seen below 1: what is lost is seen on a
    # logarithmic axis.
    ax.set_yscale("log", nonpositive="mask")
    ax.set(xlabel="layer", ylabel=f"1 − overlap of subspaces (k = {k})")
    # Grey entries of the legend explain line styles; colours are those of the
    # precisions.
    ax.plot([], [], "-", color="0.3", label="left singular vectors")
    ax.plot([], [], "--", color="0.3", label="right singular vectors")


def _draw_dots(
    ax: Axes, values: Float[np.ndarray, "n_columns n_prompts"], shift: float, color: str
) -> None:
    """Draw a column of dots, one for each prompt, and their mean."""
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    for column, prompt_values in enumerate(values):
        n_prompts = len(prompt_values)
        x = column + shift
        if n_prompts > 1:
            ax.plot(
                np.full(n_prompts, x),
                prompt_values,
                ".",
                color=color,
                markersize=3,
                alpha=0.4,
            )
        ax.plot(x, prompt_values.mean(), "o", color=color, markersize=6)
