"""What the statistics are about: one row per model, with its coupling, its score and
what else is known of it.
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import pandas
import xarray

from tl_coupling.arguments import AnyPath, checked, warn_caller
from tl_coupling.files import of_cell
from tl_coupling.statistics import check_size
from tl_coupling.statistics.fits import family_codes
from tl_coupling.surveys.checkpoints import step_order
from tl_coupling.surveys.readings import one_orientation
from tl_coupling.surveys.survey import UNTRAINED

# In place of a checkpoint: each model's own last.
LAST = "last"
FAMILY = "family"
_KNOWN_OF_MODELS = ("n_layers", "d_model", "n_parameters", "training_tokens")


def paper_table1() -> pandas.DataFrame:
    """Table 1 of Aubry et al. 2025 (arXiv 2407.07810): models, their sizes, and their
    scores as printed there.

    Columns: `model` (its name on the hub, which is ours), `family`, `variant`,
    `params_billion`, `n_layers`, `d_model`, `training_tokens`, `score`,
    `positional_encoding`. Six of the 42 rows have no score, and some scores look wrong:
    see `data/README.md`.

    Example:
        >>> len(tlc.generalization.paper_table1())
        42
    """
    with files("tl_coupling").joinpath("data/paper_table1.csv").open() as file:
        return pandas.read_csv(file)


@checked
def read_scores(path: AnyPath, *, score: str = "score") -> pandas.DataFrame:
    """Scores of models, from a CSV file with a header line.

    Args:
        path: a file with the column `model` and the one named by `score`, empty where
            it is unknown; `checkpoint` where models have several; `family` where models
            are related; any others, such as `training_tokens` or a score for each task.
            Names of the survey's own columns are refused when the two are put together.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a CSV file; a column missing; a score that is not a finite
            number, or above 1e50 in size, or all of them below 1e-50; a model twice;
            fewer than three scores.

    Example:
        >>> scores = tlc.generalization.read_scores("scores.csv")
        >>> scores.columns.tolist(), len(scores)
        (['model', 'score'], 6)
    """
    text: dict[str, Any] = {
        "dtype": str,
        "keep_default_na": False,
        "skipinitialspace": True,
        "encoding": "utf-8-sig",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # As text: a model may be called NA, a checkpoint 0010. With an index, long
            # lines would shift their columns.
            read = pandas.read_csv(path, index_col=False, **text)
            # pandas would number columns of one name.
            heads = (
                pandas.read_csv(path, header=None, nrows=1, **text).iloc[0].str.strip()
            )
    except pandas.errors.ParserWarning:
        raise ValueError(
            f"{os.fspath(path)}: lines are longer than the header"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)}: not a CSV file with a header line: {error}"
        ) from None
    if heads.duplicated().any():
        raise ValueError(
            f"{os.fspath(path)}: more than one column {heads[heads.duplicated()].iloc[0]!r}"
        )
    # Tables that the package wrote mark what spreadsheets would take for a formula.
    read = read.map(of_cell)
    read.columns = read.columns.str.strip().map(of_cell)
    for name in read.columns.difference(["model", "checkpoint"]):
        with contextlib.suppress(ValueError):
            read[name] = pandas.to_numeric(read[name].str.strip().replace("", np.nan))
    try:
        return checked_scores(read, score)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def checked_scores(
    scores: pandas.DataFrame, score: str, models: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Scores of these models, with a warning of others, or of all; keys as text. Errors
    as in `read_scores`.
    """
    if missing := [name for name in ("model", score) if name not in scores]:
        raise ValueError(
            f"no column {' or '.join(map(repr, missing))}; the columns are {', '.join(scores)}"
        )
    keys = [name for name in ("model", "checkpoint") if name in scores]
    numbers = pandas.to_numeric(scores[score], errors="coerce")
    wrong = (numbers.isna() & ~scores[score].isna() & (scores[score] != "")) | np.isinf(
        numbers
    )
    if wrong.any():
        row = scores[wrong].iloc[0]
        raise ValueError(
            f"{score!r} of model {row['model']!r} must be a finite number, got {row[score]!r}"
        )
    check_size(numbers.to_numpy(float), repr(score))
    texts = {key: scores[key].astype(str).str.strip() for key in keys}
    scores = scores.assign(**texts, **{score: numbers.astype(float)})
    if (twice := scores.duplicated(keys)).any():
        raise ValueError(
            f"more than one row for {' at '.join(scores[twice].iloc[0][keys])}"
        )
    if models is not None:
        if unknown := sorted(set(scores["model"]) - set(models)):
            warn_caller(
                f"scores of models that were not measured: {', '.join(unknown)}; measured: {', '.join(models)}"
            )
        scores = scores[scores["model"].isin(models)]
    if (found := scores.loc[scores[score].notna(), "model"].nunique()) < 3:
        raise ValueError(
            f"scores of at least three {'measured ' if models else ''}models are needed, got {found}"
        )
    return scores


