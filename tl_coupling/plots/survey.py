"""A survey: mean coupling of each model on each task."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from tl_coupling.border import checked
from tl_coupling.plots.labels import measure_label, own_axes

if TYPE_CHECKING:
    import pandas

# Once the ten colours are used up.
_MARKERS = "osD^v"


@checked
def plot_task_means(table: "pandas.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Mean coupling on each task with its interval over prompts, a colour a model, and what random subspaces give.

    Args:
        table: of `task_means`.
        ax: where to draw; a new Figure by default.

    Returns:
        the Axes, a row from top to bottom for each task, all prompts last.
    """
    missing = {"model", "checkpoint", "task", "n_prompts", "mean", "low", "high", "null"} - set(table)
    if missing or not {"k", "measure"} <= set(table.attrs) or table.empty:
        raise ValueError("`table` must be what `task_means` returns, with at least one row")
    tasks = list(dict.fromkeys(table["task"]))
    several = table.groupby("model")["checkpoint"].nunique().max() > 1
    groups = list(table.groupby(["model", "checkpoint"], sort=False))
    ax = own_axes(9.0, 1.4 + 0.4 * len(tasks) + 0.1 * len(groups)) if ax is None else ax
    # Side by side within a row.
    offsets = np.linspace(-0.3, 0.3, len(groups)) if len(groups) > 1 else [0.0]
    for number, (((model, checkpoint), rows), offset) in enumerate(zip(groups, offsets, strict=True)):
        places = np.array([tasks.index(task) for task in rows["task"]]) + offset
        color, marker = f"C{number % 10}", _MARKERS[number // 10 % len(_MARKERS)]
        ax.hlines(places, rows["low"], rows["high"], color=color)
        name = f"{model} at {checkpoint}" if several else str(model)
        ax.plot(rows["mean"], places, marker, color=color, linestyle="", label=name)
    null = table["null"].dropna().unique()
    if len(null) and np.ptp(null) <= 1e-6:
        ax.axvline(null[0], color="0.4", linestyle="--", linewidth=1, label=f"random subspaces, {null[0]:.3f}")
    of_task = table.groupby("task")["n_prompts"].max()
    ax.set_yticks(range(len(tasks)), [f"{task} (n = {of_task[task]})" for task in tasks], parse_math=False)
    ax.set_ylim(len(tasks) - 0.4, -0.6)
    ax.set_xlabel(f"mean {measure_label(table.attrs['measure'], table.attrs['k'])}")
    ax.set_title("Coupling of different layers by task, mean and 95% interval over prompts", fontsize="medium")
    legend = ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    for text in legend.get_texts():
        text.set_parse_math(False)
    return ax
