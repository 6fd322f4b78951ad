"""The rule, tables, sentences and figure of `coupling_returns.py`."""

from dataclasses import dataclass

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_SUBSPACES
from treatment_report import paired

# All of this was decided before the models were trained: see coupling_returns.md.
PILOT = "pilot"
MAIN = "main"
# The smallest rise of interest: about a sixth of the fall that was seen before.
MARGIN = 0.05
# Nats by which a model's held-out loss may lie above its lowest.
OVERFITTED = 0.03
OUTCOMES = {
    "coupling": "Coupling",
    "coupling_without_identity": (
        "Coupling without each block's best multiple of the identity"
    ),
}
SETTING = ["width", "n_layers", "text_tokens", "k"]
SHOWN = [
    *OUTCOMES,
    "identity_share",
    "captured_energy",
    "size_of_J",
    "loss_training",
    "loss_held_out",
]


@dataclass(frozen=True)
class Course:
    """A quantity by octaves of training steps, counted back from the last counted step.

    Attributes:
        pilots, seeds: of the pilots and of the others, mean over the octave's
            measurements: a row for each octave, a column for each seed.
        tokens: those with which each octave begins and ends, in columns.
        passes: of the text, at the end of each octave.
    """

    pilots: pandas.DataFrame
    seeds: pandas.DataFrame
    tokens: pandas.DataFrame
    passes: pandas.Series


@dataclass(frozen=True)
class Verdict:
    """What the rule says of a quantity.

    Attributes:
        kind: "rises", "stays down" or "not decided".
        peak, trough: octaves, chosen on the pilots.
        fall: from the peak, of `paired`; empty where nothing was compared.
        rises: from the trough to each octave after it, a row each.
        risen: the first octave from which on all are risen, or None.
        reason: why nothing is decided, or "".
    """

    kind: str
    peak: int
    trough: int
    fall: dict[str, float]
    rises: pandas.DataFrame
    risen: int | None = None
    reason: str = ""


def last_counted(curves: pandas.DataFrame) -> pandas.Series:
    """Return the last step at which each seed counts: its held-out loss lies at most
    `OVERFITTED` nats above its lowest.
    """
    lowest = curves.groupby("seed")["loss_held_out"].transform("min")
    counts = curves["loss_held_out"] <= lowest + OVERFITTED
    return curves[counts].groupby("seed")["step"].max()


def course_of(curves: pandas.DataFrame, outcome: str) -> Course:
    """Return a quantity by octaves, up to the last step at which all seeds count.

    The last octave is that of the steps in `(last / 2, last]`. Octaves count from 0, the
    earliest; the untrained model is in none.
    """
    last = last_counted(curves).min()
    trained = curves[(curves["step"] > 0) & (curves["step"] <= last)]
    # Steps are rounded: half of the last one is in the octave before.
    halvings = np.floor(np.log2(last / trained["step"]) + 0.02).astype(int)
    octaves = trained.assign(octave=halvings.max() - halvings)
    means = octaves.pivot_table(
        index="octave", columns="seed", values=outcome, aggfunc="mean"
    )
    roles = curves.groupby("seed")["role"].first()
    by_octave = octaves.groupby("octave")
    return Course(
        means[[seed for seed in means if roles[seed] == PILOT]],
        means[[seed for seed in means if roles[seed] == MAIN]],
        by_octave["tokens"].agg(["min", "max"]),
        by_octave["passes"].max(),
    )


def verdict_of(course: Course) -> Verdict:
    """Return what the rule says.

    The pilots' highest octave is the peak, and their lowest after it, but for the last,
    the trough. On the other seeds, paired: the fall, from the peak to the pilots' lowest
    octave after it, is shown where its 95 % interval lies above 0. An octave is risen
    where the interval of its rise from the trough lies above 0 and the mean is at least
    `MARGIN`. It "rises" where the last octave is risen, from the earliest octave on from
    which all are. It "stays down" where the interval of each octave after the trough
    ends below `MARGIN`.
    """
    pilots = course.pilots.mean(axis=1)
    last = int(pilots.index[-1])
    peak = int(pilots.idxmax())
    between = pilots.loc[peak + 1 : last - 1]
    nothing = pandas.DataFrame()
    if between.empty:
        reason = "the pilots' peak is too late for a trough after it"
        return Verdict("not decided", peak, peak, {}, nothing, None, reason)
    trough = int(between.idxmin())
    if course.seeds.shape[1] < 2:
        reason = "there are fewer than two seeds beside the pilots"
        return Verdict("not decided", peak, trough, {}, nothing, None, reason)
    seeds = course.seeds
    # The last octave, where coupling falls on.
    lowest = int(pilots.loc[peak + 1 :].idxmin())
    fall = paired((seeds.loc[peak] - seeds.loc[lowest]).to_numpy())
    after = range(trough + 1, last + 1)
    rises = pandas.DataFrame(
        [paired((seeds.loc[j] - seeds.loc[trough]).to_numpy()) for j in after], after
    )
    is_risen = (rises["low"] > 0) & (rises["difference"] >= MARGIN)
    not_risen = [j for j in after if not is_risen[j]]
    if not fall["low"] > 0:
        reason = "no fall was shown"
        return Verdict("not decided", peak, trough, fall, rises, None, reason)
    if is_risen[last]:
        risen = max(not_risen, default=trough) + 1
        return Verdict("rises", peak, trough, fall, rises, risen)
    if (rises["high"] < MARGIN).all():
        return Verdict("stays down", peak, trough, fall, rises)
    reason = (
        "it was risen, and is not at the end"
        if is_risen.any()
        else "intervals hold both no rise and one of interest"
    )
    return Verdict("not decided", peak, trough, fall, rises, None, reason)


