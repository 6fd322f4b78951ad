"""What the statistics are of: a row a model, with its coupling, its score and what else is known of it."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tl_coupling.border import AnyPath, checked
from tl_coupling.coupling import Measure
from tl_coupling.surveys.checkpoints import step_order

if TYPE_CHECKING:
    import pandas
    import xarray

_KNOWN_OF_MODELS = ("n_layers", "d_model", "n_parameters", "training_tokens")


@dataclass(frozen=True, eq=False)
class Measured:
    """Coupling and score at one checkpoint of each model that has both.

    Attributes:
        table: a row a model, as of `coupling_table`.
        measure, score: its columns that hold coupling and score.
        x: coupling on each prompt; NaN where it was not measured.
        y: score, or loss on each prompt.
        n_prompts: how many prompts there are.
        left_out: by model, why it is not in.
    """

    table: "pandas.DataFrame"
    measure: str
    score: str
    x: Float[np.ndarray, "n_models n_prompts"]
    y: Float[np.ndarray, " n_models"] | Float[np.ndarray, "n_models n_prompts"]
    n_prompts: int
    left_out: dict[str, str]


def paper_table1() -> "pandas.DataFrame":
    """Table 1 of the paper: its models, their sizes, and their scores on the Open LLM Leaderboard as printed there.

    Columns: `family`, `variant`, `params_billion`, `n_layers`, `d_model`, `training_tokens`, `score`,
    `positional_encoding`. Six of the 42 rows have no score; some that are there look wrong: see `data/README.md`.

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
def read_scores(path: AnyPath, models: Sequence[str] | None = None, *, score: str = "score") -> "pandas.DataFrame":
    """Scores of models, from a CSV file with a header line.

    Args:
        path: a file with the columns `model` and `score`; `checkpoint` where models have several; any others, such as
            `training_tokens` or a score for each task. An empty score is one that is not known.
        models: those that were measured; any other in the file is an error.
        score: the column that holds the score.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a CSV file; a column missing; a score that is not a finite number; a model twice; a model that
            was not measured; fewer than three scores.
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
    if twice := sorted(set(read.columns[read.columns.duplicated()])):
        raise ValueError(f"{os.fspath(path)}: the columns {', '.join(map(repr, twice))} are there twice")
    try:
        return checked_scores(read.apply(_numbers_if_all_are), models, score)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def checked_scores(scores: "pandas.DataFrame", models: Sequence[str] | None, score: str) -> "pandas.DataFrame":
    """The scores, `model` and `checkpoint` as text; errors as of `read_scores`."""
    import pandas

    if missing := [name for name in ("model", score) if name not in scores]:
        raise ValueError(f"no column {' or '.join(map(repr, missing))}; the columns are {', '.join(scores)}")
    keys = [name for name in ("model", "checkpoint") if name in scores]
    scores = scores.assign(**{key: scores[key].astype(str).str.strip() for key in keys})
    numbers = pandas.to_numeric(scores[score], errors="coerce")
    wrong = (numbers.isna() & ~scores[score].isna() & (scores[score] != "")) | np.isinf(numbers)
    if wrong.any():
        row = scores[wrong].iloc[0]
        raise ValueError(f"{score!r} of model {row['model']!r} must be a finite number, got {row[score]!r}")
    if scores.duplicated(keys).any():
        raise ValueError(f"{' at '.join(map(str, scores[scores.duplicated(keys)].iloc[0][keys]))} is there twice")
    if models is not None and (unknown := sorted(set(scores["model"]) - set(models))):
        raise ValueError(f"models that were not measured: {', '.join(unknown)}; measured were {', '.join(models)}")
    if (found := scores.loc[numbers.notna(), "model"].nunique()) < 3:
        raise ValueError(f"wanted scores of three models or more, got {found}")
    return scores.assign(**{score: numbers.astype(float)})


@checked
def coupling_table(
    data: "xarray.Dataset",
    k: int | None = None,
    measure: Measure = "coupling",
    scores: "pandas.DataFrame | str | None" = None,
    *,
    score: str = "score",
) -> "pandas.DataFrame":
    """A row for every model and checkpoint that was measured.

    Args:
        data: what `measure_prompts` gives, along `model` and `checkpoint` or one of them.
        k: how many top singular vectors; the largest number that was measured by default.
        measure: as in `CouplingMap.values`.
        scores: as `read_scores` gives them; `"loss"` for the loss on the same prompts, in nats per token (lower is
            better; models with different tokenizers cannot be compared by it); none by default.
        score: which column of `scores`.

    Returns:
        columns `model`, `checkpoint`, one named after the measure (mean over prompts), `null` (what random subspaces
        would give), the score (or `loss`), then what is known: `n_layers`, `d_model`, `n_parameters`,
        `training_tokens`, and any other column of `scores`.

    Raises:
        ValueError: a k or measure that was not measured; `scores` as in `read_scores`.
    """
    return _table(per_prompt(data, k, measure), measure, scores, score)


def measured(
    data: "xarray.Dataset",
    k: int | None,
    measure: Measure,
    scores: "pandas.DataFrame | str",
    score: str = "score",
    checkpoint: int | str | None = None,
) -> Measured:
    """Coupling and score of each model at `checkpoint`, by default the last at which it was measured.

    One row a model, because checkpoints of one model are not independent of each other.

    Warns where models were measured on different prompts.

    Raises:
        ValueError: as `coupling_table`; no such checkpoint; fewer than three models that have both.
    """
    held = per_prompt(data, k, measure)
    rows = at_one_checkpoint(_table(held, measure, scores, score), checkpoint)
    with_loss = isinstance(scores, str)
    score = "loss" if with_loss else score
    without = [name for name in held["model"].values.tolist() if name not in set(rows["model"])]
    left_out = dict.fromkeys(without, f"no {measure} at k = {held['k'].item()}")
    left_out |= dict.fromkeys(rows.loc[rows[score].isna(), "model"], f"no {score}")
    rows = rows.dropna(subset=[score]).reset_index(drop=True)
    if len(rows) < 3:
        raise ValueError(
            f"{measure} against {score} wants three models or more that have both, got {len(rows)}: "
            f"{', '.join(rows['model']) or 'none'}"
        )
    x = of_rows(held["x"], rows)
    if lacking := rows["model"][np.isnan(x).any(1)].tolist():
        # Once for one set of models, whichever k or task is looked at.
        warnings.warn(
            f"{', '.join(lacking)}: some prompts were not measured; means over them are not those of the other models",
            stacklevel=1,
        )
    return Measured(
        table=rows,
        measure=measure,
        score=score,
        x=x,
        y=of_rows(held["loss"], rows) if with_loss else rows[score].to_numpy(float),
        n_prompts=held.sizes["prompt"],
        left_out=left_out,
    )


def at_one_checkpoint(rows: "pandas.DataFrame", checkpoint: int | str | None) -> "pandas.DataFrame":
    """The rows of a checkpoint; by default each model's last, untrained twins aside."""
    from tl_coupling.surveys.survey import UNTRAINED

    if checkpoint is None:
        rows = rows[rows["checkpoint"] != UNTRAINED]
    else:
        there = list(dict.fromkeys(rows["checkpoint"].astype(str)))
        rows = rows[rows["checkpoint"].astype(str) == str(checkpoint)]
        if rows.empty:
            raise ValueError(f"no checkpoint {checkpoint!r} was measured; there are {', '.join(there)}")
    return rows.groupby("model", sort=False).tail(1).reset_index(drop=True)


