"""Shapes of trajectories: the paper's formulas written out, closed forms, and what must
not matter.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import tl_coupling as tlc
from properties import batches, close, few, seeds
from random_matrices import gaussian
from tl_coupling.trajectories import (
    attention_sinks,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    logit_lens_entropy,
    norms,
    step_lengths,
    trajectory_pca,
)

PER_TOKEN = (line_shape_score, expodistance, equidistance)
MEASURES = (*PER_TOKEN, line_shape_score_by_depth, norms, step_lengths)

n_steps = st.integers(1, 12)
widths = st.integers(1, 6)
scales = st.floats(1e-3, 1e3)


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(gaussian(d, d, seed=seed)).Q


def from_steps(steps: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])


# --- the paper's formulas, one token and one number at a time


def length(v: list[float]) -> float:
    return math.sqrt(math.fsum(a * a for a in v))


def naive_steps(x: list[list[float]]) -> list[list[float]]:
    return [
        [b - a for a, b in zip(x[i], x[i + 1], strict=True)] for i in range(len(x) - 1)
    ]


def naive_lss(x: list[list[float]]) -> float:
    tilde = list(x[0])  # eq. 16 starts from x^0 itself
    for step in naive_steps(x):
        tilde = [t + s / length(step) for t, s in zip(tilde, step, strict=True)]
    return (len(x) - 1) / length([t - s for t, s in zip(tilde, x[0], strict=True)])


def naive_ed(x: list[list[float]]) -> float:
    alpha = [math.log(length(x[i + 1]) / length(x[i])) for i in range(len(x) - 1)]
    mean = sum(alpha) / len(alpha)
    return sum((a - mean) ** 2 for a in alpha) / len(alpha) / mean**2


def naive_equidistance(x: list[list[float]]) -> float:
    lengths = [length(step) for step in naive_steps(x)]
    mean = sum(lengths) / len(lengths)
    return math.sqrt(sum((a - mean) ** 2 for a in lengths) / len(lengths)) / mean


def by_token(x: Tensor, measure: Callable[[list[list[float]]], float]) -> list[float]:
    return [measure(x[:, token].tolist()) for token in range(x.shape[1])]


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(seed=seeds, length=n_steps, d=widths)
def test_measures_are_the_formulas_written_out(seed: int, length: int, d: int) -> None:
    x = gaussian(length + 1, 3, d, seed=seed)
    lss, growth = line_shape_score(x), (norms(x)[-1] / norms(x)[0]).log().abs()
    assume(
        bool((lss < 1e3).all() & (growth > 1e-2).all())
    )  # elsewhere rounding is all there is to compare
    close(lss, by_token(x, naive_lss), 1e-9)
    close(expodistance(x), by_token(x, naive_ed), 1e-8)
    close(equidistance(x), by_token(x, naive_equidistance), 1e-10)


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(seed=seeds, length=n_steps, half=st.integers(0, 5))
def test_windows_and_depths_are_scores_of_slices(
    seed: int, length: int, half: int
) -> None:
    window = 2 * half + 1
    assume(window <= length)
    x = gaussian(length + 1, 2, 4, seed=seed)
    windowed = line_shape_score(x, window=window)
    assert windowed.shape == (length - window + 1, 2)
    for i, entry in enumerate(windowed):
        close(entry, line_shape_score(x[i : i + window + 1]), 1e-9)
    by_depth = line_shape_score_by_depth(x)
    assert by_depth.shape == (length, 2)
    for i, entry in enumerate(by_depth):
        close(entry, line_shape_score(x[: i + 2]), 1e-9)


# --- closed forms


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(seed=seeds, length=n_steps, d=widths, scale=scales)
def test_a_line_scores_one_whatever_its_spacing(
    seed: int, length: int, d: int, scale: float
) -> None:
    direction, spacing = (
        gaussian(d, seed=seed),
        gaussian(length, 1, 1, seed=seed + 1).abs() + 0.1,
    )
    x = scale * (gaussian(d, seed=seed + 2) + from_steps(spacing * direction))
    close(line_shape_score(x), [1.0], 1e-9)
    close(line_shape_score_by_depth(x), torch.ones(length, 1), 1e-9)
    assert bool((line_shape_score_by_depth(x) >= 1).all())


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(seed=seeds, length=n_steps, d=widths, batch=batches)
def test_no_score_is_below_one(
    seed: int, length: int, d: int, batch: tuple[int, ...]
) -> None:
    x = gaussian(length + 1, *batch, d, seed=seed)
    for scores in (
        line_shape_score(x),
        line_shape_score(x.float()),
        line_shape_score_by_depth(x),
    ):
        assert bool((scores >= 1).all())


def test_line_shape_score_of_known_shapes() -> None:
    close(
        line_shape_score(from_steps(torch.eye(9).double())), 3.0
    )  # orthogonal steps: √L
    angle = torch.arange(7, dtype=torch.float64) * 0.3
    arc = from_steps(torch.stack([angle.cos(), angle.sin()], dim=-1))
    close(line_shape_score(arc), 7 * math.sin(0.15) / math.sin(7 * 0.15))
    to_and_fro = torch.tensor([[0.0], [1.0], [2.0], [1.0]])
    close(line_shape_score(to_and_fro), 3.0)  # co-linear, and yet not 1
    assert line_shape_score(to_and_fro[1:]).item() == math.inf  # a closed loop


def test_windows_are_centred() -> None:
    steps = torch.zeros(9, 2)
    steps[:4, 0], steps[4, :], steps[5:, 1] = 1, 1, 1  # turns at step 4, and only there
    scores = line_shape_score(from_steps(steps), window=3)
    centre = torch.arange(len(scores)) + 3 // 2
    assert ((scores > 1.001) == ((centre - 4).abs() <= 1)).all()
    close(scores, scores.flip(0), 1e-6)


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(
    seed=seeds, length=n_steps, d=widths, rate=st.floats(0.05, 1.5), decay=st.booleans()
)
def test_exponential_growth_has_no_expodistance(
    seed: int, length: int, d: int, rate: float, decay: bool
) -> None:
    directions = gaussian(length + 1, 2, d, seed=seed)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    depth = torch.arange(length + 1, dtype=torch.float64).reshape(-1, 1, 1)
    x = (depth * (-rate if decay else rate)).exp() * directions
    close(expodistance(x), [0.0, 0.0], 1e-12)


def test_expodistance_of_two_alternating_rates() -> None:
    x = (
        torch.tensor([0.0, 0.2, 1.0, 1.2, 2.0], dtype=torch.float64)
        .exp()
        .reshape(-1, 1)
    )
    close(
        expodistance(x), (0.6 / 1.0) ** 2
    )  # rates 0.2 and 0.8; the population's variance


def test_equidistance_of_known_steps() -> None:
    close(equidistance(from_steps(3 * rotation(5, seed=0))), 0.0)
    close(equidistance(torch.tensor([[0.0], [1.0], [4.0], [3.0], [0.0]])), 0.5)
    close(
        equidistance(torch.tensor([[0.0], [0.0], [0.0], [0.0], [7.0]])),
        math.sqrt(3),
        1e-6,
    )  # the largest there is


def test_norms_and_steps() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 2.0]]])
    close(norms(x), [[5.0, 0.0], [5.0, 2.0]])
    close(step_lengths(x), [[0.0, 2.0]])


# --- what must not matter


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@few
@given(seed=seeds, length=n_steps, d=widths, scale=scales, batch=batches)
def test_rotation_and_scale_do_not_matter(
    seed: int, length: int, d: int, scale: float, batch: tuple[int, ...]
) -> None:
    x = gaussian(length + 1, *batch, d, seed=seed)
    assume(bool((line_shape_score(x) < 1e3).all()))
    assume(bool(((norms(x)[-1] / norms(x)[0]).log().abs() > 1e-2).all()))
    moved = scale * x @ rotation(d, seed=seed + 1)
    for measure in PER_TOKEN:
        assert measure(x).shape == batch
        close(measure(moved), measure(x), 1e-8)
    for measure in (norms, step_lengths):
        close(measure(moved) / scale, measure(x), 1e-9)


@pytest.mark.parametrize("measure", MEASURES)
def test_tokens_do_not_see_each_other(measure: Callable[[Tensor], Tensor]) -> None:
    x = gaussian(6, 2, 3, 4)
    close(measure(x)[..., 1, 2], measure(x[:, 1, 2]))


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("measure", MEASURES)
def test_dtypes(
    measure: Callable[[Tensor], Tensor], given: torch.dtype, returned: torch.dtype
) -> None:
    x = (gaussian(6, 3, 4) * torch.arange(1, 7).reshape(-1, 1, 1)).to(given)
    got = measure(x)
    assert got.dtype == returned
    torch.testing.assert_close(got, measure(x.double()).to(returned), rtol=1e-6, atol=0)


@pytest.mark.parametrize("measure", [*MEASURES, lambda x: trajectory_pca(x).projected])
def test_numpy_arrays_are_measured_like_tensors(
    measure: Callable[[Any], Tensor],
) -> None:
    x = gaussian(6, 3, 4)
    for array, tensor in ((x.numpy(), x), (x.numpy().astype(np.float32), x.float())):
        torch.testing.assert_close(measure(array), measure(tensor), rtol=0, atol=0)


def test_attention_sinks_are_tokens_ten_times_as_long_as_the_median() -> None:
    x = torch.ones(4, 5, 3, dtype=torch.float64)
    x[2, 1], x[1, 3] = 10.5, 9.5
    assert attention_sinks(x) == attention_sinks(x.numpy()) == [1]
    assert attention_sinks(x[:, [0, 2, 4]]) == []


def test_small_growth_survives_float32() -> None:
    # Norms near 1e3 that grow by 1e-4 in all: in float32 their logarithms would keep
    # three digits of it.
    x = torch.tensor([1000.0, 1000.25, 999.875, 1000.125]).reshape(-1, 1)
    close(expodistance(x), naive_ed(x.tolist()), 1e-6)


def test_growth_is_zero_when_rounding_could_have_made_it() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 2.0, 1.0]).reshape(-1, 1, 1).repeat(1, 2, 1)
    x[-1] += torch.finfo(x.dtype).eps * torch.tensor([[20.0], [4.0]])
    with pytest.warns(UserWarning, match="1 whose norm does not grow"):
        close(expodistance(x), [naive_ed(x[:, 0].tolist()), math.nan], 1e-6)


# --- what is undefined: NaN there, and one warning


@pytest.fixture
def strict() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("strict")
def test_nothing_is_said_where_all_is_defined() -> None:
    x = gaussian(8, 3, 4)
    for measure in MEASURES:
        assert bool(torch.isfinite(measure(x)).all())
        assert measure(x[:, :0]).shape == measure(x)[..., :0].shape
    line_shape_score(x, window=3)
    trajectory_pca(x)


def standing_at_step_2() -> Tensor:
    x = gaussian(8, 2, 4)
    x[3, 1] = x[2, 1]
    return x


@pytest.mark.parametrize(
    ("scores", "undefined"),
    [
        (line_shape_score, [1]),
        (
            line_shape_score_by_depth,
            [[0, 0], [0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]],
        ),
        (
            lambda x: line_shape_score(x, window=3),
            [[0, 1], [0, 1], [0, 1], [0, 0], [0, 0]],
        ),
    ],
)
def test_a_zero_step_is_masked_and_named(
    scores: Callable[[Tensor], Tensor], undefined: list
) -> None:
    with pytest.warns(
        UserWarning,
        match=r"1 steps of 1 of 2 tokens have length 0, at layer 2: .* undefined",
    ) as caught:
        got = scores(standing_at_step_2())
    assert len(caught) == 1
    mask = (
        torch.tensor(undefined, dtype=torch.bool)
        if got.ndim > 1
        else torch.tensor([False, True])
    )
    assert (got.isnan() == mask).all()


def test_a_long_list_of_zero_steps_is_cut() -> None:
    with pytest.warns(
        UserWarning,
        match=r"24 steps of 3 of 3 tokens .* layer 0, 1, 2, 3, 4 and 3 more: ",
    ) as caught:
        assert bool(line_shape_score(torch.ones(9, 3, 2)).isnan().all())
    assert len(caught) == 1


def test_expodistance_without_growth_or_norm() -> None:
    x = gaussian(6, 4, 3)
    x[5, 0] = x[0, 0]
    x[2, 1] = 0
    x[:, 2] = x[:, 2] / x[:, 2].norm(
        dim=-1, keepdim=True
    )  # a walk on a sphere: equal to rounding
    pattern = (
        r"expodistance is undefined \(NaN\) for some of 4 tokens: 1 "
        r"with a norm of 0, 2 whose norm does not grow"
    )
    with pytest.warns(UserWarning, match=pattern) as caught:
        got = expodistance(x)
    assert len(caught) == 1
    assert got.isnan().tolist() == [True, True, True, False]
    close(got[3:], expodistance(x[:, 3:]))


def test_equidistance_without_movement() -> None:
    x = gaussian(6, 2, 3)
    x[:, 0] = 5
    with pytest.warns(
        UserWarning, match=r"equidistance .* some of 2 tokens: 1 that never move"
    ) as caught:
        got = equidistance(x)
    assert len(caught) == 1
    assert got.isnan().tolist() == [True, False]


# --- bad input


@pytest.mark.parametrize("window", [-1, 0, 2, 4])
def test_windows_are_odd(window: int) -> None:
    with pytest.raises(
        ValueError, match=f"`window` must be an odd number of steps, got {window}$"
    ):
        line_shape_score(gaussian(7, 2, 3), window=window)


def test_a_window_of_more_steps_than_there_are() -> None:
    with pytest.raises(
        ValueError,
        match="`window` must be at most 6 for these trajectories of 6 steps, got 7",
    ):
        line_shape_score(gaussian(7, 2, 3), window=7)


@pytest.mark.parametrize(
    "measure", [*PER_TOKEN, line_shape_score_by_depth, step_lengths]
)
def test_one_depth_is_no_trajectory(measure: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"at least 2 depths, got shape \[1, 3, 4\]"):
        measure(gaussian(1, 3, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "measure", [*MEASURES, trajectory_pca, lambda x: logit_lens_entropy(x, torch.exp)]
)
def test_entries_must_be_finite(
    measure: Callable[[Tensor], object], bad: float
) -> None:
    x = gaussian(6, 3, 4)
    x[2, 1, 0] = x[4, 0, 3] = bad
    with pytest.raises(
        ValueError,
        match=r"`x` must be finite, got NaN or infinite entries at depth 2, 4",
    ):
        measure(x)


@pytest.mark.parametrize(
    "x", [torch.ones(4, 3, 2, dtype=torch.int64), np.ones((4, 3, 2), int), [[1.0]]]
)
def test_x_must_be_a_floating_point_tensor(x: object) -> None:
    with pytest.raises(
        TypeError,
        match=r"`x` must be a floating-point torch tensor \[n_layers\+1 … d_model\], got ",
    ):
        line_shape_score(x)


# --- a real model


@pytest.fixture(scope="module")
def normed(smollm2: nn.Module, reference: dict[str, Any]) -> tlc.Trace:
    """The reference reads HuggingFace's hidden states, whose last entry is
    normalised.
    """
    trace = tlc.trace(smollm2, reference["prompt"], final_norm=True)
    assert trace.tokens.tolist() == reference["token_ids"]
    return trace


def test_line_shape_scores_of_the_reference(
    normed: tlc.Trace, reference: dict[str, Any]
) -> None:
    expected = torch.tensor(reference["lss_hidden_states"])
    torch.testing.assert_close(
        line_shape_score(normed.residual), expected, rtol=0, atol=1e-4
    )


def test_expodistances_of_the_reference(
    normed: tlc.Trace, reference: dict[str, Any]
) -> None:
    got, expected = (
        expodistance(normed.residual),
        torch.tensor(reference["expodistance_population_hidden_states"]),
    )
    torch.testing.assert_close(got[1:], expected[1:], rtol=0, atol=1e-4)
    # Token 0 goes from norm 2 over 10,660 back to 39, and its ED of 262 follows the
    # last norm's rounding in the model's own float32: the float64 model is 2.6e-4 below
    # the reference, the float32 bridge 5e-4 above.
    torch.testing.assert_close(got[0], expected[0], rtol=5e-6, atol=0)


def test_the_lens_at_the_last_layer_is_the_model(
    smollm2: nn.Module, normed: tlc.Trace
) -> None:
    got = logit_lens_entropy(
        normed.residual[-1:], lambda stream: smollm2.unembed(stream[None])[0]
    )
    with torch.no_grad():
        p = smollm2(normed.tokens[None])[0].double().softmax(-1)
    close(got[0], -(p * p.log()).sum(-1), 1e-4)


READINGS = [
    "norms",
    "attention_sinks",
    "step_lengths",
    "line_shape_score",
    "line_shape_score_by_depth",
    "expodistance",
    "equidistance",
    "trajectory_pca",
]


@pytest.mark.parametrize("reading", READINGS)
def test_trajectories_without_width_are_refused(reading: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"`x` must have tokens of at least one entry, got shape \[3, 4, 0\]",
    ):
        getattr(tlc.trajectories, reading)(torch.zeros(3, 4, 0))


def test_entropy_of_a_stream_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="`x` must have tokens of at least one entry"):
        tlc.trajectories.logit_lens_entropy(torch.zeros(3, 0), lambda stream: stream)


@pytest.mark.parametrize(
    ("measure", "always"),
    [("line_shape_score", 1), ("expodistance", 0), ("equidistance", 0)],
)
def test_one_step_says_nothing_and_is_said(measure: str, always: int) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(
        UserWarning,
        match=f"these trajectories have one step: .* is {always} whatever it is",
    ):
        values = getattr(tlc.trajectories, measure)(x)
    torch.testing.assert_close(values, torch.full((3,), float(always)))
