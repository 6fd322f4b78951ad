"""Functions of the user's own: their names, what they return, what tells them apart."""

import functools
import pickle
import sys

import pytest
import torch

import own_measures
import tl_coupling as tlc
from tl_coupling.measures import (
    MEASURES,
    OwnMeasure,
    check_reaches_processes,
    measure_named,
    measure_of,
    measures_at_every_k,
)
from tl_coupling.measures.own_functions import source_digest

A = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
S = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5]).expand(2, 1, 5)


def thresholded(limit, share=0.5):
    def above(A, S):
        return (A.abs() > limit).float().mean((-2, -1)) * share

    return above


def test_a_function_gets_both_for_every_matrix_and_only_k_singular_values():
    seen = []

    def shapes(A, S):
        seen.append((A.shape, S.shape, A.dtype, S.dtype))
        return A.sum((-2, -1))

    values = measure_of(A, S.double(), shapes)
    assert seen == [((2, 3, 4, 4), (2, 3, 4), torch.float32, torch.float32)]
    torch.testing.assert_close(values, A.sum((-2, -1)))
    every_k = measures_at_every_k(A, S, [measure_named(shapes)])
    assert [tuple(shape) for shape, *_ in seen[1:]] == [
        (2, 3, k, k) for k in (1, 2, 3, 4)
    ]
    assert {dtype for *_, dtype in seen[1:]} == {torch.float64}
    for k in range(1, 5):
        corner = A.double()[..., :k, :k].sum((-2, -1))
        torch.testing.assert_close(every_k[0, k - 1], corner)
    # One matrix alone has a value without axes.
    assert measure_of(A[0, 0], S[0, 0], shapes).shape == ()


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda A: A.sum(-1), ValueError, r"which is shape \[2 3\], got \[2 3 4\]"),
        (lambda A: A.sum(), ValueError, r"shape \[2 3 4 4\], .* got \[\]: reduce"),
        (lambda A: 0.5, TypeError, "one for each matrix, got float"),
        (lambda A: A.numpy().sum((-2, -1)), TypeError, "got ndarray"),
        (lambda A: A.sum((-2, -1)) * 1j, TypeError, "a tensor of torch.complex64"),
    ],
)
def test_what_is_not_one_number_for_each_matrix_is_refused(returned, error, message):
    def mine(A, S):
        return returned(A)

    with pytest.raises(
        error, match=f"`mine\\(A, S\\)` must return .*{message}"
    ) as raised:
        measure_of(A, S, mine)
    assert "\n" not in str(raised.value)


def test_whole_numbers_become_numbers_of_the_dtype():
    def count(A, S):
        return (A > 0).sum((-2, -1))

    values = measure_of(A, S, count)
    assert values.dtype == A.dtype
    assert torch.equal(values, (A > 0).sum((-2, -1)).float())


def test_what_is_not_finite_is_undefined_with_a_warning():
    with pytest.warns(UserWarning, match="`only_of_two` is not finite for"):
        values = measure_of(A, S, own_measures.only_of_two)
    expected = A[..., 0, 0].where(A[..., 0, 0] >= 0, torch.nan)
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert values.isnan().any()
    with pytest.warns(UserWarning, match="for 6 matrices"):
        assert bool(
            measure_of(A[..., :1, :1], S, own_measures.only_of_two).isnan().all()
        )
    # A itself must be finite, as for all measures.
    with pytest.raises(ValueError, match="`A` has NaN or infinite entries"):
        measure_of(A.where(A > 0, torch.nan), S, own_measures.my_coupling)


def test_a_function_needs_a_name_of_its_own():
    def coupling(A, S):
        return A.sum((-2, -1))

    for unnamed, shown in (
        (lambda A, S: A.sum((-2, -1)), "<lambda>"),
        (functools.partial(own_measures.my_coupling), "partial"),
    ):
        with pytest.raises(
            ValueError, match=rf"needs a name.*got {shown}: write it with"
        ):
            measure_of(A, S, unnamed)
    with pytest.raises(ValueError, match="'coupling' is the name of another measure"):
        measure_of(A, S, coupling)
    named = functools.partial(own_measures.my_coupling)
    named.__name__ = "named"
    assert measure_named(named).name == "named"


def test_an_unknown_name_says_how_to_give_a_function():
    with pytest.raises(
        ValueError, match=r"captured_energy.*got 'mine': a measure of your"
    ) as raised:
        measure_of(A, S, "mine")
    assert "given as the function itself" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="not of 'my_coupling': leave them out"):
        measure_of(A, S, own_measures.my_coupling, p=1)


def test_functions_of_one_source_are_told_apart_by_what_they_close_over():
    digests = {source_digest(thresholded(limit)) for limit in (0.5, 0.7)}
    digests |= {source_digest(thresholded(0.5, share=0.2))}
    assert len(digests) == 3
    assert source_digest(thresholded(0.5)) == source_digest(thresholded(0.5))
    typed: dict = {}
    exec("def one(A, S): return .5 * A\ndef other(A, S): return .7 * A", typed)
    exec("def again(A, S): return .5 * A", typed)
    assert source_digest(typed["one"]) == source_digest(typed["again"])
    assert source_digest(typed["one"]) != source_digest(typed["other"])
    assert source_digest(torch.trace) is None


