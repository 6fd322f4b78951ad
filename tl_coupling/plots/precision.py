"""One model with its weights at several precisions, of what `surveys.precision_sweep`
returns.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.plots import labels

if TYPE_CHECKING:
    import xarray

_SHAPES = {
    "line_shape_score": "line-shape score",
    "line_shape_score_all_tokens": "line-shape score,\nall tokens",
    "expodistance": "expodistance",
    "expodistance_all_tokens": "expodistance,\nall tokens",
}


@checked
def plot_precision(
    data: "xarray.Dataset", *, k: int | None = None, fig: Figure | None = None
) -> Figure:
    """What rounding the weights changes: coupling at each k, and shapes of
    trajectories; by layer, subspaces and gains.

    Small dots are prompts; large ones, and lines, are means over them. Every panel
    compares with the first precision.

    Args:
        data: what `surveys.precision_sweep` returns.
        k: top singular vectors that span the subspaces; by default the largest that was
            measured.

    Returns the Figure, with Axes of the change in mean coupling against k, of the
    relative change in line-shape score and expodistance, of the overlap of subspaces
    against the layer (left solid, right dashed; the dashed grey line is that of random
    subspaces), and of the relative change in the largest singular value against the
    layer. Raises ValueError for a k that was not measured, and for one precision alone.

    Example:
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded", "progress": False}
        >>> rounded = tlc.surveys.precision_sweep("models/width16/step2", ["float32", "bfloat16"], prompts, **how)
        >>> fig = tlc.plots.plot_precision(rounded)
    """
    import xarray

    if data.sizes.get("precision", 0) < 2:
        raise ValueError(
            "`data` must hold two precisions or more, as `surveys.precision_sweep` returns"
        )
    if k is not None and k not in data["k"]:
        raise ValueError(f"`k` must be one of {data['k'].values.tolist()}, got {k}")
    k = int(data["k"].max()) if k is None else k
    first, *others = data["precision"].values.tolist()
    reference = data.sel(precision=first)
    fig = fig or labels.new_figure(9.0, 6.6)
    (coupling, shapes), (overlap, gains) = fig.subplots(2, 2)
    for number, precision in enumerate(others):
        here, look = (
            data.sel(precision=precision),
            {"color": f"C{number}", "label": precision},
        )
        shift = (number - (len(others) - 1) / 2) * 0.6 / len(others)
        _dots(
            coupling,
            (here["mean_coupling"] - reference["mean_coupling"])
            .transpose("k", "prompt")
            .values,
            shift,
            look,
        )
        relative = [100 * (here[name] / reference[name] - 1) for name in _SHAPES]
        _dots(
            shapes,
            xarray.concat(relative, "shape").transpose("shape", "prompt").values,
            shift,
            look,
        )
        for side, line in (("left", "-"), ("right", "--")):
            mean = here[f"{side}_overlap"].sel(k=k).mean("prompt")
            overlap.plot(
                mean["layer"], mean, line, color=look["color"], label=f"_{side}"
            )
        mean = 100 * here["largest_singular_value_change"].mean("prompt")
        gains.plot(mean["layer"], mean, marker="o", markersize=3, **look)
    coupling.set(xlabel="top singular vectors k", ylabel="change in mean coupling")
    labels.name_ticks(coupling.xaxis, data["k"].values.tolist(), labels.MAX_LAYER_TICKS)
    shapes.set_ylabel("change (%)")
    labels.name_ticks(
        shapes.xaxis, list(_SHAPES.values()), len(_SHAPES), fontsize="x-small"
    )
    overlap.axhline(
        k / data.attrs["d_model"],
        **labels.NULL_LINE,
        label=f"random subspaces, {k / data.attrs['d_model']:.3f}",
    )
    overlap.set(
        xlabel="layer", ylabel=f"overlap of subspaces (k = {k})", ylim=(0, 1.02)
    )
    overlap.plot([], [], "-", color="0.3", label="left singular vectors")
    overlap.plot([], [], "--", color="0.3", label="right singular vectors")
    labels.plain_legend(overlap, loc="center left", fontsize="small")
    gains.set(xlabel="layer", ylabel="largest σ, |change| (%)", yscale="log")
    for ax in (overlap, gains):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels.plain_legend(
        fig,
        *gains.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(others),
    )
    n = data.sizes["prompt"]
    what = f"Weights at {len(others)} precision{'s' if len(others) > 1 else ''} against {first}"
    over = f"\nmean over {n} prompts" if n > 1 else ""
    labels.entitle(fig, labels.heading(what, [{"model": data.attrs["model"]}]) + over)
    return fig


def _dots(ax: Axes, values: np.ndarray, shift: float, look: dict[str, Any]) -> None:
    """A column of dots, one for each prompt, and their mean, for each row of the
    values.
    """
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    for at, of_prompts in enumerate(values):
        if len(of_prompts) > 1:
            ax.plot(
                np.full(len(of_prompts), at + shift),
                of_prompts,
                ".",
                color=look["color"],
                markersize=3,
                alpha=0.4,
            )
        ax.plot(at + shift, of_prompts.mean(), "o", color=look["color"], markersize=6)
