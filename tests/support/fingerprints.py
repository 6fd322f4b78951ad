"""What a value holds, to the bit: two values with equal fingerprints are the same."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import xarray
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.text import Text
from torch import Tensor, nn

# What differs from one run to the next: how long it took, and what it took.
_OF_THE_RUN = {"seconds", "peak_memory"}


def fingerprint(value: Any) -> Any:
    """Return nested tuples of plain values; of tensors and arrays, their bytes."""
    match value:
        case Tensor():
            plain = value.detach().cpu().resolve_conj().resolve_neg()
            entries = plain.reshape(-1).contiguous().view(dtype=torch_bytes())
            kind = (str(value.dtype), value.device.type, tuple(value.shape))
            return ("tensor", *kind, entries.numpy().tobytes())
        case np.ndarray() if value.dtype != object:
            return ("array", str(value.dtype), value.shape, value.tobytes())
        case np.ndarray():
            return ("array", value.shape, fingerprint(value.ravel().tolist()))
        case nn.Module():
            return ("module", fingerprint(dict(value.state_dict())))
        case xarray.Dataset() | xarray.DataArray():
            return ("xarray", *_of_dataset(value))
        case pandas.DataFrame():
            columns = {name: value[name].to_numpy() for name in value}
            return ("frame", fingerprint(columns), fingerprint(value.index.to_numpy()))
        case pandas.Series():
            return ("series", fingerprint(value.to_numpy()))
        case Axes() | Figure():
            return ("picture", *_of_picture(value))
        case Mapping():
            return tuple((str(key), fingerprint(value[key])) for key in value)
        case list() | tuple():
            return tuple(map(fingerprint, value))
        case set() | frozenset():
            return tuple(sorted(map(repr, value)))
        case str() | bytes() | int() | bool() | None:
            return value
        case float() | complex() | np.generic():
            return (type(value).__name__, repr(value))
        case Path():
            return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not what it keeps while it is measured, which is not given when it is made.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        entries = {name: getattr(value, name) for name in names}
        return (type(value).__name__, fingerprint(entries))
    return type(value).__name__


def torch_bytes() -> Any:
    """Return torch's dtype of bytes."""
    import torch

    return torch.uint8


def _of_dataset(data: Any) -> Iterator[Any]:
    if isinstance(data, xarray.DataArray):
        data = data.to_dataset(name="values", promote_attrs=True)
    for name, variable in sorted(data.variables.items(), key=str):
        if name not in _OF_THE_RUN:
            yield str(name), variable.dims, fingerprint(np.asarray(variable.values))
    yield fingerprint(dict(data.attrs))


def _of_picture(picture: Axes | Figure) -> Iterator[Any]:
    for artist in picture.findobj():
        match artist:
            case Line2D():
                yield fingerprint(np.asarray(artist.get_xydata(), float))
            case AxesImage():
                yield fingerprint(np.ma.filled(artist.get_array().astype(float), 0))
            case Collection():
                yield fingerprint(np.asarray(artist.get_offsets(), float))
                for path in artist.get_paths():
                    yield fingerprint(np.asarray(path.vertices, float))
            case Text():
                yield artist.get_text()
