"""Every public function within its caller's contexts: it gives what it gives outside,
to the bit, and leaves the contexts, its arguments and the random numbers as they were.

What is called is the example in its docstring, which `test_public_names` demands of
each: a function that is added is swept as well.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.artist import Artist
from torch import Tensor

import tl_coupling as tlc
from example_calls import Call, as_given, calls_in_example, tensors_of
from fingerprints import fingerprint
from public_api import public_names

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Of examples, which are run elsewhere.
]

FUNCTIONS = {name: f for name, f in public_names().items() if inspect.isfunction(f)}
CLASSES = {value for value in public_names().values() if inspect.isclass(value)}
# What they give says something else each time, and why.
CHANGING = {
    "tl_coupling.plan": "of the memory that is free",
}


def in_tiers(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test: what draws is in the long tier, and what measures
    many models or prompts.
    """
    marks = {
        name: pytest.mark.long("draws, or measures many")
        for name in names
        if re.search(
            r"plot_|report|portrait|surv|checkpoint|generalization|dynamics|draws|\.run$",
            name,
        )
    }
    return [pytest.param(name, marks=marks.get(name, ())) for name in sorted(names)]


@pytest.fixture
def calls_of(
    _example_folder: Path,
    _example_names: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    as_a_user: None,
) -> Callable[[str], list[Call]]:
    """Provide the calls of a function in its example."""
    monkeypatch.chdir(_example_folder)

    def run(name: str) -> list[Call]:
        return calls_in_example(FUNCTIONS[name], _example_names)

    return run


def state() -> tuple[Any, ...]:
    """Return what a caller may have set."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.get_rng_state().numpy().tobytes(),
        torch.get_num_threads(),
    )


@contextlib.contextmanager
def reduced_precision() -> Iterator[None]:
    original = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_float32_matmul_precision(original)


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def contexts_of_a_caller() -> Iterator[None]:
    """Enter all of them: what leaks from any would be another number, or an error."""
    with reduced_precision(), other_defaults(), torch.inference_mode():
        yield


def is_figure(result: Any) -> bool:
    return isinstance(result, Artist)


def is_widget(result: Any) -> bool:
    return hasattr(result, "comm")


def readings(result: Any) -> dict[str, Any]:
    """Return what the properties and methods of a result give that take no argument."""
    is_own = type(result).__module__.startswith("tl_coupling")
    if not is_own or is_figure(result):
        return {}
    if is_widget(result):
        # What ipywidgets adds to its values needs a notebook.
        values = ("numbers", "directions", "pair", "k", "run")
        return {name: fingerprint(getattr(result, name)) for name in values}
    given = {}
    for name, member in members_of(type(result)).items():
        if name.startswith("_") or name in ("save", "load", "abort", "shutdown"):
            continue
        is_read = isinstance(member, property | cached_property)
        if not is_read and not is_called_plainly(member):
            continue
        try:
            value = getattr(result, name)
            given[name] = fingerprint(value if is_read else value())
        except (ValueError, TypeError) as error:
            given[name] = str(error)
    return given


def members_of(cls: type) -> dict[str, Any]:
    """Return what a class has and inherits, by name, without calling a descriptor."""
    # As `inspect.getmembers_static`, which is new in Python 3.11.
    return {name: inspect.getattr_static(cls, name) for name in dir(cls)}


def is_called_plainly(member: Any) -> bool:
    """Say whether it is a method that takes nothing but its object."""
    if not inspect.isfunction(member):
        return False
    _, *parameters = inspect.signature(member).parameters.values()
    return all(p.default is not p.empty for p in parameters)


@pytest.mark.parametrize("name", in_tiers(FUNCTIONS.keys() - CHANGING))
def test_it_gives_the_same_in_every_context(
    name: str, calls_of: Callable[[str], list[Call]]
) -> None:
    for args, kwargs, result in calls_of(name):
        if is_figure(result) or is_widget(result):
            # The example may have saved it, and that places labels; or chosen a pair.
            result = FUNCTIONS[name](*as_given(args), **as_given(kwargs))
        expected = fingerprint(result), readings(result)
        given = tensors_of((args, kwargs))
        arguments = fingerprint(given)
        with contexts_of_a_caller():
            original = state()
            again = FUNCTIONS[name](*as_given(args), **as_given(kwargs))
            assert state() == original
            read = readings(again)
        assert fingerprint(again) == expected[0]
        differing = {key for key in read if read[key] != expected[1].get(key)}
        assert not differing
        assert fingerprint(given) == arguments


def in_float64(value: Any, trace_again: Callable[[tlc.Trace], tlc.Trace]) -> Any:
    """Return arguments with float64 in place of other floating-point tensors."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(float)
    if isinstance(value, tlc.Trace):
        return trace_again(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(in_float64(entry, trace_again) for entry in value)
    if isinstance(value, dict):
        return {key: in_float64(entry, trace_again) for key, entry in value.items()}
    return copy.copy(value) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", in_tiers(FUNCTIONS.keys() - CHANGING))
def test_it_does_not_write_to_arguments_in_float64(
    name: str, calls_of: Callable[[str], list[Call]]
) -> None:
    """`double()` of a tensor in float64 is that tensor."""

    def trace_again(trace: tlc.Trace) -> tlc.Trace:
        prompt = trace.pixels if trace.tokens is None else trace.tokens
        return tlc.trace(
            trace.model, prompt, final_norm=trace.final_norm, dtype=torch.float64
        )

    for args, kwargs, _ in calls_of(name):
        args, kwargs = in_float64((args, kwargs), trace_again)
        given = tensors_of((args, kwargs))
        before = fingerprint(given)
        # Some take float32 only, and say so.
        with contextlib.suppress(TypeError, ValueError):
            FUNCTIONS[name](*as_given(args), **as_given(kwargs))
        assert fingerprint(given) == before
