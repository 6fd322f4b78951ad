"""What the statistics are about: one row per model, with its coupling, its score and what else is known of it."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tl_coupling.border import AnyPath, checked, warn_caller
from tl_coupling.surveys.checkpoints import step_order

if TYPE_CHECKING:
    import pandas
    import xarray

_KNOWN_OF_MODELS = ("n_layers", "d_model", "n_parameters", "training_tokens")


@dataclass(frozen=True, eq=False)
class Measured:
    """Coupling and score at one checkpoint of each model that has both.

    `table` has one row per model, with coupling and score in the columns `measure` and `score`; x is coupling on each
    prompt, NaN where it was not measured, y the score, or the loss on each prompt; `left_out` says why models lack.
    """

    table: "pandas.DataFrame"
    measure: str
    score: str
    x: Float[np.ndarray, "n_models n_prompts"]
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"]
    left_out: dict[str, str]


def paper_table1() -> "pandas.DataFrame":
    """Table 1 of the paper: its models, their sizes, and their scores on the Open LLM Leaderboard as printed there.

    Columns: `family`, `variant`, `params_billion`, `n_layers`, `d_model`, `training_tokens`, `score`,
    `positional_encoding`. Six of the 42 rows have no score, and some scores look wrong: see `data/README.md`.

    Example:
        >>> from tl_coupling.generalization import paper_table1
        >>> len(paper_table1())
        42

    Source:
        Aubry et al. 2025, arXiv 2407.07810, table 1.
    """
    from importlib.resources import files

    import pandas

    with files("tl_coupling").joinpath("data/paper_table1.csv").open() as file:
        return pandas.read_csv(file)


@checked
def read_scores(path: AnyPath, *, score: str = "score") -> "pandas.DataFrame":
    """Scores of models, from a CSV file with a header line.

    Args:
        path: a file with the columns `model` and `score`; `checkpoint` where models have several; any others, such as
            `training_tokens` or a score for each task. An empty score is unknown.
        score: the column that holds the score.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a CSV file; a column missing; a score that is not a finite number; a model twice; fewer than
            three scores.
    """
    import pandas

    text: dict[str, Any] = {"dtype": str, "keep_default_na": False, "skipinitialspace": True, "encoding": "utf-8-sig"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # As text: a model may be called NA, a checkpoint 0010. Without an index: pandas would take one from lines
            # longer than the header, and shift their columns.
            read = pandas.read_csv(path, index_col=False, **text)
    except pandas.errors.ParserWarning:
        raise ValueError(f"{os.fspath(path)}: lines are longer than the header") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: not a CSV file with a header line: {error}") from None
    read.columns = read.columns.str.strip()
    for name in read.columns.difference(["model", "checkpoint"]):
        numbers = pandas.to_numeric(read[name].replace("", np.nan), errors="coerce")
        if (numbers.notna() | (read[name].str.strip() == "")).all():
            read[name] = numbers
    try:
        return checked_scores(read, score)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def checked_scores(scores: "pandas.DataFrame", score: str, models: Sequence[str] | None = None) -> "pandas.DataFrame":
    """The scores of those models, of all by default; `model` and `checkpoint` as text. Errors as in `read_scores`.

    Warns of models that are not among those.
    """
    import pandas

    if missing := [name for name in ("model", score) if name not in scores]:
        raise ValueError(f"no column {' or '.join(map(repr, missing))}; the columns are {', '.join(scores)}")
    keys = [name for name in ("model", "checkpoint") if name in scores]
    numbers = pandas.to_numeric(scores[score], errors="coerce")
    wrong = (numbers.isna() & ~scores[score].isna() & (scores[score] != "")) | np.isinf(numbers)
    if wrong.any():
        row = scores[wrong].iloc[0]
        raise ValueError(f"{score!r} of model {row['model']!r} must be a finite number, got {row[score]!r}")
    scores = scores.assign(
        **{key: scores[key].astype(str).str.strip() for key in keys}, **{score: numbers.astype(float)}
    )
    if scores.duplicated(keys).any():
        raise ValueError(f"more than one row for {' at '.join(scores[scores.duplicated(keys)].iloc[0][keys])}")
    if models is not None:
        if unknown := sorted(set(scores["model"]) - set(models)):
            warn_caller(f"scores of models that were not measured: {', '.join(unknown)}; measured: {', '.join(models)}")
        scores = scores[scores["model"].isin(models)]
    if (found := scores.loc[scores[score].notna(), "model"].nunique()) < 3:
        raise ValueError(f"scores of at least three {'measured ' if models else ''}models are needed, got {found}")
    return scores


def measured(
    data: "xarray.Dataset",
    scores: "pandas.DataFrame | str",
    *,
    k: int,
    measure: str,
    score: str,
    checkpoint: int | str | None,
) -> Measured:
    """Coupling and score of each model at `checkpoint`, by default the last at which it was measured.

    One row per model, because checkpoints of one model are not independent of each other. Warns where models were
    measured on different prompts.

    Raises:
        ValueError: as `per_prompt` and `coupling_table`; no such checkpoint; fewer than three models that have both.
    """
    held = per_prompt(data, k, measure)
    rows = at_one_checkpoint(coupling_table(held, scores, measure=measure, score=score), checkpoint)
    score = "loss" if isinstance(scores, str) else score
    without = set(held["model"].values.tolist()) - set(rows["model"])
    left_out = dict.fromkeys(sorted(without), f"no {measure} at k = {held['k'].item()}")
    left_out |= dict.fromkeys(rows.loc[rows[score].isna(), "model"], f"no {score}")
    rows = rows.dropna(subset=[score])
    if len(rows) < 3:
        raise ValueError(
            f"{measure} against {score} needs at least three models that have both, got {len(rows)}: "
            f"{', '.join(rows['model']) or 'none'}"
        )
    x = held["x"].values[rows.index]
    if lacking := rows["model"][np.isnan(x).any(1)].tolist():
        # Once for one set of models, whichever k or task is looked at.
        warnings.warn(
            f"{', '.join(lacking)}: some prompts were not measured, and their means are over the others", stacklevel=1
        )
    y = held["loss"].values[rows.index] if isinstance(scores, str) else rows[score].to_numpy(float)
    return Measured(rows.reset_index(drop=True), measure, score, x, y, left_out)


def at_one_checkpoint(rows: "pandas.DataFrame", checkpoint: int | str | None) -> "pandas.DataFrame":
    """The rows of a checkpoint; by default each model's last, untrained twins aside. The index stays."""
    from tl_coupling.surveys.survey import UNTRAINED

    names = rows["checkpoint"].astype(str)
    chosen = rows[names != UNTRAINED if checkpoint is None else names == str(checkpoint)]
    if chosen.empty and checkpoint is not None:
        raise ValueError(f"checkpoint {checkpoint!r} was not measured; there are {', '.join(names.unique())}")
    return chosen.groupby("model", sort=False).tail(1)


