"""`tl-coupling generalization`: coupling against a score, across models."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work, show, table_of, write_pictures, write_summary
from tl_coupling.cli.options import OUT, Out
from tl_coupling.coupling import Measure
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    import xarray

    from tl_coupling.generalization import Generalization

# Lines about what was left out.
_MOST_LEFT_OUT = 10

_GENERALIZATION_HELP = """Coupling against a score across models: fits, bootstrap, covariates, influential models.

Takes a survey, and a CSV file with the columns `model` and `score`. Without --scores, the survey's own loss is the
score: lower is better, and models with different tokenizers cannot be compared by it. Coupling is each model's
mean over pairs of different layers, then over prompts, at its last checkpoint. Intervals are bootstraps over models and
prompts, except where a t interval is named.

Examples:

  tl-coupling generalization --survey survey --scores scores.csv --k 30 --subset "above 45=score > 45" --out out

  tl-coupling generalization --survey survey --control "log10(n_parameters)" --control n_layers --out out
"""


@command(_GENERALIZATION_HELP)
def generalization(
    survey: Annotated[Path, typer.Option(help="Folder of a survey, or its netCDF file.")],
    scores: Annotated[str, typer.Option(help='CSV file of scores; "loss" for the loss in the survey.')] = "loss",
    score_column: Annotated[str, typer.Option(help="Which column of the CSV file is the score.")] = "score",
    k: Annotated[int | None, typer.Option("--k", help="Top singular vectors. [the most that were measured]")] = None,
    measure: Annotated[Measure, typer.Option(help="What was measured between layers.")] = "coupling",
    checkpoint: Annotated[
        str | None, typer.Option(help='Checkpoint to use for every model, e.g. "untrained". [each model\'s last]')
    ] = None,
    subset: Annotated[list[str] | None, typer.Option(help="NAME=QUERY over the table; may be repeated.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Covariate to hold fixed; may be repeated.")] = None,
    resamples: Annotated[int, typer.Option(help="Draws of the bootstrap.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    out: Out = OUT,
) -> None:
    """See `_GENERALIZATION_HELP`."""
    from tl_coupling.generalization import generalization_study, read_scores
    from tl_coupling.plots import plot_forest, plot_generalization, plot_k_sweep

    subsets = _queries(subset or [])
    if scores == "loss" and score_column != "score":
        raise ValueError(f"`--score-column` {score_column!r} is of a CSV file: give --scores as well")
    with at_work(out) as (folder, progress):
        progress.add_task("resampling models and prompts", total=None)
        with _opened(survey) as data:
            result = generalization_study(
                data,
                scores if scores == "loss" else read_scores(scores, score=score_column),
                k=k,
                measure=measure,
                score=score_column,
                checkpoint=checkpoint,
                controls=control,
                subsets=subsets,
                n_resamples=resamples,
                seed=seed,
            )
        pictures = {"generalization.png": plot_generalization, "forest.png": plot_forest}
        pictures |= {"k_sweep.png": plot_k_sweep} if len(result.by_k) > 1 else {}
        written = [
            write_summary(folder, result.to_dict()),
            write_atomically(folder / "table.csv", lambda path: result.table.to_csv(path, index=False)),
            *write_pictures(folder, {name: partial(plot, result) for name, plot in pictures.items()}),
        ]
    show(written, _slopes(result), lines=_remarks(result))


def _opened(survey: Path) -> "xarray.Dataset":
    import xarray

    from tl_coupling.surveys import open_survey

    if survey.is_dir():
        return open_survey(survey)
    if not survey.exists():
        raise FileNotFoundError(f"no survey at {survey}: give the folder of a survey, or a netCDF file")
    try:
        return xarray.open_dataset(survey, engine="netcdf4")
    except OSError as error:
        raise OSError(f"{survey} is not a netCDF file that can be read: {error}") from None


def _queries(subsets: list[str]) -> dict[str, str]:
    """Queries by name, of texts like "above 45=score > 45"."""
    queries: dict[str, str] = {}
    for text in subsets:
        name, _, query = (part.strip() for part in text.partition("="))
        if not name or not query or query.startswith("="):
            raise ValueError(f'`--subset` must be NAME=QUERY, like "above 45=score > 45", got {text!r}')
        if name in queries:
            raise ValueError(f"`--subset` must name each subset once, got {name!r} twice")
        queries[name] = query
    return queries


def _slopes(result: "Generalization") -> Table:
    drawn = result.association.bootstrap
    rows = []
    for fit in result.slopes.itertuples():
        numbers = ("" if number != number else f"{number:.3g}" for number in (fit.r_squared, fit.p))
        rows.append([fit.Index, fit.n, f"{fit.slope:.4g}", f"{fit.low:.4g} to {fit.high:.4g}", *numbers])
    for name, alone in result.covariates.iterrows():
        fit_alone = (f"{alone.slope:.4g}", "", f"{alone.r_squared:.3g}", f"{alone.p:.3g}")
        rows.append([f"{name} alone", f"{alone.n:.0f}", *fit_alone])
    return table_of(
        f"{result.score} against {result.measure} (k = {result.k})",
        [""],
        ["n", "slope", "interval", "R²", "p"],
        rows,
        f"{drawn.n_models} models, {drawn.n_prompts} prompts; {drawn.level:.0%} intervals, t except the second; "
        "“given”: R² is partial",
    )


def _remarks(result: "Generalization") -> list[str]:
    line, drawn, rank = result.association.linear, result.association.bootstrap, result.association.spearman
    (low, high), (rho_low, rho_high) = drawn.r_squared, drawn.rho
    lines = [
        f"R² = {line.r_squared:.3f} ({low:.3f} to {high:.3f}), Spearman's ρ = {rank.rho:.3f} ({rho_low:.3f} to "
        f"{rho_high:.3f}), p = {rank.p:.3g}; {drawn.n_resamples} draws, {drawn.n_dropped} of them degenerate"
    ]
    if drawn.n_dropped > 0.1 * drawn.n_resamples:
        lines.append("many draws are degenerate: with so few models the bootstrap intervals mean little")
    if (fit := result.exponential) is not None:
        lines.append(f"exponential fit, score = a exp(b coupling): R² = {fit.r_squared:.3f}, p = {fit.p:.3g}")
    if (influence := result.influence) is not None:
        low, high = influence.r_squared_range
        lines.append(f"without one model R² is {low:.3f} to {high:.3f}; {influence.most_influential} changes it most")
        if influence.sign_changes:
            lines.append(f"the slope changes its sign without {' or '.join(influence.sign_changes)}")
        if influence.not_significant:
            lines.append(f"p exceeds 0.05 without {' or '.join(influence.not_significant)}")
    left_out = [f"left out: {name}: {why}" for name, why in result.left_out.items()]
    more = len(left_out) - _MOST_LEFT_OUT
    return lines + left_out[:_MOST_LEFT_OUT] + ([f"left out: {more} more, see summary.json"] if more > 0 else [])
