"""Results as netCDF files, each with a digest of what it holds."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from tl_coupling.arguments import AnyPath, checked
from tl_coupling.files import write_atomically
from tl_coupling.results.short_tables import ShortTable, first_rows

if TYPE_CHECKING:
    import pandas
    import xarray

_Result = TypeVar("_Result", bound="Saved")
# Columns that say in every row what the title of a short table says once.
_NAMED_IN_TITLE = ["model", "prompt"]
# The attribute of a file that says what its content was; earlier versions wrote none.
_DIGEST = "digest"
# Errors that xarray, netCDF and the results themselves raise where bytes were changed.
_DAMAGE_ERRORS = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """A result that can be saved as netCDF and loaded again.

    `DIMS` names the dimensions of its tensors, and then of the tuples that name what is
    along one of them.
    """

    DIMS: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise unless tuples name as many as there are along their dimensions."""
        named: dict[str, tuple[str, int]] = {}
        for name, dims in self.DIMS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, Tensor):
                for dim, size in zip(dims.split(), value.shape, strict=True):
                    named.setdefault(dim, (name, size))
            elif dims in named and named[dims][1] != len(value):
                tensor, size = named[dims]
                raise ValueError(
                    f"`{name}` must name the {size} {dims}s of `{tensor}`, "
                    f"got {len(value)}"
                )

    def __repr__(self) -> str:
        model = vars(self)["provenance"].get("model")
        return f"{type(self).__name__}({model!r}, {self._summary()})"

    def _summary(self) -> str:
        """Return what a result shows of itself: its size, and a number or two."""
        raise NotImplementedError

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a table of all that the result holds."""
        raise NotImplementedError

    def table(self) -> ShortTable:
        """Return a short table to read, which a notebook shows.

        Where a result has no better one it is of the first rows of `to_dataframe`.
        """
        columns = self.to_dataframe().drop(columns=_NAMED_IN_TITLE, errors="ignore")
        return first_rows(repr(self), columns.to_dict("list"))

    def _small_picture(self) -> str:
        """Return a small picture as HTML, which a notebook shows below the table.

        Most results have none.
        """
        return ""

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + self._small_picture()

    def to_dataset(self) -> "xarray.Dataset":
        """Return the result as an `xarray.Dataset`.

        Whatever is not an array is an attribute (the provenance as JSON). A result
        inside this one has its arrays beside those of this one, and the rest in an
        attribute of its name, as JSON.
        """
        import xarray

        arrays: dict[str, object] = {}
        coords: dict[str, object] = {}
        attrs: dict[str, object] = {"result": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            dims = self.DIMS.get(field.name, "").split()
            if value is None:
                # netCDF has no None: what is not in the file was not measured.
                continue
            if isinstance(value, Saved):
                part = value.to_dataset()
                arrays |= {str(name): array for name, array in part.data_vars.items()}
                coords |= {str(name): array for name, array in part.coords.items()}
                attrs[field.name] = json.dumps(_settings(value))
            elif isinstance(value, Tensor):
                arrays[field.name] = (dims, _as_array(value))
            elif dims:
                coords[_name_of_coordinate(field.name)] = (dims, list(value))
            elif isinstance(value, dict):
                attrs[field.name] = json.dumps(value)
            elif isinstance(value, bool):
                # netCDF has no truth values.
                attrs[field.name] = int(value)
            else:
                attrs[field.name] = value
        return xarray.Dataset(arrays, coords, attrs)

    @checked
    def save(self, path: AnyPath) -> Path:
        """Write the result as netCDF, whole or not at all.

        The attribute `digest` is of everything else in the file, so that `load` knows
        whether it was changed.
        """
        dataset = self.to_dataset()
        dataset.attrs[_DIGEST] = _digest_of(dataset)
        return write_atomically(
            path,
            lambda unfinished: dataset.to_netcdf(unfinished, engine="netcdf4"),
        )

    @classmethod
    def load(cls: type[_Result], path: AnyPath) -> _Result:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a result of this class, is damaged, or was changed
                since.
        """
        return _load(path, cls.__name__, lambda dataset: _from_dataset(dataset, cls))


@checked
def _load(
    path: AnyPath, class_name: str, from_dataset: Callable[..., _Result]
) -> _Result:
    """Return what `from_dataset` makes of a file, if it is as it was saved.

    Files without a digest, of earlier versions, are taken as they are.
    """
    import xarray

    try:
        dataset = xarray.load_dataset(path, engine="netcdf4")
        digest = dataset.attrs.pop(_DIGEST, None)
        # Popped before, as it is not a part of what it is the digest of.
        if digest is None or digest == _digest_of(dataset):
            return from_dataset(dataset)
    except FileNotFoundError:
        raise
    except _DAMAGE_ERRORS as error:
        raise ValueError(
            f"{path} is not a file that `{class_name}.save` wrote, or is damaged"
        ) from error
    raise ValueError(
        f"{path} was changed after `{class_name}.save` wrote it: what it holds does not "
        "have its digest; take another copy, or measure again (edited on purpose: remove "
        f"its attribute `{_DIGEST}`)"
    )


