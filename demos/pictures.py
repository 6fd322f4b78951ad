"""The pictures of README and of the page of findings, from the package's own plots and
from the committed results of studies.

    python demos/pictures.py --out docs
    python demos/pictures.py --out docs --only ablation paths  # some of them

Three minutes of one core.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

import tl_coupling as tlc
from tl_coupling.pictures import labels
from tl_coupling.results import CONTROLS as CONTROL_NAMES
from tl_coupling.results import RANDOM_STEPS, RANDOM_SUBSPACES, ROTATIONS

sys.path.append(str(Path(__file__).parent / "studies"))
import block_costs_report
import capacity_report
import composition as composition_study
import coupling_returns as returns_study
import coupling_returns_report
import gap_report
import lens_products as lens_study
import treatment as treatment_study
import treatment_coupled as coupled_study
import treatment_coupled_report
import treatment_report
from finding_cards import CARDS
from study_names import model_name

RESULTS = Path(__file__).parent / "studies" / "results"
K = 10
PROMPT = "What is the capital of France? The capital is"
COLORS = {"trained": labels.TRAINED, "untrained": labels.UNTRAINED}
# Of the studies' files, in the order of the picture.
CONTROLS = ("shared", "principal", "span", "norm_matched", "unshared", "low_gain")
# Of SmolLM2, in tokens.
VOCABULARY = 49_152
# Pages are 736 pixels wide: two pixels of a picture to one of theirs.
DPI = 2 * 736 / labels.PAGE_WIDTH


def traces() -> dict[str, tlc.Trace]:
    """Return traces of SmolLM2-135M-Instruct and its untrained twin."""
    return {
        name: tlc.trace(
            tlc.load_model(
                "smollm2-135m", untrained=name == "untrained", label="SmolLM2-135M"
            ),
            PROMPT,
        )
        for name in COLORS
    }


def coupling() -> Figure:
    """Coupling of every two layers, trained and untrained."""
    trained, untrained = [tlc.depth_coupling(trace, k=K) for trace in traces().values()]
    figure = tlc.plot_coupling(trained, untrained=untrained).figure
    ratio = trained.mean() / trained.null()
    labels.entitle(
        figure,
        f"Trained layers couple {ratio:.1f} times as much as {RANDOM_SUBSPACES}\n"
        f"SmolLM2-135M · k = {K} · {RANDOM_SUBSPACES} {trained.null():.3f} · “{PROMPT}”",
    )
    return figure


def carriers() -> Figure:
    """Shares of attention and MLP by layer, trained and untrained."""
    figure = Figure(figsize=(labels.PHONE_WIDTH, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    results = {name: tlc.carriers(trace, k=K) for name, trace in traces().items()}
    for ax, (name, result) in zip(axes, results.items(), strict=True):
        tlc.plots.plot_carriers_by_depth(result, ax=ax)
        ax.set_title(name, fontsize="medium")
        ax.get_legend().remove()
    axes[1].set_ylabel("")
    labels.legend_below(figure, axes[0])
    branches = results["trained"].by_branch()
    place = branches.labels.index("attn_out")
    carried, size = (
        float(branches.mean(share)[place])
        for share in ("diagonal_share", "jacobian_share")
    )
    title = f"Attention carries {carried:.0%} of coupling; it is {size:.0%} of J"
    labels.entitle(figure, f"{title}\nSmolLM2-135M, trained · k = {K} · “{PROMPT}”")
    return figure


def products() -> Figure:
    """What the blocks amplify together, trained and untrained."""
    results = {
        name: tlc.dynamics.products(trace, n_draws=60, progress=False)
        for name, trace in traces().items()
    }
    return tlc.plots.plot_products(results)


def heads() -> Figure:
    """Which layers have heads that share axes, trained and untrained."""
    results = {
        name: tlc.comparisons.head_coupling(trace, k=K, progress=False)
        for name, trace in traces().items()
    }
    return tlc.plots.plot_head_coupling(results)


def ablation() -> Figure:
    """What removing shared directions costs, beside controls; the first token is kept."""
    figure = labels.new_figure(labels.PHONE_WIDTH, 3.6)
    names = [fill(CONTROL_NAMES[kind], 20) for kind in CONTROLS]
    costs = []
    for ax, side in zip(figure.subplots(1, 2), ("read", "write"), strict=True):
        path = RESULTS / "shared_directions" / f"smollm2-135m-{side}-1.csv"
        rows = pandas.read_csv(path).set_index("kind").loc[list(CONTROLS)]
        places = -np.arange(len(rows))
        colors = [labels.VERMILION, *["0.6"] * (len(rows) - 1)]
        ax.barh(places, rows["loss_change"], color=colors)
        ax.hlines(places, rows["low"], rows["high"], color="black")
        ax.set_yticks(places, names if side == "read" else [], fontsize="small")
        ax.set_title(f"that blocks {side}", fontsize="medium")
        ax.tick_params(axis="x", labelsize="small")
        costs.append(f"{rows['loss_change'].iloc[0]:.1f}")
        if side == "write":
            uniform = np.log(VOCABULARY) - rows["loss"].iloc[0]
            ax.axvline(uniform, **labels.NULL_LINE)
            ax.annotate(
                "a uniform\nprediction",
                (uniform, -4.5),
                (-6, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize="small",
            )
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("change in loss, nats per token", fontsize="small")
    title = f"Shared directions removed cost {' and '.join(costs)} nats"
    small = "read and written, beside others of the same number"
    labels.entitle(
        figure, f"{title}\n{small} · SmolLM2-135M, 40 texts, 95 % t intervals"
    )
    return figure


def rotation() -> Figure:
    """What rotated blocks cost by angle: together, apart, and the control."""
    sides = {
        "write": "what blocks write turns: R f(h)",
        "read": "what they read turns: f(R h)",
        "both": "both turn: R f(Rᵀ h)",
    }
    rows = pandas.concat(
        pandas.read_csv(RESULTS / "rotation" / f"{side}.csv") for side in sides
    )
    uniform = np.log(VOCABULARY) - rows.drop_duplicates("text")["loss"].mean()
    n_texts = rows["text"].nunique()
    figure = labels.new_figure(labels.PHONE_WIDTH, 6.6)
    kinds = {
        "together": labels.VERMILION,
        "apart": labels.BLUE,
        "shrunk": "0.5",
    }
    axes = figure.subplots(3, 1, sharex=True, sharey=True)
    for ax, (side, title) in zip(axes, sides.items(), strict=True):
        of_side = rows[rows["side"] == side]
        for kind, color in kinds.items():
            of_kind = of_side[of_side["kind"] == kind].groupby("angle")["loss_change"]
            half = stats.t.ppf(0.975, n_texts - 1) * of_kind.sem()
            means = of_kind.mean()
            style = {"color": color, "label": ROTATIONS[kind], "markersize": 4}
            marker = labels.MARKERS.get(color, "x")
            ax.plot(means.index, means, marker=marker, **style)
            ax.vlines(means.index, means - half, means + half, color=color)
        ax.axhline(uniform, label="a uniform prediction", **labels.NULL_LINE)
        ax.set_title(title, fontsize="medium")
        ax.set_xticks(sorted(of_side["angle"].unique()))
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set(ylabel="change in loss, nats per token")
    axes[-1].set(xlabel="angle θ (degrees)")
    labels.legend_below(figure, axes[0])
    title = "What rotated blocks cost, by angle"
    small = (
        "Where reads turn, one rotation for all blocks costs · less than one each, to "
        "45° · writes alone: nothing shown at 10° and 20°, · less at 45°, more at 90° "
        f"(by Holm) · SmolLM2-135M, {n_texts} texts, 95 % t intervals"
    )
    labels.entitle(figure, f"{title}\n{small}")
    return figure


def paths() -> Figure:
    """Shapes of trajectories, and what of the stream blocks' eigenvectors hold."""
    shapes = pandas.read_csv(RESULTS / "paths" / "shapes.csv")
    others = shapes[shapes["tokens"] == "others"]
    figure = labels.new_figure(labels.PHONE_WIDTH, 5.8)
    grid = figure.add_gridspec(2, 2)
    left, middle = (figure.add_subplot(grid[0, place]) for place in (0, 1))
    right = figure.add_subplot(grid[1, :])
    histograms(left, others, "line_shape_score", "line-shape score\n(1: a line)")
    n_layers = 30
    random_score = n_layers**0.5
    left.axvline(random_score, label=RANDOM_STEPS, **labels.NULL_LINE)
    histograms(middle, others, "expodistance", "expodistance\n(0: exponential)")
    middle.set_ylabel("")
    by_layer = pandas.read_csv(RESULTS / "paths" / "eigenvectors.csv")
    for name, color in COLORS.items():
        of_model = by_layer[by_layer["model"] == name].groupby("layer")
        for column, style in (("write", "--"), ("eigenvectors", "-")):
            values = of_model[column].mean()
            label = {"write": "written", "eigenvectors": "eigenvectors"}[column]
            right.plot(values, style, color=color, label=f"{label}, {name}")
    right.set(
        xlabel="layer", ylabel=f"share of ‖x‖²\nin {K} directions", ylim=(0, None)
    )
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize="small")
    labels.legend_below(figure, left, right)
    scores = others.groupby("model")["line_shape_score"].mean()
    title = (
        f"Line-shape score {scores['trained']:.2f} trained, "
        f"{scores['untrained']:.2f} untrained"
    )
    n_texts = int((others["model"] == "trained").sum())
    small = (
        f"{RANDOM_STEPS} {random_score:.2f} · SmolLM2-135M, means over {n_texts} texts"
    )
    below = f"below: share of the stream in {K} directions"
    labels.entitle(figure, f"{title}\n{small} · {below}")
    return figure


