"""The statistics, tables and figure of `capacity.py`."""

from collections.abc import Mapping
from itertools import permutations, product
from typing import Any

import numpy as np
import pandas
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure

from matched_losses import END, UNTRAINED, spread_out
from tl_coupling.generalization import linear_fit
from tl_coupling.plots import labels
from tl_coupling.statistics import rank_correlation
from vit_report import readable

SHAPE = ["width", "n_layers"]
LOOK = ["measure", "size", "mark"]
WIDTH = "log2(width)"
DEPTH = "log2(n_layers)"
LEFT = "left of the peak"


def tables_of(
    table: pandas.DataFrame, marks: Mapping[str, float]
) -> dict[str, pandas.DataFrame]:
    """Return what is printed and written, by name; `table` is of
    `matched_losses.table_of`.
    """
    return {
        "levels": levels(table),
        "peaks": peaks(table, marks),
        "trends": trends(table, marks),
    }


def levels(table: pandas.DataFrame) -> pandas.DataFrame:
    """Each shape's mean over its seeds, and their range, at each mark: one row per look
    and shape.
    """
    groups = table.groupby([*LOOK, *SHAPE], sort=False)
    means = groups[
        ["k", "null", "step", "loss_held_out", "value", "above_chance"]
    ].mean()
    spread = groups["value"].agg(value_low="min", value_high="max", reached="count")
    return means.join(spread).reset_index()


def peaks(table: pandas.DataFrame, marks: Mapping[str, float]) -> pandas.DataFrame:
    """Where each model's coupling is highest among the marks; what is left of it, above
    chance, at the last mark.
    """
    rows = []
    on_the_way = table[
        (table["measure"] == "coupling") & table["mark"].isin(marks)
    ].dropna(subset=["value"])
    for (size, width, n_layers, seed), of_run in on_the_way.groupby(
        ["size", *SHAPE, "seed"], sort=False
    ):
        top = of_run.loc[of_run["above_chance"].idxmax()]
        last = of_run[of_run["mark"] == list(marks)[-1]]["above_chance"].to_numpy()
        row = {
            "size": size,
            "width": width,
            "n_layers": n_layers,
            "seed": seed,
            "n_parameters": top["n_parameters"],
        }
        row |= {
            "peak at": top["mark"],
            "step": int(top["step"]),
            "loss": top["loss_held_out"],
            "peak": top["value"],
        }
        rows.append(
            row
            | {"left": float(last[0]) / top["above_chance"] if len(last) else np.nan}
        )
    return pandas.DataFrame(rows)


def trends(table: pandas.DataFrame, marks: Mapping[str, float]) -> pandas.DataFrame:
    """Coupling above chance on width and depth over shapes, each the mean over its
    seeds, for every look.

    Columns: `n` shapes that got there; `width`, the slope per doubling at equal depth,
    and `depth`, the reverse, with t intervals over shapes; `rho` and `rho_p`,
    Spearman's with the number of parameters; `p`, of a permutation of widths among the
    shapes of each depth, exact; `p_of_all`, the same for the largest correlation of all
    looks (max-T), which takes account of how many there are. Both p only where every
    shape got there: for others NaN.
    """
    left = (
        peaks(table, marks)
        .assign(measure="coupling", mark=LEFT)
        .rename(columns={"left": "above_chance"})
    )
    columns = [*LOOK, *SHAPE, "above_chance", "n_parameters"]
    looks = pandas.concat([table[columns], left[columns]])
    # As they come, but one size after the other.
    looks = looks.sort_values(
        LOOK[:2], kind="stable", key=lambda names: pandas.factorize(names)[0]
    )
    shapes = (
        looks.groupby([*LOOK, *SHAPE], sort=False)[["above_chance", "n_parameters"]]
        .mean()
        .reset_index()
    )
    rows = []
    complete = []
    for look, of_look in shapes.groupby(LOOK, sort=False):
        reached = of_look.dropna(subset=["above_chance"])
        row = dict(zip(LOOK, look, strict=True)) | {"n": len(reached)}
        for name, x, control in (("width", WIDTH, DEPTH), ("depth", DEPTH, WIDTH)):
            try:
                fit = linear_fit(
                    reached,
                    x,
                    "above_chance",
                    controls=[control] if of_look["n_layers"].nunique() > 1 else [],
                )
            except ValueError:
                # Too few shapes got there.
                continue
            row |= {
                name: fit.slope,
                f"{name}_low": fit.slope_interval[0],
                f"{name}_high": fit.slope_interval[1],
            }
        if len(reached) > 2:
            rank = rank_correlation(
                *reached[["n_parameters", "above_chance"]].to_numpy(float).T
            )
            row |= {"rho": rank.rho, "rho_p": rank.p}
        rows.append(row)
        # Before training there is nothing to find, and the end is at no one loss.
        complete.append(len(reached) == len(of_look) and row["mark"] in (*marks, LEFT))
    slopes = pandas.DataFrame(rows).assign(p=np.nan, p_of_all=np.nan)
    if any(complete):
        grids = [
            of_look.sort_values(SHAPE[::-1])["above_chance"]
            .to_numpy()
            .reshape(of_look["n_layers"].nunique(), -1)
            for _, of_look in shapes.groupby(LOOK, sort=False)
        ]
        widths = np.log2(np.sort(shapes["width"].unique()))
        slopes.loc[complete, ["p", "p_of_all"]] = permuted(
            np.stack(grids)[complete], widths
        )
    return slopes


