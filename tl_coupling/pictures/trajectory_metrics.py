"""The shape of trajectories against depth."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.pictures import labels
from tl_coupling.pictures.tokens import positions_to_draw
from tl_coupling.results import RANDOM_STEPS
from tl_coupling.trajectories import TrajectoryResult, attention_sinks

_WINDOWED = "line_shape_score_windowed"
_SCORE_BY_DEPTH = "line_shape_score_by_depth"


class _Panel(NamedTuple):
    title: str
    x_label: str
    y_label: str


@checked
def plot_trajectory_metrics(
    results: TrajectoryResult | Mapping[str, TrajectoryResult],
    *,
    positions: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Draw norms, step lengths, line-shape scores and logit-lens entropy by depth.

    The picture shows how the stream grows, and how straight tokens go, each token and
    their mean. A line-shape score of 1 is a straight line; the dashed line is what
    steps in random directions score, √(number of steps).

    Args:
        results: one result of `measure_trajectory`, or several by name, of one prompt.
        positions: which tokens; by default all but the `attention_sinks` of any result,
            which the title names.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its Axes are norm, step length, windowed score, score of the
    first steps, and entropy if there is one.

    Raises:
        ValueError: no result, results of different prompts, or a position out of range.

    Example:
        >>> shapes = tlc.trajectories.measure_trajectory(trace, linear=False, noise=False)
        >>> fig = tlc.plots.plot_trajectory_metrics(shapes)
    """
    results_by_name = labels.named(results, TrajectoryResult)
    first = next(iter(results_by_name.values()))
    if any(_prompt(result) != _prompt(first) for result in results_by_name.values()):
        raise ValueError(
            "`results` must be of one prompt, so that tokens and their means compare; "
            "got different ones"
        )
    n_pos = first.norm.shape[1]
    sinks = {
        position
        for result in results_by_name.values()
        # Sinks are told by the norm, which is what a result keeps: as vectors of one
        # entry.
        for position in attention_sinks(result.norm[..., None])
    }
    drawn, left_out = positions_to_draw(positions, n_pos, sinks, first.provenance)
    if not drawn:
        raise ValueError("`positions` is empty: wanted at least one token")

    windows = sorted({result.window for result in results_by_name.values()})
    panels_by_metric = _panels(windows)
    # Entropy is missing for models without logits.
    metrics = [
        metric
        for metric in panels_by_metric
        if any(
            getattr(result, metric) is not None for result in results_by_name.values()
        )
    ]
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 7.4)
    axes = {
        metric: fig.add_subplot(3, 2, place) for place, metric in enumerate(metrics, 1)
    }
    for metric, ax in axes.items():
        _draw_metric(ax, metric, panels_by_metric[metric], results_by_name, drawn)
    _draw_random_steps(axes, results_by_name, windows)
    # One legend for all panels: this one has the line of random steps as well.
    labels.legend_below(fig, axes[_SCORE_BY_DEPTH])
    title = f"Trajectories: each token, and their mean{left_out}"
    provenances = [result.provenance for result in results_by_name.values()]
    labels.entitle(fig, labels.heading(title, provenances))
    return fig


def _prompt(result: TrajectoryResult) -> tuple[object, ...]:
    """Return what tells the prompt of a result from another."""
    provenance = result.provenance
    return (
        result.norm.shape[1],
        provenance.get("tokens"),
        provenance.get("str_tokens"),
    )


def _panels(windows: Sequence[int]) -> dict[str, _Panel]:
    """Return the words on each metric's panel, in the order of the panels."""
    steps = ", ".join(map(str, windows))
    return {
        "norm": _Panel("norm", "depth", "‖x‖"),
        "step_length": _Panel("step length", "layer", "‖step‖"),
        _WINDOWED: _Panel(f"line-shape score, {steps} steps", "middle layer", "LSS"),
        _SCORE_BY_DEPTH: _Panel("line-shape score so far", "up to layer", "LSS"),
        "logit_lens_entropy": _Panel("logit-lens entropy", "depth", "nats"),
    }


def _draw_metric(
    ax: Axes,
    metric: str,
    panel: _Panel,
    results_by_name: Mapping[str, TrajectoryResult],
    positions: Sequence[int],
) -> None:
    """Draw one metric of every result: each token's line, and their mean."""
    for name, result, color in labels.assign_colors(results_by_name):
        values = getattr(result, metric)
        if values is None:
            continue
        y = values[:, positions].detach().cpu().numpy()
        # A window is drawn at its middle.
        offset = result.window // 2 if metric == _WINDOWED else 0
        depth = np.arange(len(y)) + offset
        ax.plot(depth, y, color=color, linewidth=0.7, alpha=0.3, label="_tokens")
        look = labels.marked(color, len(depth)) | {"linewidth": 1.8}
        ax.plot(depth, y.mean(1), label=name, **look)
    ax.set_title(panel.title, fontsize="small")
    ax.tick_params(which="both", labelsize="small")
    ax.set(xlabel=panel.x_label, ylabel=panel.y_label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric in (_WINDOWED, _SCORE_BY_DEPTH):
        # A straight line scores 1, and nothing scores less.
        ax.set_ylim(bottom=1)
    elif metric != "logit_lens_entropy":
        ax.set_yscale("log", nonpositive="mask")


def _draw_random_steps(
    axes: Mapping[str, Axes],
    results_by_name: Mapping[str, TrajectoryResult],
    windows: Sequence[int],
) -> None:
    """Draw what steps in random directions score: √(number of steps)."""
    for window in windows:
        axes[_WINDOWED].axhline(window**0.5, **labels.NULL_LINE)
    most_layers = max(result.n_layers for result in results_by_name.values())
    n_steps = np.arange(1, most_layers + 1)
    axes[_SCORE_BY_DEPTH].plot(
        n_steps - 1, n_steps**0.5, label=RANDOM_STEPS, **labels.NULL_LINE
    )