def needed(data: "xarray.Dataset", measure: str, also: Sequence[str] = ()) -> "xarray.Dataset":
    """What the statistics of a measure need of a survey, in memory, for all k; maps of pairs of layers are not read."""
    variable = f"mean_{measure}"
    if variable not in data or not {"k", "prompt"} <= set(data[variable].dims):
        raise ValueError(
            f"no {variable!r} along `k` and `prompt` in the survey; it holds {', '.join(map(str, data.data_vars))}"
        )
    wanted = dict.fromkeys((variable, f"null_{measure}", "loss", *_KNOWN_OF_MODELS, *also))
    names = [name for name in wanted if name in data.variables and name not in data.dims]
    return data.reset_coords([name for name in names if name in data.coords])[names].load()


def per_prompt(data: "xarray.Dataset", k: int | None, measure: str, also: Sequence[str] = ()) -> "xarray.Dataset":
    """What tables are made of: `x`, `null`, `loss`, what is known of models, and the variables in `also`.

    Along `row`, each model with its checkpoints in order, and `prompt`, without prompts that no model was measured on.

    Raises:
        ValueError: the k or the measure was not measured.
    """
    held = needed(data, measure, also)
    k = int(held["k"].max()) if k is None else k
    if k not in held["k"].values:
        raise ValueError(f"`k` = {k} was not measured; there are {sorted(data['k'].values.tolist())}")
    names = {f"mean_{measure}": "x", f"null_{measure}": "null"}
    held = held.sel(k=k).rename({name: new for name, new in names.items() if name in held})
    held = held.dropna("prompt", how="all", subset=["x"])
    for dim, name in (("model", str(data.attrs.get("model") or "model")), ("checkpoint", "main")):
        held = held if dim in held.dims else held.expand_dims({dim: [name]})
    held = held.sel(checkpoint=sorted(held["checkpoint"].values.tolist(), key=step_order))
    return held.stack(row=("model", "checkpoint"), create_index=False).transpose("row", ...)


def coupling_table(
    held: "xarray.Dataset", scores: "pandas.DataFrame | str | None" = None, *, measure: str, score: str = "score"
) -> "pandas.DataFrame":
    """One row for each model and checkpoint of `per_prompt` that was measured; the index is the place along `row`.

    Columns `model`, `checkpoint`, one named after the measure (mean over prompts), `null` (what random subspaces would
    give), the score or `loss`, then `n_layers`, `d_model`, `n_parameters`, `training_tokens` where known, and any other
    column of `scores`.

    Raises:
        ValueError: `scores` as in `read_scores`; "loss" where the survey has none.
    """
    if isinstance(scores, str):
        if scores != "loss":
            raise ValueError(f'`scores` must be a table or "loss", got {scores!r}')
        if "loss" not in held or bool(held["loss"].isnull().all()):
            raise ValueError("the survey holds no loss: give scores")
    wanted = ("x", "null", *(["loss"] if isinstance(scores, str) else []), *_KNOWN_OF_MODELS)
    names = ["model", "checkpoint", *(name for name in wanted if name in held)]
    frame = held.mean("prompt").to_dataframe()[names].rename(columns={"x": measure})
    frame = frame.dropna(subset=[measure]).astype({"model": str})
    if scores is None or isinstance(scores, str):
        return frame
    if score in frame:
        raise ValueError(f"the survey has a column {score!r} of its own: rename that of the scores")
    scores = checked_scores(scores, score, list(dict.fromkeys(held["model"].values.astype(str).tolist())))
    keys = ["model", "checkpoint"] if "checkpoint" in scores else ["model"]
    given = frame[keys].astype(str).merge(scores, on=keys, how="left").set_index(frame.index)
    # The score comes right after what was measured.
    frame.insert(list(frame).index("null") + 1 if "null" in frame else 3, score, given[score])
    for name in given.columns.difference([*keys, score], sort=False):
        frame[name] = frame[name].fillna(given[name]) if name in frame else given[name]
    return frame
