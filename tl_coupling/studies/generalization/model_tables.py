"""What the statistics are about: one row per model, with its coupling, its score and
what else is known of it.
"""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import numpy as np
import pandas
import xarray
from jaxtyping import Bool, Float

from tl_coupling.arguments import AnyPath, checked, warn_caller
from tl_coupling.files import of_cell
from tl_coupling.measures import mean_name, null_name
from tl_coupling.statistics import check_size, family_codes
from tl_coupling.studies.surveys import UNTRAINED, select_orientation, step_order

# In place of a checkpoint: each model's own last.
LAST = "last"
FAMILY = "family"
_KNOWN_OF_MODELS = ("n_layers", "d_model", "n_parameters", "training_tokens")


def paper_table1() -> pandas.DataFrame:
    """Return table 1 of Aubry et al. 2025 (arXiv 2407.07810).

    It holds models, their sizes, and their scores as printed there.

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
    """Read the scores of models from a CSV file with a header line.

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
    try:
        table, header = _read_texts(path)
    except pandas.errors.ParserWarning:
        raise ValueError(
            f"{os.fspath(path)}: lines are longer than the header"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)}: not a CSV file with a header line: {error}"
        ) from None
    is_repeated = header.duplicated()
    if is_repeated.any():
        name = header[is_repeated].iloc[0]
        raise ValueError(f"{os.fspath(path)}: more than one column {name!r}")
    # Tables that the package wrote mark what spreadsheets would take for a formula.
    table = table.map(of_cell)
    table.columns = table.columns.str.strip().map(of_cell)
    # Names stay text, whatever they look like; other columns become numbers if they
    # can.
    for name in table.columns.difference(["model", "checkpoint"]):
        texts = table[name].str.strip().replace("", np.nan)
        with contextlib.suppress(ValueError):
            numbers = pandas.to_numeric(texts)
            # Before version 3 pandas reads a text up to one unit in its last place.
            table[name] = texts.map(float) if numbers.dtype == float else numbers
    try:
        return checked_scores(table, score)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _read_texts(path: AnyPath) -> tuple[pandas.DataFrame, pandas.Series]:
    """Read a CSV file, all cells as text, and its header as it stands there."""
    read = partial(
        pandas.read_csv,
        path,
        # A model may be called NA, a checkpoint 0010.
        dtype=str,
        keep_default_na=False,
        skipinitialspace=True,
        encoding="utf-8-sig",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        # With an index, long lines would shift their columns.
        table = read(index_col=False)
        # In the table pandas numbers columns of one name.
        header = read(header=None, nrows=1).iloc[0].str.strip()
    return table, header


def checked_scores(
    scores: pandas.DataFrame, score: str, models: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Return the scores of these models, or of all, with their keys as text.

    Warns of scores of other models; errors as in `read_scores`.
    """
    if missing := [name for name in ("model", score) if name not in scores]:
        raise ValueError(
            f"no column {' or '.join(map(repr, missing))}; "
            f"the columns are {', '.join(scores)}"
        )
    numbers = _finite_numbers(scores, score)
    # Scores without checkpoints are those of a model at any of them.
    keys = [name for name in ("model", "checkpoint") if name in scores]
    texts = {key: scores[key].astype(str).str.strip() for key in keys}
    scores = scores.assign(**texts, **{score: numbers.astype(float)})
    is_repeated = scores.duplicated(keys)
    if is_repeated.any():
        repeated_keys = scores[is_repeated].iloc[0][keys]
        raise ValueError(f"more than one row for {' at '.join(repeated_keys)}")
    if models is not None:
        if unknown := sorted(set(scores["model"]) - set(models)):
            warn_caller(
                f"scores of models that were not measured: {', '.join(unknown)}; "
                f"measured: {', '.join(models)}; where these are the same, replace the "
                "names in the scores, or name models in the survey by a mapping "
                "(`Survey({name: model})`, `--model NAME=MODEL`)"
            )
        scores = scores[scores["model"].isin(models)]
    n_scored = scores.loc[scores[score].notna(), "model"].nunique()
    if n_scored < 3:
        measured_models = "measured models" if models else "models"
        raise ValueError(
            f"scores of at least three {measured_models} are needed, got {n_scored}"
        )
    return scores


def _finite_numbers(scores: pandas.DataFrame, score: str) -> pandas.Series:
    """Return a column as numbers, NaN where it is empty."""
    numbers = pandas.to_numeric(scores[score], errors="coerce")
    # `coerce` makes NaN of text too: an empty cell is allowed, a word is not.
    is_text = numbers.isna() & ~scores[score].isna() & (scores[score] != "")
    is_wrong = is_text | np.isinf(numbers)
    if is_wrong.any():
        row = scores[is_wrong].iloc[0]
        raise ValueError(
            f"{score!r} of model {row['model']!r} must be a finite number, "
            f"got {row[score]!r}"
        )
    check_size(numbers.to_numpy(float), repr(score))
    return numbers


@dataclass(frozen=True, eq=False)
class MixedMeans:
    """Means of models over different prompts, each over all that it was measured on.

    Attributes:
        table: as of `MeasuredModels`.
        n_prompts: how many prompts any of the models has.
        n_common: how many of them all models have.
        models: those that lack some.
    """

    table: pandas.DataFrame
    n_prompts: int
    n_common: int
    models: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class MeasuredModels:
    """Models that have both coupling and score, at one checkpoint, over the prompts that
    all of them have.

    Where they have none in common, means are over those of each.

    Attributes:
        table: one row per model, with columns of the measure and of the score; the
            index is the place along `row` of `prompt_table`.
        x: coupling on each prompt; NaN where it was not measured.
        y: the score, or the loss on each prompt.
        left_out: which models lack what.
        mixed: means over all prompts of each model; `None` where all models have the
            same.
    """

    table: pandas.DataFrame
    x: Float[np.ndarray, "n_models n_prompts"]
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"]
    left_out: dict[str, str]
    mixed: MixedMeans | None


def common_prompts(
    x: Float[np.ndarray, "n_models n_prompts"],
) -> Bool[np.ndarray, " n_prompts"]:
    """Say which prompts all models have, of those models that have any at all.

    NaN stands where a model was not measured. Where there is no such prompt, all of
    them are returned.
    """
    is_measured = np.isfinite(x)
    has_any = is_measured.any(1)
    # A model that was measured on none of them is no reason to drop all.
    is_common = is_measured[has_any].all(0)
    if not is_common.any():
        return np.ones_like(is_common)
    return is_common


def measured(
    survey: xarray.Dataset,
    scores: pandas.DataFrame | str,
    measure: str,
    score: str,
    checkpoint: int | str | None,
) -> MeasuredModels:
    """Return coupling and score of each model of `prompt_table` at one checkpoint.

    Checkpoints of one model are not independent, so that only one of them counts: as in
    `checkpoint_rows`, and for "last" the last at which a model has both values. Where
    models were measured on different prompts, those that all have are taken, with a
    warning.
    """
    all_checkpoints = coupling_table(survey, scores, measure=measure, score=score)
    scored = all_checkpoints.dropna(subset=[score])
    rows_at_checkpoint = checkpoint_rows(all_checkpoints, checkpoint)
    rows = rows_at_checkpoint.dropna(subset=[score])
    # The last with both values, which need not be the last that was measured.
    if checkpoint == LAST:
        rows = checkpoint_rows(scored, LAST)
    left_out = {}
    for model in dict.fromkeys(survey["model"].values.tolist()):
        if model in set(rows["model"]):
            continue
        # It has coupling there, so what it lacks is the score.
        if model in set(rows_at_checkpoint["model"]):
            lacking = score
            elsewhere = scored
        else:
            lacking = f"{measure} at k = {survey['k'].item()}"
            elsewhere = all_checkpoints
        model_rows = elsewhere[elsewhere["model"] == model]
        hint = _only_at(model_rows, rows_at_checkpoint, checkpoint)
        left_out[model] = f"no {lacking}{hint}"
    if len(rows) < 3:
        raise ValueError(
            f"{measure} against {score} needs at least three models that have both, "
            f"got {_names(rows, left_out)}"
        )
    x = survey["x"].values[rows.index]
    mixed = None
    has_gaps = np.isnan(x).any(1)
    if has_gaps.any():
        n_common = int(np.isfinite(x).all(0).sum())
        models = tuple(rows["model"][has_gaps])
        mixed = MixedMeans(rows, x.shape[1], n_common, models)
        _warn_of_gaps(mixed)
        # Coupling and loss are averaged anew, over the prompts that are left.
        survey = survey.isel(prompt=np.flatnonzero(common_prompts(x)))
        x = survey["x"].values[rows.index]
        table = coupling_table(survey, scores, measure=measure, score=score)
        rows = table.loc[rows.index]
    y = rows[score].to_numpy(float)
    if isinstance(scores, str):
        y = survey["loss"].values[rows.index]
    return MeasuredModels(rows, x, y, left_out, mixed)


def _warn_of_gaps(mixed: MixedMeans) -> None:
    """Say that some models lack prompts, and which prompts are taken."""
    taken = f"means are over the {mixed.n_common} of {mixed.n_prompts} that all have"
    if not mixed.n_common:
        taken = "none was measured in all models, so means are over those of each"
    # One text for one set of models: Python shows it once, whichever k or task is
    # looked at.
    warn_caller(f"{', '.join(mixed.models)}: some prompts were not measured; {taken}")


def _names(rows: pandas.DataFrame, left_out: Mapping[str, str]) -> str:
    """Count and name the models of the rows, and say why the first of the others is not
    among them.
    """
    text = f"{len(rows)}: {', '.join(rows['model']) or 'none'}"
    for model, reason in left_out.items():
        return f"{text}; {model}: {reason}"
    return text


def _only_at(
    elsewhere: pandas.DataFrame, rows: pandas.DataFrame, checkpoint: int | str | None
) -> str:
    """Say where a model has what it lacks at the checkpoint of the rows, if anywhere,
    and how to take it there.
    """
    names = elsewhere["checkpoint"].astype(str)
    is_comparable = (names != UNTRAINED) | (str(checkpoint) == UNTRAINED)
    checkpoints = names[is_comparable].tolist()
    if not checkpoints or rows.empty or checkpoint == LAST:
        return ""
    compared = rows["checkpoint"].iloc[0]
    return (
        f" at checkpoint {compared}, only at {', '.join(checkpoints)} "
        f"(“{LAST}” takes each model's last)"
    )


def checkpoint_rows(
    rows: pandas.DataFrame, checkpoint: int | str | None
) -> pandas.DataFrame:
    """Return the rows of one checkpoint; the index stays.

    By default it is the last of all, untrained twins aside; "last" is each model's own
    last: models are then compared at different checkpoints.
    """
    names = rows["checkpoint"].astype(str)
    trained = rows[names != UNTRAINED]
    # A survey of untrained models alone has no last checkpoint of all.
    if checkpoint == LAST or (trained.empty and checkpoint is None):
        return trained.groupby("model", sort=False).tail(1)
    if checkpoint is None:
        checkpoint = max(trained["checkpoint"], key=step_order)
    is_at_checkpoint = names == str(checkpoint)
    if not is_at_checkpoint.any():
        raise ValueError(
            f"checkpoint {checkpoint!r} was not measured; "
            f"there are {', '.join(names.unique())}"
        )
    return rows[is_at_checkpoint]


def add_families(
    table: pandas.DataFrame, families: Mapping[str, str] | None
) -> tuple[pandas.DataFrame, str | None]:
    """Return the table with its column of families, and the name of the column.

    The name is `None` unless some models are related and others are not. Families are
    those given by model, else those of the scores; a model without one is of none.
    """
    if families is not None:
        table = table.assign(**{FAMILY: table["model"].map(dict(families))})
    if FAMILY not in table:
        return table, None
    # All alone or all of one family say nothing of dependence.
    n_families = family_codes(table, FAMILY).max() + 1
    are_some_related = 1 < n_families < len(table)
    return table, FAMILY if are_some_related else None


def load_needed(
    data: xarray.Dataset, measure: str, extra_variables: Sequence[str] = ()
) -> xarray.Dataset:
    """Read what the statistics of a measure need of a survey, for all k, into memory.

    Maps of pairs of layers are not read.
    """
    data = select_orientation(data)
    _check_names(data)
    variable = mean_name(measure)
    if variable not in data or not {"k", "prompt"} <= set(data[variable].dims):
        raise ValueError(
            f"no {variable!r} along `k` and `prompt` in the survey; "
            f"it holds {', '.join(map(str, data.data_vars))}"
        )
    if not data.sizes["k"]:
        raise ValueError("the survey holds no k: measure some first")
    usual = (variable, null_name(measure), "loss", *_KNOWN_OF_MODELS)
    names = [
        name
        for name in dict.fromkeys((*usual, *extra_variables))
        if name in data.variables and name not in data.dims
    ]
    # As variables, even where the survey has them as coordinates.
    coordinates = [name for name in names if name in data.coords]
    return data.reset_coords(coordinates)[names].load()


def _check_names(data: xarray.Dataset) -> None:
    """Raise ValueError where a model, checkpoint, prompt or k is in a survey twice."""
    for dim in ("model", "checkpoint", "prompt", "k"):
        if dim not in data.indexes:
            continue
        names = data.indexes[dim]
        if not names.is_unique:
            twice = ", ".join(dict.fromkeys(map(str, names[names.duplicated()])))
            raise ValueError(
                f"the survey has some of its labels along `{dim}` twice ({twice}), as "
                "two surveys have that were joined: each would count as two; give one "
                "survey, or names that differ"
            )


def prompt_table(
    data: xarray.Dataset,
    k: int | None,
    measure: str,
    extra_variables: Sequence[str] = (),
) -> xarray.Dataset:
    """Return what tables are made of: `x`, `null`, `loss`, what is known of models, and
    the `extra_variables`.

    Along `row`, each model with its checkpoints in order, and `prompt`, without prompts
    that no model was measured on.
    """
    survey = load_needed(data, measure, extra_variables)
    if k is None:
        k = int(survey["k"].max())
    if k not in survey["k"].values:
        raise ValueError(
            f"`k` = {k} was not measured; there are {sorted(data['k'].values.tolist())}"
        )
    new_names = {mean_name(measure): "x", null_name(measure): "null"}
    # A survey without the null gives tables without it.
    renamed = {name: new for name, new in new_names.items() if name in survey}
    survey_at_k = (
        survey.sel(k=k).rename(renamed).dropna("prompt", how="all", subset=["x"])
    )
    if not survey_at_k["x"].size:
        raise ValueError(
            f"the survey holds no {measure} of any model on any prompt: "
            "measure some first"
        )
    # Values that were not measured are NaN, and left out.
    infinite = [name for name in renamed if np.isinf(survey_at_k[renamed[name]]).any()]
    if infinite:
        raise ValueError(
            f"the survey holds infinite numbers, in {', '.join(infinite)}: measure again"
        )
    return stack_rows(survey_at_k, data)


def stack_rows(part: xarray.Dataset, data: xarray.Dataset) -> xarray.Dataset:
    """Return part of a survey along `row`, in place of `model` and `checkpoint`.

    Each model stands with its checkpoints in order.
    """
    single_model = str(data.attrs.get("model") or "model")
    for dim, name in (("model", single_model), ("checkpoint", "main")):
        # A survey of one model, or of one checkpoint, lacks the axis.
        if dim not in part.dims:
            part = part.expand_dims({dim: [name]})
    checkpoints = sorted(part["checkpoint"].values.tolist(), key=step_order)
    rows = part.sel(checkpoint=checkpoints).stack(
        row=("model", "checkpoint"), create_index=False
    )
    return rows.transpose("row", ...)


def coupling_table(
    survey: xarray.Dataset,
    scores: pandas.DataFrame | str | None = None,
    *,
    measure: str,
    score: str = "score",
) -> pandas.DataFrame:
    """Return one row for each model and checkpoint of `prompt_table` that was measured.

    The index is the place along `row`. Columns are `model`, `checkpoint`, one named
    after the measure (mean over prompts), `null` (what random subspaces would give),
    the score or `loss`, what is known of models, and any other column of `scores`.

    Raises:
        ValueError: as in `read_scores`; scores with a column that the survey has too,
            unless both say the same of the models.
    """
    names = ["model", "checkpoint", "x", "null", *_KNOWN_OF_MODELS]
    if isinstance(scores, str):
        if scores != "loss":
            raise ValueError(f'`scores` must be a table or "loss", got {scores!r}')
        if "loss" not in survey or bool(survey["loss"].isnull().all()):
            raise ValueError("the survey holds no loss: give scores")
        names.insert(names.index("null") + 1, "loss")
    table = survey.mean("prompt").to_dataframe().filter(names)
    table = table.rename(columns={"x": measure})
    table = table.dropna(subset=[measure]).astype({"model": str})
    if scores is None or isinstance(scores, str):
        return table
    if score in table or (score == "loss" and "loss" in survey):
        raise ValueError(
            f"the survey has a column {score!r} of its own: rename that of the scores"
        )
    models = list(dict.fromkeys(survey["model"].values.astype(str).tolist()))
    scores = checked_scores(scores, score, models)
    keys = ["model", "checkpoint"] if "checkpoint" in scores else ["model"]
    row_scores = table[keys].astype(str).merge(scores, on=keys, how="left")
    # `merge` numbers rows anew; the index is the place along `row`.
    row_scores = row_scores.set_index(table.index)
    _check_columns(table, row_scores)
    for name in row_scores.columns.drop(keys):
        # The survey's own value stands, and the scores fill its gaps.
        if name in table:
            table[name] = table[name].fillna(row_scores[name])
        else:
            table[name] = row_scores[name]
    # The measured columns come first, then the score.
    first = ["model", "checkpoint", measure, "null", score]
    return table.filter(dict.fromkeys([*first, *table]))


def _check_columns(table: pandas.DataFrame, scores: pandas.DataFrame) -> None:
    """Raise where the scores, in the rows of the survey's table, have a column of its
    own; what is known of models may agree, or fill gaps.
    """
    shared = scores.columns.intersection(table.columns)
    for name in shared.drop(["model", "checkpoint"], errors="ignore"):
        has_both = table[name].notna() & scores[name].notna()
        differs = has_both & (table[name] != scores[name])
        if name in _KNOWN_OF_MODELS and not differs.any():
            continue
        row = (differs if differs.any() else has_both).idxmax()
        model = table.loc[row, "model"]
        raise ValueError(
            f"the survey has a column {name!r} of its own, and the scores another one "
            f"({table.loc[row, name]} and {scores.loc[row, name]} of {model}); "
            "rename that of the scores, or leave it out"
        )
