"""The statistics, tables and figure of `gap.py`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from matched_losses import END, UNTRAINED, spread_out
from slopes import Design, design_of
from tl_coupling.pictures import labels
from vit_report import readable

CELL = ["n_tokens", "other_text", "learning_rate"]
STEP = "log2(step)"
COLUMNS = ["run", "seed", "subset", *CELL, "mark", "step", STEP]
COLUMNS += ["loss_training", "loss_held_out", "gap"]
COLUMNS += ["size", "null", "value", "coupling"]


@dataclass(frozen=True)
class Question:
    """A slope of `y` on `x` within the groups of `fixed`, beside covariates."""

    y: str
    x: str
    fixed: tuple[str, ...]
    covariates: tuple[str, ...] = ()


TEXT = ("subset",)
TEXT_AND_RATE = ("subset", "learning_rate")
# What is asked, and what is held fixed.
QUESTIONS = {
    "gap on share of other text": Question("gap", "other_text", TEXT_AND_RATE),
    "step on share of other text": Question(STEP, "other_text", TEXT_AND_RATE),
    "coupling on share of other text": Question(
        "coupling", "other_text", TEXT_AND_RATE
    ),
    "the same, and step": Question("coupling", "other_text", TEXT_AND_RATE, (STEP,)),
    "gap on coupling, over all": Question("gap", "coupling", ()),
    "given text": Question("gap", "coupling", TEXT),
    "given text and step": Question("gap", "coupling", TEXT, (STEP,)),
    "given text, step and rate": Question("gap", "coupling", TEXT_AND_RATE, (STEP,)),
}
# The question that the power is about.
DECIDING = "given text, step and rate"
# All that can be held fixed in the slope of the gap on coupling: `QUESTIONS` asks for
# four of these, the others were added when all was seen.
ADJUSTMENTS = {
    "nothing": Question("gap", "coupling", ()),
    "text": Question("gap", "coupling", TEXT),
    "step": Question("gap", "coupling", (), (STEP,)),
    "rate": Question("gap", "coupling", ("learning_rate",)),
    "text, step": Question("gap", "coupling", TEXT, (STEP,)),
    "text, rate": Question("gap", "coupling", TEXT_AND_RATE),
    "step, rate": Question("gap", "coupling", ("learning_rate",), (STEP,)),
    "text, step, rate": Question("gap", "coupling", TEXT_AND_RATE, (STEP,)),
}


def models_of(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return one row per model and mark, of the first size, with the gap, coupling's
    share above chance, and the step in octaves; `table` is of `matched_losses.table_of`.
    """
    is_first = table["size"] == table["size"].iloc[0]
    is_coupling = table["measure"] == "coupling"
    models = table[is_first & is_coupling].rename(columns={"above_chance": "coupling"})
    gap = models["loss_held_out"] - models["loss_training"]
    octaves = np.log2(models["step"].where(models["step"] > 0))
    return models.assign(gap=gap, **{STEP: octaves})[COLUMNS]


def marks_in(table: pandas.DataFrame) -> list[str]:
    """Return the losses that are marked, in order."""
    return [mark for mark in table["mark"].unique() if mark not in (UNTRAINED, END)]


def reached_of(table: pandas.DataFrame, mark: str) -> pandas.DataFrame:
    """Return the models that reached a mark."""
    return table[table["mark"] == mark].dropna(subset=["coupling", "gap", STEP])


def design_at(reached: pandas.DataFrame, question: Question) -> Design:
    """Return the design of a question; subsets are the clusters."""
    return design_of(reached, question.x, question.covariates, question.fixed, "subset")


def effects(
    table: pandas.DataFrame, questions: Mapping[str, Question] = QUESTIONS
) -> pandas.DataFrame:
    """Every question's slope at every mark.

    Columns: `slope` with intervals that hold together with 95 % over all rows (CR2 with
    subsets as clusters, Bell and McCaffrey's degrees of freedom `df`); `vif`, see
    `slopes.Slope`.
    """
    marks = marks_in(table)
    n_looks = len(questions) * len(marks)
    rows = []
    for mark in marks:
        reached = reached_of(table, mark)
        for name, question in questions.items():
            row = {"mark": mark, "question": name, "n": len(reached)}
            rows.append(row | slope_of(reached, question, n_looks))
    return pandas.DataFrame(rows)


def slope_of(
    reached: pandas.DataFrame, question: Question, n_looks: int
) -> dict[str, float]:
    """Return a row's numbers; none where models are too few."""
    try:
        design = design_at(reached, question)
    except ValueError:
        return {}
    slope = design.slope(reached[question.y].to_numpy())
    low, high = slope.interval(n_looks)
    return {
        "df": slope.freedom,
        "slope": slope.estimate,
        "slope_low": low,
        "slope_high": high,
        "vif": slope.vif,
    }


def power_of(pilot: pandas.DataFrame, n_subsets: int, n_draws: int) -> str:
    """Say which slope of the gap on coupling the whole study can see with 80 %.

    The pilot's rows stand for every further subset. To its slope 0 noise is added that
    is normal, with the variance of the pilot's residuals, and the study's own interval
    is taken of it.
    """
    question = QUESTIONS[DECIDING]
    marks = marks_in(pilot)
    n_looks = len(QUESTIONS) * len(marks)
    lines = [
        f"Power, said before the other subsets were learned: gap on coupling, {DECIDING}"
    ]
    for mark in marks:
        reached = reached_of(pilot, mark)
        try:
            design = design_at(reached, question)
            y = reached[question.y].to_numpy()
            residuals = y - design.columns @ np.linalg.lstsq(design.columns, y)[0]
            freedom = len(y) - np.linalg.matrix_rank(design.columns)
            noise = np.sqrt((residuals**2).sum() / freedom)
            copies = [
                reached.assign(subset=reached["subset"] + f", copy {i}")
                for i in range(n_subsets)
            ]
            whole = design_at(pandas.concat(copies), question)
        except ValueError as error:
            lines.append(f"{mark}: not known: {error}")
            continue
        slope = detectable(whole, noise, n_looks, n_draws)
        lines.append(
            f"{mark}: 80 % of simulated studies see a slope of {slope:.2f} nats per unit "
            f"of coupling;\n  noise {noise:.3f} nats; coupling within texts and rates, "
            f"beside the step: sd {left_of(whole):.4f}"
        )
    return "\n".join(lines)


