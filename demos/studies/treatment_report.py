"""The statistics, tables, sentence and figure of `treatment.py`."""

from functools import cache
from itertools import pairwise, product

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from tl_coupling.measures import mean_random_coupling
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from vit_report import readable

# All of this was decided before the models were trained: see treatment.md.
CELL = ["part", "text", "learning_rate", "weight"]
ALONE = "loss alone"
# What is compared, and what with.
CONTRASTS = (
    ("up", "placebo up"),
    ("down", "placebo down"),
    ("up", "twisted up"),
    ("down", "twisted down"),
    ("up", ALONE),
    ("down", ALONE),
    ("placebo up", ALONE),
    ("placebo down", ALONE),
    ("twisted up", ALONE),
    ("twisted down", ALONE),
    ("less identity", ALONE),
    (f"{ALONE} × 0.8", ALONE),
    (f"{ALONE} × 1.25", ALONE),
)
# Nats above the worst last training loss of a cell and seed, between which a model's
# held-out loss is averaged.
BAND = (0.02, 0.2)
N_IN_BAND = 10
OUTCOME = "held-out loss in the band"
STEP = "step in the band"
PRIMARY_CONTRASTS = CONTRASTS[:2]
# Loss alone at these shares of the learning rate says what speed does to the outcome.
SPEEDS = (0.8, 1.25)
# The smallest effect of interest, in nats.
MARGIN = 0.03
# Of how many numbers all changes of sign are made.
MOST_SIGNS = 16
MADE_OF = [
    "coupling",
    "coupling_without_identity",
    "identity_share",
    "captured_energy",
    "size_of_J",
    "line_shape_score",
]
# How far the blocks' weights went, where that was kept.
MOVED = ["weights_norm", "weights_moved"]
LOOKS = {
    ALONE: (labels.BLACK, "-"),
    "up": (labels.BLUE, "-"),
    "placebo up": (labels.SKY, "--"),
    "twisted up": (labels.GREEN, ":"),
    "down": (labels.VERMILION, "-"),
    "placebo down": (labels.ORANGE, "--"),
    "twisted down": (labels.PINK, "-."),
}


