"""The slope check: whether difference quotients of a block converge to the derivative
that autograd gives.

A function without a derivative (rounding, integer layers) has zero or none for every
kind of automatic differentiation, and a custom backward pass may be wrong, so that only
the function's own values can tell. Along one direction `V`,

    error(h) = uᵀ [f(X + hV) − f(X)] / h − uᵀ J V

tends to zero with the move h if, and only if, the derivative exists and is right: from
one side like h, for the mean of both sides like h². How small h must be depends on the
function. In trained models with massive activations the error is still 60 % at h = 0.01
and 0.1 % at h = 0.0003, so that h is halved until the error is settled.

A staircase whose steps are wider than the move also has slope zero there, and looks
right to the smallest moves. It is told from a smooth function by the way its error
vanishes: at once, instead of by the power of h.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Moves along V, relative to the root mean square of each row; each is half of the one
# before.
_FIRST_MOVE = 1e-2
_LAST_MOVE = 1e-5
# Shares of the typical slope: an error is settled below the first, far from right above
# the second.
_SETTLED = 0.01
_FAR = 0.1
# An error that vanishes at once has an extrapolated one that is as far on the other
# side.
_ABRUPT = 0.05
# An error's rounding, in units of the least bit; trained models in float32 have about
# 1. And the share of the typical slope up to which it lets moves shrink.
_ROUNDING = 2
_MOST_ROUNDING = 0.01

# `uᵀ[f(X + ΔX) − f(X)]` less `uᵀJ ΔX` at a signed move h, where ΔX is hV as it is
# rounded in X + hV.
Deviation = Callable[[float], Float[Tensor, " n_outputs"]]


def converges(
    deviation: Deviation,
    scale: Float[Tensor, " n_outputs"],
    size: Float[Tensor, " n_outputs"],
) -> Bool[np.ndarray, " n_outputs"]:
    """Say for each output whether its difference quotients converge to its derivative.

    From one side, from the other, or in the mean of both: a kink or a jump close by
    (ReLU, a token that is sent to another expert) is on one side. An error is settled
    if it is small, or if the extrapolated error of two moves is (Richardson): zero
    where half the move leaves the part of the error that it should. One that was far
    from right must not vanish faster than that, and must be settled twice in a row. The
    first move may be far off all the same.

    Args:
        deviation: what a move changes in each output, less what its derivative
            predicts.
        scale: the typical slope of each output: its standard deviation over random
            directions V.
        size: how large the numbers are whose rounding enters each output.

    Cost: one or two calls of `deviation` in most blocks; at most 22.
    """
    # HuggingFace's norms and softmaxes compute in float32, whatever the model is in.
    rounding = _ROUNDING * torch.finfo(torch.float32).eps * (size + scale)
    above = deviation(_FIRST_MOVE) / _FIRST_MOVE
    if bool((above.abs() <= _SETTLED * scale + rounding / _FIRST_MOVE).all()):
        return np.ones(len(scale), dtype=bool)

    # Of the errors from above, from below, and in the mean: by what factor half the
    # move divides them.
    factor = scale.new_tensor([2.0, 2.0, 4.0])[:, None]
    converged = torch.zeros_like(scale, dtype=torch.bool)
    never_far = torch.ones_like(scale, dtype=torch.bool)
    smooth = torch.ones_like(factor * scale, dtype=torch.bool)
    larger: _Errors | None = None
    move = _FIRST_MOVE
    while move >= _LAST_MOVE and not bool(converged.all()):
        if larger is not None:
            above = deviation(move) / move
        below = deviation(-move) / -move
        error = torch.stack([above, below, (above + below) / 2])
        tolerance = _SETTLED * scale + rounding / move
        is_far = error.abs() > _FAR * scale + rounding / move
        settled = error.abs() <= tolerance
        never_far &= ~is_far[0] & ~is_far[1]
        long_enough = never_far
        if larger is not None:
            extrapolated = (factor * error - larger.error) / (factor - 1)
            settled |= (extrapolated.abs() <= tolerance) & ~is_far
            overshoots = (
                -larger.error.sign() * extrapolated > _ABRUPT * scale + rounding / move
            )
            if move < _FIRST_MOVE / 2:
                smooth = torch.where(larger.is_far & ~is_far, ~overshoots, smooth)
            long_enough = never_far | larger.settled
        is_exact = rounding / move <= _MOST_ROUNDING * scale
        if larger is None:
            is_exact = torch.ones_like(is_exact)
        converged |= (settled & long_enough & smooth).any(0) & is_exact
        larger = _Errors(error, settled, is_far)
        move /= 2
    return converged.cpu().numpy()


def deviation_of_one_move(deviations: Callable[[list[float]], Tensor]) -> Deviation:
    """Return the deviation of one move, from those of several computed together.

    The first move decides in most blocks. Where it does not, the same to the other side
    is asked for next, and then both sides of half of it.

    Args:
        deviations: of several moves, `[n_moves n_outputs]`.
    """
    known: dict[float, Tensor] = {}

    def deviation(move: float) -> Tensor:
        if move not in known:
            moves = _asked_together(move)
            known.update(zip(moves, deviations(moves), strict=True))
        return known[move]

    return deviation


def _asked_together(move: float) -> list[float]:
    if move == _FIRST_MOVE:
        return [move]
    half = abs(move) / 2
    both_sides = [move] if move == -_FIRST_MOVE else [move, -move]
    return [*both_sides, half, -half]


class _Errors(NamedTuple):
    """The errors at one move, from above, from below and in the mean, as judged."""

    error: Float[Tensor, "3 n_outputs"]
    settled: Bool[Tensor, "3 n_outputs"]
    is_far: Bool[Tensor, "3 n_outputs"]
