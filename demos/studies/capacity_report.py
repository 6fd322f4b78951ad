"""The statistics, tables and figure of `capacity.py`."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy import stats

from matched_losses import END, UNTRAINED, spread_out
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.statistics import cluster_robust
from vit_report import readable

KIND = ["width", "learning_rate"]
LOOK = ["size", "mark"]
WIDTH = "width"
RATE = "learning_rate"
ALL = "all"
LEVEL = 0.05
# Slopes per doubling; the other factor is held fixed by indicators.
FACTORS = {WIDTH: RATE, RATE: WIDTH}
FEWEST_MODELS = 6


def tables_of(measured: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Return what is printed and written, by name; `measured` is of
    `matched_losses.table_of`.
    """
    table = measured[measured["measure"] == "coupling"]
    return {"levels": levels(table), "slopes": slopes(table)}


def levels(table: pandas.DataFrame) -> pandas.DataFrame:
    """Each kind's mean over its seeds, and their range: one row per look, width and
    rate.
    """
    groups = table.groupby([*LOOK, *KIND], sort=False)
    means = groups[["k", "null", "step", "loss_held_out", "value", "above_chance"]]
    spread = groups["above_chance"].agg(low="min", high="max", reached="count")
    return means.mean().join(spread).reset_index()


class Slope(NamedTuple):
    """A slope with its standard error and degrees of freedom, over n models."""

    slope: float
    error: float
    df: float
    n: int


def slopes(table: pandas.DataFrame) -> pandas.DataFrame:
    """Share above chance per doubling of width and of the learning rate, for every
    look.

    Rows: `of` width or rate; `at` one level of the other factor, or `all`, where the
    other factor is held fixed by indicators. Least squares over models; HC2 with Bell
    and McCaffrey's degrees of freedom `df`, because seeds differ more where coupling is
    high. Columns: `slope`; `low` and `high`, its 95 % t interval; `low_all` and
    `high_all`, those of level 1 − .05/m for the m slopes of the table (Bonferroni),
    which hold all at once with 95 %; `n` models.
    """
    rows = list(fits(table))
    m = max(1, len(rows))
    return pandas.DataFrame(
        [
            known
            | {"slope": fit.slope}
            | dict(zip(("low", "high"), interval(fit, LEVEL), strict=True))
            | dict(zip(("low_all", "high_all"), interval(fit, LEVEL / m), strict=True))
            | {"df": fit.df, "n": fit.n}
            for known, fit in rows
        ]
    )


def interval(fit: Slope, level: float) -> tuple[float, float]:
    """Return the t interval that leaves out the true slope with this probability."""
    half = float(stats.t.ppf(1 - level / 2, fit.df)) * fit.error
    return fit.slope - half, fit.slope + half


def fits(table: pandas.DataFrame) -> Iterator[tuple[dict[str, object], Slope]]:
    """Yield what each slope is of, and the fit; looks with too few models are left out."""
    trained = table[~table["mark"].isin((UNTRAINED, END))]
    reached = trained.dropna(subset=["above_chance"])
    for look, of_look in reached.groupby(LOOK, sort=False):
        for factor, other in FACTORS.items():
            groups = [(ALL, of_look), *of_look.groupby(other)]
            for at, models in groups:
                if models[factor].nunique() < 2 or len(models) < FEWEST_MODELS:
                    continue
                known = dict(zip(LOOK, look, strict=True)) | {"of": factor, "at": at}
                yield known, fitted(models, factor, other)


def fitted(models: pandas.DataFrame, factor: str, other: str) -> Slope:
    """Return the slope on the factor's binary logarithm, the other's levels held
    fixed.
    """
    levels_of_other = sorted(models[other].unique())
    held = [models[other] == level for level in levels_of_other[1:]]
    design = np.column_stack([np.log2(models[factor]), np.ones(len(models)), *held])
    design = design.astype(float)
    y = models["above_chance"].to_numpy(float)
    estimates, *_ = np.linalg.lstsq(design, y)
    residuals = y - design @ estimates
    errors, df = cluster_robust(design, residuals, np.arange(len(models)))
    return Slope(float(estimates[0]), float(errors[0]), float(df[0]), len(models))


