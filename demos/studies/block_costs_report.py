"""The statistics, tables and figure of `block_costs.py`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy import stats

from study_names import model_name
from tl_coupling.pictures import labels

CHANGES = ("dropped", "merged")
# In the order in which they enter; depth has two columns.
PREDICTORS = {
    "influence": "block influence",
    "size": "‖J‖",
    "identity": "tr J / d",
    "energy": "captured energy",
    "depth": "depth and its square",
    "coupling": "coupling",
}
# Two outcomes are primary, the cost of either change.
LEVEL = 0.05 / len(CHANGES)
N_SHIFTS = 9_999
N_SIMULATED = 2 if os.environ.get("SMALL") else 200
N_SHIFTS_SIMULATED = 399
# Partial correlations.
PLANTED = (0.0, -0.2, -0.3, -0.4, -0.5, -0.6)
# Of a cost, in nats; below it, and below 0, costs are not told apart.
SMALLEST_COST = 1e-3
Vector = Float[np.ndarray, " n"]
Columns = Float[np.ndarray, "n columns"]


@dataclass(frozen=True)
class Blocks:
    """One model's blocks, or its neighbours, in their order.

    Attributes:
        cost: normal scores of the rise in loss.
        predictors: by name, of mean 0 and variance 1; `[n columns]`.
    """

    cost: Vector
    predictors: Mapping[str, Columns]

    def columns(self, names: Sequence[str]) -> Columns:
        """Return predictors side by side."""
        return np.hstack(
            [np.empty((len(self.cost), 0)), *map(self.predictors.get, names)]
        )


def read_tables(folder: Path) -> dict[str, pandas.DataFrame]:
    """Return the results of each model that is there."""
    return {path.stem: pandas.read_csv(path) for path in sorted(folder.glob("*.csv"))}


def blocks_of(
    table: pandas.DataFrame, change: str, n_ends: int = 0, scale: str = "ranks"
) -> Blocks:
    """Return one model's costs and predictors, means over texts, as normal scores.

    Args:
        table: of `block_costs.rows_of`.
        change: one of `CHANGES`.
        n_ends: how many are left out at either end of the model.
        scale: of costs, "ranks" or "log".
    """
    of_change = table[table["change"] == change]
    means = of_change.groupby("layer").mean(numeric_only=True)
    means = means.iloc[n_ends : len(means) - n_ends]
    # Neighbours of different kinds cannot be merged.
    means = means.dropna(subset="cost")
    depth = standard(means.index.to_numpy(float))
    predictors = {
        name: normal_scores(means[name].to_numpy())[:, None]
        for name in PREDICTORS
        if name != "depth"
    }
    predictors["depth"] = np.stack([depth, standard(depth**2)], 1)
    costs = means["cost"].to_numpy()
    if scale == "log":
        return Blocks(standard(np.log(costs.clip(SMALLEST_COST))), predictors)
    return Blocks(normal_scores(costs), predictors)


def normal_scores(x: Vector) -> Vector:
    """Return the normal scores of ranks, with mean 0 and variance 1."""
    return standard(stats.norm.ppf((stats.rankdata(x) - 0.5) / len(x)))


def standard(x: Vector) -> Vector:
    """Return x with mean 0 and variance 1."""
    return (x - x.mean()) / x.std()


def r_squared_left_out(models: Sequence[Blocks], names: Sequence[str]) -> list[float]:
    """Return each model's R² by slopes that are fitted to the others.

    Every model counts the same, however many blocks it has. Below 0 where the slopes of
    others predict worse than the mean.
    """
    found = []
    for i, model in enumerate(models):
        others = [other for j, other in enumerate(models) if j != i]
        weights = [len(other.cost) ** -0.5 for other in others]
        x = np.vstack(
            [w * o.columns(names) for w, o in zip(weights, others, strict=True)]
        )
        y = np.hstack([w * o.cost for w, o in zip(weights, others, strict=True)])
        slopes, *_ = np.linalg.lstsq(x, y)
        left = model.cost - model.columns(names) @ slopes
        found.append(float(1 - (left**2).mean()))
    return found


class Shifted(NamedTuple):
    """What a model says of a predictor, for every circular shift of it.

    The first shift is none. With r the part of the predictor that the model's other
    predictors do not give linearly, and y the costs:

    Attributes:
        product: means of r y, `[n_shifts]`.
        square: means of r².
        rest: the variance of y that the other predictors do not give.
    """

    product: Vector
    square: Vector
    rest: float


def shifted(model: Blocks, name: str, cost: Vector | None = None) -> Shifted:
    """Return what the model says of a predictor given all others, for every shift of
    the part that the others do not give. After a shift the others are taken out again.
    """
    y = model.cost if cost is None else cost
    Q = basis_of_others(model, name)
    r = own_parts(model, name)[1]
    # `[n n_shifts]`.
    rolled = np.stack([np.roll(r, shift) for shift in range(len(r))], 1)
    left = without(rolled, Q)
    return Shifted(
        left.T @ y / len(y),
        (left**2).mean(0),
        float((without(y[:, None], Q) ** 2).mean()),
    )


def basis_of_others(model: Blocks, name: str) -> Columns:
    """Return orthonormal columns that span a constant and all predictors but one.

    Raises:
        ValueError: too few blocks.
    """
    others = model.columns([other for other in PREDICTORS if other != name])
    n, n_columns = others.shape
    if n < n_columns + 3:
        raise ValueError(
            f"wanted {n_columns + 3} blocks or pairs at least, for {n_columns} other "
            f"predictors, got {n}: leave this model out"
        )
    return np.linalg.qr(np.column_stack([np.ones(n), others])).Q


def without(x: Columns, Q: Columns) -> Columns:
    """Return x without what lies in the span of Q's orthonormal columns."""
    return x - Q @ (Q.T @ x)


