"""The tensors in the files of a checkpoint, as the files' headers describe them."""

import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_coupling.arguments import FLOAT_DTYPES

# The dtypes by safetensors' names; names that torch has no dtype for are kept.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class FileTensor(NamedTuple):
    """A tensor in a file, which is not read."""

    file: str
    name: str
    dtype: torch.dtype | str
    shape: tuple[int, ...]

    @property
    def holds_numbers(self) -> bool:
        """Whether its entries are numbers in floating point, of 16 bits or more."""
        return self.dtype in FLOAT_DTYPES.values()

    @property
    def holds_whole_numbers(self) -> bool:
        """Whether its entries are integers, or true and false."""
        if isinstance(self.dtype, str):
            return False
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def dtype_name(self) -> str:
        """Its dtype as torch calls it, or as the file does."""
        return str(self.dtype).removeprefix("torch.")

    def read(self) -> Tensor:
        """Return the tensor: as a map of the file, or dequantised."""
        if _is_safetensors(self.file):
            from safetensors import safe_open

            with safe_open(self.file, "pt") as file:
                return file.get_tensor(self.name)
        if _is_gguf(self.file):
            return _dequantized(self.file, self.name)
        return _unpickled(self.file, "cpu")[self.name]


def tensors_in(files: Iterable[str]) -> Iterator[FileTensor]:
    """Yield the tensors of safetensors files and of pickles; those of other files are
    not known here.

    Cost: headers are read, and no weights.
    """
    for file in files:
        if _is_safetensors(file):
            yield from _safetensors(file)
        elif not _is_gguf(file):
            yield from _pickled(file)


def _is_safetensors(file: str) -> bool:
    return file.endswith(".safetensors")


def _is_gguf(file: str) -> bool:
    return file.lower().endswith(".gguf")


def _dequantized(path: str, name: str) -> Tensor:
    from gguf import GGUFReader, dequantize

    tensor = next(t for t in GGUFReader(path).tensors if t.name == name)
    weight = dequantize(tensor.data, tensor.tensor_type)
    # Numbers that are not quantised are the file's own memory, which cannot be written.
    return torch.from_numpy(weight if weight.flags.writeable else weight.copy())


def _safetensors(path: str) -> Iterator[FileTensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dictionary)
            described = file.get_slice(name)
            code = described.get_dtype()
            shape = tuple(described.get_shape())
            yield FileTensor(path, name, _DTYPES.get(code, code), shape)


def _pickled(path: str) -> Iterator[FileTensor]:
    for name, tensor in _unpickled(path, "meta").items():
        # Training may leave the number of its step there.
        if isinstance(tensor, Tensor):
            yield FileTensor(path, name, tensor.dtype, tuple(tensor.shape))


def _unpickled(path: str, device: str) -> dict[str, Any]:
    # Maps are of the present format of torch, which is a zip.
    is_mapped = zipfile.is_zipfile(path)
    content = torch.load(path, map_location=device, mmap=is_mapped, weights_only=True)
    return content if isinstance(content, dict) else {}
