"""`tl-coupling generalization`: coupling against a score, across models."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tl_coupling.cli.app import command
from tl_coupling.cli.console import at_work
from tl_coupling.cli.options import Out
from tl_coupling.cli.results import show, write_pictures, write_summary
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    import xarray

    from tl_coupling.generalization import Generalization

# Lines on what was left out.
_NAMED = 10

_GENERALIZATION_HELP = """Coupling against a score across models: fits, bootstrap, covariates, what one model carries.

Takes a survey, and a CSV file with the columns `model` and `score`. Without --scores, the survey's own loss stands in
for a score: lower is better, and models with different tokenizers cannot be compared by it. Coupling is each model's
mean over pairs of different layers, then over prompts, at its last checkpoint. Intervals are bootstraps over models and
prompts, except where a t interval is named.

Examples:

  tl-coupling generalization --survey survey --scores scores.csv --k 30 --subset "above 45=score > 45" --out out

  tl-coupling generalization --survey survey --control "log10(n_parameters)" --control n_layers --out out
"""


@command(_GENERALIZATION_HELP)
def generalization(
    survey: Annotated[Path, typer.Option(help="Folder of a survey, or its netCDF file.")],
    scores: Annotated[
        str | None, typer.Option(help='CSV file of scores; "loss", the default, for the survey\'s.')
    ] = None,
    score_column: Annotated[str, typer.Option(help="Which column of the CSV file is the score.")] = "score",
    k: Annotated[int | None, typer.Option("--k", help="Top singular vectors; the most measured by default.")] = None,
    measure: Annotated[
        str, typer.Option(help="As the survey calls it: coupling, spectral_miscoupling, …")
    ] = "coupling",
    checkpoint: Annotated[
        str | None, typer.Option(help='Of all models, such as "untrained"; else each one\'s last.')
    ] = None,
    subset: Annotated[list[str] | None, typer.Option(help="NAME=QUERY over the table; may be repeated.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Covariate to hold fixed; may be repeated.")] = None,
    resamples: Annotated[int, typer.Option(help="Draws of the bootstrap.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    out: Out = Path("out"),
) -> None:
    """See `_GENERALIZATION_HELP`."""
    from tl_coupling.generalization import generalization_study, read_scores

    queries = [_named_query(one) for one in subset or ()]
    subsets = dict(queries)
    if len(subsets) < len(queries):
        raise ValueError(f"`--subset` must name each subset once, got {[name for name, _ in queries]}")
    if scores in (None, "loss") and score_column != "score":
        raise ValueError(f"`--score-column` {score_column!r} is of a CSV file: give --scores as well")
    with at_work(out) as (folder, progress):
        progress.add_task("resampling models and prompts", total=None)
        with _opened(survey) as data:
            models = [str(name) for name in data["model"].values] if "model" in data.dims else None
            given = "loss" if scores in (None, "loss") else read_scores(str(scores), models, score=score_column)
            result = generalization_study(
                data,
                given,
                k=k,
                measure=measure,  # type: ignore[arg-type]
                score=score_column,
                checkpoint=checkpoint,
                controls=control,
                subsets=subsets,
                n_resamples=resamples,
                seed=seed,
            )
        written = [
            write_summary(folder, result.to_dict()),
            write_atomically(folder / "table.csv", lambda path: result.table.to_csv(path, index=False)),
            *write_pictures(folder, _pictures(result)),
        ]
    for line in _remarks(result):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    show(written, _table(result))


def _opened(survey: Path) -> "xarray.Dataset":
    import xarray

    if survey.is_dir():
        from tl_coupling.surveys import open_survey

        return open_survey(survey)
    if not survey.exists():
        raise FileNotFoundError(f"no survey at {survey}: wanted a folder of a survey, or a netCDF file")
    try:
        return xarray.open_dataset(survey, engine="netcdf4")
    except OSError as error:
        raise OSError(f"{survey} is not a netCDF file that can be read: {error}") from None


def _named_query(text: str) -> tuple[str, str]:
    name, equals, query = text.partition("=")
    if not (equals and name.strip() and query.strip()) or query.startswith("="):
        raise ValueError(f'`--subset` must be NAME=QUERY, like "above 45=score > 45", got {text!r}')
    return name.strip(), query.strip()


def _pictures(result: "Generalization") -> dict[str, Any]:
    from tl_coupling.plots.generalization import plot_forest, plot_generalization, plot_k_sweep

    pictures = {
        "generalization.png": partial(plot_generalization, result),
        "forest.png": partial(plot_forest, result),
    }
    return pictures | ({"k_sweep.png": partial(plot_k_sweep, result)} if len(result.by_k) > 1 else {})


def _table(result: "Generalization") -> Table:
    line, drawn = result.association.linear, result.association.bootstrap
    table = Table(
        title=f"{result.score} against {result.measure} (k = {result.k})",
        caption=f"{drawn.n_models} models, {drawn.n_prompts} prompts; {drawn.level:.0%} intervals, t but the second; "
        "R² of given … is partial",
    )
    for heading in ("", "n", "slope", "interval", "R²", "p"):
        table.add_column(heading, justify="left" if not heading else "right", overflow="fold")

    def row(name: str, n: int, slope: float, interval: tuple[float, float], *rest: float) -> None:
        low, high = interval
        table.add_row(name, str(n), f"{slope:.4g}", f"{low:.4g} to {high:.4g}", *(f"{number:.3g}" for number in rest))

    row("all models, t", line.n, line.slope, line.slope_interval, line.r_squared, line.p)
    row("all models, bootstrap", line.n, line.slope, drawn.slope)
    for name, fit in result.subsets.items():
        row(name, fit.n, fit.slope, fit.slope_interval, fit.r_squared, fit.p)
    for name, held in result.partial.items():
        row(f"given {name}", held.n, held.coefficient, held.interval, held.partial_r_squared, held.p)
    for name, alone in result.covariates.iterrows():
        table.add_row(
            f"{name} alone", f"{alone.n:.0f}", f"{alone.slope:.4g}", "", f"{alone.r_squared:.3f}", f"{alone.p:.3g}"
        )
    return table


def _remarks(result: "Generalization") -> list[str]:
    line, drawn, rank = result.association.linear, result.association.bootstrap, result.association.spearman
    (low, high), (rho_low, rho_high) = drawn.r_squared, drawn.rho
    lines = [
        f"R² = {line.r_squared:.3f} ({low:.3f} to {high:.3f}), Spearman's ρ = {rank.rho:.3f} ({rho_low:.3f} to "
        f"{rho_high:.3f}), p = {rank.p:.3g}; {drawn.n_resamples} draws, {drawn.n_dropped} of them degenerate"
    ]
    if drawn.n_dropped > 0.1 * drawn.n_resamples:
        lines.append("many draws are degenerate: too few models for the bootstrap's intervals to mean much")
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
    more = len(left_out) - _NAMED
    return lines + left_out[:_NAMED] + ([f"left out: {more} more, see summary.json"] if more > 0 else [])
