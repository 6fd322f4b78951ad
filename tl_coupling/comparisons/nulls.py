"""Means over the pairs of a map whose singular vectors are drawn at random."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.measures import (
    Measure,
    Null,
    draws_of_random_subspaces,
    measure_of,
    random_rotations,
)

if TYPE_CHECKING:
    from tl_coupling.comparisons.maps import CouplingMap

_N_MEANS = 4000


def drawn_means(
    result: "CouplingMap",
    k: int,
    measure: Measure,
    within: Null,
    others: Bool[Tensor, "n_rows n_cols"],
    n: int,
    seed: int,
    options: dict[str, Any],
) -> Float[Tensor, " n_means"]:
    """Means of a measure over the pairs in `others`, each from one of n draws for each
    column; see `null_interval`.
    """
    generator = torch.Generator().manual_seed(seed)
    of_columns = _in_space if within == "space" else _in_spans
    drawn = of_columns(result, k, measure, within, others, n, generator, options)
    weights, places = (
        others.sum(0).double(),
        torch.arange(others.shape[1]) % drawn.shape[1],
    )
    defined = (weights > 0) & ~drawn.isnan().any(0)[places]
    if not defined.any():
        raise ValueError(
            "every pair here compares a connection with itself, or is undefined: nothing is left to chance"
        )
    # The columns of every prompt are independent.
    weights, places = (x[defined].repeat(result.n_prompts) for x in (weights, places))
    return torch.stack(
        [_combined(drawn, places, weights, generator) for _ in range(_N_MEANS)]
    )


def _combined(
    drawn: Tensor, places: Tensor, weights: Tensor, generator: torch.Generator
) -> Tensor:
    chosen = torch.randint(len(drawn), (len(places),), generator=generator)
    return (drawn[chosen, places] * weights).sum() / weights.sum()


def _in_space(
    result: "CouplingMap",
    k: int,
    measure: Measure,
    _: Null,
    __: Tensor,
    n: int,
    generator: torch.Generator,
    options: Any,
) -> Float[Tensor, "n 1"]:
    """Mean over the rows of what each has in one column; all columns are alike.

    What rows have in common is not known: sorted, their values rise and fall together,
    so that the mean spreads most.
    """
    S_1, norms = result.singular_values.cpu().double(), result.frobenius_norms.cpu()
    of_J_1: dict[str, Any] = {
        "d_model": result.d_model,
        "S_1": S_1,
        "frobenius_norm": norms,
        "generator": generator,
    }
    values = [
        measure_of(
            draws_of_random_subspaces(k, 1, **of_J_1)[0], S_1, measure, **options
        )
        for _ in range(n)
    ]
    return torch.stack(values).sort(0).values.nanmean(1, keepdim=True)


def _in_spans(
    result: "CouplingMap",
    k: int,
    measure: Measure,
    within: Null,
    others: Tensor,
    n: int,
    generator: Any,
    options: Any,
) -> Float[Tensor, "n n_cols"]:
    """Mean over the other rows of each column, with its vectors rotated within their
    spans.
    """
    A, S_1, n_cols = (
        result.at(k).cpu().double(),
        result.singular_values.cpu().double()[:, None],
        others.shape[1],
    )
    found = []
    for _ in range(n):
        left = random_rotations(n_cols, k, generator=generator)
        right = (
            left
            if within == "pairs"
            else random_rotations(n_cols, k, generator=generator)
        )
        values = measure_of(left.mT @ A @ right, S_1, measure, **options)
        found.append(values.where(others, torch.nan).nanmean(0))
    return torch.stack(found)
