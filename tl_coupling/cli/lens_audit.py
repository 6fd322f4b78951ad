"""The command that says whether a Jacobian lens can be trusted: lens-audit."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

import tl_coupling as tlc
from tl_coupling.blocks import Trace
from tl_coupling.cli.app import command
from tl_coupling.cli.console import Run, work_in
from tl_coupling.cli.options import OUT, OneModel, Out, Prompts
from tl_coupling.models import UsableLens, load_lens
from tl_coupling.prompts import Prompt
from tl_coupling.trajectories import LensAudit


@command
def lens_audit(
    setup: OneModel,
    prompts: Prompts,
    lens: Annotated[
        str,
        typer.Option(
            help="File of a JacobianLens, or a name that its from_pretrained takes."
        ),
    ],
    of_its_prompts: Annotated[
        bool | None,
        typer.Option(
            "--its-prompts/--other-prompts",
            help="Whether the prompts are those of the lens, all of them. [where they "
            "are as many, and it lies that near]",
        ),
    ] = None,
    accuracy: Annotated[
        float, typer.Option(help="Relative error that is wanted of the lens.")
    ] = 0.1,
    out: Out = OUT,
) -> None:
    """Say whether a Jacobian lens is of a model, and how many prompts its layers need.

    Computes the lens's matrices of at least two prompts anew, and compares. With the
    very prompts of the lens, nothing but rounding may be left over. Else take prompts of
    their kind and length, four or more: how far a right lens lies from these is known.
    Of a lens that JacobianLens.fit made, prompts are cut where it cut its own, and get a
    BOS token as there unless --no-prepend-bos is given.

    Prints a verdict, and layer by layer how far the lens lies from the prompts' mean, how
    far a right one may lie, and how many prompts the layer needs; writes the audit as
    netCDF and CSV, and a picture.

    Examples:

      tl-coupling lens-audit --model gpt2 --lens lens.pt --prompts prompts.jsonl --out
      audit

      tl-coupling lens-audit --model gpt2 --lens lens.pt --prompts prompts.jsonl
      --other-prompts --accuracy 0.2 --out audit
    """
    selected_prompts = prompts.selected()
    if len(selected_prompts) < 2:
        raise ValueError("an audit compares prompts: give two or more, with --prompts")
    audited = load_lens(lens)

    def measure(run: Run) -> LensAudit:
        # One trace at a time.
        traces = (
            _trace(run, audited, prompt)
            for prompt in run.bar("lens audit", selected_prompts)
        )
        with run.timed("audit"):
            return tlc.trajectories.lens_audit(
                audited,
                traces,
                of_its_prompts=of_its_prompts,
                accuracy=accuracy,
                progress=False,
            )

    with work_in(out) as work:
        audit = work.measured_as("trained", setup, measure)
        work.save({"trained": {"audit": audit}})
        table = audit.to_dataframe()
        work.write("table.csv", partial(table.to_csv, index=False))
        summary = _summary(audit) | {"seconds": work.seconds}
        work.finish(summary, {"audit.png": partial(tlc.plots.plot_lens_audit, audit)})
        work.shown.append(audit.table())
        work.shown.append(audit.verdict)


def _trace(run: Run, lens: UsableLens, prompt: Prompt) -> Trace:
    """Return the traced prompt, with the tokens that a fit of it would have."""
    setup = run.setup
    # `fit` puts a BOS token first, where the tokenizer has one; `product_lens`, whose
    # lenses have a digest, reads what was traced.
    of_fit = "weights_digest" not in lens.metadata
    if setup.prepend_bos is None and of_fit:
        has_bos = getattr(run.model.tokenizer, "bos_token", None) is not None
        setup = replace(setup, prepend_bos=has_bos)
    trace = setup.trace(run.model, prompt)
    tokens = trace.tokens
    longest = lens.metadata.get("max_seq_len")
    if longest is None or tokens is None or len(tokens) <= longest:
        return trace
    return tlc.trace(run.model, tokens[:longest])


def _summary(audit: LensAudit) -> dict[str, object]:
    """Return what `summary.json` holds, without the seconds."""
    return {
        "verdict": audit.verdict,
        "faults": audit.faults,
        "remarks": audit.remarks,
        "layers": audit.layers,
        "distance_from_mean": audit.distance_from_mean.tolist(),
        "farthest": audit.farthest.tolist(),
        "needed_prompts": audit.needed_prompts.tolist(),
        "of_its_prompts": audit.of_its_prompts,
        "detectable": audit.detectable.tolist(),
        "lens_n_prompts": audit.lens_n_prompts,
        "provenance": audit.provenance,
    }
