"""One small picture for each card of the page of findings.

A card is 350 pixels wide on the page, so each picture has one panel, few words, and
letters that are large enough there. `python demos/pictures.py` draws them with the
others: `--only card-depth card-training` some of them.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import composition as composition_study
import ladder
import tl_coupling as tlc
from study_names import MODEL_NAMES
from tl_coupling.pictures import color_scale, labels
from tl_coupling.results import CONTROLS, RANDOM_STEPS, RANDOM_SUBSPACES

RESULTS = Path(__file__).parent / "studies" / "results"
PROMPT = "What is the capital of France? The capital is"
K = 10
SIZE = 4.0, 2.5
# Over the axes, where it covers no mark.
LEGEND = {"loc": "outside upper center", "ncols": 2, "frameon": False, "fontsize": 9}


def card() -> tuple[Figure, Axes]:
    """Return the figure of a card and its only axes."""
    figure = Figure(figsize=SIZE, layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def depth() -> Figure:
    """Coupling of every two layers of SmolLM2-135M, trained and untrained."""
    figure = Figure(figsize=SIZE, layout="constrained")
    # Axes of fixed proportions would push their titles over the edge.
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.96))
    axes = figure.subplots(1, 2)
    axes[0].set_ylabel("layer")
    results = {}
    for name in ("trained", "untrained"):
        model = tlc.load_model("smollm2-135m", untrained=name == "untrained")
        results[name] = tlc.depth_coupling(tlc.trace(model, PROMPT), k=K)
    low, high = color_scale(list(results.values()), K)
    colors = labels.color_map(None).with_extremes(bad=labels.UNDEFINED)
    for ax, (name, result) in zip(axes, results.items(), strict=True):
        coupling = result.coupling(K).clone()
        coupling.fill_diagonal_(float("nan"))
        image = ax.imshow(coupling.numpy(), vmin=low, vmax=high, cmap=colors)
        ax.set_title(f"{name}: {result.mean():.3f}", fontsize=9)
        ax.set(xticks=[0, 10, 20, 29], yticks=[0, 10, 20, 29])
    figure.colorbar(
        image,
        ax=axes,
        orientation="horizontal",
        label=f"coupling ({RANDOM_SUBSPACES}: {result.null():.3f})",
        shrink=0.5,
        aspect=40,
        ticks=[0, 0.25, 0.5],
    )
    return figure


def composition() -> Figure:
    """Coupling above chance of four models, with and without multiples of the identity."""
    tables = composition_study.read_tables(RESULTS / "composition")
    styles = (
        ("trained", "raw", labels.BLUE, "o", 0.2),
        ("trained", "without identity", labels.ORANGE, "^", 0.0),
        ("untrained", "raw", labels.UNTRAINED, "s", -0.2),
    )
    descriptions = ("as it is", "without the identity", "untrained")
    names = list(MODEL_NAMES)[::-1]
    figure, ax = card()
    for (model, change, color, marker, shift), label in zip(
        styles, descriptions, strict=True
    ):
        for place, name in enumerate(names):
            table = tables[name]
            of_model = table[table["model"] == model]
            mean, half = composition_study.mean_and_error(of_model, change)
            ax.errorbar(
                mean,
                shift - place,
                xerr=half,
                fmt=marker,
                color=color,
                markersize=5,
                label=label if place == 0 else None,
            )
    ax.axvline(0, **labels.NULL_LINE)
    ax.set_yticks([-place for place in range(len(names))])
    ax.set_yticklabels([MODEL_NAMES[name] for name in names])
    ax.set_ylim(0.5 - len(names), 0.5)
    ax.set_xlabel(f"coupling above chance, k = {K}", loc="right")
    figure.legend(**LEGEND | {"ncols": 3, "columnspacing": 0.8, "handletextpad": 0.2})
    return figure


def trajectories() -> Figure:
    """Line-shape scores of 40 texts in SmolLM2-135M, trained and untrained."""
    shapes = pandas.read_csv(RESULTS / "paths" / "shapes.csv")
    others = shapes[shapes["tokens"] == "others"]
    figure, ax = card()
    bins = np.histogram_bin_edges(others["line_shape_score"], 24).tolist()
    for name, color, x, y in (
        ("trained", labels.TRAINED, 4.1, 10.4),
        ("untrained", labels.UNTRAINED, 5.58, 8),
    ):
        scores = others.loc[others["model"] == name, "line_shape_score"]
        ax.hist(scores, bins, color=color)
        ha = "center" if name == "trained" else "left"
        ax.annotate(name, (x, y), color=color, ha=ha)
    n_layers = 30
    ax.axvline(n_layers**0.5, **labels.NULL_LINE)
    arrow = {"arrowstyle": "-", "linewidth": 0.8}
    ax.annotate(
        RANDOM_STEPS,
        (n_layers**0.5, 14.2),
        (4.6, 14.2),
        va="center",
        fontsize=9,
        arrowprops=arrow,
    )
    ax.set(xlabel="line-shape score (1: a straight line)", ylabel="texts")
    ax.set(xlim=(3.7, 6.1), ylim=(0, 15))
    return figure


def training() -> Figure:
    """Coupling by training step in three seeds of a small GPT-NeoX, and its loss."""
    table = pandas.read_csv(RESULTS / "surge" / "measured.csv")
    base = table[table["variant"] == "base"]
    figure, ax = card()
    for _, of_seed in base.groupby("run"):
        ax.plot(
            of_seed["checkpoint"], of_seed["coupling"], color=labels.BLUE, linewidth=1.2
        )
    means = base.groupby("checkpoint")[["loss"]].mean()
    for step, y, ha in ((0, 0.29, "left"), (16, 0.57, "center"), (512, 0.17, "right")):
        text = f"loss {means.loc[step, 'loss']:.1f}"
        ax.annotate(text, (step, y), ha=ha, color=labels.BLUE)
    null = tlc.measures.mean_random_coupling(5)
    ax.axhline(null, **labels.NULL_LINE)
    ax.annotate(RANDOM_SUBSPACES, (512, null - 0.01), va="top", ha="right", fontsize=9)
    # Steps are powers of two, and 0.
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xticks([0, 1, 4, 16, 64, 512], ["0", "1", "4", "16", "64", "512"])
    ax.minorticks_off()
    ax.set_xlim(-0.2, 700)
    ax.set(xlabel="training step", ylabel="coupling, k = 5", ylim=(0, 0.66))
    return figure


def generalization() -> Figure:
    """Coupling of models with one held-out loss, by the learning rate and the width."""
    table = pandas.read_csv(RESULTS / "capacity" / "measured.csv")
    at_mark = table[(table["mark"] == "bigram") & (table["size"] == "K = 8")]
    figure, ax = card()
    # The looks of the page's picture of the same models.
    for width, look in labels.shaded(at_mark["width"]).items():
        of_width = at_mark[at_mark["width"] == width]
        ax.plot(
            of_width["learning_rate"],
            of_width["above_chance"],
            linestyle="",
            markersize=3,
            alpha=0.5,
            **look,
        )
        means = of_width.groupby("learning_rate")["above_chance"].mean()
        ax.plot(means, label=f"width {width}", **look)
    ax.axhline(0, **labels.NULL_LINE)
    ax.annotate(RANDOM_SUBSPACES, (0.001, 0), va="bottom", ha="left", fontsize=9)
    rates = sorted(at_mark["learning_rate"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    loss = at_mark["loss_held_out"].mean()
    ax.set(
        xlabel=f"learning rate, all at a held-out loss of {loss:.2f}",
        ylabel="coupling: share above chance",
        ylim=(-0.03, 0.4),
    )
    ax.legend(frameon=False)
    return figure


def redundancy() -> Figure:
    """Spearman's ρ of what changing a block costs, with coupling, given depth or not, and
    with block influence.
    """
    data = xarray.load_dataset(RESULTS / "ladder" / "redundancy-smollm2-135m.nc")
    given_depth = ladder.given_depth(data, K)["given_middle"]
    correlations = tlc.redundancy.redundancy_correlations(data).sel(blocks="all", k=K)
    figure, ax = card()
    styles = (
        ("coupling", labels.BLUE, "o", "coupling"),
        ("block_influence", labels.ORANGE, "^", "block influence"),
    )
    names = {
        "dropped": "block dropped",
        "swapped": "neighbours\nswapped",
        "merged": "neighbours\nmerged",
    }
    for predictor, color, marker, label in styles:
        for place, change in enumerate(names):
            of_change = correlations.sel(change=change)
            low, high = of_change[f"{predictor}_interval"].values
            ax.hlines(-place, low, high, color=color, linewidth=2)
            ax.plot(
                float(of_change[predictor]),
                -place,
                marker,
                color=color,
                label=label if place == 0 else None,
            )
    places = [-place - 0.25 for place in range(len(names))]
    ax.plot(
        given_depth[list(names)],
        places,
        "o",
        color=labels.BLUE,
        markerfacecolor="white",
        label="coupling, given depth",
    )
    ax.axvline(0, **labels.NULL_LINE)
    ax.set_yticks([0, -1, -2], list(names.values()))
    ax.set(xlabel="Spearman's ρ with the change in loss", xlim=(-1, 1))
    ax.set_ylim(-2.5, 0.5)
    figure.legend(**LEGEND | {"ncols": 3, "columnspacing": 0.8, "handletextpad": 0.2})
    return figure


def heads_and_mlps() -> Figure:
    """Excess of each branch of SmolLM2-135M, beside random singular vectors' band."""
    figure, ax = card()
    names = {
        "attn_out": "attention",
        "mlp_out": "MLP",
        "mlp∘attn": "MLP acting on\nattention",
    }
    styles = ((False, labels.TRAINED, "o", 0.12), (True, labels.UNTRAINED, "s", -0.12))
    for untrained, color, marker, shift in styles:
        model = tlc.load_model("smollm2-135m", untrained=untrained)
        branches = tlc.carriers(tlc.trace(model, PROMPT), k=K).by_branch()
        excess = dict(
            zip(branches.labels, branches.mean("excess").tolist(), strict=True)
        )
        for place, label in enumerate(names):
            low, high = branches.null_interval(label)
            ax.hlines(shift - place, low, high, color="0.85", linewidth=8)
            ax.plot(excess[label], shift - place, marker, color=color)
        ax.plot(
            [], [], marker, color=color, label="untrained" if untrained else "trained"
        )
    ax.plot([], [], color="0.85", linewidth=8, label="95 % of random")
    ax.axvline(0, **labels.NULL_LINE)
    ax.set_yticks([0, -1, -2], list(names.values()))
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.set_xlabel("share of coupling minus share of J")
    ax.set_ylim(-2.5, 0.5)
    figure.legend(**LEGEND | {"ncols": 3, "columnspacing": 1, "handletextpad": 0.6})
    return figure


