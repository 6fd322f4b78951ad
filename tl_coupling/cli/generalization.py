"""The command that relates coupling to a score across models: generalization."""

import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, work_in
from tl_coupling.cli.options import OUT, Out
from tl_coupling.cli.sweeps import values_by_name
from tl_coupling.files import write_table
from tl_coupling.measures import MEASURES, MeasureName, Orientation
from tl_coupling.results import ShortTable

if TYPE_CHECKING:
    import pandas
    import xarray

    from tl_coupling.studies.generalization import Generalization

# Lines about what was left out.
_MOST_LEFT_OUT = 10


@command
def generalization(
    survey: Annotated[
        Path, typer.Option(help="Folder of a survey, or its netCDF file.")
    ],
    scores: Annotated[
        str,
        typer.Option(
            help='CSV file of scores; "table1" for those of the paper; "loss" for the '
            "loss in the survey."
        ),
    ] = "loss",
    score_column: Annotated[
        str, typer.Option(help="Which column of the CSV file is the score.")
    ] = "score",
    k: Annotated[
        int | None,
        typer.Option("--k", help="Top singular vectors. [the most that were measured]"),
    ] = None,
    measure: Annotated[
        MeasureName,
        typer.Option(
            metavar="<name>",
            help=f"What was measured between layers: {', '.join(MEASURES)}.",
        ),
    ] = "coupling",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help='Of every model, or "untrained"; "last": each model\'s own last. '
            "[the last of the survey]"
        ),
    ] = None,
    orientation: Annotated[
        Orientation | None,
        typer.Option(help="One of the measured orientations. [the first]"),
    ] = None,
    diagonal: Annotated[
        bool | None,
        typer.Option(
            help="Average over all pairs of layers, also l = l', or over different layers. "
            "[as measured]"
        ),
    ] = None,
    subset: Annotated[
        list[str] | None,
        typer.Option(help="NAME=QUERY over the table; may be repeated."),
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Covariate to hold fixed; may be repeated.")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATTERN of related models, like Pythia=*pythia*; may be "
            "repeated. [column `family`]"
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Draws of the bootstrap.", min=1)
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    out: Out = OUT,
) -> None:
    """Relate coupling to a score across models: fits, bootstrap, covariates, influence.

    Takes a survey, and a CSV file with the columns `model` and `score`. Without
    --scores, the survey's own loss is the score: lower is better, and models with
    different tokenizers cannot be compared by it. Coupling is each model's mean over
    pairs of layers (different ones, or all with --diagonal), then over prompts, at the
    last checkpoint. Models of one family (the column `family`, or --family) are not
    independent: intervals are then cluster-robust, and families are resampled whole.
    Names models whose influence on a fit is large.

    Examples:

      tl-coupling generalization --survey survey --scores scores.csv --k 30 --subset
      "above 45=score > 45" --out out

      tl-coupling generalization --survey survey --control "log10(n_parameters)"
      --family "Pythia=*pythia*" --out out
    """
    # Checked before the survey is opened: a slip of the pen costs no waiting.
    subset_syntax = 'NAME=QUERY, like "above 45=score > 45"'
    subsets = values_by_name("--subset", subset or [], subset_syntax)
    family_syntax = 'NAME=PATTERN, like "Pythia=*pythia*"'
    patterns = values_by_name("--family", family or [], family_syntax)
    # The survey's loss has no columns: the option would be without effect.
    if scores == "loss" and score_column != "score":
        raise ValueError(
            f"`--score-column` {score_column!r} is of a CSV file: give --scores as well"
        )
    with work_in(out) as work, _opened(survey) as opened:
        data = tlc.surveys.select_orientation(opened, orientation)
        if diagonal is not None:
            data = tlc.surveys.with_diagonal(data, diagonal)
        with work.console.stage("resampling models and prompts …"):
            result = tlc.generalization.generalization_study(
                data,
                _scores(scores, score_column, data),
                k=k,
                measure=measure,
                score=score_column,
                checkpoint=checkpoint,
                controls=control,
                subsets=subsets,
                families=_families(patterns, data),
                n_resamples=resamples,
                seed=seed,
            )
        work.write("table.csv", partial(write_table, result.table))
        work.finish(result.to_dict(), _pictures(result, data, measure))
        work.shown += [*_remarks(result), _slopes(result)]


def _opened(survey: Path) -> "xarray.Dataset":
    """Return the data of a survey's folder, or of a netCDF file."""
    import xarray

    if survey.is_dir():
        return tlc.open_survey(survey)
    if not survey.exists():
        raise FileNotFoundError(
            f"no survey at {survey}: give the folder of a survey, or a netCDF file"
        )
    try:
        return xarray.open_dataset(survey, engine="netcdf4")
    except OSError as error:
        raise OSError(
            f"{survey} is not a netCDF file that can be read: {error}"
        ) from None


