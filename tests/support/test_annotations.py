"""The tests' own checks of annotations refuse what these exclude, at every call."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from annotations import checked
from tl_coupling.spectra import check_cut
from tl_coupling.spectra.iteration import Triplets


@checked(typechecker=beartype)
def product(
    X: Float[Tensor, "n m"], Y: Float[Tensor, "m p"], n_columns: int | None = None
) -> Float[Tensor, "n p"]:
    return (X @ Y)[:, :n_columns]


@checked(typechecker=beartype)
def products(
    pairs: list[tuple[Float[Tensor, "n m"], Float[Tensor, "m p"]]],
) -> Iterator[Tensor]:
    yield from (product(X, Y) for X, Y in pairs)


def adder(added: Any) -> Callable[[Any], float]:
    @checked(typechecker=beartype)
    def add(number: int) -> float:
        return number + added

    return add


X, Y = torch.ones(2, 3), torch.ones(3, 4)


def test_what_fits_passes() -> None:
    assert product(X, Y).shape == (2, 4)
    assert [XY.shape for XY in products([(X, Y), (X, Y)])] == [(2, 4), (2, 4)]
    assert adder(1.0)(2) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(X, X),
        lambda: product(X.int(), Y),
        lambda: product(X[0], Y),
        lambda: product(X, Y, 4.0),
        # What is returned has fewer columns than `Y`.
        lambda: product(X, Y, 2),
        lambda: products([(X, X)]),
        lambda: adder(1.0)("2"),
        lambda: adder(1j)(1),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=r"violates|Type-check error"):
        call()


@pytest.mark.skipif(
    jaxtyping.jaxtyped is not checked,
    reason="the package is checked where all tests run: on TransformerLens 4.x",
)
@pytest.mark.parametrize(
    "call",
    [
        lambda: check_cut(X[0], 1, ["S"]),
        lambda: check_cut(X, 1, "S"),
        lambda: Triplets(X, X[0], X, X[0], 1.0),
        lambda: Triplets(X, X[0], X, X[0, :2], 1),
    ],
)
def test_what_does_not_fit_the_package_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=r"violates|Type-check error"):
        call()


def test_a_function_within_another_keeps_its_own_variables_and_no_longer_than_itself() -> (
    None
):
    class Added(float):
        """A number that can be watched."""

    one, two = Added(1), Added(2)
    gone = weakref.ref(one)
    functions = [adder(one), adder(two)]
    assert [add(10) for add in functions] == [11, 12]
    for add in functions:
        with pytest.raises(Exception, match="violates"):
            add(1.0)
    del one, functions, add
    gc.collect()
    assert gone() is None


def test_a_user_sees_none_of_it(as_a_user: None) -> None:
    assert jaxtyping.config.jaxtyping_disable
    assert product(X, Y, 2).shape == (2, 2)
    assert adder(1j)(1) == 1 + 1j