def sentence_of(course: Course, verdict: Verdict, name: str) -> str:
    """Return the sentence that a verdict earns."""
    last = course.tokens.index[-1]
    until = in_tokens(course.tokens.loc[last, "max"])
    if not verdict.fall:
        return f"{name}: not decided whether it comes back; {verdict.reason}."
    fall = with_interval(verdict.fall)
    final = with_interval(verdict.rises.loc[last].to_dict())
    trough = " to ".join(map(in_tokens, course.tokens.loc[verdict.trough]))
    n = course.seeds.shape[1]
    numbers = f"fall {fall}, then {final} at the end; {n} seeds, 95 % intervals"
    if verdict.kind == "rises":
        risen = verdict.risen
        place = " to ".join(map(in_tokens, course.tokens.loc[risen]))
        share = verdict.rises.loc[last, "difference"] / verdict.fall["difference"]
        passes = course.passes[risen]
        read = (
            "before the text was read once"
            if passes <= 1
            else f"when the text was read {passes:.1f} times, which may be why"
        )
        return (
            f"{name} falls, then rises at {place} tokens, {read}; at {until} "
            f"tokens {share:.0%} of the fall has come back ({numbers})."
        )
    if verdict.kind == "stays down":
        return (
            f"{name} falls and stays down up to {until} tokens: a rise of {MARGIN:g} "
            f"from where it is at {trough} tokens is excluded ({numbers})."
        )
    return (
        f"{name}: not decided whether it comes back by {until} tokens; "
        f"{verdict.reason} ({numbers})."
    )


def what_rises(kind: str, kind_without_identity: str) -> str:
    """Return what is said of a rise of coupling by what is left of it without multiples
    of the identity; nothing where there is no rise, or where both rise.
    """
    if kind != "rises" or kind_without_identity == "rises":
        return ""
    if kind_without_identity == "stays down":
        return "So what rises goes with multiples of the identity."
    return "Whether what rises is more than multiples of the identity is not decided."


def in_tokens(n: float) -> str:
    """Write a number of tokens."""
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def with_interval(mean: dict[str, float]) -> str:
    """Write a mean of paired differences with its interval."""
    return f"{mean['difference']:+.3f} [{mean['low']:.3f}, {mean['high']:.3f}]"


def octaves_table(
    curves: pandas.DataFrame, course: Course, verdict: Verdict
) -> pandas.DataFrame:
    """Return a row for each octave: means over the seeds that are no pilots, the
    pilots' mean, and the rise from the trough.
    """
    table = pandas.DataFrame(
        {
            "tokens": [
                " to ".join(map(in_tokens, of_octave))
                for of_octave in course.tokens.to_numpy()
            ],
            "passes": course.passes.map("{:.2f}".format),
            "pilots": course.pilots.mean(axis=1).map("{:.3f}".format),
        },
        index=course.tokens.index,
    )
    for column in SHOWN:
        means = course_of(curves, column).seeds.mean(axis=1)
        table[column] = means.map("{:.3f}".format)
    rises = {
        octave: f"{with_interval(row.to_dict())} p {row['p']:.3f}"
        for octave, row in verdict.rises.iterrows()
    }
    marks = rises | {verdict.trough: "trough"} | {verdict.peak: "peak"}
    table["rise"] = [marks.get(octave, "") for octave in table.index]
    return table


def print_report(curves: pandas.DataFrame) -> None:
    """Print each setting: its octaves, what did not count, and a sentence for each
    quantity.
    """
    for key, of_setting in curves.groupby(SETTING, sort=False):
        print_setting(key, of_setting)


