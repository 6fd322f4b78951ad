"""Draw directions that blocks share, and what steering and ablation do."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from tl_coupling.arguments import checked
from tl_coupling.directions import Ablation, Steering, Subspace
from tl_coupling.plots import labels

# The directions of interest are red in all pictures; controls have the other colours.
_COLORS = {
    "direction": "C3",
    "shared": "C3",
    "random": "C7",
    "rotated": "C0",
    "low_gain": "C2",
    "activations": "C4",
    "norm_matched": "C5",
    "principal": "C1",
    "span": "C9",
    "unshared": "C0",
}
_NAMES = {
    "direction": "singular vectors",
    "shared": "shared subspace",
    "random": "random",
    "rotated": "random, in their span",
    "low_gain": "of small gain",
    "activations": "as the stream varies",
    "norm_matched": "random, scaled to it",
    "principal": "most of the activations",
    "span": "in the activations' span",
    "unshared": "not shared, same gain",
}


@checked
def plot_steering(result: Steering, *, ax: Axes | None = None) -> Axes:
    """Draw what steering does to the next token: KL against how far the stream moves.

    Lines are means over the directions of a kind, both signs and the prompts; the band
    of the singular vectors is the 95 % t interval over prompts; an end at or below 0,
    which few prompts may have, lies below the axis. The dashed line is their KL as the
    derivative predicts it.

    Args:
        result: what `directions.steer` returned.
        ax: where to draw; a new figure by default.

    Returns the Axes; its lines are the prediction, and then each kind.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=1, k=2)
        >>> result = tlc.directions.steer(model, ["w1 w2", "w3"], directions, n_draws=2)
        >>> tlc.plots.plot_steering(result).get_xlabel()
        'ε, move of the stream as a share of its length'
    """
    ax = ax or labels.new_figure(6.4, 4.8).subplots()
    table = result.to_dataframe()
    own = table[table["kind"] == "direction"]
    dashed = labels.NULL_LINE | {"color": _COLORS["direction"]}
    ax.plot(own["scale"], own["predicted_kl"], label="predicted", **dashed)
    # Where the logarithmic axis ends, a little below the smallest mean. An end of an
    # interval at or below 0 has no logarithm and is put there.
    smallest = float(table["kl"].clip(lower=1e-12).min()) / 3
    ax.fill_between(
        own["scale"],
        own["kl_low"].clip(lower=smallest),
        own["kl_high"],
        color=_COLORS["direction"],
        alpha=0.15,
        linewidth=0,
    )
    for kind, kind_rows in table.groupby("kind", sort=False):
        ax.plot(
            kind_rows["scale"],
            kind_rows["kl"],
            marker="o",
            markersize=3,
            color=_COLORS[str(kind)],
            label=_NAMES[str(kind)],
        )
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(bottom=smallest)
    ax.set_xticks(result.scales, [f"{scale:g}" for scale in result.scales])
    # Minor ticks of a logarithmic axis would name scales that were not measured.
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(
        xlabel="ε, move of the stream as a share of its length",
        ylabel="KL of the next token (nats)",
    )
    n_prompts = len(result.prompts)
    subject = f"Steering · {n_prompts} prompt{'s' * (n_prompts > 1)}"
    labels.entitle(ax, _heading(subject, result.provenance))
    labels.plain_legend(
        ax, **labels.BELOW | {"bbox_to_anchor": (0.5, -0.14), "ncols": 3}
    )
    return ax


@checked
def plot_ablation(result: Ablation, *, ax: Axes | None = None) -> Axes:
    """Draw what a model loses without a subspace, beside its controls.

    A row for each: the mean change in loss with its 95 % t interval over prompts, and a
    grey dot for each draw of a control. On the right, the share of the energy that was
    removed.

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
    ax = ax or labels.new_figure(6.8, 0.8 + 0.42 * len(table)).subplots()
    kinds = np.array(result.kinds)
    # Rows are draws of every kind, columns prompts.
    draw_means = result.loss_change.double().cpu().numpy().mean(1)
    for row, line in enumerate(table.to_dict("records")):
        kind = str(line["kind"])
        drawn = draw_means[kinds == kind]
        # The subspace itself is no draw: a single dot would lie under its own mean.
        if len(drawn) > 1:
            ax.plot(drawn, np.full(len(drawn), row), "o", color="0.75", markersize=3)
        ax.plot(
            [line["low"], line["high"]], [row, row], color=_COLORS[kind], linewidth=2
        )
        ax.plot(line["loss_change"], row, "D", color=_COLORS[kind], markersize=6)
        ax.annotate(
            f"{line['removed']:.1%} removed",
            (1, row),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_yticks(range(len(table)), [_NAMES[kind] for kind in table["kind"]])
    # The first row of the table stands on top.
    ax.invert_yaxis()
    ax.set(xlabel="change in loss (nats per token)")
    subject = f"Removed from what blocks {result.side} · rank {result.rank}"
    labels.entitle(ax, _heading(subject, result.provenance))
    return ax


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

    Example:
        >>> subspace = tlc.directions.shared_subspace([trace], rank=3, k=4)
        >>> ax = tlc.plots.plot_subspace(subspace)
        >>> [line.get_label() for line in ax.lines]
        ['written', 'read']
    """
    ax = ax or labels.new_figure(6.4, 4.4).subplots()
    places = np.arange(1, result.rank + 1)
    # The band is of both sides and all draws together: random frames know no side.
    null = result.null_eigenvalues.flatten(0, 1).cpu().numpy()
    ax.fill_between(
        places, null.min(0), null.max(0), color="0.75", linewidth=0, label="random"
    )
    for side, name, color in ((1, "written", "C3"), (0, "read", "C0")):
        values = result.eigenvalues[side].cpu().numpy()
        ax.plot(places, values, marker="o", color=color, label=name)
    ax.set(
        xlabel="direction, the most shared first", ylabel="share of blocks and prompts"
    )
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    subject = f"Directions that blocks share · k = {result.k}"
    heading = [_heading(subject, result.provenance), *_stability(result)]
    labels.finish_lines(ax, "\n".join(heading))
    return ax


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
    return f"{subject} · {labels.short_path(str(provenance.get('model')))}"