def added(
    product: Float[np.ndarray, "model draw"], square: Float[np.ndarray, "model draw"]
) -> Float[np.ndarray, " draw"]:
    """Return what a predictor adds to R² of the model that was left out, in the mean
    over models.

    The slope b is fitted to the others. r is orthogonal to the other predictors, so b r
    changes R² by `2 b mean(r y) − b² mean(r²)`, whatever their slopes are.
    """
    slopes = slopes_of_others(product, square)
    return (2 * slopes * product - slopes**2 * square).mean(0)


def slopes_of_others(
    product: Float[np.ndarray, "model draw"], square: Float[np.ndarray, "model draw"]
) -> Float[np.ndarray, "model draw"]:
    """Return the slope that is fitted to all models but one, for each that is left out."""
    return (product.sum(0) - product) / (square.sum(0) - square)


class Effect(NamedTuple):
    """What a predictor adds given all others.

    Attributes:
        added: to R² of the model that was left out, in the mean over models.
        p: the share of circular shifts that add as much, the unshifted one included.
        partial: each model's correlation of cost and predictor given the others.
        left: the share of the predictor's variance that the others do not give.
        slopes: fitted to all models but each.
    """

    added: float
    p: float
    partial: list[float]
    left: list[float]
    slopes: list[float]


def effect_of(
    of_models: Sequence[Shifted], n_shifts: int = N_SHIFTS, seed: int = 0
) -> Effect:
    """Test what a predictor adds, by circular shifts that are drawn for each model."""
    generator = np.random.default_rng(seed)
    drawn = [
        np.append(0, generator.integers(len(model.product), size=n_shifts))
        for model in of_models
    ]
    product, square = [
        np.stack([values[i] for values, i in zip(of_all, drawn, strict=True)])
        for of_all in zip(*[(m.product, m.square) for m in of_models], strict=True)
    ]
    values = added(product, square)
    return Effect(
        float(values[0]),
        # Rounding may part equal ones.
        float((values >= values[0] - 1e-12).mean()),
        [float(m.product[0] / (m.square[0] * m.rest) ** 0.5) for m in of_models],
        [float(m.square[0]) for m in of_models],
        slopes_of_others(product, square)[:, 0].tolist(),
    )


def share_found(models: Sequence[Blocks], effect: float) -> float:
    """Return how often an effect of coupling on these models' costs is found.

    The part of costs that the other predictors do not give is replaced by a mixture of
    coupling's own part, with this correlation, and of itself after a random circular
    shift. With an effect of 0 it is the share of false findings.
    """
    generator = np.random.default_rng(0)
    n_found = 0
    for seed in range(N_SIMULATED):
        of_models = []
        for model in models:
            rest, r = own_parts(model, "coupling")
            noise = np.roll(rest, generator.integers(len(rest)))
            mixed = effect * standard(r) + (1 - effect**2) ** 0.5 * standard(noise)
            cost = model.cost - rest + rest.std() * mixed
            of_models.append(shifted(model, "coupling", cost))
        n_found += effect_of(of_models, N_SHIFTS_SIMULATED, seed).p <= LEVEL
    return n_found / N_SIMULATED


def own_parts(model: Blocks, name: str) -> tuple[Vector, Vector]:
    """Return the parts of costs and of a predictor that the other predictors do not
    give.
    """
    Q = basis_of_others(model, name)
    both = np.stack([model.cost, model.predictors[name][:, 0]], 1)
    cost, predictor = without(both, Q).T
    return cost, predictor


def sentence_of(change: str, effect: Effect) -> str:
    """Return the sentence that the outcome earns; `block_costs.md` has them."""
    if effect.added <= 0 or effect.p > LEVEL:
        return (
            f"{change}: nothing is shown that coupling says of the cost beyond the other "
            "properties."
        )
    if max(effect.slopes) < 0:
        return (
            f"{change}: blocks that are coupled more cost less than their other "
            "properties say."
        )
    if min(effect.slopes) > 0:
        return (
            f"{change}: blocks that are coupled more cost more than their other "
            "properties say."
        )
    return f"{change}: what coupling says of the cost differs between models."


def stages(models: Mapping[str, Blocks]) -> pandas.DataFrame:
    """Return R² of the models that are left out, as predictors enter in order."""
    names = list(PREDICTORS)
    rows = {
        f"+ {PREDICTORS[names[n - 1]]}": r_squared_left_out(
            list(models.values()), names[:n]
        )
        for n in range(1, len(names) + 1)
    }
    table = pandas.DataFrame(rows, index=list(models)).T
    return table.assign(mean=table.mean(axis=1))


