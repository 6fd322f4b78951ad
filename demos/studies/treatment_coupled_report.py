"""The statistics, sentence and figure of `treatment_coupled.py`."""

from collections.abc import Mapping

import numpy as np
import pandas
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from tl_coupling.pictures import labels
from treatment_report import (
    ALONE,
    CELL,
    N_IN_BAND,
    OUTCOME,
    STEP,
    at_steps,
    changes_of_sign,
    crossing,
    draw_coupling,
    means_of,
    title_of,
)

# All of this was decided before the models of the part `coupled` were trained: see
# treatment_coupled.md.
SEEDS = range(200, 236)
# Of the learning rate: with it loss alone is as slow as *up*, by the pilot.
SPEED_OF_UP = 0.96
AS_SLOW = f"{ALONE} × {SPEED_OF_UP:g}"
# The pilot without its slow arms, which set another band.
AS_FAST = "pilot-as-fast"
# Of each treatment, what it must differ from: the same Jacobians and lengths without
# common axes; the loss alone at its speed. *Down* has the speed of the loss alone.
COMPARED_WITH = {"up": ("twisted up", AS_SLOW), "down": ("twisted down", ALONE)}
ARMS = {*COMPARED_WITH, *[other for pair in COMPARED_WITH.values() for other in pair]}
PRIMARY = [
    f"{arm} − {other}" for arm, others in COMPARED_WITH.items() for other in others
]
CONTRASTS = [
    *[(arm, other) for arm, others in COMPARED_WITH.items() for other in others],
    ("up", ALONE),
    ("down", AS_SLOW),
    ("twisted up", ALONE),
    ("twisted down", ALONE),
    *[(f"{ALONE} × {speed:g}", ALONE) for speed in (0.8, 0.9, SPEED_OF_UP)],
]
# The smallest effects of interest, in nats.
MARGINS = (0.0075, 0.015)
# Two treatments are looked at, each by intervals of 1 − .05 / 2.
LEVEL_OF_SIGN = 0.975
# Two one-sided tests at .05.
LEVEL_OF_MARGIN = 0.90
# In the band, beyond the twin and beyond the loss alone at its speed: less is no dose.
DOSES = {"up": 0.2, "down": -0.1}
# Nats of the outcome per step that a model is behind: the pilot's loss alone at 0.8.
SLOPE = -4.3e-5
# What the term does to the outcome whatever the axes, by the pilot's twins.
OF_TERM = -0.008
COUPLING = "coupling in the band"
# Of the same kind of differences in the first study.
SDS_BEFORE = {"the first study's largest": 0.0285}
SHOWN = [OUTCOME, STEP, COUPLING, "held-out loss at the end", "lowest held-out loss"]
N_STUDIES = 20_000
# Of the band, to see whether the outcome depends on where in it one looks.
THIRDS = ((0.02, 0.08), (0.08, 0.14), (0.14, 0.2))


def differences_of(models: pandas.DataFrame, outcome: str) -> pandas.DataFrame:
    """Return differences of two arms of one part, paired by seed: a row for each
    contrast, with `mean`, `sd`, `n`, p by changes of sign, and the ends of its t
    intervals, `low`, `high` (97.5 %) and `low 90`, `high 90`.
    """
    wide = models.pivot(index="seed", columns="arm", values=outcome)
    rows = {
        f"{arm} − {other}": described((wide[arm] - wide[other]).to_numpy())
        for arm, other in CONTRASTS
        if {arm, other} <= set(wide.columns)
    }
    return pandas.DataFrame.from_dict(rows, "index").rename_axis("contrast")


