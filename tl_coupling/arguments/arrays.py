"""Tensors and arrays as arguments: their dtype, their shape, and sizes in common."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor

from tl_coupling.arguments.argument import Argument, Kind, Size, Sizes, WrongType
from tl_coupling.arguments.words import counted, format_shape


class _Axis(NamedTuple):
    """One name in a shape, read off its marks.

    Of jaxtyping's marks, `*` stands for any number of axes, and `#` for axes that may
    be 1 or missing, as in broadcasting.
    """

    name: str
    is_variadic: bool
    broadcasts: bool

    @classmethod
    def read(cls, dim: str) -> "_Axis":
        """Return the axis that jaxtyping writes as `dim`."""
        return cls(dim.strip("*#"), "*" in dim, "#" in dim)

    @property
    def shown(self) -> str:
        """The axis in an error message."""
        return "…" if self.is_variadic else self.name.replace("_plus_1", "+1")


class ArrayKind(Kind):
    """A tensor or an array of some dtypes, with named axes."""

    def __init__(self, annotation: type[AbstractArray]) -> None:
        self.is_tensor = annotation.array_type is Tensor
        self.dtypes = annotation.dtypes
        self.axes = [_Axis.read(dim) for dim in annotation.dim_str.split()]

    def take(self, argument: Argument) -> Tensor | np.ndarray:
        """Return a tensor or array of the wanted kind, and note the sizes of its axes.

        numpy arrays become tensors where these are wanted; lists and whole numbers
        become arrays of floating-point numbers where those are.
        """
        value = argument.value
        array = _tensor(value) if self.is_tensor else _array(value)
        if str(array.dtype).removeprefix("torch.") not in self.dtypes:
            is_real = isinstance(value, Tensor) and not value.is_complex()
            # Whole numbers or booleans in place of floating-point ones: what to do is
            # clear.
            if self.is_tensor and self._is_floating and is_real:
                raise WrongType("convert it with `.float()` or `.double()`")
            raise WrongType
        argument.sizes.update(self._sizes(list(array.shape), argument))
        return array

    def _sizes(self, shape: list[int], argument: Argument) -> Sizes:
        """Return the known sizes and those of this shape.

        Raises ValueError where an axis has another size than in an earlier argument.
        """
        # How many axes the variadic name stands for, if there is one.
        n_spread = len(shape) - len(self.axes) + 1
        has_variadic = any(axis.is_variadic for axis in self.axes)
        if n_spread < 0 or (n_spread != 1 and not has_variadic):
            raise ValueError(
                f"must have shape {self._shape}, got {format_shape(shape)}"
            )
        # A copy: a shape that does not fit must leave no sizes behind.
        sizes = dict(argument.sizes)
        start = 0
        for axis in self.axes:
            n_axes = n_spread if axis.is_variadic else 1
            lengths = shape[start : start + n_axes]
            start += n_axes
            # The first argument that names an axis sets its size.
            size = sizes.setdefault(axis.name, Size(lengths, argument.name))
            fits = lengths == size.lengths or (
                axis.broadcasts and _broadcasts(lengths, size.lengths)
            )
            if not fits:
                source = ""
                if size.source != argument.name:
                    source = f" with {_sizes_in_words(axis, size)}"
                raise ValueError(
                    f"must have shape {self._shape}{source}, got {format_shape(shape)}"
                )
        return sizes

    def words(self, several: bool = False) -> str:
        """Return as in "a floating-point torch tensor [n k]"."""
        content = ""
        if self._is_floating:
            content = "floating-point "
        elif "int32" in self.dtypes:
            content = "integer "
        noun = "torch tensor" if self.is_tensor else "array"
        return counted(f"{content}{noun}", f" {self._shape}", several)

    @property
    def _is_floating(self) -> bool:
        return "float32" in self.dtypes

    @property
    def _shape(self) -> str:
        return format_shape(axis.shown for axis in self.axes)


def _array(value: object) -> np.ndarray:
    """Return a value as an array of numpy, in which whole numbers are floating-point."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise WrongType from None
    # A list such as [1, 2] means numbers, of whatever kind.
    return array.astype(float) if array.dtype.kind in "iu" else array


def _tensor(value: object) -> Tensor:
    """Return a tensor as it is, and a numpy array as a tensor if torch has its dtype."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise WrongType
    # torch has neither texts nor objects, nor numbers of more than 64 bits.
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise WrongType
    # A copy: torch refuses arrays that are read-only, reversed or in foreign byte
    # order.
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")).copy())


def _broadcasts(lengths: list[int], target: list[int]) -> bool:
    """Say whether axes of these lengths broadcast to axes of the target's."""
    # The last axes correspond.
    pairs = zip(reversed(lengths), reversed(target), strict=False)
    return len(lengths) <= len(target) and all(
        length in (1, target_length) for length, target_length in pairs
    )


def _sizes_in_words(axis: _Axis, size: Size) -> str:
    """Return as in "n = 3 as in `x`"."""
    lengths = format_shape(size.lengths) if axis.is_variadic else size.lengths[0]
    return f"{axis.name} = {lengths} as in `{size.source}`"
