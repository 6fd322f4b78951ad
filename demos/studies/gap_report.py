"""The statistics, tables and figure of `gap.py`."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import xarray
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from matched_losses import END, UNTRAINED, spread_out, table_of, write
from tl_coupling.files import write_atomically
from tl_coupling.generalization import Generalization, generalization_study, linear_fit
from tl_coupling.plots import labels, plot_forest
from vit_report import readable

# What is varied. Tokens span decades.
VARIED = ("log2(n_tokens)", "weight_decay", "stochastic_depth")
# Of passages of one length, without tasks.
UNASKED = ("across tasks", "prompt length")
CELL = ["n_tokens", "weight_decay", "stochastic_depth"]


def report(
    measurements: Sequence[xarray.Dataset],
    marks: Sequence[str],
    out: Path,
    n_resamples: int,
) -> list[Path]:
    """Print the tables, write them and the figure, and say where."""
    table = table_of(measurements)
    table["gap"] = table["loss_held_out"] - table["loss_training"]
    table = table[table["measure"] == "coupling"].drop(columns="measure")
    first = table[table["size"] == table["size"].iloc[0]]
    studies = {}
    left_out = []
    for mark in marks:
        try:
            studies[mark] = study_at(
                measurements,
                first[first["mark"] == mark].dropna(subset=["value"]),
                n_resamples,
            )
        except ValueError as error:
            left_out.append(f"{mark}: {error}")
    tables = {"cells": cells(first), "effects": effects(first, marks)}
    print_report(first, tables, studies, left_out)
    paths = write(out, measurements, {"measured": table, **tables})
    contents = {mark: study.to_dict() for mark, study in studies.items()} | {
        "left_out": left_out
    }
    paths.append(
        write_atomically(
            out / "study.json",
            lambda path: path.write_text(json.dumps(contents, indent=1)),
        )
    )
    drawn = {"generalization": draw(first, studies)} if studies else {}
    for i, (mark, study) in enumerate(studies.items(), 1):
        drawn[f"slopes-{i}"] = plot_forest(study).figure
        labels.entitle(drawn[f"slopes-{i}"], f"{mark} nats")
    for name, figure in drawn.items():
        paths.append(
            write_atomically(
                out / f"{name}.png", partial(figure.savefig, dpi=120, format="png")
            )
        )
    return paths


def study_at(
    measurements: Sequence[xarray.Dataset], models: pandas.DataFrame, n_resamples: int
) -> Generalization:
    """Return the gap against coupling over the models that reached a mark; text and
    regularisation held fixed, or apart.

    Raises:
        ValueError: fewer than three did.
    """
    if len(models) < 3:
        raise ValueError(
            "wanted at least three models whose training loss got there, got "
            f"{len(models)}"
        )
    mark = models["mark"].iloc[0]
    by_name = {str(of_run["run"].item()): of_run for of_run in measurements}
    measured = [
        by_name[name].sel(mark=mark, measure="coupling") for name in models["run"]
    ]
    values = np.stack(
        [of_run["value"].transpose("prompt", "size").values for of_run in measured]
    )
    variables = {
        "mean_coupling": (("model", "prompt", "k"), values),
        "null_coupling": (
            ("model", "k"),
            [of_run["null"].values for of_run in measured],
        ),
    }
    data = xarray.Dataset(
        variables, {"model": models["run"].to_list(), "k": measured[0]["k"].values}
    )
    amounts = sorted(models["n_tokens"].unique())
    return generalization_study(
        data,
        models.rename(columns={"run": "model"})[["model", "gap", "family", *CELL]],
        k=int(models["k"].iloc[0]),
        score="gap",
        controls=varied_in(models),
        subsets={
            f"{n} tokens": f"n_tokens == {n}"
            for n in amounts
            if (models["n_tokens"] == n).sum() > 3
        },
        n_resamples=n_resamples,
    )


def cells(table: pandas.DataFrame) -> pandas.DataFrame:
    """Means over the seeds of each cell of the grid, at each mark; `reached`: how many
    got there.
    """
    groups = table.groupby(["mark", *CELL], sort=False)
    means = groups[
        ["step", "loss_training", "loss_held_out", "gap", "value", "null"]
    ].mean()
    return means.join(groups["value"].agg(reached="count")).reset_index()


def effects(table: pandas.DataFrame, marks: Sequence[str]) -> pandas.DataFrame:
    """Return what the amount of text and regularisation do to coupling and to the gap,
    over cells, each the mean over seeds.

    Columns: `n` cells that reached the mark; the slope of `text` per doubling, `decay`
    and `drop` per unit, with the others held fixed, with t intervals over cells.
    """
    rows = []
    for mark in marks:
        reached = cells(table[table["mark"] == mark]).dropna(subset=["value"])
        for outcome, y in (("coupling", "value"), ("gap", "gap")):
            row = {"mark": mark, "of": outcome, "n": len(reached)}
            for name, x in zip(("text", "decay", "drop"), VARIED, strict=True):
                try:
                    fit = linear_fit(
                        reached,
                        x,
                        y,
                        controls=[
                            control for control in varied_in(reached) if control != x
                        ],
                    )
                except ValueError:
                    # Too few cells got there, or this was not varied.
                    continue
                row |= {
                    name: fit.slope,
                    f"{name}_low": fit.slope_interval[0],
                    f"{name}_high": fit.slope_interval[1],
                }
            rows.append(row)
    return pandas.DataFrame(rows)


def varied_in(table: pandas.DataFrame) -> list[str]:
    """Those of `VARIED` that differ between these models."""
    return [
        x for x, column in zip(VARIED, CELL, strict=True) if table[column].nunique() > 1
    ]


def print_report(
    table: pandas.DataFrame,
    tables: Mapping[str, pandas.DataFrame],
    studies: Mapping[str, Generalization],
    left_out: list[str],
) -> None:
    """Print the tables, one after the other; `table` has one row per model and mark."""
    size = table["size"].iloc[0]
    null = table["null"].mean()
    marks = tables["effects"]["mark"].unique()
    print(
        f"\nGap between held-out and training loss, nats, and "
        f"coupling of different layers, {size}: means over seeds"
    )
    print(f"Random subspaces have a coupling of {null:.3f}")
    cell = "{gap:.2f}, {value:.3f}".format_map
    print(spread_out(tables["cells"], CELL, [UNTRAINED, *marks, END], cell))
    print(
        "\nSlopes over cells with 95 % t intervals: per doubling of "
        "the text, per unit of weight decay and drop rate"
    )
    print(readable(tables["effects"]))
    for mark, study in studies.items():
        print(
            f"\n{mark}: gap on coupling; intervals: cluster-robust t, "
            f"kinds of model being the clusters"
        )
        print(
            study,
            study.slopes.to_string(float_format="{:.3g}".format, na_rep=""),
            sep="\n",
        )
        print(*study.remarks, sep="\n")
        left_out += [
            f"{mark}: {statistic}: {reason}"
            for statistic, reason in study.left_out.items()
            if not statistic.startswith(UNASKED)
        ]
    print(*(f"left out: {line}" for line in left_out), sep="\n")


def draw(table: pandas.DataFrame, studies: Mapping[str, Generalization]) -> Figure:
    """At every mark the gap against coupling; points are models, lines are fits within
    one amount of text.

    Colours are amounts of text; the larger a point, the more weight decay; the paler,
    the more stochastic depth.
    """
    figure = labels.new_figure(4.6 * len(studies), 4.4)
    amounts = sorted(table["n_tokens"].unique())
    colors = dict(
        zip(
            amounts,
            colormaps["viridis"](np.linspace(0, 0.85, len(amounts))),
            strict=True,
        )
    )
    axes = figure.subplots(1, len(studies), squeeze=False)[0]
    for ax, (mark, study) in zip(axes, studies.items(), strict=True):
        scatter(ax, study, table, colors)
        labels.entitle(ax, f"{mark} nats")
    axes[0].legend(frameon=False, fontsize="x-small")
    labels.entitle(
        figure,
        "Larger points: more weight decay; paler: more stochastic depth; lines: "
        "within one amount",
    )
    return figure


def scatter(
    ax: Axes,
    study: Generalization,
    table: pandas.DataFrame,
    colors: Mapping[int, Sequence[float]],
) -> None:
    most_decay = table["weight_decay"].max()
    most_drop = table["stochastic_depth"].max()
    for n_tokens, rows in study.table.groupby("n_tokens"):
        color = colors[n_tokens]
        label = f"{n_tokens} tokens"
        for row in rows.itertuples():
            look = {
                "alpha": 1 - 0.7 * row.stochastic_depth / (most_drop or 1),
                "color": color,
                "linewidth": 0,
            }
            size = 3 + 5 * (row.weight_decay / (most_decay or 1)) ** 0.5
            ax.plot(row.coupling, row.gap, "o", markersize=size, label=label, **look)
            label = f"_{label}"
        fit = study.subsets.get(f"{n_tokens} tokens")
        if fit is not None:
            x = np.array([rows["coupling"].min(), rows["coupling"].max()])
            ax.plot(x, fit.predict(x), color=color, linewidth=1)
    null = f"random subspaces: {study.table['null'].mean():.3f}"
    ax.set(
        xlabel=f"{labels.measure_label('coupling', study.k)}; {null}",
        ylabel="held-out minus training loss, nats",
    )
    ax.xaxis.set_major_locator(MaxNLocator(5))
