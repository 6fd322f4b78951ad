"""Measures as objects: each beside loops over its entries, at every k and by its name."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

import tl_coupling as tlc
from tl_coupling.measures import (
    MEASURES,
    MeasureName,
    mean_name,
    measure_named,
    measure_of,
    measured_in,
    measures_at_every_k,
    measures_of_map,
    null_name,
)
from tl_coupling.measures import measure as measure_module

D = 8


def by_loops(A: np.ndarray, s: np.ndarray) -> dict[str, float]:
    """Every measure of one A, entry by entry."""
    pairs = list(np.ndindex(A.shape))
    total = sum(A[i, j] ** 2 for i, j in pairs)
    off = sum(A[i, j] ** 2 for i, j in pairs if i != j)
    distance = sum((A[i, j] - s[i] * (i == j)) ** 2 for i, j in pairs)
    absolute_distance = sum((abs(A[i, j]) - s[i] * (i == j)) ** 2 for i, j in pairs)
    length = math.sqrt(sum(s**2))
    return {
        "coupling": 1 - math.sqrt(off / total),
        "normalized_miscoupling": math.sqrt(off / total),
        "miscoupling": math.sqrt(off),
        "spectral_miscoupling": math.sqrt(distance) / length,
        "captured_energy": math.sqrt(total) / length,
        "released_norm": math.sqrt(absolute_distance) / length,
        "released_trace": math.sqrt(absolute_distance) / sum(s),
    }


@pytest.fixture(scope="module")
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Coupling matrices `[2 3 D D]` and singular values of their J_1, `[2 D]`."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(2, 3, D, D, generator=generator, dtype=torch.float64)
    J_1 = torch.randn(2, D, D, generator=generator, dtype=torch.float64)
    return A, torch.linalg.svdvals(J_1)


@pytest.mark.parametrize("rows_at_once", [1, 2])
def test_every_measure_at_every_k_is_the_loop_over_corners(
    pairs, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
):
    A, S = pairs
    monkeypatch.setattr(measure_module, "_MOST_ENTRIES", rows_at_once * A[0].numel())
    values = measures_of_map(A, S)
    assert values.shape == (len(MEASURES), D, 2, 3)
    for k, i, j in np.ndindex(D, 2, 3):
        corner = A[i, j, : k + 1, : k + 1].numpy()
        expected = by_loops(corner, S[i, : k + 1].numpy())
        for measure, value in zip(MEASURES, values[:, k, i, j].tolist(), strict=True):
            assert value == pytest.approx(expected[measure], abs=1e-12)


def test_what_is_undefined_at_one_k_is_nan_and_not_infinite():
    """`A` that is not 0 has no distance in units of a J_1 that is."""
    A = torch.ones(2, D, D, dtype=torch.float64)
    S = torch.stack([torch.zeros(D), torch.ones(D)])
    with pytest.warns(UserWarning, match="is 0 for 8 matrices") as warned:
        values = measures_at_every_k(A, S)
    # Of the norm of p = 2, which several measures share, and of p = 1.
    assert [str(record.message).split()[0] for record in warned] == [
        "‖s_{1,K}‖₂",
        "‖s_{1,K}‖_p",
    ]
    with pytest.warns(UserWarning, match="is 0 for 1 matrices"):
        expected = [measure.value(A, S) for measure in MEASURES.values()]
    assert torch.equal(values[:, -1].isnan(), torch.stack(expected).isnan())
    assert not values.isinf().any()


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_of_a_name_is_the_loop(pairs, name):
    A, S = pairs
    measure = measure_named(name)
    assert measure.name == name
    values = measure.value(A, S[:, None])
    assert torch.equal(values, measure_of(A, S[:, None], name))
    assert torch.equal(values, measure_of(A, S[:, None], measure))
    for i, j in np.ndindex(2, 3):
        expected = by_loops(A[i, j].numpy(), S[i].numpy())[name]
        assert float(values[i, j]) == pytest.approx(expected, abs=1e-12)


def test_the_names_are_those_of_the_objects():
    assert get_args(MeasureName) == tuple(MEASURES)
    assert all(measure.name == name for name, measure in MEASURES.items())


@pytest.mark.parametrize("name", MEASURES)
def test_bounded_measures_and_no_others_stay_between_0_and_1(name):
    generator = torch.Generator().manual_seed(1)
    J_1, J_2 = 3 * torch.randn(2, 200, D, D, generator=generator, dtype=torch.float64)
    A = tlc.coupling_matrix(J_1, tlc.svd(J_2), 3)
    S = torch.linalg.svdvals(J_1)
    measure = MEASURES[name]
    assert bool((measure.value(A, S) >= 0).all())
    if measure.bounded:
        assert float(measure.value(A, S).max()) <= 1 + 1e-12
    else:
        # Of an A that no J_1 with these singular values has.
        assert float(measure.value(3 * A, S).max()) > 1


@pytest.mark.parametrize("name", MEASURES)
def test_what_the_null_tends_to_is_its_value_at_a_large_k(name):
    limit = MEASURES[name].null_tends_to
    if limit is None:
        with pytest.raises(ValueError, match=f"null of '{name}' depends on J_1"):
            tlc.random_subspace_null(1000, name)
    else:
        assert float(tlc.random_subspace_null(1000, name)) == pytest.approx(
            limit, abs=1e-3
        )


def test_options_are_of_the_spectral_measure_alone(pairs):
    A, S = pairs
    for p, absolute in ((1, False), (2, True), (3.5, True)):
        spectral = measure_named("spectral_miscoupling", p=p, absolute=absolute)
        expected = tlc.spectral_miscoupling(A, S[:, None], p, absolute)
        assert torch.equal(spectral.value(A, S[:, None]), expected)
        assert measure_named(spectral) is spectral
        for name in set(MEASURES) - {"spectral_miscoupling"}:
            with pytest.raises(ValueError, match=f"not of '{name}': leave them out"):
                measure_named(name, p=p, absolute=absolute)


def test_the_released_measures_are_spectral_ones_under_names_of_their_own():
    for name, p in (("released_norm", 2), ("released_trace", 1)):
        spectral = measure_named("spectral_miscoupling", p=p, absolute=True)
        assert MEASURES[name].formula == spectral.formula
        assert MEASURES[name] != spectral
    formulas = [measure.formula for measure in MEASURES.values()]
    assert len(set(formulas)) == len(formulas)


def test_labels_say_k_and_the_options():
    spectral = measure_named("spectral_miscoupling", p=1, absolute=True)
    assert spectral.label_at(5).endswith("(k = 5, p = 1, |A|)")
    assert MEASURES["released_norm"].label_at(5).endswith("(k = 5)")
    assert MEASURES["coupling"].label_at(10) == r"coupling $1 - \tilde{m}$ (k = 10)"


def test_a_measure_cannot_be_changed():
    with pytest.raises(AttributeError):
        MEASURES["coupling"].p = 1
    with pytest.raises(TypeError):
        MEASURES["mine"] = MEASURES["coupling"]


def test_names_in_a_survey_are_read_as_they_are_written():
    variables = [mean_name("coupling"), null_name("coupling"), "loss", "coupling"]
    assert variables[:2] == ["mean_coupling", "null_coupling"]
    assert measured_in(variables) == ["coupling"]
