"""Results as netCDF files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from tl_coupling.arguments import AnyPath, checked
from tl_coupling.files import write_atomically
from tl_coupling.measures import MEASURES

if TYPE_CHECKING:
    import xarray

_Result = TypeVar("_Result", bound="Saved")


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """A result that can be saved as netCDF and loaded again. `DIMS` names the
    dimensions of its tensors and tuples.
    """

    DIMS: ClassVar[Mapping[str, str]] = {}

    def to_dataset(self) -> "xarray.Dataset":
        """The result as an `xarray.Dataset`; whatever is not an array is an attribute
        (the provenance as JSON).
        """
        import xarray

        arrays: dict[str, Any] = {}
        coords: dict[str, Any] = {}
        attrs: dict[str, Any] = {"result": type(self).__name__}
        for one in fields(self):
            value, dims = getattr(self, one.name), self.DIMS.get(one.name, "").split()
            if isinstance(value, Tensor):
                arrays[one.name] = (dims, value.detach().cpu().numpy())
            elif dims:
                coords[one.name.removesuffix("s")] = (dims, list(value))
            else:
                attrs[one.name] = (
                    json.dumps(value) if isinstance(value, dict) else value
                )
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
def _load(path: AnyPath, wanted: Any) -> Any:
    import xarray

    try:
        data = xarray.load_dataset(path, engine="netcdf4")
        kinds = {kind.__name__: kind for kind in (wanted, *wanted.__subclasses__())}
        kind = kinds[data.attrs.get("result", wanted.__name__)]
        # Files of earlier versions hold the first of them.
        if (
            "measure" in data.coords
            and tuple(held := data["measure"].values) != MEASURES[: len(held)]
        ):
            raise ValueError("the measures are not those that were saved")
        stored = data.attrs | {
            name: array.values for name, array in data.variables.items()
        }
        stored["provenance"] = json.loads(stored["provenance"])
        names = [one.name for one in fields(kind)]
        return kind(
            **{
                name: stored[name if name in stored else name.removesuffix("s")]
                for name in names
            }
        )
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not a file that `{wanted.__name__}.save` wrote, or is damaged"
        ) from error
