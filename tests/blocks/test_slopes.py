"""The slope check on functions whose derivative is known: what converges is taken, and
nothing else.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_coupling.blocks.slopes import converges

# How many slopes are judged at once, and how many coordinates move in each.
N, WIDTH = 400, 32


def drawn() -> list[Tensor]:
    """N points, directions and weights of WIDTH coordinates."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(3, N, WIDTH, generator=generator, dtype=torch.float64))


def converges_move_by_move(
    deviation: Callable[[float], Tensor], scale: Tensor, size: Tensor
) -> np.ndarray:
    """Which slopes converge, of deviations that are known for one move at a time."""
    return converges(
        lambda moves: torch.stack(list(map(deviation, moves))), scale, size
    )


def rounded(x: Tensor, width: float) -> Tensor:
    return torch.round(x / width) * width


def judged(
    function: Callable[[Tensor], Tensor], slope: float, size: float = 0.0
) -> np.ndarray:
    """Which of N weighted sums over coordinates are found to have this slope in each
    coordinate.
    """
    x, v, u = drawn()

    def deviation(move: float) -> Tensor:
        change = function(x + move * v) - function(x)
        return ((change - slope * move * v) * u).sum(1)

    scale = torch.full((N,), WIDTH**0.5, dtype=torch.float64)
    return converges_move_by_move(deviation, scale, torch.full_like(scale, size))


def along(error: Callable[[float], float]) -> bool:
    """Whether a slope of typical size 1 is taken whose difference quotient at h is off
    by `error(h)`.
    """
    scale = torch.ones(1, dtype=torch.float64)
    size = 0 * scale

    def deviation(move: float) -> torch.Tensor:
        return scale * move * error(move)

    return bool(converges_move_by_move(deviation, scale, size))


@pytest.mark.parametrize("stiffness", [1.0, 10.0, 100.0, 300.0, 1000.0])
def test_a_smooth_function_is_taken_however_stiff(stiffness: float) -> None:
    """At a stiffness of 1,000 a move of 0.01 is ten times as long as the function is
    straight.
    """
    x = torch.linspace(-2, 2, N, dtype=torch.float64)

    def deviation(move: float) -> Tensor:
        change = torch.sin(stiffness * (x + move)) - torch.sin(stiffness * x)
        return change / stiffness - torch.cos(stiffness * x) * move

    scale = torch.ones_like(x)
    assert bool(converges_move_by_move(deviation, scale, 0 * scale).all())


@pytest.mark.parametrize(
    ("above", "below"),
    [
        # Percent, at moves of 0.01, 0.005, 0.0025, 0.001, 0.0003, 0.0001: measured in
        # Gemma 3's blocks.
        ([-610, -119, -50.2, -20.7, -6.43, -2.16], [467, 201, 69.6, 23.7, 6.69, 2.26]),
        ([-471, -201, -65.5, -21.5, -5.97, -1.99], [216, 93.6, 42, 17.9, 5.66, 1.94]),
        ([92.1, 33.1, 15, 6.03, 1.84, 0.61], [-215, -55.2, -19.5, -6.69, -1.91, -0.62]),
    ],
)
def test_curvature_of_a_trained_model_is_taken(
    above: list[float], below: list[float]
) -> None:
    moves = torch.tensor(
        [0.01, 0.005, 0.0025, 0.001, 0.0003, 0.0001], dtype=torch.float64
    )
    powers = torch.stack([moves**p for p in (1, 2, 3, 4, 5)], 1)

    def fit(percent: list[float]) -> Tensor:
        # Weighted, so that small errors at small moves are met as well as large ones.
        errors = torch.tensor(percent, dtype=torch.float64) / 100
        return torch.linalg.lstsq(powers / moves[:, None], errors / moves).solution

    of_side = {1: fit(above), -1: fit(below)}

    def error(move: float) -> float:
        side = 1 if move > 0 else -1
        terms = torch.tensor(
            [abs(move) ** p for p in (1, 2, 3, 4, 5)], dtype=torch.float64
        )
        return float(terms @ of_side[side])

    assert abs(error(0.01)) > 0.5
    assert along(error)


@pytest.mark.parametrize("kink", [0.0002, 0.001, 0.004])
@pytest.mark.parametrize("side", [1, -1])
def test_a_kink_on_one_side_does_not_matter(kink: float, side: int) -> None:
    def error(move: float) -> float:
        return max(0.0, side * move - kink) / abs(move)

    assert along(error)


@pytest.mark.parametrize("at", [0.0002, 0.001, 0.004])
@pytest.mark.parametrize("side", [1, -1])
def test_a_jump_on_one_side_does_not_matter(at: float, side: int) -> None:
    """A token that is sent to another expert."""
    assert along(lambda move: (side * move > at) * 0.05 / abs(move))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.03, -0.03])
def test_a_slope_that_is_off_by_three_percent_is_refused(share: float) -> None:
    assert not along(lambda move: share)
    assert not along(lambda move: share + 20 * move)


def test_a_slope_that_is_off_by_half_a_percent_is_taken() -> None:
    assert along(lambda move: 0.005)


# A slope that happens to be near zero, or near one, looks right without being so.
BY_CHANCE = 0.05


@pytest.mark.parametrize(
    "width", [0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 3e-4, 1e-4, 1e-5]
)
def test_rounding_without_a_slope_are_refused(width: float) -> None:
    """Wherever some entry crosses a step, up and down: wider steps have no slope that a
    move could show.
    """
    x, v, _ = drawn()
    crosses = [
        (rounded(x + move * v, width) != rounded(x, width)).any(1)
        for move in (0.005, -0.005)
    ]
    taken = judged(partial(rounded, width=width), slope=0)[crosses[0] & crosses[1]]
    assert len(taken) >= 50
    assert float(taken.mean()) <= BY_CHANCE


@pytest.mark.parametrize("width", [10.0, 1.0, 0.2, 0.05, 0.02, 0.01])
def test_rounding_that_passes_gradients_through_are_refused(width: float) -> None:
    """The straight-through estimator: autograd says 1, and the function is flat between
    its steps.
    """
    taken = judged(partial(rounded, width=width), slope=1)
    assert float(taken.mean()) <= BY_CHANCE


def test_rounding_of_a_large_stream_is_no_disagreement() -> None:
    """What float32 leaves of differences of numbers of size 1e5."""
    size = 1e5 * WIDTH**0.5

    def rounded(x: Tensor) -> Tensor:
        return (x + 1e5).float().double()

    assert bool(judged(rounded, slope=1, size=2 * size).all())


def test_a_function_that_gives_nan_is_refused() -> None:
    assert not along(lambda move: float("nan"))


def test_moves_are_computed_together() -> None:
    """The first alone; then those that are likely to be asked for next."""
    calls: list[list[float]] = []

    def deviations(moves: list[float]) -> Tensor:
        calls.append(moves)
        return torch.tensor([[abs(move) * 40 * move] for move in moves])

    assert converges(deviations, torch.ones(1), torch.zeros(1)).all()
    assert calls[:3] == [
        [0.01],
        [-0.01, 0.005, -0.005],
        [0.0025, -0.0025, 0.00125, -0.00125],
    ]
