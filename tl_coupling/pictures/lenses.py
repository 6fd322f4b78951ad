"""Whether a Jacobian lens can be trusted, layer by layer."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.trajectories import LensAudit

# Single prompts, behind the lines that are read.
_PROMPT: dict[str, Any] = {"color": "0.75", "linewidth": 0.8}


@checked
def plot_lens_audit(result: LensAudit, *, fig: Figure | None = None) -> Figure:
    """Draw how far a lens lies from prompts' Jacobians, and how many prompts it needs.

    The picture shows whether the lens belongs to the model: its distance from the
    prompts' mean (blue) then lies in the grey band, which a right lens leaves in one
    audit of a thousand. With the lens's own prompts, the band is that of rounding. Thin
    lines are its distances from single prompts; orange is how far two means of half the
    prompts lie apart. Below, layers above the dashed line need more prompts than
    the lens has.

    Args:
        result: of `lens_audit`.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are the distances and the prompts that are needed.

    Example:
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> traces = [trace, tlc.trace(model, "w5 w6 w7 w8")]
        >>> audit = tlc.trajectories.lens_audit(lens, traces)
        >>> fig = tlc.plots.plot_lens_audit(audit)
    """
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 6.0)
    distances, needed = fig.subplots(2, 1)
    _draw_distances(distances, result)
    n_layers = len(result.layers)
    needed.plot(
        result.layers,
        result.needed_prompts,
        label=f"needed for an error of {result.accuracy:.0%}",
        **labels.marked(labels.BLUE, n_layers),
    )
    needed.axhline(
        result.lens_n_prompts,
        label=f"the lens has {result.lens_n_prompts}",
        **labels.NULL_LINE,
    )
    needed.set_yscale("log")
    needed.set_ylabel("prompts")
    for ax in (distances, needed):
        ax.set_xlabel("layer")
        # A lens of a model of two blocks has one layer.
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        labels.plain_legend(ax, *ax.get_legend_handles_labels(), **labels.ABOVE)
    finding = "nothing speaks against it"
    if result.faults:
        n_faults = len(result.faults)
        finding = f"{n_faults} fault{'s' if n_faults > 1 else ''} found"
    title = f"Audit of a Jacobian lens: {finding}"
    # There are several prompts, and the provenance names no one of them.
    provenance = {"model": result.provenance.get("model")}
    labels.entitle(fig, labels.heading(title, [provenance]))
    return fig


def _draw_distances(ax: Axes, result: LensAudit) -> None:
    n_layers = len(result.layers)
    for prompt, distance in enumerate(result.distance):
        label = "_" if prompt else "the lens from each prompt"
        ax.plot(result.layers, distance, label=label, **_PROMPT)
    # There is no band for fewer than four prompts: they do not tell.
    if result.farthest.isfinite().all():
        ax.fill_between(
            result.layers,
            0,
            result.farthest,
            label=_band_label(result),
            **labels.NULL_BAND,
        )
    ax.plot(
        result.layers,
        result.distance_from_mean,
        label="the lens from their mean",
        **labels.marked(labels.BLUE, n_layers),
    )
    ax.plot(
        result.layers,
        result.halves,
        label="two halves of the prompts",
        **labels.marked(labels.ORANGE, n_layers),
    )
    ax.set_ylim(bottom=0)
    ax.set_ylabel("distance, of the size of the map")


def _band_label(result: LensAudit) -> str:
    if result.of_its_prompts:
        return "rounding, of a right lens"
    return "where a right lens lies (99.9 %)"
