"""The statistics, sentence and figure of `treatment_coupled.py`."""

from collections.abc import Mapping

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from tl_coupling.pictures import labels
from treatment_report import (
    ALONE,
    CELL,
    OUTCOME,
    STEP,
    changes_of_sign,
    draw_coupling,
    means_of,
    title_of,
)

# All of this was decided before the models of the part `coupled` were trained: see
# treatment_coupled.md.
# Of the learning rate: with it loss alone is as slow as *up*, by the pilot.
SPEED_OF_UP = 0.96
AS_SLOW = f"{ALONE} × {SPEED_OF_UP:g}"
# Of each treatment, what it must differ from: the same Jacobians and lengths without
# common axes; the loss alone at its speed. *Down* has the speed of the loss alone.
COMPARED_WITH = {"up": ("twisted up", AS_SLOW), "down": ("twisted down", ALONE)}
PRIMARY = [(arm, other) for arm, others in COMPARED_WITH.items() for other in others]
OTHERS = [
    ("up", ALONE),
    ("down", AS_SLOW),
    ("twisted up", ALONE),
    ("twisted down", ALONE),
    *[(f"{ALONE} × {speed:g}", ALONE) for speed in (0.8, 0.9, SPEED_OF_UP)],
]
# The smallest effect of interest, in nats.
MARGIN = 0.015
# Two treatments are looked at, each by intervals of 1 − .05 / 2.
LEVEL_OF_SIGN = 0.975
# Two one-sided tests at .05.
LEVEL_OF_MARGIN = 0.90
# In the band, beyond the twisted twin: less is no dose.
DOSES = {"up": 0.2, "down": -0.1}
COUPLING = "coupling in the band"
# Of the same kind of differences in the first study.
SDS_BEFORE = {"the first study's least": 0.024, "the first study's largest": 0.0285}
SHOWN = [OUTCOME, STEP, COUPLING, "held-out loss at the end", "lowest held-out loss"]


