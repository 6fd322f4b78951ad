"""The tables and the figure of `early_surge.py`."""

import math
from collections.abc import Sequence

import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

# What is measured of the base, and what chance would give: a number, or the name of one in `chances`.
PROBES = {
    "coupling": ("coupling", "null"),
    "coupling_of_random_vectors": ("… of random vectors with the same singular values", "null"),
    "coupling_without_own_top": ("… without each layer's own first pair", "null"),
    "coupling_without_shared_1": ("… without the shared first direction, left and right", "null"),
    "coupling_without_shared_5": ("… without the five shared directions, left and right", "null"),
    "coupling_without_shared_map": ("… without the map that the other layers share", "null"),
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
    """What independent random matrices or directions would give.

    `E|cos|` of two random directions is about `√(2 / πd)`, and m of d directions hold m/d of any other.
    """
    d = data.attrs["d_model"]
    return {
        "null": data.attrs["null"],
        "none": math.nan,
        "zero": 0.0,
        "subspace": min(1.0, data.attrs["leading"] / d),
        "direction": math.sqrt(2 / (math.pi * d)),
    }


def by_variant(data: xarray.Dataset, kind: str) -> dict[str, xarray.Dataset]:
    """Runs of one kind, by variant in their order, with dims `run` and `checkpoint`: means over prompts."""
    means = data.mean("prompt").isel(run=np.flatnonzero(data["kind"] == kind))
    names = dict.fromkeys(means["variant"].values.tolist())
    groups = {name: means.isel(run=np.flatnonzero(means["variant"] == name)) for name in names}
    # Other runs were measured at more steps.
    return {
        name: group.isel(checkpoint=group["coupling"].notnull().all("run").values) for name, group in groups.items()
    }


def report(data: xarray.Dataset, console: Console) -> None:
    """Three tables: over what the surge holds, what it is, and what takes it away."""
    console.print(holds_over(data), what_it_is(data), interventions(data))


def holds_over(data: xarray.Dataset) -> Table:
    """Coupling of every variant untrained, at its peak and at the end, each beside the null."""
    table = Table(title=f"Does the surge hold over …? Coupling, k = {data.attrs['k']}")
    for column in ("variant", "runs", "null", "step 0", "peak", "at step", "end", "at step ", "peak over end"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, group in {**by_variant(data, "base"), **by_variant(data, "variant")}.items():
        c = group["coupling"]
        peak, last = c.max("checkpoint"), c.isel(checkpoint=-1)
        steps = sorted({int(step) for step in c["checkpoint"].values[c.argmax("checkpoint").values]})
        table.add_row(
            name,
            str(c.sizes["run"]),
            f"{data.attrs['null']:.3f}",
            *(_spread(one) for one in (c.isel(checkpoint=0), peak)),
            ", ".join(map(str, steps)),
            _spread(last),
            str(int(c["checkpoint"][-1])),
            _spread(peak / last, 2),
        )
    return table


def what_it_is(data: xarray.Dataset) -> Table:
    """Every probe of the base at every step: mean over seeds, and below it half their range."""
    base = by_variant(data, "base")["base"]
    table = Table(title=f"What the surge is: {data.attrs['model']}, {base.sizes['run']} seeds, mean ± half the range")
    table.add_column("at step")
    table.add_column("chance", justify="right")
    for step in base["checkpoint"].values:
        table.add_column(str(step), justify="right")
    for name, (label, chance) in PROBES.items():
        digits = 1 if name == "participation_ratio" else 2 if name == "loss" else 3
        expected = chances(data)[chance]
        cells = [_half_range(base[name].sel(checkpoint=step), digits) for step in base["checkpoint"].values]
        table.add_row(label, "–" if math.isnan(expected) else f"{expected:.3f}", *cells)
    return table


def interventions(data: xarray.Dataset) -> Table:
    """Coupling under each intervention at every step, beside the base's; then how alike J is, and the loss."""
    found = by_variant(data, "intervention")
    steps = next(iter(found.values()))["checkpoint"].values
    rows = {"none (base)": by_variant(data, "base")["base"], **found}
    table = Table(title="What takes the surge away: coupling under interventions, mean ± half the range over seeds")
    table.add_column("intervention")
    for step in steps:
        table.add_column(f"step {step}", justify="right")
    table.add_column(f"cosine of J, step {steps[-1]}", justify="right")
    table.add_column(f"loss, step {steps[-1]}", justify="right")
    for name, group in rows.items():
        last = group.sel(checkpoint=steps[-1])
        cells = [_half_range(group["coupling"].sel(checkpoint=step), 3) for step in steps]
        table.add_row(name, *cells, _half_range(last["cosine_of_jacobians"], 3), _half_range(last["loss"], 2))
    return table


def draw(data: xarray.Dataset) -> Figure:
    """Four panels against the step: variants, coupling with something taken away, probes, interventions.

    Lines are means over seeds, bands the range over them. Dashed: what random subspaces would give.
    """
    figure = Figure(figsize=(13, 11), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    base = by_variant(data, "base")["base"]
    lines = {"base": base, **by_variant(data, "variant")}
    _panel(axes[0], "Variants", [(name, group["coupling"]) for name, group in lines.items()])
    couplings = [name for name in PROBES if name.startswith("coupling")]
    _panel(axes[1], "Base, with something taken away", [(PROBES[name][0], base[name]) for name in couplings])
    shares = [n for n, (_, chance) in PROBES.items() if chance in ("zero", "subspace", "direction")] + ["sigma_1_share"]
    _panel(axes[2], "Base: cosines and shares", [(PROBES[name][0], base[name]) for name in shares])
    found = by_variant(data, "intervention")
    last = next(iter(found.values()))["checkpoint"].max()
    tampered = {"none (base)": base.where(base["checkpoint"] <= last, drop=True), **found}
    _panel(axes[3], "Interventions", [(name, group["coupling"]) for name, group in tampered.items()])
    for ax in (axes[0], axes[1], axes[3]):
        ax.axhline(data.attrs["null"], color="grey", linestyle="--", linewidth=1, label="random subspaces")
        ax.set_ylabel(f"coupling (k = {data.attrs['k']})")
        ax.set_ylim(bottom=0)
    expected = chances(data)["subspace"]
    axes[2].axhline(expected, color="grey", linestyle="--", linewidth=1, label="random vectors in leading ones")
    axes[2].set_ylabel("cosine or share")
    for ax in axes:
        ax.legend(frameon=False, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    figure.suptitle(data.attrs["model"], fontsize="medium")
    return figure


def _panel(ax: Axes, title: str, lines: Sequence[tuple[str, xarray.DataArray]]) -> None:
    for name, values in lines:
        steps = values["checkpoint"].values
        (line,) = ax.plot(steps, values.mean("run").values, marker="o", markersize=3, label=name)
        ax.fill_between(
            steps, values.min("run").values, values.max("run").values, alpha=0.2, linewidth=0, color=line.get_color()
        )
    # A place for step 0.
    ax.set_xscale("symlog", linthresh=1, linscale=0.5)
    ax.set_xlim(left=-0.3)
    ax.set_xlabel("training step")
    ax.set_title(title, fontsize="medium")


def _spread(values: xarray.DataArray, digits: int = 3) -> str:
    """Mean, and the range if there are several."""
    mean = f"{float(values.mean()):.{digits}f}"
    return mean if values.size == 1 else f"{mean} [{float(values.min()):.{digits}f}, {float(values.max()):.{digits}f}]"


def _half_range(values: xarray.DataArray, digits: int) -> str:
    """Mean, and below it half the range if there are several."""
    mean = f"{float(values.mean()):.{digits}f}"
    return mean if values.size == 1 else f"{mean}\n±{float(values.max() - values.min()) / 2:.{digits}f}"
