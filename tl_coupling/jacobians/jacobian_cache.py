"""Jacobians that are needed again: where they are kept, and those that several
measurements of one trace ask for, computed once.
"""

import copy
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Path, Trace
from tl_coupling.jacobians.budget import fits_in_memory
from tl_coupling.jacobians.connections import AnyFunction, Connection

# What `BlockFunction.jacobians` gives: matrices, and the way to them.
Matrices = tuple[Sequence[Tensor], Path]
# Layer, t1 and t2.
_Ends = tuple[int, int, int]


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


class JacobianCache:
    """The Jacobians of one trace that will be asked for again, once they are computed.

    They are in memory, or in a temporary file where they do not fit, as long as the
    cache.

    Rounding depends on which Jacobians are computed together. So those are the same
    that are of the same group: a layer, input positions and an output position.
    """

    def __init__(self) -> None:
        self._asked_again: set[_Ends] = set()
        self._shelves: dict[object, tuple[Shelf, Path]] = {}

    def expect(self, connections: Iterable[Connection]) -> None:
        """Keep the Jacobians of these connections from when they are computed."""
        self._asked_again.update(map(_ends, connections))

    def holds(
        self,
        groups: Iterable[Sequence[Connection]],
        chunk_size: int | None,
        function: AnyFunction,
    ) -> bool:
        """Say whether the Jacobians of all these groups are there."""
        return all(
            _key(group, chunk_size, function) in self._shelves for group in groups
        )

    def get(
        self,
        group: Sequence[Connection],
        chunk_size: int | None,
        function: AnyFunction,
        trace: Trace,
        compute: Callable[[], Matrices],
    ) -> Matrices:
        """Return the Jacobians of a group, computed unless they are there."""
        key = _key(group, chunk_size, function)
        if key in self._shelves:
            shelf, path = self._shelves[key]
            return [shelf.take(i) for i in range(len(group))], path
        matrices, path = compute()
        # A group of which one Jacobian is asked for again alone would round otherwise.
        if self._asked_again.issuperset(map(_ends, group)):
            # As if all that are expected were there: later ones must fit as well.
            n_bytes = len(self._asked_again) * matrices[0].nbytes
            block = trace.blocks[group[0].layer].call.module
            shelf = Shelf(len(group), matrices[0], fits_in_memory(n_bytes, block))
            shelf.put(0, torch.stack(list(matrices)))
            self._shelves[key] = shelf, path
        return matrices, path


def _key(
    group: Sequence[Connection], chunk_size: int | None, function: AnyFunction
) -> object:
    """Return what a group of connections with one output is kept by."""
    # Chunks of another size round otherwise.
    return (*map(_ends, group), chunk_size, function)


def cache_of(trace: Trace) -> JacobianCache | None:
    """Return the cache of a trace, if it has one."""
    cache = trace.jacobian_cache
    return cache if isinstance(cache, JacobianCache) else None


def caching_trace(trace: Trace, connections: Iterable[Connection]) -> Trace:
    """Return a trace of which each of these Jacobians is computed once, however often
    it is asked for.

    A trace that has a cache keeps them in it.
    """
    cache = cache_of(trace)
    if cache is None:
        cache = JacobianCache()
        # The caller's own trace keeps nothing: the cache goes with this copy.
        trace = copy.copy(trace)
        object.__setattr__(trace, "jacobian_cache", cache)
    cache.expect(connections)
    return trace


def _ends(connection: Connection) -> _Ends:
    return connection.layer, connection.input_position, connection.output_position