def _digest_of(dataset: "xarray.Dataset") -> str:
    """Return the SHA-256 of all names, axes, values and attributes.

    It is the same before a dataset is written and after it is read: of numbers, their
    widths do not count, of texts, what comes behind a NUL, where netCDF cuts them.
    """
    content = hashlib.sha256()
    for name in sorted(map(str, dataset.variables)):
        variable = dataset.variables[name]
        axes = [name, list(map(str, variable.dims)), list(variable.shape)]
        # With names and shapes: values alone would be the same for a transposed array.
        content.update(json.dumps(axes).encode())
        content.update(_bytes_of(np.asarray(variable.values)))
    attributes = {
        str(name): _plain_values(np.asarray(value))
        for name, value in dataset.attrs.items()
    }
    content.update(json.dumps(attributes, sort_keys=True).encode())
    return content.hexdigest()


def _bytes_of(values: np.ndarray) -> bytes:
    """Return values as bytes: numbers in 64 bits, others as JSON."""
    if values.dtype.kind in "biu":
        return values.astype("<i8").tobytes()
    if values.dtype.kind == "f":
        numbers = values.astype("<f8")
        # Reading may give another of the many bit patterns of NaN.
        numbers[np.isnan(numbers)] = np.nan
        return numbers.tobytes()
    return json.dumps(_plain_values(values)).encode()


def _plain_values(values: np.ndarray) -> list[object]:
    """Return values as Python's own: netCDF gives a list of one back as its item."""
    return [
        value.partition("\0")[0] if isinstance(value, str) else value
        for value in values.ravel().tolist()
    ]


def _as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array in a dtype that netCDF has."""
    tensor = tensor.detach().cpu()
    # netCDF has neither bfloat16 nor float16; float32 holds both exactly.
    is_short = tensor.element_size() < torch.float32.itemsize
    return (
        tensor.float() if tensor.is_floating_point() and is_short else tensor
    ).numpy()


def _from_dataset(dataset: "xarray.Dataset", result_class: type[_Result]) -> _Result:
    """Return the result whose `to_dataset` this is, checked by its own class."""
    classes = {
        loadable.__name__: loadable
        for loadable in (result_class, *result_class.__subclasses__())
    }
    # Files of earlier versions do not say which class they hold. A subclass may be
    # loaded by its parent, and no other class.
    saved_class = classes[dataset.attrs.get("result", result_class.__name__)]
    stored = dataset.attrs | {
        str(name): array.values for name, array in dataset.variables.items()
    }
    # Dictionaries were written as JSON.
    stored["provenance"] = json.loads(stored["provenance"])
    return _from_stored(stored, saved_class)


def _from_stored(stored: Mapping[str, Any], result_class: type[_Result]) -> _Result:
    """Return a result from what a file holds, by name; KeyError where it lacks a field."""
    values: dict[str, Any] = {}
    for field in fields(result_class):
        kinds = get_args(field.type)
        name = field.name if field.name in stored else _name_of_coordinate(field.name)
        if name not in stored and type(None) in kinds:
            values[field.name] = None
        elif kinds and isinstance(kinds[0], type) and issubclass(kinds[0], Saved):
            settings = json.loads(stored[name])
            # As a part is made: with the provenance of the whole, and its token.
            provenance = stored["provenance"] | {"position": settings["position"]}
            values[field.name] = _from_stored(
                {**stored, **settings, "provenance": provenance}, kinds[0]
            )
        elif get_origin(field.type) is tuple and np.ndim(stored[name]) == 0:
            # netCDF gives a list of one back as its item.
            values[field.name] = (stored[name],)
        else:
            values[field.name] = (
                bool(stored[name]) if field.type is bool else stored[name]
            )
    return result_class(**values)


def _settings(part: Saved) -> dict[str, object]:
    """Return what is no array of a result inside another, which has its provenance."""
    return {
        name: value
        for name, value in vars(part).items()
        if name != "provenance"
        and not isinstance(value, Tensor)
        and (value is not None or name not in part.DIMS)
    }


def _name_of_coordinate(field_name: str) -> str:
    """Return what the names along a dimension are called: `row_layers`, `row_layer`."""
    return field_name.removesuffix("s")