def test_a_measure_reaches_another_process():
    measure = measure_named(own_measures.my_coupling)
    assert pickle.loads(pickle.dumps(measure)) == measure
    check_reaches_processes(own_measures.my_coupling, "my_coupling")
    with pytest.raises(ValueError, match="`above` cannot be sent to other processes"):
        check_reaches_processes(thresholded(0.5), "above")


def test_what_was_typed_at_a_prompt_reaches_no_other_process(monkeypatch):
    """Pickle finds it in this process, and workers do not."""
    main = sys.modules["__main__"]

    def typed(A, S):
        return A.sum((-2, -1))

    typed.__module__, typed.__qualname__ = "__main__", "typed"
    monkeypatch.setattr(main, "typed", typed, raising=False)
    monkeypatch.delattr(main, "__file__", raising=False)
    with pytest.raises(ValueError, match="`typed` cannot be sent to other processes"):
        check_reaches_processes(typed, "typed")


@pytest.mark.parametrize("name", own_measures.WRITTEN_OUT)
def test_measures_written_out_are_those_that_have_names(name):
    own = own_measures.WRITTEN_OUT[name]
    torch.testing.assert_close(measure_of(A, S, own), measure_of(A, S, name))
    every_k = measures_at_every_k(A, S, (MEASURES[name], OwnMeasure.of(own)))
    torch.testing.assert_close(every_k[1], every_k[0])


def uniform_frames(*shape, generator):
    """Return the orthogonal factors of Gaussians, by their polar decomposition."""
    gaussian = torch.randn(*shape, generator=generator, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(gaussian, full_matrices=False)
    return U @ Vh


@pytest.mark.parametrize("name", own_measures.WRITTEN_OUT)
@pytest.mark.parametrize("k", [4, 8])
def test_the_null_is_the_mean_of_random_subspaces(name, k):
    """Within the error of 400 draws; the closed form is a root mean square, which the
    spread of the values takes from their mean.
    """
    generator = torch.Generator().manual_seed(3)
    J = torch.randn(3, 24, 24, generator=generator, dtype=torch.float64)
    J_1 = {
        "d_model": 24,
        "S_1": torch.linalg.svdvals(J),
        "frobenius_norm": torch.linalg.matrix_norm(J),
    }
    own = own_measures.WRITTEN_OUT[name]
    found = tlc.random_subspace_null(k, own, **J_1)
    assert torch.equal(found, tlc.random_subspace_null(k, own, **J_1))
    # Other random numbers, and the whole product.
    frames = uniform_frames(2, 1000, 24, k, generator=generator)
    drawn = frames[0].mT[:, None] @ J @ frames[1][:, None]
    values = own(drawn, J_1["S_1"][:, :k].expand(1000, 3, k))
    error = values.std(0) * (1 / 400 + 1 / 1000) ** 0.5
    assert bool(((found - values.mean(0)).abs() < 4 * error + 1e-12).all())
    closed = tlc.random_subspace_null(k, name, **J_1)
    # `√(mean²+ spread²)` lies at most this far from the mean.
    between = values.var(0) / (2 * values.mean(0).abs().clamp_min(0.1))
    if name == "coupling":
        between = values.var(0) / (2 * (1 - values.mean(0)))
    assert bool(((found - closed).abs() < 4 * error + 1.2 * between).all())


def test_a_null_keeps_its_sign():
    """A root mean square would be above 0; the mean of a signed trace is 0."""
    generator = torch.Generator().manual_seed(3)
    J = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    J_1 = {
        "d_model": 24,
        "S_1": torch.linalg.svdvals(J),
        "frobenius_norm": torch.linalg.matrix_norm(J),
    }
    null = tlc.random_subspace_null(4, own_measures.signed_trace, **J_1)
    values = tlc.measures.draws_of_random_subspaces(
        4, 2000, **J_1, generator=torch.Generator().manual_seed(9)
    )
    spread = own_measures.signed_trace(values, J_1["S_1"][:4].expand(2000, 4)).std()
    assert abs(float(null)) < 4 * float(spread) / 400**0.5
    with pytest.raises(ValueError, match="'signed_trace' depends on J_1: give d_model"):
        tlc.random_subspace_null(4, own_measures.signed_trace)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("name", own_measures.WRITTEN_OUT)
def test_nulls_within_spans_are_means_of_rotations(name, paired):
    own = own_measures.WRITTEN_OUT[name]
    matrices = A[0].double()
    s = S[0].double().expand(3, 5)
    found = tlc.measures.rotation_null(matrices, s, own, paired=paired)
    closed = tlc.measures.rotation_null(matrices, s, name, paired=paired)
    generator = torch.Generator().manual_seed(5)
    turns = uniform_frames(2, 2000, 1, 4, 4, generator=generator)
    left = turns[0]
    right = left if paired else turns[1]
    values = own(left.mT @ matrices @ right, s[:, :4].expand(2000, 3, 4))
    error = values.std(0) * (1 / 400 + 1 / 2000) ** 0.5
    assert bool(((found - values.mean(0)).abs() < 4 * error + 1e-9).all())
    mean_square = 1 - (1 - values).square().mean(0).sqrt()
    if name != "coupling":
        mean_square = values.square().mean(0).sqrt()
    assert bool(((closed - mean_square).abs() < 5 * error + 1e-9).all())