def permuted(
    values: Float[np.ndarray, "n_looks n_depths n_widths"],
    x: Float[np.ndarray, " n_widths"],
) -> Float[np.ndarray, "n_looks 2"]:
    """Two-sided p of the correlation with x at equal depth, for each look alone, and
    for the largest of all looks.

    Over all orders of x within each depth, independently: exact.
    """
    centred = values - values.mean(2, keepdims=True)
    unit = centred / np.sqrt((centred**2).sum((1, 2), keepdims=True))
    x = (x - x.mean()) / np.sqrt(values.shape[1] * ((x - x.mean()) ** 2).sum())
    # What each order of x gives at each depth; sums over depths are all combinations.
    orders = np.array(list(permutations(x)))
    at_depth = np.einsum("ldw,ow->dol", unit, orders)
    r = np.abs([sum(terms) for terms in product(*at_depth)])
    # The first is the order as it is; others may equal it but for rounding.
    own = r[0] * (1 - 1e-9)
    return np.stack([(r >= own).mean(0), (r.max(1, keepdims=True) >= own).mean(0)], 1)


def print_report(
    tables: Mapping[str, pandas.DataFrame], marks: Mapping[str, float]
) -> None:
    """Print the tables, one after the other."""
    print(
        "held-out losses, in nats:",
        ", ".join(f"{name} {loss:.3f}" for name, loss in marks.items()),
    )
    coupling = tables["levels"][tables["levels"]["measure"] == "coupling"]
    first = coupling[coupling["size"] == coupling["size"].iloc[0]]
    print(
        "\nSteps to each mark, means over seeds; the end: after how many, and the "
        "loss there"
    )
    print(
        spread_out(
            first,
            SHAPE,
            [*marks, END],
            lambda row: (
                f"{row['step']:.0f}"
                + (f", {row['loss_held_out']:.3f}" if row["mark"] == END else "")
            ),
        )
    )
    # Not known of marks that were not reached, and the same at all.
    coupling = coupling.assign(
        null=coupling.groupby(["size", *SHAPE])["null"].transform("max")
    )
    for size, rows in coupling.groupby("size", sort=False):
        print(
            f"\nCoupling of different layers, {size}: means over seeds "
            f"[their range]; null: random subspaces"
        )
        cell = "{value:.3f} [{value_low:.3f}, {value_high:.3f}]".format_map
        print(spread_out(rows, [*SHAPE, "null"], [UNTRAINED, *marks, END], cell))
    print(
        "\nPeak of coupling among the marks, and what is left of it, above chance, "
        "at the last"
    )
    print(readable(tables["peaks"]))
    for size, rows in tables["peaks"].groupby("size", sort=False):
        losses = rows["loss"]
        steps = rows["step"]
        middle = (losses.max() + losses.min()) / 2
        half = (losses.max() - losses.min()) / 2
        print(
            f"{size}: peaks at losses of {middle:.2f} ± "
            f"{half / middle:.0%}, at steps {steps.min()} to {steps.max()}"
        )
    print(
        "\nCoupling above chance, (c − null) / (1 − null), per "
        "doubling of width and of depth: slopes with 95 % t "
        "intervals\nover shapes; p: permutations of widths within "
        "depths; p of all: of the largest of all looks"
    )
    print(readable(tables["trends"]))