def _scores(
    scores: str, column: str, data: "xarray.Dataset"
) -> "pandas.DataFrame | str":
    """Return the scores of a CSV file or of the paper's table 1, or "loss"."""
    if scores == "loss":
        return scores
    if scores != "table1":
        return tlc.generalization.read_scores(scores, score=column)
    # Depth and width are the survey's own.
    own_columns = [name for name in ("n_layers", "d_model") if name in data]
    table = tlc.generalization.paper_table1().drop(columns=own_columns)
    if "model" not in data.dims:
        return table
    # Most models of the paper are in no survey, which is not worth a warning.
    is_in_survey = table["model"].isin(data["model"].values)
    return table[is_in_survey]


def _families(
    patterns: dict[str, str], data: "xarray.Dataset"
) -> dict[str, str] | None:
    """Return the family of each model that a pattern fits; None without patterns."""
    if not patterns:
        return None
    models: list[str] = []
    if "model" in data.coords:
        models = np.atleast_1d(data["model"].values).astype(str).tolist()
    family_of: dict[str, str] = {}
    for family, pattern in patterns.items():
        members = fnmatch.filter(models, pattern)
        if not members:
            raise ValueError(
                f"`--family` {family}: no model matches {pattern!r}; "
                f"there are {', '.join(models)}"
            )
        if doubled := family_of.keys() & members:
            model = min(doubled)
            raise ValueError(
                f"`--family` {family}: {model} is already of the family "
                f"{family_of[model]}"
            )
        family_of |= dict.fromkeys(members, family)
    return family_of


def _pictures(
    result: "Generalization", data: "xarray.Dataset", measure: MeasureName
) -> Pictures:
    """Return the pictures by file name."""
    plots = tlc.plots
    table = result.table
    pictures: Pictures = {
        "generalization.png": partial(plots.plot_generalization, result),
        "forest.png": partial(plots.plot_forest, result),
        "covariates.png": partial(plots.plot_covariates, table, result.score),
    }
    if len(result.by_k) > 1:
        pictures["k_sweep.png"] = partial(plots.plot_k_sweep, result)
    # Models are sorted by what the study explains.
    score_of = dict(zip(table["model"], table[result.score], strict=True))
    pictures["quartiles.png"] = partial(
        plots.plot_quartiles, data, by=score_of, k=result.k, measure=measure
    )
    return pictures


def _remarks(result: "Generalization") -> list[str]:
    """Return the lines above the table: remarks, and what was left out and why."""
    left_out = [
        f"left out: {name}: {reason}" for name, reason in result.left_out.items()
    ]
    n_more = len(left_out) - _MOST_LEFT_OUT
    if n_more > 0:
        more = f"left out: {n_more} more, see summary.json"
        left_out = [*left_out[:_MOST_LEFT_OUT], more]
    return result.remarks + left_out


def _slopes(result: "Generalization") -> ShortTable:
    """Return the table of fits: those of coupling, then those of each covariate."""
    rows: list[list[object]] = []
    for fit in result.slopes.itertuples():
        interval = f"{fit.low:.4g} to {fit.high:.4g}"
        r_squared = _number_or_blank(fit.r_squared)
        # The row of the bootstrap has neither p nor degrees of freedom.
        freedom = "" if np.isnan(fit.freedom) else f"{fit.freedom:.1f}"
        p = _number_or_blank(fit.p)
        rows.append(
            [fit.Index, fit.n, f"{fit.slope:.4g}", interval, freedom, r_squared, p]
        )
    for name, fit in result.covariates.iterrows():
        slope = f"{fit.slope:.4g}"
        r_squared = f"{fit.r_squared:.3g}"
        n = f"{fit.n:.0f}"
        rows.append([f"{name} alone", n, slope, "", "", r_squared, f"{fit.p:.3g}"])
    drawn = result.association.bootstrap
    line = result.association.linear
    families = "" if line.n_families is None else f" in {line.n_families} families"
    errors = "HC2" if line.n_families is None else "CR2, cluster-robust"
    caption = (
        f"{drawn.n_models} models{families}, {drawn.n_prompts} prompts; "
        f"{drawn.level:.0%} t intervals ({errors}; df: Bell and McCaffrey's) unless "
        "“bootstrap”; “corrected”: for few prompts; “given”: R² is partial"
    )
    title = f"{result.score} against {result.measure} (k = {result.k})"
    numbers = ["n", "slope", "interval", "df", "R²", "p"]
    return ShortTable.of(title, [""], numbers, rows, caption)


def _number_or_blank(number: float) -> str:
    """Return a number with three digits; nothing where it is undefined."""
    return "" if np.isnan(number) else f"{number:.3g}"