def measured(
    held: xarray.Dataset,
    scores: pandas.DataFrame | str,
    measure: str,
    score: str,
    checkpoint: int | str | None,
) -> tuple[pandas.DataFrame, np.ndarray, np.ndarray, dict[str, str]]:
    """Coupling and score of each model of `per_prompt` at one checkpoint; those of one
    model are not independent.

    The checkpoint is as in `at_one_checkpoint`; of "last" the last at which a model has
    both.

    Returns the table, with columns `measure` and `score`, by place along `row`;
    coupling on each prompt, NaN where it was not measured; the score, or the loss on
    each prompt; which models lack what. Warns where models were measured on different
    prompts.
    """
    there = coupling_table(held, scores, measure=measure, score=score)
    scored = there.dropna(subset=[score])
    here = at_one_checkpoint(there, checkpoint)
    rows = (
        at_one_checkpoint(scored, LAST)
        if checkpoint == LAST
        else here.dropna(subset=[score])
    )
    left_out = {}
    for model in dict.fromkeys(held["model"].values.tolist()):
        if model not in set(rows["model"]):
            is_measured = model in set(here["model"])
            what, elsewhere = (
                (score, scored)
                if is_measured
                else (f"{measure} at k = {held['k'].item()}", there)
            )
            left_out[model] = (
                f"no {what}{_only_at(elsewhere[elsewhere['model'] == model], here, checkpoint)}"
            )
    if len(rows) < 3:
        got = f"{len(rows)}: {', '.join(rows['model']) or 'none'}"
        got += "".join(f"; {model}: {why}" for model, why in [*left_out.items()][:1])
        raise ValueError(
            f"{measure} against {score} needs at least three models that have both, got {got}"
        )
    x = held["x"].values[rows.index]
    if lacking := ", ".join(rows["model"][np.isnan(x).any(1)]):
        # Once for one set of models, whichever k or task is looked at.
        warnings.warn(
            f"{lacking}: some prompts were not measured, and their means are over the others",
            stacklevel=1,
        )
    y = (
        held["loss"].values[rows.index]
        if isinstance(scores, str)
        else rows[score].to_numpy(float)
    )
    return rows, x, y, left_out


def _only_at(
    elsewhere: pandas.DataFrame, rows: pandas.DataFrame, checkpoint: int | str | None
) -> str:
    """Where a model has what it lacks at the checkpoint of the rows, if anywhere, and
    how to take it there.
    """
    names = elsewhere["checkpoint"].astype(str)
    others = names[(names != UNTRAINED) | (str(checkpoint) == UNTRAINED)].tolist()
    if not others or rows.empty or checkpoint == LAST:
        return ""
    return f" at checkpoint {rows['checkpoint'].iloc[0]}, only at {', '.join(others)} (“{LAST}” takes each model's last)"


def at_one_checkpoint(
    rows: pandas.DataFrame, checkpoint: int | str | None
) -> pandas.DataFrame:
    """The rows of a checkpoint; by default the last of all, untrained twins aside. The
    index stays.

    "last" is each model's own last: models are then compared at different checkpoints.
    """
    names = rows["checkpoint"].astype(str)
    trained = rows[names != UNTRAINED]
    if checkpoint == LAST or (trained.empty and checkpoint is None):
        return trained.groupby("model", sort=False).tail(1)
    wanted = str(
        max(trained["checkpoint"], key=step_order) if checkpoint is None else checkpoint
    )
    if not (names == wanted).any():
        raise ValueError(
            f"checkpoint {checkpoint!r} was not measured; there are {', '.join(names.unique())}"
        )
    return rows[names == wanted]


def with_families(
    table: pandas.DataFrame, families: Mapping[str, str] | None
) -> tuple[pandas.DataFrame, str | None]:
    """The table with its column of families, and the name of it where some models are
    related and others are not.

    Families are those given by model, else those of the scores; a model without one is
    of none.
    """
    if families is not None:
        table = table.assign(**{FAMILY: table["model"].map(dict(families))})
    if FAMILY not in table:
        return table, None
    n_families = family_codes(table, FAMILY).max() + 1
    return table, FAMILY if 1 < n_families < len(table) else None


def needed(
    data: xarray.Dataset, measure: str, also: Sequence[str] = ()
) -> xarray.Dataset:
    """What the statistics of a measure need of a survey, in memory, for all k; maps of
    pairs of layers are not read.
    """
    data, variable = one_orientation(data), f"mean_{measure}"
    if variable not in data or not {"k", "prompt"} <= set(data[variable].dims):
        held = ", ".join(map(str, data.data_vars))
        raise ValueError(
            f"no {variable!r} along `k` and `prompt` in the survey; it holds {held}"
        )
    if not data.sizes["k"]:
        raise ValueError("the survey holds no k: measure some first")
    wanted = dict.fromkeys(
        (variable, f"null_{measure}", "loss", *_KNOWN_OF_MODELS, *also)
    )
    names = [
        name for name in wanted if name in data.variables and name not in data.dims
    ]
    return data.reset_coords([name for name in names if name in data.coords])[
        names
    ].load()