def draw(table: pandas.DataFrame, marks: Mapping[str, float]) -> Figure:
    """For every size: coupling against the loss, and coupling above chance after the
    landmark against parameters.

    Colours are widths, lines and filled points the fewest blocks; points are models,
    lines join means over seeds.
    """
    coupling = table[table["measure"] == "coupling"]
    sizes = list(dict.fromkeys(coupling["size"]))
    widths = sorted(coupling["width"].unique())
    depths = sorted(coupling["n_layers"].unique())
    colors = dict(
        zip(
            widths, colormaps["viridis"](np.linspace(0, 0.85, len(widths))), strict=True
        )
    )
    figure = labels.new_figure(11.0, 4.2 * len(sizes))
    for (left, right), size in zip(
        figure.subplots(len(sizes), 2, squeeze=False), sizes, strict=True
    ):
        of_size = coupling[coupling["size"] == size]
        for (width, n_layers), of_shape in of_size.groupby(SHAPE, sort=False):
            is_first = n_layers == depths[0]
            line = (
                of_shape[of_shape["mark"].isin(marks)]
                .groupby("mark", sort=False)[["loss_held_out", "value"]]
                .mean()
            )
            look = {"color": colors[width], "linestyle": "-" if is_first else "--"}
            left.plot(
                *line.to_numpy().T, **look, label=f"width {width}, {n_layers} blocks"
            )
            left.plot(
                of_shape["loss_held_out"],
                of_shape["value"],
                "o",
                **points(colors[width], is_first),
            )
        for name in ("unigram", "bigram"):
            left.axvline(marks[name], color="grey", linewidth=0.8)
            left.annotate(
                name,
                (marks[name], 1),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
            )
        for null, widths_of in of_size.groupby("null")["width"]:
            color = (
                "grey" if of_size["null"].nunique() == 1 else colors[widths_of.iloc[0]]
            )
            left.axhline(null, color=color, linestyle=":", linewidth=1)
        # Untrained models lie far to the left, at the logarithm of the vocabulary.
        left.set_xlim(
            marks["unigram"] + 0.25,
            min(of_size["loss_held_out"].min(), *marks.values()) - 0.1,
        )
        left.set(
            xlabel="held-out loss, nats; dotted: random subspaces",
            ylabel=f"coupling, {size}",
            ylim=(0, None),
        )
        after = list(marks)[list(marks).index("bigram") :]
        shades = colormaps["plasma"](np.linspace(0, 0.8, len(after)))
        for name, shade in zip(after, shades, strict=True):
            at = of_size[of_size["mark"] == name]
            means = at.groupby(SHAPE, sort=False)[
                ["n_parameters", "above_chance"]
            ].mean()
            for n_layers, line in means.groupby("n_layers"):
                linestyle = "-" if n_layers == depths[0] else "--"
                right.plot(
                    *line.to_numpy().T,
                    color=shade,
                    linestyle=linestyle,
                    label=f"{name}, {n_layers} blocks",
                )
            for n_layers, models in at.groupby("n_layers"):
                look = points(shade, n_layers == depths[0])
                right.plot(models["n_parameters"], models["above_chance"], "o", **look)
        right.axhline(0, color="grey", linestyle="--", linewidth=0.8)
        right.set(
            xscale="log",
            xlim=(
                of_size["n_parameters"].min() / 1.5,
                1.5 * of_size["n_parameters"].max(),
            ),
        )
        right.set(
            xlabel="parameters of the blocks", ylabel=f"coupling above chance, {size}"
        )
    for ax, place in zip(
        figure.axes,
        ({"loc": "upper right"}, {"loc": "upper left", "ncols": 2}),
        strict=False,
    ):
        ax.legend(frameon=False, fontsize="x-small", **place)
    labels.entitle(
        figure,
        "Coupling where models have the same held-out loss; lines through means over "
        "seeds",
    )
    return figure


def points(color: Any, is_filled: bool) -> dict[str, Any]:
    """How models are drawn; those of few blocks are filled."""
    return {
        "color": color,
        "markerfacecolor": color if is_filled else "none",
        "markersize": 4,
    }