def histograms(ax: Axes, table: pandas.DataFrame, column: str, label: str) -> None:
    """Draw a column's distribution over texts for both models, on the same bins."""
    bins = np.histogram_bin_edges(table[column], 24).tolist()
    for name, color in COLORS.items():
        values = table.loc[table["model"] == name, column]
        ax.hist(values, bins, color=color, alpha=0.8, label=name)
    ax.set(xlabel=label, ylabel="texts")


def sizes() -> Figure:
    """What size explains of the scores in the paper's own table."""
    table = tlc.generalization.paper_table1()
    of_code = table["family"].isin(["CodeLlama", "CodeGemma"])
    return tlc.plots.plot_covariates(
        table[(table["variant"] == "base") & ~of_code],
        fig=labels.new_figure(labels.PHONE_WIDTH, 9.4),
    )


def redundancy() -> Figure:
    """What dropping, swapping and merging blocks of SmolLM2 costs, by two predictors."""
    data = xarray.load_dataset(RESULTS / "ladder" / "redundancy-smollm2-135m.nc")
    correlations = tlc.redundancy.redundancy_correlations(data)
    provenance = json.loads(data.attrs["provenance"])
    provenance["model"] = model_name(provenance["model"])
    data.attrs["provenance"] = json.dumps(provenance)
    return tlc.plots.plot_redundancy(data, correlations, k=K)


