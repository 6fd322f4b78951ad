"""Does coupling explain the lens? The mean of products of blocks, against the product of
their means.

    python demos/studies/lens_products.py --models smollm2-135m path/to/model.gguf
    python demos/studies/lens_products.py --table  # only prints

Blocks `B = I + J` at the last token of paragraphs of Python's documentation. For the
span from each layer to the last block, and for each pair of neighbours: the defect
`‖E[B ⋯ B] − E[B] ⋯ E[B]‖ / ‖E[B ⋯ B]‖`; for pairs also their covariation `‖E[δ' δ]‖ /
√(E‖δ'‖² E‖δ‖²)`, δ being a block's departure from its mean. Beside them:

- *other prompts*: each block from a prompt of its own (a random order of prompts for
  each block): what so few prompts make by chance;
- *turned*: a random rotation between neighbours, the same for all prompts: the blocks of
  `dynamics.products` that are turned at random.

If averages commuted with products, the defect would be that of *other prompts*; if
coupling had no part in it, covariation would be that of *turned* and not go with the
coupling of the pair. `lens_products.md` says what each outcome means; it was committed
before this was run. One file of results for each model, in
`demos/studies/results/lens_products`; what is there is not run again. Minutes for each
model; `SMALL=1`: seconds, of three prompts and four blocks.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
import pandas
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

import tl_coupling as tlc
from paths import distinct_texts
from shared_directions import keep
from tl_coupling.measures import mean_random_coupling, random_rotations
from tl_coupling.pictures import labels

IS_SMALL = bool(os.environ.get("SMALL"))
N_TEXTS = 3 if IS_SMALL else 12
N_DRAWS = 2 if IS_SMALL else 5
LAYERS = range(4) if IS_SMALL else None
K = 10
OWN, OTHER_PROMPTS, TURNED = "own", "other prompts", "turned"
CONTROL_LABELS = {
    OWN: "the blocks",
    OTHER_PROMPTS: "each from another prompt",
    TURNED: "turned at random",
}
RESULTS = Path(__file__).parent / "results" / "lens_products"
# Blocks of one prompt, and of several.
Blocks = Float[Tensor, "n_layers d d"]
Prompts = Float[Tensor, "n_prompts n_layers d d"]


def products(B: Blocks, rotations: Blocks | None = None) -> Blocks:
    """Return `B[-1] ⋯ B[l]` of each l, with a rotation before each block but the first."""
    product = B[-1]
    found = [product]
    for layer in reversed(range(len(B) - 1)):
        if rotations is not None:
            product = product @ rotations[layer]
        product = product @ B[layer]
        found.append(product)
    return torch.stack(found[::-1])


def defects(B: Prompts, rotations: Blocks | None = None) -> Float[Tensor, " n_layers"]:
    """Return the defect of the span from each layer to the last block."""
    mean_product = torch.zeros_like(B[0])
    for blocks in B:
        mean_product += products(blocks, rotations) / len(B)
    product_of_means = products(B.mean(0), rotations)
    difference = torch.linalg.matrix_norm(mean_product - product_of_means)
    return difference / torch.linalg.matrix_norm(mean_product)


def covariations(
    B: Prompts, rotations: Blocks | None = None
) -> Float[Tensor, " n_pairs"]:
    """Return how far each pair of neighbours departs from its means together."""
    departures = B - B.mean(0)
    sizes = departures.square().sum((-2, -1)).mean(0)
    found = []
    for layer in range(B.shape[1] - 1):
        later = departures[:, layer + 1]
        if rotations is not None:
            later = later @ rotations[layer]
        together = torch.bmm(later, departures[:, layer]).mean(0)
        found.append(together.norm() / (sizes[layer] * sizes[layer + 1]).sqrt())
    return torch.stack(found)


def of_other_prompts(B: Prompts, generator: torch.Generator) -> Prompts:
    """Return blocks of which each is from a prompt of its own."""
    shuffled = torch.empty_like(B)
    for layer in range(B.shape[1]):
        order = torch.randperm(len(B), generator=generator)
        shuffled[:, layer] = B[order, layer]
    return shuffled


def rows_of(B: Prompts, coupling: Sequence[float]) -> list[dict[str, float | str]]:
    """Return both measures of the blocks and of every draw of the controls."""
    n_layers, d = B.shape[1:3]
    rows: list[dict[str, float | str]] = []

    def note(control: str, draw: int, B: Prompts, rotations: Blocks | None) -> None:
        measured = {
            "defect": defects(B, rotations),
            "covariation": covariations(B, rotations),
        }
        rows.extend(
            {
                "measure": name,
                "control": control,
                "draw": draw,
                "layer": layer,
                "value": float(value),
            }
            for name, values in measured.items()
            for layer, value in enumerate(values)
        )

    note(OWN, 0, B, None)
    for draw in tqdm(range(N_DRAWS), desc="draws"):
        generator = torch.Generator().manual_seed(draw)
        note(OTHER_PROMPTS, draw, of_other_prompts(B, generator), None)
        rotations = random_rotations(n_layers - 1, d, generator=generator).to(B)
        note(TURNED, draw, B, rotations)
    rows.extend(
        {
            "measure": "coupling",
            "control": OWN,
            "draw": 0,
            "layer": layer,
            "value": value,
        }
        for layer, value in enumerate(coupling)
    )
    return rows


def measured(name: str, n_texts: int) -> pandas.DataFrame:
    """Measure a model on so many texts."""
    model: nn.Module = tlc.load_model(name)
    blocks: list[Tensor] = []
    couplings: list[np.ndarray] = []
    for text in tqdm(distinct_texts(n_texts), desc="texts"):
        J = tlc.block_jacobians(tlc.trace(model, text), LAYERS, progress=False)
        coupling = tlc.comparisons.jacobian_coupling(J, K).coupling()
        couplings.append(coupling.diagonal(1).numpy() - mean_random_coupling(K))
        J.diagonal(dim1=-2, dim2=-1).add_(1)
        blocks.append(J)
    B = torch.stack(blocks)
    blocks.clear()
    rows = rows_of(B, np.mean(couplings, 0).tolist())
    return pandas.DataFrame(rows).assign(n_prompts=len(B))


def by_control(table: pandas.DataFrame, measure: str) -> pandas.DataFrame:
    """Return means over draws, a column for each control and a row for each layer."""
    of_measure = table[table["measure"] == measure]
    return of_measure.pivot_table(index="layer", columns="control", values="value")


def shifted_p(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the rank correlation, and its p by shifting one series around its end."""
    correlations = [
        float(stats.spearmanr(x, np.roll(y, shift)).statistic)
        for shift in range(len(x))
    ]
    own = abs(correlations[0]) - 1e-12
    return correlations[0], float(np.mean(np.abs(correlations) >= own))


