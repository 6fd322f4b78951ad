"""What users call refuses whatever does not fit in one line, and takes what they mean all the same."""

import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pandas
import pytest
import torch
import xarray
from jaxtyping import Float
from torch import Tensor

import tl_coupling as tlc
from tl_coupling import comparisons, generalization, interactive, plots, report
from tl_coupling.border import AtLeast, Count, Device, Finite, FloatDtype, Positive, Seed, checked

# Rooms whose arguments are checked where they are: to be emptied.
ELSEWHERE = {"tl_coupling.jacobians", "tl_coupling.blocks.tracing", "tl_coupling.models", "tl_coupling.executors"}
CLASSES = (tlc.CouplingMap, tlc.Prompt, tlc.Settings, tlc.Spectrum, tlc.Survey)
SQUARE = torch.tensor([[2.0, 1.0], [0.5, 3.0]])


class Foreign:
    """What no annotation asks for."""


def public_functions() -> Iterator[Callable[..., Any]]:
    rooms = (tlc, comparisons, generalization, interactive, plots, report)
    named = {id(value): value for room in rooms for value in (getattr(room, name) for name in dir(room))}
    for value in named.values():
        if isinstance(value, types.FunctionType) and value.__module__ not in ELSEWHERE and value.__name__[0] != "_":
            yield value
    for one in CLASSES:
        yield one.__init__
        methods = (value for name, value in vars(one).items() if name[0] != "_" and inspect.isfunction(value))
        yield from (method for method in methods if len(inspect.signature(method).parameters) > 1)
    yield inspect.unwrap(tlc.CouplingMap.load.__func__) and tlc.CouplingMap.load.__func__


def fitting(trace: tlc.Trace) -> dict[str, Any]:
    """For every parameter without default, something of its kind, by the parameter's name."""
    result = tlc.depth_coupling(trace, k=2)
    S = torch.tensor([2.0, 1.0])
    return {
        **{"trace": trace, "traces": trace, "model": trace.model, "layer": 0, "k": 1, "n": 1, "x": torch.ones(3, 4)},
        **{"J": SQUARE, "J_1": SQUARE, "A": SQUARE, "S": S, "S_1": S, "spectrum_2": tlc.svd(SQUARE)},
        **{"U": SQUARE, "Vh": SQUARE, "result": result, "results": result, "runs": {}, "self": result},
        **{"data": xarray.Dataset(), "table": pandas.DataFrame(), "scores": "loss", "controls": ["z"], "subsets": {}},
        **{"survey": tlc.Survey(["gpt2"], ["one"]), "prompts": ["one"], "settings": tlc.Settings(), "models": ["gpt2"]},
        **{"folder": "f", "path": "f", "name": "f", "source": "f", "id": "a", "prompt": "b", "cls": tlc.CouplingMap},
        **{"str_tokens": ["a"], "values": torch.ones(1), "unembed": torch.exp, "y": "y"},
        **{name: getattr(result, name) for name in result.__dataclass_fields__},
    }


OVER = {
    "show_layers_by_token": {"values": torch.ones(1, 1)},
    "prompts_per_task": {"prompts": [tlc.Prompt("a", "b")]},
    "bootstrap": {"x": np.ones((3, 2)), "y": np.ones(3)},
    "Spectrum.__init__": {"S": torch.ones(2)},
    "inverse_singular_value_fit": {"S": torch.ones(2, 2)},
    "plot_influence": {"results": {}},
    "plot_linearisation": {"results": {}},
    "plot_perturbation": {"results": {}},
    "plot_generalization": {"result": None},
}
OF_COLUMNS = {"linear_fit", "exponential_fit", "rank_correlation", "subset_fits", "leave_one_out"}
OF_COLUMNS |= {"partial_regression", "covariate_fits"}


@pytest.mark.parametrize("function", list(public_functions()), ids=lambda function: function.__qualname__)
def test_every_parameter_refuses_what_is_of_no_kind_it_takes(
    function: Callable[..., Any], tiny_trace: tlc.Trace
) -> None:
    parameters = inspect.signature(function).parameters.values()
    given = fitting(tiny_trace) | ({"x": "x"} if function.__name__ in OF_COLUMNS else {})
    given |= OVER.get(function.__qualname__, {})
    if function.__qualname__.startswith("Spectrum") and "self" in given:
        given["self"] = tlc.svd(SQUARE)
    needed = {p.name: given[p.name] for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert len(needed) + len([p for p in parameters if p.name not in needed]) == len(parameters)
    for parameter in parameters:
        if parameter.name in ("self", "cls") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        for wrong in (Foreign(), Foreign, 1j, {1.5}, b"bytes", [[None]], {None: Foreign()}):
            if wrong is Foreign and "Callable" in str(parameter.annotation):
                continue
            with pytest.raises((TypeError, ValueError)) as error:
                function(**needed | {parameter.name: wrong})
            message = str(error.value)
            assert message.startswith(f"`{parameter.name}` must be "), (wrong, message)
            assert "\n" not in message
            assert ", got " in message


# --- every case that was reproduced


def by_now(*arguments: Any, **options: Any) -> Any:
    return arguments, options


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (tlc.svd, ([[1.0]],), {}, TypeError, "`J` must be a floating-point torch tensor [… d_out d_in], got a list"),
]
