"""Means over the pairs of a map whose singular vectors are drawn at random."""

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.measures import (
    Measure,
    draws_of_random_subspaces,
    random_rotations,
)

_N_MEANS = 4000


def draws_in_space(
    measure: Measure,
    k: int,
    n: int,
    d_model: int,
    S_1: Float[Tensor, "n_rows n_values"],
    frobenius_norms: Float[Tensor, " n_rows"],
    generator: torch.Generator,
) -> Float[Tensor, "n 1"]:
    """Draw the mean over the rows of what each has in one column; columns are alike.

    What rows have in common is not known: sorted, their values rise and fall together,
    so that the mean spreads most.

    Args:
        measure: of coupling.
        k: size of A.
        n: how many draws.
        d_model, S_1, frobenius_norms: of each row's J_1.
        generator: of the random numbers.
    """
    values = []
    for _ in range(n):
        A = draws_of_random_subspaces(
            k,
            1,
            d_model=d_model,
            S_1=S_1,
            frobenius_norm=frobenius_norms,
            generator=generator,
        )
        values.append(measure.of(A[0], S_1))
    ascending = torch.stack(values).sort(0).values
    return ascending.nanmean(1, keepdim=True)


def draws_in_spans(
    measure: Measure,
    A: Float[Tensor, "n_rows n_cols k k"],
    S_1: Float[Tensor, "n_rows n_values"],
    is_counted: Bool[Tensor, "n_rows n_cols"],
    n: int,
    generator: torch.Generator,
    *,
    paired: bool,
) -> Float[Tensor, "n n_cols"]:
    """Draw the mean of each column, with its vectors rotated within their spans.

    Args:
        measure: of coupling.
        A: coupling matrices, in float64.
        S_1: singular values of each row's J_1.
        is_counted: the pairs that the mean is over.
        n: how many draws.
        generator: of the random numbers.
        paired: whether left and right are turned alike.
    """
    n_cols, k = A.shape[1:3]
    means = []
    for _ in range(n):
        left = random_rotations(n_cols, k, generator=generator)
        right = left
        if not paired:
            right = random_rotations(n_cols, k, generator=generator)
        values = measure.of(left.mT @ A @ right, S_1[:, None])
        means.append(values.where(is_counted, torch.nan).nanmean(0))
    return torch.stack(means)


def means_of_draws(
    draws: Float[Tensor, "n n_drawn_cols"],
    is_counted: Bool[Tensor, "n_rows n_cols"],
    n_prompts: int,
    generator: torch.Generator,
) -> Float[Tensor, " n_means"]:
    """Combine draws of the columns to means over all counted pairs, thousands of times.

    Args:
        draws: means over the rows of each column, or of one that stands for all.
        is_counted: the pairs that the mean is over.
        n_prompts: how many prompts a mean is over; the columns of each are independent.
        generator: of the random numbers.

    Raises ValueError where no pair counts, or all are undefined.
    """
    n_cols = is_counted.shape[1]
    n_counted = reduce(is_counted, "row col -> col", "sum").double()
    drawn_col = torch.arange(n_cols) % draws.shape[1]
    is_undefined = draws.isnan().any(0)[drawn_col]
    is_used = (n_counted > 0) & ~is_undefined
    if not is_used.any():
        raise ValueError(
            "every pair here compares a connection with itself, or is undefined: "
            "nothing is left to chance"
        )
    weights = n_counted[is_used].repeat(n_prompts)
    cols = drawn_col[is_used].repeat(n_prompts)
    means = []
    for _ in range(_N_MEANS):
        draw_of_col = torch.randint(len(draws), (len(cols),), generator=generator)
        total = (draws[draw_of_col, cols] * weights).sum()
        means.append(total / weights.sum())
    return torch.stack(means)