def differences_of(models: pandas.DataFrame, outcome: str) -> pandas.DataFrame:
    """Return differences of two arms of one part, paired by seed: a row for each
    contrast, with `mean`, `sd`, `n`, p by changes of sign, and the ends of its t
    intervals, `low`, `high` (97.5 %) and `low 90`, `high 90`.
    """
    wide = models.pivot(index="seed", columns="arm", values=outcome)
    rows = {
        f"{arm} − {other}": described((wide[arm] - wide[other]).to_numpy())
        for arm, other in [*PRIMARY, *OTHERS]
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


def effect_of(rows: pandas.DataFrame, arm: str) -> str:
    """Return what a treatment does to the outcome: it "lowers" or "raises" it where both
    of its contrasts do, else "within" the margin where both are, else "not decided".
    """
    own = rows.loc[[f"{arm} − {other}" for other in COMPARED_WITH[arm]]]
    if (own["high"] < 0).all():
        return "lowers"
    if (own["low"] > 0).all():
        return "raises"
    return "within" if within_margin(own) else "not decided"


def within_margin(rows: pandas.DataFrame) -> bool:
    """Return whether all contrasts lie within the margin, by two one-sided tests."""
    return bool((rows["low 90"] > -MARGIN).all() and (rows["high 90"] < MARGIN).all())


def sentence_of(models: pandas.DataFrame) -> str:
    """Return the sentence that the models of the part `coupled` earn."""
    doses = differences_of(models, COUPLING)
    if not doses.loc["up − twisted up", "low"] > DOSES["up"]:
        return "The treatment failed: coupling was not raised by .2 over its twin."
    if not doses.loc["down − twisted down", "high"] < DOSES["down"]:
        return "The treatment failed: coupling was not lowered by .1 below its twin."
    rows = differences_of(models, OUTCOME)
    effects = {arm: effect_of(rows, arm) for arm in COMPARED_WITH}
    primary = rows.loc[[f"{arm} − {other}" for arm, other in PRIMARY]]
    said = f"(raised: {effects['up']}; lowered: {effects['down']})"
    small = f", by less than {MARGIN:g} nats" if within_margin(primary) else ""
    verb = {
        ("lowers", "raises"): "promotes",
        ("raises", "lowers"): "hinders",
    }.get((effects["up"], effects["down"]))
    if verb:
        return f"In these models coupling {verb} generalization{small} {said}."
    if small:
        return (
            f"What coupling does to the held-out loss is within ±{MARGIN:g} nats in these "
            f"models {said}."
        )
    return f"Whether coupling promotes generalization is not decided {said}."


def power_of(effect: float, sd: float, n: int) -> float:
    """Return how often one contrast of a true `effect` is seen with its sign; for an
    effect of 0, how often it is found within the margin. Differences are normal.
    """
    error = sd / np.sqrt(n)
    if effect:
        beyond = stats.t.ppf((1 + LEVEL_OF_SIGN) / 2, n - 1)
        return float(stats.nct.sf(beyond, n - 1, abs(effect) / error))
    return float(
        np.mean(
            [
                abs(mean) + error * scale * stats.t.ppf(0.95, n - 1) < MARGIN
                for mean, scale in _drawn(error, n)
            ]
        )
    )


def _drawn(error: float, n: int) -> np.ndarray:
    """Return 20,000 means and relative standard errors of studies without an effect."""
    rng = np.random.default_rng(0)
    scales = np.sqrt(rng.chisquare(n - 1, 20_000) / (n - 1))
    return np.stack([error * rng.standard_normal(20_000), scales], 1)


def print_power(n: int, sds: Mapping[str, float]) -> None:
    """Print what a study of n seeds sees, by the deviation of its differences."""
    print(
        f"\nPower with {n} seeds: of one contrast, and of all four if they were independent"
    )
    for name, sd in sds.items():
        seen, small = power_of(MARGIN, sd, n), power_of(0.0, sd, n)
        print(
            f"  sd {sd:.4f} ({name}): an effect of {MARGIN:g} is seen in {seen:.2f}, all "
            f"four in {seen**4:.2f}; none is found within ±{MARGIN:g} in {small:.2f}, all "
            f"four in {small**4:.2f}"
        )


def print_report(models: pandas.DataFrame, n_seeds: int = 36) -> None:
    """Print means, contrasts, what the pilot says of power, and the sentence."""
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
    for part, rows in models.groupby("part", sort=False):
        if part == "pilot":
            largest = float(differences_of(rows, OUTCOME)["sd"].max())
            print_power(n_seeds, {"the pilot's largest": largest} | SDS_BEFORE)
        else:
            print("\n" + sentence_of(rows))


def draw(models: pandas.DataFrame, curves: pandas.DataFrame) -> Figure:
    """Draw coupling on the way, above, and what it did to the loss, below."""
    part = list(models["part"])[-1]
    of_part = models[models["part"] == part]
    figure = labels.new_figure(labels.PHONE_WIDTH, 7.4)
    above, below = figure.subplots(2, 1)
    draw_coupling(above, curves[curves["part"] == part], 8)
    above.set_ylabel("mean coupling, k = 8", fontsize="small")
    rows = differences_of(of_part, OUTCOME)
    primary = [f"{arm} − {other}" for arm, other in PRIMARY]
    primary = [name for name in primary if name in rows.index]
    rows = rows.loc[primary]
    places = np.arange(len(rows))
    margin = f"±{MARGIN:g}, the smallest effect of interest"
    below.axvspan(-MARGIN, MARGIN, label=margin, **labels.NULL_BAND)
    below.errorbar(
        rows["mean"],
        places,
        xerr=rows["high"] - rows["mean"],
        color=labels.BLUE,
        marker=labels.MARKERS[labels.BLUE],
        markersize=4,
        linestyle="",
        label="97.5 % t interval",
    )
    below.axvline(0, **labels.NULL_LINE)
    below.set_yticks(places, primary)
    below.set_ylim(len(rows) - 0.5, -0.5)
    below.set_xlabel("difference in held-out loss, nats", fontsize="small")
    below.tick_params(labelsize="small")
    below.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    handles, names = above.get_legend_handles_labels()
    bars = below.get_legend_handles_labels()
    labels.plain_legend(
        figure,
        handles + bars[0],
        names + bars[1],
        loc="outside lower center",
        ncols=2,
        fontsize="small",
    )
    small = f"n = {of_part['seed'].nunique()} seeds; at equal training loss, paired"
    labels.entitle(
        figure, f"Coupling is raised and lowered where models have it\n{small}"
    )
    return figure
