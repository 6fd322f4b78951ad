"""NaN, or another number, planted into whatever a public function takes or gives."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
import xarray
from torch import Tensor, nn

import tl_coupling as tlc

Change = Callable[[float], float]
# From a part that was changed, the whole that holds it.
Rebuilt = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """A number that a value holds.

    Attributes:
        name: where it is.
        changed: from what becomes of the number, a context in which the value, which it
            gives, holds that. Weights are changed in place, and as they were afterwards;
            all else is a copy.
    """

    name: str
    changed: Callable[[Change], AbstractContextManager[Any]]


def places(
    value: Any, name: str = "", models: set[int] | None = None
) -> Iterator[Place]:
    """Yield some of the numbers of a value: of each tensor the first and the last, of each
    list the first entry and the last, of a model, once, two weights.
    """
    models = set() if models is None else models
    match value:
        case bool():
            return
        case float():
            yield Place(name, lambda change: nullcontext(change(value)))
        case nn.Module():
            named_parameters = list(value.named_parameters())
            if id(value) in models or not named_parameters:
                return
            models.add(id(value))
            # An embedding, say, and a part of a block.
            in_the_middle = named_parameters[len(named_parameters) // 2]
            for key, parameter in (named_parameters[0], in_the_middle):
                changed = partial(_with_weight, value, parameter)
                yield Place(f"{name}.{key}", changed)
        case Tensor() if value.is_floating_point() or value.is_complex():
            for index in _indices(value.shape):
                changed = partial(_with_entry, value.detach().clone, index)
                yield Place(f"{name}{list(index)}", changed)
        case np.ndarray() if value.dtype.kind in "fc":
            for index in _indices(value.shape):
                changed = partial(_with_entry, value.copy, index)
                yield Place(f"{name}{list(index)}", changed)
        case xarray.Dataset():
            # Of many variables, one number each.
            for key, array in value.data_vars.items():
                if array.dtype.kind == "f" and array.size:
                    index = _indices(array.shape)[-1]
                    entry = partial(_with_entry, array.values.copy, index)
                    rebuilt = partial(_dataset_with, value, key)
                    changed = partial(_with_part, Place("", entry), rebuilt)
                    yield Place(f"{name}.{key}{list(index)}", changed)
        case _:
            for key, part, rebuilt in _parts(value):
                for place in places(part, f"{name}.{key}", models):
                    yield Place(place.name, partial(_with_part, place, rebuilt))


def _indices(shape: Sequence[int]) -> list[tuple[int, ...]]:
    n = int(np.prod(shape))
    ends = dict.fromkeys((0, n - 1)) if n else ()
    return [tuple(map(int, np.unravel_index(end, shape))) for end in ends]


def _parts(value: Any) -> Iterator[tuple[str, Any, Rebuilt]]:
    """Yield what a value is made of: a name, the part, and the whole from another one."""
    match value:
        case pandas.DataFrame():
            for key in value:
                # Whole numbers too are numbers, of which one may be unknown.
                column = value[key].to_numpy()
                column = column.astype(float) if column.dtype.kind == "i" else column
                yield str(key), column, partial(_frame_with, value, str(key))
        case tlc.Trace():
            yield "residual", value.residual, partial(_trace_with, value)
            # The trace stays: its model is another one then.
            yield "model", value.model, lambda _: value
        case Mapping():
            for key in value:
                yield str(key), value[key], partial(_mapping_with, value, key)
        case list() | tuple():
            all_indices = range(len(value))
            indices: Iterable[int] = all_indices
            # Arguments are a tuple, of which each is another; prompts are a list.
            if isinstance(value, list):
                indices = dict.fromkeys([*all_indices[:1], *all_indices[-1:]])
            for i in indices:
                yield str(i), value[i], partial(_sequence_with, value, i)
        case _ if type(value).__name__ == "JacobianLens":
            yield "jacobians", value.jacobians, partial(_lens_with, value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                part = getattr(value, field.name)
                if field.init and not isinstance(part, tlc.Trace):
                    rebuilt = partial(_dataclass_with, value, field.name)
                    yield field.name, part, rebuilt


@contextmanager
def _with_weight(
    module: nn.Module, parameter: nn.Parameter, change: Change
) -> Iterator[nn.Module]:
    # Of an embedding, the row of a token that prompts have.
    index = (3, 0) if parameter.shape[:1] == (100,) else (0,) * parameter.ndim
    original = parameter.data[index].item()
    parameter.data[index] = change(original)
    try:
        yield module
    finally:
        parameter.data[index] = original


@contextmanager
def _with_entry(
    copied: Callable[[], Any], index: tuple[int, ...], change: Change
) -> Iterator[Any]:
    changed = copied()
    changed[index] = change(changed[index].item())
    yield changed


@contextmanager
def _with_part(place: Place, rebuilt: Rebuilt, change: Change) -> Iterator[Any]:
    with place.changed(change) as part:
        yield rebuilt(part)


def _trace_with(trace: tlc.Trace, residual: Tensor) -> tlc.Trace:
    """Return a trace of another stream, whose blocks were called on it."""
    blocks = []
    for layer, block in enumerate(trace.blocks):
        before, after = residual[layer : layer + 2]
        changed = not torch.equal(
            residual[layer : layer + 2], trace.residual[layer : layer + 2]
        )
        if changed:
            block = dataclasses.replace(block, X=before, step=after - before)
        blocks.append(block)
    return dataclasses.replace(trace, residual=residual, blocks=tuple(blocks))


def _dataset_with(data: xarray.Dataset, key: Any, values: np.ndarray) -> xarray.Dataset:
    return data.assign({key: (data[key].dims, values, data[key].attrs)})


def _frame_with(table: pandas.DataFrame, key: str, values: Any) -> pandas.DataFrame:
    return table.assign(**{key: values})


def _mapping_with(mapping: Mapping[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    return {**mapping, key: value}


def _sequence_with(sequence: Any, i: int, value: Any) -> Any:
    entries = [*sequence[:i], value, *sequence[i + 1 :]]
    is_named = hasattr(sequence, "_fields")
    return type(sequence)(*entries) if is_named else type(sequence)(entries)


def _dataclass_with(value: Any, name: str, part: Any) -> Any:
    return dataclasses.replace(value, **{name: part})


def _lens_with(lens: Any, jacobians: Mapping[int, Tensor]) -> Any:
    return type(lens)(
        dict(jacobians),
        n_prompts=lens.n_prompts,
        d_model=lens.d_model,
        metadata=lens.metadata,
    )
