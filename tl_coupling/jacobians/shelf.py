"""Where Jacobians are kept that are needed again: in memory, or in a file."""

import tempfile
import weakref
from contextlib import suppress
from typing import IO

import torch
from jaxtyping import Float
from torch import Tensor


class Shelf:
    """Matrices of one shape, put down in order: in memory, or in a temporary file.

    The file has no name where the system allows that (not on Windows): nothing of it is
    left, however this ends.
    """

    def __init__(
        self, n: int, like: Float[Tensor, "d d"], keeps_in_memory: bool
    ) -> None:
        self._held: Tensor | None = None
        self._file: IO[bytes] | None = None
        # Dtype and device, without the memory.
        self._like = like.new_empty(0)
        self._size = like.shape
        # Where there is no room after all, in the file.
        with suppress(MemoryError, torch.OutOfMemoryError):
            if keeps_in_memory:
                self._held = like.new_empty(n, *like.shape)
        if self._held is None:
            self._file = tempfile.TemporaryFile(prefix="tl_coupling_")  # noqa: SIM115 (it lives as long as the shelf)
            weakref.finalize(self, self._file.close)

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the matrices are in memory."""
        return self._held is not None

    def put(self, start: int, matrices: Float[Tensor, "n d d"]) -> None:
        """Put matrices down from an index on."""
        if self._held is not None:
            self._held[start : start + len(matrices)] = matrices
        else:
            assert self._file is not None
            self._file.seek(start * matrices[0].nbytes)
            # numpy's buffer is written without a copy.
            self._file.write(matrices.contiguous().cpu().numpy().data)

    def take(self, i: int) -> Float[Tensor, "d d"]:
        """Return the matrix at an index."""
        if self._held is not None:
            return self._held[i]
        assert self._file is not None
        matrix = torch.empty(self._size, dtype=self._like.dtype)
        self._file.seek(i * matrix.nbytes)
        self._file.readinto(matrix.numpy().data)  # type: ignore[attr-defined]
        return matrix.to(self._like.device)