def print_report(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print the tables, one after the other."""
    rows = tables["levels"]
    marks = [mark for mark in dict.fromkeys(rows["mark"]) if mark != END]
    losses = rows.groupby("mark")["loss_held_out"].mean()
    print(
        "held-out losses, in nats:",
        ", ".join(f"{name} {losses[name]:.3f}" for name in marks),
    )
    first = rows[rows["size"] == rows["size"].iloc[0]]
    print("\nSteps to each mark, means over seeds")
    print(spread_out(first, KIND, marks[1:], "{step:.0f}".format_map))
    for size, of_size in rows.groupby("size", sort=False):
        print(
            f"\nShare above chance, (c − null) / (1 − null), {size}: means over "
            "seeds [their range]"
        )
        cell = "{above_chance:.3f} [{low:.3f}, {high:.3f}]".format_map
        print(spread_out(of_size, KIND, marks, cell))
    m = len(tables["slopes"])
    print(
        "\nSlopes of the share above chance per doubling, least squares over models: 95 "
        "% t intervals\nwith HC2 and Bell and McCaffrey's df, and those that hold all "
        f"{m} at once (Bonferroni); at all: the other factor held fixed"
    )
    print(readable(tables["slopes"]))


def draw(measured: pandas.DataFrame) -> Figure:
    """Share above chance against the learning rate: a row for each mark that some
    model reached, a column for each size, a line for each width, a point for each
    model.
    """
    table = measured[measured["measure"] == "coupling"].dropna(subset="above_chance")
    sizes = list(dict.fromkeys(table["size"]))
    marks = [m for m in dict.fromkeys(table["mark"]) if m not in (UNTRAINED, END)]
    widths = sorted(table[WIDTH].unique())
    figure = labels.new_figure(labels.PHONE_WIDTH, 1.2 + 1.4 * len(marks))
    grid = figure.subplots(
        len(marks), len(sizes), sharex=True, sharey=True, squeeze=False
    )
    for row, mark in zip(grid, marks, strict=True):
        for ax, size in zip(row, sizes, strict=True):
            of_look = table[(table["size"] == size) & (table["mark"] == mark)]
            for width, look in labels.shaded(widths).items():
                models = of_look[of_look[WIDTH] == width]
                means = models.groupby(RATE)["above_chance"].mean()
                ax.plot(means, label=f"width {width}", markersize=4, **look)
                ax.plot(
                    models[RATE],
                    models["above_chance"],
                    linestyle="",
                    alpha=0.5,
                    markersize=2.5,
                    **look,
                )
            ax.axhline(0, label=f"_{RANDOM_SUBSPACES}", **labels.NULL_LINE)
            ax.set(xscale="log")
            ax.tick_params(labelsize="small")
        loss = table.loc[table["mark"] == mark, "loss_held_out"].mean()
        row[0].set_ylabel(f"{mark}\n{loss:.2f} nats", fontsize="small")
    for ax, size in zip(grid[0], sizes, strict=True):
        # A number of singular vectors is k in all pictures; the table says K.
        ax.set_title(size.replace("K", "k"), fontsize="small")
    for ax in grid[-1]:
        ticks = sorted(table[RATE].unique())
        ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        ax.minorticks_off()
        ax.set_xlabel("learning rate", fontsize="small")
    figure.supylabel("coupling: share above chance", fontsize="small")
    labels.legend_below(figure, grid[0, 0], ncols=len(widths))
    title = "Coupling at equal held-out loss, by learning rate"
    small = f"lines: means; small marks: models · dashed: {RANDOM_SUBSPACES}"
    labels.entitle(figure, f"{title}\n{small}")
    return figure
