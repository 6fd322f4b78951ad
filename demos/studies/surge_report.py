"""The tables and the figure of `early_surge.py`."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES

# What is measured of the base: its label, and which of `chances` it is compared with.
PROBES = {
    "coupling": ("coupling", "null"),
    "coupling_of_random_vectors": (
        "… of random vectors with the same singular values",
        "null",
    ),
    "coupling_without_own_top": ("… without each layer's own first pair", "null"),
    "coupling_without_shared_1": (
        "… without the shared first direction, left and right",
        "null",
    ),
    "coupling_without_shared_5": (
        "… without the five shared directions, left and right",
        "null",
    ),
    "coupling_without_shared_map": (
        "… without the map that the other layers share",
        "null",
    ),
    "participation_ratio": ("participation ratio of J", "none"),
    "sigma_1_share": ("share of σ₁² in J", "none"),
    "cosine_of_jacobians": ("cosine of J between layers", "zero"),
    "cosine_of_gradients": ("cosine of the loss gradient between blocks", "zero"),
    "left_in_feedback": ("top left vectors in leading gradients", "subspace"),
    "right_in_inputs": ("top right vectors in leading inputs", "subspace"),
    "cosine_with_frequent": ("|cosine| of u₁ with frequent tokens", "direction"),
    "loss": ("loss on the passages, nats", "none"),
}


def chances(data: xarray.Dataset) -> dict[str, float]:
    """Return what independent random matrices or directions would give.

    `E|cos|` of two random directions is about `√(2 / πd)`, and m of d directions hold
    m/d of any other.
    """
    d = data.attrs["d_model"]
    return {
        "null": data.attrs["null"],
        "none": math.nan,
        "zero": 0.0,
        "subspace": min(1.0, data.attrs["leading"] / d),
        "direction": math.sqrt(2 / (math.pi * d)),
    }


def by_variant(data: xarray.Dataset, *kinds: str) -> dict[str, xarray.Dataset]:
    """Return runs of these kinds by variant, with dims `run` and `checkpoint`: means over
    prompts, at the steps measured.
    """
    means = data.mean("prompt").isel(run=np.flatnonzero(np.isin(data["kind"], kinds)))
    names = dict.fromkeys(means["variant"].values.tolist())
    groups = {
        name: means.isel(run=np.flatnonzero(means["variant"] == name)) for name in names
    }
    return {
        name: of_variant.isel(
            checkpoint=of_variant["coupling"].notnull().all("run").values
        )
        for name, of_variant in groups.items()
    }


def with_interventions(data: xarray.Dataset) -> dict[str, xarray.Dataset]:
    """Return the interventions, after the base at their steps."""
    interventions = by_variant(data, "intervention")
    last = next(iter(interventions.values()))["checkpoint"].max()
    base = by_variant(data, "base")["base"]
    return {
        "none (base)": base.where(base["checkpoint"] <= last, drop=True),
        **interventions,
    }


def report(data: xarray.Dataset, console: Console) -> None:
    """Three tables: how far the surge holds, what it is, and what removes it."""
    console.print(how_far_it_holds(data), what_it_is(data), what_removes_it(data))


def how_far_it_holds(data: xarray.Dataset) -> Table:
    """Coupling of every variant untrained, at its peak and at the end, each next to the
    null.
    """
    rows = []
    for name, group in by_variant(data, "base", "variant").items():
        c = group["coupling"]
        peak = c.max("checkpoint")
        last = c.isel(checkpoint=-1)
        steps = sorted(
            {
                int(step)
                for step in c["checkpoint"].values[c.argmax("checkpoint").values]
            }
        )
        at_peak = (mean_and_range(peak), ", ".join(map(str, steps)))
        at_end = (
            mean_and_range(last),
            str(int(last["checkpoint"])),
            mean_and_range(peak / last, 2),
        )
        start = (
            str(c.sizes["run"]),
            f"{data.attrs['null']:.3f}",
            mean_and_range(c.isel(checkpoint=0)),
        )
        rows.append([name, *start, *at_peak, *at_end])
    columns = [
        "variant",
        "runs",
        "null",
        "step 0",
        "peak",
        "at step",
        "end",
        "at step ",
        "peak over end",
    ]
    return table(
        f"How far does the surge hold? Coupling, k = {data.attrs['k']}", columns, rows
    )


def what_it_is(data: xarray.Dataset) -> Table:
    """Every probe of the base at every step: mean over seeds, and below it half their
    range.
    """
    base = by_variant(data, "base")["base"]
    expected = chances(data)
    rows = []
    for name, (label, chance) in PROBES.items():
        digits = {"participation_ratio": 1, "loss": 2}.get(name, 3)
        values = [
            mean_and_half_range(base[name].sel(checkpoint=step), digits)
            for step in base["checkpoint"].values
        ]
        rows.append(
            [
                label,
                "–" if math.isnan(expected[chance]) else f"{expected[chance]:.3f}",
                *values,
            ]
        )
    title = (
        f"What the surge is: {data.attrs['model']}, "
        f"{base.sizes['run']} seeds, mean ± half the range"
    )
    return table(
        title, ["at step", "chance", *map(str, base["checkpoint"].values)], rows
    )


def what_removes_it(data: xarray.Dataset) -> Table:
    """Coupling under each intervention at every step, after the base's; then how alike
    J is, and the loss.
    """
    groups = with_interventions(data)
    steps = next(iter(groups.values()))["checkpoint"].values
    rows = []
    for name, group in groups.items():
        last = group.sel(checkpoint=steps[-1])
        values = [
            mean_and_half_range(group["coupling"].sel(checkpoint=step))
            for step in steps
        ]
        rows.append(
            [
                name,
                *values,
                mean_and_half_range(last["cosine_of_jacobians"]),
                mean_and_half_range(last["loss"], 2),
            ]
        )
    ends = [f"cosine of J, step {steps[-1]}", f"loss, step {steps[-1]}"]
    title = "What removes the surge: coupling under interventions, mean ± half the range over seeds"
    return table(
        title, ["intervention", *(f"step {step}" for step in steps), *ends], rows
    )


def draw(data: xarray.Dataset) -> Figure:
    """Four panels against the step: variants, coupling with something removed, probes,
    interventions.

    Lines are means over seeds, bands the range over them. Dashed: what random subspaces
    would give.
    """
    # One below the other: each has a legend of up to ten names.
    figure = labels.new_figure(labels.PAGE_WIDTH, 13.0)
    axes = figure.subplots(4, 1).ravel()
    base = by_variant(data, "base")["base"]
    shares = [
        n
        for n, (_, chance) in PROBES.items()
        if chance in ("zero", "subspace", "direction")
    ]
    probes = {
        title: {PROBES[n][0]: base[n] for n in names}
        for title, names in (
            (
                "Base, with something removed",
                [name for name in PROBES if name.startswith("coupling")],
            ),
            ("Base: cosines and shares", [*shares, "sigma_1_share"]),
        )
    }
    panels = {
        "Variants": {
            name: group["coupling"]
            for name, group in by_variant(data, "base", "variant").items()
        },
        **probes,
        "Interventions": {
            name: group["coupling"] for name, group in with_interventions(data).items()
        },
    }
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        panel(ax, title, lines)
        of_shares = ax is axes[2]
        chance, label = (
            ("subspace", "random vectors in leading ones")
            if of_shares
            else ("null", RANDOM_SUBSPACES)
        )
        ax.axhline(
            chances(data)[chance],
            label=label,
            **labels.NULL_LINE,
        )
        ax.set_ylabel(
            "cosine or share" if of_shares else f"coupling (k = {data.attrs['k']})"
        )
        if not of_shares:
            ax.set_ylim(bottom=0)
        ax.legend(
            frameon=False,
            fontsize="small",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
    labels.entitle(figure, f"The early surge of coupling\n{data.attrs['model']}")
    return figure


def panel(ax: Axes, title: str, lines: dict[str, xarray.DataArray]) -> None:
    for number, (name, values) in enumerate(lines.items()):
        steps = values["checkpoint"].values
        look = labels.numbered_look(number) | {"markersize": 4}
        (line,) = ax.plot(steps, values.mean("run").values, label=name, **look)
        low = values.min("run").values
        high = values.max("run").values
        ax.fill_between(
            steps, low, high, alpha=0.2, linewidth=0, color=line.get_color()
        )
    # Linear below 1, for step 0.
    ax.set_xscale("symlog", linthresh=1, linscale=0.5)
    ax.set_xlim(left=-0.3)
    ax.set_xlabel("training step")
    ax.set_title(title, fontsize="medium")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    filled = Table(title=title)
    for i, column in enumerate(columns):
        filled.add_column(column, justify="right" if i else "left")
    for row in rows:
        filled.add_row(*row)
    return filled


def mean_and_range(values: xarray.DataArray, digits: int = 3) -> str:
    mean = f"{float(values.mean()):.{digits}f}"
    return (
        mean
        if values.size == 1
        else f"{mean} [{float(values.min()):.{digits}f}, {float(values.max()):.{digits}f}]"
    )


def mean_and_half_range(values: xarray.DataArray, digits: int = 3) -> str:
    """On two lines, if there are several."""
    mean = f"{float(values.mean()):.{digits}f}"
    return (
        mean
        if values.size == 1
        else f"{mean}\n±{float(values.max() - values.min()) / 2:.{digits}f}"
    )