def block_costs() -> Figure:
    """Costs of blocks of several models against coupling, and given other predictors."""
    return block_costs_report.draw(
        block_costs_report.read_tables(RESULTS / "block_costs")
    )


def composition() -> Figure:
    """What is left of coupling without multiples of the identity, in four models."""
    return composition_study.draw(
        composition_study.read_tables(RESULTS / "composition")
    )


def capacity() -> Figure:
    """Coupling against the learning rate where held-out losses are equal."""
    table = pandas.read_csv(RESULTS / "capacity" / "measured.csv")
    return capacity_report.draw(table)


def gap() -> Figure:
    """Gap and coupling where training losses are equal, by what moves the gap."""
    return gap_report.draw(pandas.read_csv(RESULTS / "gap" / "measured.csv"))


def treatment() -> Figure:
    """Coupling raised and lowered by an objective, and the held-out loss."""
    folder = RESULTS / "treatment"
    curves, models = [
        treatment_study.read_tables(folder, name) for name in ("curves", "models")
    ]
    return treatment_report.draw(curves, models, k=8)


def treatment_coupled() -> Figure:
    """The same where models are coupled."""
    return treatment_coupled_report.draw(
        *coupled_study.read(RESULTS / "treatment_coupled")
    )


def returns() -> Figure:
    """Coupling of small models that are trained on, and their losses."""
    return coupling_returns_report.draw(
        returns_study.read_curves(RESULTS / "coupling_returns")
    )


def lens_products() -> Figure:
    """Products of means beside means of products, and blocks that vary together."""
    sources = ("smollm2-135m", "qwen2.5-coder-0.5b-instruct-q4_k_m")
    tables = {
        model_name(source): pandas.read_csv(lens_study.RESULTS / f"{source}.csv")
        for source in sources
    }
    later = pandas.read_csv(lens_study.RESULTS / "later" / "smollm2-135m.csv")
    tables["SmolLM2-135M to later tokens"] = later[later["tokens"] == "later"]
    return lens_study.draw(tables)


# README's picture lies beside the pages, those of findings in a folder.
PICTURES: dict[str, Callable[[], Figure]] = {
    "coupling.png": coupling,
    "pictures/carriers.png": carriers,
    "pictures/heads.png": heads,
    "pictures/products.png": products,
    "pictures/returns.png": returns,
    "pictures/lens-products.png": lens_products,
    "pictures/ablation.png": ablation,
    "pictures/rotation.png": rotation,
    "pictures/paths.png": paths,
    "pictures/sizes.png": sizes,
    "pictures/redundancy.png": redundancy,
    "pictures/block_costs.png": block_costs,
    "pictures/composition.png": composition,
    "pictures/capacity.png": capacity,
    "pictures/gap.png": gap,
    "pictures/treatment.png": treatment,
    "pictures/treatment-coupled.png": treatment_coupled,
    **{f"pictures/card-{name}.png": draw for name, draw in CARDS.items()},
}


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    names = {Path(path).stem: path for path in PICTURES}
    parser.add_argument("--only", nargs="+", choices=list(names), default=list(names))
    arguments = parser.parse_args()
    for name in arguments.only:
        path = arguments.out / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = PICTURES[names[name]]()
        # Cards are narrower than a page.
        dpi = 180 if name.startswith("card-") else DPI
        figure.savefig(path, dpi=dpi, metadata={"Software": None})
        print(path)


if __name__ == "__main__":
    main()