def of_rows(values: "xarray.DataArray", rows: "pandas.DataFrame") -> Float[np.ndarray, "n_models n_prompts"]:
    """A variable on each prompt, for the model and checkpoint of each row."""
    import xarray

    where = {name: xarray.DataArray(rows[name].to_numpy(), dims="row") for name in ("model", "checkpoint")}
    return values.sel(where).transpose("row", "prompt").values.astype(float)


def largest_k(data: "xarray.Dataset") -> int:
    """The largest number of singular vectors that was measured."""
    return int(np.max(data["k"].values))


def needed(data: "xarray.Dataset", measure: str, also: Sequence[str] = ()) -> "xarray.Dataset":
    """What statistics of a measure need of a survey, in memory, for all k; maps of pairs of layers are never read.

    Raises:
        ValueError: the measure is not there.
    """
    variable = f"mean_{measure}"
    if variable not in data or not {"k", "prompt"} <= set(data[variable].dims):
        raise ValueError(
            f"no {variable!r} along `k` and `prompt` in the survey; it holds {', '.join(map(str, data.data_vars))}"
        )
    wanted = (variable, f"null_{measure}", "loss", *_KNOWN_OF_MODELS, *also)
    names = [name for name in dict.fromkeys(wanted) if name in data.variables and name not in data.dims]
    return data.reset_coords([name for name in names if name in data.coords])[names].load()


