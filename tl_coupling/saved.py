"""Results as netCDF files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from tl_coupling.arguments import AnyPath, checked
from tl_coupling.files import write_atomically

if TYPE_CHECKING:
    import xarray

_Result = TypeVar("_Result", bound="Saved")


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """A result that can be saved as netCDF and loaded again.

    `DIMS` names the dimensions of its tensors and tuples.
    """

    DIMS: ClassVar[Mapping[str, str]] = {}

    def to_dataset(self) -> "xarray.Dataset":
        """Return the result as an `xarray.Dataset`.

        Whatever is not an array is an attribute (the provenance as JSON).
        """
        import xarray

        arrays: dict[str, tuple[list[str], np.ndarray]] = {}
        coords: dict[str, tuple[list[str], list[object]]] = {}
        attrs: dict[str, object] = {"result": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            dims = self.DIMS.get(field.name, "").split()
            if isinstance(value, Tensor):
                arrays[field.name] = (dims, value.detach().cpu().numpy())
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
        """Write the result as netCDF, whole or not at all."""
        return write_atomically(
            path,
            lambda unfinished: self.to_dataset().to_netcdf(
                unfinished, engine="netcdf4"
            ),
        )

    @classmethod
    def load(cls: type[_Result], path: AnyPath) -> _Result:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a result of this class, or damaged.
        """
        return _load(path, cls)


@checked
def _load(path: AnyPath, result_class: Any) -> Any:
    """Return a result of a class, or of one below it, from a file."""
    import xarray

    try:
        dataset = xarray.load_dataset(path, engine="netcdf4")
        return _from_dataset(dataset, result_class)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not a file that `{result_class.__name__}.save` wrote, "
            "or is damaged"
        ) from error


def _from_dataset(dataset: "xarray.Dataset", result_class: type[_Result]) -> _Result:
    """Return the result whose `to_dataset` this is, checked by its own class."""
    classes = {
        loadable.__name__: loadable
        for loadable in (result_class, *result_class.__subclasses__())
    }
    saved_class = classes[dataset.attrs.get("result", result_class.__name__)]
    stored = dataset.attrs | {
        str(name): array.values for name, array in dataset.variables.items()
    }
    stored["provenance"] = json.loads(stored["provenance"])
    values = {}
    for field in fields(saved_class):
        name = field.name if field.name in stored else _name_of_coordinate(field.name)
        values[field.name] = bool(stored[name]) if field.type is bool else stored[name]
    return saved_class(**values)


def _name_of_coordinate(field_name: str) -> str:
    """Return what the names along a dimension are called: `row_layers`, `row_layer`."""
    return field_name.removesuffix("s")