def tables_of_part(table: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Return each model's outcomes; coupling and losses on the way, of each seed and in
    the mean over seeds.

    `table` has one row per model and step, of `treatment.table_of`.
    """
    along = [*CELL, "arm", "step"]
    shown = ["coupling", "loss_training", "loss_held_out"]
    curves = table.groupby(along, sort=False)[shown].mean().reset_index()
    # The outcome cannot be rebuilt from means.
    seeds = table[[*CELL, "seed", "arm", "step", *shown]]
    return {"models": models_of(table), "curves": curves, "seeds": seeds}


def models_of(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return one row per model: its outcomes, and what it is made of at the end.

    Raises:
        ValueError: a loss is not finite.
    """
    if not np.isfinite(table[["loss_training", "loss_held_out"]]).all(axis=None):
        raise ValueError("wanted finite losses, and a model's is not: it diverged")
    rows = []
    for key, of_seed in table.groupby([*CELL, "seed"], sort=False):
        runs = {arm: run.sort_values("step") for arm, run in of_seed.groupby("arm")}
        worst = max(run["loss_training"].iloc[-1] for run in runs.values())
        band = worst + np.linspace(*BAND, N_IN_BAND)
        for arm, run in runs.items():
            row = dict(zip([*CELL, "seed"], key, strict=True))
            rows.append(row | {"arm": arm} | outcomes_of(run, band))
    return pandas.DataFrame(rows)


def outcomes_of(run: pandas.DataFrame, band: np.ndarray) -> dict[str, float]:
    """Return the outcomes of one model; `band` are training losses that it reaches."""
    with_coupling = run.dropna(subset="coupling")
    last = with_coupling.iloc[-1]
    steps = [crossing(run["step"], run["loss_training"], mark) for mark in band]
    in_band = {
        OUTCOME: at_steps(run, "loss_held_out", steps),
        STEP: float(np.mean(steps)),
        "coupling in the band": at_steps(with_coupling, "coupling", steps),
    }
    facts = [
        "term_value",
        "own_length",
        "added_length",
        "cosine",
        "share_clipped",
    ]
    later = [*MOVED, "cosine_with_last"]
    facts += [name for name in later if name in last]
    return in_band | {
        "held-out loss at the end": last["loss_held_out"],
        "lowest held-out loss": run["loss_held_out"].min(),
        "training loss at the end": last["loss_training"],
        "gap at the end": last["loss_held_out"] - last["loss_training"],
        "coupling, mean over steps": with_coupling["coupling"].mean(),
        **last[MADE_OF].to_dict(),
        **last[facts].to_dict(),
    }


def crossing(steps: pandas.Series, losses: pandas.Series, mark: float) -> float:
    """Return the step at which a loss first falls to a mark, between those at which it
    was taken; NaN where it never does.
    """
    points = list(zip(steps, losses, strict=True))
    for (before, high), (after, low) in pairwise(points):
        if low <= mark < high:
            return float(before + (after - before) * (high - mark) / (high - low))
    return float("nan")


def at_steps(run: pandas.DataFrame, column: str, steps: list[float]) -> float:
    """Return the mean of what a column has at some steps, linearly between its own."""
    return float(np.interp(steps, run["step"], run[column]).mean())


def means_of(models: pandas.DataFrame) -> pandas.DataFrame:
    """Return the mean over seeds of each arm."""
    grouped = models.groupby([*CELL, "arm"], sort=False)
    means = grouped.mean(numeric_only=True).drop(columns="seed")
    means.insert(0, "n", grouped.size())
    return means.reset_index()


def contrasts_of(models: pandas.DataFrame) -> pandas.DataFrame:
    """Return differences of two arms, paired by seed.

    Columns: the mean `difference`; its 95 % t interval, `low` and `high`; of the two
    primary contrasts the interval that holds for both together (Bonferroni); the
    deviation over seeds, `sd`; the share of all changes of sign with a mean as large,
    `p`.
    """
    outcomes = [c for c in models.columns if c not in (*CELL, "arm", "seed")]
    rows = []
    for key, of_cell in models.groupby(CELL, sort=False):
        named = dict(zip(CELL, key, strict=True))
        wide = of_cell.pivot_table(index="seed", columns="arm", values=outcomes)
        for (arm, other), outcome in product(CONTRASTS, outcomes):
            pairs = [(outcome, arm), (outcome, other)]
            if not set(pairs) <= set(wide.columns):
                continue
            difference = (wide[pairs[0]] - wide[pairs[1]]).dropna()
            is_primary = named["part"] == "little" and outcome == OUTCOME
            n_looks = 2 if is_primary and (arm, other) in PRIMARY_CONTRASTS else 1
            row = named | {"outcome": outcome, "contrast": f"{arm} − {other}"}
            rows.append(row | paired(difference.to_numpy(), n_looks))
    return pandas.DataFrame(rows)


def paired(difference: np.ndarray, n_looks: int = 1) -> dict[str, float]:
    """Return the mean of paired differences with its t interval, and the p value of all
    changes of sign; NaN where there are fewer than two.
    """
    n = len(difference)
    if n < 2:
        return {"n": n}
    mean = difference.mean()
    sd = difference.std(ddof=1)
    width = sd / np.sqrt(n) * stats.t.ppf(1 - 0.025 / n_looks, n - 1)
    means = np.abs(changes_of_sign(n) @ difference) / n
    return {
        "n": n,
        "difference": mean,
        "low": mean - width,
        "high": mean + width,
        "sd": sd,
        # Rounding must not leave out the signs as they are.
        "p": float((means >= abs(mean) * (1 - 1e-12)).mean()),
    }


@cache
def changes_of_sign(n: int) -> np.ndarray:
    """Return all changes of sign of n numbers, a row each; of more than 16 numbers 2¹⁶
    that are drawn, and none.
    """
    if n <= MOST_SIGNS:
        return np.array(list(product((1.0, -1.0), repeat=n)))
    drawn = np.random.default_rng(0).integers(0, 2, (2**MOST_SIGNS, n))
    return np.vstack([np.ones(n), 2.0 * drawn - 1])


def slope_of_speed(models: pandas.DataFrame, speeds: tuple[float, ...]) -> float:
    """Return nats of the outcome per step, between models of loss alone whose learning
    rates differ: least squares of paired differences, through 0.
    """
    of_part = models[models["part"] == "speed"]
    wide = of_part.pivot_table(index="seed", columns="arm", values=[OUTCOME, STEP])
    differences = {
        outcome: np.concatenate(
            [
                wide[outcome][f"{ALONE} × {speed:g}"] - wide[outcome][ALONE]
                for speed in speeds
            ]
        )
        for outcome in (OUTCOME, STEP)
    }
    steps = differences[STEP]
    return float(steps @ differences[OUTCOME] / (steps @ steps))


def adjusted_for_speed(
    models: pandas.DataFrame, speeds: tuple[float, ...]
) -> pandas.DataFrame:
    """Return the contrasts of the outcome, less what their difference in steps does.

    At equal training loss a slower model has a lower held-out loss. The slope is taken
    as known, so intervals are somewhat too narrow.
    """
    slope = slope_of_speed(models, speeds)
    of_part = models[models["part"] == "little"]
    wide = of_part.pivot_table(index="seed", columns="arm", values=[OUTCOME, STEP])
    rows = []
    for arm, other in CONTRASTS[:6]:
        loss, step = (
            wide[outcome][arm] - wide[outcome][other] for outcome in (OUTCOME, STEP)
        )
        adjusted = (loss - slope * step).to_numpy()
        row = {"contrast": f"{arm} − {other}", "steps behind": step.mean()}
        rows.append(row | paired(adjusted))
    return pandas.DataFrame(rows)


def effect_of(rows: pandas.DataFrame, arm: str) -> str:
    """Return what a treatment does to the held-out loss: "lowers" or "raises" it,
    "placebos differ", "nothing" within the margin, or "not decided".

    `rows` are the contrasts of the primary outcome by name. An effect is one that
    intervals have of the treatment beyond its placebo and beyond loss alone, with the
    same sign, and that the twisted placebo does not contradict.
    """
    to_placebo = rows.loc[f"{arm} − placebo {arm}"]
    to_alone = rows.loc[f"{arm} − {ALONE}"]
    to_twisted = rows.loc[f"{arm} − twisted {arm}"]
    sign = sign_of(to_placebo)
    if sign == 0:
        is_small = max(-to_placebo["low"], to_placebo["high"]) < MARGIN
        return "nothing" if is_small else "not decided"
    if sign_of(to_alone) == sign and sign_of(to_twisted) != -sign:
        return "lowers" if sign < 0 else "raises"
    return "placebos differ"


def sign_of(row: pandas.Series) -> int:
    """Return the sign that an interval has; 0 where it holds 0."""
    return int(row["low"] > 0) - int(row["high"] < 0)


def sentence_of(contrasts: pandas.DataFrame) -> str:
    """Return the sentence that the primary outcome earns."""
    is_primary = (contrasts["part"] == "little") & (contrasts["outcome"] == OUTCOME)
    rows = contrasts[is_primary].set_index("contrast")
    dose = contrasts[
        (contrasts["part"] == "little")
        & (contrasts["outcome"] == "coupling in the band")
    ].set_index("contrast")
    if not dose.loc["up − placebo up", "low"] > 0.2:
        return "The treatment failed: coupling was not raised by .2 over the placebo."
    up = effect_of(rows, "up")
    down = effect_of(rows, "down")
    # Raising it and lowering the loss is promoting, and so is lowering it and raising
    # the loss.
    said_of_up = {"lowers": "promotes", "raises": "hinders"}.get(up, up)
    said_of_down = {"raises": "promotes", "lowers": "hinders"}.get(down, down)
    said = {said_of_up, said_of_down}
    directions = f"(raised: {up}; lowered: {down})"
    if {"promotes", "hinders"} <= said:
        return (
            "Changing coupling either way moves the held-out loss the same way: what "
            f"does it is not the level of coupling {directions}."
        )
    for verb in ("promotes", "hinders"):
        if said == {verb}:
            return f"In these models coupling {verb} generalization {directions}."
        if verb in said:
            return (
                f"In these models coupling {verb} generalization in one direction, and "
                f"in the other nothing is shown {directions}."
            )
    if said == {"nothing"}:
        return (
            f"Effects of coupling on the held-out loss beyond ±{MARGIN:g} nats are "
            f"excluded in these models {directions}."
        )
    return f"Whether coupling promotes generalization is not decided {directions}."


def print_report(models: pandas.DataFrame) -> None:
    """Print means and contrasts, one part after the other, and the sentence."""
    print("Means over seeds")
    for key, rows in means_of(models).groupby(CELL, sort=False):
        print("\n" + title_of(key))
        columns = ["arm", "n", *list(rows.columns)[len(CELL) + 2 :]]
        turned = rows[columns].set_index("arm").T
        print(turned.to_string(float_format="{:.3f}".format))
    contrasts = contrasts_of(models)
    print(
        "\nDifferences, paired by seed: 95 % t intervals (the two of the primary outcome "
        "with placebos hold together); p of all changes of sign"
    )
    for key, rows in contrasts.groupby(CELL, sort=False):
        print("\n" + title_of(key))
        for outcome, of_outcome in rows.groupby("outcome", sort=False):
            print(f"  {outcome}")
            shown = of_outcome.drop(columns=[*CELL, "outcome"])
            print(readable(shown.dropna(axis=1, how="all")))
    if {"little", "speed"} <= set(models["part"]):
        for speeds in (SPEEDS, SPEEDS[:1]):
            slope = slope_of_speed(models, speeds)
            rates = " and ".join(f"{speed:g}" for speed in speeds)
            print(
                f"\nlittle: {OUTCOME}, less what speed does: {1000 * slope:.3f} nats per "
                f"1,000 steps, from loss alone at {rates} of the rate"
            )
            print(readable(adjusted_for_speed(models, speeds)))
    if "little" in set(contrasts["part"]) and (contrasts["n"] > 1).all():
        print("\n" + sentence_of(contrasts))


def title_of(key: tuple[str, str, float, float]) -> str:
    """Name a part of the study."""
    part, text, rate, weight = key
    return f"{part}: {text} text, learning rate {rate:g}, weight {weight:g}"


def draw(curves: pandas.DataFrame, models: pandas.DataFrame, k: int) -> Figure:
    """Draw coupling on the way, above, and what it did to the loss, below; a column for
    each amount of text.
    """
    texts = [t for t in ("little", "enough") if t in set(models["part"])]
    figure = labels.new_figure(labels.PHONE_WIDTH, 7.4)
    grid = figure.subplots(2, len(texts), sharey="row", squeeze=False)
    contrasts = contrasts_of(models)
    for column, text in enumerate(texts):
        draw_coupling(grid[0, column], curves[curves["part"] == text], k)
        grid[0, column].set_title(f"{text} text", fontsize="small")
        draw_differences(grid[1, column], contrasts[contrasts["part"] == text])
    grid[0, 0].set_ylabel(f"mean coupling, k = {k}", fontsize="small")
    labels.legend_below(figure, *grid[:, 0])
    small = "lines: means over seeds · bars: paired differences in held-out loss, 95 % t intervals"
    title = "Coupling raised and lowered, and the held-out loss"
    labels.entitle(figure, f"{title}\n{small}")
    return figure


def draw_coupling(ax: Axes, curves: pandas.DataFrame, k: int) -> None:
    """Draw coupling by step, a line for each arm."""
    measured = curves.dropna(subset="coupling")
    for arm, (color, style) in LOOKS.items():
        of_arm = measured[measured["arm"] == arm]
        if len(of_arm):
            look = {"color": color, "linestyle": style, "linewidth": 1.4}
            ax.plot(of_arm["step"], of_arm["coupling"], label=arm, **look)
    ax.axhline(mean_random_coupling(k), label=RANDOM_SUBSPACES, **labels.NULL_LINE)
    ax.set_xlabel("training step", fontsize="small")
    ax.tick_params(labelsize="small")


def draw_differences(ax: Axes, contrasts: pandas.DataFrame) -> None:
    """Draw paired differences in held-out loss, at equal training loss and at the end."""
    names = [f"{arm} − {other}" for arm, other in CONTRASTS[:10]]
    outcomes = {
        OUTCOME: (labels.BLUE, -0.13, "at equal training loss"),
        "held-out loss at the end": (labels.ORANGE, 0.13, "at the end"),
    }
    for outcome, (color, shift, text) in outcomes.items():
        rows = contrasts[contrasts["outcome"] == outcome].set_index("contrast")
        rows = rows.reindex(names)
        ax.errorbar(
            rows["difference"],
            np.arange(len(names)) + shift,
            xerr=rows["high"] - rows["difference"],
            color=color,
            marker=labels.MARKERS[color],
            markersize=4,
            linestyle="",
            label=text,
        )
    ax.axvline(0, **labels.NULL_LINE)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("difference, nats", fontsize="small")
    ax.tick_params(labelsize="small")
    ax.xaxis.set_major_locator(MaxNLocator(2, symmetric=True))