def described(difference: np.ndarray) -> dict[str, float]:
    """Return the mean of paired differences with its intervals.

    Raises:
        ValueError: a difference is missing, or there are fewer than two.
    """
    if len(difference) < 2 or not np.isfinite(difference).all():
        raise ValueError(f"wanted two or more finite differences, got {difference}")
    n = len(difference)
    mean = difference.mean()
    error = difference.std(ddof=1) / np.sqrt(n)
    by_sign = np.abs(changes_of_sign(n) @ difference) / n
    row = {"n": n, "mean": mean, "sd": error * np.sqrt(n)}
    for level, mark in ((LEVEL_OF_SIGN, ""), (LEVEL_OF_MARGIN, " 90")):
        width = error * stats.t.ppf((1 + level) / 2, n - 1)
        row |= {f"low{mark}": mean - width, f"high{mark}": mean + width}
    # Rounding must not leave out the signs as they are.
    return row | {"p": float((by_sign >= abs(mean) * (1 - 1e-12)).mean())}


def differences_in(
    seeds: pandas.DataFrame, band: tuple[float, float]
) -> pandas.DataFrame:
    """Return the primary contrasts of the outcome in another band; see `models_of`.

    `seeds` has losses by seed, arm and step.
    """
    rows = []
    for seed, of_seed in seeds.groupby("seed"):
        runs = {arm: run.sort_values("step") for arm, run in of_seed.groupby("arm")}
        worst = max(run["loss_training"].iloc[-1] for run in runs.values())
        for arm, run in runs.items():
            steps = [
                crossing(run["step"], run["loss_training"], mark)
                for mark in worst + np.linspace(*band, N_IN_BAND)
            ]
            loss = at_steps(run, "loss_held_out", steps)
            rows.append({"seed": seed, "arm": arm, OUTCOME: loss})
    differences = differences_of(pandas.DataFrame(rows), OUTCOME)
    return differences.loc[[name for name in PRIMARY if name in differences.index]]


def directions(
    means: Float[np.ndarray, "*studies 4"],
    errors: Float[np.ndarray, "*studies 4"],
    n: int,
) -> Int[np.ndarray, "*studies 2"]:
    """Return the sign of what *up* and *down* do to the outcome: −1 (1) where both of
    their contrasts are below (above) 0; 0 elsewhere. Contrasts are those of `PRIMARY`.
    """
    width = errors * stats.t.ppf((1 + LEVEL_OF_SIGN) / 2, n - 1)
    below, above = means + width < 0, means - width > 0
    return np.stack(
        [
            above[..., own].all(-1).astype(int) - below[..., own].all(-1).astype(int)
            for own in ([0, 1], [2, 3])
        ],
        -1,
    )


def bound_of(
    means: Float[np.ndarray, "*studies 4"],
    errors: Float[np.ndarray, "*studies 4"],
    n: int,
) -> Float[np.ndarray, "*studies"]:
    """Return the smallest bound within which all four contrasts are, by two one-sided
    tests each.
    """
    width = errors * stats.t.ppf((1 + LEVEL_OF_MARGIN) / 2, n - 1)
    return (np.abs(means) + width).max(-1)


VERDICTS = {
    (-1, 1): "promotes",
    (1, -1): "hinders",
    (-1, -1): "the same way",
    (1, 1): "the same way",
}


def verdict_of(signs: tuple[int, int], bound: float) -> str:
    """Return "promotes", "hinders", "the same way", "within" a margin, or "not decided"."""
    otherwise = "within" if bound < max(MARGINS) else "not decided"
    return VERDICTS.get(signs, otherwise)


