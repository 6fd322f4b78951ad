"""Draw directions that blocks share, and what steering, ablation and rotation do."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tl_coupling.arguments import checked
from tl_coupling.directions import Ablation, Rotation, Steering, Subspace
from tl_coupling.pictures import labels
from tl_coupling.results import CONTROLS, OWN_CONTROLS, RANDOM_FRAMES, ROTATIONS

if TYPE_CHECKING:
    import pandas

# The directions of interest are vermilion in all pictures; controls have the other
# colours.
_COLORS = {
    "direction": labels.VERMILION,
    "shared": labels.VERMILION,
    "random": labels.BLACK,
    "rotated": labels.BLUE,
    "unshared": labels.BLUE,
    "low_gain": labels.GREEN,
    "activations": labels.PINK,
    "norm_matched": labels.PINK,
    "principal": labels.ORANGE,
    "span": labels.SKY,
    "together": labels.VERMILION,
    "apart": labels.BLUE,
    "alone": labels.VERMILION,
    "shrunk": labels.BLACK,
}
# More scales have no room for their names.
_MOST_SCALES = 4
# The longest names of controls are written on two lines.
_LONGEST_NAME = 24
# How much lower the draws of a control are than their mean, of the height of a row.
_BELOW_THE_MEAN = 0.3


@checked
def plot_steering(result: Steering, *, ax: Axes | None = None) -> Axes:
    """Draw what steering does to the next token, and how far it exceeds controls.

    Above, the KL against how far the stream moves: means over the directions of a kind,
    both signs and the prompts; the dashed line is what the derivative predicts for the
    singular vectors; the band holds all draws of "random". Below, the KL of the
    singular vectors minus that of each control, with the 95 % paired t interval over
    prompts: an interval above 0 says that the singular vectors do more. The lower axis
    is linear near 0.

    Args:
        result: what `directions.steer` returned.
        ax: where to draw the upper panel alone; a new figure with both by default.

    Returns the Axes of the upper panel; its lines are the prediction, and then each
    kind.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=1, k=2)
        >>> result = tlc.directions.steer(model, ["w1 w2", "w3"], directions, n_draws=2)
        >>> tlc.plots.plot_steering(result).get_xlabel()
        'ε, move of the stream as a share of its length'
    """
    differences = None
    table = result.to_dataframe()
    n_prompts = len(result.prompts)
    controls = table[table["kind"] != "direction"]
    if ax is None:
        figure = labels.new_figure(labels.PHONE_WIDTH, 6.0)
        ax = figure.subplots()
        # One prompt has no interval.
        if len(controls) and n_prompts > 1:
            ax.remove()
            ax, differences = figure.subplots(2, 1, height_ratios=[1.3, 1])
    own = table[table["kind"] == "direction"]
    dashed = labels.NULL_LINE | {"color": _COLORS["direction"]}
    ax.plot(own["scale"], own["predicted_kl"], label="predicted", **dashed)
    for kind, kind_rows in table.groupby("kind", sort=False):
        look = labels.marked(_COLORS[str(kind)])
        name = _names(result)[str(kind)]
        ax.plot(kind_rows["scale"], kind_rows["kl"], label=name, **look)
    random = table[table["kind"] == "random"]
    ax.fill_between(
        random["scale"],
        random["draws_low"],
        random["draws_high"],
        color=_COLORS["random"],
        alpha=0.15,
        linewidth=0,
    )
    ax.set(xscale="log", yscale="log")
    # Names of many scales would overprint each other.
    shown = sorted(result.scales)[:: -(-len(result.scales) // _MOST_SCALES)]
    ax.set_xticks(shown, [labels.signed(scale, ".2g") for scale in shown])
    # Minor ticks of a logarithmic axis would name scales that were not measured.
    ax.minorticks_off()
    ax.set(
        xlabel="ε, move of the stream as a share of its length",
        ylabel="KL of the next token (nats)",
    )
    labels.plain_legend(
        ax, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small"
    )
    if differences is not None:
        _draw_differences(differences, controls, _names(result)["direction"])
    subject = f"What steering does · {n_prompts} prompt{'s' * (n_prompts > 1)}"
    title = _heading(subject, result.provenance)
    drawn = None if differences is None else ax.get_figure(root=True)
    labels.entitle(drawn or ax, title)
    return ax


def _draw_differences(ax: Axes, controls: "pandas.DataFrame", name: str) -> None:
    """Draw KL of the directions minus that of each control, with intervals."""
    scales = sorted(controls["scale"].unique())
    groups = list(controls.groupby("kind", sort=False))
    # Controls stand side by side at each scale.
    shifts = np.linspace(-0.3, 0.3, len(groups)) if len(groups) > 1 else [0.0]
    for shift, (kind, rows) in zip(shifts, groups, strict=True):
        places = np.array([scales.index(scale) for scale in rows["scale"]]) + shift
        low = rows["direction_less_this_low"]
        high = rows["direction_less_this_high"]
        look = labels.marked(_COLORS[str(kind)])
        ax.vlines(places, low, high, color=look["color"], linewidth=1.2)
        ax.plot(places, rows["direction_less_this"], linestyle="", **look)
    ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    columns = ["direction_less_this_low", "direction_less_this_high"]
    largest = float(controls[columns].abs().max(axis=None)) or 1.0
    # Linear near 0, as intervals cross it, where a logarithm has no place.
    decade = 10 ** np.floor(np.log10(largest))
    ax.set_yscale("symlog", linthresh=decade / 10)
    ticks = np.array([-decade, -decade / 10, 0, decade / 10, decade])
    ax.set_yticks(
        ticks, [labels.signed(tick, "+.2g") if tick else "0" for tick in ticks]
    )
    ax.minorticks_off()
    ax.set_ylim(-1.5 * largest, 1.5 * largest)
    step = -(-len(scales) // _MOST_SCALES)
    names = [labels.signed(scale, ".2g") for scale in scales[::step]]
    ax.set_xticks(range(0, len(scales), step), names)
    ax.set(xlabel="ε", ylabel=f"KL, {name}\nminus control [95 %]")


@checked
def plot_ablation(result: Ablation, *, ax: Axes | None = None) -> Axes:
    """Draw what a model loses without a subspace, beside its controls.

    A row for each: the mean change in loss with its 95 % t interval over prompts, and
    below it a grey dot for each draw of a control. On the right, the share of the
    energy that was removed.

    Args:
        result: what `directions.ablate` returned.
        ax: where to draw; a new figure by default.

    Returns the Axes; rows are named on its y-axis.

    Example:
        >>> subspace = tlc.directions.shared_subspace([trace], rank=2, k=4)
        >>> result = tlc.directions.ablate(model, ["w1 w2 w3", "w4 w5"], subspace, n_draws=2)
        >>> tlc.plots.plot_ablation(result).get_xlabel()
        'change in loss (nats per token)'
    """
    table = result.to_dataframe()
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 0.8 + 0.42 * len(table)).subplots()
    for row, line in enumerate(table.to_dict("records")):
        drawn = result.draws(line["kind"])
        # The subspace itself is no draw: a single dot would lie under its own mean.
        if len(drawn) > 1:
            height = row + _BELOW_THE_MEAN
            ax.plot(drawn, np.full(len(drawn), height), "o", color="0.6", markersize=3)
        _note(ax, row, f"{line['removed']:.1%} removed")
    names = [fill(_names(result)[kind], _LONGEST_NAME) for kind in table["kind"]]
    _draw_kinds(ax, table, names)
    subject = f"Removed from what blocks {result.side} · rank {result.rank}"
    labels.entitle(ax, _heading(subject, result.provenance))
    return ax


@checked
def plot_rotation(result: Rotation, *, ax: Axes | None = None) -> Axes:
    """Draw what a model loses where blocks are rotated together, apart or alone.

    A row for each kind: the mean change in loss with its 95 % t interval over prompts,
    and a grey dot for each prompt, its mean over draws, with a line to the same prompt
    in the next row. On the right, the mean of the first row minus that of the row, with
    its 95 % paired t interval: below 0, rotations of the first kind cost less.

    Args:
        result: what `directions.rotate` returned.
        ax: where to draw; a new figure by default.

    Returns the Axes; rows are named on its y-axis.

    Example:
        >>> result = tlc.directions.rotate(model, ["w1 w2 w3", "w4 w5"], n_draws=2)
        >>> tlc.plots.plot_rotation(result).get_xlabel()
        'change in loss (nats per token)'
    """
    table = result.to_dataframe()
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 1.3 + 0.5 * len(table)).subplots()
    rows = np.arange(len(table))
    of_prompts = np.stack([result.of(kind) for kind in table["kind"]])
    ax.plot(of_prompts, rows, "o-", color="0.75", markersize=4, linewidth=0.8)
    names = [ROTATIONS[kind].replace(", ", ",\n") for kind in table["kind"]]
    _draw_kinds(ax, table, names)
    first, *others = table.to_dict("records")
    for row, line in enumerate(others, 1):
        less, low, high = (
            line[f"first_less_this{end}"] for end in ("", "_low", "_high")
        )
        # One prompt has no interval.
        interval = "" if np.isnan(low) else f" [{low:+#.3g}, {high:+#.3g}]"
        numbers = f"{less:+#.3g}{interval}".replace("-", "−")
        _note(ax, row, f"{first['kind']} − {line['kind']}\n{numbers}")
    what = {"write": "write", "read": "read", "both": "read and write"}[result.side]
    n_layers, n_prompts = len(result.layers), len(result.prompts)
    subject = (
        f"Rotated: what blocks {what} · θ = {result.angle:g}° · "
        f"{n_layers} layer{'s' * (n_layers > 1)}, {n_prompts} prompt{'s' * (n_prompts > 1)}"
    )
    labels.entitle(ax, _heading(subject, result.provenance))
    return ax


def _draw_kinds(ax: Axes, table: "pandas.DataFrame", names: Sequence[str]) -> None:
    """Draw a row for each kind: its mean change in loss, with the interval."""
    for row, line in enumerate(table.to_dict("records")):
        color = _COLORS[str(line["kind"])]
        ax.plot([line["low"], line["high"]], [row, row], color=color, linewidth=2)
        ax.plot(line["loss_change"], row, "D", color=color, markersize=6)
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_yticks(range(len(table)), names)
    # The first row of the table stands on top.
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.set(xlabel="change in loss (nats per token)")


def _note(ax: Axes, row: int, text: str) -> None:
    """Write a text on the right of a row."""
    ax.annotate(
        text,
        (1, row),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize="small",
        annotation_clip=False,
    )


@checked
def plot_subspace(result: Subspace, *, ax: Axes | None = None) -> Axes:
    """Draw how far blocks share what they read and what they write.

    The share of blocks and prompts that have each direction in their top k, the most
    shared first. The grey band is that of as many random frames: the range of its
    draws. The title says how stable the subspaces are: the smallest principal cosine
    between those of every second prompt and those of the others, beside the mean of
    random ones.

    Args:
        result: what `directions.shared_subspace` returned.
        ax: where to draw; a new figure by default.

    Returns the Axes; its lines are what is read and what is written.

    Raises ValueError for one's own subspace, which no blocks were asked for.

    Example:
        >>> subspace = tlc.directions.shared_subspace([trace], rank=3, k=4)
        >>> ax = tlc.plots.plot_subspace(subspace)
        >>> [line.get_label() for line in ax.lines]
        ['written', 'read']
    """
    if result.side is not None:
        raise ValueError(
            "a subspace of one's own has no eigenvalues to draw: `shared_subspace` finds "
            "what blocks share, `plot_ablation` draws what `ablate` returns"
        )
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    places = np.arange(1, result.rank + 1)
    # The band is of both sides and all draws together: random frames know no side.
    null = result.null_eigenvalues.flatten(0, 1).cpu().numpy()
    ax.fill_between(
        places, null.min(0), null.max(0), color="0.75", linewidth=0, label=RANDOM_FRAMES
    )
    for side, name, color in (
        (1, "written", labels.VERMILION),
        (0, "read", labels.BLUE),
    ):
        values = result.eigenvalues[side].cpu().numpy()
        ax.plot(places, values, label=name, **labels.marked(color))
    ax.set(
        xlabel="direction, the most shared first", ylabel="share of blocks and prompts"
    )
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    subject = f"Directions that blocks share · k = {result.k}"
    heading = [_heading(subject, result.provenance), *_stability(result)]
    labels.finish_lines(ax, "\n".join(heading))
    return ax


def _names(result: Ablation | Steering) -> dict[str, str]:
    """Return the names of the directions and of their controls."""
    return OWN_CONTROLS if result.provenance.get("own") else CONTROLS


def _stability(result: Subspace) -> list[str]:
    """Return a line on the halves of the prompts; none for one prompt."""
    read, written = result.cosines.amin(1).tolist()
    if np.isnan(read):
        return []
    random = float(result.null_cosines.amin(1).mean())
    return [
        f"halves of the prompts, smallest cosine: read {read:.2f}, written "
        f"{written:.2f}, random {random:.2f}"
    ]


def _heading(subject: str, provenance: dict[str, object]) -> str:
    return f"{subject}\n{labels.short_path(str(provenance.get('model')))}"