def amplification() -> Figure:
    """Gain in log σ₁ of the product of blocks on each of 24 prompts, by task."""
    table = pandas.read_csv(RESULTS / "gains" / "measured.csv")
    figure, ax = card()
    tasks = sorted(table["task"].unique())
    styles = (
        ("main", labels.TRAINED, "o", 0.13),
        ("untrained", labels.UNTRAINED, "s", -0.13),
    )
    for checkpoint, color, marker, shift in styles:
        of_model = table[table["model"] == f"smollm2-135m@{checkpoint}"]
        places = [shift - tasks.index(task) for task in of_model["task"]]
        name = "trained" if checkpoint == "main" else checkpoint
        ax.plot(of_model["gain"], places, marker, color=color, alpha=0.7, label=name)
    ax.axvline(0, **labels.NULL_LINE)
    ax.set_yticks([-place for place in range(len(tasks))], tasks)
    ax.set_xlabel("gain in log σ₁ over blocks turned at random", loc="right")
    figure.legend(**LEGEND)
    return figure


def directions() -> Figure:
    """Cost of removing shared directions, and others of the same gain, in two models."""
    figure, ax = card()
    models = {"smollm2-135m": "SmolLM2", "gemma-3-270m-q4_k_m": "Gemma"}
    styles = (
        ("shared", labels.VERMILION, "s", CONTROLS["shared"]),
        ("unshared", labels.BLUE, "o", CONTROLS["unshared"]),
    )
    names = []
    for model, short in models.items():
        for side in ("read", "write"):
            path = RESULTS / "shared_directions" / f"{model}-{side}-1.csv"
            rows = pandas.read_csv(path).set_index("kind")
            for kind, color, marker, _ in styles:
                row = rows.loc[kind]
                ax.hlines(-len(names), row["low"], row["high"], color=color)
                ax.plot(row["loss_change"], -len(names), marker, color=color)
            names.append(f"{short}, {side}")
    for _, color, marker, label in styles:
        ax.plot([], [], marker, color=color, label=label)
    ax.set_yticks([-place for place in range(len(names))], names)
    ax.set_xscale("log")
    ax.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    ax.set_ylim(-len(names) + 0.6, 0.4)
    ax.set_xlabel("rise in loss when ten are removed, nats", loc="right")
    figure.legend(**LEGEND)
    return figure