def sentence_of(models: pandas.DataFrame) -> str:
    """Return the sentence that the models of the part `coupled` earn, with the four
    contrasts that it is made from.
    """
    known = set(zip(models["seed"], models["arm"], strict=True))
    wanted = {(seed, arm) for seed in SEEDS for arm in ARMS}
    if known != wanted:
        n = len(known & wanted)
        return f"No sentence: {n} of the {len(wanted)} models that were decided on."
    doses = differences_of(models, COUPLING).loc[PRIMARY]
    if not doses.loc[PRIMARY[:2], "low"].min() > DOSES["up"]:
        return "The treatment failed: coupling was not raised by .2."
    if not doses.loc[PRIMARY[2:], "high"].max() < DOSES["down"]:
        return "The treatment failed: coupling was not lowered by .1."
    rows = differences_of(models, OUTCOME).loc[PRIMARY]
    steps = differences_of(models, STEP).loc[PRIMARY, "mean"]
    n = len(SEEDS)
    means = rows["mean"].to_numpy()
    errors = (rows["sd"] / np.sqrt(n)).to_numpy()
    verdicts = []
    # As they are, and less what the steps between the arms explain.
    for shifted in (means, means - SLOPE * steps.to_numpy()):
        signs = tuple(directions(shifted, errors, n).tolist())
        bound = float(bound_of(shifted, errors, n))
        verdicts.append(verdict_of(signs, bound))
    details = ", ".join(
        f"{name} {row['mean']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}] at "
        f"{steps[name]:+.0f} steps"
        for name, row in rows.iterrows()
    )
    bound = float(bound_of(means, errors, n))
    margin = next((f"{m:g}" for m in MARGINS if bound < m), "none of the margins")
    details += f"; all four are within ±{bound:.4f} (margin: {margin})."
    if verdicts[0] != verdicts[1]:
        return (
            "Whether coupling promotes generalization is not decided: as measured "
            f"{verdicts[0]}, less what speed explains {verdicts[1]}. {details}"
        )
    said = {
        "promotes": "Changed by this term, coupling promotes generalization here.",
        "hinders": "Changed by this term, coupling hinders generalization here.",
        "the same way": (
            "Raising and lowering coupling by this term move the held-out loss the same "
            "way: what does it is not the level of coupling."
        ),
        "within": (
            "Raising and lowering coupling by this term changes the held-out loss by "
            f"less than {margin} nats here."
        ),
        "not decided": "Whether coupling promotes generalization is not decided.",
    }
    return f"{said[verdicts[0]]} {details}"


def power_of(
    effect: float, sd: float, n: int, of_term: float = OF_TERM
) -> dict[str, float]:
    """Return how often studies have each verdict, where coupling lowers the outcome by
    `effect` when raised and raises it when lowered, and the term itself adds `of_term`.

    Arms have independent normal deviations, whose differences have the deviation `sd`;
    20,000 studies of n seeds.
    """
    rng = np.random.default_rng(0)
    true = {"up": of_term - effect, "down": of_term + effect}
    true |= {"twisted up": of_term, "twisted down": of_term, AS_SLOW: 0.0, ALONE: 0.0}
    order = list(true)
    pairs = [(order.index(arm), order.index(other)) for arm, other in CONTRASTS[:4]]
    contrast = np.zeros((4, len(order)))
    for row, (arm, other) in zip(contrast, pairs, strict=True):
        row[arm], row[other] = 1, -1
    # Of the mean over seeds; the four contrasts' deviations are drawn with one another.
    covariance = contrast @ contrast.T * sd**2 / 2
    centre = contrast @ np.array([true[arm] for arm in order])
    means = rng.multivariate_normal(centre, covariance / n, N_STUDIES)
    scatter = stats.wishart(n - 1, covariance, seed=rng).rvs(N_STUDIES)
    variances = scatter.diagonal(axis1=1, axis2=2) / (n - 1)
    errors = np.sqrt(variances / n)
    signs = directions(means, errors, n)
    bounds = bound_of(means, errors, n)
    verdicts = [
        verdict_of((int(up), int(down)), bound)
        for (up, down), bound in zip(signs, bounds, strict=True)
    ]
    return pandas.Series(verdicts).value_counts(normalize=True).to_dict()


def print_power(sds: Mapping[str, float]) -> None:
    """Print how often each sentence is earned, by the deviation of differences and what
    coupling does.
    """
    n = len(SEEDS)
    print(
        f"\nPower with {n} seeds: shares of studies with each verdict. Raised coupling "
        f"lowers the loss by so much, lowered coupling raises it; the term adds {OF_TERM}"
    )
    rows = {
        f"{effect:+.4f}, sd {sd:.4f} ({name})": power_of(effect, sd, n)
        for name, sd in sds.items()
        for effect in (0.0, 0.0075, 0.015, -0.0075, -0.015)
    }
    table = pandas.DataFrame.from_dict(rows, "index").fillna(0.0)
    print(table.to_string(float_format="{:.2f}".format))


