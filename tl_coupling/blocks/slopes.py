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

# `uᵀ[f(X + ΔX) − f(X)]` less `uᵀJ ΔX` at signed moves h, where ΔX is hV as it is
# rounded in X + hV.
Deviations = Callable[[list[float]], Float[Tensor, "n_moves n_outputs"]]


# Values that overflow or are not a number are far from right, and need no warning.
@np.errstate(over="ignore", invalid="ignore")
def converges(
    deviations: Deviations,
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

    The first move decides in most blocks. Where it does not, the same to the other side
    is asked for next, together with both sides of half of it.

    Args:
        deviations: what moves change in each output, less what its derivative predicts.
        scale: the typical slope of each output: its standard deviation over random
            directions V.
        size: how large the numbers are whose rounding enters each output.

    Cost: one or two calls of `deviations` in most blocks; at most 6.
    """
    # Read together: a device waits once for each call of the block.
    numbers = torch.cat([deviations([_FIRST_MOVE]), torch.stack([scale, size])])
    first, slope, magnitude = numbers.cpu().numpy()
    known = {_FIRST_MOVE: first}

    def error_at(move: float) -> Float[np.ndarray, " n_outputs"]:
        if move not in known:
            half = abs(move) / 2
            both_sides = [move] if move == -_FIRST_MOVE else [move, -move]
            moves = [*both_sides, half, -half]
            known.update(zip(moves, deviations(moves).cpu().numpy(), strict=True))
        return known[move] / move

    # HuggingFace's norms and softmaxes compute in float32, whatever the model is in.
    rounding = _ROUNDING * torch.finfo(torch.float32).eps * (magnitude + slope)
    above = error_at(_FIRST_MOVE)
    is_settled = np.abs(above) <= _SETTLED * slope + rounding / _FIRST_MOVE
    if is_settled.all():
        return is_settled

    # Factors by which half the move divides the errors from above, from below and in
    # the mean.
    factor = np.array([[2], [2], [4]], dtype=above.dtype)
    converged = np.zeros(len(above), dtype=bool)
    never_far = ~converged
    smooth = np.ones((3, len(above)), dtype=bool)
    larger: _Errors | None = None
    move = _FIRST_MOVE
    while move >= _LAST_MOVE and not converged.all():
        above = error_at(move)
        below = error_at(-move)
        error = np.stack([above, below, (above + below) / 2])
        tolerance = _SETTLED * slope + rounding / move
        is_far = np.abs(error) > _FAR * slope + rounding / move
        settled = np.abs(error) <= tolerance
        never_far = never_far & ~is_far[:2].any(0)
        long_enough = never_far
        if larger is not None:
            extrapolated = (factor * error - larger.error) / (factor - 1)
            settled |= (np.abs(extrapolated) <= tolerance) & ~is_far
            overshoots = (
                -np.sign(larger.error) * extrapolated
                > _ABRUPT * slope + rounding / move
            )
            if move < _FIRST_MOVE / 2:
                smooth = np.where(larger.is_far & ~is_far, ~overshoots, smooth)
            long_enough = never_far | larger.settled
        is_exact = larger is None or rounding / move <= _MOST_ROUNDING * slope
        converged |= (settled & long_enough & smooth).any(0) & is_exact
        larger = _Errors(error, settled, is_far)
        move /= 2
    return converged


class _Errors(NamedTuple):
    """The errors at one move, from above, from below and in the mean, as judged."""

    error: Float[np.ndarray, "3 n_outputs"]
    settled: Bool[np.ndarray, "3 n_outputs"]
    is_far: Bool[np.ndarray, "3 n_outputs"]