def left_of(design: Design) -> float:
    """Return the standard deviation of x that the other columns do not explain."""
    x = design.columns[:, 0]
    others = design.columns[:, 1:]
    return float((x - others @ np.linalg.lstsq(others, x)[0]).std())


def detectable(design: Design, noise: float, n_looks: int, n_draws: int) -> float:
    """Return the smallest slope that is seen in 80 % of draws: its interval leaves out
    0.
    """
    rng = np.random.default_rng(0)
    needed = []
    for _ in range(n_draws):
        slope = design.slope(noise * rng.standard_normal(len(design.columns)))
        # A true slope b is seen where b + estimate exceeds the half width.
        half_width = slope.error * stats.t.ppf(1 - 0.025 / n_looks, slope.freedom)
        needed.append(half_width - slope.estimate)
    return float(np.quantile(needed, 0.8))


def report_of(table: pandas.DataFrame, n_draws: int) -> str:
    """Return all tables as text, one after the other; `table` is of `models_of`."""
    marks = marks_in(table)
    slopes = effects(table)
    groups = table.groupby(["mark", *CELL], sort=False)
    means = groups[["step", "gap", "coupling"]].mean()
    means = means.join(groups["coupling"].agg(reached="count")).reset_index()
    cell = "{gap:.2f}, {coupling:.3f}, {step:.0f}".format_map
    is_first = table["subset"].str.endswith(", 0")
    n_subsets = table["subset"].nunique()
    per_amount = n_subsets // table["n_tokens"].nunique()
    return "\n\n".join(
        [
            "Gap between held-out and training loss in nats, share above chance, "
            f"{table['size'].iloc[0]}, and step: means over subsets",
            spread_out(means[means["mark"].isin(marks)], CELL, marks, cell),
            power_of(table[is_first], per_amount, n_draws),
            "Slopes: of the gap and of coupling per unit of share, of the gap per unit "
            f"of coupling.\nIntervals: CR2, t, over {n_subsets} subsets as clusters; "
            f"the {len(slopes)} hold together with 95 % (Bonferroni).\nvif: by how much "
            "covariates inflate the variance, beside what is held fixed",
            readable(slopes),
            "Gap per unit of coupling, by what is held fixed; text: a constant for each "
            "subset.\nThe same intervals; the others than those above were added when "
            "the results were known",
            readable(effects(table, ADJUSTMENTS)),
        ]
    )


def draw(table: pandas.DataFrame) -> Figure:
    """Gap and coupling against the share of other text, and one against the other
    within subsets, a column for each mark.
    """
    marks = marks_in(table)
    figure = labels.new_figure(labels.PHONE_WIDTH, 7.6)
    columns = figure.subplots(3, len(marks), sharey="row", squeeze=False).T
    for axes, mark in zip(columns, marks, strict=True):
        reached = reached_of(table, mark)
        draw_against_share(axes[0], reached, "gap")
        draw_against_share(axes[1], reached, "coupling")
        draw_within(axes[2], reached)
        axes[0].set_title(f"{mark} nats", fontsize="small")
        for ax in axes:
            ax.tick_params(labelsize="small")
    y_labels = ("gap, nats", "coupling: share above chance", "gap less mean")
    for ax, label in zip(columns[0], y_labels, strict=True):
        ax.set_ylabel(label, fontsize="small")
    labels.legend_below(figure, columns[0][0], columns[0][2])
    title = "Gap and coupling at equal training loss"
    small = "lines: means over models · below: both less the means of their subset"
    labels.entitle(figure, f"{title}\n{small}")
    return figure


def draw_against_share(ax: Axes, reached: pandas.DataFrame, y: str) -> None:
    """A line through means for each amount of text; points are models."""
    for n_tokens, look in labels.shaded(reached["n_tokens"]).items():
        rows = reached[reached["n_tokens"] == n_tokens]
        means = rows.groupby("other_text")[y].mean()
        ax.plot(means.index, means, markersize=4, label=f"{n_tokens} tokens", **look)
        points = look | {"linestyle": "", "markersize": 2.5, "alpha": 0.5}
        ax.plot(rows["other_text"], rows[y], **points)
    ax.set_xlabel("share of other text", fontsize="small")


def draw_within(ax: Axes, reached: pandas.DataFrame) -> None:
    """Both less the means of their subset; colours are learning rates."""
    columns = ["coupling", "gap"]
    means = reached.groupby("subset")[columns].transform("mean")
    within = reached[columns] - means
    rates = sorted(reached["learning_rate"].unique())
    # Two that differ in lightness, for colour-blind readers too.
    for rate, color in zip(rates, (labels.VERMILION, labels.SKY), strict=False):
        rows = within[reached["learning_rate"] == rate]
        look = labels.marked(color) | {"linestyle": "", "markevery": 1}
        ax.plot(rows["coupling"], rows["gap"], label=f"learning rate {rate:g}", **look)
    ax.set_xlabel("coupling less mean", fontsize="small")