def print_report(models: pandas.DataFrame, seeds: pandas.DataFrame) -> None:
    """Print means, contrasts, what the pilot says of power, and the sentence.

    `models` has outcomes by seed and arm, `seeds` losses by seed, arm and step.
    """
    print("Means over seeds")
    for key, rows in means_of(models).groupby(CELL, sort=False):
        print("\n" + title_of(key))
        columns = ["arm", "n", *list(rows.columns)[len(CELL) + 2 :]]
        turned = rows[columns].set_index("arm").T
        print(turned.to_string(float_format="{:.3f}".format))
    print(
        "\nDifferences, paired by seed: 97.5 % (low, high) and 90 % t intervals; p of "
        "changes of sign"
    )
    for key, rows in models.groupby(CELL, sort=False):
        print("\n" + title_of(key))
        for outcome in SHOWN:
            print(f"  {outcome}")
            differences = differences_of(rows, outcome)
            print(differences.to_string(float_format="{:.4f}".format))
    parts = dict(list(models.groupby("part", sort=False)))
    for part, of_part in seeds.groupby("part", sort=False):
        if part != "pilot":
            for band in THIRDS:
                low, high = band
                print(f"\n{part}: {OUTCOME} from m + {low:g} to m + {high:g} alone")
                differences = differences_in(of_part, band)
                print(differences.to_string(float_format="{:.4f}".format))
    if AS_FAST in parts:
        largest = float(differences_of(parts[AS_FAST], OUTCOME)["sd"].max())
        print_power({"the pilot's largest": largest} | SDS_BEFORE)
    if "coupled" in parts:
        print("\n" + sentence_of(parts["coupled"]))


def draw(models: pandas.DataFrame, curves: pandas.DataFrame) -> Figure:
    """Draw coupling on the way, above, and what it did to the loss, below."""
    part = list(models["part"])[-1]
    of_part = models[models["part"] == part]
    figure = labels.new_figure(labels.PHONE_WIDTH, 7.4)
    above, below = figure.subplots(2, 1)
    draw_coupling(above, curves[curves["part"] == part], 8)
    above.set_ylabel("mean coupling, k = 8", fontsize="small")
    rows = differences_of(of_part, OUTCOME)
    rows = rows.loc[[name for name in PRIMARY if name in rows.index]]
    places = np.arange(len(rows))
    for margin in MARGINS:
        both = f"margins: ±{' and ±'.join(f'{m:g}' for m in MARGINS)}"
        label = both if margin == max(MARGINS) else None
        below.axvspan(-margin, margin, label=label, **labels.NULL_BAND)
    for mark, level, width in (("", LEVEL_OF_SIGN, 1), (" 90", LEVEL_OF_MARGIN, 3)):
        below.errorbar(
            rows["mean"],
            places,
            xerr=rows[f"high{mark}"] - rows["mean"],
            color=labels.BLUE,
            marker=labels.MARKERS[labels.BLUE],
            markersize=4,
            linestyle="",
            elinewidth=width,
            label=f"{100 * level:g} % t interval",
        )
    below.axvline(0, **labels.NULL_LINE)
    below.set_yticks(places, list(rows.index))
    below.set_ylim(len(rows) - 0.5, -0.5)
    below.set_xlabel("difference in held-out loss, nats", fontsize="small")
    below.tick_params(labelsize="small")
    below.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    labels.legend_below(figure, above, below)
    means = of_part.groupby("arm")[COUPLING].mean()
    n = of_part["seed"].nunique()
    coupled = (
        f"{means[ALONE]:.2f} without, {means['down']:.2f} and {means['up']:.2f} with"
    )
    title = "Coupling raised and lowered where models have it"
    labels.entitle(figure, f"{title}\n{coupled}; {n} seeds, at equal training loss")
    return figure