def effects(models: Mapping[str, Blocks]) -> pandas.DataFrame:
    """Return what each predictor adds, given all others, and each model's partial
    correlation with costs.
    """
    rows = []
    for name in PREDICTORS:
        # It has two columns.
        if name == "depth":
            continue
        effect = effect_of([shifted(model, name) for model in models.values()])
        partial = dict(zip(models, effect.partial, strict=True))
        known = {
            "added R²": effect.added,
            "p": effect.p,
            "own variance": np.mean(effect.left),
        }
        rows.append({"given all others": PREDICTORS[name]} | known | partial)
    return pandas.DataFrame(rows).set_index("given all others")


def agreement_of_halves(table: pandas.DataFrame, change: str, column: str) -> float:
    """Return Spearman's ρ over blocks of the means over the even and the odd texts."""
    of_change = table[table["change"] == change].dropna(subset="cost")
    halves = of_change.groupby([of_change["text"] % 2, "layer"])[column].mean()
    return float(stats.spearmanr(halves[0], halves[1]).statistic)


def print_report(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print all tables, and the sentence that each outcome earns."""
    show = "{:.3f}".format
    for change in CHANGES:
        models = {name: blocks_of(table, change) for name, table in tables.items()}
        n_blocks = ", ".join(f"{name} {len(m.cost)}" for name, m in models.items())
        print(f"\n{change}: {n_blocks}")
        for column in ("cost", "coupling"):
            halves = [
                f"{name} {agreement_of_halves(table, change, column):.2f}"
                for name, table in tables.items()
            ]
            print(f"ρ of {column} between halves of the texts: {', '.join(halves)}")
        print("\nR² of the model that is left out, as predictors enter")
        print(stages(models).to_string(float_format=show))
        print(
            "\nWhat each adds to it given all others; p of circular shifts; the share of "
            "its variance\nthat they do not give; each model's partial correlation"
        )
        print(effects(models).to_string(float_format=show))
        variants: dict[str, dict[str, object]] = {
            "without first and last": {"n_ends": 1},
            "logarithm of costs": {"scale": "log"},
        }
        for said, options in variants.items():
            print(f"coupling, {said}: {varied(tables, change, options)}")
        found = {
            partial: share_found(list(models.values()), partial) for partial in PLANTED
        }
        shares = ", ".join(
            f"{partial:+.1f} {share:.2f}" for partial, share in found.items()
        )
        print(f"share found at p ≤ {LEVEL:g}, by the partial correlation: {shares}")
        effect = effect_of([shifted(model, "coupling") for model in models.values()])
        print(sentence_of(change, effect))


def varied(
    tables: Mapping[str, pandas.DataFrame], change: str, options: Mapping[str, object]
) -> str:
    """Say what coupling adds with other options of `blocks_of`, in models that have
    blocks enough.
    """
    models = {}
    for name, table in tables.items():
        model = blocks_of(table, change, **options)
        try:
            models[name] = shifted(model, "coupling")
        except ValueError:
            continue
    effect = effect_of(list(models.values()))
    partial = ", ".join(
        f"{name} {value:+.2f}"
        for name, value in zip(models, effect.partial, strict=True)
    )
    return f"adds {effect.added:.3f}, p {effect.p:.3f}; {partial}"


def draw(tables: Mapping[str, pandas.DataFrame]) -> Figure:
    """Costs against coupling: a row for each change; as they are, and the parts of both
    that the other predictors do not give; a marker for each model.
    """
    figure = labels.new_figure(labels.PHONE_WIDTH, 5.2)
    grid = figure.subplots(2, 2, sharey=True)
    # Three that differ in lightness: small marks of other hues look alike to
    # colour-blind readers.
    colors = (labels.BLUE, labels.ORANGE, labels.BLACK)
    looks = [(color, labels.MARKERS[color]) for color in colors]
    for row, change in zip(grid, CHANGES, strict=True):
        for (name, table), (color, marker) in zip(tables.items(), looks, strict=False):
            model = blocks_of(table, change)
            cost, coupling = own_parts(model, "coupling")
            look = {"marker": marker, "color": color, "s": 16, "alpha": 0.8}
            row[0].scatter(
                model.predictors["coupling"][:, 0],
                model.cost,
                label=model_name(name),
                **look,
            )
            row[1].scatter(coupling, cost, **look)
        row[0].set_ylabel(f"cost, {change}")
    for ax, said in zip(grid[0], ("as they are", "given the others"), strict=True):
        ax.set_title(said, fontsize="medium")
    for ax in grid[1]:
        ax.set_xlabel("coupling")
    for ax in grid.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize="small")
    labels.legend_below(figure, grid[0, 0])
    title = "What blocks cost, against their coupling with others"
    labels.entitle(
        figure,
        f"{title}\nnormal scores of ranks within each model; right the · parts that block "
        "influence, ‖J‖, tr J / d, captured energy · and depth do not give",
    )
    return figure
