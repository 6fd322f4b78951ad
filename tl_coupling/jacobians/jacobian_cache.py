"""Jacobians that are needed again: where they are kept, and those that several
measurements of one trace ask for, computed once.
"""

import copy
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks import Path, Trace
from tl_coupling.jacobians.budget import fits_in_memory
from tl_coupling.jacobians.connections import AnyFunction, Connection


class StoredMatrices:
    """Matrices of one shape, each with a number: in memory, or in a temporary file.

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
            self._file = tempfile.TemporaryFile(prefix="tl_coupling_")  # noqa: SIM115 (it lives as long as the object)
            weakref.finalize(self, self._file.close)

    def put(self, i: int, matrix: Float[Tensor, "d d"]) -> None:
        """Store the i-th matrix."""
        if self._held is not None:
            self._held[i] = matrix
        else:
            assert self._file is not None
            self._file.seek(i * matrix.nbytes)
            # numpy's buffer is written without a copy.
            self._file.write(matrix.contiguous().cpu().numpy().data)

    def __getitem__(self, i: int) -> Float[Tensor, "d d"]:
        """Return the i-th matrix."""
        if self._held is not None:
            return self._held[i]
        assert self._file is not None
        matrix = torch.empty(self._size, dtype=self._like.dtype)
        self._file.seek(i * matrix.nbytes)
        self._file.readinto(matrix.numpy().data)  # type: ignore[attr-defined]
        return matrix.to(self._like.device)


class Group(NamedTuple):
    """Jacobians that are computed together: of one layer and one output position.

    They round by which they are, and by the size of the chunks.
    """

    connections: tuple[Connection, ...]
    chunk_size: int | None
    function: AnyFunction


@dataclass(frozen=True, eq=False)
class JacobianCache:
    """The Jacobians of one trace that will be asked for again, once they are computed.

    They are in memory, or in a temporary file where they do not fit, as long as the
    cache. One that expects nothing keeps nothing.

    Attributes:
        expected: the connections that will be asked for again.
        kept: the Jacobians of each group that was computed, and the way to them.
    """

    expected: set[Connection] = field(default_factory=set)
    kept: dict[Group, tuple[StoredMatrices, Path]] = field(default_factory=dict)

    def keep(
        self, group: Group, matrices: Iterable[Tensor], path: Path, block: nn.Module
    ) -> None:
        """Keep the Jacobians of a group of a block, if all of them are expected."""
        # Part of a group would round otherwise when it is asked for alone.
        if not self.expected.issuperset(group.connections):
            return
        J = list(matrices)
        # As if all that are expected were there: later ones must fit as well.
        n_bytes = len(self.expected) * J[0].nbytes
        stored = StoredMatrices(len(J), J[0], fits_in_memory(n_bytes, block))
        for i, matrix in enumerate(J):
            stored.put(i, matrix)
        self.kept[group] = stored, path


def caching_trace(trace: Trace, connections: Iterable[Connection]) -> Trace:
    """Return a trace of which each of these Jacobians is computed once, however often
    it is asked for.

    A trace that has a cache keeps them in it.
    """
    if trace.jacobian_cache is None:
        # The caller's own trace keeps nothing: the cache goes with this copy.
        trace = copy.copy(trace)
        object.__setattr__(trace, "jacobian_cache", JacobianCache())
    trace.jacobian_cache.expected.update(connections)
    return trace
