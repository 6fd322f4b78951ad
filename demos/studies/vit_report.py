"""The statistics, tables and figures of `vit.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas
import xarray
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.pictures import labels
from tl_coupling.statistics import crossed_mean, is_constant, rank_correlation
from tl_coupling.studies.generalization import FEWEST_RESAMPLED, bootstrap, linear_fit

DECAY = "weight_decay"
RATE = "stochastic_depth"
ACCURACY = "test_accuracy"
ALL_MODELS = "all models"
# What `means` are taken of, beside coupling.
MEANS = ("train_accuracy", ACCURACY, "train_loss", "idle_weights_left")


@dataclass(frozen=True, eq=False)
class Study:
    """Models and their coupling.

    Attributes:
        name, n_train, n_test: of the images; how many are learned, and how many
            accuracy is measured on.
        models: one row each: how it was trained, accuracies as shares, losses in nats.
        coupling: mean over pairs of different blocks, `[position model prompt]`, in the
            order of the rows. Position 0 is the class token, the last one the last
            patch.
        k: singular vectors.
    """

    name: str
    n_train: int
    n_test: int
    models: pandas.DataFrame
    coupling: xarray.DataArray
    k: int

    @property
    def n_images(self) -> int:
        """On which coupling was measured."""
        return self.coupling.sizes["prompt"]

    @property
    def null(self) -> float:
        """The coupling of random subspaces."""
        return self.coupling.attrs["null"]

    @property
    def per_image(self) -> dict[str, Float[np.ndarray, "n_models n_images"]]:
        """Coupling at the class token, at the last patch, and in the mean over the
        patches that were measured.
        """
        values = self.coupling.transpose("position", "model", "prompt").values
        return {
            "class token": values[0],
            "last patch": values[-1],
            "patches": values[1:].mean(0),
        }

    @property
    def table(self) -> pandas.DataFrame:
        """The models, with a column for each of `per_image`: its mean over images."""
        return self.models.assign(
            **{token: values.mean(1) for token, values in self.per_image.items()}
        )


def levels(study: Study, column: str) -> list[float]:
    """Return the weight decays or rates of the grid, in order."""
    return sorted(study.models[column].unique().tolist())


def held_fixed(study: Study, *columns: str) -> list[str]:
    """Return controls that hold a factor fixed, whatever its effect: one indicator for each
    level but the first.
    """
    return [
        f"{column} == {level!r}"
        for column in columns
        for level in levels(study, column)[1:]
    ]


def claims(study: Study) -> tuple[pandas.DataFrame, list[str]]:
    """Both claims for each token, and why rows are missing: with too few models, or
    where all are alike.

    Rows: coupling on the rate, at each weight decay and with it held fixed; accuracy on
    coupling, at each rate and with it held fixed, by indicators or as a line, and with
    the weight decay too. Columns: `n` models; the `slope` (of coupling per unit of
    rate; of accuracy, as a share, per unit of coupling) with its t interval,
    `slope_low` and `slope_high`, and `p`; its interval by resampling models and images,
    `boot_low` and `boot_high`; Spearman's `rho`, with `rho_low` and `rho_high`
    likewise. Nothing is resampled where something is held fixed, or where there are
    fewer than `FEWEST_RESAMPLED` models.
    """
    rows = []
    left_out = []
    for token in study.per_image:
        cases: list[tuple[str, str, str, pandas.Series | None, list[str]]] = [
            *(
                (f"{DECAY} {level:g}", RATE, token, study.models[DECAY] == level, [])
                for level in levels(study, DECAY)
            ),
            (f"{DECAY} held fixed", RATE, token, None, held_fixed(study, DECAY)),
            *(
                (f"{RATE} {level:g}", token, ACCURACY, study.models[RATE] == level, [])
                for level in levels(study, RATE)
            ),
            (ALL_MODELS, token, ACCURACY, None, []),
            (f"{RATE} held fixed", token, ACCURACY, None, held_fixed(study, RATE)),
            (f"{RATE} held fixed, linearly", token, ACCURACY, None, [RATE]),
            (
                f"{RATE} and {DECAY} held fixed",
                token,
                ACCURACY,
                None,
                held_fixed(study, RATE, DECAY),
            ),
        ]
        for among, x, y, members, controls in cases:
            claim = (
                f"{'coupling' if x == RATE else 'accuracy'} on "
                f"{'rate' if x == RATE else 'coupling'}"
            )
            try:
                fitted = association(study, token, x, y, members, controls)
            except ValueError as error:
                left_out.append(f"{claim}, {token}, {among.replace('_', ' ')}: {error}")
            else:
                rows.append(
                    {"claim": claim, "token": token, "among": among.replace("_", " ")}
                    | fitted
                )
    return pandas.DataFrame(rows), left_out


def association(
    study: Study,
    token: str,
    x: str,
    y: str,
    members: pandas.Series | None,
    controls: Sequence[str],
) -> dict[str, float]:
    """One row of `claims`. ValueError where there are too few models, or x or y is the
    same for all of them.
    """
    mask = np.ones(len(study.models), bool) if members is None else members.to_numpy()
    table = study.table[mask]
    fit = linear_fit(table, x, y, controls=controls)
    low, high = fit.slope_interval
    row = {
        "n": fit.n,
        "slope": fit.slope,
        "slope_low": low,
        "slope_high": high,
        "p": fit.p,
    }
    if controls:
        return row
    rank = rank_correlation(table[x].to_numpy(), table[y].to_numpy())
    row["rho"] = rank.rho
    if fit.n < FEWEST_RESAMPLED:
        return row
    of_images = study.per_image[token][mask]
    # Accuracy and rate are the same for all images.
    drawn_x, drawn_y = (
        of_images
        if name == token
        else np.repeat(table[[name]].to_numpy(float), of_images.shape[1], 1)
        for name in (x, y)
    )
    drawn = bootstrap(drawn_x, drawn_y)
    row |= {"boot_low": drawn.slope[0], "boot_high": drawn.slope[1]}
    return row | {"rho_low": drawn.rho[0], "rho_high": drawn.rho[1]}


def means(study: Study, column: str) -> pandas.DataFrame:
    """Means over the models of each weight decay or rate; of coupling with t intervals
    over models and images.
    """
    rows = []
    for level in levels(study, column):
        mask = (study.models[column] == level).to_numpy()
        row = {column: level, "n": int(mask.sum())} | study.models.loc[
            mask, list(MEANS)
        ].mean().to_dict()
        means_and_halves = crossed_mean(
            np.stack([values[mask] for values in study.per_image.values()], -1)
        )
        for token, mean, half in zip(study.per_image, *means_and_halves, strict=True):
            row |= {
                token: mean,
                f"{token}_low": mean - half,
                f"{token}_high": mean + half,
            }
        rows.append(row)
    return pandas.DataFrame(rows)


def print_report(
    study: Study, tables: Mapping[str, pandas.DataFrame], left_out: Sequence[str]
) -> None:
    """Tables of `means` and `claims`, and how many intervals lie on one side of 0."""
    accuracy = study.models[ACCURACY]
    print(
        f"{described(study)}, k = {study.k}; random subspaces have a coupling of "
        f"{study.null:.3f}"
    )
    low, mean, high = (
        f"{100 * value:.1f}"
        for value in (accuracy.min(), accuracy.mean(), accuracy.max())
    )
    error = 100 * np.sqrt(accuracy.mean() * (1 - accuracy.mean()) / study.n_test)
    print(
        f"{study.n_train} images to learn from; test accuracy {low} "
        f"to {high} %, on average {mean} %"
    )
    print(
        f"Standard error of an accuracy, being over {study.n_test} "
        f"images: {error:.2f} percentage points"
    )
    for column in (RATE, DECAY):
        print(
            f"\nMeans by {column.replace('_', ' ')}; of coupling with 95 "
            f"% t intervals over models and images"
        )
        print(readable(tables[f"means-{column.replace('_', '-')}"]))
    for claim, rows in (
        tables["claims"].groupby("claim", sort=False) if len(tables["claims"]) else []
    ):
        print(
            f"\n{claim}: slope with its 95 % t interval over models; "
            f"boot: resampling models and images"
        )
        print(readable(rows.drop(columns="claim")))
        # With so many, one in twenty misses 0 by chance.
        for token, of_token in rows.groupby("token", sort=False):
            above = (of_token["slope_low"] > 0).sum()
            below = (of_token["slope_high"] < 0).sum()
            print(
                f"{token}: of {len(of_token)} t intervals {above} lie above 0, "
                f"{below} below"
            )
    print(*(f"left out: {line}" for line in left_out), sep="\n")


def readable(table: pandas.DataFrame) -> str:
    """Return a table as text, where intervals stand in brackets behind their estimates."""
    shown: dict[str, list[str]] = {}
    for name in table:
        stem = str(name).removesuffix("_low")
        if stem != name:
            pairs = zip(table[name], table[f"{stem}_high"], strict=True)
            texts = [
                "" if np.isnan(low) else f"[{low:.3f}, {high:.3f}]"
                for low, high in pairs
            ]
            estimates = shown.get(stem, [""] * len(table))
            shown[stem] = [
                f"{a} {b}".strip() for a, b in zip(estimates, texts, strict=True)
            ]
        elif not str(name).endswith("_high"):
            style = "{:.2g}" if name == "p" else "{:.3f}"
            is_float = table[name].dtype == float
            shown[stem] = [
                "" if pandas.isna(x) else style.format(x) if is_float else str(x)
                for x in table[name]
            ]
    return pandas.DataFrame(shown).to_string(index=False)


def draw_rates(study: Study) -> Figure:
    """Coupling against the rate, one line per weight decay, means over seeds; points
    are models.
    """
    figure, axes = panels(study)
    for ax, token in zip(axes, study.per_image, strict=True):
        for decay, look in labels.shaded(levels(study, DECAY)).items():
            rows = study.table[study.table[DECAY] == decay]
            mean = rows.groupby(RATE)[token].mean()
            ax.plot(mean.index, mean, label=f"weight decay {decay:g}", **look)
            points = look | {"linestyle": "", "markersize": 4, "alpha": 0.7}
            ax.plot(rows[RATE], rows[token], **points)
        ax.set_xlabel("stochastic depth,\nrate at the last block")
        labels.draw_null(ax.axhline, study.null)
    axes[0].set_ylabel(labels.measure_label("coupling", study.k))
    labels.entitle(
        figure,
        f"Coupling against stochastic depth, lines through means\n{described(study)}",
    )
    return finished(figure, axes[0])


def draw_accuracy(study: Study) -> Figure:
    """Test accuracy against coupling, one colour per rate, with the line through its
    models.
    """
    figure, axes = panels(study)
    for ax, token in zip(axes, study.per_image, strict=True):
        for rate, look in labels.shaded(levels(study, RATE)).items():
            rows = study.table[study.table[RATE] == rate]
            x = rows[token].to_numpy()
            y = 100 * rows[ACCURACY].to_numpy()
            points = look | {"linestyle": "", "markersize": 5}
            ax.plot(x, y, label=f"stochastic depth {rate:g}", **points)
            if len(rows) > 2 and not is_constant(x):
                ends = np.array([x.min(), x.max()])
                ax.plot(
                    ends,
                    np.polyval(np.polyfit(x, y, 1), ends),
                    color=look["color"],
                    linewidth=1,
                )
        ax.set_xlabel(labels.measure_label("coupling", study.k))
        ax.xaxis.set_major_locator(MaxNLocator(6))
    axes[0].set_ylabel("test accuracy (%)")
    labels.entitle(figure, f"Accuracy against coupling\n{described(study)}")
    return finished(figure, axes[0])


def panels(study: Study) -> tuple[Figure, list[Axes]]:
    """One for each token."""
    figure = labels.new_figure(labels.PAGE_WIDTH, 4.2)
    axes = list(figure.subplots(1, len(study.per_image), sharey=True, squeeze=False)[0])
    n = study.coupling.sizes["position"] - 1
    for ax, token in zip(axes, study.per_image, strict=True):
        labels.entitle(
            ax,
            f"mean over {n} patch{'es' if n > 1 else ''}"
            if token == "patches"
            else token,
        )
    return figure, axes


def described(study: Study) -> str:
    return f"{len(study.models)} ViTs on {study.name}, mean over {study.n_images} test images"


def finished(figure: Figure, ax: Axes) -> Figure:
    """One legend for all panels."""
    labels.legend_below(figure, ax, ncols=3)
    return figure