def without_depth(values: np.ndarray) -> np.ndarray:
    """Return ranks less what a line over depth says of them."""
    ranks = stats.rankdata(values)
    depth = np.arange(len(ranks))
    return ranks - np.polyval(np.polyfit(depth, ranks, 1), depth)


def report(name: str, table: pandas.DataFrame) -> str:
    """Return what the results of a model say."""
    spans = by_control(table, "defect")
    pairs = by_control(table, "covariation")
    coupling = by_control(table, "coupling")[OWN].to_numpy()
    first, middle = spans.iloc[0], spans.iloc[len(spans) // 2]
    drawn = table[(table["measure"] == "covariation") & (table["control"] == TURNED)]
    of_turned = drawn.pivot_table(index="layer", columns="draw", values="value")
    above = int((pairs[OWN] > of_turned.max(axis=1)).sum())
    below = int((pairs[OWN] < of_turned.min(axis=1)).sum())
    shown = "  ".join(f"{control} {{:.3f}}" for control in (OWN, OTHER_PROMPTS, TURNED))
    controls = [OWN, OTHER_PROMPTS, TURNED]
    return "\n".join(
        [
            f"{name}: {int(table['n_prompts'].iloc[0])} texts, {len(spans)} blocks",
            "  defect from the first block on: " + shown.format(*first[controls]),
            "  defect from the middle on:      " + shown.format(*middle[controls]),
            "  covariation of neighbours, mean: "
            + shown.format(*pairs[controls].mean()),
            f"  above all draws of turned blocks at {above} of {len(pairs)} pairs, below "
            f"all at {below}",
            f"  defect above that of other prompts: {first[OWN] - first[OTHER_PROMPTS]:.3f}",
            "  with coupling over pairs:",
            *correlations_with(coupling, pairs),
        ]
    )


def correlations_with(coupling: np.ndarray, pairs: pandas.DataFrame) -> list[str]:
    """Return lines on ρ with coupling: of the blocks, of the noise of few prompts that
    *other prompts* has too, and of what is above it.
    """
    covariations = {
        OWN: pairs[OWN],
        OTHER_PROMPTS: pairs[OTHER_PROMPTS],
        f"{OWN} less {OTHER_PROMPTS}": pairs[OWN] - pairs[OTHER_PROMPTS],
    }
    lines = []
    for name, values in covariations.items():
        covariation = values.to_numpy()
        rho, p = shifted_p(coupling, covariation)
        within = shifted_p(without_depth(coupling), without_depth(covariation))
        lines.append(
            f"    {name}: ρ {rho:+.2f} (p {p:.2f}), depth held fixed "
            f"{within[0]:+.2f} (p {within[1]:.2f})"
        )
    return lines


def draw(tables: Mapping[str, pandas.DataFrame]) -> Figure:
    """Draw the defect of spans and the covariation of neighbours, a column a model."""
    figure = labels.new_figure(labels.PHONE_WIDTH, 5.4)
    grid = figure.subplots(2, len(tables), squeeze=False, sharey="row")
    colors = {OWN: labels.BLUE, OTHER_PROMPTS: labels.ORANGE}
    for column, (name, table) in zip(grid.T, tables.items(), strict=True):
        for ax, measure in zip(column, ("defect", "covariation"), strict=True):
            for control in (OWN, OTHER_PROMPTS, TURNED):
                values = by_control(table, measure)[control]
                # The last block alone has no defect, up to rounding.
                values = values[: len(by_control(table, "covariation"))]
                look = labels.NULL_LINE
                if control in colors:
                    look = labels.marked(colors[control], len(values))
                ax.plot(values, label=CONTROL_LABELS[control], **look)
            ax.set_yscale("log")
            ax.tick_params(labelsize="small")
        n_prompts = int(table["n_prompts"].iloc[0])
        # A column has room for fourteen letters.
        lines = wrap(name.replace("-Coder-", "- Coder-"), 14)
        heading = "\n".join([*lines, f"{n_prompts} texts"])
        column[0].set_title(heading, fontsize="small")
    for row, y_label in zip(grid, ("defect", "covariation"), strict=True):
        row[0].set_ylabel(y_label, fontsize="small")
        # Less than a decade has no power of ten to name.
        row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter(NullFormatter())
    middle = grid[:, len(tables) // 2]
    middle[0].set_xlabel("from layer … to the last", fontsize="small")
    middle[1].set_xlabel("layer … and the next", fontsize="small")
    labels.legend_below(figure, grid[0, 0])
    labels.entitle(figure, "Products of mean blocks, and means of products")
    return figure


def main(
    description: str | None = __doc__,
    results: Path = RESULTS,
    out: Path = Path("out/lens_products"),
    measure: Callable[[str, int], pandas.DataFrame] = measured,
    say: Callable[[str, pandas.DataFrame], str] = report,
) -> None:
    """Measure models, and print what the results say."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--texts", type=int, default=N_TEXTS)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(
        "--table", action="store_true", help="print the committed results alone"
    )
    options = parser.parse_args()
    if options.table:
        for path in sorted(results.glob("*.csv")):
            print(say(path.stem, pandas.read_csv(path)))
        return
    for name in options.models:
        path = options.out / f"{Path(name).stem}.csv"
        if not path.exists():
            keep(measure(name, options.texts), path)
        print(say(path.stem, pandas.read_csv(path)))


if __name__ == "__main__":
    main()