# By the name of the page under docs/findings.
def treatment() -> Figure:
    """Held-out loss less that of the loss alone, against coupling, by objective."""
    figure, ax = card()
    models = pandas.read_csv(RESULTS / "treatment_coupled" / "models-coupled.csv")
    wide = models.pivot(
        index="seed",
        columns="arm",
        values=["coupling in the band", "held-out loss in the band"],
    )
    coupling, loss = (wide[name] for name in wide.columns.levels[0])
    looks = {"down": (labels.VERMILION, "s"), "up": (labels.BLUE, "^")}
    for arm, (color, marker) in looks.items():
        ax.plot(
            coupling[arm],
            loss[arm] - loss["loss alone"],
            marker,
            color=color,
            markersize=5,
            alpha=0.7,
            label=f"coupling {arm}",
        )
    without = coupling["loss alone"]
    ax.plot(without, 0 * without, "o", color=labels.BLACK, label="loss alone")
    ax.axvline(tlc.measures.mean_random_coupling(8), **labels.NULL_LINE)
    ax.set(
        xlabel=f"coupling (dashed: {RANDOM_SUBSPACES})",
        ylabel="held-out loss less that of\nthe loss alone, nats",
    )
    figure.legend(**LEGEND | {"ncols": 3})
    return figure


CARDS: dict[str, Callable[[], Figure]] = {
    "depth": depth,
    "composition": composition,
    "trajectories": trajectories,
    "training": training,
    "generalization": generalization,
    "treatment": treatment,
    "redundancy": redundancy,
    "heads-and-mlps": heads_and_mlps,
    "amplification": amplification,
    "directions": directions,
}