def per_prompt(
    data: xarray.Dataset, k: int | None, measure: str, also: Sequence[str] = ()
) -> xarray.Dataset:
    """What tables are made of: `x`, `null`, `loss`, what is known of models, and the
    variables in `also`.

    Along `row`, each model with its checkpoints in order, and `prompt`, without prompts
    that no model was measured on.
    """
    held = needed(data, measure, also)
    k = int(held["k"].max()) if k is None else k
    if k not in held["k"].values:
        raise ValueError(
            f"`k` = {k} was not measured; there are {sorted(data['k'].values.tolist())}"
        )
    names = {f"mean_{measure}": "x", f"null_{measure}": "null"}
    held = held.sel(k=k).rename(
        {name: new for name, new in names.items() if name in held}
    )
    held = held.dropna("prompt", how="all", subset=["x"])
    if not held["x"].size:
        raise ValueError(
            f"the survey holds no {measure} of any model on any prompt: measure some first"
        )
    return in_rows(held, data)


def in_rows(held: xarray.Dataset, data: xarray.Dataset) -> xarray.Dataset:
    """Part of a survey along `row`, each model with its checkpoints in order, in place
    of `model` and `checkpoint`.
    """
    for dim, name in (
        ("model", str(data.attrs.get("model") or "model")),
        ("checkpoint", "main"),
    ):
        held = held if dim in held.dims else held.expand_dims({dim: [name]})
    held = held.sel(
        checkpoint=sorted(held["checkpoint"].values.tolist(), key=step_order)
    )
    return held.stack(row=("model", "checkpoint"), create_index=False).transpose(
        "row", ...
    )


def coupling_table(
    held: xarray.Dataset,
    scores: pandas.DataFrame | str | None = None,
    *,
    measure: str,
    score: str = "score",
) -> pandas.DataFrame:
    """One row for each model and checkpoint of `per_prompt` that was measured; the
    index is the place along `row`.

    Columns `model`, `checkpoint`, one named after the measure (mean over prompts),
    `null` (what random subspaces would give), the score or `loss`, what is known of
    models, and any other column of `scores`. Errors as in `read_scores`, and ValueError
    for scores with a column that the survey has too, unless both say the same of the
    models.
    """
    if isinstance(scores, str):
        if scores != "loss":
            raise ValueError(f'`scores` must be a table or "loss", got {scores!r}')
        if "loss" not in held or bool(held["loss"].isnull().all()):
            raise ValueError("the survey holds no loss: give scores")
    wanted = [
        "model",
        "checkpoint",
        "x",
        "null",
        *(["loss"] if isinstance(scores, str) else []),
        *_KNOWN_OF_MODELS,
    ]
    frame = (
        held.mean("prompt").to_dataframe().filter(wanted).rename(columns={"x": measure})
    )
    frame = frame.dropna(subset=[measure]).astype({"model": str})
    if scores is None or isinstance(scores, str):
        return frame
    if score in frame or (score == "loss" and "loss" in held):
        raise ValueError(
            f"the survey has a column {score!r} of its own: rename that of the scores"
        )
    scores = checked_scores(
        scores, score, list(dict.fromkeys(held["model"].values.astype(str).tolist()))
    )
    keys = ["model", "checkpoint"] if "checkpoint" in scores else ["model"]
    given = (
        frame[keys]
        .astype(str)
        .merge(scores, on=keys, how="left")
        .set_index(frame.index)
    )
    _check_columns(frame, given)
    for name in given.columns.drop(keys):
        frame[name] = frame[name].fillna(given[name]) if name in frame else given[name]
    # What was measured first, then the score.
    return frame.filter(
        dict.fromkeys(["model", "checkpoint", measure, "null", score, *frame])
    )


def _check_columns(frame: pandas.DataFrame, given: pandas.DataFrame) -> None:
    """Raise where scores, in the rows of the survey's table, have a column of its own;
    facts may agree, or fill it.
    """
    for name in given.columns.intersection(frame.columns).drop(
        ["model", "checkpoint"], errors="ignore"
    ):
        both = frame[name].notna() & given[name].notna()
        differs = both & (frame[name] != given[name])
        if name in _KNOWN_OF_MODELS and not differs.any():
            continue
        row = (differs if differs.any() else both).idxmax()
        values = f"{frame.loc[row, name]} and {given.loc[row, name]} of {frame.loc[row, 'model']}"
        raise ValueError(
            f"the survey has a column {name!r} of its own, and the scores another one ({values}); rename that of the "
            "scores, or leave it out"
        )