def per_prompt(data: "xarray.Dataset", k: int | None, measure: str, also: Sequence[str] = ()) -> "xarray.Dataset":
    """What tables are made of: `x`, `null`, `loss`, what is known of models, and what is asked for.

    Along `model`, `checkpoint` and `prompt`; checkpoints in their order; without prompts that no model was measured on.
    """
    held = needed(data, measure, also)
    k = largest_k(data) if k is None else k
    if k not in data["k"].values:
        raise ValueError(f"`k` = {k} was not measured; there are {sorted(data['k'].values.tolist())}")
    names = {f"mean_{measure}": "x", f"null_{measure}": "null"}
    held = held.sel(k=k).rename({name: new for name, new in names.items() if name in held})
    held = held.dropna("prompt", how="all", subset=["x"])
    if "model" not in held.dims:
        held = held.expand_dims(model=[str(data.attrs.get("model") or "model")])
    if "checkpoint" not in held.dims:
        return held.expand_dims(checkpoint=["main"])
    # "untrained" comes late in the alphabet: `at_one_checkpoint` leaves it out.
    order = sorted(range(held.sizes["checkpoint"]), key=lambda i: step_order(str(held["checkpoint"].values[i])))
    return held.isel(checkpoint=order)


def _table(
    held: "xarray.Dataset", measure: str, scores: "pandas.DataFrame | str | None", score: str
) -> "pandas.DataFrame":
    if isinstance(scores, str):
        if scores != "loss":
            raise ValueError(f'`scores` must be a table, or "loss", got {scores!r}')
        if "loss" not in held or bool(held["loss"].isnull().all()):
            raise ValueError("the survey holds no loss: give scores")
    means = held.mean("prompt")
    wanted = {"x": measure, "null": "null", **({"loss": "loss"} if isinstance(scores, str) else {})}
    wanted |= {name: name for name in _KNOWN_OF_MODELS}
    chosen = means[[name for name in wanted if name in means]].rename(
        {name: new for name, new in wanted.items() if name in means and name != new}
    )
    frame = chosen.to_dataframe(dim_order=["model", "checkpoint"]).reset_index()
    frame = frame[["model", "checkpoint", *(name for name in wanted.values() if name in frame)]]
    frame = frame.dropna(subset=[measure]).reset_index(drop=True)
    frame = frame.astype({"model": str})
    return frame if scores is None or isinstance(scores, str) else _with_scores(frame, held, scores, score)


def _with_scores(
    frame: "pandas.DataFrame", held: "xarray.Dataset", scores: "pandas.DataFrame", score: str
) -> "pandas.DataFrame":
    if score in frame:
        raise ValueError(f"the score's column must not be called {score!r}, which was measured: rename it")
    scores = checked_scores(scores, held["model"].values.tolist(), score)
    keys = ["model", "checkpoint"] if "checkpoint" in scores else ["model"]
    given = frame[keys].astype(str).merge(scores, on=keys, how="left")
    # The score comes right after what was measured, whatever else the file holds after that.
    frame.insert(list(frame).index("null") + 1 if "null" in frame else 3, score, given[score])
    for name in given.columns.difference([*keys, score], sort=False):
        frame[name] = frame[name].fillna(given[name]) if name in frame else given[name]
    return frame


def _numbers_if_all_are(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    import pandas

    if column.name in ("model", "checkpoint"):
        return column
    numbers = pandas.to_numeric(column.replace("", np.nan), errors="coerce")
    return numbers if (numbers.notna() | (column.str.strip() == "")).all() else column
