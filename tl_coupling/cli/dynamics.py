"""The command that measures what blocks do together: dynamics."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from jaxtyping import Float
from torch import Tensor

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Pictures, Run, file_stem, work_in
from tl_coupling.cli.options import (
    OUT,
    OWN_POSITION,
    OneModel,
    OnePrompt,
    Out,
    Untrained,
    own_position,
)
from tl_coupling.dynamics import Eigenvalues, ProductMap, Products
from tl_coupling.results import Saved


@command
def dynamics(
    setup: OneModel,
    prompt: OnePrompt,
    position: Annotated[
        int | None, typer.Option(help=f"Token position. {OWN_POSITION}")
    ] = None,
    draws: Annotated[
        int, typer.Option(help="Number of products of blocks turned at random.", min=2)
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0)] = 0,
    runs: Annotated[
        bool, typer.Option(help="Measure every run of neighbouring blocks.")
    ] = False,
    eigenvalues: Annotated[
        bool, typer.Option(help="Measure the eigenvalues of each block.")
    ] = True,
    untrained: Untrained = False,
    out: Out = OUT,
) -> None:
    """Measure the products of blocks, (I + J) … (I + J), and the blocks' eigenvalues.

    Prints, up to several depths, log σ₁ of the product, its alignment gain (by how much
    it exceeds products of the same blocks, each turned by a random rotation) and the
    participation ratio (how many directions carry the product).

    Examples:

      tl-coupling dynamics --prompt "The capital of France is" --untrained --out out

      tl-coupling dynamics --model gpt2 --runs --no-eigenvalues --out gpt2
    """
    single_prompt = prompt.single_prompt()
    measured_position = own_position(single_prompt, position)

    def measure(run: Run) -> MeasuredDynamics:
        traced = run.trace(single_prompt)
        options: Any = {
            "position": measured_position,
            "seed": seed,
            "progress": partial(run.bar, "dynamics"),
        }
        with run.timed("products"):
            products = tlc.dynamics.products(traced, n_draws=draws, **options)
        # Every run of neighbours is a product of its own: measured only if asked for.
        every_run = None
        if runs:
            with run.timed("runs"):
                every_run = tlc.dynamics.product_map(traced, **options)
        block_eigenvalues = None
        if eigenvalues:
            with run.timed("eigenvalues"):
                block_eigenvalues = tlc.dynamics.eigenvalues(traced, **options)
        return MeasuredDynamics(products, every_run, block_eigenvalues)

    with work_in(out) as work:
        measured = work.measured(setup, untrained, measure)
        work.save({role: result.saved() for role, result in measured.items()})
        # Known only after the last measurement, and no part of the results.
        summary = _summary(measured) | {"seconds": work.seconds}
        work.finish(summary, _pictures(measured))
        work.show_runs({role: result.products for role, result in measured.items()})


@dataclass(frozen=True)
class MeasuredDynamics:
    """What was measured of one model."""

    products: Products
    runs: ProductMap | None
    eigenvalues: Eigenvalues | None

    def saved(self) -> dict[str, Saved]:
        """Return the results by the names of their files."""
        named = {
            "products": self.products,
            "runs": self.runs,
            "eigenvalues": self.eigenvalues,
        }
        return {name: result for name, result in named.items() if result is not None}


def _pictures(measured: dict[str, MeasuredDynamics]) -> Pictures:
    """Return the pictures by file name."""
    plots = tlc.plots
    products = {role: result.products for role, result in measured.items()}
    pictures: Pictures = {"products.png": partial(plots.plot_products, products)}
    for role, result in measured.items():
        if result.runs is not None:
            name = file_stem("runs", role)
            pictures[f"{name}.png"] = partial(plots.plot_product_map, result.runs)
    eigenvalues = {
        role: result.eigenvalues
        for role, result in measured.items()
        if result.eigenvalues is not None
    }
    if eigenvalues:
        pictures["eigenvalues.png"] = partial(plots.plot_eigenvalues, eigenvalues)
    return pictures


def _summary(measured: dict[str, MeasuredDynamics]) -> dict[str, object]:
    """Return what `summary.json` holds, without the seconds."""
    summary: dict[str, object] = {
        "measure": "products (I + J^l) … (I + J^0) of blocks, and eigenvalues of J^l"
    }
    for role, result in measured.items():
        products = result.products
        role_summary: dict[str, object] = {
            "layers": list(products.layers),
            "log_largest": products.log_largest.tolist(),
            "alignment_gain": products.alignment_gain.tolist(),
            "alignment_gain_interval": products.alignment_gain_interval.tolist(),
            "null_interval": products.null_interval.tolist(),
            "shuffled_log_largest": products.shuffled_log_largest.tolist(),
            "participation_ratio": products.participation_ratio.tolist(),
            "null_participation_ratio": products.null_participation_ratio.mean(
                0
            ).tolist(),
            "provenance": products.provenance,
        }
        if result.eigenvalues is not None:
            role_summary["henrici"] = result.eigenvalues.henrici.tolist()
            null = result.eigenvalues.null_henrici.mean(0)
            role_summary["null_henrici"] = null.tolist()
            role_summary["share_left_of_zero"] = _shares_below_zero(
                result.eigenvalues.real
            )
            role_summary["null_share_left_of_zero"] = _shares_below_zero(
                result.eigenvalues.null_real
            )
            complex_share = result.eigenvalues.complex_share
            role_summary["complex_share"] = complex_share.tolist()
            null_share = result.eigenvalues.null_complex_share.mean(0)
            role_summary["null_complex_share"] = null_share.tolist()
        summary[role] = role_summary
    return summary


def _shares_below_zero(real: Float[Tensor, "n_layers d_model"]) -> list[float]:
    """Return, by layer, how many of the eigenvalues have a negative real part."""
    shares: list[float] = (real < 0).double().mean(1).tolist()
    return shares
