"""Public calls in threads, and what of their caller's contexts they keep."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from fingerprints import fingerprint
from random_matrices import gaussian
from tl_coupling.arguments import checked, measuring, others_measuring


class Residual(nn.Linear):
    """A block that adds a linear function."""

    def forward(self, X: Tensor) -> Tensor:
        return X + super().forward(X)


def blocks_of(dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Residual(6, 6, dtype=dtype).eval() for _ in range(2)]


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Threads


def decoded(trace: tlc.Trace) -> Any:
    return tlc.directions.decode(trace, 0, k=2)


def ablated(trace: tlc.Trace) -> Any:
    subspace = tlc.directions.shared_subspace([trace], rank=1, k=2)
    return tlc.directions.ablate(trace.model, ["w1 w2 w3"], subspace, n_draws=2)


@pytest.mark.parametrize("beside", [decoded, ablated])
def test_forward_differentiation_in_threads_gives_what_one_alone_gets(
    beside: Callable[[tlc.Trace], Any], tiny_trace: tlc.Trace
) -> None:
    """Its levels belong to the process."""
    work = [decoded, beside] * 2
    alone = [fingerprint(measure(tiny_trace)) for measure in work[:2]] * 2
    with ThreadPoolExecutor(len(work)) as threads:
        together = list(threads.map(lambda measure: measure(tiny_trace), work))
    assert [fingerprint(result) for result in together] == alone


def test_one_thread_measures_at_a_time_and_one_that_waits_lets_others() -> None:
    inside: list[str] = []

    @checked
    def measure(name: str) -> None:
        inside.append(name)
        assert inside == [name]
        torch.linalg.svd(gaussian(60, 60, seed=0))
        inside.remove(name)

    @checked
    def wait(threads: ThreadPoolExecutor) -> None:
        with others_measuring():
            list(threads.map(measure, "abcdefgh"))
        measure("own")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(measure, "abcdefgh"))
        wait(threads)
    assert not inside


# Contexts


def test_contexts_are_as_before_after_an_error() -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_inference_mode_enabled(),
        )

    J = gaussian(3, 3, seed=0)
    original_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float16)
    try:
        with torch.autocast("cpu"), torch.device("meta"), torch.inference_mode():
            before = state()
            with pytest.raises(ValueError, match="`k`"):
                tlc.svd(J, k=7)
            within = []

            def interrupted() -> None:
                within.append(state())
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt), measuring():
                interrupted()
            assert within == [(False, torch.float32, torch.device("cpu"), False)]
            assert state() == before
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(original_precision)


def test_operations_still_follow_the_precision_of_the_process() -> None:
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("torch before 2.9 has no such setting")
    original = backends.fp32_precision
    # Their own settings: what was set of all is theirs no longer when it is taken back.
    operations = (backends.cudnn.conv, backends.cudnn.rnn)
    own = [operation.fp32_precision for operation in operations]
    try:
        backends.fp32_precision = "tf32"
        tlc.svd(gaussian(3, 3, seed=0))
        assert backends.cudnn.conv.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = original
        for operation, precision in zip(operations, own, strict=True):
            operation.fp32_precision = precision


def test_a_measure_can_be_differentiated_within_autocast() -> None:
    A = gaussian(4, 4, seed=0).float().requires_grad_()
    tlc.miscoupling(A).backward()
    expected = A.grad
    A.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        value = tlc.miscoupling(A)
    value.backward()
    assert A.grad is not None
    assert torch.equal(A.grad, expected)


def test_modules_run_in_the_default_dtype_that_is_their_own(
    float64_by_default: None,
) -> None:
    """`run` makes a tensor of the default dtype, as the blocks have it."""
    blocks = blocks_of(torch.float64)
    x = gaussian(1, 3, 6, seed=1).tolist()
    trace = tlc.trace_modules(blocks, lambda: nn.Sequential(*blocks)(torch.tensor(x)))
    assert trace.residual.dtype == torch.float64
    J = tlc.block_jacobian(trace, 1)
    torch.testing.assert_close(J, blocks[1].weight.data, rtol=1e-12, atol=1e-12)


def test_a_default_dtype_that_is_not_the_models_changes_nothing(
    float64_by_default: None, tiny_trace: tlc.Trace
) -> None:
    traced = tlc.trace(tiny_trace.model, tiny.TOKENS)
    assert torch.equal(traced.residual, tiny_trace.residual)
    assert torch.equal(tlc.block_jacobians(traced), tlc.block_jacobians(tiny_trace))


def test_members_of_results_measure_as_well() -> None:
    """Those without arguments to check, too: methods, properties, constructors."""

    @checked
    @dataclass(frozen=True)
    class Result:
        values: Tensor

        @property
        def square(self) -> Tensor:
            return self.values @ self.values

        @cached_property
        def remembered(self) -> Tensor:
            return self.values @ self.values

        def computed(self) -> Tensor:
            """Say what it is."""
            return self.values @ self.values

        @classmethod
        def of_zeros(cls, n: int) -> "Result":
            return cls(torch.zeros(n))

    values = gaussian(8, 8, seed=0).float()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        result = Result(values)
        squares = [result.square, result.remembered, result.computed()]
        zeros = Result.of_zeros(2).values
        product = tlc.dynamics.FactoredProduct.identity(2).Q
    assert all(torch.equal(square, values @ values) for square in squares)
    assert zeros.device.type == product.device.type == "cpu"
    assert Result.computed.__doc__ == "Say what it is."
