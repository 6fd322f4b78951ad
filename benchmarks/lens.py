"""How long a lens to later tokens takes beside TransformerLens's own `JacobianLens.fit`.

    python -m benchmarks.lens --tokens 24 64

Both make the same lens of the same prompt: matrices of every layer but the last, from
the tokens that `fit` does not skip. They are measured in turn in one process, in seconds
of processor time, so that a busy machine does not count; the largest difference between
their entries is reported.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import torch
from rich.table import Table
from torch import nn

import tl_coupling as tlc
from benchmarks.options import add_model, add_out
from benchmarks.timing import console, environment, token_ids, write
from tl_coupling.models import JacobianLens

CPU = torch.device("cpu")
SKIPPED = 16


def theirs(model: nn.Module, ids: Sequence[int]) -> JacobianLens:
    """Fit TransformerLens's lens on one prompt, given as token ids."""
    from transformer_lens.tools.analysis import JacobianLens as TheirLens

    # `fit` takes texts: of this one the ids are known.
    tokens = torch.tensor([list(ids)])
    own_tokens = model.to_tokens
    model.to_tokens = lambda _text: tokens
    try:
        return TheirLens.fit(
            model,
            ["the prompt"],
            corpus="benchmark",
            max_seq_len=len(ids),
            skip_first_positions=SKIPPED,
            show_progress=False,
        )
    finally:
        model.to_tokens = own_tokens


def ours(model: nn.Module, ids: Sequence[int]) -> JacobianLens:
    return tlc.trajectories.product_lens(
        [tlc.trace(model, ids)],
        tokens="later",
        skip_first_positions=SKIPPED,
        progress=False,
    )


def processor_seconds(make: Callable[[], JacobianLens]) -> tuple[JacobianLens, float]:
    """Return a lens, and the seconds that all threads of this process took for it."""
    start = process_time()
    lens = make()
    return lens, process_time() - start


def of_one_prompt(model: nn.Module, ids: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the fewest processor seconds of each, and how far their lenses lie apart."""
    seconds: dict[str, list[float]] = {"fit": [], "product_lens": []}
    for _ in range(repeats):
        fitted, taken = processor_seconds(partial(theirs, model, ids))
        seconds["fit"].append(taken)
        lens, taken = processor_seconds(partial(ours, model, ids))
        seconds["product_lens"].append(taken)
    differences = [
        float((lens.jacobians[layer] - J).abs().max())
        for layer, J in fitted.jacobians.items()
    ]
    fewest = {name: min(of_runs) for name, of_runs in seconds.items()}
    return {
        "n_pos": len(ids),
        "n_valid": len(ids) - 1 - SKIPPED,
        "seconds": fewest,
        "ratio": fewest["fit"] / fewest["product_lens"],
        "largest_difference": max(differences),
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """Return a row for each prompt."""
    shown = Table(
        title=f"{results['model']}: a Jacobian lens of one prompt, processor seconds"
    )
    for name in ("tokens", "of them valid", "fit", "here", "ratio", "difference"):
        shown.add_column(name, justify="right")
    for prompt in results["prompts"]:
        seconds = prompt["seconds"]
        shown.add_row(
            str(prompt["n_pos"]),
            str(prompt["n_valid"]),
            f"{seconds['fit']:.3g}",
            f"{seconds['product_lens']:.3g}",
            f"{prompt['ratio']:.1f}",
            f"{prompt['largest_difference']:.0e}",
        )
    return [shown]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_out(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[24, 64],
        help=f"of each prompt, at least {SKIPPED + 2} (default: 24 64)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of each; the fewest seconds count (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if min(options.tokens) < SKIPPED + 2:
        parser.error(f"--tokens must be at least {SKIPPED + 2}: `fit` skips {SKIPPED}")
    model = tlc.load_model(options.model)
    prompts = [
        of_one_prompt(model, token_ids(options.model, n), options.repeats)
        for n in options.tokens
    ]
    results = {
        "model": options.model,
        "environment": environment(CPU),
        "prompts": prompts,
    }
    out = console()
    out.print(*tables(results))
    out.print(f"wrote {write(options.out, 'lens', results)}")


if __name__ == "__main__":
    main()
