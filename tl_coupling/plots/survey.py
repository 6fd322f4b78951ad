"""A survey: mean coupling of each model on each task."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from tl_coupling.border import checked
from tl_coupling.plots.labels import measure_label, own_axes

if TYPE_CHECKING:
    import pandas

_MARKERS = "osD^v"
# With more a legend is not read any more.
_MAX_NAMED = 10


@checked
def plot_task_means(table: "pandas.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Mean coupling on each task with its interval over prompts, and what random subspaces give (dashed).

    A colour is a model, up to ten of them; a marker is a checkpoint, open for untrained twins.

    Args:
        table: of `task_means`.
        ax: where to draw; a new Figure by default.

    Returns:
        the Axes, with a row for each task from top to bottom, all prompts last.
    """
    missing = {"model", "checkpoint", "task", "n_prompts", "mean", "low", "high", "null"} - set(table)
    if missing or not {"k", "measure"} <= set(table.attrs) or table.empty:
        raise ValueError("`table` must be what `task_means` returns, with at least one row")
    tasks, models, checkpoints = (list(dict.fromkeys(table[name])) for name in ("task", "model", "checkpoint"))
    groups = list(table.groupby(["model", "checkpoint"], sort=False))
    ax = own_axes(7.0, 1.6 + len(tasks) * (0.3 + 0.1 * len(groups))) if ax is None else ax
    # Side by side within a row.
    offsets = np.linspace(-0.35, 0.35, len(groups)) if len(groups) > 1 else [0.0]
    looks: dict[Any, dict[str, Any]] = {
        c: {"marker": _MARKERS[i % len(_MARKERS)], "linestyle": ""} for i, c in enumerate(checkpoints)
    }
    for (model, checkpoint), rows in groups:
        offset = offsets[len(ax.collections)]
        places = np.array([tasks.index(task) for task in rows["task"]]) + offset
        color = f"C{models.index(model)}" if len(models) <= _MAX_NAMED else "C0"
        ax.hlines(places, rows["low"], rows["high"], color=color, linewidth=1)
        face = "white" if checkpoint == "untrained" else color
        label = str(model) if len(models) <= _MAX_NAMED and checkpoint == checkpoints[0] else f"_{model} {checkpoint}"
        ax.plot(rows["mean"], places, color=color, markerfacecolor=face, markersize=5, label=label, **looks[checkpoint])
    null = table["null"].dropna().unique()
    if len(null) and np.ptp(null) <= 1e-6:
        ax.axvline(null[0], color="0.4", linestyle="--", linewidth=1, label=f"random subspaces, {null[0]:.3f}")
    for row in range(1, len(tasks)):
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    handles, _ = ax.get_legend_handles_labels()
    if len(models) > _MAX_NAMED:
        handles.insert(0, Line2D([], [], color="C0", marker="o", linestyle="", label=f"each of {len(models)} models"))
    if len(checkpoints) > 1:
        faces = {c: "white" if c == "untrained" else "0.3" for c in checkpoints}
        handles += [
            Line2D([], [], color="0.3", markerfacecolor=faces[c], label=str(c), **looks[c]) for c in checkpoints
        ]
    of_task = table.groupby("task")["n_prompts"].max()
    ax.set_yticks(range(len(tasks)), [f"{task} (n = {of_task[task]})" for task in tasks], parse_math=False)
    ax.set_ylim(len(tasks) - 0.5, -0.5)
    ax.set_xlabel(f"mean {measure_label(table.attrs['measure'], table.attrs['k'])}")
    ax.set_title("Coupling of different layers by task, mean and 95% interval over prompts", fontsize="medium")
    # 0.6 inches below, where the label of the axis ends.
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.6 * ax.figure.dpi / ax.bbox.height)}
    for text in ax.legend(handles=handles, frameon=False, fontsize="small", ncols=3, **below).get_texts():
        text.set_parse_math(False)
    return ax