def print_setting(key: tuple[int, int, int, int], curves: pandas.DataFrame) -> None:
    """Print one setting."""
    width, n_layers, text_tokens, k = key
    n_seeds = curves.groupby("role")["seed"].nunique()
    untrained = curves[curves["step"] == 0]["coupling"].mean()
    first = curves[curves["step"] > 0].iloc[0]
    print(
        f"Width {width}, {n_layers} blocks, k = {k}: {n_seeds.get(PILOT, 0)} pilots and "
        f"{n_seeds.get(MAIN, 0)} further seeds, whose means are shown by octaves of steps"
    )
    print(
        f"Coupling by chance {first['chance']:.3f}, untrained {untrained:.3f}; the text "
        f"is read for the first time until {in_tokens(text_tokens)} tokens"
    )
    counted = last_counted(curves)
    reached = curves.groupby("seed")["step"].max()
    for seed in counted.index[counted < reached]:
        print(
            f"Seed {seed} is over-fitted after step {counted[seed]}: no model counts "
            "after the first that is"
        )
    sentences = []
    kinds = []
    for outcome, name in OUTCOMES.items():
        course = course_of(curves, outcome)
        verdict = verdict_of(course)
        print(f"\n{name}: its peak and trough, and the rise from there")
        print(octaves_table(curves, course, verdict).to_string(index=False))
        own = course.seeds.loc[verdict.peak + 1 :]
        if len(own):
            rises = own.iloc[-1] - own.min()
            print(
                "From the lowest octave of each seed itself to the last (too high by "
                "that choice): " + ", ".join(f"{rise:+.3f}" for rise in rises)
            )
        sentences.append(sentence_of(course, verdict, name))
        kinds.append(verdict.kind)
    sentences.append(what_rises(*kinds))
    print("\n" + "\n".join(filter(None, sentences)) + "\n")


def draw(curves: pandas.DataFrame) -> Figure:
    """Draw coupling of every seed by tokens, above, and losses below; a column for each
    setting. Without multiples of the identity the mean over the seeds that are no pilots
    is drawn.
    """
    settings = list(curves.groupby(SETTING, sort=False))
    figure = labels.new_figure(labels.PHONE_WIDTH, 6.4)
    grid = figure.subplots(2, len(settings), sharex="col", squeeze=False)
    verdicts = set()
    for column, ((width, n_layers, _, k), of_setting) in enumerate(settings):
        above, below = grid[:, column]
        draw_couplings(above, of_setting)
        draw_losses(below, of_setting)
        above.set_title(f"width {width}, {n_layers} blocks, k = {k}", fontsize="small")
        verdicts.add(verdict_of(course_of(of_setting, "coupling")).kind)
    grid[0, 0].set_ylabel("mean coupling", fontsize="small")
    grid[1, 0].set_ylabel("loss, nats", fontsize="small")
    labels.legend_below(figure, *grid[:, 0])
    labels.entitle(
        figure,
        f"{title_of(verdicts)}\nlines: seeds · dotted: pilots, which chose what is "
        "compared",
    )
    return figure


def title_of(verdicts: set[str]) -> str:
    """Return what is seen where all settings earned one sentence; else what is asked."""
    titles = {
        "rises": "Coupling falls, and rises again",
        "stays down": "Coupling rises, falls and stays down",
    }
    return titles.get("".join(verdicts), "Does coupling come back?")


def draw_couplings(ax: Axes, curves: pandas.DataFrame) -> None:
    """Draw coupling of every seed, and its mean without multiples of the identity."""
    draw_seeds(ax, curves, "coupling", labels.BLUE, "coupling")
    trained = curves[(curves["step"] > 0) & (curves["role"] == MAIN)]
    mean = trained.groupby("tokens")["coupling_without_identity"].mean()
    look = {"color": labels.ORANGE, "linestyle": "--", "linewidth": 1.6}
    ax.plot(mean.index, mean, label="without identity, mean", **look)
    chance = curves["chance"].iloc[0]
    ax.axhline(chance, label=f"{RANDOM_SUBSPACES}, {chance:.3f}", **labels.NULL_LINE)
    ax.tick_params(labelsize="small")


def draw_losses(ax: Axes, curves: pandas.DataFrame) -> None:
    """Draw the loss of every seed on held-out text and on the text that is learned."""
    draw_seeds(ax, curves, "loss_held_out", labels.BLACK, "held-out loss")
    draw_seeds(ax, curves, "loss_training", labels.GREEN, "of the learned text")
    ax.set_xscale("log")
    ax.set_xlabel("tokens", fontsize="small")
    ax.tick_params(labelsize="small")


def draw_seeds(
    ax: Axes, curves: pandas.DataFrame, column: str, color: str, name: str
) -> None:
    """Draw a quantity by tokens, a line for each seed; the first of them has the name."""
    trained = curves[curves["step"] > 0]
    names = dict.fromkeys(trained.loc[trained["role"] == MAIN, "seed"].head(1), name)
    for seed, of_seed in trained.groupby("seed"):
        style = ":" if of_seed["role"].iloc[0] == PILOT else "-"
        look = {"color": color, "linestyle": style, "linewidth": 0.9}
        ax.plot(of_seed["tokens"], of_seed[column], label=names.get(seed, ""), **look)
